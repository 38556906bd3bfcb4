//! The pinned maps: reads and writes their entries.
//!
//! `ledger` decides which place an entry gets, `wire` encodes it, and `mirror_core::budget` decides how a budget
//! continues after a change. `meters` has the maps of limits, `targets` those of targets. The dataplane uses this
//! module, and so do `status` and `cleanup`, without any program loaded.

mod seen;
mod sides;
mod targets;

use std::collections::BTreeMap;

use anyhow::{Context as _, anyhow, bail};
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use mirror_common::{
    abi::{
        self, Counter, DeviceKey, FILTER_PLACES, MAX_FILTERS, MAX_SESSIONS, MAX_SESSIONS_PER_TAP, MAX_TAPS,
        SESSION_FILTERED, SESSION_POD_METERED, SessionCounters, SessionInfo, TAP_SEEN_INSIDE, TapOwner,
    },
    limit::{Level, Limits},
    tunnel::Tunnels,
};
use mirror_core::budget;
use zerocopy::transmute;

use super::{
    filter_programs::Filters,
    ledger::{Entry, Ledger, Placed},
    meters::{Meters, now_ns},
    pins::Pins,
    rings::Streams,
    unread::Unread,
    wire,
};
use crate::{
    model::{Capacity, Device, Ended, IfIndex, MirrorId, PodSide, Session, TapHead},
    settings::{Budget, CaptureFilter},
};

/// The bytes of a wire type: aya reads and writes arrays of bytes as they are, and `zerocopy` proves the conversion.
type Bytes<const N: usize> = [u8; N];
type KeyBytes = Bytes<{ size_of::<DeviceKey>() }>;
type TapBytes = Bytes<{ size_of::<abi::Tap>() }>;
type OwnerBytes = Bytes<{ size_of::<TapOwner>() }>;
type InfoBytes = Bytes<{ size_of::<SessionInfo>() }>;
type TargetBytes = Bytes<{ size_of::<abi::Target>() }>;
type CounterBytes = Bytes<{ size_of::<SessionCounters>() }>;
type TunnelsBytes = Bytes<{ size_of::<Tunnels>() }>;

/// The limit for the instructions of all filters together: 8 MiB, and as much machine code.
const FILTER_INSTRUCTIONS: usize = 1 << 20;

/// The pinned maps, and the ledger of their contents.
pub struct Maps {
    taps: HashMap<MapData, KeyBytes, TapBytes>,
    owners: HashMap<MapData, KeyBytes, OwnerBytes>,
    infos: HashMap<MapData, u32, InfoBytes>,
    targets: Array<MapData, TargetBytes>,
    counters: PerCpuArray<MapData, CounterBytes>,
    filters: Filters,
    tunnels: Array<MapData, TunnelsBytes>,
    /// Limits and meters.
    pub(super) meters: Meters,
    streams: Streams,
    /// The map that withholds copies from mirror interfaces without readers.
    pub(super) unread: Unread,
    ledger: Ledger,
}

impl Maps {
    /// Opens the pinned maps and reads their contents.
    pub fn open(pins: &Pins) -> anyhow::Result<Self> {
        let get = |name: &str| {
            let path = pins.maps().join(name);
            let data = MapData::from_pin(&path)
                .with_context(|| format!("cannot open the map {}", path.display()))?;
            Ok(Map::from_map_data(data)?)
        };
        Self::from_fn(get, false)
    }

    /// Takes the maps from `get`, which returns a map by its name, and reads their contents. `calls_filters`: whether
    /// the tap programs call the programs of filters.
    pub fn from_fn(
        mut get: impl FnMut(&str) -> anyhow::Result<Map>,
        calls_filters: bool,
    ) -> anyhow::Result<Self> {
        let mut maps = Self {
            taps: get("TAPS")?.try_into()?,
            owners: get("TAP_OWNERS")?.try_into()?,
            infos: get("SESSION_INFO")?.try_into()?,
            targets: get("TARGETS")?.try_into()?,
            counters: get("COUNTERS")?.try_into()?,
            filters: Filters::from_fn(&mut get, calls_filters)?,
            tunnels: get("TUNNELS")?.try_into()?,
            meters: Meters::from_fn(&mut get)?,
            streams: Streams::from_fn(&mut get)?,
            unread: Unread::from_fn(&mut get)?,
            ledger: Ledger::default(),
        };
        maps.ledger.doubt_filters();
        maps.refresh()?;
        Ok(maps)
    }

