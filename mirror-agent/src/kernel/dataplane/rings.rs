//! Ring buffers: the agent creates one for each capture, and the eBPF programs write records into it.
//!
//! [`Rings`] has the rings of the captures, and [`Streams`] the maps by which the eBPF programs reach them.
//! [`RingReader`] reads a ring in the process of the capture. `mirror_common::stream` defines the format of a record
//! and the accounting of room in a ring.

use std::{
    collections::BTreeMap,
    io,
    ops::ControlFlow,
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, anyhow, bail};
use aya::maps::{Array, ArrayOfMaps, Map, MapData, RingBuf};
use mirror_common::stream::{self, RecordHead};
use tokio::io::{Interest, unix::AsyncFd};
use zerocopy::FromBytes as _;

use super::pins::Pins;
use crate::model::RingId;

/// The size in bytes of the placeholder ring in an unused slot: a page of any machine.
const EMPTY_RING: u32 = 1 << 16;
/// The largest size in bytes of all rings of an agent together. The kernel charges them to the agent's memory.
pub const MAX_RINGS: u32 = 64 << 20;
/// The largest number of records of one read. After each read, the reader returns the room of these records.
const BATCH: usize = 1024;

/// A ring and its size in bytes.
type Ring = (RingBuf<MapData>, u32);

/// The rings of the captures.
#[derive(Clone, Default)]
pub struct Rings(Arc<Mutex<BTreeMap<RingId, Ring>>>);

impl Rings {
    /// Creates a ring of `bytes` bytes, a power of two and at least a page. Returns its descriptor for the reader.
    ///
    /// # Errors
    ///
    /// All rings together would exceed [`MAX_RINGS`], or the kernel has no memory for the ring.
    pub fn make(&self, bytes: u32) -> anyhow::Result<(RingId, OwnedFd)> {
        if !self.have_room(bytes) {
            bail!(
                "the buffers of all `tail` and `capture` on this node are limited to {} MiB, and {} MiB are in use",
                MAX_RINGS >> 20,
                self.taken() >> 20
            );
        }
        let ring = RingBuf::create(bytes, 0)
            .with_context(|| format!("cannot create a ring buffer of {bytes} bytes"))?;
        let fd = ring.as_fd().try_clone_to_owned().context("cannot pass on the ring buffer")?;
        let data = MapData::from_fd(fd.try_clone().context("cannot pass on the ring buffer")?)?;
        let id = RingId(data.info().context("the id of the ring buffer")?.id());
        self.all().insert(id, (ring, bytes));
        Ok((id, fd))
    }

    /// Whether a ring of `bytes` bytes fits into [`MAX_RINGS`].
    pub fn have_room(&self, bytes: u32) -> bool {
        self.taken().saturating_add(bytes) <= MAX_RINGS
    }

    /// The size of all rings in bytes.
    fn taken(&self) -> u32 {
        self.all().values().map(|(_, bytes)| *bytes).sum()
    }

    /// The size of a ring in bytes.
    pub fn size(&self, id: RingId) -> Option<u32> {
        self.all().get(&id).map(|(_, bytes)| *bytes)
    }

