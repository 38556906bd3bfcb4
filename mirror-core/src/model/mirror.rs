//! The wanted state: taps, the sessions of each, and the targets of the sessions.
//!
//! Data only, like the rest of [`model`](super). `select` builds it, `plan` compares it with the installed state.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use mirror_common::{
    limit::Limits,
    verdict::{Direction, TapKind},
};

use super::{Device, Directions, IfIndex, MirrorId, NetnsId, PodId, Program, TargetName};
use crate::{
    destination::Destination,
    fnv::fnv1a,
    settings::{NodeLimits, Settings},
};

/// The pod or interface that a tap is for. Two taps at the same device with different owners are different taps: the
/// kernel reuses ifindexes, and a pod can get a new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The pod. `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The pod's network namespace. Zeros without a pod.
    pub netns: NetnsId,
    /// The NIC's name inside the pod, or the name of the interface.
    pub nic: String,
    /// The network of the NIC, from an annotation of the pod. For display only.
    pub network: Option<String>,
    /// The tapped device's name: on the node, or inside the pod for [`TapKind::PodNic`].
    pub device: String,
}

impl Owner {
    /// The owner of a tap at an interface of the node that the user named.
    pub fn of_interface(name: &str) -> Self {
        Self { pod: None, netns: NetnsId::NODE, nic: name.to_owned(), network: None, device: name.to_owned() }
    }

    /// Whether a tap for `other` can continue as a tap for this owner, with its sessions and counters. For a pod, the
    /// names of NICs, networks and devices are not compared: all of them can change.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.pod, &other.pod) {
            (Some(pod), Some(other_pod)) => pod.uid == other_pod.uid && self.netns == other.netns,
            (None, None) => self.nic == other.nic,
            _ => false,
        }
    }
}

/// A wanted tap: one NIC, and the mirrors that copy its packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The NIC, and how it is tapped.
    pub head: TapHead,
    /// The sessions, by mirror.
    pub sessions: BTreeMap<MirrorId, Session>,
}

impl Tap {
    /// Whether a session copies packets of this direction.
    pub fn copies(&self, direction: Direction) -> bool {
        self.sessions.values().any(|session| session.directions.bits() & direction.bit() != 0)
    }
}

/// A [`Tap`] without its sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapHead {
    /// The pod and NIC of the tap.
    pub owner: Owner,
    /// The relation of the tapped device to the NIC.
    pub kind: TapKind,
    /// Whether the limits of pods, namespaces and the node apply.
    pub is_limited: bool,
    /// The relay device of the pod, for a tap inside the pod that needs one.
    pub exit: Option<IfIndex>,
    /// The bridge that the tapped device of the node is a port of.
    pub bridge: Option<IfIndex>,
    /// The pod side of a tap on the node side of a veth. `None`: the tapped device sees both directions.
    pub pod_side: Option<PodSide>,
}

/// The pod side of a tap: the NIC at the other end of the veth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodSide {
    /// Index of the NIC in the pod's namespace.
    pub nic: IfIndex,
    /// Ingress is seen at the NIC only, and the node side ignores it. False while the tap changes sides: both sides see
    /// ingress then. Always true in the wanted state; `plan` decides when it becomes true.
    pub sees: bool,
}

impl PodSide {
    /// The pod side at the NIC with this index, which sees ingress.
    pub const fn seeing(nic: IfIndex) -> Self {
        Self { nic, sees: true }
    }
}

impl TapHead {
    /// The head of a tap without limits, relay device, bridge and pod side.
    pub const fn new(owner: Owner, kind: TapKind) -> Self {
        Self { owner, kind, is_limited: false, exit: None, bridge: None, pod_side: None }
    }

    /// The NIC inside the pod, if the tap has a pod side.
    pub fn pod_side(&self) -> Option<Device> {
        self.pod_side.map(|side| Device::in_pod(self.owner.netns, side.nic))
    }

    /// Whether a tap on the node side of a veth sees ingress at the NIC.
    pub fn sees_inside(&self) -> bool {
        self.pod_side.is_some_and(|side| side.sees)
    }

