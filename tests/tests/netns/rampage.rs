//! Root inside a pod acts at random to hide packets from the mirror, to forge copies, and to stop the agent. The
//! mirrors of other pods are not affected, and the pod's own mirror works again afterwards.
//!
//! `MIRROR_RAMPAGE_SECONDS` makes it last longer than some seconds.

mod hostile;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{
    Agent, AttachMode, Capture, Frame, Frames, Lab, Neighbour, PodNs, PodSpec, PodsFile, SOON, Status,
    TapStatus, check, eventually,
    random::{Random, from_environment},
    while_pinging,
};

use self::hostile::{FORGED, Hostile};
use crate::{MIRROR, pod_side::HUB, shows, with_qdisc};

in_both_modes!(a_hostile_pod_harms_its_own_mirror_at_most);

const MACVLAN: &str = "macvlan mode bridge";
const SECONDS: u64 = 5;
const OFTEN: Duration = Duration::from_millis(5);
/// A bypass is reported for 20 s after its end, and a namespace without a relay device may be read again only a minute
/// later.
const AGAIN: Duration = Duration::from_secs(90);

/// The numbers of the frames that the hostile pod has sent from its NICs.
fn numbers(frames: &Frames) -> BTreeSet<u64> {
    let sent = frames.only(|frame| frame[12..14] == Frame::EXPERIMENTAL.to_be_bytes());
    sent.iter().map(|(frame, _)| u64::from_be_bytes(frame[14..22].try_into().unwrap())).collect()
}

/// The frames of the hostile pod, of either kind.
fn hostile(frames: &Frames) -> Frames {
    let kinds = [Frame::EXPERIMENTAL, FORGED].map(u16::to_be_bytes);
    frames.only(|frame| kinds.iter().any(|kind| frame[12..14] == *kind))
}

/// The counters of a pod's taps for packets that were not copied, by session, direction and verdict.
fn not_copied(status: &Status, pod: &PodNs) -> BTreeMap<(u32, String), u64> {
    let taps = status.taps.iter().filter(|tap| tap.pod.as_ref().is_some_and(|of| of.name == pod.name()));
    let sessions = taps.flat_map(|tap| &tap.sessions);
    let counts = sessions.flat_map(|session| {
        session.verdicts().into_iter().map(|(verdict, packets)| ((session.serial, verdict), packets))
    });
    counts.filter(|((_, verdict), _)| !verdict.ends_with(" copied")).collect()
}

/// Creates a device of the node for the devices over it, with a peer in this bridge.
fn up(lab: &Lab, device: &str, port: &str, bridge: &str) {
    lab.node().ip(&format!("link add {device} type veth peer name {port}"));
    for end in [device, port] {
        lab.node().sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1");
        lab.node().ip(&format!("link set {end} up"));
    }
    lab.node().ip(&format!("link set {port} master {bridge}"));
}

