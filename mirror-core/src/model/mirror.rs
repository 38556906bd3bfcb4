//! The wanted state: taps, the sessions of each, and the targets of the sessions.
//!
//! Data only, like the rest of [`model`](super). `select` makes it, `plan` compares it with the installed state.

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
/// kernel uses an ifindex again, and a pod can get a new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The pod; `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The pod's network namespace; zeros without a pod.
    pub netns: NetnsId,
    /// The NIC's name inside the pod, or the interface's own.
    pub nic: String,
    /// The network that the NIC is in, as an annotation of the pod says. For people alone.
    pub network: Option<String>,
    /// The tapped device's name: on the node, or inside the pod for [`TapKind::PodNic`].
    pub device: String,
}

impl Owner {
    /// An interface of the node that the user named.
    pub fn of_interface(name: &str) -> Self {
        Self { pod: None, netns: NetnsId::NODE, nic: name.to_owned(), network: None, device: name.to_owned() }
    }

    /// Whether a tap for `other` goes on as a tap for this one, with its sessions and counters. Names of NICs, networks
    /// and devices do not count where there is a pod: all of them can change.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.pod, &other.pod) {
            (Some(pod), Some(other_pod)) => pod.uid == other_pod.uid && self.netns == other.netns,
            (None, None) => self.nic == other.nic,
            _ => false,
        }
    }
}

/// A tap that is wanted: one NIC, and the mirrors that take its packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The pod and NIC that it is for.
    pub owner: Owner,
    /// The relation of the tapped device to the NIC.
    pub kind: TapKind,
    /// The limits of pods, namespaces and the node hold for it.
    pub is_limited: bool,
    /// The exit of the pod, for a tap inside it that has one.
    pub exit: Option<IfIndex>,
    /// The side inside the pod, for a tap at the node's end of a veth that has one. `None`: the tapped device sees both
    /// directions.
    pub pod_side: Option<PodSide>,
    /// Its sessions, by the mirror that each belongs to.
    pub sessions: BTreeMap<MirrorId, Session>,
}

/// The side of a tap inside the pod: the NIC at the other end of the veth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodSide {
    /// Index of the NIC in the pod's namespace.
    pub nic: IfIndex,
    /// What reaches the pod is seen there, and the node's end leaves it to the NIC. False while the tap changes its side:
    /// both see it then. What is wanted always sees; `plan` decides when.
    pub sees: bool,
}

impl PodSide {
    /// The NIC with this index sees what reaches the pod.
    pub const fn seeing(nic: IfIndex) -> Self {
        Self { nic, sees: true }
    }
}

impl Tap {
    /// The NIC inside the pod, if the tap has a side there.
    pub fn pod_side(&self) -> Option<Device> {
        pod_side(&self.owner, self.pod_side)
    }

    /// Whether what reaches the pod is seen at the NIC, by a tap at the node's end of its veth.
    pub fn sees_inside(&self) -> bool {
        self.pod_side.is_some_and(|side| side.sees)
    }

    /// Whether programs of it run inside the pod.
    pub fn is_inside(&self) -> bool {
        self.kind == TapKind::PodNic || self.pod_side.is_some()
    }

    /// The hook that sees a direction, of the tap at this device: its device, and our program there.
    pub fn hook(&self, device: Device, direction: Direction) -> (Device, Program) {
        match (direction, self.pod_side()) {
            (Direction::Ingress, Some(nic)) => (nic, Program::TapIngress),
            _ => self.own_hook(device, direction),
        }
    }

    /// The same while a side inside the pod sees nothing: the tapped device sees both directions.
    pub fn own_hook(&self, device: Device, direction: Direction) -> (Device, Program) {
        let sees = |program: &Program| self.kind.direction(program.hook()) == direction;
        let program = Program::TAP.into_iter().find(sees);
        (device, program.unwrap_or(Program::TapIngress))
    }

    /// All hooks where its programs run, in the order in which they are attached: one of the NIC on the other side, and both
    /// of the tapped device. So what reaches the pod is seen first, and the answer to a copied packet is copied, too.
    pub fn hooks(&self, device: Device) -> impl Iterator<Item = (Device, Program)> {
        let of_device = Program::TAP.into_iter().map(move |program| (device, program));
        self.pod_side().map(|nic| (nic, Program::TapIngress)).into_iter().chain(of_device)
    }
}

