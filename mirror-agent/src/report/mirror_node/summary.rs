//! Builds the status of a `MirrorNode` from a report and the counters. Its size is bounded.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use mirror_api::{MirrorNodeStatus, MirrorSummary, Pods, Refusal, TargetSummary, Uncovered, cut};
use mirror_common::verdict::Verdict;
use mirror_core::{fair::shares, status::LOSSES};

use crate::{
    kernel::dataplane::readout::{Count, Reader, SessionReadout},
    model::{MirrorId, Origin, PodId, ResourceId, TargetResource},
    report::Report,
    select::{self, Coverage},
};

/// Maximum number of Mirrors and ClusterMirrors in a status.
const MOST_MIRRORS: usize = 200;
/// Maximum number of reasons for one Mirror or ClusterMirror, and for all of them.
const MOST_REASONS: (usize, usize) = (20, 200);
/// Maximum number of MirrorTargets in a status. A node has 16 targets, and refuses the others. Messages are [`cut`], so a
/// status has at most some 340 KiB.
const MOST_TARGETS: usize = 64;

/// The counts of the mirrors of this node, and when their budgets of time end them, by namespace (none: a ClusterMirror)
/// and name.
pub(super) type Counts = BTreeMap<(Option<String>, MirrorId), MirrorSummary>;

/// Reads the counts of all mirrors that come from resources.
pub(super) fn counts(reader: &mut Reader) -> anyhow::Result<Counts> {
    let is_ours = |origin| matches!(origin, Origin::Mirror | Origin::ClusterMirror | Origin::Enforced);
    let taps = reader.read_sessions(|_, session| is_ours(session.origin))?.taps;
    let now = Timestamp::now();
    let mut counts = Counts::default();
    for tap in taps {
        let namespace = tap.owner.pod.map(|pod| pod.namespace);
        for SessionReadout { mirror, counts: of_verdicts, ended, left, .. } in tap.sessions {
            let namespace = namespace.clone().filter(|_| !mirror.0.is_of_cluster_mirror());
            let of = counts.entry((namespace, mirror)).or_default();
            add(of, &of_verdicts, ended.is_some());
            let left = left.duration.and_then(|left| SignedDuration::try_from(left).ok());
            let expires = left.and_then(|left| now.checked_add(left).ok());
            // In whole seconds.
            let expires = expires.and_then(|at| Timestamp::from_second(at.as_second()).ok());
            of.expiration_time = of.expiration_time.take().max(expires.map(Time));
        }
    }
    Ok(counts)
}

/// Adds the counts of a session.
fn add(of: &mut MirrorSummary, counts: &[Count], has_ended: bool) {
    let sum = |is_counted: &dyn Fn(Verdict) -> bool| {
        let packets = counts.iter().filter(|count| is_counted(count.verdict)).map(|count| count.packets);
        number(packets.sum::<u64>())
    };
    of.packets.copied += sum(&|verdict| verdict == Verdict::Copied);
    of.packets.lost += sum(&|verdict| LOSSES.contains(&verdict));
    of.nics += 1;
    of.ended += i64::from(has_ended);
}

/// The status of the node, without the time.
pub(super) fn summary(report: &Report, counts: &Counts) -> MirrorNodeStatus {
    let mut of_pods = BTreeMap::<&PodId, bool>::new();
    for Coverage { of, covered, .. } in &report.resources {
        for pod in &of.pods {
            *of_pods.entry(pod).or_insert(true) &= covered.contains(pod);
        }
    }
    let places = shared(report.resources.iter().map(|of| (of, 1)), MOST_MIRRORS);
    let mirrors: Vec<_> = report.resources.iter().zip(places).filter(|(_, place)| *place == 1).collect();
    let reasons = mirrors.iter().map(|(of, _)| (*of, reasons(of).len().min(MOST_REASONS.0)));
    let room = shared(reasons, MOST_REASONS.1);
    MirrorNodeStatus {
        last_report_time: None,
        mirror_count: number(report.resources.len()),
        refused_count: number(report.resources.iter().filter(|of| of.of.refused.is_some()).count()),
        pods: Pods {
            selected: number(of_pods.len()),
            covered: number(of_pods.values().filter(|covered| **covered).count()),
        },
        mirrors: mirrors.iter().zip(room).map(|((of, _), most)| of_mirror(of, counts, most)).collect(),
        more_mirrors: more(report.resources.len(), MOST_MIRRORS),
        targets: report.targets.iter().take(MOST_TARGETS).map(|of| of_target(of, report)).collect(),
        more_targets: more(report.targets.len(), MOST_TARGETS),
    }
}

