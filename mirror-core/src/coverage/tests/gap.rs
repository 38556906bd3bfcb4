//! A NIC that counts packets as the hook does, with queues before and after the hook, and a small bypass.

use super::*;
use crate::coverage::gap::{LOOKS, STEP};

/// The queue of a macvlan in one direction. Egress packets wait between the hook and the NIC's counter, ingress packets
/// between the counter and the hook.
#[derive(Debug, Clone, Copy)]
enum Queue {
    BehindHook,
    AheadOfHook,
}

/// The traffic between two readings.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// Packets that arrive.
    packets: u64,
    /// The percentage of the queued packets that leave the queue.
    leave: u64,
    /// The percentage of these packets that the queue drops.
    dropped: u64,
    /// The percentage of the packets that pass while the counters are read.
    during: u64,
}

struct Nic {
    story: Story,
    queue: Queue,
    queued: u64,
}

impl Nic {
    fn new(queue: Queue) -> Self {
        let mut nic = Self { story: Story::of(Kind::Plain), queue, queued: 0 };
        nic.round(Round { packets: 0, leave: 100, dropped: 0, during: 0 });
        nic
    }

    fn come(&mut self, packets: u64) {
        let World { nic, seen, .. } = &mut self.story.world;
        match self.queue {
            Queue::BehindHook => add(seen, packets, SEGMENT),
            Queue::AheadOfHook => add(nic, packets, SEGMENT),
        }
        self.queued += packets;
    }

    fn leave(&mut self, percent: u64, dropped: u64) {
        let packets = self.queued * percent / 100;
        self.queued -= packets;
        let World { nic, seen, .. } = &mut self.story.world;
        match self.queue {
            // The kernel drops packets that do not fit into the queue after the hook.
            Queue::BehindHook => add(nic, packets - packets * dropped / 100, SEGMENT),
            Queue::AheadOfHook => add(seen, packets, SEGMENT),
        }
    }

    /// Lets packets pass, and reads the counters while some of them do.
    fn round(&mut self, Round { packets, leave, dropped, during }: Round) -> State {
        let late = packets * during / 100;
        self.come(packets - late);
        self.leave(leave, dropped);
        self.story.at += Duration::from_secs(2);
        let World { serial, seen: before, .. } = self.story.world;
        self.come(late / 2);
        let carried = self.story.world.nic;
        self.come(late - late / 2);
        self.leave(leave, dropped);
        let seen = Some(Seen { serial, before, after: self.story.world.seen });
        let carried = Carried { nic: carried, end: None };
        self.story.judge.read(Reading { at: self.story.at, carried, seen });
        self.story.judge.state()
    }

    /// Lets packets pass that the hook does not see.
    fn past(&mut self, packets: u64) {
        add(&mut self.story.world.nic, packets, SEGMENT);
    }
}

fn round() -> impl Strategy<Value = Round> {
    (prop_oneof![0..200_u64, 0..1_000_000_u64], 50..=100_u64, 0..100_u64, 0..100_u64)
        .prop_map(|(packets, leave, dropped, during)| Round { packets, leave, dropped, during })
}

const EMPTIES: Round = Round { packets: 0, leave: 100, dropped: 0, during: 0 };

fn queue() -> impl Strategy<Value = Queue> {
    sample::select(vec![Queue::BehindHook, Queue::AheadOfHook])
}

proptest! {
    /// Queues that fill and drain, drops, and packets that pass during readings are no bypass, as long as a queue is
    /// empty now and then.
    #[test]
    fn queues_drops_and_races_are_no_growing_gap(
        queue in queue(), times in vec(vec(round(), 0..LOOKS - 1), 1..12),
    ) {
        let mut nic = Nic::new(queue);
        for rounds in times {
            for round in rounds {
                nic.round(round);
                prop_assert!(!nic.story.judge.gap_grows(), "{:?}", nic.story.judge);
            }
            nic.round(EMPTIES);
            prop_assert!(!nic.story.judge.gap_grows(), "{:?}", nic.story.judge);
        }
    }

    /// A small part of the packets bypasses the hook. It is reported after a few checks, not earlier, and for as long
    /// as it lasts. Packets that a queue dropped before hide it only for a while.
    #[test]
    fn a_small_bypass_is_told_after_a_few_looks(
        queue in queue(), before in vec(round(), 0..40), packets in STEP..100_000, part in 3..32_u64,
    ) {
        let mut nic = Nic::new(queue);
        before.into_iter().for_each(|round| drop(nic.round(round)));
        nic.round(EMPTIES);
        // As long as the judge remembers.
        let good = Round { packets, leave: 100, dropped: 0, during: 0 };
        for _ in 0..32 {
            nic.round(good);
        }
        prop_assert_eq!(nic.round(good), State::Covered);
        let mut with_bypass = |count| -> Vec<State> {
            (0..count).map(|_| { nic.past(packets.div_ceil(part)); nic.round(good) }).collect()
        };
        let states = with_bypass(LOOKS - 1);
        prop_assert!(states.iter().all(|state| *state == State::Covered), "{:?}", states);
        let states = with_bypass(60);
        prop_assert!(states.iter().all(|state| *state == State::Bypassed(Way::Unseen)), "{:?}", states);
        // The end of the bypass is reported after 20 s.
        let states: Vec<_> = (0..15).map(|_| nic.round(good)).collect();
        prop_assert_eq!(states.last(), Some(&State::Covered));
        prop_assert_eq!(states.iter().filter(|state| **state == State::Covered).count(), 6);
    }
}

/// A process sends a tenth of 750 packets with `PACKET_QDISC_BYPASS`.
#[test]
fn a_tenth_of_few_packets_is_told() {
    let mut nic = Nic::new(Queue::BehindHook);
    let mut states = Vec::new();
    for _ in 0..15 {
        nic.past(5);
        states.push(nic.round(Round { packets: 45, ..EMPTIES }));
    }
    assert_eq!(
        (states.last(), nic.story.judge.totals()),
        (Some(&State::Bypassed(Way::Unseen)), Totals { seen: 675, carried: 750 })
    );
}

/// If a super-frame is one packet at the hook and many at the NIC, the numbers prove nothing.
#[test]
fn segments_are_no_growing_gap() {
    let mut story = Story::of(Kind::Segments);
    for _ in 0..40 {
        let state = story.quietly(Event::Pass { packets: 100, segments: 45, dropped: 0 });
        assert!(matches!(state, State::Covered | State::Unknown(Doubt::Idle)), "{state:?}");
    }
}