/// The NIC of this side, in the namespace of an owner.
pub(super) fn pod_side(owner: &Owner, side: Option<PodSide>) -> Option<Device> {
    side.map(|side| Device::in_pod(owner.netns, side.nic))
}

/// One mirror applied to one tap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The directions that it copies.
    pub directions: Directions,
    /// Its settings, for the packets of these directions.
    pub settings: Settings,
    /// Where its copies go.
    pub target: TargetName,
    /// Where it was asked for.
    pub origin: Origin,
    /// A number for what its author has written ([`Session::asked`]); 0: what it asks for is its settings.
    pub asked: u32,
    /// The tunnel key of its copies; `None`: its target is no tunnel, or the session is not placed yet. `plan` decides it.
    pub key: Option<u32>,
}

impl Session {
    /// The form of its copies.
    pub fn form(&self) -> Form<'_> {
        Form { target: &self.target, snaplen: self.settings.snaplen }
    }

    /// The number for what the author of a mirror has written: its directions and these settings, by their keys. What the
    /// author leaves to the node's defaults has no part in it.
    pub fn asked<'a>(directions: Directions, written: impl IntoIterator<Item = (&'a str, &'a str)>) -> u32 {
        let mut text = directions.name().to_owned();
        for (key, value) in written {
            text.extend(["\0", key, "\0", value]);
        }
        let hash = fnv1a(text.as_bytes());
        (hash ^ hash >> 32) as u32 | 1
    }

    /// Whether two sessions are the same request, in the terms of the user. A filter that a newer compiler translates
    /// in another way is the same request, and so is a mirror whose author has written the same where the node has other
    /// defaults now.
    pub fn asks_the_same(&self, other: &Self) -> bool {
        if self.asked != 0 && other.asked != 0 {
            return self.asked == other.asked;
        }
        self.directions == other.directions
            && self.target == other.target
            && self.settings.asks_the_same(&other.settings)
    }
}

/// The form of a session's copies, as a reader gets them. A packet that was copied in a form is not copied again in the
/// same form by another tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Form<'a> {
    /// Where the copies go.
    pub target: &'a TargetName,
    /// Bytes that are kept of each; `None`: all.
    pub snaplen: Option<u32>,
}

/// The origin of a request for a mirror. The order is that in which mirrors get a place on a tap that has too few
/// places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// A ClusterMirror that is enforced.
    Enforced,
    /// The agent's own flags.
    Policy,
    /// An interface that was named on the command line.
    Interface,
    /// A ClusterMirror.
    ClusterMirror,
    /// A Mirror.
    Mirror,
    /// An annotation.
    Annotation(Place),
    /// A program that reads the packets itself: `mirror-agent tail`.
    Capture,
}

impl Origin {
    /// Every origin, in the order of their numbers in the maps: a new one comes last.
    pub const ALL: [Self; 8] = [
        Self::Policy,
        Self::Interface,
        Self::Annotation(Place::Namespace),
        Self::Annotation(Place::Pod),
        Self::Capture,
        Self::Mirror,
        Self::ClusterMirror,
        Self::Enforced,
    ];

    /// The word for status.
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
        }
    }
}

/// Where an annotation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// On the namespace of the pod.
    Namespace,
    /// On the pod itself.
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

/// Where copies go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// To a device of the node: the mirror interface, or the node's end of a collector's veth.
    Device(DeviceTarget),
    /// Into a ring buffer, for a program that reads it. `None`: no program reads now, and nothing is copied.
    Stream(Option<RingId>),
}

impl Target {
    /// The device that takes the copies.
    pub const fn device(&self) -> Option<&DeviceTarget> {
        match self {
            Self::Device(device) => Some(device),
            Self::Stream(_) => None,
        }
    }

    /// What the administrator named. A stream has no address.
    pub const fn destination(&self) -> &Destination {
        match self {
            Self::Device(device) => &device.destination,
            Self::Stream(_) => &Destination::Stream,
        }
    }

    /// Index of that device, if there is one now.
    pub const fn ifindex(&self) -> Option<IfIndex> {
        match self {
            Self::Device(device) => device.ifindex,
            Self::Stream(_) => None,
        }
    }

    /// Whether copies are taken now.
    pub const fn is_up(&self) -> bool {
        match self {
            Self::Device(device) => device.ifindex.is_some() && device.up,
            Self::Stream(ring) => ring.is_some(),
        }
    }

