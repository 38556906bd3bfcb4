//! Which packets of a pod are mirrored: filter, sample and snap length. All other packets are counted, and pass
//! unchanged.

use std::{collections::BTreeMap, ffi::CString};

use aya::programs::{SchedClassifier, TcAttachType};
use mirror_common::{
    packet::header,
    sample::{DEFAULT_SEED, in_sample},
};
use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Frame, Frames, Lab, PodNs, PodSpec, PodsFile, check, eventually,
};

use crate::{Inside, MIRROR, Node, any_mode, shows, split};

in_both_modes!(copies_are_cut_and_nothing_else_is);

const FILTER: &str = "podmirror.io/filter";

/// The counters of a tap: packets by direction and verdict.
pub(crate) type Verdicts = BTreeMap<String, u64>;

/// Whether a filter must accept the frame.
type Matches = fn(&[u8]) -> bool;

/// Adds a pod's sent and received packets to the expected counters of its tap.
pub(crate) fn count(
    verdicts: &mut Verdicts,
    (sent, received): &(Frames, Frames),
    verdict: impl Fn(&[u8]) -> &'static str,
) {
    for (direction, frames) in [("egress", sent), ("ingress", received)] {
        for (frame, times) in frames.iter() {
            *verdicts.entry(format!("{direction} {}", verdict(frame))).or_default() += times as u64;
        }
    }
}

#[track_caller]
pub(crate) fn wait_counted(lab: &Lab, pod: &PodNs, expected: &Verdicts) {
    lab.wait_status(|status| {
        let counted = status.tap(pod.veth_host()).verdicts();
        check(counted == *expected, || format!("{counted:?} are counted, not {expected:?}"))
    });
}

/// Waits until a tap shows this value of a setting.
#[track_caller]
fn wait_setting(lab: &Lab, pod: &PodNs, key: &str, value: &serde_json::Value) {
    lab.wait_status(|status| {
        let settings = &status.tap(pod.veth_host()).settings;
        check(settings[key] == *value, || format!("{key} is {}, not {value}", settings[key]))
    });
}

/// Whether a frame is an untagged IPv4 packet of this protocol.
fn is_ipv4(frame: &[u8], protocol: u8) -> bool {
    frame[12..14] == [8, 0] && frame[23] == protocol
}

/// Whether [`Frame::ipv4`] has made the frame: UDP from and to port 12345.
fn is_our_udp(frame: &[u8]) -> bool {
    is_ipv4(frame, 17) && frame[34..38] == [0x30, 0x39, 0x30, 0x39]
}

/// All kinds of IP traffic between two pods, and some datagrams with their own ports.
fn talk(web: &PodNs, db: &PodNs) {
    for address in [db.v4(), db.v6()] {
        web.ping(address, 10, 56);
        web.udp_echo(db, address, &[0, 64, 1400]);
        Conversation::open(web, db, address).exchange(100_000);
    }
    for (from, to) in [(web, db), (db, web), (web, db)] {
        let (from_nic, to_nic) = (from.eth0(), to.eth0());
        let frame = Frame::new(to_nic.mac, from_nic.mac).filled(60, 1);
        from.send_frame(&frame.ipv4(from_nic.v4, to_nic.v4).bytes());
    }
}

#[test]
fn only_what_the_filter_matches_is_mirrored() {
    let Node { web, db, lab } = &Node::bridged("filter");
    let spec = |filter| [PodSpec::of(web).mirror("true").annotated(FILTER, filter)];
    let pods = PodsFile::new(lab, &spec("icmp"));
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let mut expected = Verdicts::new();
    let phases: [(&str, Matches); 3] = [
        ("icmp", |frame| is_ipv4(frame, 1)),
        ("udp port 12345", is_our_udp),
        ("not udp port 12345", |frame| !is_our_udp(frame)),
    ];
    for (filter, matches) in phases {
        // The filter is changed in place: the counters continue.
        pods.write(&spec(filter));
        wait_setting(lab, web, "filter", &filter.into());
        let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
        talk(web, db);
        shows(&mirror, || inside.capture.frames().only(matches));
        let frames = inside.stop();
        for frames in [&frames.0, &frames.1] {
            let copied = frames.only(matches).len();
            assert!((1..frames.len()).contains(&copied), "{filter}: {copied} of {}", frames.len());
        }
        count(&mut expected, &frames, |frame| if matches(frame) { "copied" } else { "filtered" });
        wait_counted(lab, web, &expected);
        mirror.stop().same_as(&frames.0.and(&frames.1).only(matches)).unwrap();
    }
    assert_eq!(agent.log_with(&["not mirrored"]), Vec::<String>::new());
}