    /// Whether programs of the tap run inside the pod.
    pub fn is_inside(&self) -> bool {
        self.kind == TapKind::PodNic || self.pod_side.is_some()
    }

    /// The device and program that see a direction, for the tap at this device.
    pub fn hook(&self, device: Device, direction: Direction) -> (Device, Program) {
        match (direction, self.pod_side()) {
            (Direction::Ingress, Some(nic)) => (nic, Program::TapIngress),
            _ => self.own_hook(device, direction),
        }
    }

    /// As [`Self::hook`], while the pod side sees nothing: the tapped device sees both directions.
    pub fn own_hook(&self, device: Device, direction: Direction) -> (Device, Program) {
        let sees = |program: &Program| self.kind.direction(program.hook()) == direction;
        let program = Program::TAP.into_iter().find(sees);
        (device, program.unwrap_or(Program::TapIngress))
    }

    /// All hooks of the tap, in the order in which their programs are attached: the NIC on the pod side first, then
    /// both hooks of the tapped device. With a pod side, ingress is attached first, so that the reply to a copied
    /// egress packet is copied too.
    pub fn hooks(&self, device: Device) -> impl Iterator<Item = (Device, Program)> {
        let of_device = Program::TAP.into_iter().map(move |program| (device, program));
        self.pod_side().map(|nic| (nic, Program::TapIngress)).into_iter().chain(of_device)
    }
}

/// One mirror applied to one tap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The directions that are copied.
    pub directions: Directions,
    /// The settings for the packets of these directions.
    pub settings: Settings,
    /// The target of the copies.
    pub target: TargetName,
    /// The origin of the request.
    pub origin: Origin,
    /// A hash of what the author of the mirror wrote ([`Session::asked`]). 0: the request is equal to the settings.
    pub asked: u32,
    /// The tunnel key of the copies. `None`: the target is no tunnel, or `plan` has not allocated a key yet.
    pub key: Option<u32>,
}

impl Session {
    /// Hashes what the author of a mirror wrote: the directions, and these settings by their keys; for a resource,
    /// also its UID. The node's defaults are not part of it.
    pub fn asked<'a>(directions: Directions, written: impl IntoIterator<Item = (&'a str, &'a str)>) -> u32 {
        let mut text = directions.name().to_owned();
        for (key, value) in written {
            text.extend(["\0", key, "\0", value]);
        }
        let hash = fnv1a(text.as_bytes());
        (hash ^ hash >> 32) as u32 | 1
    }

    /// Whether two sessions are the same request for the user. The request does not change if a newer compiler
    /// translates the filter differently, or if the node's defaults change and the author's own settings do not.
    pub fn asks_the_same(&self, other: &Self) -> bool {
        if self.asked != 0 && other.asked != 0 {
            return self.asked == other.asked;
        }
        self.directions == other.directions
            && self.target == other.target
            && self.settings.asks_the_same(&other.settings)
    }
}

/// The origin of a request for a mirror, in the order in which mirrors get the session slots of a tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// An enforced ClusterMirror.
    Enforced,
    /// The agent's flags.
    Policy,
    /// An interface that is named on the command line.
    Interface,
    /// A ClusterMirror.
    ClusterMirror,
    /// A Mirror.
    Mirror,
    /// An annotation.
    Annotation(Place),
    /// A command of root that reads packets itself: `mirror-agent tail`.
    Capture,
    /// A reader of the API. Unlike for a command of root, opt-outs, namespaces and limits apply. It comes after root.
    Reader,
}

impl Origin {
    /// All origins, in the order of their numbers in the maps. Append new ones at the end.
    pub const ALL: [Self; 9] = [
        Self::Policy,
        Self::Interface,
        Self::Annotation(Place::Namespace),
        Self::Annotation(Place::Pod),
        Self::Capture,
        Self::Mirror,
        Self::ClusterMirror,
        Self::Enforced,
        Self::Reader,
    ];

