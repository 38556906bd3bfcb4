//! Random histories of a NIC, its veth and its tap, and the judge's results.

use proptest::{collection::vec, prelude::*, sample};

use super::*;

mod gap;
mod share;

/// Something that happens between two readings, or during one.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// Packets pass the hook and the NIC. Each is one packet at the hook and `segments` packets at the NIC. Some are
    /// dropped between the two.
    Pass { packets: u64, segments: u64, dropped: u64 },
    /// Packets reach the NIC past the node side of its veth.
    Around(u64),
    /// Packets pass the node side and the NIC, but not the hook.
    Past(u64),
    /// A new session replaces the one that was read.
    NewSession,
    /// The NIC is created again.
    NewNic,
}

/// The counters.
#[derive(Debug, Clone, Copy, Default)]
struct World {
    nic: Count,
    end: u64,
    serial: u32,
    seen: Count,
    /// The NIC's counters include the packets that bypass the node side.
    tells: bool,
}

const SEGMENT: u64 = 1448;
const HEADERS: u64 = 54;

fn add(count: &mut Count, packets: u64, bytes: u64) {
    (count.packets, count.bytes) = (count.packets + packets, count.bytes + packets * bytes);
}

impl World {
    fn happens(&mut self, event: Event) {
        match event {
            Event::Pass { packets, segments, dropped } => {
                add(&mut self.seen, packets + dropped, HEADERS + segments * SEGMENT);
                add(&mut self.nic, packets * segments, HEADERS + SEGMENT);
                self.end += packets * segments;
            }
            Event::Around(packets) => add(&mut self.nic, if self.tells { packets } else { 0 }, SEGMENT),
            Event::Past(packets) => {
                add(&mut self.nic, packets, SEGMENT);
                self.end += packets;
            }
            Event::NewSession => (self.serial, self.seen) = (self.serial + 1, Count::default()),
            Event::NewNic => (self.nic, self.end) = (Count::default(), 0),
        }
    }

    /// Reads the counters one after the other, while packets pass.
    fn reading(&mut self, at: Duration, meanwhile: [Event; 4]) -> Reading {
        let [a, b, c, d] = meanwhile;
        let (serial, before) = (self.serial, self.seen);
        self.happens(a);
        let end_before = self.end;
        self.happens(b);
        let nic = self.nic;
        self.happens(c);
        let end = Some([end_before, self.end]);
        self.happens(d);
        let seen = Some(Seen { serial, before, after: self.seen });
        Reading { at, carried: Carried { nic, end }, seen }
    }
}

fn nothing() -> Event {
    Event::Around(0)
}

fn pass() -> impl Strategy<Value = Event> {
    let packets = prop_oneof![0..30_u64, 0..1_000_000_u64];
    (packets, sample::select(vec![1, 2, 45]), 0..100_u64)
        .prop_map(|(packets, segments, dropped)| Event::Pass { packets, segments, dropped })
}

/// Traffic that always passes the hook.
fn covered() -> impl Strategy<Value = Event> {
    prop_oneof![8 => pass(), 1 => Just(Event::NewSession), 1 => Just(Event::NewNic)]
}

/// The events of a step, the events during its reading, its length in seconds, and whether the reading fails.
type Drawn = (Vec<Event>, [Event; 4], u64, bool);

fn step(event: impl Strategy<Value = Event>) -> impl Strategy<Value = Drawn> {
    let meanwhile = [pass(), pass(), pass(), pass()];
    (vec(event, 0..3), meanwhile, 1..20_u64, prop::bool::weighted(0.1))
}

/// A kind of NIC, and how packets bypass its hook.
fn kind_and_way() -> impl Strategy<Value = (Kind, Way)> {
    sample::select(vec![(Kind::Segments, Way::Unseen), (Kind::Plain, Way::Unseen), (Kind::L3s, Way::L3s)])
}

/// A world and its judge.
struct Story {
    world: World,
    judge: Judge,
    at: Duration,
}

impl Story {
    fn new(tells: bool) -> Self {
        let world = World { tells, ..World::default() };
        Self { world, judge: Judge::new(tells, Duration::ZERO), at: Duration::ZERO }
    }

    /// A story with a NIC of this kind.
    fn of(kind: Kind) -> Self {
        let mut story = Self::new(true);
        story.judge.kind(kind, story.at);
        story
    }

    fn step(&mut self, (events, meanwhile, seconds, fails): &Drawn) {
        events.iter().for_each(|event| self.world.happens(*event));
        self.at += Duration::from_secs(*seconds);
        let reading = self.world.reading(self.at, *meanwhile);
        match fails {
            true => self.judge.missed(self.at),
            false => self.judge.read(reading),
        }
    }

    /// A step of two seconds. No packets pass during the reading.
    fn quietly(&mut self, event: Event) -> State {
        self.step(&(vec![event], [nothing(); 4], 2, false));
        self.judge.state()
    }
}

