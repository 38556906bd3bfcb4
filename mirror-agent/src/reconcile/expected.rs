//! The wait for pods whose process, or NIC, will appear without an event. Pure; the loop calls it.
//!
//! A pod should be tapped before its first container runs, and only some milliseconds pass between the creation of its
//! sandbox and that of the container. So the loop polls often while it expects a pod. Some CNIs need a second between
//! the creation of the veth, which causes an event, and the start of the sandbox's process, which does not (Cilium
//! loads the programs of the pod).

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;

use crate::{
    model::IfIndex,
    select::{Skipped, Wanted},
};

/// The shortest and the longest wait. The loop adds some milliseconds, in which it collects events.
const WAIT: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// The next wait is 1/`PART` of the time waited so far. So a pod is noticed late by at most this fraction: by 30 ms if
/// its CNI plugin waits 1.5 s for IPv6's duplicate address detection, less than a runtime needs to start a container.
/// A pod that never starts costs some 300 rounds in its first minute, and one a second afterwards. Where a round takes
/// more than some milliseconds, these rounds use up what [`Pace`](super::Pace) keeps for events, and then `Pace` sets
/// the wait.
const PART: u32 = 50;

/// Returns the UIDs of pods that are found by their processes and have no process yet, or no NIC yet. Changes of a pod
/// with a named namespace cause an event.
pub(super) fn of(wanted: &[Wanted<'_>], skipped: &[Skipped]) -> BTreeSet<String> {
    let missing: BTreeSet<_> = skipped
        .iter()
        .filter(|skipped| skipped.why.is_passing())
        .filter_map(|skipped| Some(&skipped.pod.as_ref()?.uid))
        .collect();
    let by_process = wanted.iter().map(|wanted| wanted.pod).filter(|pod| pod.netns.is_none());
    by_process.map(|pod| &pod.id.uid).filter(|uid| missing.contains(uid)).cloned().collect()
}

/// The expected pods, the devices of the node, and the start of the wait.
///
/// The wait grows with the time waited so far. It starts again when the set of expected pods changes, or the devices of
/// the node: a CNI creates the veth before the runtime starts the process.
#[derive(Default)]
pub(super) struct Expected {
    of: (BTreeSet<String>, BTreeSet<IfIndex>),
    since: Option<Instant>,
}

impl Expected {
    /// Returns how long to wait for an event before the next round; `None` if no pod is expected.
    pub(super) fn wait(
        &mut self,
        pods: BTreeSet<String>,
        devices: BTreeSet<IfIndex>,
        now: Instant,
    ) -> Option<Duration> {
        if pods.is_empty() {
            *self = Self::default();
            return None;
        }
        let of = (pods, devices);
        if self.of != of {
            *self = Self { of, since: Some(now) };
        }
        let in_vain = now.saturating_duration_since(*self.since.get_or_insert(now));
        Some((in_vain / PART).clamp(WAIT.0, WAIT.1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        model::{Pod, PodId},
        select::Why,
    };

    fn set<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
        items.into_iter().collect()
    }

    #[test]
    fn the_wait_grows_while_it_is_in_vain_and_starts_anew_with_a_change() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut expected = Expected::default();
        let mut wait = |pods: &[&str], devices: &[u32], at: u64| {
            let pods = set(pods.iter().map(|uid| (*uid).to_owned()));
            expected.wait(pods, set(devices.iter().copied().map(IfIndex)), start + ms(at))
        };
        assert_eq!(wait(&[], &[1], 0), None);
        for (at, expected) in [(0, 10), (10, 10), (500, 10), (1_000, 20), (5_000, 100), (60_000, 1_000)] {
            assert_eq!(wait(&["a"], &[1], at), Some(ms(expected)), "at {at} ms");
        }
        assert_eq!(wait(&["a", "b"], &[1], 64_000), Some(ms(10)), "another pod");
        assert_eq!(wait(&["a", "b"], &[1], 66_000), Some(ms(40)), "rounds in between do not matter");
        assert_eq!(wait(&["b"], &[1], 67_000), Some(ms(10)), "one was found");
        assert_eq!(wait(&["b"], &[1, 2], 68_000), Some(ms(10)), "a device has come");
        assert_eq!(wait(&["b"], &[1, 2], 69_500), Some(ms(30)));
        assert_eq!(wait(&[], &[1, 2], 70_000), None);
        assert_eq!(wait(&["b"], &[1, 2], 71_000), Some(ms(10)), "gone again");
    }

    #[test]
    fn what_comes_without_an_event_is_expected() {
        let pods = ["a", "b", "c", "d"].map(|uid| Pod {
            id: PodId { uid: uid.into(), ..PodId::default() },
            netns: (uid == "b").then(|| "/run/netns/b".into()),
            ..Pod::default()
        });
        let wanted = |pod| Wanted { pod, mirrors: BTreeMap::new(), nics: BTreeMap::new(), is_asked: true };
        let chosen: Vec<_> = pods.iter().map(wanted).collect();
        let skip =
            |pod: usize, why| Skipped { pod: Some(pods[pod].id.clone()), nic: None, mirror: None, why };
        let interface =
            Skipped { pod: None, nic: Some("eth1".into()), mirror: None, why: Why::NoSuchInterface };
        assert_eq!(of(&chosen, &[interface]), set([]));
        let skipped = [
            skip(0, Why::NoNetns),
            skip(1, Why::NoNic),
            skip(2, Why::HostNetwork { is_asked: true }),
            skip(3, Why::NoNic),
        ];
        assert_eq!(of(&chosen, &skipped), set(["a".to_owned(), "d".to_owned()]));
    }
}