    /// Reads the maps into the ledger again.
    pub fn refresh(&mut self) -> anyhow::Result<()> {
        let mut ledger = std::mem::take(&mut self.ledger);
        ledger.targets.clear();
        for place in 0..self.targets.len() {
            let wire = transmute!(self.targets.get(&place, 0).context("cannot read the targets")?);
            if let Some(target) = wire::decode_target(&wire, self.meters.limits(Level::Target, place)?) {
                ledger.targets.insert(place, target);
            }
        }
        ledger.taps.clear();
        ledger.unsettled.clear();
        ledger.pod_sides.clear();
        for key in self.taps.keys() {
            let key = key.context("cannot list the taps")?;
            // The tap was removed after it was listed. Only other software can have done that, and it is no reason to
            // fail.
            let Some(tap) = found(self.taps.get(&key, 0))? else { continue };
            let (device, tap): (_, abi::Tap) = (wire::decode_device(transmute!(key)), transmute!(tap));
            if !device.is_on_node() && tap.other_end != 0 {
                ledger.pod_sides.insert(device, tap);
                continue;
            }
            let entry = self.entry(&key, &tap, &mut ledger)?;
            if wire::encode_tap(&entry) != tap {
                ledger.unsettled.insert(device);
            }
            ledger.taps.insert(device, entry);
        }
        ledger.drop_unused_filters();
        self.ledger = ledger;
        self.follow_unread();
        Ok(())
    }

    /// Reads the entry of a tap. Adds the filters of its sessions to the ledger.
    fn entry(&self, key: &KeyBytes, tap: &abi::Tap, ledger: &mut Ledger) -> anyhow::Result<Entry> {
        let owner = found(self.owners.get(key, 0))?.map(|owner| wire::decode_owner(&transmute!(owner)));
        let owner = owner.unwrap_or_default();
        let in_use = &tap.sessions[..MAX_SESSIONS_PER_TAP.min(tap.session_count as usize)];
        let is_limited = in_use.iter().any(|session| session.flags & SESSION_POD_METERED != 0);
        let index = |index: u32| (index != 0).then_some(IfIndex(index));
        let sees = tap.flags & TAP_SEEN_INSIDE != 0;
        let (exit, bridge) = (index(tap.exit), index(tap.bridge));
        let pod_side = index(tap.other_end).map(|nic| PodSide { nic, sees });
        let head = TapHead { owner, kind: tap.kind(), is_limited, exit, bridge, pod_side };
        let mut sessions = BTreeMap::new();
        for session in in_use {
            let is_filtered = session.flags & SESSION_FILTERED != 0;
            let filter_hash = if is_filtered { self.filters.hash(session.filter)? } else { 0 };
            let limits = self.meters.limits(Level::Session, session.settings)?;
            let info = found(self.infos.get(&session.settings, 0))?;
            let target = ledger.targets.get(&session.target);
            let placed = info.zip(target).and_then(|(info, (target, _))| {
                wire::decode_session(session, &transmute!(info), &limits, filter_hash, target)
            });
            if let Some((_, Placed { session, filter: Some(place), .. })) = &placed {
                ledger.filters.extend(session.settings.filter.clone().map(|filter| (*place, filter)));
            }
            // A session that no agent has written is not shown, and is removed.
            sessions.extend(placed);
        }
        let namespace_meter = tap.namespace_meter.checked_sub(1);
        Ok(Entry { head, pod_meter: tap.pod_meter, namespace_meter, sessions })
    }