proptest! {
    /// Packets that pass the hook raise no alarm: in floods and super-frames, with drops, during readings, with new
    /// sessions and with new NICs.
    #[test]
    fn what_passes_the_hook_raises_no_alarm(tells: bool, steps in vec(step(covered()), 1..40)) {
        let mut story = Story::new(tells);
        for step in &steps {
            story.step(step);
            let state = story.judge.state();
            prop_assert!(!matches!(state, State::Bypassed(_)), "{:?}", story.judge);
            prop_assert!(tells || state != State::Covered, "this kernel cannot tell: {:?}", story.judge);
        }
    }

    /// One packet past the node side is reported at the next reading, in any traffic. On a kernel that does not count
    /// it, the direction is never `Covered`.
    #[test]
    fn a_packet_around_the_nodes_end_is_told_at_once(
        tells: bool, before in vec(step(covered()), 0..20), traffic in pass(), packets in 1..100_u64,
    ) {
        let mut story = Story::new(tells);
        before.iter().for_each(|step| story.step(step));
        story.quietly(traffic);
        story.quietly(nothing());
        story.world.happens(traffic);
        let state = story.quietly(Event::Around(packets));
        prop_assert_eq!(state == State::Bypassed(Way::Peer), tells, "{:?}", story.judge);
        prop_assert!(tells || matches!(state, State::Unknown(_)));
    }

    /// The same while packets pass during the readings. They can hide at most as many packets as pass in that time.
    #[test]
    fn a_flood_hides_no_more_than_passes_during_two_readings(
        before in vec(step(covered()), 0..20), first in step(covered()), last in step(covered()),
    ) {
        let mut story = Story::new(true);
        before.iter().for_each(|step| story.step(step));
        let during = |(_, meanwhile, ..): &Drawn| meanwhile.iter().map(|event| match event {
            Event::Pass { packets, segments, .. } => packets * segments,
            _ => 0,
        }).sum::<u64>();
        let most = during(&first) + during(&last);
        story.step(&(first.0, first.1, first.2, false));
        story.world.happens(Event::Around(most + 1));
        story.step(&(vec![], last.1, last.2, false));
        prop_assert_eq!(story.judge.state(), State::Bypassed(Way::Peer));
    }

    /// If the hook sees no packets of a NIC, this is reported within three readings, or within the window if other
    /// packets passed just before.
    #[test]
    fn a_nic_of_which_nothing_is_seen_is_told_within_a_few_readings(
        tells: bool, before in vec(step(covered()), 0..20), is_quiet: bool, packets in FEW..100_000,
        (kind, way) in kind_and_way(),
    ) {
        let mut story = Story::new(tells);
        story.judge.kind(kind, story.at);
        before.iter().for_each(|step| story.step(step));
        let lead = Event::Pass { packets, segments: 1, dropped: 0 };
        (0..5).for_each(|_| drop(story.quietly(if is_quiet { nothing() } else { lead })));
        let readings = if is_quiet { 2 } else { 4 };
        let states: Vec<_> = (0..readings).map(|_| story.quietly(Event::Past(packets))).collect();
        prop_assert_eq!(states.last(), Some(&State::Bypassed(way)), "{:?}", story.judge);
    }

    /// After a bypass has ended, traffic that is seen clears the state, not at once and not too late.
    #[test]
    fn the_end_of_a_bypass_is_told(tells: bool, around: bool, packets in FEW..100_000, steps in 1..20) {
        let mut story = Story::new(tells);
        let bypass = if around && tells { Event::Around(packets) } else { Event::Past(packets) };
        (0..steps + 3).for_each(|_| drop(story.quietly(bypass)));
        let began = story.judge.since();
        let is_bypassed = |story: &Story| matches!(story.judge.state(), State::Bypassed(_));
        prop_assert!(is_bypassed(&story));
        let ended = story.at;
        while is_bypassed(&story) {
            prop_assert_eq!(story.judge.since(), began);
            story.quietly(Event::Pass { packets, segments: 1, dropped: 0 });
            prop_assert!(story.at - ended < CLEAR + Duration::from_secs(10), "{:?}", story.judge);
        }
        prop_assert!(story.at - ended >= CLEAR);
        prop_assert_eq!(story.judge.since(), story.at);
        let expected = if tells { State::Covered } else { State::Unknown(Doubt::Kernel) };
        prop_assert_eq!(story.judge.state(), expected);
    }

    /// The totals are the sums over all comparable steps.
    #[test]
    fn the_totals_are_what_was_counted(steps in vec((pass(), 0..1000_u64), 1..20)) {
        let mut story = Story::new(true);
        story.quietly(nothing());
        for (event, around) in &steps {
            story.world.happens(Event::Around(*around));
            story.quietly(*event);
        }
        let Totals { seen, carried } = story.judge.totals();
        prop_assert_eq!((seen, carried), (story.world.seen.packets, story.world.nic.packets));
    }

    /// A packet that passes during a reading is not counted as missed: at rest, the totals are equal.
    #[test]
    fn what_passes_during_a_reading_counts_as_seen(
        steps in vec((0..50_u64, prop::array::uniform4(0..50_u64), prop::bool::weighted(0.2)), 1..20),
    ) {
        let pass = |packets| Event::Pass { packets, segments: 1, dropped: 0 };
        let mut story = Story::new(true);
        for (packets, meanwhile, is_new) in steps {
            story.world.happens(pass(packets));
            let events = if is_new { vec![Event::NewSession] } else { vec![] };
            let before = story.judge.totals();
            story.step(&(events, meanwhile.map(pass), 2, false));
            let after = story.judge.totals();
            prop_assert!(before.seen <= after.seen && before.carried <= after.carried);
        }
        story.quietly(nothing());
        let Totals { seen, carried } = story.judge.totals();
        prop_assert_eq!(seen, carried);
    }

    /// A NIC that is idle or cannot be read is neither `Covered` nor `Bypassed`.
    #[test]
    fn without_traffic_nothing_is_told(tells: bool, packets in 0..FEW / 4, steps in 1..40) {
        let mut story = Story::new(tells);
        for _ in 0..steps {
            let state = story.quietly(Event::Pass { packets, segments: 1, dropped: 0 });
            prop_assert_eq!(state, State::Unknown(Doubt::Idle));
        }
    }
}