/// The room for each Mirror and ClusterMirror, by its need. ClusterMirrors come first, and the namespaces share the
/// rest: so a namespace with very many Mirrors takes no room from others. Within a namespace the first ones get it.
fn shared<'c>(wants: impl Iterator<Item = (&'c Coverage, usize)>, most: usize) -> Vec<usize> {
    let wants: Vec<_> = wants.map(|(of, wants)| (of.of.id.namespace.as_deref(), wants)).collect();
    let mut of_namespaces = BTreeMap::<_, usize>::new();
    for (namespace, wants) in &wants {
        *of_namespaces.entry(*namespace).or_default() += wants;
    }
    let of_cluster = of_namespaces.remove(&None).unwrap_or(0).min(most);
    let of_all = shares(&of_namespaces.values().copied().collect::<Vec<_>>(), most - of_cluster);
    let mut left: BTreeMap<_, _> =
        of_namespaces.into_keys().zip(of_all).chain([(None, of_cluster)]).collect();
    let take = |(namespace, wants): (Option<&'c str>, usize)| {
        let left = left.entry(namespace).or_default();
        let taken = wants.min(*left);
        *left -= taken;
        taken
    };
    wants.into_iter().map(take).collect()
}

/// The reasons in the status of a Mirror or ClusterMirror. Its own refusal is included once, not for each pod.
fn reasons(of: &Coverage) -> BTreeSet<&select::NotCovered> {
    if of.of.refused.is_some() { BTreeSet::new() } else { of.not_covered.iter().collect() }
}

fn of_target(of: &TargetResource, report: &Report) -> TargetSummary {
    let TargetResource { name, uid, generation, destination, .. } = of;
    // A target of the flags can have the name of a refused one.
    let down = report.down.get(name).filter(|_| destination.is_ok());
    TargetSummary {
        name: name.to_string(),
        uid: uid.clone(),
        observed_generation: *generation,
        refused: destination.as_ref().err().map(|why| cut(why)),
        down: down.map(|why| cut(why)),
    }
}

fn of_mirror(coverage: &Coverage, counts: &Counts, most: usize) -> MirrorSummary {
    let Coverage { of, covered, .. } = coverage;
    let ResourceId { namespace, name } = &of.id;
    let counts = counts.get(&(namespace.clone(), of.mirror.clone()));
    let reasons = reasons(coverage);
    MirrorSummary {
        kind: of.id.kind().to_owned(),
        namespace: namespace.clone(),
        name: name.to_string(),
        uid: of.uid.clone(),
        observed_generation: of.generation,
        refused: of.refused.as_ref().map(|(reason, message)| Refusal::new(reason, message)),
        pods: Pods { selected: number(of.pods.len()), covered: number(covered.len()) },
        more_uncovered: more(reasons.len(), most),
        uncovered: reasons.into_iter().take(most).map(reason).collect(),
        ..counts.cloned().unwrap_or_default()
    }
}

fn reason(of: &select::NotCovered) -> Uncovered {
    Uncovered {
        namespace: of.pod.namespace.clone(),
        pod: of.pod.name.clone(),
        nic: of.nic.clone(),
        reason: of.reason.to_owned(),
        message: cut(&of.message),
        node: None,
    }
}

/// The number of entries that do not fit, if any.
fn more(all: usize, most: usize) -> Option<i64> {
    all.checked_sub(most).filter(|more| *more > 0).map(number)
}

fn number(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}
