//! Stories of the built agent on a node with pods: the actions of users, and their effects.
//!
//! Stories whose outcome can depend on the attach mode run once for each mode: those about hooks and other programs at
//! them, about which packets pass which hook, and about what an agent leaves behind. On kernels without TCX (older than
//! 6.6), the stories in the modules `tcx` do nothing. All other stories run once, with [`any_mode`].
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(clippy::print_stderr, reason = "tells which stories do not apply")]

use std::time::Duration;

use mirror_tests::{AttachMode, Capture, Frames, Lab, MIRROR, Mac, PodNs, eventually};

/// Makes a test of each story and each attach mode.
macro_rules! in_both_modes {
    ($($story:ident),+ $(,)?) => {
        mod tcx {
            $(#[test] fn $story() { crate::in_mode(mirror_tests::AttachMode::Tcx, super::$story) })+
        }
        mod clsact {
            $(#[test] fn $story() { crate::in_mode(mirror_tests::AttachMode::Clsact, super::$story) })+
        }
    };
}

mod admin;
mod annotations;
mod api_readers;
mod attaching;
mod bypass;
mod choice;
mod collectors;
mod commands;
mod complete;
mod coverage;
mod crashes;
mod devices;
mod far;
mod filters;
mod floods;
mod harness;
mod hidden;
mod intruders;
mod kinds;
mod limits;
mod mirror_iface;
mod mirrors;
mod neighbours;
mod nested;
mod netkit;
mod networks;
mod objects;
mod offloads;
mod order;
mod pairs;
mod pipes;
mod pod_side;
mod pods;
mod processes;
mod rampage;
mod readers;
mod recorders;
mod returns;
mod server;
mod services;
mod streams;
mod tails;
mod tunnels;
mod two_nodes;
mod underlays;
mod unreadable;
mod versions;
mod when_read;

fn in_mode(mode: AttachMode, story: fn(AttachMode)) {
    if mode.is_applicable() {
        story(mode);
    } else {
        eprintln!("not applicable: this kernel has no {}", mode.name());
    }
}

/// The attach mode for stories that do not depend on it.
fn any_mode() -> AttachMode {
    if AttachMode::Tcx.is_applicable() { AttachMode::Tcx } else { AttachMode::Clsact }
}

/// Prepares a pod that sends packets while the agent attaches to it.
///
/// The kernel drops packets to a device while the device gets its first clsact qdisc (`qdisc_graft()` takes every qdisc
/// of the device out of service for some milliseconds). So the device gets the qdisc before the story starts.
fn with_qdisc(lab: &Lab, pod: &PodNs, mode: AttachMode) {
    if mode == AttachMode::Clsact {
        lab.node().tc(&format!("qdisc add dev {} clsact", pod.veth_host()));
    }
}

/// Two pods and their node. The node is the last field, so it is dropped last.
struct Node {
    web: PodNs,
    db: PodNs,
    lab: Lab,
}

impl Node {
    fn bridged(story: &str) -> Self {
        let lab = Lab::new(story);
        lab.bridge("br0");
        Self { web: lab.pod("web", "br0"), db: lab.pod("db", "br0"), lab }
    }

    fn routed(story: &str) -> Self {
        let lab = Lab::new(story);
        Self { web: lab.routed_pod("web"), db: lab.routed_pod("db"), lab }
    }
}

/// A capture inside a pod.
struct Inside {
    capture: Capture,
    mac: Mac,
}

impl Inside {
    fn of(pod: &PodNs) -> Self {
        Self { capture: Capture::start(pod.netns(), "eth0"), mac: pod.eth0().mac }
    }

    /// The frames that the pod has sent, and those that it has received.
    fn frames(&self) -> (Frames, Frames) {
        split(self.mac, &self.capture.frames())
    }

    /// Ends the capture.
    fn stop(self) -> (Frames, Frames) {
        let Self { capture, mac } = self;
        split(mac, &capture.stop())
    }
}

/// The frames that come from `mac`, and all other frames.
fn split(mac: Mac, frames: &Frames) -> (Frames, Frames) {
    let sent = |frame: &[u8]| frame[6..12] == mac;
    (frames.only(sent), frames.only(|frame| !sent(frame)))
}

/// Waits until the mirror interface has shown exactly the `expected` frames, each once.
#[track_caller]
fn shows(mirror: &Capture, expected: impl Fn() -> Frames) {
    eventually(Duration::from_secs(20), || mirror.frames().same_as(&expected()));
}
