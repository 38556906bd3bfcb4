//! The targets of a node: those of the agent's flags, and beside them those of MirrorTargets.
//!
//! Pure. The command line asks [`objection`] for its flags, and the reconcile loop asks [`join`] for the targets of each
//! round. `select` asks [`Users`] who may use a target.

use std::collections::BTreeMap;

use mirror_common::abi::MAX_TARGETS;

use crate::{
    destination::Destination,
    model::{Selector, TargetName, TargetResource},
    settings::Rate,
};

/// Which namespaces may use the targets of MirrorTargets. A target that is not here is the node's own, for all.
pub type Users = BTreeMap<TargetName, Selector>;

/// The targets of a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Targets {
    /// Where the copies of each go. No two have the same destination, but for streams.
    pub all: BTreeMap<TargetName, Destination>,
    /// Who may use those of MirrorTargets.
    pub users: Users,
    /// The limits for all copies of the node that go to a target, of those that have a limit.
    pub max_rates: BTreeMap<TargetName, Rate>,
    /// The MirrorTargets that are none on this node, and why.
    pub refused: BTreeMap<TargetName, String>,
}

/// The targets of a node before there is a list of pods: those of the flags, and those that an earlier agent has
/// installed, which may be of MirrorTargets.
pub fn until_listed<'a>(
    flags: &BTreeMap<TargetName, Destination>,
    installed: impl IntoIterator<Item = (&'a TargetName, Destination)>,
) -> BTreeMap<TargetName, Destination> {
    let mut all = flags.clone();
    for (name, to) in installed {
        if to != Destination::Stream && objection(name, &to, &all).is_none() {
            all.insert(name.clone(), to);
        }
    }
    all
}

/// Why a target cannot stand beside others, in words for the user.
pub fn objection(
    name: &TargetName,
    to: &Destination,
    others: &BTreeMap<TargetName, Destination>,
) -> Option<String> {
    if let Some(before) = others.get(name) {
        return Some(format!("the destination of target {name} is {before} already"));
    }
    for (other, of) in others {
        // Each stream is one of its own.
        if to == of && *to != Destination::Stream {
            return Some(format!("{to} is the destination of target {other} already"));
        }
        match (to.tunnel(), of.tunnel()) {
            (Some(tunnel), Some(before)) if before.meets(tunnel) => {
                return Some(format!("the target {other}, {of}, has the same keys; use others"));
            }
            (Some(tunnel), None) if of.device() == Some(&tunnel.device_name()) => {
                return Some(format!(
                    "it uses the device {of}, which is the target {other}; use another device"
                ));
            }
            (None, Some(tunnel)) if to.device() == Some(&tunnel.device_name()) => {
                return Some(format!("the target {of} uses the device {to}; name another device"));
            }
            _ => {}
        }
    }
    (others.len() >= MAX_TARGETS as usize)
        .then(|| format!("a node has at most {MAX_TARGETS} targets, and it has that many others"))
}

/// The targets of a node: those of its agent's flags, and then the MirrorTargets, the oldest first.
pub fn join(flags: &BTreeMap<TargetName, Destination>, resources: &[TargetResource]) -> Targets {
    let mut targets = Targets { all: flags.clone(), ..Targets::default() };
    let mut resources: Vec<_> = resources.iter().collect();
    resources.sort_by_key(|resource| (resource.created, &resource.name));
    for TargetResource { name, destination, namespaces, max_rate, .. } in resources {
        let accepted = destination.clone().and_then(|to| match objection(name, &to, &targets.all) {
            None => Ok(to),
            Some(why) => Err(why),
        });
        match accepted {
            Ok(to) => {
                targets.all.insert(name.clone(), to);
                targets.users.insert(name.clone(), namespaces.clone());
                targets.max_rates.extend(max_rate.map(|rate| (name.clone(), rate)));
            }
            Err(why) => drop(targets.refused.insert(name.clone(), why)),
        }
    }
    targets
}

#[cfg(test)]
mod tests;
