//! The cache of the last readings of pods' namespaces.
//!
//! A thread has to enter a namespace to read it: too much work for each pod in each round. A NIC that is added or
//! removed changes both sides of its veth, and the node side is in every snapshot. A change inside the pod only (a NIC
//! is renamed, a macvlan is added) is noticed when the reading expires.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use mirror_core::exit::is_exit;
use tokio::time::Instant;

use crate::model::{IfIndex, Link, LinkKind, NetnsId, PodLinks};

/// The maximum age of a reading: the longest time that the loop waits for an event.
const MAX_AGE: Duration = Duration::from_secs(60);
/// The maximum age for a namespace with a relay device (`exit`). Root in the pod can delete it or set it down, and the
/// kernel sends no event for that.
const MAX_AGE_WITH_EXIT: Duration = Duration::from_secs(2);

/// The node's veths that lead into one namespace: the index of each, the index of the NIC at the other end, and the
/// name.
pub(super) type Veths = Vec<(IfIndex, u32, String)>;

/// Returns the node's veths by the id of the namespace that they lead into.
pub(super) fn veths(host: &BTreeMap<IfIndex, Link>) -> HashMap<i32, Veths> {
    let mut veths: HashMap<_, Veths> = HashMap::new();
    for link in host.values().filter(|link| link.kind == LinkKind::Veth) {
        if let Some((peer, nsid)) = link.peer.and_then(|peer| Some((peer.ifindex, peer.nsid?))) {
            veths.entry(nsid).or_default().push((link.ifindex, peer, link.name.clone()));
        }
    }
    veths
}

/// Readings by namespace.
#[derive(Default)]
pub(super) struct Cache {
    readings: HashMap<NetnsId, Reading>,
}

struct Reading {
    links: PodLinks,
    nsid: i32,
    veths: Veths,
    /// The NICs that annotations named.
    nics: BTreeSet<String>,
    read: Instant,
    is_wanted: bool,
}

impl Reading {
    /// Whether the reading is still valid: the same veths lead there, it is not too old, and annotations name no new
    /// NIC that is missing from it. (Multus names a NIC in the annotation after it has created the NIC.)
    ///
    /// When a namespace is deleted, a new namespace can get its identity, its id and the indexes of its veths (a veth
    /// that is moved to the node keeps its index from the namespace, and each namespace counts from 1). But a CNI gives
    /// each pod's veth a unique name on the node. So a reading without veths is never valid.
    fn holds(&self, veths: &HashMap<i32, Veths>, nics: &BTreeSet<String>, age: Duration) -> bool {
        let is_in = |name: &&String| self.links.links.iter().any(|link| link.name == **name);
        let is_new = nics.difference(&self.nics).any(|name| !is_in(&name));
        let max_age = if self.links.links.iter().any(is_exit) { MAX_AGE_WITH_EXIT } else { MAX_AGE };
        !is_new && !self.veths.is_empty() && veths.get(&self.nsid) == Some(&self.veths) && age < max_age
    }
}

impl Cache {
    /// Returns the reading of a namespace, if it is valid.
    pub(super) fn get(
        &mut self,
        netns: NetnsId,
        veths: &HashMap<i32, Veths>,
        nics: &BTreeSet<String>,
    ) -> Option<&PodLinks> {
        let reading = self.readings.get_mut(&netns)?;
        reading.is_wanted = reading.holds(veths, nics, reading.read.elapsed());
        reading.is_wanted.then_some(&reading.links)
    }

    /// Returns the reading of a namespace, of any age, without the NICs whose veths have changed. `None` if all of its
    /// veths have changed: only an unchanged veth shows that the namespace still exists.
    pub(super) fn last(&mut self, netns: NetnsId, veths: &HashMap<i32, Veths>) -> Option<PodLinks> {
        let reading = self.readings.get_mut(&netns)?;
        let mut same = reading.veths.clone();
        same.retain(|veth| veths.get(&reading.nsid).is_some_and(|now| now.contains(veth)));
        reading.is_wanted = !same.is_empty();
        let is_there = |link: &Link| {
            link.kind != LinkKind::Veth || same.iter().any(|(_, peer, _)| *peer == link.ifindex.0)
        };
        let mut links = reading.is_wanted.then(|| reading.links.clone())?;
        links.links.retain(is_there);
        Some(links)
    }

