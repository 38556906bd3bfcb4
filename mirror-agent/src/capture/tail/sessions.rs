//! The sessions whose packets arrive in the ring of `tail` or `capture`: their names and counters for the file.
//!
//! Reads the agent's maps, and does not use the ring. A session has matched the packets that were read and the
//! [lost](super::losses) ones.

use std::collections::{BTreeMap, BTreeSet};

use mirror_capture::pcapng::Interface;
use mirror_common::verdict::Verdict;
use tracing::warn;

use super::losses::{Losses, Missed};
use crate::{
    capture::recording::{Counters, Recorder},
    kernel::dataplane::{
        pins::Pins,
        readout::{Reader, Readout, SessionReadout, TapReadout},
    },
    model::TargetName,
};

/// The counters of a target's sessions before the command has a ring; empty if no agent has created maps yet.
pub(super) fn losses_before(pins: &Pins, target: &TargetName) -> Losses {
    let look = Reader::open(pins).and_then(|mut maps| Look::at(&mut maps, target.0.as_str()));
    look.map(|look| Losses::begin(look.missed(), look.elsewhere)).unwrap_or_default()
}

/// The sessions of a target, from the agent's maps.
pub(super) struct Sessions {
    maps: Reader,
    target: String,
    losses: Losses,
    /// The sessions seen so far, by serial.
    known: BTreeMap<u32, Known>,
}

/// A session of the target.
#[derive(Default)]
struct Known {
    name: String,
    /// Packets read from the ring.
    read: u64,
    /// The session copied to the target at the last reading of the maps.
    is_here: bool,
    /// The session copied to the target at the reading before the last.
    was_here: bool,
}

impl Sessions {
    /// Opens the maps of the agent. `losses` are those of [`losses_before`].
    pub(super) fn open(pins: &Pins, target: &str, losses: Losses) -> anyhow::Result<Self> {
        Ok(Self { maps: Reader::open(pins)?, target: target.to_owned(), losses, known: BTreeMap::new() })
    }

    /// The names of the interfaces whose sessions copy to the target now.
    pub(super) fn names(&mut self) -> anyhow::Result<BTreeSet<String>> {
        let here = Look::at(&mut self.maps, &self.target)?.here.into_iter();
        Ok(here.map(|(_, interface, _)| interface.name).collect())
    }

    /// Counts a packet that was read.
    pub(super) fn read_one(&mut self, serial: u32, recorder: &mut Recorder) -> anyhow::Result<()> {
        // The session was added since the last reading of the maps.
        let looked = if self.known.contains_key(&serial) { Ok(()) } else { self.note(recorder) };
        self.known.entry(serial).or_default().read += 1;
        looked
    }

    /// Passes the sessions and their counters to the recorder. Warns about sessions that no longer copy to the target.
    pub(super) fn note(&mut self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let look = Look::at(&mut self.maps, &self.target)?;
        let here = look.missed();
        self.known.values_mut().for_each(|known| known.was_here = known.is_here);
        for (_, known) in
            self.known.iter_mut().filter(|(serial, known)| known.is_here && !here.contains_key(serial))
        {
            known.is_here = false;
            warn!(
                source = known.name,
                "no more packets from here: the pod or the device no longer exists, or another mirror has replaced this one"
            );
        }
        self.losses.look(here, look.elsewhere);
        for (serial, interface, _) in look.here {
            let known = self.known.entry(serial).or_default();
            known.name.clone_from(&interface.name);
            known.is_here = true;
            recorder.add_interface(serial, &interface);
        }
        self.tell(recorder);
        Ok(())
    }

    /// Drops ended sessions after their last packets have arrived: the recording itself has no end.
    pub(super) fn forget_gone(&mut self, recorder: &mut Recorder) {
        self.known.retain(|_, known| known.is_here || known.was_here);
        self.losses.forget(|serial| !self.known.contains_key(&serial));
        recorder.part_with(|serial| !self.known.contains_key(&serial));
    }

    /// Passes the counters to the recorder, without reading the maps.
    pub(super) fn tell(&self, recorder: &mut Recorder) {
        for (serial, known) in &self.known {
            let Missed { lost, limited } = self.losses.of(*serial);
            let counters = Counters { matched: known.read + lost + limited, lost, limited };
            recorder.note_counters(*serial, counters);
        }
    }
}

/// The state of the maps at one moment.
struct Look {
    /// The sessions that copy to the target, by serial, and the number of packets that each has missed since its start.
    here: Vec<(u32, Interface, Missed)>,
    /// The serials of all other sessions.
    elsewhere: BTreeSet<u32>,
}

impl Look {
    fn at(maps: &mut Reader, target: &str) -> anyhow::Result<Self> {
        let mut elsewhere = BTreeSet::new();
        let Readout { taps, .. } = maps.read_sessions(|serial, session| {
            let is_here = session.target.0.as_str() == target;
            if !is_here {
                elsewhere.insert(serial);
            }
            is_here
        })?;
        let here = taps.iter().flat_map(|tap| tap.sessions.iter().map(|session| found(tap, session)));
        Ok(Self { here: here.collect(), elsewhere })
    }

    /// The packets missed by the sessions that copy to the target.
    fn missed(&self) -> BTreeMap<u32, Missed> {
        self.here.iter().map(|(serial, _, missed)| (*serial, *missed)).collect()
    }
}

fn found(tap: &TapReadout, session: &SessionReadout) -> (u32, Interface, Missed) {
    let owner = &tap.owner;
    let name = match &owner.pod {
        Some(pod) => format!("{pod} {}", owner.nic),
        None => owner.device.clone(),
    };
    let settings = &session.session.settings;
    // The name of a mirror that a user chose: the pod can have several mirrors.
    let mirror = Some(&session.mirror).filter(|mirror| !mirror.0.is_capture());
    let mirror = mirror.map_or_else(String::new, |mirror| format!(", mirror {mirror}"));
    let network = owner.network.as_ref().map_or_else(String::new, |network| format!(", network {network}"));
    let interface = Interface {
        name,
        description: Some(format!("device {} of the node{network}{mirror}", owner.device)),
        filter: settings.filter.as_ref().map(|filter| filter.text.clone()),
        hardware: None,
        comment: (!settings.words().is_empty()).then(|| settings.words().join(", ")),
    };
    let count = |verdicts: &[Verdict]| {
        let counts = session.counts.iter().filter(|count| verdicts.contains(&count.verdict));
        counts.map(|count| count.packets).sum()
    };
    let missed =
        Missed { lost: count(&[Verdict::Lost]), limited: count(&[Verdict::Limited, Verdict::Ended]) };
    (session.serial, interface, missed)
}
