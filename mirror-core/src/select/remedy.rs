//! The remedies: what can be done about each [`Why`].

use super::{MIRROR, Why};
use crate::{
    coverage::Way,
    model::{Hidden, PodId},
};

impl Why {
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
            Self::NoSuchNetwork { .. } => {
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
            Self::Refused { .. } => {
                "Correct the Mirror or ClusterMirror with kubectl edit. Until then, it copies nothing."
            }
            Self::OptedOut(_) => {
                "If the pod should be mirrored, remove the annotation. An enforced ClusterMirror ignores it."
            }
            Self::AnnotationsUnread(_) => {
                "Remove annotations of podmirror.io/ that are not needed. Only enforced ClusterMirrors mirror such a pod."
            }
            Self::NoRequest => "Request a mirror by an annotation of the pod, or by a Mirror.",
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

    /// How to have a pod mirrored for which no mirror is requested.
    pub fn remedy_unasked(&self, pod: &PodId) -> String {
        let PodId { namespace, name, .. } = pod;
        match self {
            Self::NoRequest | Self::OptedOut(_) => format!(
                "To mirror it: kubectl annotate --overwrite --namespace {namespace} pod {name} {MIRROR}=true; for a pod \
                 from a file, write this annotation there."
            ),
            why => why.remedy().to_owned(),
        }
    }
}
