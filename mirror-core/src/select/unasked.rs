//! [`Unasked`]: a benign reason why a pod has no mirror.
//!
//! Data and texts. `choose` finds the reason for each pod without a mirror; `notes` passes it to `explain`.

use std::fmt;

use super::{MIRROR, OVN_MIRROR, Why};
use crate::model::{Place, PodId};

/// Why no mirror is requested for a pod. If several reasons apply, the last one in this order is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unasked {
    /// Neither an annotation nor the policy requests one.
    NoRequest,
    /// As before, and an annotation of this pod would not be accepted.
    NamespaceNotAllowed,
    /// An annotation at this place disables mirroring of the pod.
    OptedOut(Place),
    /// The node's policy excludes the pod's namespace.
    NamespaceExcluded,
}

impl Unasked {
    /// The name in `status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoRequest => "NoRequest",
            Self::NamespaceNotAllowed => Why::NamespaceNotAllowed.name(),
            Self::OptedOut(_) => "OptedOut",
            Self::NamespaceExcluded => Why::NamespaceExcluded.name(),
        }
    }

    /// How to have the pod mirrored.
    pub fn remedy(self, pod: &PodId) -> String {
        let PodId { namespace, name, .. } = pod;
        match self {
            Self::NoRequest | Self::OptedOut(_) => format!(
                "To mirror it: kubectl annotate --overwrite --namespace {namespace} pod {name} {MIRROR}=true; for a pod \
                 from a file, write this annotation there."
            ),
            Self::NamespaceNotAllowed => Why::NamespaceNotAllowed.remedy().to_owned(),
            Self::NamespaceExcluded => Why::NamespaceExcluded.remedy().to_owned(),
        }
    }
}

impl fmt::Display for Unasked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRequest => write!(
                f,
                "no mirror is requested: neither the pod nor its namespace has {MIRROR}, and the agent runs \
                 without --enable-mirror"
            ),
            Self::NamespaceNotAllowed => Why::NamespaceNotAllowed.fmt(f),
            Self::OptedOut(Place::Pod) => {
                write!(
                    f,
                    "the pod opts out: {MIRROR} or {MIRROR}.NAME on it is \"false\", or {OVN_MIRROR} with \
                     --kube-ovn-annotations"
                )
            }
            Self::OptedOut(Place::Namespace) => {
                write!(f, "its namespace opts out: {MIRROR} or {MIRROR}.NAME on it is \"false\"")
            }
            Self::NamespaceExcluded => Why::NamespaceExcluded.fmt(f),
        }
    }
}