    /// The devices that have a tap, or the pod side of one.
    pub fn devices(&self) -> impl Iterator<Item = Device> + '_ {
        let taps = self.ledger.taps.iter();
        taps.flat_map(|(device, entry)| [*device].into_iter().chain(entry.head.pod_side()))
    }

    /// Whether each tap's entry is as an agent would write it for the rest of the maps.
    pub(super) fn is_settled(&self) -> bool {
        self.ledger.unsettled.is_empty()
    }

    /// Every tap.
    pub(super) fn taps(&self) -> &BTreeMap<Device, Entry> {
        &self.ledger.taps
    }

    /// The exhausted budget of a session, if any, and the rest of its budgets.
    pub(super) fn budget(&self, placed: &Placed) -> anyhow::Result<(Option<Ended>, Budget)> {
        if !placed.session.settings.is_metered() {
            return Ok((None, Budget::default()));
        }
        let limits = self.meters.limits(Level::Session, placed.settings)?;
        let (meter, now_ns) = (self.meters.meter(placed.id)?, now_ns()?);
        Ok((budget::ended(&limits, &meter, now_ns), budget::left(&limits, &meter, now_ns)))
    }

    /// The sessions of a tap with an exhausted budget.
    pub(super) fn ended(&self, entry: &Entry) -> anyhow::Result<BTreeMap<MirrorId, Ended>> {
        let mut ended = BTreeMap::new();
        for (mirror, placed) in &entry.sessions {
            let (budget, _) = self.budget(placed)?;
            ended.extend(budget.map(|budget| (mirror.clone(), budget)));
        }
        Ok(ended)
    }

    /// The filters that sessions use although the tap programs call none, with the reason: the programs of an earlier
    /// agent may have called them.
    pub(super) fn refused_filters(&self) -> BTreeMap<CaptureFilter, String> {
        let Some(refused) = self.filters.refused() else { return BTreeMap::new() };
        self.ledger.filters.values().map(|filter| (filter.clone(), refused.to_string())).collect()
    }

    /// The number of filters that sessions use.
    pub fn filters(&self) -> usize {
        self.ledger.filters.len()
    }

    /// The capacity of the tables.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            taps: MAX_TAPS as usize,
            sessions: self.counters.len() as usize,
            filters: MAX_FILTERS as usize,
            instructions: FILTER_INSTRUCTIONS,
        }
    }

    /// Writes the owner, the kind, the bridge and the sides of a tap. The tap keeps its sessions.
    pub fn put_tap(&mut self, device: Device, head: &TapHead) -> anyhow::Result<()> {
        let before = self.ledger.taps.get(&device);
        if before.is_some_and(|before| !before.head.owner.is_same(&head.owner)) {
            bail!("device {device} is tapped for another owner");
        }
        let pod_meter = self.ledger.pod_meter(device, &head.owner);
        let pod_meter = self.full_meter(pod_meter, &[Level::Pod, Level::Share])?;
        let namespace_meter = match &head.owner.pod {
            Some(pod) => {
                let place = self.ledger.namespace_meter(&pod.namespace);
                Some(self.full_meter(place, &[Level::Namespace])?)
            }
            None => None,
        };
        let sessions = self.ledger.taps.get(&device).map(|before| before.sessions.clone());
        let sessions = sessions.unwrap_or_default();
        let entry = Entry { head: head.clone(), pod_meter, namespace_meter, sessions };
        // The owner first: an entry without an owner could be mistaken for that of another pod.
        self.owners
            .insert(&key(device), &transmute!(wire::encode_owner(&head.owner)), 0)
            .with_context(|| format!("cannot write the owner of device {device}"))?;
        self.write(device, entry)
    }

    /// Returns a place that the ledger has found. A new meter is full.
    fn full_meter(&mut self, place: Option<(u32, bool)>, levels: &[Level]) -> anyhow::Result<u32> {
        let (place, is_new) = place.ok_or_else(|| anyhow!("no meter is free: {MAX_TAPS} are in use"))?;
        if is_new {
            levels.iter().try_for_each(|level| self.meters.clear(*level, place))?;
        }
        Ok(place)
    }

    /// Adds a session to a tap, with counters at zero and full budgets.
    pub fn add_session(
        &mut self,
        device: Device,
        mirror: &MirrorId,
        session: &Session,
    ) -> anyhow::Result<()> {
        if self.entry_of(device)?.sessions.contains_key(mirror) {
            bail!("device {device} already has a mirror {mirror}");
        }
        let most = self.counters.len();
        let id = self.ledger.free_id(most);
        let id = id.ok_or_else(|| anyhow!("the limit of {most} sessions per node is reached"))?;
        let cpus = self.counters.get(&id, 0).context("cannot read the counters")?.len();
        let zeros = PerCpuValues::try_from(vec![[0; size_of::<SessionCounters>()]; cpus])?;
        self.counters.set(id, zeros, 0).context("cannot clear the counters")?;
        self.meters.clear(Level::Session, id)?;
        self.streams.clear(id)?;
        let serial = self.ledger.new_serial();
        self.put_session(device, mirror, session, (id, id, serial), None)
    }

    /// Writes the new settings of a session. The session keeps its counters; [`budget::limits`] decides which of its
    /// budgets continue.
    pub fn change_session(
        &mut self,
        device: Device,
        mirror: &MirrorId,
        session: &Session,
    ) -> anyhow::Result<()> {
        let before = self.entry_of(device)?.sessions.get(mirror).cloned();
        let before = before.ok_or_else(|| anyhow!("device {device} has no mirror {mirror}"))?;
        let place = (before.id, before.other_settings(), before.serial);
        if before.session.target != session.target {
            // The room that the session has taken in the old ring is not taken in the new one.
            self.streams.clear(before.id)?;
        }
        let limits = self.meters.limits(Level::Session, before.settings)?;
        self.put_session(device, mirror, session, place, Some((&before.session, limits)))
    }

    fn put_session(
        &mut self,
        device: Device,
        mirror: &MirrorId,
        session: &Session,
        (id, settings, serial): (u32, u32, u32),
        before: Option<(&Session, Limits)>,
    ) -> anyhow::Result<()> {
        let target = self.ledger.target(&session.target);
        let target = target.ok_or_else(|| anyhow!("there is no target {}", session.target))?;
        let filter = session.settings.filter.as_ref().map(|filter| self.put_filter(filter));
        let filter = filter.transpose()?;
        let limits = budget::limits(session, before, &self.meters.meter(id)?, now_ns()?);
        let mark = self.ledger.mark(device, mirror, target, session.settings.snaplen);
        let mut entry = self.entry_of(device)?.clone();
        let placed = Placed { session: session.clone(), id, settings, serial, target, filter, mark };
        entry.sessions.insert(mirror.clone(), placed);
        // Nothing uses these until the entry of the tap refers to them, which is one write. The old settings stay, for
        // programs that have just read the old entry.
        self.meters.set_limits(Level::Session, settings, limits)?;
        self.infos
            .insert(&settings, &transmute!(wire::encode_info(mirror, session)), 0)
            .with_context(|| format!("cannot write the mirror {mirror} of device {device}"))?;
        self.write(device, entry)
    }

    /// Returns the place of an equal filter in use, or loads the filter into a free place.
    fn put_filter(&mut self, filter: &CaptureFilter) -> anyhow::Result<u32> {
        if let Some(place) = self.ledger.filter(filter) {
            return Ok(place);
        }
        let place = self.ledger.free_filter();
        let place =
            place.ok_or_else(|| anyhow!("no place is free for a filter: {FILTER_PLACES} are in use"))?;
        self.filters.put(place, filter)?;
        self.ledger.put_filter(place, filter.clone());
        Ok(place)
    }

    /// Removes the programs of unused filters from the map, so that their memory becomes free.
    ///
    /// This cannot happen as soon as a session no longer uses its filter: a tap program that has read the old session
    /// calls the old filter a moment later. The loop calls this function at the beginning of its next round.
    pub fn clear_unused_filters(&mut self) -> anyhow::Result<()> {
        self.ledger.take_unused_filters().into_iter().try_for_each(|place| self.filters.clear(place))
    }

    /// Removes a session of a tap.
    pub fn remove_session(&mut self, device: Device, mirror: &MirrorId) -> anyhow::Result<()> {
        let Some(mut entry) = self.ledger.taps.get(&device).cloned() else { return Ok(()) };
        let Some(placed) = entry.sessions.remove(mirror) else { return Ok(()) };
        self.write(device, entry)?;
        self.forget_info(placed.id)
    }

    /// Removes the entries of a tap.
    pub fn remove_tap(&mut self, device: Device) -> anyhow::Result<()> {
        let pod_side = self.ledger.taps.get(&device).and_then(|entry| entry.head.pod_side());
        pod_side.map_or(Ok(()), |nic| self.remove_pod_side(nic))?;
        found(self.taps.remove(&key(device)))
            .and_then(|_| found(self.owners.remove(&key(device))))
            .with_context(|| format!("cannot remove the map entry of device {device}"))?;
        let entry = self.ledger.taps.remove(&device);
        self.ledger.drop_unused_filters();
        let ids = entry.iter().flat_map(|entry| entry.sessions.values()).map(|placed| placed.id);
        ids.collect::<Vec<_>>().into_iter().try_for_each(|id| self.forget_info(id))
    }

    /// Deletes both descriptions of a session: the current one and the one before it.
    fn forget_info(&mut self, id: u32) -> anyhow::Result<()> {
        [id, id + MAX_SESSIONS].into_iter().try_for_each(|settings| {
            found(self.infos.remove(&settings)).map(drop).context("cannot forget a session")
        })
    }

    /// Removes what an agent may leave if it is killed between two writes: descriptions without a session, owners
    /// without a tap, and rings without a reader.
    pub fn clear_leftovers(&mut self) -> anyhow::Result<()> {
        let settings: Vec<u32> =
            self.infos.keys().collect::<Result<_, _>>().context("cannot list the sessions")?;
        for settings in settings.into_iter().filter(|settings| !self.ledger.has_settings(*settings)) {
            found(self.infos.remove(&settings)).context("cannot forget a session")?;
        }
        let owners: Vec<KeyBytes> =
            self.owners.keys().collect::<Result<_, _>>().context("cannot list the owners")?;
        for key in owners {
            if !self.ledger.taps.contains_key(&wire::decode_device(transmute!(key))) {
                found(self.owners.remove(&key)).context("cannot forget the owner of a tap")?;
            }
        }
        self.drop_unread_rings()
    }

    fn entry_of(&self, device: Device) -> anyhow::Result<&Entry> {
        self.ledger.taps.get(&device).ok_or_else(|| anyhow!("device {device} is not tapped"))
    }

    /// Returns the counters of a session since it began, summed over the CPUs.
    pub fn counters(&self, id: u32) -> anyhow::Result<SessionCounters> {
        let values = self.counters.get(&id, 0).context("cannot read the counters")?;
        let mut sum = SessionCounters::default();
        for value in values.iter() {
            let cpu: SessionCounters = transmute!(*value);
            let pairs = sum.counters.iter_mut().flatten().zip(cpu.counters.iter().flatten());
            for (Counter { packets, bytes }, add) in pairs {
                *packets += add.packets;
                *bytes += add.bytes;
            }
            sum.removed.iter_mut().zip(cpu.removed).for_each(|(bytes, add)| *bytes += add);
        }
        Ok(sum)
    }
}

fn key(device: Device) -> KeyBytes {
    transmute!(wire::encode_device(device))
}

/// Returns `None` if the map has no such key.
fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
