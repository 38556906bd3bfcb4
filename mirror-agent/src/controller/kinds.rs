//! The kinds that the controller sums up: what they ask for, what the nodes report on them, and where a status is written.
//!
//! Pure. [`book`](super::book) sums up by [`Summed`], [`controller`](super) reads and writes by [`Watched`].

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Resource as _, core::ObjectMeta};
use mirror_api::{
    ClusterMirror, Mirror, MirrorNodeStatus, MirrorSpec, MirrorStatus, MirrorSummary, MirrorTarget,
    MirrorTargetStatus, Refusal, TargetSummary,
    sum::{self, ends},
};
use serde::Serialize;

use super::book::{OfNode, Summed};
use crate::{
    model,
    pods::kube::{Kind, read},
    select,
};

/// The book of Mirrors and ClusterMirrors.
#[derive(Debug)]
pub(super) struct Mirrors;

/// The book of MirrorTargets.
#[derive(Debug)]
pub(super) struct Targets;

/// The name of a Mirror or ClusterMirror, in the order in which a MirrorNode has them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// The namespace of a Mirror; `None`: a ClusterMirror, which has none.
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
        reports: impl Iterator<Item = (&'r str, &'r MirrorSummary)>,
        before: Option<&MirrorStatus>,
        now: &Time,
    ) -> MirrorStatus {
        sum::sum(&sum::Asked { left_out, ..asked.clone() }, reports, before, now)
    }

    fn is_news(before: &MirrorSummary, now: &MirrorSummary) -> bool {
        MirrorSummary { packets: before.packets, ..now.clone() } != *before
    }

    fn are_counts(before: &MirrorStatus, now: &MirrorStatus) -> bool {
        MirrorStatus { packets: before.packets, ..now.clone() } == *before
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
        reports: impl Iterator<Item = (&'r str, &'r TargetSummary)>,
        before: Option<&MirrorTargetStatus>,
        now: &Time,
    ) -> MirrorTargetStatus {
        sum::target::sum(&sum::target::Asked { left_out, ..asked.clone() }, reports, before, now)
    }

    fn is_news(before: &TargetSummary, now: &TargetSummary) -> bool {
        TargetSummary { cut: before.cut, ..now.clone() } != *before
    }

    fn are_counts(before: &MirrorTargetStatus, now: &MirrorTargetStatus) -> bool {
        MirrorTargetStatus { cut: before.cut, ..now.clone() } == *before
    }
}

/// The report of a node, for each of the books.
pub(super) fn of_node(status: MirrorNodeStatus) -> (OfNode<MirrorSummary>, OfNode<TargetSummary>) {
    let MirrorNodeStatus { reported, mirrors, more_mirrors, targets, more_targets, .. } = status;
    let reported: Option<Timestamp> = reported.map(|Time(at)| at);
    (
        OfNode { reported, reports: mirrors, has_more: more_mirrors.is_some() },
        OfNode { reported, reports: targets, has_more: more_targets.is_some() },
    )
}

/// A kind whose objects are watched and get a status.
pub(super) trait Watched: Kind + Serialize {
    /// Its book.
    type Book: Summed;

    fn key(metadata: &ObjectMeta) -> <Self::Book as Summed>::Key;

    /// Whether an object of the book has this kind.
    fn is_of(key: &<Self::Book as Summed>::Key) -> bool;

    fn asked(&self) -> <Self::Book as Summed>::Asked;

    fn status(&self) -> Option<&<Self::Book as Summed>::Status>;
}

impl Watched for Mirror {
    type Book = Mirrors;

    fn key(metadata: &ObjectMeta) -> Key {
        Key { namespace: metadata.namespace.clone(), name: name(metadata) }
    }

    fn is_of(key: &Key) -> bool {
        key.namespace.is_some()
    }

    fn asked(&self) -> sum::Asked {
        asked(self, &self.spec)
    }

    fn status(&self) -> Option<&MirrorStatus> {
        self.status.as_ref()
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

    fn asked(&self) -> sum::Asked {
        asked(self, &self.spec.mirror)
    }

    fn status(&self) -> Option<&MirrorStatus> {
        self.status.as_ref()
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

    fn asked(&self) -> sum::target::Asked {
        let destination = read(self).and_then(|target| target.destination);
        let generation = self.meta().generation.unwrap_or(0);
        sum::target::Asked { generation, refused: destination.err().map(invalid), left_out: 0 }
    }

    fn status(&self) -> Option<&MirrorTargetStatus> {
        self.status.as_ref()
    }
}

/// What a Mirror or ClusterMirror asks for. `spec` is the part that both have.
fn asked<K: Kind<Read = model::Resource> + Serialize>(mirror: &K, spec: &MirrorSpec) -> sum::Asked {
    let refused = match read(mirror) {
        Ok(resource) => {
            select::refusal(&resource).map(|(reason, message)| Refusal { reason: reason.to_owned(), message })
        }
        Err(problem) => Some(invalid(problem)),
    };
    sum::Asked { generation: mirror.meta().generation.unwrap_or(0), ends: ends(spec), refused, left_out: 0 }
}

fn name(metadata: &ObjectMeta) -> String {
    metadata.name.clone().unwrap_or_default()
}

fn invalid(message: String) -> Refusal {
    Refusal { reason: "InvalidSpec".to_owned(), message }
}
