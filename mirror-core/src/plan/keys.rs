//! Allocates the tunnel keys of the sessions.
//!
//! A tunnel has one key for all copies, or a range, from which each tap gets its own. A tap keeps its key as long
//! as it is installed, also across a restart of the agent, because the key is read back from the maps. A new tap
//! gets the key that the hash of its owner selects, or the next free one. So the next pod usually does not get a
//! key that was just released, and the same pod usually gets the same key again. Keys are local to a node: another
//! node can give the same key to another tap. Pure; `fit` calls this module.

use std::collections::{BTreeMap, BTreeSet};

use super::Unfit;
use crate::{
    fnv::fnv1a,
    model::{Actual, Desired, Device, Owner, Session, Tap, TargetName},
    select::Why,
    tunnel::Keys,
};

/// Returns the wanted taps with the keys of their sessions, and the sessions without a free key.
pub(super) fn assign(desired: &Desired, actual: &Actual) -> (BTreeMap<Device, Tap>, Unfit) {
    let mut taps = desired.taps.clone();
    let mut unfit = Unfit::new();
    for tap in taps.values_mut() {
        tap.sessions.values_mut().for_each(|session| session.key = None);
    }
    for (name, target) in &desired.targets {
        let Some(keys) = target.device().and_then(|device| device.destination.tunnel()).map(|of| of.keys)
        else {
            continue;
        };
        let mut given = if keys.is_range() { own_keys(&taps, name, keys, actual) } else { BTreeMap::new() };
        for (device, tap) in &mut taps {
            let key = if keys.is_range() { given.remove(device) } else { Some(keys.first) };
            let (device, is_lacking) = (*device, key.is_none());
            tap.sessions.retain(|mirror, session| {
                if session.target != *name {
                    return true;
                }
                session.key = key;
                if is_lacking {
                    let most = keys.count();
                    let why = format!("all {most} keys of the target's tunnel, one for each NIC, are in use");
                    unfit.insert((device, mirror.clone()), Why::NoRoom(why));
                }
                !is_lacking
            });
        }
    }
    taps.retain(|_, tap| !tap.sessions.is_empty());
    (taps, unfit)
}

/// Allocates a key for each tap with sessions to this target, as long as keys are free.
fn own_keys(
    taps: &BTreeMap<Device, Tap>,
    name: &TargetName,
    keys: Keys,
    actual: &Actual,
) -> BTreeMap<Device, u32> {
    let key_of = |tap: &Tap| {
        let mut keys =
            tap.sessions.values().filter(|session| session.target == *name).map(|session| session.key);
        keys.next().flatten()
    };
    let installed: BTreeMap<_, _> = actual
        .taps
        .iter()
        .filter_map(|(device, installed)| {
            let tap = installed.tap.as_ref()?;
            Some((*device, (&tap.head.owner, key_of(tap).filter(|key| keys.has(*key))?)))
        })
        .collect();
    let (mut given, mut taken, mut newcomers) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
    let has_target = |session: &Session| session.target == *name;
    for (device, tap) in taps.iter().filter(|(_, tap)| tap.sessions.values().any(has_target)) {
        let own = installed.get(device).filter(|(owner, _)| owner.is_same(&tap.head.owner));
        match own.filter(|(_, key)| taken.insert(*key)) {
            Some((_, key)) => drop(given.insert(*device, *key)),
            None => newcomers.push((*device, &tap.head.owner)),
        }
    }
    // A key that a tap is about to release comes last: until that tap is removed, its copies have the key too.
    let leaving: BTreeSet<_> =
        installed.values().map(|(_, key)| *key).filter(|key| !taken.contains(key)).collect();
    for (device, owner) in newcomers {
        let start = start(owner, keys);
        let mut free = (start..=keys.last).chain(keys.first..start).filter(|key| !taken.contains(key));
        let fresh = free.clone().find(|key| !leaving.contains(key));
        if let Some(key) = fresh.or_else(|| free.next()) {
            taken.insert(key);
            given.insert(device, key);
        }
    }
    given
}

/// The key at which the search begins.
fn start(owner: &Owner, keys: Keys) -> u32 {
    let uid = owner.pod.as_ref().map_or("", |pod| &pod.uid);
    let hash = fnv1a(format!("{uid}/{}", owner.nic).as_bytes());
    // The remainder is less than the count, which fits.
    keys.first + (hash % keys.count() as u64) as u32
}
