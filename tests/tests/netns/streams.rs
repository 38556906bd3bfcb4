//! A stream is the target of mirrors: one program at a time reads it, and nothing is copied without a reader.

use std::collections::BTreeMap;

use mirror_tests::{
    Agent, Capture, Frames, Lab, Metrics, PacketFile, PodNs, PodSpec, PodsFile, SOON, Status, Tail, check,
    eventually,
};

use crate::{Inside, Node, any_mode, shows};

pub(crate) const TARGET: [&str; 2] = ["--define-target", "live=stream"];

/// A pod with a mirror to the stream.
pub(crate) fn streamed(pod: &PodNs) -> PodSpec {
    PodSpec::of(pod).mirror("true").annotated("podmirror.io/target", "live")
}

/// Waits until a program reads the stream, or until none does.
#[track_caller]
pub(crate) fn wait_stream(lab: &Lab, is_read: bool) -> Status {
    lab.wait_status(|status| {
        let target = status.target("live");
        check(target.stream && target.up == is_read, || format!("read: not {is_read}"))
    })
}

/// The frames of an interface and a direction.
fn frames(file: &PacketFile, interface: &str, direction: &str) -> Frames {
    let packets = file.packets.iter();
    let packets = packets.filter(|packet| packet.interface == interface && packet.direction == direction);
    packets.fold(Frames::default(), |frames, packet| frames.with(&packet.frame.bytes, 1))
}

fn verdicts(lab: &Lab, pod: &PodNs) -> BTreeMap<String, u64> {
    lab.status().tap(pod.veth_host()).verdicts()
}

/// The counts that are not zero.
fn counts(counts: &[(&str, usize)]) -> BTreeMap<String, u64> {
    let counts = counts.iter().filter(|(_, count)| *count > 0);
    counts.map(|(name, count)| ((*name).to_owned(), *count as u64)).collect()
}

/// Whether a frame is an IPv4 packet of this protocol.
fn is_ipv4(frame: &[u8], protocol: u8) -> bool {
    frame[12..14] == [8, 0] && frame[23] == protocol
}

/// The mirror of web selects UDP and that of db selects ICMP, so each packet between them is for one of the two.
#[test]
fn two_pods_with_their_own_filters_are_in_one_file() {
    let Node { web, db, lab } = &Node::bridged("streams");
    let filtered = |pod, filter| streamed(pod).annotated("podmirror.io/filter", filter);
    let pods = PodsFile::new(lab, &[filtered(web, "ip proto 17"), filtered(db, "icmp")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web, db]);
    let tail = Tail::start(lab, &["tail", "--target", "live", "--super-frames"]);
    let inside = [web, db].map(Inside::of);
    web.ping(db.v4(), 10, 1000);
    web.udp_echo(db, db.v4(), &[0, 22, 64, 1400, 1472, 9000]);
    web.ping(db.v6(), 5, 56);
    let expected = || {
        let [(sent, received), (replied, asked)] = [&inside[0], &inside[1]].map(Inside::frames);
        let of_web = [&sent, &received].map(|frames| frames.only(|frame| is_ipv4(frame, 17)));
        let of_db = [&replied, &asked].map(|frames| frames.only(|frame| is_ipv4(frame, 1)));
        [("default/web eth0", of_web), ("default/db eth0", of_db)]
    };
    eventually(SOON, || {
        let file = tail.file();
        for (interface, [sent, received]) in expected() {
            frames(&file, interface, "egress").same_as(&sent)?;
            frames(&file, interface, "ingress").same_as(&received)?;
        }
        Ok(())
    });
    let file = tail.stop();
    let [(_, of_web), (_, of_db)] = expected();
    assert!(of_web.iter().chain(&of_db).all(|frames| frames.len() >= 7), "{of_web:?}, {of_db:?}");
    let all: usize = of_web.iter().chain(&of_db).map(Frames::len).sum();
    assert_eq!(file.packets.len(), all, "and nothing else");
    let mut interfaces = file.interfaces.clone();
    interfaces.sort();
    assert_eq!(interfaces, ["default/db eth0", "default/web eth0"]);
    assert_eq!(file.statistics.iter().map(|(received, _)| *received as usize).sum::<usize>(), all);
    let [all_of_web, all_of_db] = inside.map(Inside::stop);
    for (pod, [sent, received], (all_sent, all_received)) in
        [(web, of_web, all_of_web), (db, of_db, all_of_db)]
    {
        let of_pod = counts(&[
            ("egress copied", sent.len()),
            ("ingress copied", received.len()),
            ("egress filtered", all_sent.len() - sent.len()),
            ("ingress filtered", all_received.len() - received.len()),
        ]);
        assert_eq!(verdicts(lab, pod), of_pod);
    }
    agent.stop();
    lab.cleanup();
}

