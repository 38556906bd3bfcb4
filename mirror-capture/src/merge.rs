//! Merges the packets of several streams by timestamp. Pure: the caller provides the clock.
//!
//! The packets of one stream keep the order of the kernel's ring, and so the order within each flow. Among the
//! streams, the packet with the earliest timestamp is first. A silent stream could still send an earlier packet, so
//! packets wait for it, but only for a while: each one is released at the latest [`Bounds::hold`] after its
//! arrival, and at once when all waiting packets have more than [`Bounds::bytes`]. So the output is ordered by time
//! if each stream is, and if no packet arrives later than `hold` after it was copied.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// The message about a file with [`Merge::is_out_of_order`].
pub const OUT_OF_ORDER: &str = "the packets are not in order of time: `reordercap` sorts the file";

/// Bounds of the waiting packets.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// The longest time that a packet waits for other streams.
    pub hold: Duration,
    /// Maximum size of all waiting packets in bytes.
    pub bytes: usize,
}

/// The caller's number of a stream.
pub type StreamId = u64;

/// The streams, with their waiting packets.
#[derive(Debug)]
pub struct Merge<T> {
    bounds: Bounds,
    streams: BTreeMap<StreamId, Stream<T>>,
    bytes: usize,
    /// The latest sort key of the released packets.
    latest_ns: u64,
    /// A packet was released after a later one of another stream.
    pub is_out_of_order: bool,
}

#[derive(Debug)]
struct Stream<T> {
    waiting: VecDeque<Waiting<T>>,
    /// The latest timestamp of its packets so far.
    latest_ns: u64,
    /// More packets can arrive.
    is_open: bool,
}

#[derive(Debug)]
struct Waiting<T> {
    /// Its sort key: its timestamp, or a later one of an earlier packet of its stream.
    order_ns: u64,
    /// Its time of arrival, relative to a moment that the caller chooses.
    came: Duration,
    bytes: usize,
    packet: T,
}

impl<T> Merge<T> {
    /// Creates a merge without streams.
    pub const fn new(bounds: Bounds) -> Self {
        Self { bounds, streams: BTreeMap::new(), bytes: 0, latest_ns: 0, is_out_of_order: false }
    }

    /// Adds a stream: from now on, packets of others wait for its packets.
    pub fn open(&mut self, id: StreamId) {
        self.streams.insert(id, Stream { waiting: VecDeque::new(), latest_ns: 0, is_open: true });
    }

