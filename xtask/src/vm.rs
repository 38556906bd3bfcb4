//! `cargo xtask vm`: runs the levels prog and netns on Debian's stock kernels, in qemu.
//!
//! The level vm, which is part of `test --all`, leaves out the stories about commands, files, annotations and reports,
//! which use little of the kernel, and those about decisions that the level prog tests. The level vm-whole and `cargo
//! xtask vm` leave out nothing. `cargo xtask vm --level readers` runs that level, on kernels that have all kinds of
//! tunnels, and the module of Open vSwitch.
//!
//! The guest mounts this machine's file system, read-only, and runs test binaries that were built here. Nothing is
//! installed on the machine or in the guest. qemu emulates the CPU without KVM, so this also works in a virtual
//! machine, but no time that is measured in the guest is meaningful. `debian` fetches the kernel and qemu, `guest`
//! boots.

mod debian;
mod guest;

use std::fmt::Write as _;

use anyhow::Result;
use clap::ValueEnum;

use crate::{
    apt,
    process::{is_ci, step},
    programs, readers,
    test::Level,
    tools,
    workspace::{self, Tested},
};

/// The kernels: the oldest supported kernel, with clsact, and a kernel with TCX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11.
    #[value(name = "5.10")]
    V5_10,
    /// Debian 13.
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// Its series.
    pub(crate) const fn series(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_12 => "6.12",
        }
    }

    /// The module of the stories that attach as an agent does by itself on this kernel.
    const fn way(self) -> &'static str {
        match self {
            Self::V5_10 => "::clsact::",
            Self::V6_12 => "::tcx::",
        }
    }

    /// Debian's suite that has it.
    pub(crate) const fn suite(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye-security",
            Self::V6_12 => "trixie-security",
        }
    }
}

/// The modules whose stories the kernel decides: about hooks and the programs of others there, the kinds of tunnels, and
/// the queues and offloads of devices.
const OF_THE_KERNEL: [&str; 7] =
    ["attaching", "hidden", "kinds", "neighbours", "offloads", "order", "versions"];

/// The modules of which the stories about the data path are the kernel's too: every form of packet, packets that come
/// back, filters that are replaced, ring buffers. The other stories about the data path differ in what the tap programs
/// decide, and the level prog tests that on every kernel.
const DATA_PATH: [&str; 4] = ["complete", "filters", "returns", "tails"];

/// The command line of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct VmArgs {
    /// The kernel to boot.
    #[arg(long)]
    kernel: Kernel,
    /// The levels to run [default: prog and netns].
    #[arg(long = "level", value_name = "LEVEL", value_parser = ["prog", "netns", "readers"])]
    levels: Vec<String>,
    /// Run a shell command instead of tests.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["levels", "arguments"])]
    exec: Option<String>,
    /// For the tests themselves: a filter, --nocapture, ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the levels, or the shell command, on one kernel.
pub(crate) fn run(args: VmArgs) -> Result<()> {
    let VmArgs { kernel, levels, exec, arguments } = args;
    apt::can_unpack()?;
    if let Some(command) = exec {
        return guest::boot(kernel, &format!("{command}\n"));
    }
    let levels = if levels.is_empty() { vec!["prog".to_owned(), "netns".to_owned()] } else { levels };
    let chosen = |level: &Level| levels.iter().any(|name| name == level.name());
    let levels: Vec<_> = [Level::Prog, Level::Netns, Level::Readers].into_iter().filter(chosen).collect();
    let levels: Vec<_> = levels.into_iter().map(|level| (level, &arguments[..])).collect();
    guest::boot(kernel, &script(&levels)?)
}

/// Whether the kernels are in the cache.
pub(crate) fn has_kernels() -> bool {
    let has =
        |kernel: &Kernel| debian::dir().is_ok_and(|dir| dir.join(kernel.series()).join("vmlinuz").exists());
    Kernel::value_variants().iter().all(has)
}

/// Runs both levels on every kernel, with all their tests.
pub(crate) fn run_whole(arguments: &[String]) -> Result<()> {
    let script = script(&[(Level::Prog, arguments), (Level::Netns, arguments)])?;
    Kernel::value_variants().iter().try_for_each(|kernel| guest::boot(*kernel, &script))
}

/// Runs both levels on every kernel, with the stories that depend on the kernel.
pub(crate) fn run_short() -> Result<()> {
    for kernel in Kernel::value_variants() {
        let whole = OF_THE_KERNEL.iter().map(|module| format!("{module}::"));
        let data_path = DATA_PATH.iter().map(|module| format!("{module}{}", kernel.way()));
        let stories: Vec<_> = whole.chain(data_path).collect();
        guest::boot(*kernel, &script(&[(Level::Prog, &[]), (Level::Netns, &stories)])?)?;
    }
    Ok(())
}

/// Builds the tests here, and writes the shell script that runs them there. Each level has arguments for its tests.
fn script(levels: &[(Level, &[String])]) -> Result<String> {
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    step("building what the guest runs");
    // Emulation is slow: deadlines that allow for it, and one story at a time. A test of the programs keeps one CPU busy
    // and waits for little, so two of them run at a time.
    let mut script = String::from("set -e\nexport MIRROR_TEST_GUEST=1 MIRROR_TEST_SLOW=5\n");
    if is_ci() {
        script += "export CI=true\n";
    }
    for (level, arguments) in levels {
        let Tested { test, agent } = workspace::tested(level.name())?;
        writeln!(script, "export MIRROR_AGENT={}", quoted(&agent.to_string_lossy()))?;
        if *level == Level::Readers {
            programs::bring(&programs::CAPTURES)?;
            writeln!(
                script,
                "export {}={}",
                readers::VARIABLE,
                quoted(&readers::bring()?.to_string_lossy())
            )?;
        }
        writeln!(script, "echo '==> level {}'", level.name())?;
        let threads = if *level == Level::Prog { 2 } else { 1 };
        write!(script, "{} --test-threads={threads} --color=never", quoted(&test.to_string_lossy()))?;
        for argument in *arguments {
            write!(script, " {}", quoted(argument))?;
        }
        script.push('\n');
    }
    Ok(script)
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::{DATA_PATH, OF_THE_KERNEL, quoted};
    use crate::workspace;

    /// A module that is named here and has another name now would be left out without an error.
    #[test]
    fn the_modules_of_the_kernels_stories_exist() {
        let stories = workspace::root().join("tests/tests/netns");
        for module in OF_THE_KERNEL.iter().chain(&DATA_PATH) {
            assert!(stories.join(format!("{module}.rs")).is_file(), "{module}");
        }
    }

    #[test]
    fn a_quoted_word_is_one_word() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
