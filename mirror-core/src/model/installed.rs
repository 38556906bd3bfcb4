//! The installed state of the kernel, in the terms of the model.
//!
//! Data only, like the rest of [`model`](super). The dataplane reads it back, `plan` compares it with the wanted state.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::verdict::Hook;

use super::{Ceilings, Device, IfIndex, MirrorId, Tap, Target, TargetName};
use crate::hidden::Hidden;

/// A program of ours, each for one tc hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Program {
    /// The tap at the hook where the device receives.
    TapIngress,
    /// The tap at the hook where the device sends.
    TapEgress,
    /// The second stage, where the mirror interface sends.
    Deliver,
}

impl Program {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::TapIngress, Self::TapEgress, Self::Deliver];
    /// The programs of a tap.
    pub const TAP: [Self; 2] = [Self::TapIngress, Self::TapEgress];

    /// The name in the eBPF object, in the kernel and of the pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TapIngress => "tap_ingress",
            Self::TapEgress => "tap_egress",
            Self::Deliver => "deliver",
        }
    }

    /// The hook that it is for.
    pub const fn hook(self) -> Hook {
        match self {
            Self::TapIngress => Hook::Ingress,
            Self::TapEgress | Self::Deliver => Hook::Egress,
        }
    }
}

/// The state of one tc hook of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookState {
    /// No program of ours.
    #[default]
    Absent,
    /// A pinned link of ours that other software has detached: no program of ours runs.
    Dead,
    /// A program of an earlier agent.
    Stale,
    /// The program of this agent.
    Current,
}

/// The installed objects of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActualTap {
    /// The map entry; `None`: hooks without an entry, which copy nothing.
    pub tap: Option<Tap>,
    /// The sessions that have ended, and the budget of each that is used up.
    pub ended: BTreeMap<MirrorId, Ended>,
    /// State of the hook where the device receives.
    pub ingress: HookState,
    /// State of the hook where the device sends.
    pub egress: HookState,
    /// The packets that our programs do not see at these hooks, and why.
    pub hidden: Vec<(Hook, Hidden)>,
}

impl ActualTap {
    /// Whether the device has no hook for one of the tap's programs, so that the program cannot be attached.
    pub fn lacks_hook(&self, program: Program) -> bool {
        self.hidden.contains(&(program.hook(), Hidden::NoHook))
    }

    /// State of the hook of one of the tap's programs.
    pub const fn state(&self, program: Program) -> HookState {
        match program.hook() {
            Hook::Ingress => self.ingress,
            Hook::Egress => self.egress,
        }
    }

    /// The same, to change it.
    pub const fn state_mut(&mut self, program: Program) -> &mut HookState {
        match program.hook() {
            Hook::Ingress => &mut self.ingress,
            Hook::Egress => &mut self.egress,
        }
    }
}

/// A budget that is used up: the session copies nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ended {
    /// The time.
    Duration,
    /// The packets.
    Packets,
    /// The bytes.
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

/// How much fits into the kernel's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Taps of the node.
    pub taps: usize,
    /// Sessions of the node, over all taps.
    pub sessions: usize,
    /// Different filters of the node.
    pub filters: usize,
}

/// The installed state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actual {
    /// The targets by name.
    pub targets: BTreeMap<TargetName, Target>,
    /// The limits of the node.
    pub ceilings: Ceilings,
    /// By device; devices with nothing of ours are not in it.
    pub taps: BTreeMap<Device, ActualTap>,
    /// The second stage, by the device that it runs at; never `Absent`.
    pub deliver: BTreeMap<IfIndex, HookState>,
    /// The devices at which copies may pass by the current second stage, and why. Nothing is cut there.
    pub passed_by: BTreeMap<IfIndex, Hidden>,
    /// The capacity of the tables.
    pub capacity: Capacity,
    /// The other versions of the agent whose taps may still run. Their hooks are `Stale`. The pods and targets of these
    /// taps are not known, because the maps of these versions are not read.
    pub other_versions: BTreeSet<u32>,
}

impl Actual {
    /// A node with nothing of ours, and tables of this size.
    pub fn empty(capacity: Capacity) -> Self {
        Self {
            targets: BTreeMap::new(),
            ceilings: Ceilings::default(),
            taps: BTreeMap::new(),
            deliver: BTreeMap::new(),
            passed_by: BTreeMap::new(),
            capacity,
            other_versions: BTreeSet::new(),
        }
    }
}
