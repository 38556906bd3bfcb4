//! Bypasses that are found by the share of packets and bytes that was seen.

use std::collections::BTreeSet;

use super::*;

proptest! {
    /// A bypass that was found by share ends only when nearly all packets are seen, not when slightly more than a half
    /// are. So a share of about a half is one lasting alarm and does not flap.
    #[test]
    fn a_bypass_stays_while_a_part_is_missing(
        packets in 100..10_000_u64, percents in vec(15..60_u64, 60), (kind, way) in kind_and_way(),
    ) {
        let mut story = Story::of(kind);
        let mix = |story: &mut Story, percent: u64| {
            let past = packets * percent / 100;
            story.world.happens(Event::Pass { packets: packets - past, segments: 1, dropped: 0 });
            story.quietly(Event::Past(past))
        };
        (0..5).for_each(|_| drop(mix(&mut story, 60)));
        for percent in percents {
            prop_assert_eq!(mix(&mut story, percent), State::Bypassed(way), "{:?}", story.judge);
        }
    }

    /// For the node side of a veth the counters are exact, so the bypass ends. Packets that are missing for another
    /// reason make the state `Unknown`.
    #[test]
    fn the_end_of_a_bypass_is_no_proof_of_the_rest(packets in 100..10_000_u64, percent in 20..45_u64) {
        let mut story = Story::new(true);
        story.quietly(nothing());
        story.quietly(Event::Around(packets));
        let mut states = BTreeSet::new();
        for _ in 0..30 {
            let past = packets * percent / 100;
            story.world.happens(Event::Pass { packets: packets - past, segments: 1, dropped: 0 });
            states.insert(story.quietly(Event::Past(past)));
        }
        prop_assert_eq!(story.judge.state(), State::Unknown(Doubt::Differs));
        prop_assert!(!states.contains(&State::Covered));
    }

    /// Many small packets are missing, and a few large ones were seen: nearly all of the bytes, but few of the packets.
    /// No kind of NIC explains that.
    #[test]
    fn large_packets_hide_no_small_ones(
        kind in sample::select(vec![Kind::Segments, Kind::Plain, Kind::L3s]), large in 20..100_000_u64, times in 3..6_u64,
    ) {
        let mut story = Story::of(kind);
        story.quietly(nothing());
        for _ in 0..20 {
            add(&mut story.world.nic, large * times, 60);
            story.world.end += large * times;
            let state = story.quietly(Event::Pass { packets: large, segments: 1, dropped: 0 });
            let is_told = kind != Kind::Segments && matches!(state, State::Bypassed(_));
            prop_assert!(
                is_told || matches!(state, State::Unknown(Doubt::Idle | Doubt::Differs)), "{:?}", story.judge,
            );
        }
    }

    /// If each packet of the NIC is one packet at the hook, both packets and bytes must have been seen. For other
    /// kinds, super-frames explain missing packets.
    #[test]
    fn a_kind_that_counts_what_passes_the_hook_must_have_seen_both(
        packets in 100..100_000_u64, percent in 20..45_u64, is_small: bool,
    ) {
        let mut story = Story::of(Kind::Plain);
        story.quietly(nothing());
        for _ in 0..20 {
            let (seen, past) = if is_small { (1500, 60) } else { (60, 1500) };
            let missing = if is_small { packets * percent / 100 } else { packets / 10 };
            add(&mut story.world.seen, packets, seen);
            add(&mut story.world.nic, packets, seen);
            add(&mut story.world.nic, missing, past);
            story.world.end += packets + missing;
            prop_assert!(story.quietly(nothing()) != State::Covered, "{:?}", story.judge);
        }
    }

    /// All was seen: super-frames of full segments, and a NIC that counts more bytes of a packet than the hook.
    #[test]
    fn super_frames_and_headers_are_no_doubt(
        packets in FEW..10_000, segments in sample::select(vec![1, 2, 17, 45]), acks in 0..1000_u64, header in 0..=18_u64,
    ) {
        let mut story = Story::of(Kind::Segments);
        story.quietly(nothing());
        add(&mut story.world.seen, acks, HEADERS);
        add(&mut story.world.nic, acks, HEADERS + header);
        story.world.end += acks;
        prop_assert_eq!(story.quietly(Event::Pass { packets, segments, dropped: 0 }), State::Covered);

        let mut story = Story::of(Kind::Plain);
        story.quietly(nothing());
        add(&mut story.world.seen, packets, HEADERS);
        add(&mut story.world.nic, packets, HEADERS + header);
        story.world.end += packets;
        prop_assert_eq!(story.quietly(nothing()), State::Covered);
    }
}

/// A minute without traffic leaves the state `Covered`. Missing packets end it sooner, as soon as no queue explains
/// them.
#[test]
fn what_is_missing_ends_a_proof_sooner_than_silence() {
    let mut story = Story::new(true);
    story.quietly(nothing());
    assert_eq!(story.quietly(SOME), State::Covered);
    let proven = story.at;
    while story.at - proven < CLEAR + Duration::from_secs(10) {
        story.world.happens(SOME);
        story.quietly(Event::Past(15));
    }
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Differs));
}

/// An ipvlan in mode l3s is known to miss packets from outside the node, so the packets that were seen do not prove the
/// next one.
#[test]
fn an_ipvlan_in_mode_l3s_is_never_covered() {
    let mut story = Story::of(Kind::L3s);
    story.quietly(nothing());
    assert_eq!(story.quietly(SOME), State::Unknown(Doubt::L3s));
    assert_eq!(story.quietly(nothing()), State::Unknown(Doubt::L3s));
    // The mode changes. Evidence from before does not count for the new mode, in either direction.
    story.judge.kind(Kind::Plain, story.at);
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Idle));
    assert_eq!(story.quietly(SOME), State::Covered);
    story.judge.kind(Kind::L3s, story.at);
    assert_eq!(story.judge.state(), State::Unknown(Doubt::Idle));
}
