//! The pinned maps, in the words of the model.
//!
//! Reads and writes entries; the layout of each is in `mirror_common::abi`. Used by the dataplane, and by `status`
//! and `cleanup` without any program loaded.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use mirror_common::{
    abi::{
        self, Counter, MAX_SESSIONS, NODE_METER, SESSION_METERED, Session, SessionCounters, TAP_AT_PEER,
        TARGET_METERED, TARGET_QUEUELESS, TARGET_UP, TapOwner,
    },
    filter::{FilterProgram, MAX_FILTERS},
    limit::{Limits, Meter, is_used_up},
};
use nix::time::{ClockId, clock_gettime};
use zerocopy::transmute;

use super::{
    pins::Pins,
    wire::{decode_owner, decode_settings, encode_info, fixed, text},
};
use crate::{
    model::{Directions, Ended, IfIndex, Owner, Tap, Target},
    settings::{Budget, Settings, Share},
};

/// Bytes of a wire type: aya takes arrays of bytes as they are, and `zerocopy` proves the conversion.
type Bytes<const N: usize> = [u8; N];
type TapBytes = Bytes<{ size_of::<abi::Tap>() }>;
type OwnerBytes = Bytes<{ size_of::<TapOwner>() }>;
type TargetBytes = Bytes<{ size_of::<abi::Target>() }>;
type CounterBytes = Bytes<{ size_of::<SessionCounters>() }>;
type FilterBytes = Bytes<{ size_of::<FilterProgram>() }>;
type LimitBytes = Bytes<{ size_of::<Limits>() }>;
/// The lock and its padding, and the meter.
type MeterBytes = [u64; 1 + size_of::<Meter>() / 8];

/// `BPF_F_LOCK`: the kernel holds the element's lock while it copies.
const LOCKED: u64 = 4;

/// The one target that is used now.
const TARGET: u32 = 0;

/// The maps.
pub struct Maps {
    taps: HashMap<MapData, u32, TapBytes>,
    owners: HashMap<MapData, u32, OwnerBytes>,
    targets: Array<MapData, TargetBytes>,
    counters: PerCpuArray<MapData, CounterBytes>,
    filters: Array<MapData, FilterBytes>,
    limits: Array<MapData, LimitBytes>,
    meters: Array<MapData, MeterBytes>,
    /// Where the search for a free filter begins: one that was left just now may still be read by a program.
    next_filter: u32,
}

/// The sessions that are in use, by the device that is tapped.
type Sessions = BTreeMap<IfIndex, Session>;

/// An entry of the map of taps, with its owner.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The tap.
    pub tap: Tap,
    /// Its session.
    session: Session,
}

impl Maps {
    /// The maps that are pinned.
    pub fn open(pins: &Pins) -> anyhow::Result<Self> {
        Self::from_fn(|name| {
            let path = pins.maps().join(name);
            let data = MapData::from_pin(&path)
                .with_context(|| format!("cannot open the map {}", path.display()))?;
            Ok(Map::from_map_data(data)?)
        })
    }

    /// The maps that `get` gives for their names.
    pub fn from_fn(mut get: impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        Ok(Self {
            taps: get("TAPS")?.try_into()?,
            owners: get("TAP_OWNERS")?.try_into()?,
            targets: get("TARGETS")?.try_into()?,
            counters: get("COUNTERS")?.try_into()?,
            filters: get("FILTERS")?.try_into()?,
            limits: get("LIMITS")?.try_into()?,
            meters: get("METERS")?.try_into()?,
            next_filter: 0,
        })
    }

    /// Every entry of the map of taps.
    pub fn taps(&self) -> anyhow::Result<BTreeMap<IfIndex, Entry>> {
        let entries = self.sessions()?.into_iter();
        entries.map(|(ifindex, session)| Ok((ifindex, self.entry(ifindex, session)?))).collect()
    }

    /// The session of each tap.
    fn sessions(&self) -> anyhow::Result<Sessions> {
        let mut sessions = Sessions::new();
        for ifindex in self.taps.keys() {
            let ifindex = ifindex.context("cannot list the taps")?;
            // Gone since it was listed: only by somebody else's hand, but no reason to fail.
            let Some(wire) = found(self.taps.get(&ifindex, 0))? else { continue };
            let abi::Tap { sessions: [session, ..], .. } = transmute!(wire);
            sessions.insert(IfIndex(ifindex), session);
        }
        Ok(sessions)
    }

