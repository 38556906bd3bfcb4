//! The harness of the tests that need a kernel: a private node with pods on it, the agent, and captures.
//!
//! ```text
//! Lab ─ a node: network namespace, bpffs directory, files   PodNs ─ a pod on it: namespace, NICs, addresses
//! Agent ─ the built binary on the node, and its status      Capture ─ tcpdump on a device, parsed
//! Api ─ a real API server, with a Lab as one of its nodes   Comparison ─ a pod's packets and the mirrored ones
//! LaggingApi ─ another one, which answers with old objects
//! Reader ─ a third-party program that reads copies          Recipe ─ a container of docs/recipes.md
//! Cluster ─ a real Kubernetes node, with the agent on it    KubePod ─ a pod of it
//! ```
//!
//! Veths, tcpdump and the agent are real. Each test has its own node, so tests run in parallel and never touch the
//! host's network. (The node of a cluster is this machine, so its stories run one after the other.) Everything is
//! removed on drop, also if the test fails. The harness panics instead of returning errors: a step that cannot be done
//! fails the test. Only `tests/` calls it.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]
#![expect(clippy::print_stderr, reason = "the log of a failed test")]

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

mod agent;
mod api;
mod audit;
mod bpf;
mod capture;
mod cilium;
mod cluster;
mod comparison;
mod container;
mod cpu;
pub mod filters;
mod frame;
mod frame_socket;
mod http;
mod kinds;
mod kube_pod;
mod kubectl;
mod lab;
mod lagging;
mod netkit;
mod netns;
mod order;
mod pod;
mod pods_file;
mod process;
mod proxy;
pub mod random;
mod reader;
mod recipe;
mod relay;
mod status;
mod switch;
mod tail;
mod tap_device;
mod terminal;
mod tls;
mod traffic;
mod usage;
mod wire;
mod wireshark;

pub use agent::{Agent, AttachMode, Exit};
pub use api::Api;
pub use audit::{audited, wait_audited};
pub use bpf::{BpfObjects, Neighbour, programs_in};
pub use capture::{Capture, Captured, Frames};
pub use cilium::{EDGE, Settings};
pub use cluster::{AGENT, Cluster, PATIENCE};
pub use comparison::Comparison;
pub use container::Container;
pub use cpu::OneCpu;
pub use frame::{Frame, Mac};
pub use frame_socket::{FrameSocket, super_frame};
pub use http::{Answer, LISTEN, Metrics, lint_metrics};
pub use kinds::has_kind;
pub use kube_pod::{KubePod, list, pod_object};
pub use kubectl::Kubectl;
pub use lab::Lab;
pub use lagging::LaggingApi;
pub use netkit::Shortcut;
pub use netns::{Netns, as_nobody};
pub use order::{segments, steps_back};
pub use pod::{Nic, PodNs};
pub use pods_file::{PodSpec, PodsFile};
pub use proxy::Proxy;
pub use reader::Reader;
pub use recipe::Recipe;
pub use relay::{Relay, Way};
pub use status::{Counts, PodRef, PodSide, SessionStatus, Status, TapStatus, Target};
pub use switch::Switch;
pub use tail::{FilePacket, PacketFile, PipedTail, Tail};
pub use tap_device::TapDevice;
pub use terminal::Terminal;
pub use tls::served_certificate;
pub use traffic::{Conversation, Flood, Pinging, while_pinging, while_talking};
pub use usage::{cpu_time, memory};
pub use wireshark::{dissected, wireshark_finds_nothing_wrong};

/// The default mirror interface.
pub const MIRROR: &str = "mirror0";
/// Timeout for an action that an idle machine does at once. A machine that is busy with other tests can need half a
/// minute.
pub const SOON: Duration = Duration::from_secs(30);

/// `duration` times the factor in the environment variable `MIRROR_TEST_SLOW`, which is set for an emulated machine.
pub fn scaled(duration: Duration) -> Duration {
    static FACTOR: OnceLock<f64> = OnceLock::new();
    let factor = *FACTOR.get_or_init(|| match std::env::var("MIRROR_TEST_SLOW") {
        Ok(text) => text.parse().expect("MIRROR_TEST_SLOW is a factor, for example 10"),
        Err(_) => 1.0,
    });
    duration.mul_f64(factor)
}

/// Set by [`interrupt`].
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes every wait panic, after Ctrl-C. The panic drops the objects of the test, which removes them from the machine.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Waits until `condition` is `Ok`, and panics with its last error when `deadline` (scaled) has passed.
#[track_caller]
pub fn eventually<T>(deadline: Duration, mut condition: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    let deadline = scaled(deadline);
    loop {
        match condition() {
            Ok(value) => return value,
            Err(_) if INTERRUPTED.load(Ordering::Relaxed) && !std::thread::panicking() => {
                panic!("interrupted")
            }
            Err(error) if begun.elapsed() > deadline => panic!("not within {deadline:?}: {error}"),
            Err(_) => std::thread::sleep(pause_after(begun.elapsed())),
        }
    }
}

/// The pause between two evaluations of a condition. An evaluation can start a program, which takes CPU time from the
/// awaited work, so the pause grows with the wait.
fn pause_after(waited: Duration) -> Duration {
    (waited / 4).clamp(Duration::from_millis(5), Duration::from_millis(100))
}

/// Returns `Ok` if `holds`, else the message. For [`eventually`].
pub fn check(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

/// Whether the running kernel is at least `major.minor`.
pub fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = nix::sys::utsname::uname().unwrap().release().to_str().unwrap().to_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}
