//! `tail` and `capture` read the packets of pods and interfaces, without any change to other mirrors.

mod segments;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mirror_tests::{
    Agent, Capture, Conversation, Flood, Frames, OneCpu, PodNs, PodSpec, PodsFile, SOON, Tail, check,
    eventually, wireshark_finds_nothing_wrong as nothing_wrong,
};

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// Waits until a file has exactly these frames of each direction, each once.
#[track_caller]
fn has(tail: &Tail, expected: impl Fn() -> (Frames, Frames)) {
    eventually(SOON, || {
        let (sent, received) = expected();
        let file = tail.file();
        file.frames("egress").same_as(&sent)?;
        file.frames("ingress").same_as(&received)
    });
}

fn talk(web: &PodNs, db: &PodNs) {
    for (address, back) in [(db.v4(), web.v4()), (db.v6(), web.v6())] {
        web.ping(address, 10, 56);
        db.ping(back, 10, 1400);
        web.udp_echo(db, address, &[0, 22, 64, 1400, 1452, 1473, 9000, 65507]);
        Conversation::open(web, db, address).exchange(300_000);
    }
}

/// No pod requests a mirror. The tap exists only for the tail, and is removed with it.
#[test]
fn a_pod_is_read_completely() {
    let Node { web, db, lab } = &Node::bridged("tail");
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let tail = Tail::start(lab, &["tail", "--pod", "default/web", "--super-frames"]);
    let inside = Inside::of(web);
    talk(web, db);
    let tagged = mirror_tests::Frame::new(db.eth0().mac, web.eth0().mac).vlan(100).filled(64, 2).bytes();
    web.send_frame(&tagged);
    has(&tail, || inside.frames());
    let (sent, received) = inside.stop();
    assert!(sent.count(&tagged) == 1 && sent.iter().any(|(frame, _)| frame.len() > 1514));
    let file = tail.stop();
    let all = (sent.len() + received.len()) as u64;
    assert_eq!((file.interfaces, file.statistics), (vec!["default/web eth0".to_owned()], vec![(all, 0)]));
    lab.wait_mirrored(&[]);
    lab.wait_status(|status| {
        check(status.targets.iter().all(|target| !target.stream), || "the stream is still there".into())
    });
}

/// Frames are as on a wire, and their times are those of the clock.
#[test]
fn wireshark_finds_nothing_wrong() {
    let Node { web, db, lab } = &Node::bridged("tailshark");
    // On a busy machine TCP would probe for a lost tail, which is a retransmission.
    [web, db].into_iter().for_each(|pod| pod.netns().sysctl("ipv4/tcp_early_retrans", "0"));
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let begun = SystemTime::now();
    let tail = Tail::start(lab, &["tail", "--pod", "default/web"]);
    let inside = Inside::of(web);
    let in_order = OneCpu::of_this_thread();
    talk(web, db);
    drop(in_order);
    has(&tail, || {
        let (sent, received) = inside.frames();
        (sent.on_a_wire(), received.on_a_wire())
    });
    let path = tail.path().to_owned();
    let packets = tail.stop().packets;
    let times = begun..=SystemTime::now();
    for packet in &packets {
        let time = UNIX_EPOCH + Duration::from_nanos(packet.time_ns);
        assert!(packet.frame.length <= 1514 && times.contains(&time), "{packet:?}");
    }
    nothing_wrong(&path, packets.len(), &["ip", "tcp", "udp", "icmp", "icmpv6"]);
}

#[test]
fn a_tail_changes_no_mirror() {
    let Node { web, db, lab } = &Node::bridged("tailbeside");
    let _agent =
        Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true"), PodSpec::of(db)], &[], &[web]);
    let (mirror, inside) = (Capture::start(lab.node(), MIRROR), Inside::of(web));
    web.ping(db.v4(), 5, 1000);
    let words =
        ["tail", "--pod", "default/web", "--filter", "icmp", "--snaplen", "96", "--direction", "egress"];
    let tail = Tail::start(lab, &words);
    web.ping(db.v4(), 7, 1000);
    web.udp_echo(db, db.v4(), &[10, 20]);
    eventually(SOON, || {
        let file = tail.file();
        check(file.packets.len() == 7, || format!("{file:?}"))?;
        let is_cut = |packet: &mirror_tests::FilePacket| {
            packet.frame.bytes.len() == 96 && packet.frame.length == 1042 && packet.direction == "egress"
        };
        check(file.packets.iter().all(is_cut), || format!("{file:?}"))
    });
    tail.stop();
    web.ping(db.v4(), 3, 1000);
    shows(&mirror, || {
        let (sent, received) = inside.frames();
        sent.and(&received)
    });
    lab.wait_status(|status| {
        let tap = status.tap(web.veth_host());
        let (sent, received) = inside.frames();
        let copied = tap.packets("egress", "copied") + tap.packets("ingress", "copied");
        check(copied == (sent.len() + received.len()) as u64 && tap.sessions.len() == 1, || "".into())
    });
}

