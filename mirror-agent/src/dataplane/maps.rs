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
    limit::{Limits, Meter, NO_BUDGET},
};
use nix::time::{ClockId, clock_gettime};
use zerocopy::transmute;

use super::pins::Pins;
use crate::{
    model::{Directions, Ended, IfIndex, NetnsId, Owner, PodId, Tap, Target},
    settings::{Budget, Filter, Rate, Settings, Share},
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
        let keys = self.taps.keys().collect::<Result<Vec<_>, _>>().context("cannot list the taps")?;
        let mut taps = BTreeMap::new();
        for ifindex in keys {
            // Gone since it was listed: only by somebody else's hand, but no reason to fail.
            let Some(wire) = found(self.taps.get(&ifindex, 0))? else { continue };
            let wire: abi::Tap = transmute!(wire);
            let [session, ..] = wire.sessions;
            let info = match found(self.owners.get(&ifindex, 0))? {
                Some(info) => transmute!(info),
                None => encode_info(&Owner::default(), &Settings::default()),
            };
            let directions = Directions::from_bits(session.directions).unwrap_or(Directions::Both);
            let settings = self.decode_settings(&session, &info)?;
            let tap = Tap { owner: decode_owner(&info), directions, settings };
            taps.insert(IfIndex(ifindex), Entry { tap, session });
        }
        Ok(taps)
    }

    /// Writes the entry of a tap. One that stands there already keeps its session, its counters, and what is left of
    /// the budgets that are as they were; a new one gets a free session, with counters at zero and full budgets. So
    /// does one that had ended.
    pub fn put_tap(&mut self, ifindex: IfIndex, tap: &Tap) -> anyhow::Result<()> {
        let taps = self.taps()?;
        let Tap { owner, directions, settings } = tap;
        let (id, before) = match taps.get(&ifindex) {
            Some(entry) => (entry.session.id, Some(entry)),
            None => (self.free_session(&taps)?, None),
        };
        let filter = match &settings.filter {
            Some(filter) => self.put_filter(&filter.program, &taps)? + 1,
            None => 0,
        };
        let limits = settings.rate.map_or_else(Limits::default, |rate| rate.limits());
        self.limits.set(id, &transmute!(limits), 0).context("cannot write the limits")?;
        self.fill_meter(id, &settings.budget, before)?;

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
    fn free_session(&mut self, taps: &BTreeMap<IfIndex, Entry>) -> anyhow::Result<u32> {
        let used: BTreeSet<u32> = taps.values().map(|entry| entry.session.id).collect();
        let id = (0..MAX_SESSIONS)
            .find(|id| !used.contains(id))
            .ok_or_else(|| anyhow!("this node has {MAX_SESSIONS} sessions, and no more fit"))?;
        let cpus = self.counters.get(&id, 0).context("cannot read the counters")?.len();
        let zeros = PerCpuValues::try_from(vec![[0; size_of::<SessionCounters>()]; cpus])?;
        self.counters.set(id, zeros, 0).context("cannot clear the counters")?;
        Ok(id)
    }

    /// The index of a filter: of an equal one that is in use, or of a free place to which it is written.
    fn put_filter(
        &mut self,
        program: &FilterProgram,
        taps: &BTreeMap<IfIndex, Entry>,
    ) -> anyhow::Result<u32> {
        let used: BTreeSet<u32> =
            taps.values().filter_map(|entry| entry.session.filter.checked_sub(1)).collect();
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

    /// Fills up the budgets that are new, or all of them where there was none or one was used up.
    fn fill_meter(&mut self, id: u32, budget: &Budget, before: Option<&Entry>) -> anyhow::Result<()> {
        let old = match before {
            Some(entry) if self.ended(entry)?.is_none() => Some(entry.tap.settings.budget),
            _ => None,
        };
        if old == Some(*budget) {
            return Ok(());
        }
        let mut meter = if old.is_some() { self.meter(id)? } else { Meter::FULL };
        let old = old.unwrap_or_default();
        let is_new = before.is_none() || old == Budget::default();
        if is_new || budget.duration != old.duration {
            let end = |time: Duration| now_ns().map(|now| now.saturating_add(time.as_nanos() as u64));
            meter.ends_ns = budget.duration.map(end).transpose()?.unwrap_or(NO_BUDGET);
        }
        if is_new || budget.packets != old.packets {
            meter.packets_left = budget.packets.unwrap_or(NO_BUDGET);
        }
        if is_new || budget.bytes != old.bytes {
            meter.bytes_left = budget.bytes.unwrap_or(NO_BUDGET);
        }
        let meter: [u64; size_of::<Meter>() / 8] = transmute!(meter);
        let mut bytes = MeterBytes::default();
        bytes[1..].copy_from_slice(&meter);
        self.meters.set(id, &bytes, LOCKED).context("cannot write a meter")
    }

    /// What is left of a session's limits and budgets.
    fn meter(&self, id: u32) -> anyhow::Result<Meter> {
        let [_lock, meter @ ..] = self.meters.get(&id, LOCKED).context("cannot read a meter")?;
        Ok(transmute!(meter))
    }

    /// The budget that an entry's session has used up.
    pub fn ended(&self, entry: &Entry) -> anyhow::Result<Option<Ended>> {
        if entry.session.flags & SESSION_METERED == 0 {
            return Ok(None);
        }
        let meter = self.meter(entry.session.id)?;
        Ok(if meter.packets_left == 0 {
            Some(Ended::Packets)
        } else if meter.bytes_left == 0 {
            Some(Ended::Bytes)
        } else if now_ns()? >= meter.ends_ns {
            Some(Ended::Duration)
        } else {
            None
        })
    }

    fn decode_settings(&self, session: &Session, info: &TapOwner) -> anyhow::Result<Settings> {
        let filter = match session.filter.checked_sub(1) {
            Some(index) => {
                let program: FilterProgram =
                    transmute!(self.filters.get(&index, 0).context("cannot read a filter")?);
                Some(Filter { text: text(&info.filter), program: program.into() })
            }
            None => None,
        };
        let asked = |value: u64| (value != 0).then_some(value);
        let time = |ms: u64| asked(ms).map(Duration::from_millis);
        let (packets, bits) = (asked(info.rate_packets), asked(info.rate_bits));
        let rate = Rate { packets, bits, burst: Duration::from_millis(info.burst_ms) };
        Ok(Settings {
            filter,
            sample: (session.sample != 0).then_some(Share(session.sample)),
            seed: session.seed,
            rate: (packets.is_some() || bits.is_some()).then_some(rate),
            snaplen: (session.snaplen != 0).then_some(session.snaplen),
            budget: Budget {
                duration: time(info.budget_ms),
                packets: asked(info.budget_packets),
                bytes: asked(info.budget_bytes),
            },
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
                _ => transmute!(self.limits.get(&NODE_METER, 0).context("cannot read the node's limits")?),
            },
        })
    }

    /// Writes the target.
    pub fn set_target(&mut self, target: &Target) -> anyhow::Result<()> {
        let Target { name, ifindex, up, queueless, limits } = target;
        self.limits.set(NODE_METER, &transmute!(*limits), 0).context("cannot write the node's limits")?;
        let is_metered = *limits != Limits::default();
        if is_metered && self.meter(NODE_METER)?.packets_left == 0 {
            // Never used: a map begins with zeros, and a budget of zero has ended.
            let meter: [u64; size_of::<Meter>() / 8] = transmute!(Meter::FULL);
            let mut bytes = MeterBytes::default();
            bytes[1..].copy_from_slice(&meter);
            self.meters.set(NODE_METER, &bytes, LOCKED).context("cannot write the node's meter")?;
        }
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

fn encode_info(owner: &Owner, settings: &Settings) -> TapOwner {
    let Owner { pod, netns, nic, device } = owner;
    let (uid, namespace, name) =
        pod.as_ref().map_or(("", "", ""), |PodId { uid, namespace, name }| (uid, namespace, name));
    let Settings { filter, sample: _, seed: _, rate, snaplen: _, budget } = settings;
    let Budget { duration, packets, bytes } = budget;
    let ms = |time: Duration| time.as_millis() as u64;
    TapOwner {
        netns_dev: netns.dev,
        netns_ino: netns.ino,
        pod_uid: fixed(uid),
        pod_namespace: fixed(namespace),
        pod_name: fixed(name),
        nic: fixed(nic),
        device: fixed(device),
        rate_packets: rate.and_then(|rate| rate.packets).unwrap_or(0),
        rate_bits: rate.and_then(|rate| rate.bits).unwrap_or(0),
        burst_ms: rate.map_or(0, |rate| ms(rate.burst)),
        budget_ms: duration.map_or(0, ms),
        budget_packets: packets.unwrap_or(0),
        budget_bytes: bytes.unwrap_or(0),
        filter: fixed(filter.as_ref().map_or("", |filter| &filter.text)),
    }
}

fn decode_owner(wire: &TapOwner) -> Owner {
    let TapOwner { netns_dev, netns_ino, pod_uid, pod_namespace, pod_name, nic, device, .. } = wire;
    let pod = PodId { uid: text(pod_uid), namespace: text(pod_namespace), name: text(pod_name) };
    Owner {
        pod: (!pod.uid.is_empty()).then_some(pod),
        netns: NetnsId { dev: *netns_dev, ino: *netns_ino },
        nic: text(nic),
        device: text(device),
    }
}

/// A text filled up with zeros. Sources of texts keep within these sizes; a longer one would be cut.
fn fixed<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = text.floor_char_boundary(N);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What is written of an owner is what is read back.
        #[test]
        fn owners_survive_the_map(
            uid in "[a-f0-9-]{1,64}", namespace in "[a-z]{1,63}", name in "[a-z.]{1,253}",
            nic in "\\PC{0,5}", device in "\\PC{0,3}", dev: u64, ino: u64, has_pod: bool,
        ) {
            let pod = has_pod.then_some(PodId { uid, namespace, name });
            let owner = Owner { pod, netns: NetnsId { dev, ino }, nic, device };
            prop_assume!(owner.nic.len() <= 16 && owner.device.len() <= 16);
            prop_assume!(!owner.nic.contains('\0') && !owner.device.contains('\0'));
            let bytes: OwnerBytes = transmute!(encode_info(&owner, &Settings::default()));
            prop_assert_eq!(decode_owner(&transmute!(bytes)), owner);
        }
    }
}