#[test]
fn a_tag_that_the_kernel_keeps_beside_the_packet_is_filtered_by() {
    let Node { web, db, lab } = &Node::bridged("vlan");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true").annotated(FILTER, "vlan 7")]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    for (from, to) in [(web, db), (db, web)] {
        let (from, to, sender) = (from.eth0(), to.eth0(), from);
        let frame = || Frame::new(to.mac, from.mac);
        for frame in [
            frame().vlan(7).filled(64, 1),
            frame().vlan(7).filled(30, 2).ipv4(from.v4, to.v4),
            frame().vlan(8).filled(64, 3),
            frame().vlan(7).vlan(8).filled(200, 4),
            frame().vlan(8).vlan(7).filled(200, 5),
            frame().tag(0x88a8, 7).vlan(9).filled(200, 6),
            frame().filled(64, 7),
        ] {
            sender.send_frame(&frame.bytes());
        }
    }
    let matches = |frame: &[u8]| {
        matches!(frame[12..14], [0x81, 0] | [0x88, 0xa8])
            && u16::from_be_bytes([frame[14], frame[15]]) & 0xfff == 7
    };
    shows(&mirror, || inside.capture.frames().only(matches));
    let frames = inside.stop();
    assert_eq!([&frames.0, &frames.1].map(|frames| frames.only(matches).len()), [4, 4]);
    let mut expected = Verdicts::new();
    count(&mut expected, &frames, |frame| if matches(frame) { "copied" } else { "filtered" });
    wait_counted(lab, web, &expected);
    mirror.stop().same_as(&frames.0.and(&frames.1).only(matches)).unwrap();
}

