//! The targets of a node: those of the agent's flags and those of MirrorTargets.
//!
//! Pure. The command line calls [`objection`] for its flags. The reconcile loop calls [`join`] for the targets of each
//! round, [`down`] for those that do not accept copies, and [`states`] for the state of each MirrorTarget. `select`
//! looks up in [`Users`] which namespaces can use a target.

use std::collections::BTreeMap;

use mirror_common::abi::MAX_TARGETS;

use crate::{
    destination::Destination,
    model::{DeviceTarget, Selector, Target, TargetName, TargetResource},
    settings::Rate,
};

/// The namespaces that can use each target of a MirrorTarget. A target that is not included is the node's own, and open
/// to all.
pub type Users = BTreeMap<TargetName, Selector>;

/// The targets of a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Targets {
    /// The targets with their destinations. No two have the same destination, except for streams.
    pub all: BTreeMap<TargetName, Destination>,
    /// The namespaces that can use the targets of MirrorTargets.
    pub users: Users,
    /// The limits for all copies of the node to a target, for targets with a limit.
    pub max_rates: BTreeMap<TargetName, Rate>,
    /// The MirrorTargets that are not targets of this node, and why.
    pub refused: BTreeMap<TargetName, String>,
}

/// The targets of a node until there is a list of pods: those of the flags, and those that an earlier agent installed,
/// which can come from MirrorTargets.
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

/// Why a target conflicts with others, as a message for the user.
pub fn objection(
    name: &TargetName,
    to: &Destination,
    others: &BTreeMap<TargetName, Destination>,
) -> Option<String> {
    if let Some(before) = others.get(name) {
        return Some(format!("the destination of target {name} is already {before}"));
    }
    for (other, of) in others {
        // Each stream is a separate ring buffer.
        if to == of && *to != Destination::Stream {
            return Some(format!("{to} is already the destination of target {other}"));
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
        .then(|| format!("the limit of {MAX_TARGETS} targets per node is reached"))
}

/// The targets of a node: those of its agent's flags, followed by the MirrorTargets, the oldest first.
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

/// The targets that do not accept copies now, and why. `present`: the targets of the node. `known`: reasons that their
/// devices do not show. A stream without a reader is not included, because it only waits for one.
pub fn down<'k>(
    present: &BTreeMap<TargetName, Target>,
    known: impl Fn(&TargetName) -> Option<&'k String>,
) -> BTreeMap<TargetName, String> {
    let why = |name: &TargetName, target: &Target| match (known(name), target) {
        (Some(why), _) => Some(why.clone()),
        (None, Target::Device(DeviceTarget { ifindex: None, destination, .. })) => {
            Some(format!("the device of {destination} does not exist"))
        }
        (None, Target::Device(DeviceTarget { up: false, device, .. })) => {
            Some(format!("the device {device} is down"))
        }
        (None, _) => None,
    };
    present.iter().filter_map(|(name, target)| Some((name.clone(), why(name, target)?))).collect()
}

/// The MirrorTargets that the node has or refuses, in the order of names; a refused one with the reason instead of its
/// destination. `present`: the targets of the node. A resource that is newer than these lists is left out.
pub fn states(
    resources: &[TargetResource],
    refused: &BTreeMap<TargetName, String>,
    present: &BTreeMap<TargetName, Target>,
) -> Vec<TargetResource> {
    let state = |resource: &TargetResource| {
        let destination = match refused.get(&resource.name) {
            Some(why) => Err(why.clone()),
            None if present.contains_key(&resource.name) => resource.destination.clone(),
            None => return None,
        };
        Some(TargetResource { destination, ..resource.clone() })
    };
    let mut states: Vec<_> = resources.iter().filter_map(state).collect();
    states.sort_by(|one, other| one.name.cmp(&other.name));
    states
}

#[cfg(test)]
mod tests;