    /// What else is known of the tap that has this session.
    fn entry(&self, ifindex: IfIndex, session: Session) -> anyhow::Result<Entry> {
        let info = match found(self.owners.get(&ifindex.0, 0))? {
            Some(info) => transmute!(info),
            None => encode_info(&Owner::default(), &Settings::default()),
        };
        let directions = Directions::from_bits(session.directions).unwrap_or(Directions::Both);
        let program = session.filter.checked_sub(1).map(|index| self.filters.get(&index, 0));
        let program = program.transpose().context("cannot read a filter")?;
        let settings = decode_settings(&session, &info, program.map(|bytes| transmute!(bytes)));
        Ok(Entry { tap: Tap { owner: decode_owner(&info), directions, settings }, session })
    }

    /// Writes the entry of a tap. One that stands there already keeps its session, its counters, and what is left of
    /// the budgets that are as they were; a new one gets a free session, with counters at zero and full budgets. So
    /// does one that had ended.
    pub fn put_tap(&mut self, ifindex: IfIndex, tap: &Tap) -> anyhow::Result<()> {
        let taken = self.sessions()?;
        let Tap { owner, directions, settings } = tap;
        let before = taken.get(&ifindex).map(|session| self.entry(ifindex, *session)).transpose()?;
        let id = match &before {
            Some(entry) => entry.session.id,
            None => self.free_session(&taken)?,
        };
        let filter = match &settings.filter {
            Some(filter) => self.put_filter(&filter.program, &taken)? + 1,
            None => 0,
        };
        if before.is_none() {
            self.meters.set(id, &MeterBytes::default(), LOCKED).context("cannot clear a meter")?;
        }
        let limits = self.limits(id, settings, before.as_ref())?;
        self.limits.set(id, &transmute!(limits), 0).context("cannot write the limits")?;

        let session = Session {
            id,
            target: TARGET,
            directions: directions.bits(),
            flags: if settings.is_metered() { SESSION_METERED } else { 0 },
            filter,
            sample: settings.sample.map_or(0, |Share(share)| share),
            seed: settings.seed,
            snaplen: settings.snaplen.unwrap_or(0),
        };
        let mut sessions = <[Session; abi::MAX_SESSIONS_PER_TAP]>::default();
        sessions[0] = session;
        let flags = if tap.at_peer() { TAP_AT_PEER } else { 0 };
        let wire = abi::Tap { flags, session_count: 1, sessions };
        // The owner first: an entry without one could not be told from another pod's.
        self.owners
            .insert(&ifindex.0, &transmute!(encode_info(owner, settings)), 0)
            .and_then(|()| self.taps.insert(&ifindex.0, &transmute!(wire), 0))
            .with_context(|| format!("cannot write the map entry of device {ifindex}"))
    }

    /// A session that no tap has, with its counters at zero.
    fn free_session(&mut self, taken: &Sessions) -> anyhow::Result<u32> {
        let used: BTreeSet<u32> = taken.values().map(|session| session.id).collect();
        let id = (0..MAX_SESSIONS)
            .find(|id| !used.contains(id))
            .ok_or_else(|| anyhow!("this node has {MAX_SESSIONS} sessions, and no more fit"))?;
        let cpus = self.counters.get(&id, 0).context("cannot read the counters")?.len();
        let zeros = PerCpuValues::try_from(vec![[0; size_of::<SessionCounters>()]; cpus])?;
        self.counters.set(id, zeros, 0).context("cannot clear the counters")?;
        Ok(id)
    }

    /// The index of a filter: of an equal one that is in use, or of a free place to which it is written.
    fn put_filter(&mut self, program: &FilterProgram, taken: &Sessions) -> anyhow::Result<u32> {
        let used: BTreeSet<u32> =
            taken.values().filter_map(|session| session.filter.checked_sub(1)).collect();
        let bytes: FilterBytes = transmute!(*program);
        for index in &used {
            if self.filters.get(index, 0).context("cannot read a filter")? == bytes {
                return Ok(*index);
            }
        }
        let index = (0..MAX_FILTERS)
            .map(|offset| (self.next_filter + offset) % MAX_FILTERS)
            .find(|index| !used.contains(index))
            .ok_or_else(|| anyhow!("this node has {MAX_FILTERS} different filters, and no more fit"))?;
        self.filters.set(index, &bytes, 0).context("cannot write a filter")?;
        self.next_filter = index + 1;
        Ok(index)
    }

