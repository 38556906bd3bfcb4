//! Creates, changes and deletes the devices of targets in each round: mirror interfaces and the devices of tunnels.
//!
//! `mirror_iface` and `tunnel` decide; this module carries out. `exits` does the same for relay devices. The loop calls
//! this module.

use std::collections::BTreeSet;

use mirror_core::{exit, tunnel};

use super::Reconciler;
use crate::{
    dataplane::Dataplane,
    links::LinkTable,
    mirror_iface,
    model::{LinkChange, LinkSnapshot},
    pods::PodSource,
};

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Changes the devices of targets where necessary, and deletes those that no target needs. Returns whether anything
    /// was to be changed. `is_listed`: the pods and the MirrorTargets are known, so devices may be deleted.
    /// `keeps_hub`: a pod has a relay device or needs one. A device that cannot be deleted does not affect others, so
    /// its error is added to `left`.
    pub(super) async fn change_links(
        &mut self,
        is_listed: bool,
        keeps_hub: bool,
        links: &LinkSnapshot,
        failures: &mut BTreeSet<String>,
        left: &mut BTreeSet<String>,
    ) -> bool {
        let mut names = self.policy.own_devices();
        if keeps_hub {
            names.insert(exit::HUB.to_owned());
        }
        let names = names.iter().map(String::as_str).collect();
        let mut changes = if is_listed { mirror_iface::left_behind(&names, links) } else { Vec::new() };
        changes.extend(self.mirrors.changes(links));
        changes.extend(self.not_made.leave_out(tunnel::changes(self.policy.tunnels(), links)));
        for change in &changes {
            let done = self.links.apply(change).await.map_err(|error| format!("{error:#}"));
            match (change, done) {
                (LinkChange::CreateTunnel(device), done) => self.not_made.note(*device, done),
                (LinkChange::Delete(_), Err(error)) => drop(left.insert(error)),
                (_, Err(error)) => drop(failures.insert(error)),
                (_, Ok(())) => {}
            }
        }
        !changes.is_empty()
    }
}