const SOME: Event = Event::Pass { packets: 20, segments: 1, dropped: 0 };

#[test]
fn what_is_proven_holds_for_a_while_and_not_for_ever() {
    let mut story = Story::new(true);
    story.quietly(nothing());
    assert_eq!(story.quietly(SOME), State::Covered);
    let since = story.judge.since();
    (0..30).for_each(|_| assert_eq!(story.quietly(nothing()), State::Covered));
    assert_eq!(story.judge.since(), since);
    story.quietly(nothing());
    (0..5).for_each(|_| drop(story.quietly(nothing())));
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Idle));
    // The problem is reported as long as the NIC carries nothing.
    story.quietly(Event::Around(1));
    (0..100).for_each(|_| assert_eq!(story.quietly(nothing()), State::Bypassed(Way::Peer)));
    // But nothing is reported without readings.
    let unread = story.at + QUIET;
    story.judge.missed(unread - Duration::from_secs(1));
    assert_eq!(story.judge.state(), State::Bypassed(Way::Peer));
    story.judge.missed(unread);
    assert_eq!((story.judge.state(), story.judge.since()), (State::Unknown(Doubt::Unread), unread));
    story.at = unread;
    assert_eq!(story.quietly(SOME), State::Covered);
}

#[test]
fn a_part_that_is_neither_nearly_all_nor_less_than_half_is_a_doubt() {
    let mut story = Story::new(true);
    story.quietly(nothing());
    (0..10).for_each(|_| {
        story.world.happens(SOME);
        story.quietly(Event::Past(10));
    });
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Differs));
}

/// A queue after the hook takes many packets in one step, and passes them to the NIC in the next one.
#[test]
fn packets_that_a_queue_holds_up_raise_no_alarm() {
    let mut story = Story::new(true);
    story.quietly(nothing());
    add(&mut story.world.seen, 10_000, SEGMENT);
    story.quietly(nothing());
    story.quietly(Event::Past(10_000));
    for _ in 0..10 {
        assert!(!matches!(story.quietly(SOME), State::Bypassed(_)), "{:?}", story.judge);
    }
}

#[test]
fn the_hook_comes_before_the_counters() {
    let hidden = Hidden::Program("first".into());
    let mut story = Story::new(true);
    story.quietly(nothing());
    story.quietly(SOME);
    story.judge.hook(AtHook::Behind(hidden.clone()), story.at);
    assert_eq!((story.judge.state(), story.judge.since()), (State::Hidden(hidden), story.at));
    (0..5).for_each(|_| drop(story.quietly(Event::Past(1000))));
    assert_eq!(story.judge.state().name(), "Hidden");
    for absent in [AtHook::Behind(Hidden::NoHook), AtHook::Absent] {
        story.judge.hook(absent, story.at);
        assert_eq!(story.judge.state(), State::NoHook);
    }
    // Packets that were missed in that time are no evidence against the current hook.
    story.quietly(Event::Past(1000));
    story.judge.hook(AtHook::First, story.at);
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Idle));
    story.quietly(Event::Past(1000));
    assert_eq!(story.quietly(SOME), State::Covered);
}

/// A tap at the NIC itself has no node side.
#[test]
fn a_tap_at_the_nic_is_judged_by_what_it_has_seen() {
    let (mut judge, mut world) =
        (Judge::new(true, Duration::ZERO), World { tells: true, ..World::default() });
    let mut next = |event, seconds| {
        world.happens(event);
        let mut reading = world.reading(Duration::from_secs(seconds), [nothing(); 4]);
        reading.carried.end = None;
        judge.read(reading);
        judge.state()
    };
    next(nothing(), 0);
    assert_eq!(next(SOME, 2), State::Covered);
    next(Event::Around(100), 4);
    assert_eq!(next(Event::Around(100), 6), State::Bypassed(Way::Unseen));
}