#[test]
fn an_interface_is_read_without_an_agent() {
    let Node { web, db, lab } = &Node::bridged("tailalone");
    let before = lab.network_state();
    let tail = Tail::start(lab, &["tail", web.veth_host(), "-c", "20"]);
    let inside = Inside::of(web);
    web.ping(db.v4(), 9, 56);
    eventually(SOON, || check(!tail.file().packets.is_empty(), || "nothing is read".into()));
    web.ping(db.v4(), 9, 56);
    let file = tail.wait();
    assert_eq!((file.packets.len(), &file.interfaces[..]), (20, &[web.veth_host().to_owned()][..]));
    drop(inside);
    lab.network_is_as(&before);
    assert!(lab.pins().is_empty(), "{:?}", lab.pins());
}

/// The command must report at once what is wrong, and leave nothing.
#[test]
fn what_cannot_be_read_is_refused() {
    let Node { web, db, lab } = &Node::bridged("tailrefused");
    let alone = lab.agent_exit(&["tail", "--pod", "default/web", "-w", "/dev/null"]);
    assert!(alone.code == Some(1) && alone.stderr.contains("no agent is running on this node"), "{alone:?}");
    let missing = lab.agent_exit(&["tail", "nosuch0", "-w", "/dev/null"]);
    assert!(
        missing.code == Some(1) && missing.stderr.contains("the interface does not exist"),
        "{missing:?}"
    );
    assert!(lab.pins().is_empty(), "{:?}", lab.pins());
    let pods = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &["--exclude-namespaces", "default"], &[]);
    for (words, told) in [
        (&["tail", "--pod", "default/nosuch"][..], "no pod default/nosuch is on this node"),
        (&["tail", "--pod", "default/web"][..], "--exclude-namespaces"),
        (&["tail", "nosuch0"][..], "the interface does not exist"),
        (&["tail", MIRROR][..], "is the mirror interface itself"),
    ] {
        let exit = lab.agent_exit(&[words, &["-w", "/dev/null"]].concat());
        assert!(exit.code == Some(1) && exit.stderr.contains(told), "{words:?}: {exit:?}");
    }
    for words in [
        &["tail", "veth0", "--filter", "tcp prot 80"][..],
        &["tail", "--pod", "web"],
        &["tail"],
        &["capture", "veth0", "-w", "x"],
        &["capture", "veth0", "-w", "x", "--ring", "1MB", "--first", "1MB"],
    ] {
        assert_eq!(lab.agent_exit(words).code, Some(2), "{words:?}");
    }
    lab.wait_mirrored(&[]);
}

#[test]
fn a_reader_that_is_killed_leaves_nothing() {
    let Node { web, db, lab } = &Node::bridged("tailkilled");
    let _agent =
        Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true"), PodSpec::of(db)], &[], &[web]);
    let tail = Tail::start(lab, &["tail", "--pod", "default/web", "--pod", "default/db"]);
    assert_eq!(lab.wait_mirrored(&[web, db]).tap(web.veth_host()).sessions.len(), 2);
    tail.kill();
    lab.wait_mirrored(&[web]);
    lab.wait_status(|status| {
        let (sessions, targets) = (status.tap(web.veth_host()).sessions.len(), status.targets.len());
        check((sessions, targets) == (1, 1), || "the capture is still there".into())
    });
}

#[test]
fn an_agent_that_ends_ends_the_tail() {
    let Node { web, db, lab } = &Node::bridged("tailagent");
    let pods = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[]);
    let tail = Tail::start(lab, &["tail", "--pod", "default/web"]);
    web.ping(db.v4(), 5, 56);
    agent.stop();
    assert!(lab.status().taps.is_empty(), "captures end with the agent");
    let (code, file) = tail.end();
    assert_eq!(code, Some(1), "it did not end by itself, as with Ctrl-C");
    assert!(file.packets.len() >= 10 && file.statistics.len() == 1, "{file:?}");
    let _agent = Agent::run_until(lab, any_mode(), &pods, &[], &[]);
}

