//! Which devices are tapped, for which pods, and why the others are not.
//!
//! Pure: pods, devices and policy in; taps, skips and complaints out. Called by the reconcile loop once a round:
//! [`choose`] reads annotations, [`select`] finds the devices. It does not know the installed state (`plan` does) and
//! reads nothing itself.

mod attachments;
mod captures;
mod choice;
mod filters;
mod nics;
mod policy;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt};

use mirror_common::{
    abi::MAX_SESSIONS_PER_TAP,
    verdict::{Direction, TapKind},
};

pub use self::attachments::Attachment;
pub use self::captures::{Capture, Readers};
pub use self::choice::{BadAnnotation, Choice, MIRROR, NICS, OVN_MIRROR, PREFIX, Problem, Wanted, choose};
pub use self::filters::Filters;
pub use self::nics::Nics;
use self::nics::{is_inner, is_nic};
pub use self::policy::Policy;
use crate::{
    destination::Destination,
    mirror_iface::{self, Conflict},
    model::{
        Device, Hidden, Link, LinkKind, LinkSnapshot, MirrorId, NoRoom, Origin, Owner, Place, PodId, Session,
        Tap, TargetName,
    },
    settings::SettingError,
};

/// Why a pod, or a NIC of it, is selected but not tapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// It shares the node's network namespace: a tap would see the whole node.
    HostNetwork {
        /// See [`Wanted::is_asked`].
        is_asked: bool,
    },
    /// No process of the pod runs on this node yet, and the source does not name its network namespace.
    NoNetns,
    /// Its network namespace cannot be read, and why.
    NetnsUnreadable(String),
    /// It has no NIC yet.
    NoNic,
    /// It has no NIC of this name, which the mirror is for.
    NoSuchNic,
    /// An annotation of Kube-OVN asks for the NICs of a network that none of the pod's NICs is in.
    NoSuchNetwork(Attachment),
    /// The NIC, of this kind, has no veth end on the node.
    NoHostInterface(String),
    /// The device is tapped for this other pod already.
    TappedFor(PodId),
    /// The device and the mirror interface are entangled.
    MirrorInterface(Conflict),
    /// There is no interface of this name.
    NoSuchInterface,
    /// The packets of the interface have no Ethernet header.
    NotEthernet,
    /// The interface is a tunnel's device of this kind, and so is the target's.
    TunnelInTunnel(String),
    /// This node has no pod of this namespace and name.
    NoSuchPod(String),
    /// An annotation cannot be used: a broken filter must not become "everything".
    BadSetting(Place, SettingError),
    /// The node's policy leaves out its namespace.
    NamespaceExcluded,
    /// The node's policy lets only other namespaces choose.
    NamespaceNotAllowed,
    /// There is no target of this name.
    NoSuchTarget(String),
    /// Another program or filter of the device comes first, so that not every packet of this direction is seen.
    Hidden(Direction, Hidden),
    /// Copies to this target cannot be cut, because another program or filter of its device comes first.
    Uncut(TargetName, Hidden),
    /// The pod has as many mirrors as fit before it.
    TooManyMirrors,
    /// A table of the kernel is full.
    NoRoom(NoRoom),
    /// The kernel refuses the program of its filter, with this reason.
    FilterRefused(String),
}

