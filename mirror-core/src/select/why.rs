//! [`Why`]: the reason why a requested pod, NIC or mirror is not mirrored, and what can be done about it.
//!
//! Data and texts. `choose`, `select`, `plan`, `hidden` and `coverage` find the reason; the log, `status`, `explain`,
//! the metrics and the Events show it.

use std::fmt;

use mirror_common::{abi::MAX_SESSIONS_PER_TAP, verdict::Direction};

use super::{Attachment, MOST_NICS, PREFIX, Refusal};
use crate::{
    coverage::Way,
    model::{Hidden, Place, PodId, TargetName},
    settings::SettingError,
};

/// Why a pod, a NIC or a mirror is not mirrored as requested.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The pod shares the node's network namespace, so a tap would see all traffic of the node.
    HostNetwork {
        /// See [`Wanted::is_asked`].
        is_asked: bool,
    },
    /// No process of the pod runs on this node yet, and the source does not provide its network namespace.
    NoNetns,
    /// The pod's network namespace cannot be read, for this reason.
    NetnsUnreadable(String),
    /// The pod has no NIC yet.
    NoNic,
    /// The pod has no NIC of the name that the mirror, or the annotation of Multus, contains.
    NoSuchNic,
    /// The mirror requests the loopback interface.
    Loopback,
    /// An annotation of Kube-OVN requests the NICs of a network, but no NIC of the pod is in that network.
    NoSuchNetwork(Attachment),
    /// The NIC, of this kind, has no veth peer on the node.
    NoHostInterface(String),
    /// The NIC can be tapped only inside the pod, and the administrator or the pod has disabled that.
    TapsInsideOff,
    /// The pod has more NICs than can be tapped.
    TooManyNics,
    /// The pod has no relay device for the copies of this NIC, for this reason.
    NoRelayDevice(String),
    /// The device is already tapped for this other pod.
    TappedFor(PodId),
    /// Tapping the device conflicts with the mirror interface, for this reason.
    MirrorInterface(String),
    /// No interface of this name exists.
    NoSuchInterface,
    /// The packets of the interface have no Ethernet header.
    NotEthernet,
    /// Both the interface and the target's device are tunnel devices of this kind.
    TunnelInTunnel(String),
    /// No pod of this namespace and name is on this node.
    NoSuchPod(String),
    /// An annotation cannot be used. The mirror is refused, because an invalid filter must not select all packets.
    BadSetting(Place, SettingError),
    /// The Mirror or ClusterMirror that selects the pod is invalid.
    Refused(Refusal),
    /// An annotation disables mirroring of the pod, and the Mirror or ClusterMirror that selects it is not enforced.
    OptedOut(Place),
    /// The annotations of the pod or of its namespace cannot be read, for this reason. One of them could be a filter.
    AnnotationsUnread(String),
    /// The node's policy excludes the pod's namespace.
    NamespaceExcluded,
    /// The node's policy accepts requests only from other namespaces.
    NamespaceNotAllowed,
    /// No target of this name exists.
    NoSuchTarget(String),
    /// The MirrorTarget of this name is not a target of this node, for this reason.
    TargetRefused(TargetName, String),
    /// The MirrorTarget of this name does not allow the pod's namespace.
    TargetNotAllowed(TargetName),
    /// Another program or filter at the device is ahead, so that not every packet of this direction is seen.
    Hidden(Direction, Hidden),
    /// The NIC carries packets of this direction that do not pass the hook of its tap.
    Bypassed(Direction, Way),
    /// Other software detached podmirror's program for this direction inside the pod a moment ago. It is attached
    /// again.
    Removed(Direction),
    /// Copies to this target cannot be cut, because another program or filter at its device is ahead.
    Uncut(TargetName, Hidden),
    /// The pod already has the maximum number of mirrors.
    TooManyMirrors,
    /// A table of the kernel is full: this one, with its capacity.
    NoRoom(String),
    /// The kernel rejects the program of the filter, with this reason.
    FilterRefused(String),
}

impl Why {
    /// The [name](Self::name) of [`Why::Hidden`].
    pub const HIDDEN: &str = "Hidden";