/// Each reader has the counts of its own time.
#[test]
fn what_a_rate_or_a_budget_keeps_out_is_in_the_file() {
    let Node { web, db, lab } = &Node::bridged("streamlimits");
    let of = |pod, key, value| {
        streamed(pod)
            .annotated("podmirror.io/filter", "icmp")
            .annotated(&format!("podmirror.io/{key}"), value)
    };
    let specs = [of(web, "rate", "10pps,burst=100ms"), of(db, "packets", "5")];
    let agent = Agent::mirroring(lab, any_mode(), &specs, &TARGET, &[web, db]);
    for budget in [5, 0] {
        let tail = Tail::start(lab, &["tail", "--target", "live"]);
        web.ping(db.v4(), 20, 56);
        let file = tail.stop();
        let counted = file.interfaces.iter().zip(file.statistics.iter().zip(&file.limited));
        let counted: BTreeMap<_, _> = counted.map(|(name, counts)| (name.as_str(), counts)).collect();
        let came = |pod: &str| {
            let of_pod = file.packets.iter().filter(|packet| packet.interface == pod);
            of_pod.count() as u64
        };
        // The budget is used up. A packet that one mirror has copied counts as a duplicate for the other.
        let db = counted["default/db eth0"];
        let web = counted["default/web eth0"];
        for ((received, lost), limited, came) in
            [(*web.0, *web.1, came("default/web eth0")), (*db.0, *db.1, came("default/db eth0"))]
        {
            assert!(lost == 0 && limited > 0 && received == came + limited, "{counted:?}: {came}");
        }
        assert_eq!(came("default/db eth0"), budget, "{counted:?}");
        assert!(came("default/web eth0") > 0, "{counted:?}");
    }
    agent.stop();
}

/// A stream without a reader is a normal state. Each reader has the packets of its own time, and their counts.
#[test]
fn a_stream_without_a_reader_is_down() {
    let Node { web, db, lab } = &Node::bridged("streamdown");
    let before = lab.network_state();
    let agent = Agent::mirroring(lab, any_mode(), &[streamed(web), PodSpec::of(db)], &TARGET, &[web]);
    let inside = Inside::of(web);
    let mut unread = (0, 0);
    let mut read = (0, 0);
    for words in [&["tail", "--target", "live"][..], &["tail", "--target", "live", "--buffer", "1MiB"]] {
        let status = wait_stream(lab, false);
        let target = status.target("live");
        assert_eq!((target.destination.as_str(), target.device.as_str()), ("stream", ""));
        let [unreached, failures] =
            ["unreached_targets", "failures"].map(|of| status.notes.clone().unwrap()[of].clone());
        assert_eq!((unreached, failures), (serde_json::json!([]), serde_json::json!([])));
        let seen = || {
            let (sent, received) = inside.frames();
            (sent.len(), received.len())
        };
        let counted = |lab: &Lab| {
            let tap = lab.status().tap(web.veth_host()).clone();
            check(tap.seen() == (seen().0 + seen().1) as u64, || format!("not {:?}: {tap:?}", seen()))
        };
        let start = seen();
        web.ping(db.v4(), 10, 56);
        eventually(SOON, || counted(lab));
        let end = seen();
        unread = (unread.0 + end.0 - start.0, unread.1 + end.1 - start.1);

        let tail = Tail::start(lab, words);
        web.ping(db.v4(), 20, 56);
        eventually(SOON, || counted(lab));
        let file = tail.stop();
        let (start, end) = (end, seen());
        let own = (end.0 - start.0, end.1 - start.1);
        read = (read.0 + own.0, read.1 + own.1);
        assert_eq!((file.frames("egress").len(), file.frames("ingress").len()), own);
        assert_eq!(file.statistics, [((own.0 + own.1) as u64, 0)], "not those of other readers");
        let expected = counts(&[
            ("egress copied", read.0),
            ("ingress copied", read.1),
            ("egress target_down", unread.0),
            ("ingress target_down", unread.1),
        ]);
        assert_eq!(verdicts(lab, web), expected);
    }
    wait_stream(lab, false);
    let table = lab.agent_exit(&["status"]).stdout;
    assert!(table.contains("live (no program reads it, so nothing is copied)"), "{table}");
    let warnings = agent.log_with(&["\"WARN\""]);
    assert!(warnings.is_empty(), "{warnings:#?}");
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}

