//! The newest packets of a running recording: `recorder` and `tail --since`, and SIGUSR1 for `capture --ring`.

use std::{fs, os::unix::fs::MetadataExt as _, time::UNIX_EPOCH};

use mirror_tests::{
    Agent, Exit, Flood, Frames, Lab, PacketFile, PodNs, PodsFile, SOON, Tail, check, eventually,
    while_pinging,
};
use serde_json::json;

use crate::{
    Inside, Node, any_mode,
    bypass::OFTEN,
    server::{self, CGROUP, Server},
    streams::{TARGET, streamed, wait_stream},
};

/// Starts a recorder of the target with a memory of 1 MB, and waits until it reads.
#[track_caller]
fn recorder(lab: &Lab) -> Tail {
    recorder_of(lab, "1MB")
}

/// The same with a memory of this size.
#[track_caller]
fn recorder_of(lab: &Lab, size: &str) -> Tail {
    let mut command = lab.agent(&["recorder", "--target", "live", "--ring", size]);
    let recorder = Tail::of(&mut command, lab.files().join("none"));
    wait_stream(lab, true);
    recorder
}

/// Mirrors the pings of a pod to the target.
fn pings_of(web: &PodNs, lab: &Lab) -> PodsFile {
    PodsFile::new(lab, &[streamed(web).annotated("podmirror.io/filter", "icmp")])
}

/// All packets of the recorder.
const ALL: [&str; 2] = ["--target", "live"];

/// The recorder's packets of the last hour, of these pods or of a target.
fn past(lab: &Lab, of: &[&str]) -> Result<PacketFile, Exit> {
    let file = lab.files().join("past.pcapng");
    let words = ["tail", "--since", "1h", "--no-follow", "-w", file.to_str().unwrap()];
    let exit = lab.agent_exit(&[&words[..], of].concat());
    let past = PacketFile::read(&file);
    fs::remove_file(file).unwrap();
    if exit.code == Some(0) { Ok(past) } else { Err(exit) }
}

/// Waits until the recorder has this number of packets of these pods.
#[track_caller]
fn recorded(lab: &Lab, of: &[&str], packets: usize) -> PacketFile {
    eventually(SOON, || {
        let past = past(lab, of).map_err(|exit| format!("{exit:?}"))?;
        check(past.packets.len() == packets, || format!("{} packets", past.packets.len()))?;
        Ok(past)
    })
}

/// A recorder outlives the agent, and has the packets from before and after the agent's end.
#[test]
fn what_is_recorded_outlives_the_agent() {
    let Node { web, db, lab } = &Node::bridged("recorder");
    let pods = pings_of(web, lab);
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    for of in [ALL, ["--pod", "default/web"]] {
        let exit = past(lab, &of).unwrap_err();
        assert!(exit.stderr.contains("no recorder runs on this node"), "{exit:?}");
    }
    let begun = UNIX_EPOCH.elapsed().unwrap().as_secs_f64().floor();
    let mut recorder = recorder(lab);

    let inside = Inside::of(web);
    web.ping(db.v4(), 5, 56);
    let first = recorded(lab, &ALL, 10);
    assert_eq!(first.interfaces, ["default/web eth0"]);
    let (sent, received) = inside.frames();
    // All IPv4 packets here are ICMP.
    assert_eq!((first.frames("egress"), first.frames("ingress")), (sent.ipv4(), received.ipv4()));
    assert_eq!(first.statistics, [(10, 0)]);
    let fill = ["used_bytes", "size_bytes", "oldest_timestamp_seconds"];
    let fill = fill.map(|name| format!("podmirror_recorder_{name}{{target=\"live\"}}"));
    lab.wait_metrics(|metrics| {
        let [used, size, oldest] = fill.each_ref().map(|series| metrics.get(series).copied());
        used.is_some_and(|used| (10.0 * 98.0..1e5).contains(&used))
            && size == Some(1e6)
            && oldest.is_some_and(|oldest| (begun..begun + 60.0).contains(&oldest))
    });
    assert_eq!(recorded(lab, &["--pod", "default/web"], 10).packets, first.packets);
    assert_eq!(recorded(lab, &["--pod", "default/*"], 10).packets, first.packets);
    assert_eq!(
        recorded(lab, &["--pod", "default/other", "--pod", "other/*"], 0).interfaces,
        Vec::<String>::new()
    );

    agent.kill();
    recorder.wait_for_log("waits for the next agent");
    assert_eq!(recorded(lab, &ALL, 10).packets, first.packets);
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    agent.wait_for_log(&["a program reads packets"]);
    web.ping(db.v4(), 5, 56);
    let both = recorded(lab, &ALL, 20);
    assert_eq!(both.packets[..10], first.packets);
    assert!(both.packets.is_sorted_by_key(|packet| packet.time_ns));

    recorder.interrupt();
    let exit = recorder.exit();
    assert_eq!(exit.code, Some(0), "{exit:?}");
    past(lab, &ALL).unwrap_err();
    let netns = fs::metadata(lab.node().path()).unwrap().ino();
    assert!(!fs::exists(format!("/run/podmirror/{netns}.live.recorder")).unwrap());
    wait_stream(lab, false);
}

