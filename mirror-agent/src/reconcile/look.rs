//! The look of a round: the installed state, the devices, and the taps that are possible with them.
//!
//! This step changes only the devices that mirroring needs. After a change the loop looks again, because the first
//! view is out of date.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use anyhow::Context as _;
use mirror_core::collector;
use tokio::time::Instant;

use super::{
    AGAIN, Reconciler,
    refused::{refuse_mirrors, refuse_selection},
};
use crate::{
    kernel::{
        dataplane::Dataplane,
        links::{LinkTable, PodNetns},
    },
    model::{Actual, LinkSnapshot, Pod},
    select::{Capture, Choice, Selection, keep_installed},
    sources::PodSource,
};

/// The number of times that a round looks at the node while it changes devices. A process of a pod can change devices
/// forever.
pub(super) const MOST_LOOKS: usize = 4;

/// The state of the node.
pub(super) struct Node {
    pub(super) links: LinkSnapshot,
    pub(super) actual: Actual,
    /// See [`LinkTable::shows_redirects`].
    pub(super) shows_redirects: bool,
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Returns the pods of a list, and the pods that still run although their objects were deleted.
    pub(super) fn with_deleted(&mut self, list: &Arc<[Pod]>) -> anyhow::Result<Arc<[Pod]>> {
        let (now, deleted) = (Instant::now(), &mut self.memory.deleted);
        deleted.add(self.pods.deleted(), now);
        let running = self.links.running(deleted.uids())?;
        Ok(deleted.join(list, &running, now))
    }

    /// Looks at the node, and changes devices where necessary. Then it looks again: the relay hub comes before the
    /// relay devices on it, and a pod may get a NIC in the meantime. Adds the errors that concern more than a single
    /// pod or target to `failures`.
    pub(super) async fn look(
        &mut self,
        pods: Option<&[Pod]>,
        choice: &Choice<'_>,
        captures: &[Capture],
        failures: &mut BTreeSet<String>,
    ) -> anyhow::Result<(Node, Selection)> {
        let mut looks = 0;
        loop {
            let (node, selection) = self.look_once(pods, choice, captures).await?;
            let (has_changed, failed) = self.change_devices(&node, &selection.taps, pods.is_some()).await;
            failures.extend(failed);
            looks += 1;
            if !has_changed || looks == MOST_LOOKS {
                // Not every change of a pod's devices is an event on the node.
                let wait = has_changed.then_some(AGAIN);
                self.memory.schedule.after(Instant::now(), wait, "devices have changed");
                self.memory.devices.note(&node.links, &node.actual);
                return Ok((node, selection));
            }
        }
    }

    /// Reads the installed state and the devices, and selects taps.
    async fn look_once(
        &mut self,
        pods: Option<&[Pod]>,
        choice: &Choice<'_>,
        captures: &[Capture],
    ) -> anyhow::Result<(Node, Selection)> {
        let actual = self.dataplane.observe().await.context("cannot read what is installed")?;
        if pods.is_none() {
            // Before the devices, so that the snapshot includes the routes and offloads of the installed targets.
            let targets = self.memory.take_installed_targets(&actual);
            self.links.follow(targets);
        }
        let mut links = self.snapshot(choice, captures, pods).await?;
        if pods.is_some_and(|pods| self.memory.devices.begin(pods, &links)) {
            links = self.snapshot(choice, captures, pods).await?;
        }
        keep_installed(&mut links, &actual.taps);
        if !self.memory.started {
            refuse_mirrors(&self.memory.own_targets, &links)?;
        }
        self.learn_cnis().await;
        // Problems at the start must be known before a mirror interface is created.
        let selection = self.selection(choice, captures, &links, &actual).await;
        if pods.is_some() && !self.memory.started {
            refuse_selection(&selection, &self.memory.policy)?;
            self.memory.started = true;
        }
        let shows_redirects = !selection.taps.is_empty() && self.links.shows_redirects();
        Ok((Node { links, actual, shows_redirects }, selection))
    }

    async fn snapshot(
        &mut self,
        choice: &Choice<'_>,
        captures: &[Capture],
        pods: Option<&[Pod]>,
    ) -> anyhow::Result<LinkSnapshot> {
        let pods = self.pods_to_read(choice, captures, pods.unwrap_or_default());
        self.links.snapshot(&pods).await.context("cannot read the network devices")
    }

    /// Returns the pods whose devices must be read: the wanted ones, the collectors, and those that may have a relay
    /// device. For a reader of interfaces, which must not read some pods: all.
    fn pods_to_read(&self, choice: &Choice<'_>, captures: &[Capture], pods: &[Pod]) -> Vec<PodNetns> {
        let wanted = &choice.wanted;
        let mut nics = BTreeMap::<_, BTreeSet<String>>::new();
        for wanted in wanted {
            let names = wanted.expected_nics().map(|(_, name)| name.to_owned());
            nics.entry(&wanted.pod.id.uid).or_default().extend(names);
        }
        let wanted = wanted.iter().map(|wanted| wanted.pod);
        // A pod without mirrors may still have a relay device, which must be deleted.
        let with_exits = pods.iter().filter(|pod| self.memory.devices.may_be_in(&pod.id.uid));
        let collectors = self.memory.policy.collectors().flat_map(|(_, nic)| collector::of(nic, pods));
        let reads_interfaces = captures.iter().any(Capture::is_of_interfaces);
        // An interface whose pod is known belongs to no barred pod.
        let others = pods.iter().filter(|_| reads_interfaces);
        let (mut uids, mut to_read) = (BTreeSet::new(), Vec::new());
        let all = wanted.chain(collectors).chain(with_exits).chain(others);
        for pod in all.filter(|pod| !pod.host_network) {
            if uids.insert(&pod.id.uid) {
                to_read.push(PodNetns {
                    uid: pod.id.uid.clone(),
                    path: pod.netns.clone(),
                    nics: nics.remove(&pod.id.uid).unwrap_or_default(),
                });
            }
        }
        to_read
    }
}