    /// Ends a stream: packets of others no longer wait for it. Its own packets are still released in order.
    pub fn close(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.is_open = false;
        }
        self.forget(id);
    }

    /// Adds a packet of an open stream, of `bytes` bytes. `now` must not decrease between calls.
    pub fn push(&mut self, id: StreamId, time_ns: u64, bytes: usize, packet: T, now: Duration) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.latest_ns = stream.latest_ns.max(time_ns);
        stream.waiting.push_back(Waiting { order_ns: stream.latest_ns, came: now, bytes, packet });
        self.bytes += bytes;
    }

    /// Returns the next packet, if it need not wait any more.
    pub fn pop(&mut self, now: Duration) -> Option<T> {
        let heads = || self.streams.iter().filter_map(|(id, stream)| Some((id, stream.waiting.front()?)));
        let (_, id) = heads().map(|(id, head)| (head.order_ns, *id)).min()?;
        let is_silent = self.streams.values().any(|stream| stream.is_open && stream.waiting.is_empty());
        // The packets before one that has waited long enough are released before it.
        let is_due = || heads().any(|(_, head)| head.came + self.bounds.hold <= now);
        if is_silent && self.bytes <= self.bounds.bytes && !is_due() {
            return None;
        }
        let Waiting { order_ns, bytes, packet, .. } = self.streams.get_mut(&id)?.waiting.pop_front()?;
        self.bytes -= bytes;
        self.is_out_of_order |= order_ns < self.latest_ns;
        self.latest_ns = self.latest_ns.max(order_ns);
        self.forget(id);
        Some(packet)
    }

    /// When a packet is released although other streams are silent; `None`: no packet waits.
    pub fn due(&self) -> Option<Duration> {
        let heads = self.streams.values().filter_map(|stream| stream.waiting.front());
        heads.map(|head| head.came + self.bounds.hold).min()
    }

    /// Removes a stream that has ended and has no packets.
    fn forget(&mut self, id: StreamId) {
        if self.streams.get(&id).is_some_and(|stream| !stream.is_open && stream.waiting.is_empty()) {
            self.streams.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const HOLD: Duration = Duration::from_millis(500);
    const BYTES: usize = 1000;

    fn merge() -> Merge<(StreamId, u64)> {
        Merge::new(Bounds { hold: HOLD, bytes: BYTES })
    }

    /// Adds a packet of 100 bytes, identified by its stream and its timestamp.
    fn push(merge: &mut Merge<(StreamId, u64)>, id: StreamId, time_ns: u64, now: Duration) {
        merge.push(id, time_ns, 100, (id, time_ns), now);
    }

    fn drain(merge: &mut Merge<(StreamId, u64)>, now: Duration) -> Vec<(StreamId, u64)> {
        std::iter::from_fn(|| merge.pop(now)).collect()
    }

    #[test]
    fn a_stream_that_is_alone_waits_for_nobody() {
        let mut merge = merge();
        merge.open(1);
        push(&mut merge, 1, 7, Duration::ZERO);
        assert_eq!((drain(&mut merge, Duration::ZERO), merge.due()), (vec![(1, 7)], None));
    }

    #[test]
    fn packets_wait_for_a_silent_stream_and_not_for_ever() {
        let mut merge = merge();
        merge.open(1);
        merge.open(2);
        push(&mut merge, 1, 20, Duration::ZERO);
        push(&mut merge, 1, 40, Duration::from_millis(100));
        assert_eq!((drain(&mut merge, Duration::from_millis(499)), merge.due()), (vec![], Some(HOLD)));
        push(&mut merge, 2, 10, Duration::from_millis(499));
        push(&mut merge, 2, 30, Duration::from_millis(499));
        assert_eq!(drain(&mut merge, Duration::from_millis(499)), [(2, 10), (1, 20), (2, 30)]);
        assert_eq!(merge.due(), Some(Duration::from_millis(600)));
        assert_eq!(drain(&mut merge, Duration::from_millis(600)), [(1, 40)]);
        push(&mut merge, 1, 50, Duration::from_millis(700));
        merge.close(2);
        assert_eq!(drain(&mut merge, Duration::from_millis(700)), [(1, 50)], "nothing waits for it any more");
    }

    #[test]
    fn what_waits_has_a_bound() {
        let mut merge = merge();
        merge.open(1);
        merge.open(2);
        for time in 0..11 {
            push(&mut merge, 1, time, Duration::ZERO);
        }
        assert_eq!(drain(&mut merge, Duration::ZERO), [(1, 0)]);
        assert_eq!(merge.bytes, BYTES);
    }

    /// A packet of a stream: the time since the packet before it was copied, and its delay in transit, in ms.
    type Drawn = (u64, u64);

    proptest! {
        /// Streams whose packets arrive in timestamp order, each at most `late` after it was copied.
        #[test]
        fn nothing_is_lost_and_the_whole_is_in_order(
            drawn in vec(vec((0..300_u64, 0..700_u64), 0..30), 1..5),
            is_bounded: bool,
        ) {
            let bytes = if is_bounded { BYTES } else { usize::MAX };
            let mut merge = Merge::new(Bounds { hold: HOLD, bytes });
            let mut arrivals = Vec::new();
            for (id, packets) in (0..).zip(&drawn) {
                merge.open(id);
                let (mut time, mut arrival) = (0, 0);
                for (step, late) in packets as &Vec<Drawn> {
                    time += step;
                    arrival = arrival.max(time + late);
                    arrivals.push((arrival, id, time));
                }
            }
            // The order within a stream is that of the arrivals.
            arrivals.sort_by_key(|(arrival, ..)| *arrival);
            let on_time = arrivals.iter().all(|(arrival, _, time)| arrival - time < HOLD.as_millis() as u64);
            let mut out = Vec::new();
            for (arrival, id, time) in &arrivals {
                let now = Duration::from_millis(*arrival);
                while let Some(due) = merge.due().filter(|due| *due < now) {
                    let before = out.len();
                    out.extend(std::iter::from_fn(|| merge.pop(due)));
                    prop_assert!(out.len() > before, "what is due goes");
                }
                push(&mut merge, *id, *time, now);
                out.extend(std::iter::from_fn(|| merge.pop(now)));
                prop_assert!(merge.bytes <= bytes);
            }
            for id in 0..drawn.len() as u64 {
                merge.close(id);
            }
            out.extend(drain(&mut merge, Duration::ZERO));
            prop_assert!(merge.streams.is_empty() && merge.bytes == 0);
            for id in 0..drawn.len() as u64 {
                let of = |all: &mut dyn Iterator<Item = (u64, u64)>| -> Vec<u64> {
                    all.filter(|(of, _)| *of == id).map(|(_, time)| time).collect()
                };
                let sent = of(&mut arrivals.iter().map(|(_, id, time)| (*id, *time)));
                prop_assert_eq!(of(&mut out.iter().copied()), sent);
            }
            prop_assert_eq!(merge.is_out_of_order, !out.is_sorted_by_key(|(_, time)| *time));
            if on_time && !is_bounded {
                prop_assert!(out.is_sorted_by_key(|(_, time)| *time), "{:?}", out);
            }
        }

        /// Timestamps that decrease within a stream do not change its order, and delay nothing.
        #[test]
        fn a_stream_keeps_its_order_whatever_its_times_are(times in vec(vec(0..100_u64, 0..20), 1..4)) {
            let mut merge = merge();
            let mut out = Vec::new();
            for (id, times) in (0..).zip(&times) {
                merge.open(id);
                for (number, time) in (0..).zip(times) {
                    merge.push(id, *time, 0, (id, number), Duration::ZERO);
                }
            }
            out.extend(drain(&mut merge, HOLD));
            for (id, times) in (0..).zip(&times) {
                let numbers: Vec<_> = out.iter().filter(|(of, _)| *of == id).map(|(_, number)| *number).collect();
                prop_assert_eq!(numbers, (0..times.len() as u64).collect::<Vec<_>>());
            }
        }
    }
}