impl Why {
    /// Whether this is true of every pod for a moment, while the pod starts.
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::NoNetns | Self::NoNic | Self::NoSuchNetwork(Attachment { is_told: false, .. }))
    }

    /// What it means for the mirror, in two or three words.
    pub const fn effect(&self) -> &'static str {
        match self {
            Self::Hidden(_, Hidden::Program(_)) => "perhaps partly mirrored",
            Self::Hidden(..) => "partly mirrored",
            why if why.is_passing() => "not mirrored yet",
            _ => "not mirrored",
        }
    }

    /// A word for status and metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::HostNetwork { .. } => "HostNetwork",
            Self::NoNetns => "NoNetns",
            Self::NetnsUnreadable(_) => "NetnsUnreadable",
            Self::NoNic => "NoNic",
            Self::NoSuchNic => "NoSuchNic",
            Self::NoSuchNetwork(_) => "NoSuchNetwork",
            Self::NoHostInterface(_) => "NoHostInterface",
            Self::TappedFor(_) => "TappedForOther",
            Self::MirrorInterface(_) => "MirrorInterface",
            Self::NoSuchInterface => "NoSuchInterface",
            Self::NotEthernet => "NotEthernet",
            Self::TunnelInTunnel(_) => "TunnelInTunnel",
            Self::NoSuchPod(_) => "NoSuchPod",
            Self::BadSetting(..) => "BadSetting",
            Self::NamespaceExcluded => "NamespaceExcluded",
            Self::NamespaceNotAllowed => "NamespaceNotAllowed",
            Self::NoSuchTarget(_) => "NoSuchTarget",
            Self::Hidden(..) => "Hidden",
            Self::Uncut(..) => "Uncut",
            Self::TooManyMirrors => "TooManyMirrors",
            Self::NoRoom(_) => "NoRoom",
            Self::FilterRefused(_) => "FilterRefused",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostNetwork { .. } => {
                write!(f, "the pod uses the node's own network, which is never tapped for a pod")
            }
            Self::NoNetns => {
                write!(
                    f,
                    "no process of the pod runs on this node yet; for a pod from a file, the annotation \
                     podmirror.io/netns can name its network namespace"
                )
            }
            Self::NetnsUnreadable(error) => write!(f, "its network namespace cannot be read: {error}"),
            Self::NoNic => write!(f, "its network namespace has no interface but loopback yet"),
            Self::NoSuchNic => {
                write!(f, "the pod has no interface of this name, which an annotation asks for")
            }
            Self::NoSuchNetwork(attachment) => attachment.fmt(f),
            Self::NoHostInterface(kind) => {
                write!(f, "an interface of kind {kind:?} has no veth end on the node to tap")
            }
            Self::TappedFor(pod) => write!(f, "the device is tapped for pod {pod} already"),
            Self::MirrorInterface(conflict) => conflict.fmt(f),
            Self::NoSuchInterface => write!(f, "there is no such interface"),
            Self::NotEthernet => {
                write!(f, "its packets have no Ethernet header, as the file of a capture must say")
            }
            Self::TunnelInTunnel(kind) => {
                write!(
                    f,
                    "it is a tunnel's device ({kind}), and the target is a tunnel too: the kernel has one address for \
                     each CPU, so its packets would follow the copies; choose another target"
                )
            }
            Self::NoSuchPod(pod) => write!(f, "this node has no pod {pod}"),
            Self::BadSetting(place, error) => write!(f, "{place} {PREFIX}{error}"),
            Self::NamespaceExcluded => {
                write!(f, "its namespace is one of those that are never mirrored (--exclude-namespaces)")
            }
            Self::NamespaceNotAllowed => {
                write!(f, "its namespace is none of those that may ask for a mirror (--allow-namespaces)")
            }
            Self::Hidden(direction, hidden) => write!(f, "{}: {hidden}", direction.name()),
            Self::Uncut(target, hidden) => write!(
                f,
                "copies cannot be cut to the snap length, or addressed, at the device of target {target}: {hidden}"
            ),
            Self::NoSuchTarget(name) => {
                write!(f, "there is no target {name:?} on this node; --target {name}=DESTINATION makes one")
            }
            Self::TooManyMirrors => {
                write!(f, "a pod has at most {MAX_SESSIONS_PER_TAP} mirrors, and others come first")
            }
            Self::NoRoom(table) => table.fmt(f),
            Self::FilterRefused(why) => why.fmt(f),
        }
    }
}

/// A pod, a NIC or an interface that is selected but not tapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// The pod; `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The NIC, where the reason concerns a NIC; or the interface's name.
    pub nic: Option<String>,
    /// The mirror, where the reason concerns a mirror.
    pub mirror: Option<MirrorId>,
    /// Why not.
    pub why: Why,
}

