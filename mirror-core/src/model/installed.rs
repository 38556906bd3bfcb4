//! The installed state of the kernel, in the terms of the model.
//!
//! Data only, like the rest of [`model`](super). The dataplane reads it back, `plan` compares it with the wanted state.

use std::{collections::BTreeMap, fmt};

use mirror_common::verdict::Hook;

use super::{Device, IfIndex, MirrorId, Tap, Target, TargetName};
use crate::settings::{CaptureFilter, Ceilings};

/// A program of ours, each for one tc hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Program {
    /// The tap at the hook where the device receives.
    TapIngress,
    /// The tap at the hook where the device sends.
    TapEgress,
    /// The second stage, where the mirror interface sends.
    Deliver,
    /// The hub, where the copies that leave pods by their exits arrive.
    Hub,
}

impl Program {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::TapIngress, Self::TapEgress, Self::Deliver, Self::Hub];
    /// The programs of a tap.
    pub const TAP: [Self; 2] = [Self::TapIngress, Self::TapEgress];

    /// Whether it is one of the programs of a tap.
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

    /// The hook that it is for.
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
    /// No program of ours.
    #[default]
    Absent,
    /// It cannot be read, so a program of ours runs there or none does. An attempt to attach or to detach returns the error.
    Unknown,
    /// A program of ours should be there, and none runs: other software has detached it, or an agent was killed before it
    /// could attach.
    Dead,
    /// A program of an earlier agent, or what is left where this agent could not attach.
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

/// Why our program at a hook does not see every packet, or may not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hidden {
    /// No packet is seen: there is no such hook.
    NoHook,
    /// No packet is seen: a filter of this kind and priority takes every packet.
    All(String, u16),
    /// The packets that a filter of this kind and priority matches are not seen.
    Matching(String, u16),
    /// The packets whose way a program of this name ends are not seen. There may be none.
    Program(String),
    /// All packets are seen, but this program or filter stands at the exit of the pod, where it can change the copies.
    AtExit(String),
}

impl Hidden {
    /// Whether nothing at all is seen, so that the direction is not mirrored.
    pub const fn is_everything(&self) -> bool {
        matches!(self, Self::NoHook | Self::All(..))
    }
}

impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHook => write!(
                f,
                "the device has an ingress qdisc, which has no hook for the packets that the device sends; \
                 a clsact qdisc in its place has one"
            ),
            Self::All(kind, priority) => write!(
                f,
                "another filter ({kind} at priority {priority}) takes every packet ahead of the mirror"
            ),
            Self::Matching(kind, priority) => write!(
                f,
                "another filter ({kind} at priority {priority}) is ahead of the mirror: packets that it matches \
                 are not seen"
            ),
            // Without the program's id: other software loads its programs again and again.
            Self::Program(name) => write!(
                f,
                "another program ({name:?}) is ahead of the mirror: packets that it redirects, drops or \
                 accepts for good are not seen"
            ),
            Self::AtExit(what) => write!(
                f,
                "a process of the pod has put {what} at the device by which the copies leave the pod: it can \
                 change them"
            ),
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
    /// Entries of taps of the node.
    pub taps: usize,
    /// Sessions of the node, over all taps.
    pub sessions: usize,
    /// Different filters of the node.
    pub filters: usize,
    /// Instructions of their programs together.
    pub instructions: usize,
}

/// A table that is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoRoom {
    /// The table of taps.
    Taps(usize),
    /// The table of sessions.
    Sessions(usize),
    /// The table of different filters.
    Filters(usize),
    /// The memory for the programs of filters, in instructions.
    Instructions(usize),
    /// The keys of a tunnel, of which each tap has its own.
    Keys(usize),
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taps(most) => write!(f, "this node has {most} taps, and no more fit"),
            Self::Sessions(most) => {
                write!(f, "this node has {most} sessions (mirrors of NICs), and no more fit")
            }
            Self::Filters(most) => write!(f, "this node has {most} different filters, and no more fit"),
            Self::Instructions(most) => {
                write!(
                    f,
                    "the filters of this node may have {most} instructions together, and this one's do not fit"
                )
            }
            Self::Keys(most) => {
                write!(f, "the target's tunnel has {most} keys, one for each NIC, and no more fit")
            }
        }
    }
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
    /// The program of the hub, by the device that it runs at; never `Absent`.
    pub hubs: BTreeMap<IfIndex, HookState>,
    /// The devices at which copies may pass by the current second stage, and why. Nothing is cut there.
    pub passed_by: BTreeMap<IfIndex, Hidden>,
    /// The capacity of the tables.
    pub capacity: Capacity,
    /// The filters whose programs the kernel refuses, and why.
    pub refused: BTreeMap<CaptureFilter, String>,
}

impl Actual {
    /// A node with nothing of ours, and tables of this size.
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
