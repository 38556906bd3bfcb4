//! The reports about pods in the API of packets: the status of a node by pods, and rates from two readings.
//!
//! Pure. The types are a public interface in the form of the Kubernetes API: fields are added, but never renamed.
//!
//! Counters can restart between two readings: a pod, its sandbox or a mirror is replaced. So a difference is computed
//! only between counters of the same session that have not decreased. Otherwise the rate is unknown, and never negative.

use std::{collections::BTreeSet, time::Duration};

use mirror_common::verdict::Direction;
use serde::{Deserialize, Serialize};

use super::{
    DirectionCoverage, Finding, NodeStatus, SessionStatus, TapStatus,
    explain::{Subject, coverage},
};

/// The report about a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// The pod.
    pub metadata: PodMetadata,
    /// Its node. The server of the API sets it.
    pub node: String,
    /// Whether and how it is mirrored, for people. Only if the request names the pod: for many pods it would be long.
    pub explanation: Option<String>,
    /// Its tapped NICs, by name.
    pub nics: Vec<NicReport>,
    /// Why the pod, a NIC or a mirror is not mirrored as requested.
    pub not_mirrored: Vec<Finding>,
}

/// The pod of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodMetadata {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// A tapped NIC.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NicReport {
    /// Its name inside the pod.
    pub name: String,
    /// The tapped device.
    pub device: String,
    /// Its network, as in [`TapStatus::network`].
    pub network: Option<String>,
    /// Why a tap on the node side of a veth sees ingress inside the pod.
    pub why_inside: Option<String>,
    /// Coverage of what reaches the pod. `None`: unknown.
    pub ingress: Option<DirectionCoverage>,
    /// Coverage of what leaves the pod. `None`: unknown.
    pub egress: Option<DirectionCoverage>,
    /// Its mirrors.
    pub mirrors: Vec<MirrorReport>,
    /// Its rates. `None`: not requested, or unknown.
    pub rates: Option<Rates>,
}

/// A mirror at a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorReport {
    /// The mirror.
    pub name: String,
    /// The target of the copies.
    pub target: String,
    /// Packets that were copied.
    pub copied: u64,
    /// Packets that should have been copied but were not.
    pub lost: u64,
}

/// The rates of a NIC, per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// What reaches the pod.
    pub ingress: Traffic,
    /// What leaves the pod.
    pub egress: Traffic,
    /// What all mirrors copy.
    pub copied: Traffic,
    /// What all mirrors lose.
    pub lost: Traffic,
}

/// Packets and bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets.
    pub packets: f64,
    /// Bytes.
    pub bytes: f64,
}

impl NodeStatus {
    /// Returns the reports about the pods with this namespace and name (`None`: any), in any order. They have rates if
    /// there is an earlier status, with the time since then.
    pub fn reports(&self, of: [Option<&str>; 2], then: Option<(&Self, Duration)>) -> Vec<PodReport> {
        let tapped = self.taps.iter().filter_map(|tap| tap.pod.as_ref()).map(ToString::to_string);
        let known = self.notes.iter().flat_map(|notes| &notes.pods).flatten().map(|known| known.pod.clone());
        // About a pod that the agent does not know, the explanation says where to look.
        let requested = of[0].zip(of[1]).map(|(namespace, name)| format!("{namespace}/{name}"));
        let pods: BTreeSet<_> = tapped.chain(known).chain(requested).collect();
        let report = |pod: &String| {
            let (namespace, name) = pod.split_once('/')?;
            let is_requested = of.iter().zip([namespace, name]).all(|(of, it)| of.is_none_or(|of| of == it));
            is_requested.then(|| PodReport {
                metadata: PodMetadata { namespace: namespace.into(), name: name.into() },
                explanation: of[1].map(|_| self.explain(pod).unwrap_or_else(|unknown| unknown)),
                ..self.report(pod, then)
            })
        };
        pods.iter().filter_map(report).collect()
    }

