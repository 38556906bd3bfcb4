//! The rates of the NICs: the difference of two readings of the nodes' counters, and its table. Pure.
//!
//! Counters can restart between two readings: a pod, its sandbox or a mirror is replaced, or a node restarts. So a
//! difference is computed only between counters of the same [session](Session) that have not decreased. Otherwise the
//! rate is unknown, and never negative.

use std::{collections::BTreeMap, time::Duration};

use mirror_core::status::{CounterStatus, NodeStatus, SessionStatus, TapStatus, columns};

use crate::nodes::is_within;

/// The table entry of an unknown rate.
const UNKNOWN: &str = "<unknown>";
/// Lower rates are shown as `<0.1`.
const LEAST: f64 = 0.1;

/// The reading of one node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Look {
    /// The time of the reading, since the start of the command.
    at: Duration,
    nics: BTreeMap<Nic, BTreeMap<Session, Counts>>,
}

/// A tapped NIC of a node. A pod that is created again has another UID, and a pod with a new sandbox another device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Nic {
    namespace: String,
    pod: String,
    nic: String,
    uid: String,
    ifindex: u32,
}

/// A mirror at a NIC, and the serial of its session: a mirror that begins again has another serial.
type Session = (String, u32);

/// Packets and bytes.
type Count = [u64; 2];
/// Of ingress, egress, copies and losses.
type Counts = [Count; 4];
/// The same a second.
type Rates = [[f64; 2]; 4];

fn add(sum: &mut Count, count: Count) {
    for (sum, count) in sum.iter_mut().zip(count) {
        *sum = sum.saturating_add(count);
    }
}

fn counts(counters: &[CounterStatus]) -> Counts {
    let mut sums = Counts::default();
    for counter in counters {
        let is_ingress = counter.direction == "ingress";
        let are_counted = [is_ingress, !is_ingress, counter.is_copied(), counter.is_lost()];
        for (sum, _) in sums.iter_mut().zip(are_counted).filter(|(_, is_counted)| *is_counted) {
            add(sum, [counter.packets, counter.bytes]);
        }
    }
    sums
}

/// The difference since an earlier reading; `None`: a counter has restarted.
fn since(then: &Counts, now: &Counts) -> Option<Counts> {
    let mut added = *now;
    for (added, then) in added.as_flattened_mut().iter_mut().zip(then.as_flattened()) {
        *added = added.checked_sub(*then)?;
    }
    Some(added)
}

impl Look {
    /// The NICs of the pods of a namespace; `None`: of all namespaces.
    pub(super) fn new(at: Duration, status: NodeStatus, scope: Option<&str>) -> Self {
        let mut nics = BTreeMap::<_, BTreeMap<_, _>>::new();
        for TapStatus { ifindex, pod, nic, sessions, .. } in status.taps {
            let Some(pod) = pod.filter(|pod| is_within(scope, &pod.namespace)) else { continue };
            let nic = Nic { namespace: pod.namespace, pod: pod.name, nic, uid: pod.uid, ifindex };
            let counted = |of: SessionStatus| ((of.mirror, of.serial), counts(&of.counters));
            let sessions = sessions.into_iter().map(counted);
            nics.entry(nic).or_default().extend(sessions);
        }
        Self { at, nics }
    }
}

/// A NIC and its rates; `None`: they are not known yet.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    node: String,
    nic: Nic,
    rates: Option<Rates>,
}

/// The NICs of all nodes, ordered by bytes per second; those without rates are last.
pub(super) fn rows(then: &BTreeMap<String, Look>, now: &BTreeMap<String, Look>) -> Vec<Row> {
    let mut rows = Vec::new();
    for (node, look) in now {
        let before = then.get(node);
        rows.extend(look.nics.iter().map(|(nic, sessions)| Row {
            node: node.clone(),
            nic: nic.clone(),
            rates:
                before.and_then(|before| {
                    rates(before.nics.get(nic)?, sessions, look.at.saturating_sub(before.at))
                }),
        }));
    }
    let bytes = |row: &Row| row.rates.map_or(-1.0, |[ingress, egress, ..]| ingress[1] + egress[1]);
    // The sort is stable, so rows with equal rates keep their order.
    rows.sort_by(|one, other| bytes(other).total_cmp(&bytes(one)));
    rows
}

/// The rates of a NIC. Each session counts each packet of its tap once, so any one of them gives the traffic of the
/// tap.
#[expect(clippy::cast_precision_loss, reason = "a rate is shown with three digits at most")]
fn rates(then: &BTreeMap<Session, Counts>, now: &BTreeMap<Session, Counts>, time: Duration) -> Option<Rates> {
    let mut sums = None::<Counts>;
    for (session, counts) in now {
        let Some(added) = then.get(session).and_then(|then| since(then, counts)) else { continue };
        let [ingress, egress, copied, lost] = sums.get_or_insert_default();
        *ingress = added[0].max(*ingress);
        *egress = added[1].max(*egress);
        add(copied, added[2]);
        add(lost, added[3]);
    }
    let (sums, seconds) = (sums?, time.as_secs_f64());
    (seconds > 0.0).then(|| sums.map(|count| count.map(|count| count as f64 / seconds)))
}

/// The table for people, with at most `most` rows; empty without any.
pub(super) fn table(rows: &[Row], most: usize) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let head = "NAMESPACE POD NIC NODE INGRESS/S BYTES/S EGRESS/S BYTES/S COPIED/S BYTES/S LOST/S";
    let mut lines = vec![head.split(' ').map(str::to_owned).collect::<Vec<_>>()];
    for Row { node, nic, rates } in rows.iter().take(most) {
        let mut line = [&nic.namespace, &nic.pod, &nic.nic, node].map(Clone::clone).to_vec();
        match rates {
            None => line.extend([UNKNOWN; 7].map(str::to_owned)),
            // Without the bytes of the losses.
            Some(rates) => line.extend(rates.as_flattened().iter().take(7).map(|rate| short(*rate))),
        }
        lines.push(line);
    }
    let mut text = columns(&lines);
    if rows.len() > most {
        text += &format!("{most} of {} NICs are shown, those with the most traffic\n", rows.len());
    }
    text
}

/// A rate with three digits at most, and k, M, G for thousands, millions and so on.
fn short(rate: f64) -> String {
    if rate == 0.0 {
        return "0".to_owned();
    }
    if rate < LEAST {
        return format!("<{LEAST}");
    }
    let (mut rate, mut unit) = (rate, "");
    for next in ["k", "M", "G", "T", "P", "E"] {
        if rate < 999.5 {
            break;
        }
        (rate, unit) = (rate / 1000.0, next);
    }
    let decimals = usize::from(rate < 9.95 || (rate < 99.95 && !unit.is_empty()));
    format!("{rate:.decimals$}{unit}")
}

#[cfg(test)]
mod tests;