/// The sessions of a killed agent's capture stay until the next agent has its list. They are never reused for another
/// capture.
#[test]
fn a_killed_agents_capture_is_not_the_next_ones() {
    let Node { web, db, lab } = &Node::bridged("tailafter");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let before = Tail::start(lab, &["tail", "--pod", "default/db"]);
    agent.kill();
    assert_eq!(before.end().0, Some(1));
    let mirror = Capture::start(lab.node(), MIRROR);
    let inside = Inside::of(web);
    // Without an agent a tail must not remove what the agent has left.
    let exit = lab.agent_exit(&["tail", web.veth_host(), "-w", "/dev/null"]);
    assert!(exit.code == Some(1) && exit.stderr.contains("an earlier one left its mirror"), "{exit:?}");
    web.ping(db.v4(), 3, 56);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_status(|status| check(status.agent_running, || "no agent".into()));
    let tail = Tail::start(lab, &["tail", "--pod", "default/web"]);
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || {
        let file = tail.file();
        check(file.packets.len() >= 10, || format!("{} packets", file.packets.len()))
    });
    let file = tail.stop();
    assert_eq!(file.interfaces, ["default/web eth0"]);
    assert!(file.packets.len() <= 12, "pings, and a question for an address: {file:?}");
    shows(&mirror, || {
        let (sent, received) = inside.frames();
        sent.and(&received)
    });
    lab.wait_mirrored(&[web]);
}

/// A flood of one pod does not displace another pod's pings in the same ring.
#[test]
fn a_flood_hides_no_other_pod() {
    let lab = mirror_tests::Lab::new("tailflood");
    lab.bridge("br0");
    let [web, db, quiet] = ["web", "db", "quiet"].map(|name| lab.pod(name, "br0"));
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web), PodSpec::of(&db), PodSpec::of(&quiet)]);
    let _agent = Agent::run_until(&lab, any_mode(), &pods, &[], &[]);
    let words = ["tail", "--pod", "default/web", "--pod", "default/quiet", "--buffer", "256KiB"];
    let tail = Tail::start(&lab, &words);
    let inside = Inside::of(&quiet);
    tail.pause();
    let flood = Flood::start(&web, &db);
    flood.go_on(10_000);
    quiet.ping(db.v4(), 20, 56);
    flood.stop();
    let of_quiet = |file: &mirror_tests::PacketFile| {
        file.packets.iter().filter(|packet| packet.interface == "default/quiet eth0").count()
    };
    tail.go_on();
    eventually(SOON, || {
        let (sent, received) = inside.frames();
        let (read, all) = (of_quiet(&tail.file()), sent.len() + received.len());
        check(read == all, || format!("{read} of {all} are in the file"))
    });
    tail.stop();
}

#[test]
fn the_newest_packets_are_kept() {
    let Node { web, db, lab } = &Node::bridged("tailring");
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let ring = Tail::start(lab, &["capture", "--pod", "default/web", "--ring", "10kB", "--filter", "icmp"]);
    let rotation = Tail::spawn(
        lab,
        &["capture", "--pod", "default/web", "--filter", "icmp", "--rotate", "10kB", "--files", "2"],
    );
    lab.wait_status(|status| {
        let sessions = status.taps.first().map_or(0, |tap| tap.sessions.len());
        check(sessions == 2, || format!("{sessions} captures"))
    });
    let inside = Inside::of(web);
    web.ping(db.v4(), 50, 1000);
    eventually(SOON, || {
        let (sent, received) = inside.frames();
        check(sent.len() + received.len() >= 100, || "the pings are not through".into())
    });
    let copied = |status: &mirror_tests::Status| {
        let tap = status.tap(web.veth_host());
        tap.sessions.iter().all(|s| s.packets("egress", "copied") + s.packets("ingress", "copied") == 100)
    };
    lab.wait_status(|status| check(copied(status), || "not all is copied".into()));
    let packets = ring.stop().packets;
    assert!((6..=9).contains(&packets.len()), "{} packets of 1042 bytes in 10 kB", packets.len());
    assert!(packets.is_sorted_by_key(|packet| packet.time_ns));
    let files = || {
        let of = |path: &std::path::Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
        let name = of(rotation.path());
        let mut files: Vec<_> =
            std::fs::read_dir(lab.files()).unwrap().map(|file| file.unwrap().path()).collect();
        files.retain(|file| of(file).starts_with(&format!("{name}_")));
        files.sort();
        files
    };
    eventually(SOON, || {
        let read: Vec<_> =
            files().iter().map(|file| mirror_tests::PacketFile::read(file).packets.len()).collect();
        check(read.len() == 2 && read[0] >= 6, || format!("files with {read:?} packets"))
    });
}
