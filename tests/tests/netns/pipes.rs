//! `tail` and `capture` write into a pipe whose reader is slow, reads nothing, or has closed it.

use std::{
    io::{PipeReader, Read as _},
    thread,
};

use nix::{sys::stat::Mode, unistd::mkfifo};

use mirror_tests::{Agent, Flood, Lab, PacketFile, PodNs, PodSpec, SOON, Tail, check, eventually};

use crate::{Inside, Node, any_mode};

/// The ring has the smallest size, so that it fills quickly. The pods send IPv4 only when the story makes them.
const TAIL: [&str; 7] = ["tail", "--pod", "default/web", "--filter", "ip", "--buffer", "256KiB"];

/// An agent that mirrors nothing.
fn agent(lab: &Lab, web: &PodNs, db: &PodNs) -> Agent {
    Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[])
}

/// Reads a pipe to its end.
fn rest(mut pipe: PipeReader) -> PacketFile {
    let mut bytes = Vec::new();
    pipe.read_to_end(&mut bytes).unwrap();
    PacketFile::parse(&bytes)
}

/// Waits until neither a tap nor a target of a capture is left.
#[track_caller]
fn nothing_is_left(lab: &Lab) {
    lab.wait_mirrored(&[]);
    lab.wait_status(|status| {
        check(status.targets.iter().all(|target| !target.stream), || "the stream is still there".into())
    });
}

/// Packets that the capture of a pod has copied, and that it has lost.
fn counted(lab: &Lab, pod: &PodNs) -> (u64, u64) {
    let status = lab.status();
    let session = &status.tap(pod.veth_host()).sessions[0];
    (session.total("copied"), session.total("lost"))
}

/// Sends datagrams until the ring is full and packets are lost. All of them come back.
#[track_caller]
fn flood_until_lost(lab: &Lab, web: &PodNs, db: &PodNs) {
    let flood = Flood::start(web, db);
    eventually(SOON, || {
        flood.go_on(2000);
        let counted = counted(lab, web);
        check(counted.1 > 0, || format!("the ring is not full: {counted:?}"))
    });
    flood.stop();
}

/// The command ends by Ctrl-C, and by its own time limit, although its reader reads nothing. The pod loses no packet.
#[test]
fn a_reader_that_takes_nothing_does_not_hold_up_the_end() {
    let Node { web, db, lab } = &Node::bridged("pipefull");
    let _agent = agent(lab, web, db);
    for words in [&[][..], &["--duration", "6s"]] {
        let (tail, pipe) = Tail::piped(lab, &[&TAIL, words].concat());
        flood_until_lost(lab, web, db);
        if words.is_empty() {
            tail.interrupt();
        }
        let exit = tail.exit();
        assert_eq!(exit.code, Some(1), "{exit:?}");
        let told = "cannot write to standard output: its reader has taken nothing for 5 s";
        assert!(exit.stderr.lines().last().unwrap().contains(told), "{exit:?}");
        nothing_is_left(lab);
        let file = rest(pipe);
        assert!(
            !file.packets.is_empty() && file.statistics.is_empty(),
            "the beginning is readable: {file:?}"
        );
    }
}

/// What the reader reads late is complete and in order, and what was lost meanwhile is counted.
#[test]
fn a_reader_that_pauses_gets_everything_that_was_not_lost() {
    let Node { web, db, lab } = &Node::bridged("pipeslow");
    let _agent = agent(lab, web, db);
    let (tail, pipe) =
        Tail::piped(lab, &["tail", "--pod", "default/web", "--filter", "ip", "--buffer", "1MiB"]);
    let inside = Inside::of(web);
    // More than the pipe has room for, and less than the ring: each packet takes 2 KiB there.
    web.udp_echo(db, db.v4(), &[1400; 80]);
    let all = || {
        let (sent, received) = inside.frames();
        let is_ip = |frame: &[u8]| frame[12..14] == [8, 0];
        (sent.only(is_ip).on_a_wire(), received.only(is_ip).on_a_wire())
    };
    eventually(SOON, || {
        let (sent, received) = all();
        let (counted, all) = (counted(lab, web), sent.len() + received.len());
        check(counted == (all as u64, 0) && all >= 160, || format!("{counted:?} of {all} packets"))
    });
    let reader = thread::spawn(|| rest(pipe));
    tail.interrupt();
    let exit = tail.exit();
    assert_eq!(exit.code, Some(0), "{exit:?}");
    let file = reader.join().unwrap();
    let (sent, received) = all();
    file.frames("egress").same_as(&sent).unwrap();
    file.frames("ingress").same_as(&received).unwrap();
    assert_eq!(file.statistics, [((sent.len() + received.len()) as u64, 0)]);
    nothing_is_left(lab);

    let (tail, pipe) = Tail::piped(lab, &TAIL);
    flood_until_lost(lab, web, db);
    let reader = thread::spawn(|| rest(pipe));
    web.ping(db.v4(), 3, 56);
    let (copied, lost) = counted(lab, web);
    tail.interrupt();
    assert_eq!(tail.exit().code, Some(0));
    let file = reader.join().unwrap();
    assert_eq!((file.packets.len() as u64, file.statistics), (copied, vec![(copied + lost, lost)]));
}

/// These commands get no packet. Each ends with 0 when its reader closes the pipe, and nothing of it is left.
#[test]
fn a_reader_that_goes_ends_the_command_at_once() {
    let Node { web, db, lab } = &Node::bridged("pipegone");
    let _agent = agent(lab, web, db);
    let quiet = ["--pod", "default/web", "--filter", "udp port 9"];
    for words in [&["tail"][..], &["capture", "--ring", "1MB"], &["capture", "--first", "1MB"]] {
        let (tail, pipe) = Tail::piped(lab, &[words, &quiet].concat());
        drop(pipe);
        let exit = tail.exit();
        assert_eq!(exit.code, Some(0), "{words:?}: {exit:?}");
        nothing_is_left(lab);
    }
}

/// As with `mkfifo packets; mirror-agent tail -w packets & wireshark -k -i packets`. A command whose FIFO has no reader
/// waits for one, and Ctrl-C ends it. Nothing is captured meanwhile.
#[test]
fn a_fifo_is_written_when_it_has_a_reader() {
    let Node { web, db, lab } = &Node::bridged("pipefifo");
    let _agent = agent(lab, web, db);
    let fifo = |name: &str| {
        let path = lab.files().join(name);
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        path
    };
    let fifos = [fifo("nobody"), fifo("packets")];
    let [mut nobody, mut somebody] = fifos.each_ref().map(|path| Tail::into_fifo(lab, &TAIL, path));
    for tail in [&mut nobody, &mut somebody] {
        tail.wait_for_log("waiting for a program that reads this FIFO");
    }
    nobody.interrupt();
    assert_eq!(nobody.exit().code, Some(0));
    lab.wait_mirrored(&[]);
    let reader = thread::spawn({
        let path = fifos[1].clone();
        move || PacketFile::read(&path)
    });
    lab.wait_mirrored(&[web]);
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || {
        let counted = counted(lab, web);
        check(counted == (10, 0), || format!("{counted:?} of 10 packets"))
    });
    somebody.interrupt();
    assert_eq!(somebody.exit().code, Some(0));
    let file = reader.join().unwrap();
    assert_eq!((file.packets.len(), file.statistics), (10, vec![(10, 0)]));
}
