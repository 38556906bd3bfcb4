//! The installed state of the kernel, in the terms of the model.
//!
//! Data only, like the rest of [`model`](super). The dataplane reads the state back, `plan` compares it with the wanted
//! state.

use std::{collections::BTreeMap, fmt};

use mirror_common::verdict::Hook;

use super::{Device, IfIndex, MirrorId, Tap, Target, TargetName};
use crate::settings::{CaptureFilter, Ceilings};

/// The tc programs of podmirror. Each one is for a single hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Program {
    /// The tap at the ingress hook of the tapped device.
    TapIngress,
    /// The tap at the egress hook of the tapped device.
    TapEgress,
    /// The second stage, at the egress hook of a target's device: cuts copies and addresses them for a tunnel.
    Deliver,
    /// The program of the relay hub, where copies arrive that leave pods through their relay devices.
    Hub,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 4] = [Self::TapIngress, Self::TapEgress, Self::Deliver, Self::Hub];
    /// The programs of a tap.
    pub const TAP: [Self; 2] = [Self::TapIngress, Self::TapEgress];

    /// Whether this is one of the programs of a tap.
    pub const fn is_tap(self) -> bool {
        matches!(self, Self::TapIngress | Self::TapEgress)
    }

    /// The name in the eBPF object, in the kernel and of the pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TapIngress => "tap_ingress",
            Self::TapEgress => "tap_egress",
            Self::Deliver => "deliver",
            Self::Hub => "hub",
        }
    }

    /// The hook that the program is for.
    pub const fn hook(self) -> Hook {
        match self {
            Self::TapIngress => Hook::Ingress,
            Self::TapEgress | Self::Deliver | Self::Hub => Hook::Egress,
        }
    }
}

/// The state of one tc hook of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookState {
    /// No podmirror program.
    #[default]
    Absent,
    /// The hook cannot be read, so whether a podmirror program runs there is unknown. An attempt to attach or detach
    /// returns the error.
    Unknown,
    /// A podmirror program should run here, but none does: other software detached it, or an agent was killed before it
    /// could attach.
    Dead,
    /// A program of an earlier agent, or what is left after this agent failed to attach.
    Stale,
    /// The program of this agent.
    Current,
}

/// The installed objects of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActualTap {
    /// The map entry. `None`: hooks without an entry, which copy nothing.
    pub tap: Option<Tap>,
    /// The sessions that have ended, and which budget of each is used up.
    pub ended: BTreeMap<MirrorId, Ended>,
    /// State of the hook where the device receives.
    pub ingress: HookState,
    /// State of the hook where the device sends.
    pub egress: HookState,
    /// The packets that podmirror's programs do not see at these hooks, and why.
    pub hidden: Vec<(Hook, Hidden)>,
}

impl ActualTap {
    /// Whether the device has no hook for one of the tap's programs, so that the program cannot be attached.
    pub fn lacks_hook(&self, program: Program) -> bool {
        self.hidden.contains(&(program.hook(), Hidden::NoHook))
    }

    /// Returns the state of the hook of one of the tap's programs.
    pub const fn state(&self, program: Program) -> HookState {
        match program.hook() {
            Hook::Ingress => self.ingress,
            Hook::Egress => self.egress,
        }
    }

    /// Mutable access to the same state as [`Self::state`].
    pub const fn state_mut(&mut self, program: Program) -> &mut HookState {
        match program.hook() {
            Hook::Ingress => &mut self.ingress,
            Hook::Egress => &mut self.egress,
        }
    }
}

/// Why the podmirror program at a hook misses packets, or can miss some.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hidden {
    /// The device has no such hook, so no packet is seen.
    NoHook,
    /// A filter of this kind and priority takes every packet, so no packet is seen.
    All(String, u16),
    /// Packets that match a filter of this kind and priority are not seen.
    Matching(String, u16),
    /// Packets that a program of this name redirects, drops or accepts for good are not seen. There may be none.
    Program(String),
    /// All packets are seen, but this program or filter is installed at the pod's relay device, where it can change
    /// copies.
    AtExit(String),
}

impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHook => write!(
                f,
                "the device has an ingress qdisc, which has no hook for packets that the device sends; \
                 a clsact qdisc has one"
            ),
            Self::All(kind, priority) => write!(
                f,
                "another filter ({kind} at priority {priority}) accepts every packet before podmirror's program"
            ),
            Self::Matching(kind, priority) => write!(
                f,
                "another filter ({kind} at priority {priority}) runs before podmirror's program: packets that it matches \
                 are not seen"
            ),
            // The program's id is left out: other software reloads its programs again and again, and each time the id
            // changes.
            Self::Program(name) => write!(
                f,
                "another program ({name:?}) runs before podmirror's program: packets that it redirects, drops or \
                 finally accepts are not seen"
            ),
            Self::AtExit(what) => write!(
                f,
                "a process of the pod has attached {what} to the device through which copies leave the pod: it can \
                 change them"
            ),
        }
    }
}

/// A used-up budget. The session makes no more copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ended {
    /// The time budget.
    Duration,
    /// The packet budget.
    Packets,
    /// The byte budget.
    Bytes,
}

impl Ended {
    /// The name of the budget, as in annotations and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Duration => "duration",
            Self::Packets => "packets",
            Self::Bytes => "bytes",
        }
    }
}

/// Capacity of the kernel's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Taps on the node.
    pub taps: usize,
    /// Sessions on the node, over all taps.
    pub sessions: usize,
    /// Different filters on the node.
    pub filters: usize,
    /// Instructions of all filter programs together.
    pub instructions: usize,
}

/// The installed state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actual {
    /// The targets by name.
    pub targets: BTreeMap<TargetName, Target>,
    /// The limits of the node.
    pub ceilings: Ceilings,
    /// The taps by device. Devices without any podmirror object are not included.
    pub taps: BTreeMap<Device, ActualTap>,
    /// State of the second stage, by the device where it runs. Never `Absent`.
    pub deliver: BTreeMap<IfIndex, HookState>,
    /// State of the relay hub's program, by the device where it runs. Never `Absent`.
    pub hubs: BTreeMap<IfIndex, HookState>,
    /// Devices where copies can bypass the current second stage, and why. Copies are not cut there.
    pub passed_by: BTreeMap<IfIndex, Hidden>,
    /// The capacity of the tables.
    pub capacity: Capacity,
    /// The filters whose programs the kernel rejects, and why.
    pub refused: BTreeMap<CaptureFilter, String>,
}

impl Actual {
    /// A node without podmirror objects, with tables of this capacity.
    pub fn empty(capacity: Capacity) -> Self {
        Self {
            targets: BTreeMap::new(),
            ceilings: Ceilings::default(),
            taps: BTreeMap::new(),
            deliver: BTreeMap::new(),
            hubs: BTreeMap::new(),
            passed_by: BTreeMap::new(),
            capacity,
            refused: BTreeMap::new(),
        }
    }
}
