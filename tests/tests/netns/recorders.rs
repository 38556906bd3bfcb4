//! The newest packets of a running recording: `recorder` and `save`, and SIGUSR1 for `capture --ring`.

use std::{fs, os::unix::fs::MetadataExt as _};

use mirror_tests::{Agent, Exit, Lab, PacketFile, PodNs, PodsFile, SOON, Tail, check, eventually};

use crate::{
    Inside, Node, any_mode,
    streams::{TARGET, streamed, wait_stream},
};

/// Starts a recorder of the target, and waits until it reads.
#[track_caller]
fn recorder(lab: &Lab) -> Tail {
    let mut command = lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]);
    let recorder = Tail::of(&mut command, lab.files().join("none"));
    wait_stream(lab, true);
    recorder
}

/// Mirrors the pings of a pod to the target.
fn pings_of(web: &PodNs, lab: &Lab) -> PodsFile {
    PodsFile::new(lab, &[streamed(web).annotated("podmirror.io/filter", "icmp")])
}

/// The recorder's packets of these pods.
fn save(lab: &Lab, pods: &[&str]) -> Result<PacketFile, Exit> {
    let file = lab.files().join("saved.pcapng");
    let words = ["save", "--target", "live", "-w", file.to_str().unwrap()];
    let exit = lab.agent_exit(&[&words[..], pods].concat());
    if exit.code != Some(0) {
        return Err(exit);
    }
    let saved = PacketFile::read(&file);
    fs::remove_file(file).unwrap();
    Ok(saved)
}

/// Waits until the recorder has this number of packets of these pods.
#[track_caller]
fn saved(lab: &Lab, pods: &[&str], packets: usize) -> PacketFile {
    eventually(SOON, || {
        let saved = save(lab, pods).map_err(|exit| format!("{exit:?}"))?;
        check(saved.packets.len() == packets, || format!("{} packets", saved.packets.len()))?;
        Ok(saved)
    })
}

/// A recorder outlives the agent, and has the packets from before and after the agent's end.
#[test]
fn what_is_recorded_outlives_the_agent() {
    let Node { web, db, lab } = &Node::bridged("recorder");
    let pods = pings_of(web, lab);
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    lab.wait_mirrored(&[web]);
    let exit = save(lab, &[]).unwrap_err();
    assert!(exit.stderr.contains("no recorder of target live runs on this node"), "{exit:?}");
    let mut recorder = recorder(lab);

    let inside = Inside::of(web);
    web.ping(db.v4(), 5, 56);
    let first = saved(lab, &[], 10);
    assert_eq!(first.interfaces, ["default/web eth0"]);
    let (sent, received) = inside.frames();
    // All IPv4 packets here are ICMP.
    assert_eq!((first.frames("egress"), first.frames("ingress")), (sent.ipv4(), received.ipv4()));
    assert_eq!(first.statistics, [(10, 0)]);
    assert_eq!(saved(lab, &["--pod", "default/web"], 10).packets, first.packets);
    assert_eq!(saved(lab, &["--pod", "default/*"], 10).packets, first.packets);
    assert_eq!(
        saved(lab, &["--pod", "default/other", "--pod", "other/*"], 0).interfaces,
        Vec::<String>::new()
    );

    agent.kill();
    recorder.wait_for_log("waits for the next agent");
    assert_eq!(saved(lab, &[], 10).packets, first.packets);
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    agent.wait_for_log(&["a program reads packets"]);
    web.ping(db.v4(), 5, 56);
    let both = saved(lab, &[], 20);
    assert_eq!(both.packets[..10], first.packets);
    assert!(both.packets.is_sorted_by_key(|packet| packet.time_ns));

    recorder.interrupt();
    let exit = recorder.exit();
    assert_eq!(exit.code, Some(0), "{exit:?}");
    save(lab, &[]).unwrap_err();
    let netns = fs::metadata(lab.node().path()).unwrap().ino();
    assert!(!fs::exists(format!("/run/podmirror/{netns}.live.recorder")).unwrap());
    wait_stream(lab, false);
}

/// A running recorder keeps its target and its packets. A recorder that was stopped while the agent was replaced loses
/// the target to the next recorder, and gets it back, with the socket, when that one ends.
#[test]
fn a_target_has_one_recorder() {
    let Node { web, db, lab } = &Node::bridged("recorders");
    let pods = pings_of(web, lab);
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    lab.wait_mirrored(&[web]);
    let mut first = recorder(lab);
    web.ping(db.v4(), 1, 56);
    saved(lab, &[], 2);
    let mut second = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    second.wait_for_log("another program reads target live");
    saved(lab, &[], 2);

    first.pause();
    agent.kill();
    let _agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    second.wait_for_log("recording");
    first.go_on();
    first.wait_for_log("another program reads target live");
    // The second recorder has begun without packets.
    web.ping(db.v4(), 2, 56);
    saved(lab, &[], 4);
    second.kill();
    eventually(SOON, || {
        web.ping(db.v4(), 1, 56);
        let saved = save(lab, &[]).map_err(|exit| format!("{exit:?}"))?;
        check(saved.packets.len() >= 4 && saved.interfaces.len() == 2, || format!("{:?}", saved.interfaces))
    });
    first.kill();
}

/// SIGUSR1 writes what a capture has kept so far to a file.
#[test]
fn a_ring_is_saved_while_it_goes_on() {
    let Node { web, db, lab } = &Node::bridged("usr1");
    let pods = pings_of(web, lab);
    let _agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    lab.wait_mirrored(&[web]);
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
