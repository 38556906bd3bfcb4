//! Reads the contents of the pinned maps, and changes nothing.
//!
//! For the readers that show the mirror and must not be able to change it: `status`, with or without an agent, and the
//! metrics. The maps do not have the programs attached to the hooks (see `hooks`), nor the frames that devices have
//! dropped (see [`drops`]).

use std::collections::BTreeMap;

use mirror_common::{
    abi::{Counter, SessionCounters},
    verdict::{Direction, Misfit, Verdict},
};

use super::{ledger::Entry, maps::Maps, pins::Pins, rings::Rings};
pub use crate::kernel::links::drops;
use crate::{
    model::{Capacity, Device, Ended, MirrorId, Owner, Session, Target, TargetName},
    settings::Budget,
};

/// How often the maps are read, if their contents do not fit together.
const ATTEMPTS: usize = 3;

/// The pinned maps, open for reading.
pub struct Reader {
    maps: Maps,
    rings: Rings,
}

/// How full the ring of a stream is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingFill {
    /// The stream.
    pub target: TargetName,
    /// The bytes that its reader has not returned yet.
    pub used: u64,
    /// The size in bytes.
    pub size: u32,
}

/// The contents of the maps at one moment.
#[derive(Debug, Clone)]
pub struct Readout {
    /// The targets, as the last agent has written them.
    pub targets: BTreeMap<TargetName, Target>,
    /// Every tap that has an entry.
    pub taps: Vec<TapReadout>,
    /// The number of filters that sessions use.
    pub filters: usize,
    /// The capacity of the tables.
    pub capacity: Capacity,
}

/// A tap in the maps.
#[derive(Debug, Clone)]
pub struct TapReadout {
    /// The tapped device.
    pub device: Device,
    /// The NIC inside the pod, if the tap sees packets to the pod there.
    pub pod_side: Option<Device>,
    /// The pod and NIC that are tapped.
    pub owner: Owner,
    /// Its sessions.
    pub sessions: Vec<SessionReadout>,
}

/// A session in the maps.
#[derive(Debug, Clone)]
pub struct SessionReadout {
    /// The mirror that it belongs to.
    pub mirror: MirrorId,
    /// The session itself.
    pub session: Session,
    /// Its serial number, which the records of a stream have.
    pub serial: u32,
    /// The exhausted budget, if any.
    pub ended: Option<Ended>,
    /// The rest of its budgets.
    pub left: Budget,
    /// The counters of its packets that are not zero.
    pub counts: Vec<Count>,
    /// The bytes of its copies, after they were cut, by direction.
    pub copied_bytes: [u64; Direction::COUNT],
    /// The counters of copies that differ from what the session requests, if not zero.
    pub misfits: Vec<MisfitCount>,
}

/// The number of packets of one session with one direction and one verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// The direction.
    pub direction: Direction,
    /// The verdict.
    pub verdict: Verdict,
    /// The number of packets.
    pub packets: u64,
    /// The number of their bytes, before any copy is cut.
    pub bytes: u64,
}

/// The number of copies of one session in one direction that differ in one way from what the session requests, and the
/// bytes by which they differ.
pub type MisfitCount = (Direction, Misfit, Counter);

impl Reader {
    /// Opens the maps that are pinned; an error if there are none.
    pub fn open(pins: &Pins) -> anyhow::Result<Self> {
        Ok(Self { maps: Maps::open(pins)?, rings: Rings::default() })
    }

    /// The same, for the agent that has made these rings.
    pub fn with_rings(self, rings: Rings) -> Self {
        Self { rings, ..self }
    }

    /// The devices that have a tap, or the pod side of one.
    pub fn devices(&self) -> Vec<Device> {
        self.maps.devices().collect()
    }

    /// Reads everything.
    pub fn read(&mut self) -> anyhow::Result<Readout> {
        self.read_sessions(|_, _| true)
    }

    /// Reads everything except the sessions for which `is_wanted`, given the serial number, returns false. Most of the
    /// work is to read the counters: each CPU has its own.
    pub fn read_sessions(
        &mut self,
        mut is_wanted: impl FnMut(u32, &Session) -> bool,
    ) -> anyhow::Result<Readout> {
        // The agent writes meanwhile: a target or a session that was read too early would hide a session.
        for _ in 0..ATTEMPTS {
            self.maps.refresh()?;
            if self.maps.is_settled() {
                break;
            }
        }
        let mut taps = Vec::new();
        for (device, Entry { head, sessions: entries, .. }) in self.maps.taps() {
            let mut sessions = Vec::new();
            for (mirror, placed) in entries.iter().filter(|(_, of)| is_wanted(of.serial, &of.session)) {
                let (ended, left) = self.maps.budget(placed)?;
                let counters = self.maps.counters(placed.id)?;
                sessions.push(SessionReadout {
                    mirror: mirror.clone(),
                    session: placed.session.clone(),
                    serial: placed.serial,
                    ended,
                    left,
                    counts: counts(&counters),
                    copied_bytes: Direction::ALL.map(|direction| counters.copied_bytes(direction)),
                    misfits: misfits(&counters),
                });
            }
            let pod_side = head.pod_side().filter(|_| head.sees_inside());
            taps.push(TapReadout { device: *device, pod_side, owner: head.owner.clone(), sessions });
        }
        Ok(Readout {
            targets: self.maps.targets(),
            taps,
            filters: self.maps.filters(),
            capacity: self.maps.capacity(),
        })
    }

    /// Reads how full the rings of this agent are. The streams are those of the last readout.
    pub fn ring_fills(&self) -> anyhow::Result<Vec<RingFill>> {
        let in_rings = self.maps.in_rings()?.into_iter();
        let fill = |(target, (ring, used))| Some(RingFill { target, used, size: self.rings.size(ring)? });
        Ok(in_rings.filter_map(fill).collect())
    }
}

fn counts(sum: &SessionCounters) -> Vec<Count> {
    let mut counts = Vec::new();
    for direction in Direction::ALL {
        for verdict in Verdict::ALL {
            let Counter { packets, bytes } = sum.packets(direction, verdict);
            if packets > 0 {
                counts.push(Count { direction, verdict, packets, bytes });
            }
        }
    }
    counts
}

fn misfits(sum: &SessionCounters) -> Vec<MisfitCount> {
    let mut misfits = Vec::new();
    for direction in Direction::ALL {
        for misfit in Misfit::ALL {
            let count = sum.misfits(direction, misfit);
            if count.packets > 0 {
                misfits.push((direction, misfit, count));
            }
        }
    }
    misfits
}