    /// The limits of a session. Budgets that are new count from now on, and so do all of them where there was none or one
    /// was used up; the others go on. The meter is only read, so that nothing is lost of what is taken meanwhile.
    fn limits(&self, id: u32, settings: &Settings, before: Option<&Entry>) -> anyhow::Result<Limits> {
        let rate = settings.rate.map_or_else(Limits::default, |rate| rate.limits());
        let (old, kept) = match before {
            Some(entry) if self.ended(entry)?.is_none() => (entry.tap.settings.budget, self.limits_of(id)?),
            _ => Default::default(),
        };
        let (meter, budget) = (self.meter(id)?, &settings.budget);
        let is_new = old == Budget::default();
        let end = |used: u64, budget: u64| used.saturating_add(budget);
        Ok(Limits {
            packets: match budget.packets {
                same if !is_new && same == old.packets => kept.packets,
                packets => packets.map_or(0, |packets| end(meter.packets, packets)),
            },
            bytes: match budget.bytes {
                same if !is_new && same == old.bytes => kept.bytes,
                bytes => bytes.map_or(0, |bytes| end(meter.bytes, bytes)),
            },
            ends_ns: match budget.duration {
                same if !is_new && same == old.duration => kept.ends_ns,
                None => 0,
                Some(time) => end(now_ns()?, time.as_nanos() as u64),
            },
            ..rate
        })
    }

    /// The limits that are written for a session, or the node.
    fn limits_of(&self, id: u32) -> anyhow::Result<Limits> {
        Ok(transmute!(self.limits.get(&id, 0).context("cannot read the limits")?))
    }

    /// What a session has used.
    fn meter(&self, id: u32) -> anyhow::Result<Meter> {
        let [_lock, meter @ ..] = self.meters.get(&id, LOCKED).context("cannot read a meter")?;
        Ok(transmute!(meter))
    }

    /// The budget that an entry's session has used up.
    pub fn ended(&self, entry: &Entry) -> anyhow::Result<Option<Ended>> {
        if entry.session.flags & SESSION_METERED == 0 {
            return Ok(None);
        }
        let id = entry.session.id;
        let (limits, meter) = (self.limits_of(id)?, self.meter(id)?);
        Ok(if is_used_up(meter.packets, limits.packets) {
            Some(Ended::Packets)
        } else if is_used_up(meter.bytes, limits.bytes) {
            Some(Ended::Bytes)
        } else if is_used_up(now_ns()?, limits.ends_ns) {
            Some(Ended::Duration)
        } else {
            None
        })
    }

    /// Removes the entry of a tap.
    pub fn remove_tap(&mut self, ifindex: IfIndex) -> anyhow::Result<()> {
        found(self.taps.remove(&ifindex.0))
            .and_then(|_| found(self.owners.remove(&ifindex.0)))
            .map(drop)
            .with_context(|| format!("cannot remove the map entry of device {ifindex}"))
    }

    /// The target.
    pub fn target(&self) -> anyhow::Result<Target> {
        let wire: abi::Target = transmute!(self.targets.get(&TARGET, 0).context("cannot read the target")?);
        Ok(Target {
            name: text(&wire.name),
            ifindex: (wire.ifindex != 0).then_some(IfIndex(wire.ifindex)),
            up: wire.flags & TARGET_UP != 0,
            queueless: wire.flags & TARGET_QUEUELESS != 0,
            limits: match wire.flags & TARGET_METERED {
                0 => Limits::default(),
                _ => self.limits_of(NODE_METER)?,
            },
        })
    }

    /// Writes the target.
    pub fn set_target(&mut self, target: &Target) -> anyhow::Result<()> {
        let Target { name, ifindex, up, queueless, limits } = target;
        self.limits.set(NODE_METER, &transmute!(*limits), 0).context("cannot write the node's limits")?;
        let is_metered = *limits != Limits::default();
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags =
            flag(*up, TARGET_UP) | flag(*queueless, TARGET_QUEUELESS) | flag(is_metered, TARGET_METERED);
        let wire =
            abi::Target { ifindex: ifindex.map_or(0, |IfIndex(index)| index), flags, name: fixed(name) };
        self.targets
            .set(TARGET, &transmute!(wire), 0)
            .with_context(|| format!("cannot write the target {name}"))
    }

    /// The counters of an entry's session since it began, summed over the CPUs.
    pub fn counters(&self, entry: &Entry) -> anyhow::Result<SessionCounters> {
        let values = self.counters.get(&entry.session.id, 0).context("cannot read the counters")?;
        let mut sum = SessionCounters::default();
        for value in values.iter() {
            let cpu: SessionCounters = transmute!(*value);
            let pairs = sum.counters.iter_mut().flatten().zip(cpu.counters.iter().flatten());
            for (Counter { packets, bytes }, add) in pairs {
                *packets += add.packets;
                *bytes += add.bytes;
            }
        }
        Ok(sum)
    }
}

/// The clock of the meters.
fn now_ns() -> anyhow::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read the clock")?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// `None` where the map has no such key.
fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
