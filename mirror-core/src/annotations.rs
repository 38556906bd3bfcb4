//! The names of the annotations that choose pods. Constants only: `pods` keeps these annotations, `select` reads them.

/// The prefix of our annotations.
pub const PREFIX: &str = "podmirror.io/";
/// Annotation of a pod or of a namespace: mirrored or not, and which directions.
pub const MIRROR: &str = "podmirror.io/mirror";
/// Annotation of a pod or of a namespace: the target of the copies.
pub const TARGET: &str = "podmirror.io/target";
/// Annotation of a pod or of a namespace: the NICs of the pod that are mirrored.
pub const NICS: &str = "podmirror.io/nics";
/// The annotation of Kube-OVN on a pod, which holds where our annotation is missing.
pub const OVN_MIRROR: &str = "ovn.kubernetes.io/mirror";
