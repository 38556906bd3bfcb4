//! The maps of the targets: `TARGETS`, the rings of streams, and the tunnels whose packets are never copied.

use std::collections::BTreeMap;

use anyhow::{Context as _, anyhow};
use mirror_common::{abi, limit::Level, tunnel::Tunnels};
use zerocopy::transmute;

use super::{Maps, TargetBytes, TunnelsBytes};
use crate::{
    kernel::dataplane::{
        rings::{self, Rings},
        wire,
    },
    model::{RingId, Target, TargetName},
};

impl Maps {
    /// The targets.
    pub fn targets(&self) -> BTreeMap<TargetName, Target> {
        self.ledger.targets.values().cloned().collect()
    }

    /// The ring of each stream that is read, and the bytes that sessions have in use there.
    pub fn in_rings(&self) -> anyhow::Result<BTreeMap<TargetName, (RingId, u64)>> {
        let mut in_rings = BTreeMap::new();
        for (place, (name, target)) in &self.ledger.targets {
            if let Target::Stream(Some(ring)) = target {
                let each = self.ledger.sessions_of(*place).into_iter().map(|id| self.streams.in_use(id));
                in_rings.insert(name.clone(), (*ring, each.sum::<anyhow::Result<_>>()?));
            }
        }
        Ok(in_rings)
    }

    /// Writes a target. `rings` has the rings of streams.
    pub fn set_target(&mut self, name: &TargetName, target: &Target, rings: &Rings) -> anyhow::Result<()> {
        let place = self.ledger.target(name).or_else(|| self.ledger.free_target());
        let place = place
            .ok_or_else(|| anyhow!("no place is free for a target: {} are in use", abi::TARGET_PLACES))?;
        let bytes: TargetBytes = transmute!(wire::encode_target(name, target));
        let before = self.ledger.targets.get(&place).map(|(_, before)| before.clone());
        // The ceiling before the flag that says there is one. The meter is cleared of the use by earlier targets at
        // this place.
        let ceiling = target.device().map(|device| device.ceiling).unwrap_or_default();
        if before.is_none() {
            self.meters.clear(Level::Target, place)?;
        }
        if before.as_ref().and_then(Target::device).map(|device| device.ceiling).unwrap_or_default()
            != ceiling
        {
            self.meters.set_limits(Level::Target, place, ceiling)?;
        }
        // The ring is set before the target is up, and is removed only after nothing writes to it.
        if let Target::Stream(Some(ring)) = target {
            if before.as_ref() != Some(target) {
                // Unread records of another ring take no room in this one.
                let sessions = self.ledger.sessions_of(place);
                sessions.into_iter().try_for_each(|session| self.streams.clear(session))?;
            }
            self.streams.set_ring(place, *ring, rings)?;
        }
        // The programs must recognise the tunnel's packets before the first copy leaves.
        let others = self.ledger.targets.iter().filter(|(at, _)| **at != place);
        let tunnels = wire::encode_tunnels(others.map(|(_, (_, target))| target).chain([target]));
        self.set_tunnels(tunnels)?;
        let is_read = matches!(target, Target::Stream(Some(_)));
        let loses_ring = matches!(before, Some(Target::Stream(_))) && !is_read;
        // Created first, because this can fail: once the target is written without its ring, no retry would remove the
        // old ring.
        let empty = if loses_ring { Some(rings::empty_ring()?) } else { None };
        // The reader still gets the copies made before this write.
        self.targets.set(place, &bytes, 0).with_context(|| format!("cannot write the target {name}"))?;
        if let Some(empty) = empty {
            self.streams.drop_ring(place, &empty)?;
        }
        self.ledger.targets.insert(place, (name.clone(), target.clone()));
        self.follow_unread();
        // From here on, the state of the old device is not used any more.
        if before.as_ref().and_then(Target::ifindex) != target.ifindex() {
            self.unread.clear(place)
        } else {
            Ok(())
        }
    }

    /// Forgets a target.
    pub fn remove_target(&mut self, name: &TargetName) -> anyhow::Result<()> {
        let Some(place) = self.ledger.target(name) else { return Ok(()) };
        // The name is removed last, so that a failed removal is retried.
        if let Some((_, Target::Stream(_))) = self.ledger.targets.get(&place) {
            self.set_target(name, &Target::Stream(None), &Rings::default())?;
        }
        let others = self.ledger.targets.iter().filter(|(at, _)| **at != place);
        self.set_tunnels(wire::encode_tunnels(others.map(|(_, (_, target))| target)))?;
        let bytes = [0; size_of::<abi::Target>()];
        self.targets.set(place, &bytes, 0).with_context(|| format!("cannot forget the target {name}"))?;
        self.ledger.targets.remove(&place);
        self.follow_unread();
        Ok(())
    }

    /// Writes the tunnels of the targets, if they differ from the map.
    pub(super) fn settle_tunnels(&mut self) -> anyhow::Result<()> {
        let tunnels = wire::encode_tunnels(self.ledger.targets.values().map(|(_, target)| target));
        let written: Tunnels = transmute!(self.tunnels.get(&0, 0).context("cannot read the tunnels")?);
        if written == tunnels { Ok(()) } else { self.set_tunnels(tunnels) }
    }

    /// Removes the rings without a reader.
    pub(super) fn drop_unread_rings(&mut self) -> anyhow::Result<()> {
        for (place, (_, target)) in &self.ledger.targets {
            if *target == Target::Stream(None) {
                self.streams.drop_ring(*place, &rings::empty_ring()?)?;
            }
        }
        Ok(())
    }

    /// Passes on which mirror interfaces get copies only while a program reads them.
    pub(super) fn follow_unread(&self) {
        let targets = self.ledger.targets.iter();
        let readable =
            targets.filter_map(|(place, (_, target))| Some((*place, target.device()?.readable()?)));
        self.unread.follow(readable.collect());
    }

    fn set_tunnels(&mut self, tunnels: Tunnels) -> anyhow::Result<()> {
        let tunnels: TunnelsBytes = transmute!(tunnels);
        self.tunnels.set(0, &tunnels, 0).context("cannot write the tunnels")
    }
}