    /// The report about a pod, without its name.
    fn report(&self, pod: &str, then: Option<(&Self, Duration)>) -> PodReport {
        let Subject { taps, skipped, bad, known, .. } = Subject::of(self, pod);
        let not_asked = known.and_then(|known| known.not_asked.clone());
        let not_asked = not_asked.map(|of| Finding { pod: Some(pod.to_owned()), ..of });
        let not_mirrored = not_asked.into_iter().chain(bad.into_iter().chain(skipped).cloned()).collect();
        let mut nics: Vec<_> = taps.into_iter().map(|tap| self.nic(tap, then)).collect();
        nics.sort_by(|one, other| one.name.cmp(&other.name));
        PodReport { nics, not_mirrored, ..PodReport::default() }
    }

    fn nic(&self, tap: &TapStatus, then: Option<(&Self, Duration)>) -> NicReport {
        let coverage = coverage::of(self, tap);
        let mirror = |session: &SessionStatus| {
            let [_, _, [copied, _], [lost, _]] = counts(session);
            let (name, target) = (session.mirror.clone(), session.target.clone());
            MirrorReport { name, target, copied, lost }
        };
        NicReport {
            name: tap.nic.clone(),
            device: tap.device.clone(),
            network: tap.network.clone(),
            why_inside: coverage.and_then(|of| of.why_inside.clone()),
            ingress: coverage.map(|of| of.ingress.clone()),
            egress: coverage.map(|of| of.egress.clone()),
            mirrors: tap.sessions.iter().map(mirror).collect(),
            rates: then.and_then(|(then, time)| rates(then, tap, time)),
        }
    }
}

/// Packets and bytes: of ingress, of egress, of copies, and of losses.
type Counts = [[u64; 2]; 4];

fn counts(session: &SessionStatus) -> Counts {
    let mut sums = Counts::default();
    for counter in &session.counters {
        let is_ingress = counter.direction == Direction::Ingress.name();
        let are_counted = [is_ingress, !is_ingress, counter.is_copied(), counter.is_lost()];
        for ([packets, bytes], _) in sums.iter_mut().zip(are_counted).filter(|(_, is_counted)| *is_counted) {
            *packets = packets.saturating_add(counter.packets);
            *bytes = bytes.saturating_add(counter.bytes);
        }
    }
    sums
}

/// The rates of a NIC.
fn rates(then: &NodeStatus, now: &TapStatus, time: Duration) -> Option<Rates> {
    // A pod that is created again has another UID, and a pod with a new sandbox another device.
    let key = |tap: &TapStatus| (tap.ifindex, tap.inside, tap.nic.clone(), tap.pod.clone());
    let then = then.taps.iter().find(|tap| tap.ifindex == now.ifindex && key(tap) == key(now))?;
    let mut sums = None::<Counts>;
    for session in &now.sessions {
        // A mirror that begins again has another serial.
        let is_same = |of: &&SessionStatus| of.serial == session.serial && of.mirror == session.mirror;
        let Some(before) = then.sessions.iter().find(is_same).map(counts) else { continue };
        let after = counts(session);
        let added = after.as_flattened().iter().zip(before.as_flattened());
        let added = added.map(|(after, before)| after.checked_sub(*before)).collect::<Option<Vec<_>>>();
        let Some(added) = added else { continue };
        for (at, (sum, added)) in
            sums.get_or_insert_default().as_flattened_mut().iter_mut().zip(added).enumerate()
        {
            // Each session counts each packet of its tap once, so any one of them gives the traffic of the tap.
            *sum = if at < 4 { added.max(*sum) } else { sum.saturating_add(added) };
        }
    }
    let seconds = Some(time.as_secs_f64()).filter(|seconds| *seconds > 0.0)?;
    let rates = sums?.map(|count| count.map(|count| count as f64 / seconds));
    let [ingress, egress, copied, lost] = rates.map(|[packets, bytes]| Traffic { packets, bytes });
    Some(Rates { ingress, egress, copied, lost })
}

#[cfg(test)]
mod tests;