impl Skipped {
    /// Whether the reason concerns captures alone. The program that asked for the capture is told.
    pub fn is_of_capture(&self) -> bool {
        self.mirror.as_ref().is_some_and(|mirror| mirror.0.is_capture())
    }
}

/// The result of a selection: the wanted taps, and the reasons for missing ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Taps by the device that is tapped.
    pub taps: BTreeMap<Device, Tap>,
    /// Selected, but not tapped.
    pub skipped: Vec<Skipped>,
}

/// The taps for the wanted pods, the named interfaces and the interfaces of captures.
///
/// `links` must hold the node's devices and the devices inside each wanted pod. Of two claims to one device the first
/// in the order of `wanted` wins.
pub fn select(
    wanted: &[Wanted<'_>],
    captures: &[Capture],
    links: &LinkSnapshot,
    policy: &Policy,
) -> Selection {
    let mut selection = Selection::default();
    for wanted in wanted {
        select_pod(wanted, links, policy, &mut selection);
    }
    for name in &policy.interfaces {
        let skip = |why| Skipped { pod: None, nic: Some(name.clone()), mirror: None, why };
        match links.by_name(name) {
            None => selection.skipped.push(skip(Why::NoSuchInterface)),
            // A program writes the records of a stream into a file of Ethernet frames.
            Some(link) if !link.is_ethernet && policy.streams().any(|name| *name == policy.target) => {
                selection.skipped.push(skip(Why::NotEthernet));
            }
            Some(link) => {
                let tap = interface_tap(name, policy);
                if let Err(why) = claim(link, tap, links, policy, &mut selection) {
                    selection.skipped.push(skip(why));
                }
            }
        }
    }
    for capture in captures {
        capture.select(links, policy, &mut selection);
    }
    selection
}

/// The tap of an interface that the user named: one mirror, with the node's settings.
fn interface_tap(name: &str, policy: &Policy) -> Tap {
    let session = Session {
        directions: policy.interface_directions,
        settings: policy.settings.clone(),
        target: policy.target.clone(),
        origin: Origin::Interface,
        key: None,
    };
    Tap {
        owner: Owner::of_interface(name),
        kind: TapKind::Interface,
        is_limited: policy.limits.is_limited(),
        sessions: [(MirrorId::default(), session)].into(),
    }
}

/// Adds the taps of one pod: a tap for each of its NICs.
fn select_pod(wanted: &Wanted<'_>, links: &LinkSnapshot, policy: &Policy, selection: &mut Selection) {
    let Wanted { pod, mirrors, is_asked, .. } = wanted;
    // A reason concerns the pod, unless only a capture wants the pod.
    let mirror = mirrors.keys().next().filter(|_| mirrors.keys().all(|mirror| mirror.0.is_capture()));
    let skip = |nic: Option<&str>, why, selection: &mut Selection| {
        let (nic, mirror) = (nic.map(str::to_owned), mirror.cloned());
        selection.skipped.push(Skipped { pod: Some(pod.id.clone()), nic, mirror, why });
    };
    let host_network = Why::HostNetwork { is_asked: *is_asked };
    if pod.host_network {
        return skip(None, host_network, selection);
    }
    let inside = match links.pods.get(&pod.id.uid) {
        None => return skip(None, Why::NoNetns, selection),
        Some(Err(error)) => return skip(None, Why::NetnsUnreadable(error.clone()), selection),
        Some(Ok(inside)) if inside.is_host => return skip(None, host_network, selection),
        Some(Ok(inside)) => inside,
    };
    if let Some(error) = &inside.stale {
        let error = format!("{error}; what was mirrored before stays mirrored");
        skip(None, Why::NetnsUnreadable(error), selection);
    }
    let nics = inside.links.iter().filter(|nic| is_nic(nic));
    let nics: Vec<_> = nics.map(|nic| (nic, inside.host_end(nic, &links.host))).collect();
    if nics.is_empty() {
        skip(None, Why::NoNic, selection);
    }
    for (mirror, name) in wanted.named_nics() {
        if !nics.is_empty() && !nics.iter().any(|(nic, _)| nic.name == name) {
            let (pod, mirror, nic) = (Some(pod.id.clone()), Some(mirror.clone()), Some(name.to_owned()));
            selection.skipped.push(Skipped { pod, nic, mirror, why: Why::NoSuchNic });
        }
    }
    let leads_to_node = nics.iter().any(|(_, host_end)| host_end.is_some());
    for (nic, host_end) in nics {
        let sessions = wanted.mirrors_of(&nic.name);
        let is_named = wanted.named_nics().any(|(_, name)| nic.name == name);
        let result = match host_end {
            _ if sessions.is_empty() => continue,
            None if leads_to_node && is_inner(nic) && !is_named => continue,
            None => Err(Why::NoHostInterface(kind_name(&nic.kind).to_owned())),
            Some(link) => {
                let owner = Owner {
                    pod: Some(pod.id.clone()),
                    netns: inside.netns,
                    nic: nic.name.clone(),
                    network: pod.networks.of_nic(&nic.name).map(str::to_owned),
                    device: link.name.clone(),
                };
                let tap =
                    Tap { owner, kind: TapKind::HostVeth, is_limited: policy.limits.is_limited(), sessions };
                claim(link, tap, links, policy, selection)
            }
        };
        if let Err(why) = result {
            skip(Some(&nic.name), why, selection);
        }
    }
}

/// Takes a device for a tap, unless it is taken or entangled with a mirror interface.
fn claim(
    link: &Link,
    tap: Tap,
    links: &LinkSnapshot,
    policy: &Policy,
    selection: &mut Selection,
) -> Result<(), Why> {
    // A collector's device may be tapped for other targets. The programs count its packets to itself as `loop`.
    let devices = policy.own_devices();
    let mirrors = devices.iter().filter_map(|device| links.by_name(device));
    if let Some(conflict) = mirrors.filter_map(|mirror| mirror_iface::conflict(mirror, link, links)).next() {
        return Err(Why::MirrorInterface(conflict));
    }
    let is_to_tunnel =
        |session: &Session| policy.targets.get(&session.target).is_some_and(Destination::is_tunnel);
    if is_tunnels(link) && tap.sessions.values().any(is_to_tunnel) {
        return Err(Why::TunnelInTunnel(kind_name(&link.kind).to_owned()));
    }
    let device = Device::on_node(link.ifindex);
    match selection.taps.get(&device) {
        // An interface that was named twice.
        Some(taken) if taken.owner == tap.owner => Ok(()),
        Some(taken) => Err(Why::TappedFor(taken.owner.pod.clone().unwrap_or_default())),
        None => {
            selection.taps.insert(device, tap);
            Ok(())
        }
    }
}

/// Whether a device may be a tunnel's to whose packets a program gives their addresses, as Cilium's does. It does so by
/// `bpf_skb_set_tunnel_key`, like `deliver`, and all addresses given on a CPU are one object of the kernel.
fn is_tunnels(link: &Link) -> bool {
    const KINDS: [&str; 11] = [
        "vxlan",
        "geneve",
        "gre",
        "gretap",
        "ip6gre",
        "ip6gretap",
        "erspan",
        "ip6erspan",
        "ipip",
        "ip6tnl",
        "xfrm",
    ];
    matches!(&link.kind, LinkKind::Other(kind) if KINDS.contains(&kind.as_str()))
}

fn kind_name(kind: &LinkKind) -> &str {
    match kind {
        LinkKind::Loopback => "loopback",
        LinkKind::Veth => "veth",
        LinkKind::Dummy => "dummy",
        LinkKind::Ifb => "ifb",
        LinkKind::Other(kind) if kind.is_empty() => "physical",
        LinkKind::Other(kind) => kind,
    }
}
