//! Filters that give another answer for a super-frame than for its segments.

use mirror_tests::{Agent, Frames, PacketFile, PodSpec, Tail};

use super::{has, talk};
use crate::{Inside, Node, any_mode};

/// The tap lets all super-frames pass, and the command filters the segments that it writes, as tcpdump does on a wire.
#[test]
fn a_filter_by_length_is_for_the_segments_of_super_frames() {
    let Node { web, db, lab } = &Node::bridged("tailsegments");
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let start = |filter: &str| Tail::start(lab, &["tail", "--pod", "default/web", "--filter", filter]);
    let [all, short, long] = ["less 1514", "less 999", "greater 1515"].map(start);
    let inside = Inside::of(web);
    talk(web, db);
    let on_a_wire = |most: usize| -> (Frames, Frames) {
        let (sent, received) = inside.frames();
        let short = |frames: &Frames| frames.on_a_wire().only(|frame| frame.len() <= most);
        (short(&sent), short(&received))
    };
    has(&all, || on_a_wire(1514));
    has(&short, || on_a_wire(999));

    let (sent, received) = inside.stop();
    let is_super = |frame: &[u8]| frame.len() > 1514;
    assert!([&sent, &received].iter().all(|frames| !frames.only(is_super).is_empty()), "super-frames");
    // A super-frame counts once, even if none of its segments is written.
    let frames = sent.and(&received);
    let counted = |most: usize| {
        let passed = frames.only(|frame| frame.len() <= most || is_super(frame));
        vec![(passed.len() as u64, 0)]
    };
    assert_eq!(all.stop().statistics, counted(1514));
    assert_eq!(short.stop().statistics, counted(999));
    let path = long.path().to_owned();
    long.interrupt();
    let exit = long.exit();
    assert!(exit.code == Some(0) && exit.stderr.contains("packets=0 "), "{exit:?}");
    let file = PacketFile::read(&path);
    assert_eq!((file.packets, file.statistics), (vec![], counted(0)));
}