    /// The same target, with [`DeviceTarget::cuts`] set. A stream cuts by itself.
    #[must_use]
    pub fn with_cuts(&self, cuts: bool) -> Self {
        match self {
            Self::Device(device) => Self::Device(DeviceTarget { cuts, ..device.clone() }),
            Self::Stream(ring) => Self::Stream(*ring),
        }
    }
}

/// The kernel's id of a ring buffer map. The kernel gives an id again only after 2^31 others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingId(pub u32);

/// The address of an Ethernet device.
pub type MacAddress = [u8; 6];

/// A device of the node that takes copies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceTarget {
    /// What the administrator named: a device, or a pod that the device leads to.
    pub destination: Destination,
    /// Name of the device; empty where it is not known.
    pub device: String,
    /// Its index; `None`: it does not exist now.
    pub ifindex: Option<IfIndex>,
    /// It is up and has a carrier.
    pub up: bool,
    /// It has no queue.
    pub queueless: bool,
    /// The second stage runs there, so that copies can be cut, and addressed for a tunnel.
    pub cuts: bool,
    /// Packets that would come back or arrive twice are not copied there: the collector's own, and those of tunnels.
    pub guarded: bool,
    /// MAC address of the collector's NIC, for a pod.
    pub collector: Option<MacAddress>,
    /// It is a port of a bridge, so that a frame to the collector's MAC address arrives there.
    pub is_bridged: bool,
    /// Bytes of the longest frame that fits into a packet, for a tunnel.
    pub room: Option<u32>,
    /// The limit for all copies of the node that go there, in the kernel's prices; zeros: none.
    pub ceiling: Limits,
    /// Copies are made only while a packet socket reads the device, or its other end.
    pub when_read: bool,
    /// The other end of a veth pair that stands in for a dummy device, if `when_read`: copies arrive there.
    pub other_end: Option<IfIndex>,
}

impl DeviceTarget {
    /// Where readers are to be looked for. `None`: copies are made whether there are readers or not.
    pub fn readable(&self) -> Option<Readable> {
        let device = self.ifindex.filter(|_| self.when_read)?;
        Some(Readable { device, other_end: self.other_end })
    }
}

/// The places where the copies of a mirror interface can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Readable {
    /// The mirror interface, which sends the copies.
    pub device: IfIndex,
    /// The device that receives them.
    pub other_end: Option<IfIndex>,
}

/// The wanted state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Desired {
    /// The targets by name. `plan` decides [`DeviceTarget::cuts`]: it follows from the attached programs.
    pub targets: BTreeMap<TargetName, Target>,
    /// The limits of the node.
    pub limits: NodeLimits,
    /// The taps by the device that is tapped.
    pub taps: BTreeMap<Device, Tap>,
    /// The hub of the exits, while it is there and a tap has an exit.
    pub hub: Option<IfIndex>,
}

impl Desired {
    /// Where the second stage must run: at the devices of the targets of sessions that want their copies cut, and of those
    /// with a tunnel.
    pub fn deliver(&self) -> BTreeSet<IfIndex> {
        let sessions = self.taps.values().flat_map(|tap| tap.sessions.values());
        let needing = sessions.filter(|session| self.needs_second_stage(session));
        needing.filter_map(|session| self.targets.get(&session.target)?.ifindex()).collect()
    }

    /// Whether the copies of a session have to be cut, or addressed for a tunnel.
    pub fn needs_second_stage(&self, session: &Session) -> bool {
        let target = self.targets.get(&session.target).and_then(Target::device);
        session.settings.snaplen.is_some() || target.is_some_and(|target| target.destination.is_tunnel())
    }

    /// The pods and interfaces that are mirrored, each once, with any number of NICs. A capture has no limits, so it
    /// takes no share of them.
    pub fn owners(&self) -> usize {
        let is_mirrored = |tap: &&Tap| tap.sessions.keys().any(|mirror| !mirror.0.is_capture());
        let owners = self.taps.values().filter(is_mirrored).map(|tap| match &tap.owner.pod {
            Some(pod) => (pod.uid.as_str(), ""),
            None => ("", tap.owner.nic.as_str()),
        });
        owners.collect::<BTreeSet<_>>().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name of a NIC or a device can change while the pod runs. Its mirror goes on, with its budgets.
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