    /// The name in `status`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Interface => "interface",
            Self::Annotation(Place::Namespace) => "namespace-annotation",
            Self::Annotation(Place::Pod) => "annotation",
            Self::Capture => "capture",
            Self::Mirror => "mirror",
            Self::ClusterMirror => "cluster-mirror",
            Self::Enforced => "enforced-cluster-mirror",
            Self::Reader => "reader",
        }
    }
}

/// The object that has an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The namespace of the pod.
    Namespace,
    /// The pod itself.
    Pod,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pod => "annotation",
            Self::Namespace => "annotation of its namespace",
        })
    }
}

/// The destination of copies in the dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A device of the node: the mirror interface, a tunnel device, or the node side of a collector's veth.
    Device(DeviceTarget),
    /// A ring buffer, for a program that reads it. `None`: no program reads now, and nothing is copied.
    Stream(Option<RingId>),
}

impl Target {
    /// The device that the copies are sent to.
    pub const fn device(&self) -> Option<&DeviceTarget> {
        match self {
            Self::Device(device) => Some(device),
            Self::Stream(_) => None,
        }
    }

    /// The destination that the administrator configured. A stream has no address.
    pub const fn destination(&self) -> &Destination {
        match self {
            Self::Device(device) => &device.destination,
            Self::Stream(_) => &Destination::Stream,
        }
    }

    /// Index of the device, if the device exists.
    pub const fn ifindex(&self) -> Option<IfIndex> {
        match self {
            Self::Device(device) => device.ifindex,
            Self::Stream(_) => None,
        }
    }

    /// Whether the target accepts copies now.
    pub const fn is_up(&self) -> bool {
        match self {
            Self::Device(device) => device.ifindex.is_some() && device.up,
            Self::Stream(ring) => ring.is_some(),
        }
    }

    /// The same target with [`DeviceTarget::cuts`] set. A stream always cuts, so it does not change.
    #[must_use]
    pub fn with_cuts(&self, cuts: bool) -> Self {
        match self {
            Self::Device(device) => Self::Device(DeviceTarget { cuts, ..device.clone() }),
            Self::Stream(ring) => Self::Stream(*ring),
        }
    }
}

/// The kernel's id of a ring buffer map. The kernel reuses an id only after 2^31 other maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingId(pub u32);

/// MAC address.
pub type MacAddress = [u8; 6];

/// A device of the node that copies are sent to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceTarget {
    /// The destination that the administrator configured: a device, or a pod behind the device.
    pub destination: Destination,
    /// Name of the device. Empty if it is not known.
    pub device: String,
    /// Index of the device. `None`: it does not exist.
    pub ifindex: Option<IfIndex>,
    /// The device is up and has a carrier.
    pub up: bool,
    /// The device has no queue.
    pub queueless: bool,
    /// The second stage runs at the device, so copies can be cut, and addressed for a tunnel.
    pub cuts: bool,
    /// Packets that would come back or arrive twice are not copied to the device: the collector's own, and those of
    /// tunnels.
    pub guarded: bool,
    /// MAC address of the collector's NIC, if the destination is a pod.
    pub collector: Option<MacAddress>,
    /// The bridge that the device is a port of, if the destination is a pod. It forwards frames with the collector's
    /// MAC address to the device.
    pub bridge: Option<IfIndex>,
    /// Length in bytes of the longest frame that fits into a tunnel packet.
    pub room: Option<u32>,
    /// The node's limit for all copies to this device, in the units of the kernel's meters. Zeros: no limit.
    pub ceiling: Limits,
    /// Copies are made only while a packet socket reads the device or its veth peer.
    pub when_read: bool,
    /// The peer of a veth pair that replaces a dummy device, if `when_read` is set. Copies arrive there.
    pub other_end: Option<IfIndex>,
}

impl DeviceTarget {
    /// The devices to check for readers. `None`: copies are made with or without readers.
    pub fn readable(&self) -> Option<Readable> {
        let device = self.ifindex.filter(|_| self.when_read)?;
        Some(Readable { device, other_end: self.other_end })
    }
}

/// The devices where readers of a mirror interface can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Readable {
    /// The mirror interface. It sends the copies.
    pub device: IfIndex,
    /// Its veth peer, which receives the copies.
    pub other_end: Option<IfIndex>,
}

