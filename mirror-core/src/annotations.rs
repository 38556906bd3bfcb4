//! The annotations that configure mirrors. Constants only: a pod source keeps these annotations, and `select` reads
//! them.

/// The prefix of podmirror's annotations.
pub const PREFIX: &str = "podmirror.io/";
/// Annotation of a pod or namespace: whether it is mirrored, and in which directions.
pub const MIRROR: &str = "podmirror.io/mirror";
/// Annotation of a pod or namespace: the target of the copies.
pub const TARGET: &str = "podmirror.io/target";
/// Annotation of a pod or namespace: the NICs to mirror.
pub const NICS: &str = "podmirror.io/nics";
/// Annotation of a pod or namespace: `off` keeps podmirror's programs and devices out of the pod.
pub const POD_SIDE_TAPS: &str = "podmirror.io/pod-side-taps";
/// Its values: whether programs and devices are allowed inside the pod.
pub const POD_SIDE_TAPS_WORDS: [&str; 2] = ["auto", "off"];
/// The annotation of Kube-OVN on a pod. With `--kube-ovn-annotations`, it applies if podmirror's annotation is missing.
pub const OVN_MIRROR: &str = "ovn.kubernetes.io/mirror";
/// Suffix of the annotation of Kube-OVN for one attachment. Before it are the name of the attachment's
/// NetworkAttachmentDefinition, a dot, and its namespace.
pub const OVN_ATTACHMENT: &str = ".ovn.kubernetes.io/mirror";
/// The annotation in which Multus reports the network of each NIC of a pod.
pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