/// Packets arrive while a recorder reads everything that was copied until a question.
#[test]
fn a_recorder_of_a_busy_pod_answers_without_a_loss() {
    let Node { web, db, lab } = &Node::bridged("asked");
    let pods = PodsFile::new(lab, &[streamed(web).annotated("podmirror.io/filter", "udp")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let recorder = recorder_of(lab, "200MB");
    let flood = Flood::start(web, db);
    for _ in 0..8 {
        flood.go_on(500);
        recorded(lab, &["--pod", "default/other"], 0);
    }
    // Each datagram goes there and back.
    let all = flood.stop() * 2;
    let tap = lab.status().tap(web.veth_host()).clone();
    let (copied, lost) = (tap.total("copied"), tap.total("lost"));
    assert_eq!(copied + lost, all as u64);
    assert_eq!(recorded(lab, &ALL, copied as usize).statistics, [(all as u64, lost)]);
    recorder.interrupt();
    assert_eq!(recorder.exit().code, Some(0));
    agent.stop();
}

/// An agent starts while the API server is away. The recorder reads from then on, and misses nothing when the server
/// comes back.
#[test]
fn a_recorder_reads_while_the_api_server_is_away() {
    let Node { web, db, lab } = &Node::bridged("unlisted");
    let _container = lab.container(web.netns(), CGROUP);
    let annotations = json!({
        "podmirror.io/mirror": "true", "podmirror.io/target": "live", "podmirror.io/filter": "icmp",
    });
    let start = || Server::start(lab, server::web(lab, &annotations));
    let server = start();
    let agent = server::agent(lab, &TARGET);
    lab.wait_mirrored(&[web]);
    let mut recorder = recorder(lab);
    web.ping(db.v4(), 5, 56);
    recorded(lab, &ALL, 10);

    agent.kill();
    recorder.wait_for_log("waits for the next agent");
    drop(server);
    let agent = server::agent(lab, &TARGET);
    agent.wait_for_log(&["a program reads packets"]);
    wait_stream(lab, true);
    let inside = Inside::of(web);
    web.ping(db.v4(), 5, 56);
    recorded(lab, &ALL, 20);
    agent.wait_for_log(&["is unavailable", "pods"]);
    assert_eq!(lab.get("/readyz").status, 503);
    let _server = while_pinging(OFTEN, web, db, || {
        let server = start();
        lab.wait_get("/readyz", 200);
        server
    });
    // All IPv4 packets here are ICMP.
    let (sent, received) = inside.frames();
    let [sent, received] = [sent, received].map(|frames| frames.ipv4());
    let all = recorded(lab, &ALL, 10 + sent.len() + received.len());
    let of = |direction: &str, frames: &Frames| all.frames(direction).less(frames).len();
    assert_eq!((of("egress", &sent), of("ingress", &received)), (5, 5));
    assert_eq!(all.statistics.iter().map(|(_, lost)| lost).sum::<u64>(), 0);
    eprintln!("unlisted: {} packets of the new agent", sent.len() + received.len());
    recorder.kill();
    agent.stop();
}

/// `tail --since` has the recorder's packets, and then its own: each packet of a busy pod once.
#[test]
fn a_tail_with_a_past_goes_on_without_a_gap() {
    let Node { web, db, lab } = &Node::bridged("since");
    let pods = pings_of(web, lab);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let recorder = recorder(lab);
    let inside = Inside::of(web);
    web.ping(db.v4(), 5, 56);
    let answers = format!("src host {}", db.v4());
    assert_eq!(recorded(lab, &["--pod", "default/web", "--filter", &answers], 5).frames("egress").len(), 0);

    let tail = while_pinging(OFTEN, web, db, || {
        let tail = Tail::start(lab, &["tail", "--pod", "default/web", "--filter", "icmp", "--since", "1h"]);
        eventually(SOON, || {
            let interfaces = tail.file().interfaces;
            check(interfaces.len() == 2, || format!("{interfaces:?}"))
        });
        tail
    });
    web.ping(db.v4(), 5, 56);
    // All IPv4 packets here are ICMP.
    eventually(SOON, || {
        let (sent, received) = inside.frames();
        tail.file().frames("egress").same_as(&sent.ipv4())?;
        tail.file().frames("ingress").same_as(&received.ipv4())
    });
    let file = tail.stop();
    assert!(file.packets.is_sorted_by_key(|packet| packet.time_ns));
    assert_eq!(file.interfaces, ["default/web eth0"; 2]);
    let [(recorded, 0), (read, 0)] = file.statistics[..] else { unreachable!("{:?}", file.statistics) };
    assert!(
        recorded >= 10 && read >= 10 && recorded + read >= file.packets.len() as u64,
        "{recorded} {read}"
    );
    recorder.kill();
}

/// A running recorder keeps its target and its packets. A recorder that was stopped while the agent was replaced loses
/// the target to the next recorder, and gets it back, with the socket, when that one ends.
#[test]
fn a_target_has_one_recorder() {
    let Node { web, db, lab } = &Node::bridged("recorders");
    let pods = pings_of(web, lab);
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let mut first = recorder(lab);
    web.ping(db.v4(), 1, 56);
    recorded(lab, &ALL, 2);
    let mut second = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    second.wait_for_log("another program reads target live");
    recorded(lab, &ALL, 2);

    first.pause();
    agent.kill();
    let _agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    second.wait_for_log("recording");
    first.go_on();
    first.wait_for_log("another program reads target live");
    // The second recorder has begun without packets.
    web.ping(db.v4(), 2, 56);
    recorded(lab, &ALL, 4);
    second.kill();
    eventually(SOON, || {
        web.ping(db.v4(), 1, 56);
        let past = past(lab, &ALL).map_err(|exit| format!("{exit:?}"))?;
        check(past.packets.len() >= 4 && past.interfaces.len() == 2, || format!("{:?}", past.interfaces))
    });
    first.kill();
}

/// SIGUSR1 writes what a capture has kept so far to a file.
#[test]
fn a_ring_is_saved_while_it_goes_on() {
    let Node { web, db, lab } = &Node::bridged("usr1");
    let pods = pings_of(web, lab);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let mut capture = Tail::start(lab, &["capture", "--target", "live", "--ring", "1MB"]);
    let stem = capture.path().file_stem().unwrap().to_str().unwrap().to_owned();
    let files = || {
        let entries = fs::read_dir(lab.files()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> =
            entries.filter(|path| path.to_str().unwrap().contains(&format!("{stem}_0000"))).collect();
        files.sort();
        files
    };
    for number in 1..=2 {
        web.ping(db.v4(), 3, 56);
        eventually(SOON, || {
            let tap = lab.status().tap(web.veth_host()).clone();
            let copied = tap.total("copied");
            check(copied == 6 * number, || format!("{copied} packets"))
        });
        capture.save();
        capture.wait_for_log(&format!("{stem}_0000{number}_"));
        assert_eq!(files().len() as u64, number);
    }
    let whole = capture.stop();
    let parts: Vec<_> = files().iter().map(|path| PacketFile::read(path)).collect();
    assert_eq!((parts[0].packets.len(), parts[1].packets.len(), whole.packets.len()), (6, 12, 12));
    assert_eq!((&parts[0].packets[..], &parts[1]), (&whole.packets[..6], &whole));
}
