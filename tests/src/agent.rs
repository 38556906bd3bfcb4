//! The built agent on a node of the test, and what it tells of itself.

use std::{
    collections::BTreeMap,
    env,
    io::{Read as _, Seek as _},
    ops::Deref,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use nix::sys::signal::Signal;
use serde::Deserialize;

use crate::{Lab, PodNs, PodsFile, eventually, kernel_is_at_least, process::Process};

/// How the agent attaches its programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// TCX links.
    Tcx,
    /// clsact filters.
    Clsact,
}

impl AttachMode {
    /// The word of the flag and of the status.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Whether the kernel has it: TCX came with 6.6.
    pub fn is_applicable(self) -> bool {
        self == Self::Clsact || kernel_is_at_least(6, 6)
    }
}

/// A running `mirror-agent run` or `mirror-agent attach`. Killed on drop; its log is shown if the test fails.
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

    /// Starts `mirror-agent attach` with interfaces and more arguments.
    pub fn attach(lab: &Lab, mode: AttachMode, arguments: &[&str]) -> Self {
        Self::start(lab, &[&["attach", "--attach", mode.name()][..], arguments].concat())
    }

    /// Starts any command that stays.
    pub fn start(lab: &Lab, arguments: &[&str]) -> Self {
        Self::with_environment(lab, arguments, &[])
    }

    /// As [`Agent::start`], with a log for people.
    pub fn readable(lab: &Lab, arguments: &[&str]) -> Self {
        Self { process: Process::start(&mut lab.agent(arguments)) }
    }

    /// As [`Agent::start`], with environment variables.
    pub fn with_environment(lab: &Lab, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = lab.agent(arguments);
        command.envs(variables.iter().copied()).args(["--log-format", "json"]);
        Self { process: Process::start(&mut command) }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until it has told of this many taps.
    #[track_caller]
    pub fn wait_for_taps(&self, taps: usize) {
        eventually(crate::SOON, || {
            let told = self.log_with(&["\"mirroring\""]).len();
            crate::check(told >= taps, || format!("{told} of {taps} taps: {:#?}", self.log()))
        });
    }

    /// Its log so far, a JSON object a line.
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
        eventually(crate::SOON, || {
            self.log_with(texts).pop().ok_or_else(|| format!("no log line with {texts:?}: {:#?}", self.log()))
        })
    }

    /// Asks it to stop (SIGTERM) and waits; it must end well.
    #[track_caller]
    pub fn stop(self) {
        self.end_well(Signal::SIGTERM);
    }

    /// Stops it as Ctrl-C does (SIGINT) and waits; it must end well.
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

    /// Kills it (SIGKILL), so that it can do nothing more.
    #[track_caller]
    pub fn kill(mut self) {
        assert!(self.process.ended().is_none(), "the agent has ended by itself: {:#?}", self.log());
        self.process.end(Signal::SIGKILL);
    }

    /// Waits for it to end by itself.
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
    /// The agent's binary with these arguments, on this node, with this node's `--bpffs` and no environment of the
    /// tests' own.
    pub fn agent(&self, arguments: &[&str]) -> Command {
        let mut command = self.node().command(binary());
        env::vars_os().for_each(|(name, _)| {
            if name.to_string_lossy().starts_with("MIRROR_") {
                command.env_remove(name);
            }
        });
        command.env("MIRROR_BPFFS", self.bpffs()).args(arguments);
        command
    }

    /// Runs a command of the agent to its end.
    #[track_caller]
    pub fn agent_exit(&self, arguments: &[&str]) -> Exit {
        // A file, not a pipe: nobody has to read it while the command runs.
        let mut stdout = tempfile::tempfile_in(self.files()).unwrap();
        let mut process = Process::start(self.agent(arguments).stdout(stdout.try_clone().unwrap()));
        let code = process.wait().code();
        let mut text = String::new();
        stdout.rewind().unwrap();
        stdout.read_to_string(&mut text).unwrap();
        Exit { code, stdout: text, stderr: process.lines().join("\n") }
    }

    /// `mirror-agent cleanup`, which must succeed.
    #[track_caller]
    pub fn cleanup(&self) {
        let exit = self.agent_exit(&["cleanup"]);
        assert_eq!(exit.code, Some(0), "{exit:?}");
    }

    /// `mirror-agent status -o json`, parsed.
    #[track_caller]
    pub fn status(&self) -> Status {
        self.try_status().unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Lab::status`]; an error as long as no agent has set anything up.
    fn try_status(&self) -> Result<Status, String> {
        let exit = self.agent_exit(&["status", "-o", "json"]);
        crate::check(exit.code == Some(0), || format!("{exit:?}"))?;
        Ok(serde_json::from_str(&exit.stdout).unwrap_or_else(|error| panic!("{error}: {}", exit.stdout)))
    }

    /// Waits until the status is as `condition` wants it, and returns it.
    #[track_caller]
    pub fn wait_status(&self, condition: impl Fn(&Status) -> Result<(), String>) -> Status {
        eventually(crate::SOON, || {
            let status = self.try_status()?;
            match condition(&status) {
                Ok(()) => Ok(status),
                Err(error) => Err(format!("{error}: {status:#?}")),
            }
        })
    }

    /// Waits until the taps are on the node's ends of `eth0` of exactly these pods, and the mirror interface is up.
    #[track_caller]
    pub fn wait_mirrored(&self, pods: &[&PodNs]) -> Status {
        let devices: Vec<&str> = pods.iter().map(|pod| pod.veth_host()).collect();
        self.wait_taps(&devices)
    }

    /// Waits until the taps are on exactly these devices, and the mirror interface is up.
    #[track_caller]
    pub fn wait_taps(&self, devices: &[&str]) -> Status {
        let mut expected = devices.to_vec();
        expected.sort_unstable();
        self.wait_status(|status| {
            let mut tapped: Vec<&str> = status.taps.iter().map(|tap| tap.device.as_str()).collect();
            tapped.sort_unstable();
            let attached = status.taps.iter().all(|tap| tap.attached.values().all(|mode| mode != "none"));
            crate::check(tapped == expected && attached && status.mirror().up, || {
                format!("not tapped: {expected:?}")
            })
        })
    }
}

/// The agent's binary: named by the environment variable `MIRROR_AGENT`, else the debug build.
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

/// `mirror-agent status -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// Version of the agent that answered.
    pub version: String,
    /// Whether an agent runs on this node.
    pub agent_running: bool,
    /// The targets.
    pub targets: Vec<Target>,
    /// The taps.
    pub taps: Vec<TapStatus>,
    /// What the running agent adds; `None`: none runs.
    pub notes: Option<serde_json::Value>,
}

