//! [`sum`]: the status of a Mirror or ClusterMirror, from what the nodes report. [`target::sum`]: that of a MirrorTarget.
//!
//! Pure. The controller of the agent calls them with the reports and the time. Nothing is remembered but the last status,
//! from which a condition keeps its time: so the next controller computes the same sums. The pods in a stale report
//! count as selected and not as covered, because nobody knows what that node copies now.
//!
//! A node that was taken over can report what it likes. It can keep a condition from being `True`, also by the time of
//! its report. It can only add to the sums: numbers below zero count as zero, a node covers no more pods than it
//! selects, sums end at their highest value, and texts are cut.

pub mod target;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::{SignedDuration, Timestamp},
};

use crate::{MirrorStatus, MirrorSummary, Packets, Pods, Refusal, Uncovered, node::MOST_BYTES};

/// A report that is older is stale. Agents repeat their reports three times as often.
pub const STALE: SignedDuration = SignedDuration::from_mins(15);
/// How far the clock of a node may be ahead. A report from a later time is stale, too: it would count for too long.
pub const AHEAD: SignedDuration = SignedDuration::from_mins(5);

/// Whether the report of a node counts at the time `now`: it is not stale. The rule of everyone who reads MirrorNodes.
pub fn is_current(reported: Option<Timestamp>, now: Timestamp) -> bool {
    reported.is_some_and(|reported| (-AHEAD..=STALE).contains(&now.duration_since(reported)))
}

/// How much later a report must be for a status to be written again for its time alone, in which nothing else changes.
/// Agents repeat their reports as often, so the time in a status is [`STALE`] only if nobody writes it.
pub const RENEW: SignedDuration = SignedDuration::from_mins(5);

/// Whether a status with the time of the report `before` must be written again for the report `now`.
pub fn is_renewed(before: Option<&Time>, now: Option<&Time>) -> bool {
    match (before, now) {
        (Some(Time(before)), Some(Time(now))) => now.duration_since(*before) >= RENEW,
        (before, now) => before != now,
    }
}

/// Most pods in [`MirrorStatus::uncovered`].
pub const MOST_UNCOVERED: usize = 20;
/// Most bytes of a word or name that comes from a node.
const MOST_BYTES_OF_NAME: usize = 253;
/// Most reasons in the sentence of the condition `Covered`.
const MOST_REASONS: usize = 5;
/// Most nodes in the sentence of the reason [`REPORT_STALE`].
const MOST_NODES: usize = 5;

/// The type of the condition that sums up the others; also that of a MirrorTarget.
pub const READY: &str = "Ready";
/// The type of the condition that says whether it can be used; also that of a MirrorTarget.
pub const ACCEPTED: &str = "Accepted";
/// The type of the condition that says whether all its pods are mirrored as it asks.
pub const COVERED: &str = "Covered";
/// The type of the condition that says whether its limits have ended it.
pub const ENDED: &str = "Ended";
/// The reason of a condition that depends on a node with a stale report.
pub const REPORT_STALE: &str = "ReportStale";

/// A Mirror, ClusterMirror or MirrorTarget, as far as its status depends on it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    /// `metadata.generation`.
    pub generation: i64,
    /// The kind of the destination of a MirrorTarget, and the destination in short; `None`: it is refused.
    pub destination: Option<(String, String)>,
    /// Why no node can use it, where that does not depend on the node.
    pub refused: Option<Refusal>,
    /// Number of nodes that have more to report than a MirrorNode holds, and may have omitted it.
    pub left_out: usize,
    /// Nodes whose report on it is stale.
    pub stale: BTreeSet<String>,
    /// The time of the last report on it that counts.
    pub reported: Option<Time>,
}

/// The reports on an object, by the name of the node.
type ByNode<'r, R> = BTreeMap<&'r str, &'r R>;

