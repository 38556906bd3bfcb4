//! Rates and budgets, tested with floods from both sides on all CPUs.
//!
//! The counters of the devices measure a flood, because a capture would lose packets.

use std::time::{Duration, Instant};

use mirror_tests::{Agent, Capture, Flood, Lab, PodNs, PodSpec, PodsFile, SOON, Status, check, eventually};

use crate::{MIRROR, Node, any_mode, mirror_iface::packets, with_qdisc};

/// A pod with these annotations, given without the prefix `podmirror.io/`.
fn chosen(pod: &PodNs, settings: &[(&str, &str)]) -> PodSpec {
    settings.iter().fold(PodSpec::of(pod).mirror("true"), |spec, (key, value)| {
        spec.annotated(&format!("podmirror.io/{key}"), value)
    })
}

/// Two pods that flood each other.
struct Floods([Flood; 2]);

impl Floods {
    fn between(web: &PodNs, db: &PodNs) -> Self {
        Self([Flood::start(web, db), Flood::start(db, web)])
    }

    fn go_on(&self, more: usize) {
        self.0.iter().for_each(|flood| flood.go_on(more));
    }

    /// Ends the floods. No datagram may be lost, whether the copies were made or not.
    fn stop(self) -> usize {
        self.0.into_iter().map(Flood::stop).sum()
    }
}

/// Waits until the mirror of a pod has ended by this budget, or runs.
#[track_caller]
fn wait_ended(lab: &Lab, pod: &PodNs, budget: Option<&str>) -> Status {
    lab.wait_status(|status| {
        let ended = status.tap(pod.veth_host()).ended.as_deref();
        check(ended == budget, || format!("ended by {ended:?}, not {budget:?}"))
    })
}

