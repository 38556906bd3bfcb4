//! One reader of a stream after another: each has the packets and the counts of its own time, and the whole ring.

use mirror_tests::{Agent, Flood, PodsFile, SOON, Tail, check, eventually};

use crate::{
    Inside, Node, any_mode,
    streams::{TARGET, streamed, wait_stream},
};

/// A reader that has stopped reading is killed. The next one has the whole ring.
#[test]
fn a_killed_reader_leaves_the_stream_to_the_next() {
    let Node { web, db, lab } = &Node::bridged("streamkilled");
    let _agent = Agent::mirroring(lab, any_mode(), &[streamed(web)], &TARGET, &[web]);
    let flooded = Tail::start(lab, &["tail", "--target", "live", "--buffer", "16MiB"]);
    flooded.pause();
    let flood = Flood::start(web, db);
    eventually(SOON, || {
        flood.go_on(5000);
        let tap = lab.status().tap(web.veth_host()).clone();
        check(tap.total("lost") > 0, || format!("the ring is not full: {tap:?}"))
    });
    flood.stop();
    flooded.kill();
    wait_stream(lab, false);
    let lost = lab.status().tap(web.veth_host()).total("lost");
    let tail = Tail::start(lab, &["tail", "--target", "live", "--buffer", "256KiB"]);
    let inside = Inside::of(web);
    web.ping(db.v4(), 50, 1000);
    eventually(SOON, || {
        let (sent, received) = inside.frames();
        let (read, all) = (tail.file().packets.len(), sent.len() + received.len());
        check(read == all && read >= 100, || format!("{read} of {all}"))
    });
    assert_eq!(tail.stop().statistics[0].1, 0);
    assert_eq!(lab.status().tap(web.veth_host()).total("lost"), lost);
}

/// Each reader is asked to end, and the next one starts at once, while packets arrive. At the end the accounts of ring
/// space balance: exactly the bytes that a session has taken were returned.
#[test]
fn readers_that_follow_at_once_keep_no_room_of_each_other() {
    let Node { web, db, lab } = &Node::bridged("streamnext");
    let filter = format!("udp and src host {}", web.v4());
    let pods = PodsFile::new(lab, &[streamed(web).annotated("podmirror.io/filter", &filter)]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let flood = Flood::start(web, db);
    let mut tail = Tail::start(lab, &["tail", "--target", "live"]);
    let mut read = 0;
    for reader in 1..6 {
        flood.go_on(500);
        tail.interrupt();
        // The count is never reached; it only makes the name of the file differ.
        let words = ["tail", "--target", "live", "-c", &(reader * 1_000_000).to_string()];
        let next = Tail::start_when_free(lab, &words);
        read += tail.wait().packets.len();
        tail = next;
    }
    flood.go_on(500);
    flood.stop();
    let copied = || lab.status().tap(web.veth_host()).total("copied") as usize;
    eventually(SOON, || {
        let (all, copied) = (read + tail.file().packets.len(), copied());
        check(all == copied, || format!("{all} of {copied} packets are in the files"))
    });
    assert_eq!(lab.room_in_use(), []);
    assert_eq!(tail.stop().statistics.len(), 1);
}

/// Every packet that counts as copied is in the file of a reader that ends normally.
#[test]
fn nothing_is_missing_at_the_end_of_a_reader() {
    let Node { web, db, lab } = &Node::bridged("streamend");
    let filter = format!("udp and src host {}", web.v4());
    let pods = PodsFile::new(lab, &[streamed(web).annotated("podmirror.io/filter", &filter)]);
    let _agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    lab.wait_mirrored(&[web]);
    let mut copied = 0;
    for words in [&["tail", "--target", "live"][..], &["tail", "--target", "live", "--duration", "3s"]] {
        let tail = Tail::start(lab, words);
        let flood = Flood::start(web, db);
        flood.go_on(1000);
        let file = if words.len() > 3 { tail.wait() } else { tail.stop() };
        flood.go_on(100);
        flood.stop();
        let status = wait_stream(lab, false);
        let now = status.tap(web.veth_host()).total("copied");
        assert!(!file.packets.is_empty());
        assert_eq!(file.packets.len() as u64, now - copied);
        copied = now;
    }
}