fn a_hostile_pod_harms_its_own_mirror_at_most(mode: AttachMode) {
    let lab = &Lab::new("rampage");
    for bridge in ["br0", "br1"] {
        lab.bridge(bridge);
    }
    up(lab, "up0", "up1", "br1");
    up(lab, "up2", "up3", "br0");
    let (web, db, near) =
        (&lab.pod("web", "br0"), &lab.pod("db", "br0"), &lab.pod_over("near", MACVLAN, "up2"));
    let mut evil = lab.pod("evil", "br1");
    evil.add_nic_over(lab, MACVLAN, "up0");
    let (evil, friend) = (&evil, &lab.pod("friend", "br1"));
    // The pod gets a tap repeatedly, while packets reach it.
    with_qdisc(lab, db, mode);
    // Makes the agent tap the pod on both sides of its veth.
    let _cni = Neighbour::named_as_ciliums(lab, evil.veth_host());
    let before = lab.network_state();

    let specs = |of_db: &str| {
        let of = |pod, nics| PodSpec::of(pod).mirror("true").annotated("podmirror.io/nics", nics);
        let evil = of(evil, "eth0,eth1").annotated("podmirror.io/target", "evil");
        let db = PodSpec::of(db).mirror(of_db).annotated("podmirror.io/target", "third");
        [of(web, "eth0"), of(near, "eth0"), evil, db]
    };
    let pods = PodsFile::new(lab, &specs("false"));
    let mut agent = Agent::run(lab, mode, &pods, &["--define-target", "evil=evil0,third=third0"]);
    let is_whole = || {
        let status = lab.try_status()?;
        let taps = |pod: &PodNs| {
            let of = |tap: &&TapStatus| tap.pod.as_ref().is_some_and(|of| of.name == pod.name());
            status.taps.iter().filter(of).filter(|tap| tap.is_attached()).count()
        };
        let told = status.notes.as_ref().map(|notes| notes["not_mirrored"].to_string()).unwrap_or_default();
        check((taps(web), taps(near), taps(evil)) == (1, 1, 2) && told == "[]", || {
            format!("{told} {status:#?}")
        })
    };
    eventually(SOON, is_whole);
    for (from, to) in [(web, db), (near, db), (evil, friend)] {
        from.ping(to.v4(), 2, 56);
    }

    let mirror = Capture::start(lab.node(), MIRROR);
    let [of_evil, of_third] = ["evil0", "third0"].map(|device| Capture::start(lab.node(), device));
    let [of_web, of_near] = [web, near].map(|pod| Capture::start(pod.netns(), "eth0"));
    let (of_friend, of_exit) =
        (Capture::start(friend.netns(), "eth0"), Capture::start(near.netns(), "podmirror"));
    let time = Duration::from_secs(from_environment("MIRROR_RAMPAGE_SECONDS", || SECONDS));
    let mut hostile_pod = Hostile::new(lab, evil, Random::from_clock("rampage"));
    let stop = AtomicBool::new(false);
    // The hostile pod's packets that were not copied, as counted by its taps.
    let mut counted = BTreeMap::new();
    let while_it_acts = || {
        let end = Instant::now() + time;
        while Instant::now() < end {
            for (word, taps) in [("true", 1), ("false", 0)] {
                pods.write(&specs(word));
                let status = lab.wait_status(|status| {
                    let of_db = status.taps.iter().filter(|tap| tap.device == db.veth_host()).count();
                    let answers = status.notes.is_some();
                    check(of_db == taps && answers, || format!("db has {of_db} taps and not {taps}"))
                });
                counted.extend(not_copied(&status, evil));
                for note in status.notes.unwrap()["not_mirrored"].as_array().unwrap() {
                    assert_eq!(note["pod"], "default/evil", "{note}");
                }
            }
        }
    };
    thread::scope(|scope| {
        let actor = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                hostile_pod.act();
            }
            hostile_pod
        });
        while_pinging(OFTEN, web, db, || {
            while_pinging(OFTEN, near, db, || {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(while_it_acts));
                stop.store(true, Ordering::Relaxed);
                done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            });
        });
        actor.join().unwrap().stop();
    });

    // The other pods: each packet once, and none of the hostile pod's.
    assert!(!agent.has_ended(), "{:#?}", agent.log());
    shows(&mirror, || of_web.frames().and(&of_near.frames()));
    for (place, capture) in [
        ("mirror0", &mirror),
        ("third0", &of_third),
        ("web", &of_web),
        ("near", &of_near),
        ("its exit", &of_exit),
    ] {
        assert!(hostile(&capture.frames()).is_empty(), "{place}: {}", hostile(&capture.frames()));
    }
    // The hostile pod: no copy of a frame that it sent into the relay device, and a report on missing copies.
    // Its bridges can form loops, so there can be more of them than a capture holds.
    let ((copies, uncaptured), (sent, _)) = (of_evil.frames_of_storm(), of_friend.frames_of_storm());
    assert!(copies.only(|frame| frame[12..14] == FORGED.to_be_bytes()).is_empty(), "{copies}");
    let missing: Vec<_> = numbers(&sent).difference(&numbers(&copies)).copied().collect();
    counted.extend(not_copied(&lab.status(), evil));
    let told = agent.log_with(&["\"WARN\"", "default/evil", "\"reason\""]).len();
    let (all, lost) = (numbers(&sent).len(), missing.len() as u64);
    eprintln!("rampage: {all} frames, {lost} of them not copied; {told} reasons told, {counted:?}");
    assert!(lost <= counted.values().sum() || told + uncaptured > 0, "{missing:?} {counted:?}");
    for level in ["\"ERROR\"", "panicked"] {
        assert_eq!(agent.log_with(&[level]), Vec::<String>::new());
    }
    let nameless = |line: &String| !line.contains("default/evil");
    let warnings: Vec<_> = agent.log_with(&["\"WARN\""]).into_iter().filter(nameless).collect();
    assert_eq!(warnings, Vec::<String>::new());

    // After the attack the pod's mirror is complete again. A bypass is reported until no more packets bypass the tap.
    eventually(AGAIN, || {
        pods.write_to_wake(&specs("false"));
        for nic in evil.nics() {
            evil.netns().send_frame(&nic.name, &Frame::new(friend.eth0().mac, nic.mac).bytes());
            friend.send_frame(&Frame::new(nic.mac, friend.eth0().mac).bytes());
        }
        let exit = evil.netns().try_run("ip -o link show podmirror").stdout;
        let exit = String::from_utf8_lossy(&exit);
        check(exit.contains(",UP") && exit.contains("mtu 65535"), || format!("the exit: {exit}"))?;
        is_whole()
    });
    drop(of_evil);
    let of_evil = Capture::start(lab.node(), "evil0");
    let inside = ["eth0", "eth1"].map(|nic| Capture::start(evil.netns(), nic));
    evil.ping(friend.v4(), 5, 56);
    for (number, nic) in evil.nics().iter().enumerate() {
        evil.netns()
            .send_frame(&nic.name, &Frame::new(friend.eth0().mac, nic.mac).filled(300, number).bytes());
    }
    // Both NICs are in one network, so each gets the other's broadcasts, which are copied once.
    shows(&of_evil, || inside[0].frames().or(&inside[1].frames()));
    agent.stop();
    lab.cleanup();
    assert!(!lab.devices().contains(&HUB.to_owned()));
    lab.network_is_as(&before);
}