/// The reports that count, and the stale ones.
fn by_age<'r, R: 'r>(
    asked: &Asked,
    reports: impl IntoIterator<Item = (&'r str, &'r R)>,
) -> (ByNode<'r, R>, ByNode<'r, R>) {
    reports.into_iter().partition(|(node, _)| !asked.stale.contains(*node))
}

/// The status of a Mirror or ClusterMirror. `reports` has the name of each node that reports on it, once, with the
/// report, also a stale one; their order does not matter. `before` is its status so far, from which each condition that
/// keeps its value keeps its time; another condition gets the time `now`.
pub fn sum<'r>(
    asked: &Asked,
    reports: impl IntoIterator<Item = (&'r str, &'r MirrorSummary)>,
    before: Option<&MirrorStatus>,
    now: &Time,
) -> MirrorStatus {
    let (reports, stale) = by_age(asked, reports);
    let sums = Sums::of(&reports, &stale, now);
    let generations = reports.values().map(|report| report.observed_generation);
    let observed_generation = observed(generations, asked.generation);
    let (accepted, reason) = accepted(asked, &reports, &stale);
    let (covered, ended) = (sums.covered(asked, reason, &stale), sums.ended());
    let ready = ready(&accepted, &covered, &ended);
    let (was, before) = (before, before.map_or(&[][..], |before| &before.conditions));
    let conditions = [(READY, ready), (ACCEPTED, accepted), (COVERED, covered), (ENDED, ended)];
    let Sums { pods, packets, expires, uncovered, reasons, .. } = sums;
    let uncovered: Vec<_> = uncovered.into_iter().take(MOST_UNCOVERED).collect();
    let more = reasons.saturating_sub(number(uncovered.len()));
    let mut status = MirrorStatus {
        observed_generation,
        conditions: conditions
            .into_iter()
            .map(|(type_, value)| condition(type_, value, observed_generation, before, now))
            .collect(),
        reporting_nodes: number(reports.len()),
        last_report_time: was.and_then(|was| was.last_report_time.clone()),
        pods,
        packets,
        expiration_time: expires.cloned(),
        uncovered,
        more_uncovered: (more > 0).then_some(more),
    };
    if was != Some(&status) || is_renewed(status.last_report_time.as_ref(), asked.reported.as_ref()) {
        status.last_report_time.clone_from(&asked.reported);
    }
    status
}

/// The condition of this type in a status.
pub fn condition_of<'s>(status: &'s MirrorStatus, type_: &str) -> Option<&'s Condition> {
    of_type(&status.conditions, type_)
}

fn of_type<'s>(conditions: &'s [Condition], type_: &str) -> Option<&'s Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// The generation that all nodes with a report have read.
fn observed(generations: impl Iterator<Item = i64>, asked: i64) -> i64 {
    generations.min().map_or(asked, |least| least.clamp(0, asked))
}

/// The status of a condition, its reason in a word and its reason in a sentence.
type Value = (&'static str, String, String);

fn condition(
    type_: &str,
    (status, reason, message): Value,
    observed_generation: i64,
    before: &[Condition],
    now: &Time,
) -> Condition {
    let same = of_type(before, type_).filter(|before| before.status == status);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason,
        message,
        observed_generation: Some(observed_generation),
        last_transition_time: same.map_or(now, |before| &before.last_transition_time).clone(),
    }
}

/// The condition `Ready`: the first of the others that says why nothing, or not everything, is copied.
fn ready(accepted: &Value, covered: &Value, ended: &Value) -> Value {
    match (accepted.0, ended.0) {
        ("True", "True") => ("False", ended.1.clone(), ended.2.clone()),
        ("True", _) => covered.clone(),
        _ => accepted.clone(),
    }
}