/// While the reader is paused, its packets stay in the ring.
#[test]
fn the_metrics_tell_how_full_a_ring_is() {
    let Node { web, db, lab } = &Node::bridged("streamfill");
    let cut = streamed(web).annotated("podmirror.io/filter", "icmp").annotated("podmirror.io/snaplen", "96");
    let agent = Agent::mirroring(lab, any_mode(), &[cut], &TARGET, &[web]);
    let ring = |metrics: &Metrics| {
        let of = |name: &str| metrics.get(&format!("podmirror_stream_{name}{{target=\"live\"}}")).copied();
        [of("readers"), of("ring_used_bytes"), of("ring_size_bytes")]
    };
    assert_eq!(ring(&lab.metrics()), [Some(0.0), None, None]);
    let size = f64::from(1 << 20);
    let tail = Tail::start(lab, &["tail", "--target", "live", "--buffer", "1MiB"]);
    lab.wait_metrics(|metrics| ring(metrics) == [Some(1.0), Some(0.0), Some(size)]);
    tail.pause();
    web.ping(db.v4(), 10, 1000);
    // A record of 96 bytes takes 136 bytes of the ring.
    let metrics = lab.wait_metrics(|metrics| ring(metrics) == [Some(1.0), Some(20.0 * 136.0), Some(size)]);
    let copied: Vec<_> =
        metrics.iter().filter(|(series, _)| series.starts_with("podmirror_copied_bytes_total")).collect();
    assert!(copied.len() == 2 && copied.iter().all(|(_, bytes)| **bytes == 960.0), "{copied:?}");
    tail.go_on();
    lab.wait_metrics(|metrics| ring(metrics) == [Some(1.0), Some(0.0), Some(size)]);
    assert_eq!(tail.stop().packets.len(), 20);
    lab.wait_metrics(|metrics| ring(metrics) == [Some(0.0), None, None]);
    agent.stop();
}

/// Pods start and stop to be mirrored while a program reads.
#[test]
fn pods_come_and_go_while_the_stream_is_read() {
    let Node { web, db, lab } = &Node::bridged("streamgoes");
    let pods = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[]);
    let tail = Tail::start(lab, &["tail", "--target", "live"]);
    web.ping(db.v4(), 3, 56);
    let mut expected = 0;
    for (number, pod) in [web, db, web].into_iter().enumerate() {
        pods.write(&[streamed(pod)]);
        lab.wait_mirrored(&[pod]);
        let inside = Inside::of(web);
        web.ping(db.v4(), 5 + number, 56);
        eventually(SOON, || {
            let (sent, received) = inside.frames();
            let (read, all) = (tail.file().packets.len(), expected + sent.len() + received.len());
            check(read == all, || format!("{read} of {all}"))
        });
        let (sent, received) = inside.stop();
        expected += sent.len() + received.len();
    }
    let file = tail.stop();
    assert_eq!(file.interfaces, ["default/web eth0", "default/db eth0", "default/web eth0"]);
    assert_eq!(file.packets.len(), expected);
    assert_eq!(file.statistics.len(), 3);
}

/// The mirror outlives the agent, the reader does not. The next agent finds the stream without one.
#[test]
fn an_agent_that_ends_ends_the_reader() {
    let Node { web, db, lab } = &Node::bridged("streamagent");
    let pods = PodsFile::new(lab, &[streamed(web)]);
    for is_killed in [false, true] {
        let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
        // The taps may still be the former agent's.
        agent.wait_for_log(&["agent started"]);
        lab.wait_mirrored(&[web]);
        let tail = Tail::start(lab, &["tail", "--target", "live"]);
        web.ping(db.v4(), 5, 56);
        if is_killed {
            agent.kill()
        } else {
            agent.stop()
        }
        let (code, file) = tail.end();
        assert_eq!(code, Some(1), "it did not end by itself, as with Ctrl-C");
        assert!(file.packets.len() >= 10 && file.statistics.len() == 1, "{file:?}");
        assert_eq!(lab.status().taps.len(), 1);
        // The ring of a killed agent stays in place.
        assert_eq!(lab.status().target("live").up, is_killed);
    }
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    agent.wait_for_log(&["agent started"]);
    wait_stream(lab, false);
    let tail = Tail::start(lab, &["tail", "--target", "live", "--buffer", "1MiB"]);
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || check(tail.file().packets.len() >= 10, || "nothing is read".into()));
    tail.stop();
    agent.stop();
    lab.cleanup();
}