    /// Stores a new reading. Without an id of the namespace, changes could not be noticed, so it is not stored.
    pub(super) fn put(&mut self, links: &PodLinks, veths: &HashMap<i32, Veths>, nics: &BTreeSet<String>) {
        let Some(nsid) = links.nsid else { return };
        let reading = Reading {
            links: links.clone(),
            nsid,
            nics: nics.clone(),
            veths: veths.get(&nsid).cloned().unwrap_or_default(),
            read: Instant::now(),
            is_wanted: true,
        };
        self.readings.insert(links.netns, reading);
    }

    pub(super) fn forget(&mut self, netns: NetnsId) {
        self.readings.remove(&netns);
    }

    /// Forgets the readings that were not used since the last call.
    pub(super) fn forget_unwanted(&mut self) {
        self.readings.retain(|_, reading| std::mem::take(&mut reading.is_wanted));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Peer;

    const NETNS: NetnsId = NetnsId { dev: 4, ino: 7 };

    fn veth(ifindex: u32, peer: u32, nsid: Option<i32>) -> (IfIndex, Link) {
        let link = Link {
            ifindex: IfIndex(ifindex),
            name: format!("veth{ifindex}"),
            kind: LinkKind::Veth,
            up: true,
            carrier: true,
            master: None,
            peer: Some(Peer { ifindex: peer, nsid }),
            queueless: true,
            is_ethernet: true,
            address: None,
            mtu: 1500,
            external: None,
            is_private: false,
            offloads: Default::default(),
            alias: None,
        };
        (link.ifindex, link)
    }

    fn inside(nsid: Option<i32>) -> PodLinks {
        PodLinks { netns: NETNS, is_host: false, nsid, links: Vec::new(), stale: None }
    }

    fn none() -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// A node with another device, and veths into namespaces.
    fn node(veths_of: &[(u32, u32, Option<i32>)]) -> HashMap<i32, Veths> {
        let mut host: BTreeMap<_, _> =
            veths_of.iter().map(|(own, peer, nsid)| veth(*own, *peer, *nsid)).collect();
        let (ifindex, bridge) = veth(99, 2, Some(1));
        host.insert(ifindex, Link { kind: LinkKind::Other("vlan".into()), ..bridge });
        veths(&host)
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_holds_while_the_same_veths_lead_there() {
        let before = node(&[(10, 2, Some(1)), (11, 3, Some(1)), (12, 2, Some(2))]);
        let mut cache = Cache::default();
        assert_eq!(cache.get(NETNS, &before, &none()), None, "nothing was read");
        cache.put(&inside(Some(1)), &before, &none());
        for (what, now, holds) in [
            ("nothing has changed", node(&[(10, 2, Some(1)), (11, 3, Some(1)), (12, 2, Some(2))]), true),
            ("another pod is gone", node(&[(10, 2, Some(1)), (11, 3, Some(1))]), true),
            ("a NIC is gone", node(&[(10, 2, Some(1)), (12, 2, Some(2))]), false),
            ("a NIC has come", node(&[(10, 2, Some(1)), (11, 3, Some(1)), (13, 4, Some(1))]), false),
            ("a NIC was replaced", node(&[(10, 2, Some(1)), (13, 3, Some(1))]), false),
            ("a NIC was moved elsewhere", node(&[(10, 2, Some(1)), (11, 3, Some(3))]), false),
            ("a NIC was moved to the node", node(&[(10, 2, Some(1)), (11, 3, None)]), false),
            ("all are gone", node(&[(12, 2, Some(2))]), false),
        ] {
            assert_eq!(cache.get(NETNS, &now, &none()).is_some(), holds, "{what}");
        }
        assert_eq!(cache.get(NetnsId { dev: 4, ino: 8 }, &before, &none()), None, "another namespace");

        tokio::time::advance(MAX_AGE - Duration::from_millis(1)).await;
        assert_eq!(cache.get(NETNS, &before, &none()), Some(&inside(Some(1))));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.last(NETNS, &before), Some(inside(Some(1))), "it is still there");
        assert_eq!(cache.get(NETNS, &before, &none()), None, "too old");
    }

    #[tokio::test(start_paused = true)]
    async fn a_nic_that_an_annotation_names_since_is_looked_for_once() {
        let (node, names) = (node(&[(10, 2, Some(1))]), |names: &[&str]| {
            names.iter().map(|name| (*name).to_owned()).collect()
        });
        let mut cache = Cache::default();
        let read = PodLinks { links: vec![veth(2, 10, Some(0)).1], ..inside(Some(1)) };
        cache.put(&read, &node, &names(&["absent"]));
        for (nics, holds) in
            [(&["absent"][..], true), (&[], true), (&["veth2"], true), (&["absent", "net1"], false)]
        {
            assert_eq!(cache.get(NETNS, &node, &names(nics)).is_some(), holds, "{nics:?}");
        }
        cache.put(&read, &node, &names(&["net1"]));
        assert!(cache.get(NETNS, &node, &names(&["net1"])).is_some(), "it is still absent");
    }

    #[tokio::test(start_paused = true)]
    async fn an_exit_is_looked_after_more_often() {
        let node = node(&[(10, 2, Some(1))]);
        let exit = Link {
            kind: LinkKind::Other("macvlan".into()),
            ..veth(mirror_core::exit::IFINDEX.0, 9, Some(0)).1
        };
        let with_exit = PodLinks { links: vec![exit], ..inside(Some(1)) };
        let mut cache = Cache::default();
        cache.put(&with_exit, &node, &none());
        tokio::time::advance(MAX_AGE_WITH_EXIT - Duration::from_millis(1)).await;
        assert_eq!(cache.get(NETNS, &node, &none()), Some(&with_exit));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.get(NETNS, &node, &none()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn of_an_old_reading_those_veths_are_left_that_are_as_they_were() {
        let before = node(&[(10, 2, Some(1)), (11, 3, Some(1)), (12, 2, Some(2))]);
        let (lo, macvlan) = (LinkKind::Loopback, LinkKind::Other("macvlan".into()));
        let of_kind = |ifindex, kind| Link { kind, ..veth(ifindex, 9, None).1 };
        let links = [(1, lo), (2, LinkKind::Veth), (3, LinkKind::Veth), (4, macvlan)];
        let links = links.map(|(ifindex, kind)| of_kind(ifindex, kind)).to_vec();
        let mut cache = Cache::default();
        cache.put(&PodLinks { links, ..inside(Some(1)) }, &before, &none());
        for (what, now, left) in [
            ("nothing has changed", before.clone(), Some(vec![1, 2, 3, 4])),
            ("a NIC is gone", node(&[(10, 2, Some(1))]), Some(vec![1, 2, 4])),
            ("a NIC was replaced", node(&[(13, 2, Some(1)), (11, 3, Some(1))]), Some(vec![1, 3, 4])),
            (
                "a NIC has come",
                node(&[(10, 2, Some(1)), (11, 3, Some(1)), (13, 5, Some(1))]),
                Some(vec![1, 2, 3, 4]),
            ),
            ("one was moved elsewhere", node(&[(10, 2, Some(3)), (11, 3, Some(1))]), Some(vec![1, 3, 4])),
            ("all are gone", node(&[(12, 2, Some(2))]), None),
        ] {
            let last = cache.last(NETNS, &now);
            let indexes = last.map(|last| last.links.iter().map(|link| link.ifindex.0).collect::<Vec<_>>());
            assert_eq!(indexes, left, "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_no_veth_leads_to_is_read_each_time() {
        let node = node(&[(10, 2, Some(1))]);
        let mut cache = Cache::default();
        cache.put(&inside(None), &node, &none());
        assert_eq!(cache.get(NETNS, &node, &none()), None);
        cache.put(&inside(Some(5)), &node, &none());
        assert_eq!(cache.get(NETNS, &node, &none()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_asks_for_is_forgotten() {
        let node = node(&[(10, 2, Some(1))]);
        let mut cache = Cache::default();
        cache.put(&inside(Some(1)), &node, &none());
        cache.forget_unwanted();
        assert!(cache.get(NETNS, &node, &none()).is_some(), "it was read in this round");
        cache.forget_unwanted();
        assert!(cache.get(NETNS, &node, &none()).is_some(), "it was asked for in this round");
        cache.forget_unwanted();
        cache.forget_unwanted();
        assert!(cache.readings.is_empty());
    }
}
