//! [`Why`]: the reason why a requested pod, NIC or mirror is not mirrored, and what can be done about it.
//!
//! Data and texts. `choose`, `select`, `plan`, `hidden` and `coverage` find the reason; the log, `status`, `explain`,
//! the metrics and the Events show it.

use std::fmt;

use mirror_common::{abi::MAX_SESSIONS_PER_TAP, verdict::Direction};

use super::{MIRROR, MOST_NICS, PREFIX};
use crate::{
    annotations::NETWORK_STATUS,
    coverage::Way,
    model::{Hidden, Place, PodId, ResourceId, TargetName},
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
    NoSuchNetwork {
        /// The key of the annotation.
        key: String,
        /// Whether the pod has Multus' annotation with the networks of its NICs.
        is_told: bool,
    },
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
    Refused {
        /// The Mirror or ClusterMirror.
        resource: ResourceId,
        /// The reason, in one word.
        reason: &'static str,
        /// The field, its value, and the problem.
        message: String,
    },
    /// The annotations of the pod or of its namespace cannot be read, for this reason. One of them could be a filter.
    AnnotationsUnread(String),
    // For a pod without a requested mirror, the last one of the following reasons counts.
    /// No annotation, resource or policy requests a mirror of the pod.
    NoRequest,
    /// The node's policy accepts requests only from other namespaces.
    NamespaceNotAllowed,
    /// An annotation disables mirroring of the pod. Only an enforced ClusterMirror ignores it.
    OptedOut(Place),
    /// The node's policy excludes the pod's namespace.
    NamespaceExcluded,
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
        matches!(self, Self::NoNetns | Self::NoNic | Self::NoSuchNetwork { is_told: false, .. })
    }

    /// Whether the reason concerns one mirror of a pod, not the pod or one of its NICs.
    pub const fn is_of_one_mirror(&self) -> bool {
        matches!(
            self,
            Self::BadSetting(..)
                | Self::Refused { .. }
                | Self::OptedOut(_)
                | Self::AnnotationsUnread(_)
                | Self::NoSuchTarget(_)
                | Self::TargetRefused(..)
                | Self::TargetNotAllowed(_)
                | Self::NoSuchNic
                | Self::Loopback
                | Self::NoSuchNetwork { .. }
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
            Self::NoSuchNetwork { .. } => "NoSuchNetwork",
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
            Self::Refused { .. } => "Refused",
            Self::OptedOut(_) => "OptedOut",
            Self::AnnotationsUnread(_) => "AnnotationsUnread",
            Self::NoRequest => "NoRequest",
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
            Self::NoSuchNetwork { key, is_told: true } => {
                write!(
                    f,
                    "{key} requests the NICs of a network that {NETWORK_STATUS} lists for no NIC of the pod"
                )
            }
            Self::NoSuchNetwork { key, is_told: false } => {
                write!(
                    f,
                    "{key} requests the NICs of a network, but the pod has no annotation {NETWORK_STATUS} yet, which says \
                     the network of each NIC"
                )
            }
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
            Self::Refused { resource, message, .. } => write!(f, "{resource}: {message}"),
            Self::NoRequest => {
                write!(
                    f,
                    "no mirror is requested: neither the pod nor its namespace has {MIRROR}, and the agent runs without \
                     --enable-mirror"
                )
            }
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
