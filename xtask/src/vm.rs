//! `cargo xtask vm`: runs the levels prog and netns on Debian's stock kernels, in qemu.
//!
//! The level vm, which is part of `test --all`, runs on the oldest kernel the level prog and a few stories of netns for
//! everything that depends on the kernel, and on a newer kernel the stories of netkit. `test --all` runs these guests
//! beside the levels api and cluster. `cargo xtask vm` runs everything on any of the kernels. `cargo xtask vm --level
//! readers` runs that level, on kernels that have all tunnel types, and the module of Open vSwitch.
//!
//! The guest mounts this machine's file system, read-only, and runs test binaries that were built here. Nothing is
//! installed on the machine or in the guest. qemu emulates the CPU without KVM, so this also works in a virtual
//! machine, but times that are measured in the guest mean nothing. `debian` fetches the kernel and qemu, `guest` boots.

mod debian;
mod guest;

use std::{fmt::Write as _, path::Path};

use anyhow::Result;
use clap::ValueEnum;

use crate::{
    apt,
    arch::Arch,
    portable,
    process::{is_ci, step},
    programs, readers, tools,
    workspace::{self, AGENT},
};

/// The kernels, from the oldest supported one on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11.
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13.
    #[value(name = "6.12")]
    V6_12,
    /// The newest one for Debian 13, of its backports.
    #[value(name = "newest")]
    Newest,
}

impl Kernel {
    /// The beginning of the version (empty: any), and Debian's suite with this kernel.
    pub(crate) const fn properties(self) -> [&'static str; 2] {
        match self {
            Self::V5_10 => ["5.10", "bullseye-security"],
            Self::V6_1 => ["6.1", "bookworm-security"],
            Self::V6_12 => ["6.12", "trixie-security"],
            Self::Newest => ["", "trixie-backports"],
        }
    }
}

/// The kernels of the level vm: the oldest one, and one with netkit, which this machine's kernel may lack. Otherwise
/// this machine's kernel represents the newer ones.
const OLD: Kernel = Kernel::V5_10;
const NEW: Kernel = Kernel::V6_12;

/// The stories of the level vm, whose results depend on the kernel: hooks and other programs at them, every form of
/// packet, packets that come back, offloads and queues of devices, ring buffers, packet sockets, kinds of tunnels and
/// of NICs that a newer kernel may lack, IPVS. Each is the beginning of names. The way to attach is the one that an agent
/// chooses on the oldest kernel.
const STORIES: &str = include_str!("../vm/stories");

/// The command line of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct VmArgs {
    /// The kernel to boot.
    #[arg(long)]
    kernel: Kernel,
    /// The levels to run.
    #[arg(long = "level", value_name = "LEVEL", value_parser = ["prog", "netns", "readers"])]
    #[arg(default_values = ["prog", "netns"])]
    levels: Vec<String>,
    /// For the tests themselves: a filter, --nocapture, ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the levels on one kernel.
pub(crate) fn run(args: VmArgs) -> Result<()> {
    apt::can_unpack()?;
    let levels: Vec<_> = args.levels.iter().map(|level| (level.as_str(), &args.arguments[..])).collect();
    guest::boot(args.kernel, &script(&levels)?)
}

/// Runs the level vm: on both kernels what the arguments select, or the stories that depend on the kernel.
pub(crate) fn run_level(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        let script = script(&[("prog", arguments), ("netns", arguments)])?;
        return [OLD, NEW].into_iter().try_for_each(|kernel| guest::boot(kernel, &script));
    }
    let mut stories: Vec<_> = STORIES.lines().map(str::to_owned).collect();
    guest::boot(OLD, &script(&[("prog", &[]), ("netns", &stories)])?)?;
    stories.retain(|story| story.starts_with("netkit::"));
    guest::boot(NEW, &script(&[("netns", &stories)])?)
}

/// Runs the benchmark `switch`, on a kernel with TCX.
pub(crate) fn bench_switch() -> Result<()> {
    let (bench, agent, readers) =
        (workspace::benchmark("switch")?, workspace::release_agent()?, readers::bring()?);
    let mut script = beginning();
    export(&mut script, "MIRROR_AGENT", &agent)?;
    export(&mut script, readers::VARIABLE, &readers)?;
    guest::boot(Kernel::V6_12, &format!("{script}{}\n", quoted(&bench.to_string_lossy())))
}

/// The beginning of a script. It extends the deadlines, because emulation is slow, and levels beside it come first.
fn beginning() -> String {
    let mut script = String::from("set -e\nexport MIRROR_TEST_GUEST=1 MIRROR_TEST_SLOW=8\n");
    if is_ci() {
        script += "export CI=true\n";
    }
    script
}

/// Adds a variable with a path to a script.
fn export(script: &mut String, name: &str, path: &Path) -> Result<()> {
    Ok(writeln!(script, "export {name}={}", quoted(&path.to_string_lossy()))?)
}

/// Builds the tests here, and writes the shell script that runs them in the guest. Each level has arguments for its
/// tests.
fn script(levels: &[(&str, &[String])]) -> Result<String> {
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    step("building what the guest runs");
    let mut script = beginning();
    // The agent of the tests' image is optimised, and a fraction of the size: the emulator takes less time for it.
    let agents = portable::linux(&[AGENT], &[Arch::host()?], portable::TEST)?;
    export(&mut script, "MIRROR_AGENT", &agents[0])?;
    for (level, arguments) in levels {
        let test = workspace::tested(level, level)?;
        if *level != "prog" {
            programs::bring(&programs::CAPTURES)?;
            programs::bring(&programs::SERVICES)?;
        }
        if *level == "readers" {
            export(&mut script, readers::VARIABLE, &readers::bring()?)?;
            export(&mut script, "MIRROR_PLUGIN", &workspace::program("kubectl-mirror")?)?;
        }
        // One story at a time, because emulation is slow. The tests of the programs keep a CPU busy and hardly wait, so
        // two of them run at a time.
        let threads = if *level == "prog" { 2 } else { 1 };
        // Stories that this machine ignores run here, because the guests' kernels have what they need.
        let options = format!("--include-ignored --test-threads={threads} --color=never");
        let arguments: String = arguments.iter().map(|argument| format!(" {}", quoted(argument))).collect();
        let test = quoted(&test.to_string_lossy());
        write!(script, "echo '==> level {level}'\n{test} {options}{arguments}\n")?;
    }
    Ok(script)
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{STORIES, quoted};
    use crate::workspace;

    /// A story that was renamed but not here would be skipped without an error.
    #[test]
    fn the_stories_exist() -> std::io::Result<()> {
        for story in STORIES.lines() {
            let parts: Vec<_> = story.split("::").collect();
            let stories = workspace::root().join("tests/tests/netns");
            let inner = stories.join(format!("{}/{}.rs", parts[0], parts[1]));
            let outer = stories.join(format!("{}.rs", parts[0]));
            let module = fs::read_to_string(if inner.exists() { inner } else { outer })?;
            let name = parts.last().copied().unwrap_or_default();
            assert!(module.contains(&format!("fn {name}")), "{story}");
        }
        Ok(())
    }

    #[test]
    fn a_quoted_word_is_one_word() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