#[test]
fn a_broken_filter_is_told_once_and_its_pod_is_not_mirrored() {
    let Node { web, db, lab } = &Node::bridged("broken");
    let web_with = |filter| PodSpec::of(web).mirror("true").annotated(FILTER, filter);
    let pods = PodsFile::new(lab, &[web_with("tcp prot 80"), PodSpec::of(db).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[db]);
    let line = agent.wait_for_log(&["not mirrored", "\"default/web\"", "\"BadSetting\""]);
    for part in ["WARN", FILTER, "tcp prot 80", "prot", "at byte 4"] {
        assert!(line.contains(part), "no {part:?} in {line}");
    }
    // `status` shows the same.
    let told = lab.status().notes.unwrap()["not_mirrored"].clone();
    let message = told[0]["message"].as_str().unwrap();
    assert!(message.contains("tcp prot 80") && message.contains("at byte 4"), "{message}");
    let remedy = "Correct the annotation. Until then, this mirror copies nothing.";
    let expected = serde_json::json!([{
        "pod": "default/web", "nic": null, "mirror": null, "reason": "BadSetting", "message": message, "remedy": remedy
    }]);
    assert_eq!(told, expected);
    let table = lab.agent_exit(&["status"]).stdout;
    let row = table.lines().find(|line| line.starts_with("BadSetting")).unwrap_or_default();
    assert!(row.contains("default/web") && row.ends_with(message), "{table}");
    // The other pod is mirrored as if nothing were wrong, also while the broken filter is corrected and broken again.
    let (inside, mirror) = (Inside::of(db), Capture::start(lab.node(), MIRROR));
    talk(db, web);
    shows(&mirror, || inside.capture.frames());
    pods.write(&[web_with("arp"), PodSpec::of(db).mirror("true")]);
    lab.wait_mirrored(&[web, db]);
    pods.write(&[web_with("tcp port 80 and ("), PodSpec::of(db).mirror("true")]);
    lab.wait_mirrored(&[db]);
    agent.wait_for_log(&["not mirrored", "\"default/web\"", "\"BadSetting\"", "tcp port 80 and ("]);
    talk(db, web);
    shows(&mirror, || inside.capture.frames());
    let frames = inside.stop();
    let mut expected = Verdicts::new();
    count(&mut expected, &frames, |_| "copied");
    wait_counted(lab, db, &expected);
    mirror.stop().same_as(&frames.0.and(&frames.1)).unwrap();
    assert_eq!(agent.log_with(&["not mirrored"]).len(), 2, "{:#?}", agent.log());
}

/// Whether the program that cuts copies is on the mirror interface.
fn is_cut(lab: &Lab, mode: AttachMode) -> bool {
    match mode {
        AttachMode::Clsact => lab.node().tc(&format!("filter show dev {MIRROR} egress")).contains("deliver"),
        AttachMode::Tcx => {
            let device = CString::new(MIRROR).unwrap();
            let query = || SchedClassifier::query_tcx(&*device, TcAttachType::Egress).unwrap().1;
            let programs = lab.node().enter(query);
            programs.iter().any(|program| program.name_as_str() == Some("deliver"))
        }
    }
}

fn copies_are_cut_and_nothing_else_is(mode: AttachMode) {
    const SNAPLEN: &str = "podmirror.io/snaplen";
    let Node { web, db, lab } = &Node::bridged("snaplen");
    // A pod whose copies stay whole, and its peer.
    lab.bridge("br1");
    let (other, peer) = (&lab.pod("other", "br1"), &lab.pod("peer", "br1"));
    let both = |web| [web, PodSpec::of(other).mirror("true")];
    let plain = || PodSpec::of(web).mirror("true");
    let pods = PodsFile::new(lab, &both(plain().annotated(SNAPLEN, "96")));
    let _agent = Agent::run(lab, mode, &pods, &[]);
    let status = lab.wait_mirrored(&[web, other]);
    assert_eq!(status.tap(web.veth_host()).settings["snaplen"], "96");
    assert!(is_cut(lab, mode));

    let (inside, whole, at_db) = (Inside::of(web), Inside::of(other), Inside::of(db));
    let mirror = Capture::start(lab.node(), MIRROR);
    for (address, other_address) in [(db.v4(), peer.v4()), (db.v6(), peer.v6())] {
        // `exchange` compares the arriving bytes with the sent ones.
        Conversation::open(web, db, address).exchange(300_000);
        web.udp_echo(db, address, &[0, 100, 9000]);
        web.ping(address, 5, 1400);
        Conversation::open(other, peer, other_address).exchange(100_000);
    }
    // A frame of other software through the mirror interface.
    let strange = Frame::new([2; 6], [4; 6]).filled(1000, 1).bytes();
    lab.node().send_frame(MIRROR, &strange);
    let cut = |frames: &Frames| {
        frames
            .iter()
            .fold(Frames::default(), |cut, (frame, times)| cut.with(&frame[..frame.len().min(96)], times))
    };
    shows(&mirror, || {
        let copies = cut(&inside.capture.frames()).and(&whole.capture.frames());
        copies.with(&strange, 1)
    });
    let (sent, received) = inside.stop();
    for frames in [&sent, &received] {
        assert!(frames.iter().any(|(frame, _)| frame.len() > 1514), "TCP uses super-frames");
    }
    // The pod's own packets arrive at the peer as they were sent.
    let from = |frames: &Frames, pod: &PodNs| split(pod.eth0().mac, frames).0;
    let (sent_by_db, received_by_db) = at_db.stop();
    from(&received_by_db, web).same_as(&sent).unwrap();
    from(&received, db).same_as(&sent_by_db).unwrap();
    let mut expected = Verdicts::new();
    count(&mut expected, &(sent, received), |_| "copied");

    // Without the annotation: whole copies, no program on the mirror interface, and the counters continue.
    drop(mirror);
    pods.write(&both(plain()));
    eventually(mirror_tests::SOON, || check(!is_cut(lab, mode), || "the second stage is still there".into()));
    wait_setting(lab, web, "snaplen", &serde_json::Value::Null);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    Conversation::open(web, db, db.v4()).exchange(300_000);
    shows(&mirror, || inside.capture.frames());
    count(&mut expected, &inside.stop(), |_| "copied");
    wait_counted(lab, web, &expected);
}

#[test]
fn a_sample_takes_whole_flows() {
    const FLOWS: usize = 200;
    let Node { web, db, lab } = &Node::bridged("sample");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true").annotated("podmirror.io/sample", "50%")]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    assert_eq!(status.tap(web.veth_host()).settings["sample"], "50%");
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    for flow in 0..FLOWS {
        let address = if flow % 2 == 0 { db.v4() } else { db.v6() };
        web.udp_echo(db, address, &[10, 20]);
    }
    let taken = |frame: &[u8]| in_sample(&header(frame, frame.len() as u32), DEFAULT_SEED, 1 << 31);
    shows(&mirror, || inside.capture.frames().only(taken));
    let frames = inside.stop();
    let mut expected = Verdicts::new();
    count(&mut expected, &frames, |frame| if taken(frame) { "copied" } else { "sampled_out" });
    wait_counted(lab, web, &expected);
    // Each flow is copied with all of its four packets, or not at all.
    let copies = mirror.stop();
    let (all, kept) = (flows(&frames.0.and(&frames.1)), flows(&copies));
    assert!(all.len() >= FLOWS * 9 / 10, "{} flows: ports are used again", all.len());
    for (flow, packets) in &kept {
        assert_eq!(all[flow], *packets, "flow {flow:?}");
    }
    // Six standard deviations of fair coins.
    let (share, off) = (kept.len() as f64 / all.len() as f64, 3.0 / (all.len() as f64).sqrt());
    assert!((share - 0.5).abs() < off, "{} of {} flows", kept.len(), all.len());
}

/// The number of packets of each UDP flow, by its two endpoints in a fixed order.
pub(crate) fn flows(frames: &Frames) -> BTreeMap<[Vec<u8>; 2], usize> {
    let mut flows = BTreeMap::new();
    for (frame, times) in frames.iter() {
        let (address, length, udp) = match frame[12..14] {
            [0x08, 0x00] if frame[23] == 17 => (26, 4, 34),
            [0x86, 0xdd] if frame[20] == 17 => (22, 16, 54),
            _ => continue,
        };
        let end = |index: usize| {
            [&frame[address + index * length..][..length], &frame[udp + index * 2..][..2]].concat()
        };
        let mut ends = [end(0), end(1)];
        ends.sort();
        *flows.entry(ends).or_default() += times;
    }
    flows
}
