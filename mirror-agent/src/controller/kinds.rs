//! The kinds that the controller aggregates: their specs, the nodes' reports on them, and their statuses.
//!
//! Pure. [`book`](super::book) aggregates by [`Summed`], [`controller`](super) reads [`Object`]s and writes by
//! [`Watched`].

use std::borrow::Cow;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::core::ObjectMeta;
use mirror_api::{
    ClusterMirror, Mirror, MirrorNodeStatus, MirrorStatus, MirrorSummary, MirrorTarget, MirrorTargetStatus,
    Refusal, TargetSummary, sum,
};
use mirror_core::{destination::Destination, tunnel::Kind as TunnelKind};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};

use super::book::{OfNode, Summed};
use crate::{
    model,
    pods::kube::{Bounded, Kind, WithStatus, metadata},
    select,
};

/// The book of Mirrors and ClusterMirrors.
#[derive(Debug, Clone)]
pub(super) struct Mirrors;

/// The book of MirrorTargets.
#[derive(Debug, Clone)]
pub(super) struct Targets;

/// The name of a Mirror or ClusterMirror. Its order is the order in a MirrorNode.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// The namespace of a Mirror; `None`: a ClusterMirror.
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

impl Summed for Mirrors {
    type Key = Key;
    type Asked = sum::Asked;
    type Report = MirrorSummary;
    type Status = MirrorStatus;

    fn key(report: &MirrorSummary) -> Key {
        Key { namespace: report.namespace.clone(), name: report.name.clone() }
    }

    fn uid(report: &MirrorSummary) -> &str {
        &report.uid
    }

    fn sum<'r>(
        asked: &sum::Asked,
        left_out: usize,
        reported: Option<Time>,
        reports: impl Iterator<Item = (&'r str, &'r MirrorSummary)>,
        before: Option<&MirrorStatus>,
        now: &Time,
    ) -> MirrorStatus {
        sum::sum(&sum::Asked { left_out, reported, ..asked.clone() }, reports, before, now)
    }

    fn reported(status: &MirrorStatus) -> Option<&Time> {
        status.last_report_time.as_ref()
    }

    fn is_news(before: &MirrorSummary, now: &MirrorSummary) -> bool {
        let expiration_time = before.expiration_time.clone();
        MirrorSummary { packets: before.packets, expiration_time, ..now.clone() } != *before
    }

    fn are_counts(before: &MirrorStatus, now: &MirrorStatus) -> bool {
        let MirrorStatus { packets, expiration_time, last_report_time, .. } = before.clone();
        MirrorStatus { packets, expiration_time, last_report_time, ..now.clone() } == *before
    }
}

impl Summed for Targets {
    type Key = String;
    type Asked = sum::target::Asked;
    type Report = TargetSummary;
    type Status = MirrorTargetStatus;

    fn key(report: &TargetSummary) -> String {
        report.name.clone()
    }

    fn uid(report: &TargetSummary) -> &str {
        &report.uid
    }

    fn sum<'r>(
        asked: &sum::target::Asked,
        left_out: usize,
        reported: Option<Time>,
        reports: impl Iterator<Item = (&'r str, &'r TargetSummary)>,
        before: Option<&MirrorTargetStatus>,
        now: &Time,
    ) -> MirrorTargetStatus {
        sum::target::sum(&sum::target::Asked { left_out, reported, ..asked.clone() }, reports, before, now)
    }

    fn reported(status: &MirrorTargetStatus) -> Option<&Time> {
        status.last_report_time.as_ref()
    }

    fn is_news(before: &TargetSummary, now: &TargetSummary) -> bool {
        TargetSummary { cut: before.cut, ..now.clone() } != *before
    }

    fn are_counts(before: &MirrorTargetStatus, now: &MirrorTargetStatus) -> bool {
        let last_report_time = before.last_report_time.clone();
        MirrorTargetStatus { cut: before.cut, last_report_time, ..now.clone() } == *before
    }
}

/// Splits the report of a node into one for each book.
pub(super) fn of_node(status: MirrorNodeStatus) -> (OfNode<MirrorSummary>, OfNode<TargetSummary>) {
    let MirrorNodeStatus { last_report_time: reported, mirrors, more_mirrors, targets, more_targets, .. } =
        status;
    let reported: Option<Timestamp> = reported.map(|Time(at)| at);
    (
        OfNode { reported, reports: mirrors, has_more: more_mirrors.is_some() },
        OfNode { reported, reports: targets, has_more: more_targets.is_some() },
    )
}

/// Maximum length of the reason for a refusal, in bytes.
const MOST_BYTES: usize = 512;

/// A kind whose objects are watched and have a status.
pub(super) trait Watched: Kind {
    /// The book of this kind.
    type Book: Summed;

    fn key(metadata: &ObjectMeta) -> <Self::Book as Summed>::Key;

    /// Whether an object of the book has this kind.
    fn is_of(key: &<Self::Book as Summed>::Key) -> bool;

    /// The part of the spec that the status depends on.
    fn asked(object: &Bounded, metadata: &ObjectMeta) -> <Self::Book as Summed>::Asked;
}

/// The fields of an object that the controller needs. Tenants write the `spec`, and a server may have objects from
/// before the bounds of the CRDs: so the spec is decoded within a bound, and not kept.
///
/// Any JSON can be decoded to this type, so that one malformed object does not block the list of all others.
#[derive(Debug, Clone)]
pub(super) struct Object<K: Watched> {
    metadata: ObjectMeta,
    pub(super) asked: <K::Book as Summed>::Asked,
    /// `None`: there is no status, or it was not written by a controller.
    pub(super) status: Option<<K::Book as Summed>::Status>,
}

