//! The names of the annotations that choose pods. Constants only: `pods` keeps these annotations, `select` reads them.

/// The prefix of our annotations.
pub const PREFIX: &str = "podmirror.io/";
/// Annotation of a pod or of a namespace: mirrored or not, and which directions.
pub const MIRROR: &str = "podmirror.io/mirror";
/// Annotation of a pod or of a namespace: the target of the copies.
pub const TARGET: &str = "podmirror.io/target";
/// Annotation of a pod or of a namespace: the NICs of the pod that are mirrored.
pub const NICS: &str = "podmirror.io/nics";
/// Annotation of a pod or of a namespace: `off` keeps our programs and devices out of the pod.
pub const POD_SIDE_TAPS: &str = "podmirror.io/pod-side-taps";
/// Its values: the programs and devices may come, or not.
pub const POD_SIDE_TAPS_WORDS: [&str; 2] = ["auto", "off"];
/// The annotation of Kube-OVN on a pod, which holds where our annotation is missing.
pub const OVN_MIRROR: &str = "ovn.kubernetes.io/mirror";
/// The end of the annotation of Kube-OVN for one attachment. Ahead of it stand the name of the attachment's
/// NetworkAttachmentDefinition, a dot, and its namespace.
pub const OVN_ATTACHMENT: &str = ".ovn.kubernetes.io/mirror";
/// The annotation in which Multus says which network each NIC of a pod is in.
pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