/// The condition `Accepted`, and the word for why it is refused.
fn accepted(
    asked: &Asked,
    reports: &ByNode<'_, MirrorSummary>,
    stale: &ByNode<'_, MirrorSummary>,
) -> (Value, Option<String>) {
    let refused = |reason: &str, message: String| {
        let reason = word(reason);
        (("False", reason.clone(), message), Some(reason))
    };
    if let Some(Refusal { reason, message }) = &asked.refused {
        return refused(reason, text(message));
    }
    let refusals = reports.iter().filter_map(|(node, report)| {
        let Refusal { reason, message } = report.refused.as_ref()?;
        Some((*node, (reason.as_str(), message.as_str())))
    });
    match most_told(refusals, reports.len()) {
        Some((reason, message)) => refused(reason, message),
        None => (not_refused(reports, stale), None),
    }
}

/// Nobody has refused it. Without a report that counts, nobody has judged it either.
fn not_refused<R>(reports: &ByNode<'_, R>, stale: &ByNode<'_, R>) -> Value {
    if !reports.is_empty() {
        ("True", "Accepted".to_owned(), "no node refuses it".to_owned())
    } else if !stale.is_empty() {
        report_stale(stale)
    } else {
        no_nodes()
    }
}

fn no_nodes() -> Value {
    ("Unknown", "NoNodes".to_owned(), "no node reports on it".to_owned())
}

/// Nodes that have more objects of a kind than they can report.
fn not_all_told(left_out: usize, kind: &str) -> Value {
    let nodes = if left_out == 1 { "node has" } else { "nodes have" };
    let message = format!("{left_out} {nodes} more {kind} than a MirrorNode can hold");
    ("Unknown", "NotAllTold".to_owned(), message)
}

/// Nodes with a stale report: their agents are dead, or their clocks wrong.
fn report_stale<R>(stale: &ByNode<'_, R>) -> Value {
    let have = if stale.len() == 1 { "node has" } else { "nodes have" };
    let named: Vec<_> = stale.keys().take(MOST_NODES).map(|node| name(node)).collect();
    let more = match stale.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let message = format!("{} {have} no current report: {}{more}", stale.len(), named.join(", "));
    ("Unknown", REPORT_STALE.to_owned(), message)
}

/// The refusal of most nodes, with how many of `all` nodes these are.
fn most_told<'r>(
    refusals: impl Iterator<Item = (&'r str, (&'r str, &'r str))>,
    all: usize,
) -> Option<(&'r str, String)> {
    let mut nodes_of = BTreeMap::<_, Vec<_>>::new();
    for (node, refusal) in refusals {
        nodes_of.entry(refusal).or_default().push(node);
    }
    let most = nodes_of.iter().max_by_key(|(refusal, nodes)| (nodes.len(), std::cmp::Reverse(*refusal)));
    let ((reason, message), nodes) = most?;
    let (count, first) = (nodes.len(), name(nodes.first().copied().unwrap_or_default()));
    let message = text(message);
    let share = if count == all {
        String::new()
    } else {
        format!(" (on {count} of {all} nodes, for example {first})")
    };
    Some((reason, format!("{message}{share}")))
}

/// The sums of all reports.
#[derive(Default)]
struct Sums<'r> {
    pods: Pods,
    /// The selected pods in the reports that count.
    known: i64,
    packets: Packets,
    nics: i64,
    ended: i64,
    /// The last time at which a limit ends it on a node.
    expires: Option<&'r Time>,
    /// The first pods that are not covered, with their nodes; more than a status reports.
    uncovered: BTreeSet<Uncovered>,
    /// How many reasons there are, with those that no node names.
    reasons: i64,
}

