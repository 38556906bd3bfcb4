//! Runs the built agent on a node of the test, and reads its log.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{Read as _, Seek as _},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    Lab, PodNs, PodSpec, PodsFile, SOON, Status, check, eventually, kernel_is_at_least, process::Process,
};

/// How the agent attaches its programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// TCX links.
    Tcx,
    /// clsact filters.
    Clsact,
}

impl AttachMode {
    /// Name of the mode in the flag and in the status.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Whether the kernel supports the mode. TCX came with Linux 6.6.
    pub fn is_applicable(self) -> bool {
        self == Self::Clsact || kernel_is_at_least(6, 6)
    }
}

/// A running `mirror-agent run` or `mirror-agent attach`. It is killed on drop; its log is printed if the test fails.
#[derive(Debug)]
pub struct Agent {
    process: Process,
}

impl Agent {
    /// Starts `mirror-agent run` with a pods file and more arguments.
    pub fn run(lab: &Lab, mode: AttachMode, pods: &PodsFile, arguments: &[&str]) -> Self {
        let words = ["run", "--pods-from", pods.path(), "--attach", mode.name()];
        Self::start(lab, &[&words[..], arguments].concat())
    }

    /// As [`Agent::run_until`], with these pods.
    #[track_caller]
    pub fn mirroring(
        lab: &Lab,
        mode: AttachMode,
        pods: &[PodSpec],
        arguments: &[&str],
        mirrored: &[&PodNs],
    ) -> Self {
        Self::run_until(lab, mode, &PodsFile::new(lab, pods), arguments, mirrored)
    }

    /// As [`Agent::run`]. Waits until exactly `mirrored` have a tap.
    #[track_caller]
    pub fn run_until(
        lab: &Lab,
        mode: AttachMode,
        pods: &PodsFile,
        arguments: &[&str],
        mirrored: &[&PodNs],
    ) -> Self {
        let agent = Self::run(lab, mode, pods, arguments);
        lab.wait_mirrored(mirrored);
        agent
    }

    /// Starts `mirror-agent attach` with interfaces and more arguments.
    pub fn attach(lab: &Lab, mode: AttachMode, arguments: &[&str]) -> Self {
        Self::start(lab, &[&["attach", "--attach", mode.name()][..], arguments].concat())
    }

    /// Starts any agent command that runs until it is stopped.
    pub fn start(lab: &Lab, arguments: &[&str]) -> Self {
        Self::with_environment(lab, arguments, &[])
    }

    /// As [`Agent::start`], with the log as text instead of JSON.
    pub fn readable(lab: &Lab, arguments: &[&str]) -> Self {
        Self { process: Process::start(&mut lab.agent(arguments)) }
    }

    /// As [`Agent::start`], with environment variables.
    pub fn with_environment(lab: &Lab, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = lab.agent(arguments);
        command.envs(variables.iter().copied()).args(["--log-format", "json"]);
        Self { process: Process::start(&mut command) }
    }

    /// As [`Agent::run`], through a program that takes the agent's command line after its own arguments.
    pub fn run_by(runner: &[&str], lab: &Lab, mode: AttachMode, pods: &PodsFile, arguments: &[&str]) -> Self {
        let words = ["run", "--pods-from", pods.path(), "--attach", mode.name(), "--log-format", "json"];
        Self { process: Process::start(&mut lab.agent_by(runner, &[&words[..], arguments].concat())) }
    }

    /// Whether the agent has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.ended().is_some()
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until the log says that the agent has this many taps.
    #[track_caller]
    pub fn wait_for_taps(&self, taps: usize) {
        eventually(SOON, || {
            let told = self.log_with(&["\"mirroring\""]).len();
            check(told >= taps, || format!("{told} of {taps} taps: {:#?}", self.log()))
        });
    }

    /// The log so far, one JSON object per line.
    pub fn log(&self) -> Vec<String> {
        self.process.lines()
    }

    /// The log lines that contain all of these texts.
    pub fn log_with(&self, texts: &[&str]) -> Vec<String> {
        self.log().into_iter().filter(|line| texts.iter().all(|text| line.contains(text))).collect()
    }

    /// Waits for a log line that contains all of these texts.
    #[track_caller]
    pub fn wait_for_log(&self, texts: &[&str]) -> String {
        eventually(SOON, || {
            self.log_with(texts).pop().ok_or_else(|| format!("no log line with {texts:?}: {:#?}", self.log()))
        })
    }

    /// Applies a change while the agent is stopped, so that the agent sees either the state before or the state after.
    #[track_caller]
    pub fn meanwhile_paused(&self, change: impl FnOnce()) {
        self.process.pause();
        change();
        self.process.go_on();
    }

    /// Sends SIGTERM and waits for the end. The agent must exit without an error.
    #[track_caller]
    pub fn stop(self) {
        self.end_well(Signal::SIGTERM);
    }

    /// Sends SIGINT, as Ctrl-C does, and waits for the end. The agent must exit without an error.
    #[track_caller]
    pub fn interrupt(self) {
        self.end_well(Signal::SIGINT);
    }

    #[track_caller]
    fn end_well(mut self, signal: Signal) {
        assert!(self.process.ended().is_none(), "the agent has ended by itself: {:#?}", self.log());
        let status = self.process.end(signal);
        assert_eq!(status.code(), Some(0), "{:#?}", self.log());
    }

    /// Sends SIGTERM, if the agent has not ended, and waits for the end.
    #[track_caller]
    pub fn end(mut self) -> ExitStatus {
        self.process.end(Signal::SIGTERM)
    }

    /// Kills the agent by SIGKILL, so that it cannot clean up.
    #[track_caller]
    pub fn kill(mut self) {
        assert!(self.process.ended().is_none(), "the agent has ended by itself: {:#?}", self.log());
        self.process.end(Signal::SIGKILL);
    }

