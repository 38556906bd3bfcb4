//! What stands in the pinned maps, read and nothing else.
//!
//! For everybody who tells of the mirror and must not be able to change it: `status`, with or without an agent, and
//! the metrics. What is attached to the hooks is not in the maps; `hooks` knows.

use mirror_common::{
    abi::SessionCounters,
    verdict::{Direction, Verdict},
};

use super::{maps::Maps, pins::Pins};
use crate::model::{Ended, IfIndex, Tap, Target};

/// The pinned maps, open for reading.
pub struct Reader {
    maps: Maps,
}

/// The maps at one moment.
#[derive(Debug, Clone)]
pub struct Readout {
    /// The mirror interface, as the agent that wrote last saw it.
    pub target: Target,
    /// Every tap that has an entry, by ifindex.
    pub taps: Vec<TapReadout>,
}

/// A tap in the maps.
#[derive(Debug, Clone)]
pub struct TapReadout {
    /// The tapped device.
    pub ifindex: IfIndex,
    /// The tap.
    pub tap: Tap,
    /// The budget that is used up, if one is.
    pub ended: Option<Ended>,
    /// What became of its packets: those counts that are not zero.
    pub counts: Vec<Count>,
}

/// Packets of one tap that left in one direction with one verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// The direction.
    pub direction: Direction,
    /// The verdict.
    pub verdict: Verdict,
    /// How many packets.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Reader {
    /// Opens the maps that are pinned; an error if there are none.
    pub fn open(pins: &Pins) -> anyhow::Result<Self> {
        Ok(Self { maps: Maps::open(pins)? })
    }

    /// Reads everything.
    pub fn read(&self) -> anyhow::Result<Readout> {
        let taps = self.maps.taps()?.into_iter().map(|(ifindex, entry)| {
            let ended = self.maps.ended(&entry)?;
            let counts = counts(&self.maps.counters(&entry)?);
            Ok(TapReadout { ifindex, tap: entry.tap, ended, counts })
        });
        Ok(Readout { target: self.maps.target()?, taps: taps.collect::<anyhow::Result<_>>()? })
    }
}

fn counts(sum: &SessionCounters) -> Vec<Count> {
    let mut counts = Vec::new();
    for direction in Direction::ALL {
        for verdict in Verdict::ALL {
            let counter = sum.counters[direction as usize][verdict as usize];
            if counter.packets > 0 {
                let (packets, bytes) = (counter.packets, counter.bytes);
                counts.push(Count { direction, verdict, packets, bytes });
            }
        }
    }
    counts
}