/// A limit far below the flood still lets all pings of the pod pass, because the filter comes before the limit.
#[test]
fn sixty_pings_in_a_flood_are_all_mirrored() {
    let Node { web, db, lab } = &Node::bridged("sixty");
    let pods = PodsFile::new(lab, &[chosen(web, &[("filter", "icmp"), ("rate", "100pps")])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let before = packets(lab, web.veth_host());
    let floods = Floods::between(web, db);
    floods.go_on(100);
    // 40 requests and answers per second, below the limit.
    web.ping_every(Duration::from_millis(50), db.v4(), 60, 56);
    floods.go_on(100);
    let rounds = floods.stop();
    let passed = packets(lab, web.veth_host()) - before;
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!((tap.packets("egress", "copied"), tap.packets("ingress", "copied")), (60, 60), "{tap:?}");
    assert_eq!(tap.total("filtered"), passed - 120, "{tap:?}");
    assert_eq!(tap.seen(), passed, "{tap:?}");
    assert!(passed - 120 >= 2 * rounds as u64 && rounds > 1000, "{passed} packets in {rounds} rounds");
    let copies = mirror.stop();
    assert_eq!(copies.len(), 120);
    // Echo requests and answers, each with its number.
    for kind in [8, 0] {
        let numbers = copies.only(|frame| frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == kind);
        assert_eq!((numbers.len(), numbers.iter().count()), (60, 60), "type {kind}: {numbers}");
    }
}

#[test]
fn a_budget_of_packets_is_exact() {
    let Node { web, db, lab } = &Node::bridged("packets");
    let pods = PodsFile::new(lab, &[chosen(web, &[("packets", "100")])]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let before = packets(lab, web.veth_host());
    let floods = Floods::between(web, db);
    floods.go_on(200);
    wait_ended(lab, web, Some("packets"));
    floods.go_on(200);
    floods.stop();
    let passed = packets(lab, web.veth_host()) - before;
    let counted = |status: &Status| {
        let tap = status.tap(web.veth_host());
        assert_eq!(tap.seen(), tap.total("copied") + tap.total("ended"), "{tap:?}");
        (tap.total("copied"), tap.seen())
    };
    assert_eq!(counted(&lab.status()), (100, passed));
    assert_eq!(mirror.frames().len(), 100);
    agent.wait_for_log(&["has ended", "\"packets\"", "default/web"]);

    // The mirror stays ended, also after a restart of the agent with other defaults.
    agent.stop();
    let defaults = ["--rate", "1Mpps", "--duration", "1h", "--packets", "1000", "--snaplen", "128"];
    let agent = Agent::run(lab, any_mode(), &pods, &defaults);
    lab.wait_status(|status| check(status.agent_running, || "not running".into()));
    agent.wait_for_log(&["has ended", "\"packets\"", "default/web"]);
    web.ping(db.v4(), 10, 56);
    let status = wait_ended(lab, web, Some("packets"));
    let passed = packets(lab, web.veth_host()) - before;
    assert_eq!(counted(&status), (100, passed));
    assert_eq!(mirror.frames().len(), 100);

    // A changed budget begins again, and the counters continue.
    pods.write(&[chosen(web, &[("packets", "30")])]);
    wait_ended(lab, web, None);
    web.ping(db.v4(), 10, 56);
    assert_eq!(counted(&wait_ended(lab, web, None)).0, 120);
    web.ping(db.v4(), 10, 56);
    let status = wait_ended(lab, web, Some("packets"));
    let passed = packets(lab, web.veth_host()) - before;
    assert_eq!(counted(&status), (130, passed));
    assert_eq!(mirror.stop().len(), 130);
}

#[test]
fn a_budget_of_bytes_is_exact_to_one_packet() {
    let Node { web, db, lab } = &Node::bridged("bytes");
    let pods = PodsFile::new(lab, &[chosen(web, &[("bytes", "10001")])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let before = packets(lab, web.veth_host());
    let floods = Floods::between(web, db);
    wait_ended(lab, web, Some("bytes"));
    floods.go_on(200);
    floods.stop();
    let passed = packets(lab, web.veth_host()) - before;
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    let bytes = tap.bytes("ingress", "copied") + tap.bytes("egress", "copied");
    assert_eq!(tap.total("ended"), passed - tap.total("copied"), "{tap:?}");
    let copies = mirror.stop();
    assert_eq!((copies.len() as u64, copies.bytes() as u64), (tap.total("copied"), bytes));
    let largest = copies.iter().map(|(frame, _)| frame.len() as u64).max().unwrap();
    assert!((10_001..10_001 + largest).contains(&bytes), "{bytes} bytes, packets of up to {largest}");
}

#[test]
fn a_budget_of_time_ends_within_a_second() {
    let Node { web, db, lab } = &Node::bridged("duration");
    let pods = PodsFile::new(lab, &[]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[]);
    with_qdisc(lab, web, any_mode());
    let floods = Floods::between(web, db);
    let earliest = Instant::now();
    pods.write(&[chosen(web, &[("duration", "2s")])]);
    agent.wait_for_taps(1);
    let latest = Instant::now();
    // A status request takes time; its result holds for some moment between its begin and its end.
    let mut running = Instant::now();
    let status = eventually(SOON, || {
        let begun = Instant::now();
        let status = lab.status();
        if status.tap(web.veth_host()).ended.is_none() {
            running = begun;
            return Err("the mirror has not ended".to_owned());
        }
        Ok(status)
    });
    assert!(earliest.elapsed() >= Duration::from_secs(2), "ended after {:?}", earliest.elapsed());
    let longest = running.saturating_duration_since(latest);
    assert!(longest <= Duration::from_secs(3), "still running after {longest:?}");
    assert_eq!(status.tap(web.veth_host()).ended.as_deref(), Some("duration"));
    agent.wait_for_log(&["has ended", "\"duration\"", "default/web"]);
    floods.go_on(200);
    floods.stop();
    let copied = status.tap(web.veth_host()).total("copied");
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert!(copied > 0 && tap.total("copied") == copied && tap.total("ended") >= 400, "{tap:?}");
    assert_eq!(tap.seen(), copied + tap.total("ended"), "{tap:?}");
}

/// Floods for 3 s, and checks the number of all copies against the rate and this number of default bursts.
fn flooded_at(lab: &Lab, web: &PodNs, db: &PodNs, rate: f64, bursts: f64) -> Status {
    let mirrored = packets(lab, MIRROR);
    let begin = Instant::now();
    let floods = Floods::between(web, db);
    floods.go_on(1);
    let flooded = Instant::now();
    while flooded.elapsed() < Duration::from_secs(3) {
        floods.go_on(100);
    }
    let flooded = flooded.elapsed();
    floods.stop();
    let longest = begin.elapsed();
    let status = lab.status();
    let sum = |verdict| status.taps.iter().map(|tap| tap.total(verdict)).sum::<u64>();
    let (copied, limited) = (sum("copied"), sum("limited"));
    // Upper bound: the rate, the saved bursts, and one packet per meter. The lower bound is not much less: a busy
    // machine sometimes stops the flood for longer than a burst, and the rate that is not used then is lost.
    let most = rate * longest.as_secs_f64() + bursts * rate * 0.05 + 3.0;
    let least = 0.75 * rate * flooded.as_secs_f64();
    assert!((least..=most).contains(&(copied as f64)), "{copied} copies, not {least:.0} to {most:.0}");
    assert!(limited >= copied, "no flood: {limited} over the limit, {copied} below");
    assert_eq!(packets(lab, MIRROR) - mirrored, copied);
    status
}

#[test]
fn a_budget_goes_on_exactly_while_another_changes() {
    const PACKETS: u64 = 100_000;
    let Node { web, db, lab } = &Node::bridged("others");
    let with = |gib: u32| [chosen(web, &[("packets", "100k"), ("bytes", &format!("{gib}GiB"))])];
    let pods = PodsFile::new(lab, &with(1));
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let floods = Floods::between(web, db);
    let mut changes = 0;
    // Well before the end: a budget that is changed after it has ended begins again.
    while lab.status().tap(web.veth_host()).total("copied") < PACKETS / 2 {
        changes += 1;
        pods.write(&with(1 + changes));
        lab.wait_status(|status| {
            let bytes = &status.tap(web.veth_host()).settings["bytes"];
            check(*bytes == format!("{}GiB", 1 + changes), || format!("{bytes} is the budget of bytes"))
        });
    }
    wait_ended(lab, web, Some("packets"));
    floods.go_on(100);
    floods.stop();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.total("copied"), PACKETS, "after {changes} changes: {tap:?}");
    assert!(changes > 0 && tap.total("ended") > 0, "{tap:?}");
}

#[test]
fn a_rate_is_kept_under_a_flood_from_both_sides() {
    let Node { web, db, lab } = &Node::bridged("rate");
    let pods = PodsFile::new(lab, &[chosen(web, &[("rate", "1kpps")])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    let before = packets(lab, web.veth_host());
    let status = flooded_at(lab, web, db, 1000.0, 1.0);
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.seen(), packets(lab, web.veth_host()) - before, "{tap:?}");
    assert_eq!(tap.seen(), tap.total("copied") + tap.total("limited"), "{tap:?}");
}

/// A packet that was copied at one rate leaves no debt at the next rate.
#[test]
fn a_raised_rate_copies_at_once() {
    let Node { web, db, lab } = &Node::bridged("raised");
    let with = |rate| [chosen(web, &[("rate", rate), ("filter", "icmp")])];
    let pods = PodsFile::new(lab, &with("10bit"));
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    // One frame of 98 bytes, and a debt of 78 s.
    web.ping(db.v4(), 10, 56);
    assert_eq!(lab.status().tap(web.veth_host()).total("copied"), 1);
    for rate in ["1Mbit", "2Mbit"] {
        pods.write(&with(rate));
        lab.wait_status(|status| {
            let now = &status.tap(web.veth_host()).settings["rate"];
            check(*now == rate, || format!("the rate is {now}"))
        });
        let before = lab.status().tap(web.veth_host()).total("copied");
        web.ping(db.v4(), 10, 56);
        assert_eq!(lab.status().tap(web.veth_host()).total("copied") - before, 20, "at {rate}");
    }
}

#[test]
fn a_rate_of_bits_counts_whole_frames() {
    let Node { web, db, lab } = &Node::bridged("bits");
    // 50 bytes are 400 bits: 1000 datagrams of 8 bytes a second.
    let pods = PodsFile::new(lab, &[chosen(web, &[("rate", "400kbit")])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    flooded_at(lab, web, db, 1000.0, 1.0);
}

#[test]
fn the_limit_of_the_node_is_for_all_mirrors_together() {
    let Node { web, db, lab } = &Node::bridged("max-rate");
    let pods = PodsFile::new(lab, &[chosen(web, &[]), chosen(db, &[])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--max-rate", "1kpps"]);
    lab.wait_mirrored(&[web, db]);
    let before = packets(lab, web.veth_host()) + packets(lab, db.veth_host());
    let status = flooded_at(lab, web, db, 1000.0, 2.0);
    let seen: u64 = status.taps.iter().map(|tap| tap.seen()).sum();
    assert_eq!(seen, packets(lab, web.veth_host()) + packets(lab, db.veth_host()) - before);
}

#[test]
fn the_limit_of_a_pod_stands_above_its_annotations() {
    let Node { web, db, lab } = &Node::bridged("max-pod-rate");
    let pods = PodsFile::new(lab, &[chosen(web, &[("rate", "5kpps")]), chosen(db, &[])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--max-pod-rate", "1kpps"]);
    lab.wait_mirrored(&[web, db]);
    let status = flooded_at(lab, web, db, 2000.0, 1.0);
    for pod in [web, db] {
        let tap = status.tap(pod.veth_host());
        assert!(tap.total("limited") > 0 && tap.total("copied") > 2000, "{tap:?}");
    }
}

#[test]
fn the_limit_of_a_namespace_is_for_all_of_its_pods_together() {
    let Node { web, db, lab } = &Node::bridged("max-ns-rate");
    let pods = PodsFile::new(lab, &[chosen(web, &[]), chosen(db, &[])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--max-namespace-rate", "1kpps"]);
    lab.wait_mirrored(&[web, db]);
    let status = flooded_at(lab, web, db, 1000.0, 1.0);
    let limited: u64 = [web, db].map(|pod| status.tap(pod.veth_host()).total("limited")).iter().sum();
    assert!(limited > 1000, "{status:?}");
}

/// Two pods flood each other, and a third pod still gets its share of the node's rate.
#[test]
fn a_flood_takes_no_other_pods_share() {
    let Node { web, db, lab } = &Node::bridged("share");
    let quiet = &lab.pod("quiet", "br0");
    let pods = PodsFile::new(lab, &[chosen(web, &[]), chosen(db, &[]), chosen(quiet, &[])]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--max-rate", "600pps"]);
    lab.wait_mirrored(&[web, db, quiet]);
    let floods = Floods::between(web, db);
    floods.go_on(1000);
    // 40 packets per second, of a share of 200.
    quiet.ping_every(Duration::from_millis(50), db.v4(), 60, 56);
    floods.go_on(100);
    floods.stop();
    let status = lab.status();
    let tap = status.tap(quiet.veth_host());
    assert_eq!((tap.total("limited"), tap.total("failed")), (0, 0), "{tap:?}");
    assert!(tap.packets("egress", "copied") >= 60, "{tap:?}");
    // An answer that db has sent within its share was copied there.
    assert!(tap.packets("ingress", "copied") + tap.packets("ingress", "duplicate") >= 60, "{tap:?}");
    let flooded: u64 = [web, db].map(|pod| status.tap(pod.veth_host()).total("limited")).iter().sum();
    assert!(flooded > 1000, "no flood: {status:?}");
}

/// A budget belongs to the session: renaming the node's device does not restart it.
#[test]
fn an_ended_budget_stays_ended_under_another_name_of_the_device() {
    let Node { web, db, lab } = &Node::bridged("renamed");
    let pods = PodsFile::new(lab, &[chosen(web, &[("packets", "5")])]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    web.ping(db.v4(), 10, 56);
    wait_ended(lab, web, Some("packets"));
    let device = web.veth_host();
    for command in ["down", "name renamed0"] {
        lab.node().ip(&format!("link set {device} {command}"));
    }
    lab.node().ip("link set renamed0 up");
    // A bridge forwards when it learns of the carrier, which the kernel reports up to a second later.
    eventually(SOON, || {
        let port = lab.node().ip("-d link show renamed0");
        check(port.contains("state forwarding"), || format!("not forwarding: {port}"))
    });
    let named =
        lab.wait_status(|status| check(status.taps[0].device == "renamed0", || "its old name".into()));
    let seen = named.taps[0].seen();
    web.ping(db.v4(), 8, 56);
    let status = lab.status();
    let tap = &status.taps[0];
    assert_eq!((tap.total("copied"), tap.ended.as_deref()), (5, Some("packets")), "{tap:?}");
    assert!(tap.seen() >= seen + 16, "{tap:?}");
    agent.stop();
}
