//! The sessions whose packets come into the ring of `tail` or `capture`: their names and counters for the file.
//!
//! It reads the agent's maps, and knows nothing of the ring. Called by `tail` for each packet, and once a second.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::verdict::Verdict;
use tracing::warn;

use crate::{
    dataplane::{
        pins::Pins,
        readout::{Reader, Readout, SessionReadout, TapReadout},
    },
    model::TargetName,
    recording::{Recorder, Source},
};

/// The counters of the sessions of a target before it had a ring of ours, by the numbers of the sessions: copied, and
/// lost. Nothing is copied to a stream without a reader, so this is what earlier readers had.
#[derive(Default)]
pub(super) struct Before(BTreeMap<u32, (u64, u64)>);

impl Before {
    /// The present counters. Where no agent has made maps yet, there are none.
    pub(super) fn read(pins: &Pins, target: &TargetName) -> Self {
        let Ok(mut maps) = Reader::open(pins) else { return Self::default() };
        let found = find(&mut maps, target.0.as_str()).unwrap_or_default();
        Self(found.into_iter().map(|found| (found.source.serial, (found.copied, found.lost))).collect())
    }
}

/// The sessions of a target, in the agent's maps.
pub(super) struct Sessions {
    maps: Reader,
    target: String,
    before: Before,
    /// The sessions that have been seen, by their number.
    known: BTreeMap<u32, Known>,
}

/// A session of the target.
#[derive(Default)]
struct Known {
    name: String,
    /// The packets that were read.
    read: u64,
    /// It is in the maps no more.
    is_gone: bool,
}

/// A session as it is in the maps.
struct Found {
    source: Source,
    /// The packets that were written into the ring.
    copied: u64,
    /// The packets for which the ring had no room.
    lost: u64,
}

impl Sessions {
    /// Those in the maps of an agent.
    pub(super) fn open(pins: &Pins, target: &str, before: Before) -> anyhow::Result<Self> {
        Ok(Self { maps: Reader::open(pins)?, target: target.to_owned(), before, known: BTreeMap::new() })
    }

    /// Whether there are any now.
    pub(super) fn are_there(&mut self) -> anyhow::Result<bool> {
        Ok(!self.find()?.is_empty())
    }

    /// A packet of a session was read.
    pub(super) fn read_one(&mut self, serial: u32, recorder: &mut Recorder) -> anyhow::Result<()> {
        // The session was added since the maps were read last.
        let looked = if self.known.contains_key(&serial) { Ok(()) } else { self.note(recorder) };
        self.known.entry(serial).or_default().read += 1;
        looked
    }

    /// Gives the recorder the sessions and their counters, and says which of them have gone.
    pub(super) fn note(&mut self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let found = self.find()?;
        let here: BTreeSet<u32> = found.iter().map(|found| found.source.serial).collect();
        for (_, known) in
            self.known.iter_mut().filter(|(serial, known)| !known.is_gone && !here.contains(serial))
        {
            known.is_gone = true;
            warn!(
                source = known.name,
                "no more packets come from here: the pod or the device has gone, or another mirror has its place"
            );
        }
        for Found { source, copied, lost } in found {
            let known = self.known.entry(source.serial).or_default();
            known.name.clone_from(&source.name);
            recorder.add_source(&source);
            // A packet can be read before it is counted.
            recorder.note_counters(source.serial, copied.max(known.read) + lost, lost);
        }
        Ok(())
    }

    /// The sessions that are in the maps now, with their counters since the beginning.
    fn find(&mut self) -> anyhow::Result<Vec<Found>> {
        let mut all = find(&mut self.maps, &self.target)?;
        for found in &mut all {
            let (copied, lost) = self.before.0.get(&found.source.serial).copied().unwrap_or_default();
            found.copied = found.copied.saturating_sub(copied);
            found.lost = found.lost.saturating_sub(lost);
        }
        Ok(all)
    }
}

fn find(maps: &mut Reader, target: &str) -> anyhow::Result<Vec<Found>> {
    let Readout { taps, .. } = maps.read_sessions(|session| session.target.0.as_str() == target)?;
    let of_tap =
        |tap: &TapReadout| tap.sessions.iter().map(|session| found(tap, session)).collect::<Vec<_>>();
    Ok(taps.iter().flat_map(of_tap).collect())
}

fn found(tap: &TapReadout, session: &SessionReadout) -> Found {
    let owner = &tap.owner;
    let name = match &owner.pod {
        Some(pod) => format!("{pod} {}", owner.nic),
        None => owner.device.clone(),
    };
    let settings = &session.session.settings;
    // A mirror with a name of the user's: the pod can have several.
    let mirror = Some(&session.mirror).filter(|mirror| !mirror.0.is_capture());
    let mirror = mirror.map_or_else(String::new, |mirror| format!(", mirror {mirror}"));
    let source = Source {
        serial: session.serial,
        name,
        description: format!("device {} of the node{mirror}", owner.device),
        filter: settings.filter.as_ref().map(|filter| filter.text.clone()),
        comment: (!settings.words().is_empty()).then(|| settings.words().join(", ")),
    };
    let count = |verdict: Verdict| {
        let counts = session.counts.iter().filter(|count| count.verdict == verdict);
        counts.map(|count| count.packets).sum()
    };
    Found { source, copied: count(Verdict::Copied), lost: count(Verdict::Lost) }
}