    /// Waits until no thread of the agent loads programs, which begins half a minute after its start. Loading takes a
    /// descriptor at its end.
    #[track_caller]
    pub fn wait_until_loaded(&self) {
        eventually(3 * SOON, || {
            let threads = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten();
            let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
            let loads = names.map(|name| name.trim().to_owned()).any(|name| name == "next-programs");
            check(!loads, || "programs are being loaded".to_owned())
        });
    }

    /// Waits until the agent ends by itself.
    #[track_caller]
    pub fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the agent (pid {}):", self.process.pid());
            self.log().iter().for_each(|line| eprintln!("  {line}"));
        }
    }
}

/// How a command of the agent ended.
#[derive(Debug)]
pub struct Exit {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Lab {
    /// The command for the agent's binary with these arguments, on this node, with this node's `--bpffs` and without
    /// the environment of the tests.
    pub fn agent(&self, arguments: &[&str]) -> Command {
        self.agent_by(&[], arguments)
    }

    /// As [`Lab::agent`], through a program that takes the agent's command line after its own arguments.
    pub fn agent_by(&self, runner: &[&str], arguments: &[&str]) -> Command {
        let words: Vec<_> = runner.iter().map(OsString::from).chain([binary().into()]).collect();
        let mut command = self.node().command(&words[0]);
        command.args(&words[1..]);
        env::vars_os().for_each(|(name, _)| {
            if name.to_string_lossy().starts_with("PODMIRROR_") {
                command.env_remove(name);
            }
        });
        command.env("PODMIRROR_BPFFS", self.bpffs()).args(arguments);
        command
    }

    /// Runs a command of the agent, and waits for its end.
    #[track_caller]
    pub fn agent_exit(&self, arguments: &[&str]) -> Exit {
        // A file, not a pipe: nothing has to read it while the command runs.
        let mut stdout = tempfile::tempfile_in(self.files()).unwrap();
        let mut process = Process::start(self.agent(arguments).stdout(stdout.try_clone().unwrap()));
        let code = process.wait().code();
        let mut text = String::new();
        stdout.rewind().unwrap();
        stdout.read_to_string(&mut text).unwrap();
        Exit { code, stdout: text, stderr: process.lines().join("\n") }
    }

    /// `mirror-agent cleanup`, which must succeed and leave no pin.
    #[track_caller]
    pub fn cleanup(&self) {
        let exit = self.agent_exit(&["cleanup"]);
        assert_eq!(exit.code, Some(0), "{exit:?}");
        let ours = self.bpffs().join("podmirror");
        let left: Vec<_> = self.pins().into_iter().filter(|pin| pin.starts_with(&ours)).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// `mirror-agent status -o json`, parsed.
    #[track_caller]
    pub fn status(&self) -> Status {
        self.try_status().unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Lab::status`]. An error if no agent has set anything up yet.
    pub fn try_status(&self) -> Result<Status, String> {
        let mut status = self.status_value()?;
        // Coverage depends on time and on NIC counters, so it would differ between two statuses of the same state.
        status["notes"].as_object_mut().map(|notes| notes.remove("coverage"));
        serde_json::from_value(status.clone()).map_err(|error| panic!("{error}: {status}"))
    }

    /// The coverage of each tapped NIC, from `mirror-agent status -o json`. An error without an agent.
    pub fn coverage(&self) -> Result<Vec<Value>, String> {
        let status = self.status_value()?;
        let coverage = status["notes"]["coverage"].as_array();
        coverage.cloned().ok_or_else(|| format!("no agent: {status}"))
    }

    fn status_value(&self) -> Result<Value, String> {
        let exit = self.agent_exit(&["status", "-o", "json"]);
        check(exit.code == Some(0), || format!("{exit:?}"))?;
        Ok(serde_json::from_str(&exit.stdout).unwrap_or_else(|error| panic!("{error}: {}", exit.stdout)))
    }

    /// Waits until `condition` accepts the status, and returns the status.
    #[track_caller]
    pub fn wait_status(&self, condition: impl Fn(&Status) -> Result<(), String>) -> Status {
        eventually(SOON, || {
            let status = self.try_status()?;
            match condition(&status) {
                Ok(()) => Ok(status),
                Err(error) => Err(format!("{error}: {status:#?}")),
            }
        })
    }

    /// Waits until exactly these pods have a tap on the node side of `eth0`, and the mirror interface is up.
    #[track_caller]
    pub fn wait_mirrored(&self, pods: &[&PodNs]) -> Status {
        let devices: Vec<&str> = pods.iter().map(|pod| pod.veth_host()).collect();
        self.wait_taps(&devices)
    }

    /// Waits until exactly these devices have a tap, and the mirror interface is up.
    #[track_caller]
    pub fn wait_taps(&self, devices: &[&str]) -> Status {
        let mut expected = devices.to_vec();
        expected.sort_unstable();
        self.wait_status(|status| {
            let mut tapped: Vec<&str> = status.taps.iter().map(|tap| tap.device.as_str()).collect();
            tapped.sort_unstable();
            let attached = status.taps.iter().all(crate::TapStatus::is_attached);
            check(tapped == expected && attached && status.mirror().up, || {
                format!("not tapped: {expected:?}")
            })
        })
    }
}

/// The agent's binary: the path in the environment variable `MIRROR_AGENT`, else the debug build.
fn binary() -> PathBuf {
    let named = env::var_os("MIRROR_AGENT").map(PathBuf::from);
    let path =
        named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/mirror-agent"));
    assert!(
        path.exists(),
        "no agent at {}: `cargo build -p mirror-agent`, or set MIRROR_AGENT",
        path.display()
    );
    path
}