    /// Whether the reason is transient: true of every pod for a moment while it starts.
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::NoNetns | Self::NoNic | Self::NoSuchNetwork(Attachment { is_told: false, .. }))
    }

    /// Whether the reason concerns one mirror of a pod, not the pod or one of its NICs.
    pub const fn is_of_one_mirror(&self) -> bool {
        matches!(
            self,
            Self::BadSetting(..)
                | Self::Refused(_)
                | Self::OptedOut(_)
                | Self::AnnotationsUnread(_)
                | Self::NoSuchTarget(_)
                | Self::TargetRefused(..)
                | Self::TargetNotAllowed(_)
                | Self::NoSuchNic
                | Self::Loopback
                | Self::NoSuchNetwork(_)
                | Self::NamespaceExcluded
                | Self::NamespaceNotAllowed
                | Self::TooManyMirrors
                | Self::NoRoom(_)
                | Self::FilterRefused(_)
                | Self::Uncut(..)
        )
    }

    /// The effect on the mirror, in two or three words.
    pub const fn effect(&self) -> &'static str {
        match self {
            Self::Hidden(_, Hidden::Program(_) | Hidden::AtExit(_)) => "perhaps partly mirrored",
            Self::Hidden(..) | Self::Bypassed(..) | Self::Removed(_) | Self::TooManyNics => "partly mirrored",
            why if why.is_passing() => "not mirrored yet",
            _ => "not mirrored",
        }
    }

    /// The name in status and metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::HostNetwork { .. } => "HostNetwork",
            Self::NoNetns => "NoNetns",
            Self::NetnsUnreadable(_) => "NetnsUnreadable",
            Self::NoNic => "NoNic",
            Self::NoSuchNic => "NoSuchNic",
            Self::Loopback => "Loopback",
            Self::NoSuchNetwork(_) => "NoSuchNetwork",
            Self::NoHostInterface(_) => "NoHostInterface",
            Self::TapsInsideOff => "TapsInsideOff",
            Self::TooManyNics => "TooManyNics",
            Self::NoRelayDevice(_) => "NoRelayDevice",
            Self::TappedFor(_) => "TappedForOther",
            Self::MirrorInterface(_) => "MirrorInterface",
            Self::NoSuchInterface => "NoSuchInterface",
            Self::NotEthernet => "NotEthernet",
            Self::TunnelInTunnel(_) => "TunnelInTunnel",
            Self::NoSuchPod(_) => "NoSuchPod",
            Self::BadSetting(..) => "BadSetting",
            Self::Refused(_) => "Refused",
            Self::OptedOut(_) => "OptedOut",
            Self::AnnotationsUnread(_) => "AnnotationsUnread",
            Self::NamespaceExcluded => "NamespaceExcluded",
            Self::NamespaceNotAllowed => "NamespaceNotAllowed",
            Self::NoSuchTarget(_) => "NoSuchTarget",
            Self::TargetRefused(..) => "TargetRefused",
            Self::TargetNotAllowed(_) => "TargetNotAllowed",
            Self::Hidden(..) => Self::HIDDEN,
            Self::Bypassed(..) => "Bypassed",
            Self::Removed(_) => "Removed",
            Self::Uncut(..) => "Uncut",
            Self::TooManyMirrors => "TooManyMirrors",
            Self::NoRoom(_) => "NoRoom",
            Self::FilterRefused(_) => "FilterRefused",
        }
    }

    /// How to resolve it, in one or two sentences.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::HostNetwork { .. } => {
                "Only a pod without hostNetwork can be mirrored. `mirror-agent tail` can read an interface of the node."
            }
            Self::NoNetns => {
                "Wait until the pod runs. If it runs, check that the agent sees the node's processes (hostPID)."
            }
            Self::NetnsUnreadable(_) => {
                "The agent tries again. If the reason stays, compare its rights with docs/security.md and restart the pod."
            }
            Self::NoNic => {
                "Wait until the CNI has connected the pod. If it does not, look at the Events of the pod."
            }
            Self::NoSuchNic => {
                "If podmirror.io/nics contains the name, correct it. Otherwise find out what removed the NIC. `ip link` inside \
                 the pod lists its NICs."
            }
            Self::Loopback => "Remove the name from podmirror.io/nics.",
            Self::NoSuchNetwork(_) => {
                "Wait until Multus has written its annotation. If it exists, correct the name in the annotation of Kube-OVN."
            }
            Self::NoHostInterface(_) => {
                "This NIC does not connect the pod to a network by itself. To mirror it anyway, name it in podmirror.io/nics."
            }
            Self::TapsInsideOff => {
                "Enable taps inside pods: set --pod-side-taps=auto on the agent, and remove the annotation \
                 podmirror.io/pod-side-taps: \"off\" from the pod."
            }
            Self::TooManyNics => "Name the NICs to mirror in podmirror.io/nics.",
            Self::NoRelayDevice(_) => {
                "The agent tries again. `mirror-agent tail` reads the packets of this NIC without a relay device."
            }
            Self::TappedFor(_) => {
                "Wait until the other pod is deleted. A device can be tapped for one pod only."
            }
            Self::MirrorInterface(_) => {
                "Choose another mirror interface (--mirror-iface, --define-target) that is not connected to this device."
            }
            Self::NoSuchInterface => {
                "Correct the name. `ip link` on the node shows the names of its interfaces."
            }
            Self::NotEthernet => "Choose an interface whose packets are Ethernet frames.",
            Self::TunnelInTunnel(_) => "Choose a target that is not a tunnel.",
            Self::NoSuchPod(_) => {
                "Name a pod of this node. `kubectl get pod -o wide` shows the node of each pod."
            }
            Self::BadSetting(..) => "Correct the annotation. Until then, this mirror copies nothing.",
            Self::Refused(_) => {
                "Correct the Mirror or ClusterMirror with kubectl edit. Until then, it copies nothing."
            }
            Self::OptedOut(_) => {
                "If the pod should be mirrored, remove the annotation. An enforced ClusterMirror ignores it."
            }
            Self::AnnotationsUnread(_) => {
                "Remove annotations of podmirror.io/ that are not needed. Only enforced ClusterMirrors mirror such a pod."
            }
            Self::NamespaceExcluded => {
                "Only the administrator can change this: the namespace is in --exclude-namespaces of the agent."
            }
            Self::NamespaceNotAllowed => {
                "Only the administrator can change this, by adding the namespace to --allow-namespaces of the agent."
            }
            Self::NoSuchTarget(_) => {
                "Name a target that `mirror-agent status` lists on this node, or ask the administrator to add this one."
            }
            Self::TargetRefused(..) => "Ask the administrator to correct the MirrorTarget.",
            Self::TargetNotAllowed(_) => {
                "Name another target, or ask the administrator to change allowedNamespaces of the MirrorTarget or the labels \
                 of the namespace."
            }
            Self::Hidden(_, Hidden::NoHook) => {
                "Replace the ingress qdisc by a clsact qdisc, or mirror the other direction only."
            }
            Self::Hidden(_, Hidden::AtExit(_)) => {
                "Find out which process in the pod attached it, and remove it. Until then, treat the copies as untrusted."
            }
            Self::Hidden(..) => {
                "If packets are missing, move the other program or filter after the mirror, or remove it."
            }
            Self::Bypassed(_, Way::Peer) => {
                "Enable taps inside pods: set --pod-side-taps=auto, and remove the annotation podmirror.io/pod-side-taps: \
                 \"off\". Or configure the CNI to deliver to the node side of the veth: \
                 bpf.hostLegacyRouting=true in the chart of Cilium, bpfRedirectToPeer: Disabled in Calico's \
                 FelixConfiguration. docs/networks.md has the exceptions."
            }
            Self::Bypassed(_, Way::L3s) => {
                "Create the ipvlan in mode l2 or l3, where all packets pass the hooks of the NIC."
            }
            Self::Bypassed(_, Way::Unseen) => {
                "Look for an XDP program on the device (`ip link` shows it), and inside the pod for other programs at the \
                 hooks of the NIC (`bpftool net`). docs/operations.md explains the comparison."
            }
            Self::Removed(_) => {
                "Find out what in the pod removes tc filters or qdiscs, or moves the NIC. On Linux 6.6 and newer, pods cannot \
                 remove podmirror's program."
            }
            Self::Uncut(..) => {
                "Move the other program after podmirror's, or remove it. A mirror without a snap length does not need the \
                 program that truncates copies, unless its target is a tunnel."
            }
            Self::TooManyMirrors => "Delete a mirror of this pod, or stop a capture of it.",
            Self::NoRoom(_) => {
                "Delete mirrors on this node, or use fewer different filters. docs/choosing.md lists the limits."
            }
            Self::FilterRefused(_) => {
                "Write a shorter or simpler filter. docs/filters.md lists what is refused."
            }
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
                write!(
                    f,
                    "the pod has no interface of this name, which the mirror or the annotation of Multus contains"
                )
            }
            Self::Loopback => write!(f, "the loopback interface of a pod cannot be mirrored"),
            Self::NoSuchNetwork(attachment) => attachment.fmt(f),
            Self::NoHostInterface(kind) => {
                write!(f, "an interface of kind {kind:?} has no veth peer on the node to tap")
            }
            Self::TapsInsideOff => write!(
                f,
                "the NIC has no peer on the node, and taps inside pods are disabled (--pod-side-taps, or \
                 podmirror.io/pod-side-taps of the pod)"
            ),
            Self::TooManyNics => {
                write!(f, "at most {MOST_NICS} NICs of a pod are tapped, and it has more")
            }
            Self::NoRelayDevice(why) => {
                write!(f, "the pod has no relay device, through which copies leave it: {why}")
            }
            Self::TappedFor(pod) => write!(f, "the device is already tapped for pod {pod}"),
            Self::NoSuchInterface => write!(f, "the interface does not exist"),
            Self::NotEthernet => {
                write!(f, "its packets have no Ethernet header (unsupported link type)")
            }
            Self::TunnelInTunnel(kind) => {
                write!(
                    f,
                    "it is a tunnel's device ({kind}), and the target is a tunnel too: the kernel has one address for \
                     each CPU, so its packets would follow the copies; choose another target"
                )
            }
            Self::NoSuchPod(pod) => write!(f, "no pod {pod} is on this node"),
            Self::BadSetting(place, error) => write!(f, "{place} {PREFIX}{error}"),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::OptedOut(Place::Pod) => write!(f, "the pod opts out: an annotation on it is \"false\""),
            Self::OptedOut(Place::Namespace) => {
                write!(f, "its namespace opts out: an annotation on it is \"false\"")
            }
            Self::AnnotationsUnread(problem) => {
                write!(f, "{problem}, so its mirror settings are ignored")
            }
            Self::NamespaceExcluded => {
                write!(f, "its namespace is excluded from mirroring (--exclude-namespaces)")
            }
            Self::NamespaceNotAllowed => {
                write!(f, "its namespace is not allowed to request mirrors (--allow-namespaces)")
            }
            Self::Hidden(direction, hidden) => write!(f, "{}: {hidden}", direction.name()),
            Self::Bypassed(direction, way) => write!(f, "{}: {way}", direction.name()),
            Self::Removed(direction) => write!(
                f,
                "{}: something in the pod has removed podmirror's program from the NIC, or has moved the NIC; packets are not \
                 mirrored until the agent attaches it again (for a veth, after the agent's next check, only those that \
                 bypass its node side)",
                direction.name()
            ),
            Self::Uncut(target, hidden) => write!(
                f,
                "copies cannot be truncated to the snap length, or addressed, at the device of target {target}: {hidden}"
            ),
            Self::NoSuchTarget(name) => {
                write!(
                    f,
                    "this node has no target {name:?}; define it with --define-target {name}=DESTINATION or a \
                     MirrorTarget"
                )
            }
            Self::TargetRefused(name, why) => write!(f, "the MirrorTarget {name} is refused: {why}"),
            Self::TargetNotAllowed(name) => {
                write!(f, "the MirrorTarget {name} does not allow this namespace (spec.allowedNamespaces)")
            }
            Self::TooManyMirrors => {
                write!(f, "a pod has at most {MAX_SESSIONS_PER_TAP} mirrors, and others take precedence")
            }
            Self::MirrorInterface(why) | Self::NoRoom(why) | Self::FilterRefused(why) => why.fmt(f),
        }
    }
}
