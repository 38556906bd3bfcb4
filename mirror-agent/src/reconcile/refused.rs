//! The problems for which an agent refuses to start.
//!
//! Later, the same problems are reasons of a pod or a target. The loop checks them in its first rounds.

use std::collections::BTreeMap;

use anyhow::{anyhow, bail};
use mirror_core::destination::Destination;

use crate::{
    mirror_iface,
    model::{LinkSnapshot, TargetName},
    select::{Policy, Selection, Why},
};

/// A problem at the start, which is not retried.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
pub(super) struct Refused(pub(super) anyhow::Error);

pub(super) fn refuse_mirrors(
    targets: &BTreeMap<TargetName, Destination>,
    links: &LinkSnapshot,
) -> anyhow::Result<()> {
    let mut links = targets.values().filter_map(|to| links.by_name(to.device()?));
    match links.find_map(mirror_iface::refusal) {
        Some(why) => bail!(Refused(anyhow!(why))),
        None => Ok(()),
    }
}

pub(super) fn refuse_selection(selection: &Selection, policy: &Policy) -> anyhow::Result<()> {
    // An impossible capture is a problem of the program that requests it.
    let mut skipped = selection.skipped.iter().filter(|skipped| !skipped.is_of_capture());
    let refused = skipped.find_map(|skipped| match (&skipped.why, &skipped.nic) {
        (Why::MirrorInterface(conflict), _) if policy.is_strict || skipped.pod.is_none() => {
            Some(anyhow!("{conflict}, so copies would loop; choose another --mirror-iface"))
        }
        (Why::TunnelInTunnel(_), Some(name)) => Some(anyhow!("{name} cannot be mirrored: {}", skipped.why)),
        (Why::NoSuchInterface, Some(name)) => Some(anyhow!("interface {name:?} does not exist")),
        _ => None,
    });
    match refused {
        Some(error) => bail!(Refused(error)),
        None => Ok(()),
    }
}
