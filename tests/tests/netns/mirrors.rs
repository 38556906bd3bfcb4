//! Several mirrors of one pod: each has its own settings, target and counters.

use std::collections::BTreeMap;

use mirror_tests::{
    Agent, Capture, Comparison, PodSpec, PodsFile, SOON, Status, check, eventually, while_talking,
};
use serde_json::Value;

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// Whether this is an Ethernet frame with ICMP over IPv4.
fn is_icmp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 1
}

/// The mirror of the IDS gets all packets at its own interface. The mirror of the engineer gets outgoing ICMP packets,
/// cut, at `mirror0`.
#[test]
fn each_mirror_of_a_pod_gets_its_own_packets() {
    let Node { web, db, lab } = &Node::bridged("mirrors");
    let spec = PodSpec::of(web)
        .mirror("false")
        .annotated("podmirror.io/mirror.ids", "true")
        .annotated("podmirror.io/target.ids", "ids")
        .annotated("podmirror.io/mirror.debug", "egress")
        .annotated("podmirror.io/filter.debug", "icmp")
        .annotated("podmirror.io/snaplen.debug", "96")
        .annotated("podmirror.io/packets.debug", "5");
    let pods = PodsFile::new(lab, &[spec]);
    let agent = Agent::run(lab, any_mode(), &pods, &["--define-target", "ids=ids0"]);
    agent.wait_for_taps(2);
    lab.wait_mirrored(&[web]);
    let ids = Capture::start(lab.node(), "ids0");
    let debug = Capture::start(lab.node(), MIRROR);
    let inside = Inside::of(web);
    web.ping(db.v4(), 10, 400);
    web.udp_echo(db, db.v6(), &[1, 1000, 1400]);

    let (sent, received) = inside.frames();
    shows(&ids, || {
        let (sent, received) = inside.frames();
        sent.and(&received)
    });
    eventually(SOON, || check(debug.frames().len() == 5, || format!("{} of 5", debug.frames().len())));
    let echoes: Vec<_> = sent.only(is_icmp).iter().map(|(frame, _)| frame[..96].to_vec()).collect();
    for (frame, times) in debug.stop().iter() {
        assert!(
            times == 1 && echoes.iter().any(|echo| echo == frame),
            "not the start of an echo request: {frame:?}"
        );
    }
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    let of_ids = [("egress copied", sent.len()), ("ingress copied", received.len())];
    let named = |counts: &[(&str, usize)]| -> BTreeMap<String, u64> {
        counts.iter().map(|(name, count)| ((*name).to_owned(), *count as u64)).collect()
    };
    assert_eq!(tap.session("ids").verdicts(), named(&of_ids));
    let others = sent.len() - sent.only(is_icmp).len();
    let of_debug = [
        ("egress copied", 5),
        ("egress ended", 5),
        ("egress filtered", others),
        ("ingress other_direction", received.len()),
    ];
    assert_eq!(tap.session("debug").verdicts(), named(&of_debug));
    let of = |name: &str| {
        let session = tap.session(name);
        (session.target.clone(), session.direction.clone(), session.ended.clone())
    };
    assert_eq!(of("ids"), ("ids".into(), "both".into(), None));
    assert_eq!(of("debug"), ("default".into(), "egress".into(), Some("packets".into())));
    assert_eq!((status.target("ids").device, status.mirror().device), ("ids0".into(), MIRROR.into()));
    agent.stop();

    assert_eq!(lab.agent_exit(&["cleanup"]).code, Some(0));
    let devices = lab.devices();
    assert!(!devices.contains(&"ids0".to_owned()) && !devices.contains(&MIRROR.to_owned()), "{devices:?}");
}

/// The IDS gets the packets of both NICs. The engineer selects the second NIC, and one that is added later.
#[test]
fn a_mirror_gets_the_nics_that_it_names() {
    let Node { mut web, mut db, lab } = Node::bridged("named-nics");
    lab.bridge("br1");
    web.add_nic(&lab, "br1");
    db.add_nic(&lab, "br1");
    let spec = PodSpec::of(&web)
        .mirror("true")
        .annotated("podmirror.io/mirror.debug", "true")
        .annotated("podmirror.io/nics.debug", "eth1, eth2")
        .annotated("podmirror.io/target.debug", "debug");
    let pods = PodsFile::new(&lab, &[spec]);
    let _agent = Agent::run(&lab, any_mode(), &pods, &["--define-target", "debug=debug0"]);
    let [first, second] = [0, 1].map(|nic: usize| web.nics()[nic].host.clone());
    let status = lab.wait_taps(&[&first, &second]);
    let mirrors = |status: &Status, host: &str| {
        status.tap(host).sessions.iter().map(|session| session.mirror.clone()).collect::<Vec<_>>()
    };
    assert_eq!(mirrors(&status, &first), ["default"]);
    assert_eq!(mirrors(&status, &second), ["debug", "default"]);
    let skips = |expected: &[[&str; 2]]| {
        lab.wait_status(|status| {
            let notes = status.notes.clone().unwrap_or_default();
            let nic = |skipped: &Value| [skipped["nic"].clone(), skipped["reason"].clone()];
            let skipped = notes["not_mirrored"].as_array().map(|all| all.iter().map(nic).collect::<Vec<_>>());
            check(skipped.as_ref().is_some_and(|skipped| skipped == expected), || format!("{skipped:?}"))
        })
    };
    skips(&[["eth2", "NoSuchNic"]]);

    let inside = ["eth0", "eth1"].map(|nic| Capture::start(web.netns(), nic));
    let (all, debug) = (Capture::start(lab.node(), MIRROR), Capture::start(lab.node(), "debug0"));
    web.ping(db.v4(), 5, 56);
    web.ping(db.nics()[1].v4.into(), 7, 56);
    shows(&debug, || inside[1].frames());
    shows(&all, || inside[0].frames().and(&inside[1].frames()));
    let [first, second] = inside.map(Capture::stop);
    debug.stop().same_as(&second).unwrap();
    all.stop().same_as(&first.and(&second)).unwrap();
    assert!(first.len() >= 10 && second.len() >= 14);

    web.add_nic(&lab, "br1");
    let hosts: Vec<_> = web.nics().iter().map(|nic| nic.host.as_str()).collect();
    let status = lab.wait_taps(&hosts);
    assert_eq!(mirrors(&status, hosts[2]), ["debug", "default"]);
    skips(&[]);
}