/// The wanted state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    /// The targets by name. `plan` sets [`DeviceTarget::cuts`], because it depends on the attached programs.
    pub targets: BTreeMap<TargetName, Target>,
    /// The limits of the node.
    pub limits: NodeLimits,
    /// The taps, by tapped device.
    pub taps: BTreeMap<Device, Tap>,
    /// The relay hub, while it exists and a tap has a relay device.
    pub hub: Option<IfIndex>,
}

impl Desired {
    /// The devices where the second stage must run: those of tunnels, and those of targets with a session whose copies
    /// must be cut.
    pub fn deliver(&self) -> BTreeSet<IfIndex> {
        let sessions = self.taps.values().flat_map(|tap| tap.sessions.values());
        let needing = sessions.filter(|session| self.needs_second_stage(session));
        needing.filter_map(|session| self.targets.get(&session.target)?.ifindex()).collect()
    }

    /// Whether the copies of a session must be cut, or addressed for a tunnel.
    pub fn needs_second_stage(&self, session: &Session) -> bool {
        let target = self.targets.get(&session.target).and_then(Target::device);
        session.settings.snaplen.is_some() || target.is_some_and(|target| target.destination.is_tunnel())
    }

    /// Counts the pods and interfaces that limits apply to, each once for any number of NICs. Captures of root are not
    /// limited, so they do not count.
    pub fn owners(&self) -> usize {
        let is_limited = |tap: &&Tap| tap.sessions.values().any(|session| session.origin != Origin::Capture);
        let owners = self.taps.values().filter(is_limited).map(|tap| match &tap.head.owner.pod {
            Some(pod) => (pod.uid.as_str(), ""),
            None => ("", tap.head.owner.nic.as_str()),
        });
        owners.collect::<BTreeSet<_>>().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_of_readers_have_a_share_of_the_limits_and_those_of_root_do_not() {
        let tap = |(index, origin): (u32, Origin)| {
            let pod = PodId { uid: index.to_string(), ..PodId::default() };
            let session = Session {
                directions: Directions::Both,
                settings: Settings::default(),
                target: TargetName::default(),
                origin,
                asked: 0,
                key: None,
            };
            let head = TapHead::new(Owner { pod: Some(pod), ..Owner::default() }, TapKind::HostVeth);
            (Device::on_node(IfIndex(index)), Tap { head, sessions: [(MirrorId::default(), session)].into() })
        };
        let owners = |origins: &[Origin]| {
            let taps = (1..).zip(origins.iter().copied()).map(tap).collect();
            Desired { taps, ..Desired::default() }.owners()
        };
        assert_eq!(owners(&[Origin::Mirror, Origin::Reader, Origin::Capture]), 2);
        assert_eq!(owners(&[Origin::Capture]), 0);
    }

    /// Names of NICs and devices can change while the pod runs. The mirror continues, with its budgets.
    #[test]
    fn a_pod_is_the_same_under_other_names_of_its_devices() {
        let pod = |uid: &str| Some(PodId { uid: uid.into(), ..PodId::default() });
        let netns = NetnsId { dev: 4, ino: 7 };
        let owner = Owner { pod: pod("a"), netns, nic: "eth0".into(), network: None, device: "veth1".into() };
        assert!(owner.is_same(&Owner { nic: "net0".into(), ..owner.clone() }));
        assert!(owner.is_same(&Owner { device: "other".into(), ..owner.clone() }));
        assert!(owner.is_same(&Owner { network: Some("shop/fast".into()), ..owner.clone() }));
        assert!(!owner.is_same(&Owner { pod: pod("b"), ..owner.clone() }));
        assert!(
            !owner.is_same(&Owner { netns: NetnsId { dev: 4, ino: 8 }, ..owner.clone() }),
            "a new sandbox"
        );
        let interface = Owner { pod: None, netns: NetnsId::default(), ..owner.clone() };
        assert!(!interface.is_same(&owner) && interface.is_same(&interface));
        assert!(!interface.is_same(&Owner { nic: "eth1".into(), ..interface.clone() }));
    }
}