/// The command must report at once what is wrong.
#[test]
fn what_is_no_stream_of_this_agent_is_refused() {
    let Node { web, db: _db, lab } = &Node::bridged("streamrefused");
    let refused = |words: &[&str], told: &str| {
        let exit = lab.agent_exit(&[words, &["-w", "/dev/null"]].concat());
        assert!(exit.code == Some(1) && exit.stderr.contains(told), "{words:?}: {exit:?}");
        assert_eq!(exit.stderr.lines().count(), 1, "{words:?}: {exit:?}");
    };
    let tail = ["tail", "--target", "live"];
    refused(&tail, "no agent is running on this node");
    assert!(lab.pins().is_empty(), "{:?}", lab.pins());
    let pods = PodsFile::new(lab, &[streamed(web)]);
    let targets = ["--define-target", "live=stream,ids=ids0,other=stream"];
    let _agent = Agent::run_until(lab, any_mode(), &pods, &targets, &[web]);
    refused(&["tail", "--target", "nosuch"], "this node has no target \"nosuch\"");
    refused(&["tail", "--target", "ids"], "target ids is not a stream: its copies go to ids0");
    refused(&["tail", "--target", "default"], "target default is not a stream: its copies go to mirror0");
    let reader = Tail::start(lab, &tail);
    refused(&["capture", "--target", "live", "--ring", "1MB"], "another program reads target live");
    let second = Tail::start(lab, &["tail", "--target", "other"]);
    second.stop();
    reader.stop();
}

#[test]
fn attach_copies_to_a_stream() {
    let Node { web, db, lab } = &Node::bridged("streamattach");
    let before = lab.network_state();
    let words = [web.veth_host(), "--define-target", "live=stream", "--target", "live", "--filter", "icmp"];
    let agent = Agent::attach(lab, any_mode(), &words);
    lab.wait_mirrored(&[web]);
    let tail = Tail::start(lab, &["tail", "--target", "live"]);
    let inside = Inside::of(web);
    web.ping(db.v4(), 10, 1000);
    web.udp_echo(db, db.v4(), &[100]);
    eventually(SOON, || {
        let (file, (sent, received)) = (tail.file(), inside.frames());
        let icmp = |frames: Frames| frames.only(|frame| is_ipv4(frame, 1));
        // What the node side of the veth receives is what the pod has sent.
        frames(&file, web.veth_host(), "ingress").same_as(&icmp(sent))?;
        frames(&file, web.veth_host(), "egress").same_as(&icmp(received))
    });
    assert_eq!(tail.stop().packets.len(), 20);
    agent.interrupt();
    assert_eq!(lab.pins(), Vec::<std::path::PathBuf>::new());
    lab.network_is_as(&before);
}

/// The next agent has a device for the same target. The killed agent's stream does not block it.
#[test]
fn a_stream_becomes_a_device() {
    let Node { web, db, lab } = &Node::bridged("streamdevice");
    let pods = PodsFile::new(lab, &[streamed(web)]);
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    lab.wait_mirrored(&[web]);
    let tail = Tail::start(lab, &["tail", "--target", "live"]);
    agent.kill();
    tail.end();
    let agent = Agent::run(lab, any_mode(), &pods, &["--define-target", "live=live0"]);
    lab.wait_status(|status| {
        let target = status.target("live");
        check(target.up && !target.stream && target.device == "live0", || "no device yet".into())
    });
    let (device, inside) = (Capture::start(lab.node(), "live0"), Inside::of(web));
    web.ping(db.v4(), 5, 56);
    shows(&device, || inside.capture.frames());
    drop(device);
    agent.stop();
    lab.cleanup();
    assert_eq!(lab.pins(), Vec::<std::path::PathBuf>::new());
}