impl Status {
    /// The target `default`: the mirror interface. Without a device as long as no agent has written it.
    pub fn mirror(&self) -> Target {
        self.target("default")
    }

    /// The target of this name; without a device as long as no agent has written it.
    pub fn target(&self, name: &str) -> Target {
        self.targets.iter().find(|target| target.name == name).cloned().unwrap_or_default()
    }

    /// The tap on a device.
    #[track_caller]
    pub fn tap(&self, device: &str) -> &TapStatus {
        let found = self.taps.iter().find(|tap| tap.device == device);
        found.unwrap_or_else(|| panic!("no tap on {device}: {self:#?}"))
    }
}

/// A target in the status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Name.
    pub name: String,
    /// Its mirror interface.
    pub device: String,
    /// ifindex; none if it does not exist.
    pub ifindex: Option<u32>,
    /// Up and with a carrier.
    pub up: bool,
}

/// A tap in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapStatus {
    /// ifindex of the tapped device.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// The pod that it is for.
    pub pod: Option<PodRef>,
    /// The NIC that it is for.
    pub nic: String,
    /// By hook: how the program is attached.
    pub attached: BTreeMap<String, String>,
    /// Its sessions.
    pub sessions: Vec<SessionStatus>,
}

impl TapStatus {
    /// The session of a mirror.
    #[track_caller]
    pub fn session(&self, mirror: &str) -> &SessionStatus {
        let found = self.sessions.iter().find(|session| session.mirror == mirror);
        found.unwrap_or_else(|| panic!("no mirror {mirror}: {self:#?}"))
    }
}

/// Most stories are about the one mirror of a pod that has no name.
impl Deref for TapStatus {
    type Target = SessionStatus;

    #[track_caller]
    fn deref(&self) -> &SessionStatus {
        self.session("default")
    }
}

/// A session in the status: one mirror at one tap.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionStatus {
    /// The mirror.
    pub mirror: String,
    /// Where its copies go.
    pub target: String,
    /// Where it was asked for.
    pub origin: String,
    /// Directions that are wanted.
    pub direction: String,
    /// What was asked for besides the direction, as JSON.
    pub settings: serde_json::Value,
    /// The budget that is used up.
    pub ended: Option<String>,
    /// What became of the packets; those that are zero are not there.
    pub counters: Vec<Counts>,
}

impl SessionStatus {
    /// Packets that left with this verdict in this direction.
    pub fn packets(&self, direction: &str, verdict: &str) -> u64 {
        self.counts(direction, verdict).map_or(0, |counts| counts.packets)
    }

    /// Bytes of the packets that left with this verdict in this direction.
    pub fn bytes(&self, direction: &str, verdict: &str) -> u64 {
        self.counts(direction, verdict).map_or(0, |counts| counts.bytes)
    }

    /// Packets of both directions with this verdict.
    pub fn total(&self, verdict: &str) -> u64 {
        self.packets("ingress", verdict) + self.packets("egress", verdict)
    }

    /// Packets of all directions and verdicts.
    pub fn seen(&self) -> u64 {
        self.counters.iter().map(|counts| counts.packets).sum()
    }

    /// The packets, as a map of "direction verdict": for comparing everything at once.
    pub fn verdicts(&self) -> BTreeMap<String, u64> {
        let key = |counts: &Counts| (format!("{} {}", counts.direction, counts.verdict), counts.packets);
        self.counters.iter().map(key).collect()
    }

    fn counts(&self, direction: &str, verdict: &str) -> Option<&Counts> {
        self.counters.iter().find(|counts| counts.direction == direction && counts.verdict == verdict)
    }
}

/// A pod in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodRef {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// A counter in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Seen from the pod.
    pub direction: String,
    /// The verdict's word.
    pub verdict: String,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