impl<'de, K: Watched> Deserialize<'de> for Object<K>
where
    <K::Book as Summed>::Status: DeserializeOwned,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let WithStatus { object, status } = WithStatus::deserialize(deserializer)?;
        let metadata = metadata(&object);
        Ok(Self {
            asked: K::asked(&object, &metadata),
            status: Option::deserialize(status).ok().flatten(),
            metadata,
        })
    }
}

impl<K: Watched> kube::Resource for Object<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(_: &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group(_: &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version(_: &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural(_: &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Watched for Mirror {
    type Book = Mirrors;

    fn key(metadata: &ObjectMeta) -> Key {
        Key { namespace: metadata.namespace.clone(), name: name(metadata) }
    }

    fn is_of(key: &Key) -> bool {
        key.namespace.is_some()
    }

    fn asked(object: &Bounded, metadata: &ObjectMeta) -> sum::Asked {
        asked::<Self>(object, metadata)
    }
}

impl Watched for ClusterMirror {
    type Book = Mirrors;

    fn key(metadata: &ObjectMeta) -> Key {
        Key { namespace: None, name: name(metadata) }
    }

    fn is_of(key: &Key) -> bool {
        key.namespace.is_none()
    }

    fn asked(object: &Bounded, metadata: &ObjectMeta) -> sum::Asked {
        asked::<Self>(object, metadata)
    }
}

impl Watched for MirrorTarget {
    type Book = Targets;

    fn key(metadata: &ObjectMeta) -> String {
        name(metadata)
    }

    fn is_of(_: &String) -> bool {
        true
    }

    fn asked(object: &Bounded, metadata: &ObjectMeta) -> sum::target::Asked {
        let destination = Self::read(object).and_then(|target| target.destination);
        sum::target::Asked {
            generation: metadata.generation.unwrap_or(0),
            destination: destination.as_ref().ok().map(in_short),
            refused: destination.err().map(invalid),
            ..sum::target::Asked::default()
        }
    }
}

/// The part of a Mirror's or ClusterMirror's spec that its status depends on.
fn asked<K: Kind<Read = model::Resource>>(object: &Bounded, metadata: &ObjectMeta) -> sum::Asked {
    let refused = match K::read(object) {
        Ok(resource) => select::refusal(&resource).map(|(reason, message)| refusal(reason, message)),
        Err(problem) => Some(invalid(problem)),
    };
    sum::Asked { generation: metadata.generation.unwrap_or(0), refused, ..sum::Asked::default() }
}

/// The kind of a destination, and the rest of its text.
fn in_short(destination: &Destination) -> (String, String) {
    let kind = match destination {
        Destination::Device(_) | Destination::Stream => "Device",
        Destination::Pod(_) => "Pod",
        Destination::Tunnel(tunnel) => match tunnel.kind {
            TunnelKind::Vxlan => "VXLAN",
            TunnelKind::Geneve => "GENEVE",
            TunnelKind::Gre => "GRE",
            TunnelKind::Erspan => "ERSPAN",
        },
    };
    let text = destination.to_string();
    let rest = text.split_once(':').map(|(_, rest)| rest.to_owned());
    (kind.to_owned(), rest.unwrap_or(text))
}

fn name(metadata: &ObjectMeta) -> String {
    metadata.name.clone().unwrap_or_default()
}

fn invalid(message: String) -> Refusal {
    refusal("InvalidSpec", message)
}

fn refusal(reason: &str, mut message: String) -> Refusal {
    message.truncate(message.floor_char_boundary(MOST_BYTES));
    Refusal { reason: reason.to_owned(), message }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use kube::Resource as _;
    use serde_json::json;

    use super::*;

    /// An object from before the bounds of the CRDs is refused, as by the agents, and none of its text is kept.
    #[test]
    fn an_object_that_is_too_large_is_refused_and_not_kept() {
        let much = vec!["x".repeat(100); 13_000];
        let status = sum::sum(&sum::Asked::default(), [], None, &Time(Timestamp::UNIX_EPOCH));
        let object = json!({
            "metadata": {"name": "old", "namespace": "shop", "uid": "1", "generation": 3, "annotations": {"a": "b"}},
            "spec": {"nics": much, "limits": {"duration": "y".repeat(1_000_000)}},
            "status": status,
        });
        let read: Object<Mirror> = serde_json::from_str(&object.to_string()).unwrap();
        assert_eq!(Mirror::key(read.meta()), Key { namespace: Some("shop".into()), name: "old".into() });
        let refused = read.asked.refused.clone().unwrap();
        assert!(refused.message.contains("more than 128 KiB"), "{refused:?}");
        assert_eq!((read.asked.generation, &read.status), (3, &Some(status)));
        assert!(format!("{read:?}").len() < 4000, "{read:?}");
    }

    /// Texts within the bound of a spec, and statuses that no controller has written, can be long too.
    #[test]
    fn texts_are_cut_and_what_no_controller_has_written_is_no_status() {
        for (spec, status) in [
            (json!({"podSelector": {}, "limits": {"duration": "9".repeat(60_000)}}), json!("none")),
            (json!({"podSelector": {}, "filter": "z".repeat(60_000)}), json!({"conditions": 7})),
            (json!("none"), json!(vec!["x".repeat(100); 13_000])),
        ] {
            let object =
                json!({"metadata": {"name": "old", "namespace": "shop"}, "spec": spec, "status": status});
            let read: Object<Mirror> = serde_json::from_str(&object.to_string()).unwrap();
            assert!(read.asked.refused.is_some() && read.status.is_none(), "{read:?}");
            assert!(format!("{read:?}").len() < 4000, "{read:?}");
        }
    }
}