    /// Forgets a ring. Its memory is freed when no eBPF map and no reader holds it.
    pub fn forget(&self, id: RingId) {
        self.all().remove(&id);
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<RingId, Ring>> {
        // A panic in another thread ends the agent, so a poisoned lock does not matter.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The maps of the streams.
pub(super) struct Streams {
    rings: ArrayOfMaps<MapData, RingBuf<MapData>>,
    taken: Array<MapData, u64>,
    returned: Array<MapData, u64>,
}

impl Streams {
    /// Takes the maps from `get`, which returns a map by its name.
    pub(super) fn from_fn(get: &mut impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        Ok(Self {
            rings: get("STREAMS")?.try_into()?,
            taken: get("TAKEN")?.try_into()?,
            returned: get("RETURNED")?.try_into()?,
        })
    }

    /// The bytes that a session has in use in its ring.
    pub(super) fn in_use(&self, session: u32) -> anyhow::Result<u64> {
        let taken = self.taken.get(&session, 0).context("cannot read what is taken of the rings")?;
        let returned = self.returned.get(&session, 0).context("cannot read what is returned to the rings")?;
        Ok(stream::in_use(taken, returned))
    }

    /// Returns all room in rings that a session, or an earlier session with its id, has taken.
    pub(super) fn clear(&mut self, session: u32) -> anyhow::Result<()> {
        let taken = self.taken.get(&session, 0).context("cannot read what is taken of the rings")?;
        self.returned.set(session, &taken, 0).context("cannot write what is returned to the rings")
    }

    /// Sets the ring of the target at `place`.
    pub(super) fn set_ring(&mut self, place: u32, id: RingId, rings: &Rings) -> anyhow::Result<()> {
        let rings = rings.all();
        let (ring, _) =
            rings.get(&id).ok_or_else(|| anyhow!("the program that reads a stream has exited"))?;
        self.rings.set(place, ring, 0).context("cannot write a ring")
    }

    /// Replaces the ring of the target at `place` by `empty` (see [`empty_ring`]), so that its memory becomes free.
    pub(super) fn drop_ring(&mut self, place: u32, empty: &RingBuf<MapData>) -> anyhow::Result<()> {
        self.rings.set(place, empty, 0).context("cannot detach a ring")
    }
}

/// Creates the smallest ring, a placeholder for a removed one.
pub(super) fn empty_ring() -> anyhow::Result<RingBuf<MapData>> {
    RingBuf::create(EMPTY_RING, 0).context("cannot create an empty ring")
}

/// Splits a record into its head and the captured bytes. `None`: it is shorter than a head.
pub fn split(record: &[u8]) -> Option<(RecordHead, &[u8])> {
    let (head, bytes) = RecordHead::read_from_prefix(record).ok()?;
    Some((head, bytes.get(..head.captured as usize).unwrap_or(bytes)))
}

/// The reader of a ring.
pub struct RingReader {
    ring: RingBuf<MapData>,
    /// The room returned by readers, per session; `None` after [`keep_room`](Self::keep_room).
    returned: Option<Array<MapData, u64>>,
}

impl RingReader {
    /// Creates the reader of a ring that the agent with these pins has created.
    pub fn new(ring: OwnedFd, pins: &Pins) -> anyhow::Result<Self> {
        let path = pins.maps().join("RETURNED");
        let returned = MapData::from_pin(&path);
        let returned = returned.with_context(|| format!("cannot open the map {}", path.display()))?;
        Ok(Self {
            ring: Map::from_map_data(MapData::from_fd(ring)?)?.try_into().context("not a ring buffer")?,
            returned: Some(Map::from_map_data(returned)?.try_into()?),
        })
    }

    /// Stops returning room. A reader calls this when it ends: it needs no more room then, and another reader may have
    /// the sessions.
    pub fn keep_room(&mut self) {
        self.returned = None;
    }

    /// Returns a descriptor that becomes readable when the ring is a quarter full. Must be called within the runtime.
    pub fn wakes(&self) -> io::Result<AsyncFd<OwnedFd>> {
        let fd = self.ring.as_fd().try_clone_to_owned()?;
        // SAFETY: the `AsyncFd` owns the descriptor, and nothing else closes it.
        Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
    }

    /// Reads up to [`BATCH`] records, and passes each to `record` without a copy, until `record` returns `Break`.
    /// Returns whether the ring is empty.
    pub fn read(
        &mut self,
        mut record: impl FnMut(&RecordHead, &[u8]) -> ControlFlow<()>,
    ) -> anyhow::Result<bool> {
        let mut read = BTreeMap::<u32, u64>::new();
        let mut is_empty = false;
        for _ in 0..BATCH {
            let Some(item) = self.ring.next() else {
                is_empty = true;
                break;
            };
            // The programs write complete records only.
            let Some((head, bytes)) = split(&item) else { continue };
            *read.entry(head.session).or_default() += stream::room(head.captured);
            if record(&head, bytes).is_break() {
                break;
            }
        }
        // No other reader writes here; see `control`. The agent writes when it gives the id to a new session. If both
        // write at the same time, the sums differ by the records of the old session, until these are read.
        for (session, bytes) in read {
            let Some(numbers) = &mut self.returned else { break };
            let before = numbers.get(&session, 0).context("cannot read what was returned to the ring")?;
            let returned = before.wrapping_add(bytes);
            numbers.set(session, &returned, 0).context("cannot return room to the ring")?;
        }
        Ok(is_empty)
    }
}