/// While one mirror of a pod is added, changed and removed, the other mirror loses no packet and copies none twice.
#[test]
fn a_mirror_that_changes_touches_no_other() {
    let Node { web, db, lab } = &Node::bridged("mirrors-change");
    let ids = || PodSpec::of(web).mirror("true");
    let debug = |filter: &str| {
        ids()
            .annotated("podmirror.io/mirror.debug", "true")
            .annotated("podmirror.io/filter.debug", filter)
            .annotated("podmirror.io/target.debug", "lab")
    };
    let pods = PodsFile::new(lab, &[ids()]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &["--define-target", "lab=lab0"], &[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let inside = Inside::of(web);
    let has = |filter: Option<&'static str>| {
        lab.wait_status(move |status| {
            let sessions = &status.taps[0].sessions;
            let debug = sessions.iter().find(|session| session.mirror == "debug");
            let is = debug.map(|session| session.settings["filter"].as_str().unwrap_or_default().to_owned());
            check(is.as_deref() == filter, || format!("debug has {is:?}, not {filter:?}"))
        })
    };
    web.ping(db.v4(), 5, 56);
    for filter in ["icmp", "udp", "icmp or arp"] {
        pods.write(&[debug(filter)]);
        has(Some(filter));
        web.ping(db.v4(), 5, 56);
    }
    pods.write(&[ids()]);
    has(None);
    web.ping(db.v4(), 5, 56);
    shows(&mirror, || {
        let (sent, received) = inside.frames();
        sent.and(&received)
    });
    let (sent, received) = inside.stop();
    let tap = lab.status();
    let tap = tap.tap(web.veth_host());
    assert_eq!(
        (tap.packets("egress", "copied"), tap.packets("ingress", "copied")),
        (sent.len() as u64, received.len() as u64)
    );
    assert_eq!(tap.seen(), (sent.len() + received.len()) as u64, "the counters of the mirror went on");
}

/// A mirror gets another name while many other pods leave: detaching their taps takes longer than the kernel needs for
/// thousands of packets.
#[test]
fn a_mirror_under_another_name_does_not_wait_for_pods_that_leave() {
    const LEAVING: usize = 20;
    let Node { web, db, lab } = &Node::bridged("renamed");
    let others: Vec<_> = (0..LEAVING).map(|number| lab.pod(&format!("other-{number}"), "br0")).collect();
    let named = |name: &str| PodSpec::of(web).annotated(&format!("podmirror.io/mirror.{name}"), "true");
    let mut specs: Vec<_> = others.iter().map(|pod| PodSpec::of(pod).mirror("true")).collect();
    specs.push(named("old"));
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_taps(&others.iter().chain([web]).map(|pod| pod.veth_host()).collect::<Vec<_>>());
    let comparison = Comparison::of(web.netns(), lab);
    while_talking(web, db, || {
        pods.write(&[named("new")]);
        lab.wait_status(|status| {
            let left: Vec<_> = status.taps.iter().flat_map(|tap| &tap.sessions).collect();
            check(left.len() == 1 && left[0].mirror == "new", || format!("{left:?}"))
        });
        // The last op of the round detaches the last hook.
        agent.wait_for_log(&["no longer mirroring"]);
    });
    let all = comparison.is_equal().len() as u64;
    let status = lab.status();
    let session = status.tap(web.veth_host()).session("new");
    let [copied, duplicate] = ["copied", "duplicate"].map(|verdict| session.total(verdict));
    eprintln!(
        "renamed: {all} packets, {copied} copied by the new mirror, {duplicate} by the old one beside it"
    );
    assert!(copied > 0 && copied < all, "{session:?}");
    assert_eq!(session.seen(), copied + duplicate, "{session:?}");
    agent.stop();
}
