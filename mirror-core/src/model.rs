//! The words of the design as types: pods, links, taps, what is wanted, what is installed.
//!
//! Data only. Nothing here decides (`select` and `plan` do) or touches the system (the edges do).

mod links;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    sync::Arc,
};

use mirror_common::{
    limit::Limits,
    verdict::{Direction, Hook},
};

pub use self::links::{ALIAS, Link, LinkChange, LinkKind, LinkSnapshot, Offloads, Peer, PodLinks};
use crate::{hidden::Hidden, settings::Settings};

/// Index of a network device in the node's network namespace; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfIndex(pub u32);

impl fmt::Display for IfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identity of a network namespace: device and inode of its file under `/proc` or `/run/netns` (namespaces(7)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsId {
    /// Device number of the namespace file system.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
}

/// What identifies a pod, and what people call it.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId {
    /// `metadata.uid`: tells a re-created pod from its predecessor.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod as a source tells of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    /// Who it is.
    pub id: PodId,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
    /// The annotations of its namespace, for what its own do not say.
    pub inherited: Arc<BTreeMap<String, String>>,
    /// `spec.hostNetwork`: it has no NIC of its own.
    pub host_network: bool,
    /// Path of its network namespace, where the source knows it.
    pub netns: Option<PathBuf>,
}

/// A set of directions, seen from the pod or, without a pod, from the tapped interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Directions {
    /// What reaches it.
    Ingress,
    /// What leaves it.
    Egress,
    /// Both.
    #[default]
    Both,
}

impl Directions {
    /// As in [`Session::directions`](mirror_common::abi::Session::directions).
    pub const fn bits(self) -> u32 {
        match self {
            Self::Ingress => Direction::Ingress.bit(),
            Self::Egress => Direction::Egress.bit(),
            Self::Both => Direction::Ingress.bit() | Direction::Egress.bit(),
        }
    }

    /// The inverse of [`Self::bits`]; `None` for anything that it cannot give.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match bits {
            1 => Some(Self::Ingress),
            2 => Some(Self::Egress),
            3 => Some(Self::Both),
            _ => None,
        }
    }

    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ingress, Self::Egress, Self::Both];

    /// The inverse of [`Self::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|directions| directions.name() == name)
    }

    /// The word of the annotation and of `--direction`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Both => "both",
        }
    }
}

/// Who a tap is for. Two taps at the same ifindex with different owners are different taps: an ifindex is used
/// again, a pod's sandbox is made anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The pod; `None`: an interface that was named by itself.
    pub pod: Option<PodId>,
    /// The pod's network namespace; zeros without a pod.
    pub netns: NetnsId,
    /// The NIC's name inside the pod, or the interface's own.
    pub nic: String,
    /// The tapped device's name on the node.
    pub device: String,
}

/// A tap that is wanted. There is one session in it now; the wire format has room for four.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// Who it is for.
    pub owner: Owner,
    /// The directions that its session copies.
    pub directions: Directions,
    /// What its session does with the packets of those.
    pub settings: Settings,
}

impl Tap {
    /// Whether the tapped device is the host end of the NIC's veth, and not the interface itself.
    pub fn at_peer(&self) -> bool {
        self.owner.pod.is_some()
    }
}

/// Where copies go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// Name of the mirror interface.
    pub name: String,
    /// Its index; `None`: it does not exist now.
    pub ifindex: Option<IfIndex>,
    /// It is up and has a carrier.
    pub up: bool,
    /// It has no queue.
    pub queueless: bool,
    /// What all sessions together may copy to it; zeros: any amount.
    pub limits: Limits,
}

/// What should be installed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    /// The one target.
    pub target: Target,
    /// Taps by the device that is tapped.
    pub taps: BTreeMap<IfIndex, Tap>,
}

impl Desired {
    /// Where the second stage must run: at the mirror interface, while some session wants its copies cut.
    pub fn deliver(&self) -> Option<IfIndex> {
        let is_needed = self.taps.values().any(|tap| tap.settings.snaplen.is_some());
        self.target.ifindex.filter(|_| is_needed)
    }
}

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
    /// Those of a tap.
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

/// What stands at one tc hook of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookState {
    /// Nothing of ours.
    Absent,
    /// A program of an earlier agent.
    Stale,
    /// The program of this agent.
    Current,
}

/// What is installed for one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActualTap {
    /// The map entry; `None`: hooks without an entry, which copy nothing.
    pub tap: Option<Tap>,
    /// The budget that is used up, if one is.
    pub ended: Option<Ended>,
    /// State of the hook where the device receives.
    pub ingress: HookState,
    /// State of the hook where the device sends.
    pub egress: HookState,
    /// What our programs do not see at these hooks, and why.
    pub hidden: Vec<(Hook, Hidden)>,
}

impl ActualTap {
    /// State of the hook of one of the tap's programs.
    pub const fn state(&self, program: Program) -> HookState {
        match program.hook() {
            Hook::Ingress => self.ingress,
            Hook::Egress => self.egress,
        }
    }

    /// Whether the device has no hook for one of the tap's programs, so that it cannot be attached.
    pub fn lacks_hook(&self, program: Program) -> bool {
        self.hidden.contains(&(program.hook(), Hidden::NoHook))
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

/// What is installed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actual {
    /// The one target.
    pub target: Target,
    /// By device; devices with nothing of ours are not in it.
    pub taps: BTreeMap<IfIndex, ActualTap>,
    /// The second stage, by device; never `Absent`.
    pub deliver: BTreeMap<IfIndex, HookState>,
    /// The other versions of the agent of which something may still run. Their hooks are `Stale`, and what their
    /// maps hold is not known: whom they mirror, and where to.
    pub other_versions: BTreeSet<u32>,
}

/// One change of what is installed. Each is idempotent, and safe at any moment on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes the target.
    SetTarget(Target),
    /// Writes the map entry of a tap: a new one, with counters at zero, or what was changed of the same one.
    PutTap(IfIndex, Box<Tap>),
    /// Removes the map entry of a tap, and its counters.
    RemoveTap(IfIndex),
    /// Attaches the program at a hook, or puts the current one in the place of an earlier agent's.
    Attach(IfIndex, Program),
    /// Removes our program from a hook; also after the device has gone, to remove what is left of it.
    Detach(IfIndex, Program),
}

impl Op {
    /// Every [`Self::name`].
    pub const NAMES: [&str; 5] = ["set_target", "put_tap", "remove_tap", "attach", "detach"];

    /// The word for metrics.
    pub const fn name(&self) -> &'static str {
        let [set_target, put_tap, remove_tap, attach, detach] = Self::NAMES;
        match self {
            Self::SetTarget(_) => set_target,
            Self::PutTap(..) => put_tap,
            Self::RemoveTap(_) => remove_tap,
            Self::Attach(..) => attach,
            Self::Detach(..) => detach,
        }
    }

    /// The device that it is about.
    pub const fn ifindex(&self) -> Option<IfIndex> {
        match self {
            Self::SetTarget(_) => None,
            Self::PutTap(ifindex, _)
            | Self::RemoveTap(ifindex)
            | Self::Attach(ifindex, _)
            | Self::Detach(ifindex, _) => Some(*ifindex),
        }
    }
}
