//! Tests of the harness: the properties on which the stories rely.

use std::{fs, path::Path};

use mirror_tests::{Capture, Conversation, Frame, SOON, eventually};

use crate::Node;

#[test]
fn captures_at_both_ends_of_a_conversation_are_the_same() {
    let Node { web, db, lab: _lab } = Node::bridged("captures");
    let ends = [&web, &db].map(|pod| Capture::start(pod.netns(), "eth0"));
    web.ping(db.v4(), 20, 56);
    web.ping(db.v6(), 20, 56);
    web.udp_echo(&db, db.v4(), &[0, 1, 1472, 1473, 65507]);
    Conversation::open(&web, &db, db.v4()).exchange(1_000_000);
    web.send_frame(&Frame::new(db.eth0().mac, web.eth0().mac).vlan(7).filled(100, 0).bytes());
    eventually(SOON, || ends[0].frames().same_as(&ends[1].frames()));
    let [at_web, at_db] = ends.map(Capture::stop);
    at_web.same_as(&at_db).unwrap();
    assert!(at_web.iter().any(|(frame, _)| frame.len() > 1514), "super-frames are seen as such");
    assert_eq!(at_web.only(|frame| frame[12..16] == [0x81, 0, 0, 7]).len(), 1, "and VLAN tags");
}

#[test]
fn pods_say_nothing_by_themselves() {
    let Node { web, db, lab: _lab } = Node::routed("quiet");
    let capture = Capture::start(web.netns(), "eth0");
    web.ping(db.v4(), 200, 56);
    let frames = capture.stop();
    let talk = frames.only(|frame| frame[12..14] == [8, 0]).len();
    assert_eq!(talk, 400);
    assert!(frames.len() - talk <= 4, "{frames}");
}

#[test]
fn nothing_is_left_of_a_lab() {
    let node = Node::bridged("nothing-left");
    let mut paths = [&node.web, &node.db].map(|pod| pod.netns().path().to_owned()).to_vec();
    paths.extend([node.lab.node().path(), node.lab.bpffs(), node.lab.files()].map(Path::to_owned));
    assert!(paths.iter().all(|path| path.exists()));
    let failed = std::thread::spawn(move || {
        let node = node;
        let _capture = Capture::start(node.web.netns(), "eth0");
        assert!(node.lab.devices().is_empty(), "this test fails on purpose");
    });
    assert!(failed.join().is_err());
    for path in paths {
        assert!(fs::symlink_metadata(&path).is_err(), "{} is still there", path.display());
    }
}