impl<'r> Sums<'r> {
    fn of(reports: &ByNode<'r, MirrorSummary>, stale: &ByNode<'r, MirrorSummary>, now: &Time) -> Self {
        let mut sums = Self::default();
        for report in reports.values().chain(stale.values()) {
            add(&mut sums.pods.selected, report.pods.selected);
            add(&mut sums.nics, report.nics);
            sums.expires = sums.expires.max(report.expiration_time.as_ref());
        }
        for report in stale.values() {
            // Limits end a mirror without an agent, too.
            let has_expired = report.expiration_time.as_ref().is_some_and(|expires| expires <= now);
            add(&mut sums.ended, if has_expired { report.nics } else { report.ended.min(report.nics) });
        }
        for (node, report) in reports {
            let selected = report.pods.selected.max(0);
            add(&mut sums.known, selected);
            add(&mut sums.ended, report.ended.min(report.nics));
            add(&mut sums.pods.covered, report.pods.covered.min(selected));
            add(&mut sums.packets.copied, report.packets.copied);
            add(&mut sums.packets.lost, report.packets.lost);
            add(&mut sums.reasons, number(report.uncovered.len()));
            add(&mut sums.reasons, report.more_uncovered.unwrap_or(0));
            for of in &report.uncovered {
                sums.uncovered.insert(cut(of, node));
                if sums.uncovered.len() > MOST_UNCOVERED {
                    sums.uncovered.pop_last();
                }
            }
        }
        sums
    }

    fn covered(&self, asked: &Asked, refused: Option<String>, stale: &ByNode<'_, MirrorSummary>) -> Value {
        let Pods { selected, covered } = self.pods;
        let is = |status, reason: &str, message| (status, reason.to_owned(), message);
        if covered < self.known {
            let missing = selected - covered;
            let words = self.uncovered.iter().map(|of| of.reason.as_str());
            let words: BTreeSet<_> = words.chain((!stale.is_empty()).then_some(REPORT_STALE)).collect();
            let words: Vec<_> = refused.as_deref().into_iter().chain(words).take(MOST_REASONS).collect();
            let why = if words.is_empty() { String::new() } else { format!(": {}", words.join(", ")) };
            return is("False", "NotCovered", format!("{missing} of {} not covered{why}", are(selected)));
        }
        if !stale.is_empty() {
            return report_stale(stale);
        }
        if asked.left_out > 0 {
            return not_all_told(asked.left_out, "Mirrors");
        }
        if selected == 0 {
            return is("Unknown", "NoPods", "no node reports a selected pod".to_owned());
        }
        is("True", "AllCovered", format!("{selected} of {} covered", are(selected)))
    }

    fn ended(&self) -> Value {
        let Self { nics, ended, .. } = *self;
        let is = |status, reason: &str, message| (status, reason.to_owned(), message);
        match (nics, ended) {
            (0, _) => is("False", "NotBegun", "no NIC is mirrored".to_owned()),
            (_, 0) => is("False", "NotEnded", "no limit has been reached".to_owned()),
            (nics, ended) if ended == nics => {
                is("True", "LimitReached", "a limit has been reached on every NIC".to_owned())
            }
            (nics, ended) => {
                is("False", "PartlyEnded", format!("a limit has been reached on {ended} of {nics} NICs"))
            }
        }
    }
}

/// A number of pods, with the verb.
fn are(pods: i64) -> String {
    if pods == 1 { "1 pod is".to_owned() } else { format!("{pods} pods are") }
}

/// Adds what a node reports.
fn add(sum: &mut i64, reported: i64) {
    *sum = sum.saturating_add(reported.max(0));
}

fn number(count: usize) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

fn cut(Uncovered { namespace, pod, nic, reason, message, node: _ }: &Uncovered, node: &str) -> Uncovered {
    Uncovered {
        namespace: name(namespace),
        pod: name(pod),
        nic: nic.as_deref().map(name),
        reason: word(reason),
        message: text(message),
        node: Some(name(node)),
    }
}

/// A sentence of a node, cut, in one line.
fn text(text: &str) -> String {
    shown(text, MOST_BYTES)
}

/// A name that a node reports, cut.
fn name(text: &str) -> String {
    shown(text, MOST_BYTES_OF_NAME)
}

/// A reason that a node reports: a word, as Kubernetes demands it.
fn word(text: &str) -> String {
    let is_word = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|char| char.is_ascii_alphanumeric())
        && text.len() <= MOST_BYTES_OF_NAME;
    if is_word { text.to_owned() } else { "Other".to_owned() }
}

fn shown(text: &str, most: usize) -> String {
    let text = &text[..text.floor_char_boundary(most)];
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;
