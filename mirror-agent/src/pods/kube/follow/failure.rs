//! [`Failure`]: the reason why a watch of the Kubernetes API failed, and its meaning. Pure; `Follower` uses it.

use kube::core::Status;

use super::{LIST_DEADLINE, Lacking};

/// The reason why a watch failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("cannot list: {}", mirror_client::in_words(.0))]
    List(kube::Error),
    #[error("cannot begin to watch: {}", mirror_client::in_words(.0))]
    Begin(kube::Error),
    #[error("the watch failed: {}", mirror_client::in_words(.0))]
    Watch(kube::Error),
    #[error("the watch was ended by an error: {}", .0.message)]
    Told(Box<Status>),
    #[error("no complete list within {} s", LIST_DEADLINE.as_secs())]
    NoList,
    #[error("no answer within {} s", LIST_DEADLINE.as_secs())]
    NoAnswer,
    #[error("the list ended before it was complete")]
    Ended,
    #[error("an answer without a resource version")]
    NoVersion,
    #[error("a list from the past: of version {version}, and {newest} was seen already")]
    Past { version: String, newest: String },
}

impl Failure {
    /// Whether the server does not support the request. Old servers may respond without an end of the list instead.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Begin(kube::Error::Api(status)) => matches!(status.code, 400 | 422),
            Self::NoList => true,
            _ => false,
        }
    }

    /// The reason if the server responds that the agent gets no objects of this kind.
    pub(super) fn lacking(&self) -> Option<Lacking> {
        match self {
            Self::List(kube::Error::Api(status)) | Self::Begin(kube::Error::Api(status)) => match status.code
            {
                404 => Some(Lacking::Crd),
                403 => Some(Lacking::Right),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the server's data are older than the request demands.
    pub(super) fn is_past(&self) -> bool {
        let status = match self {
            Self::List(kube::Error::Api(status)) | Self::Begin(kube::Error::Api(status)) => status,
            Self::Told(status) => status,
            _ => return false,
        };
        let mut causes = status.details.iter().flat_map(|details| &details.causes);
        // Some servers name no cause.
        causes.any(|cause| cause.reason == "ResourceVersionTooLarge")
            || status.message.contains("Too large resource version")
    }
}
