//! The rates of the NICs: the difference of two readings of the nodes' counters, and its table. Pure.
//!
//! Counters can restart between two readings: a pod, its sandbox or a mirror is replaced, or a node restarts. So a
//! difference is computed only between counters of the same [session](Session) that have not decreased. Otherwise the
//! rate is unknown, and never negative.

use std::{collections::BTreeMap, time::Duration};

use mirror_core::status::{CounterStatus, NodeStatus, TapStatus, columns};

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

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counts {
    ingress: Count,
    egress: Count,
    copied: Count,
    lost: Count,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Count {
    packets: u64,
    bytes: u64,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }

    /// The difference since an earlier reading; `None`: the counter has restarted.
    fn since(self, then: Self) -> Option<Self> {
        let packets = self.packets.checked_sub(then.packets)?;
        Some(Self { packets, bytes: self.bytes.checked_sub(then.bytes)? })
    }
}

impl Counts {
    fn of(counters: &[CounterStatus]) -> Self {
        let mut counts = Self::default();
        for counter in counters {
            let count = Count { packets: counter.packets, bytes: counter.bytes };
            match counter.direction.as_str() {
                "ingress" => counts.ingress.add(count),
                _ => counts.egress.add(count),
            }
            if counter.is_copied() {
                counts.copied.add(count);
            } else if counter.is_lost() {
                counts.lost.add(count);
            }
        }
        counts
    }

    fn since(&self, then: &Self) -> Option<Self> {
        Some(Self {
            ingress: self.ingress.since(then.ingress)?,
            egress: self.egress.since(then.egress)?,
            copied: self.copied.since(then.copied)?,
            lost: self.lost.since(then.lost)?,
        })
    }
}

impl Look {
    /// The NICs of the pods of a namespace; `None`: of all namespaces.
    pub(super) fn new(at: Duration, status: NodeStatus, scope: Option<&str>) -> Self {
        let mut nics = BTreeMap::<_, BTreeMap<_, _>>::new();
        for TapStatus { ifindex, pod, nic, sessions, .. } in status.taps {
            let Some(pod) = pod.filter(|pod| is_within(scope, &pod.namespace)) else { continue };
            let nic = Nic { namespace: pod.namespace, pod: pod.name, nic, uid: pod.uid, ifindex };
            let sessions = sessions.into_iter().map(|session| {
                let counts = Counts::of(&session.counters);
                ((session.mirror, session.serial), counts)
            });
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

#[derive(Debug, Clone, Copy, PartialEq)]
struct Rates {
    /// Ingress and egress of the pod, as far as the tap sees them.
    ingress: Rate,
    egress: Rate,
    /// The copies of all mirrors.
    copied: Rate,
    lost: Rate,
}

/// Packets and bytes a second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rate {
    packets: f64,
    bytes: f64,
}

impl Rate {
    #[expect(clippy::cast_precision_loss, reason = "a rate is shown with three digits at most")]
    fn new(count: Count, seconds: f64) -> Self {
        Self { packets: count.packets as f64 / seconds, bytes: count.bytes as f64 / seconds }
    }
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
    let bytes = |row: &Row| row.rates.map_or(-1.0, |of| of.ingress.bytes + of.egress.bytes);
    // The sort is stable, so rows with equal rates keep their order.
    rows.sort_by(|one, other| bytes(other).total_cmp(&bytes(one)));
    rows
}

/// The rates of a NIC. Each session counts each packet of its tap once, so any one of them gives the traffic of the
/// tap.
fn rates(then: &BTreeMap<Session, Counts>, now: &BTreeMap<Session, Counts>, time: Duration) -> Option<Rates> {
    let mut sum = None::<Counts>;
    for (session, counts) in now {
        let Some(added) = then.get(session).and_then(|then| counts.since(then)) else { continue };
        let sum = sum.get_or_insert_default();
        for (most, added) in [(&mut sum.ingress, added.ingress), (&mut sum.egress, added.egress)] {
            if added.packets > most.packets {
                *most = added;
            }
        }
        sum.copied.add(added.copied);
        sum.lost.add(added.lost);
    }
    let (Counts { ingress, egress, copied, lost }, seconds) = (sum?, time.as_secs_f64());
    (seconds > 0.0).then(|| {
        let [ingress, egress, copied, lost] =
            [ingress, egress, copied, lost].map(|count| Rate::new(count, seconds));
        Rates { ingress, egress, copied, lost }
    })
}

/// The table for people, with at most `most` rows; empty without any.
pub(super) fn table(rows: &[Row], most: usize) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "NAMESPACE",
        "POD",
        "NIC",
        "NODE",
        "INGRESS/S",
        "BYTES/S",
        "EGRESS/S",
        "BYTES/S",
        "COPIED/S",
        "BYTES/S",
        "LOST/S",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for Row { node, nic, rates } in rows.iter().take(most) {
        let mut line = [&nic.namespace, &nic.pod, &nic.nic, node].map(Clone::clone).to_vec();
        line.extend(match rates {
            None => [UNKNOWN; 7].map(str::to_owned),
            Some(Rates { ingress, egress, copied, lost }) => [
                ingress.packets,
                ingress.bytes,
                egress.packets,
                egress.bytes,
                copied.packets,
                copied.bytes,
                lost.packets,
            ]
            .map(short),
        });
        lines.push(line);
    }
    let mut text = columns(&lines);
    if rows.len() > most {
        text += &format!("{most} of {} NICs are shown, those that carry most\n", rows.len());
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
