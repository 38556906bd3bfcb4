//! Runs third-party programs that read copies: Suricata, softflowd, nfdump, Open vSwitch.
//!
//! They are Debian 13's, in a directory tree of their own, which `cargo xtask test --level readers` installs. They run
//! in it like in a container: in a network namespace and a mount namespace, with some directories of the test, and with
//! the rest read-only. There is no container runtime, no cgroup and no seccomp profile. tshark is this machine's, and
//! reads files: see `capture`.

use std::{
    env, fs,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use nix::sys::signal::Signal;

use crate::{Lab, Netns, SOON, check, eventually, process::Process};

/// Lines of a reader's output to print if the test fails.
const LINES: usize = 40;
/// The environment variable with the path of the tree.
const TREE: &str = "MIRROR_READERS";

/// Arguments: the tree, pairs of a directory of the test and its path in the tree, `--`, the program and its arguments.
const ENTER: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
tree=$1
shift
mount --bind "$tree" "$tree"
for dir in dev proc sys; do mount --rbind "/$dir" "$tree/$dir"; done
while [ "$1" != -- ]; do
    mkdir -p "$tree$2"
    mount --bind "$1" "$tree$2"
    shift 2
done
shift
mount -o remount,bind,ro "$tree"
exec chroot "$tree" "$@"
"#;

/// The command for a program of Debian 13 in `netns`. `mounts` are directories of the test and their paths for the
/// program.
#[track_caller]
pub(crate) fn contained(netns: &Netns, mounts: &[(PathBuf, String)], words: &[&str]) -> Command {
    let tree = env::var_os(TREE).expect("`cargo xtask test --level readers` sets MIRROR_READERS");
    let mut command = netns.command("unshare");
    command.args(["--mount", "sh", "-euc", ENTER, "sh"]).arg(tree);
    for (from, to) in mounts {
        command.arg(from).arg(to);
    }
    command.arg("--").args(words);
    command
}

/// A program that runs until it is stopped. It is killed on drop, and its output is printed if the test fails.
#[derive(Debug)]
pub struct Reader {
    process: Process,
    output: PathBuf,
}

impl Reader {
    /// Starts a program. Its output goes to a file of this name.
    #[track_caller]
    pub fn start(lab: &Lab, name: &str, command: Command) -> Self {
        Self::fed_by(lab, name, command, Stdio::null())
    }

    /// The same, with this standard input.
    #[track_caller]
    pub fn fed_by(lab: &Lab, name: &str, mut command: Command, stdin: impl Into<Stdio>) -> Self {
        let output = lab.files().join(format!("{name}.output"));
        command.stdout(fs::File::create(&output).unwrap());
        Self { process: Process::fed_by(&mut command, stdin), output }
    }

    /// Its standard output and standard error so far.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.output).unwrap() + &self.process.lines().join("\n")
    }

    /// Waits until the output contains this text.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        eventually(SOON, || {
            assert!(self.process.ended().is_none(), "it has ended without '{text}': {}", self.said());
            check(self.said().contains(text), || format!("no '{text}': {}", self.said()))
        });
    }

    /// Sends a signal and waits for the end. The program must exit with 0 or by that signal. Returns the output.
    #[track_caller]
    pub fn stop(mut self, signal: Signal) -> String {
        assert!(self.process.ended().is_none(), "it has ended by itself: {}", self.said());
        let status = self.process.end(signal);
        assert!(status.success() || status.signal() == Some(signal as i32), "{status}: {}", self.said());
        self.said()
    }

    /// Waits until the program ends by itself, with 0. Returns the output.
    #[track_caller]
    pub fn wait(mut self) -> String {
        let status = self.process.wait();
        assert!(status.success(), "{status}: {}", self.said());
        self.said()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = self.said();
            let lines: Vec<_> = said.lines().collect();
            let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
            eprintln!("said by the reader (pid {}), at the end:\n{end}", self.process.pid());
        }
    }
}

impl Lab {
    /// The command for a program of Debian 13 that root starts in `netns`. It finds the files of the test at
    /// `/run/story`. `/tmp` is the same directory, for programs that need it.
    #[track_caller]
    pub fn reader(&self, netns: &Netns, words: &[&str]) -> Command {
        let mounts = ["/run/story", "/tmp"].map(|path| (self.files().to_owned(), path.to_owned()));
        contained(netns, &mounts, words)
    }
}
