//! Root inside a pod creates more devices than a pod needs, and changes them as fast as it can. Its own mirror
//! continues, the reason is reported for that pod only, and no other pod has to wait.

use std::{
    fs,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{
    Agent, Comparison, Frame, Lab, Netns, PodNs, PodSpec, PodsFile, SOON, Status, TapStatus, check, cpu_time,
    eventually, memory, scaled,
};

use crate::{MIRROR, Node, any_mode};

/// Pairs of devices: more devices than the agent reads (512).
const PAIRS: usize = 1500;
/// The longest time by which another pod's tap may be later than before.
const DELAY: Duration = Duration::from_secs(3);
/// More veths between the pod and the node than the agent taps (16).
const VETHS: usize = 20;

/// Runs commands of `ip`, one per line.
fn batch(lab: &Lab, netns: &Netns, lines: impl Iterator<Item = String>) -> std::process::Child {
    let file = lab.files().join(format!("{}.batch", netns.name()));
    fs::write(&file, lines.collect::<Vec<_>>().join("\n")).unwrap();
    let mut ip = netns.command("ip");
    ip.arg("-batch").arg(&file).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The reported reasons, by pod.
fn reasons(status: &Status) -> Vec<(String, String)> {
    let notes = status.notes.as_ref().and_then(|notes| notes["not_mirrored"].as_array().cloned());
    let word = |note: &serde_json::Value, key: &str| note[key].as_str().unwrap_or_default().to_owned();
    notes.unwrap_or_default().iter().map(|note| (word(note, "pod"), word(note, "reason"))).collect()
}

#[test]
fn a_pod_that_floods_its_namespace_keeps_its_mirror_and_delays_nobody() {
    let Node { web, db, lab } = &Node::bridged("flood");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let both = [PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")];
    let began = Instant::now();
    pods.write(&both);
    lab.wait_mirrored(&[web, db]);
    let usual = began.elapsed();
    pods.write(&both[..1]);
    let before = lab.wait_mirrored(&[web]);
    let tap = before.tap(web.veth_host());

    let inside = (0..PAIRS).map(|n| format!("link add a{n} type veth peer name b{n}"));
    assert!(batch(lab, web.netns(), inside).wait().unwrap().success());
    let name = web.netns().name();
    let to_node = (0..VETHS).map(|n| format!("link add f{n} type veth peer name g{n} netns {name}"));
    assert!(batch(lab, lab.node(), to_node).wait().unwrap().success());
    let loop_of = ["link add c type veth peer name d", "link delete c"].map(str::to_owned);
    let mut churn = batch(lab, web.netns(), loop_of.into_iter().cycle().take(1_000_000));
    let expected = ["NetnsUnreadable", "TooManyNics"].map(|why| ("default/web".to_owned(), why.to_owned()));
    let is_bounded = |status: &Status, of_db: usize| {
        let of = |pod: &PodNs| {
            let is_of = |of: &TapStatus| of.pod.as_ref().is_some_and(|of| of.name == pod.name());
            status.taps.iter().filter(|tap| is_of(tap) && tap.is_attached()).count()
        };
        let mut told = reasons(status);
        told.sort();
        check((of(web), of(db)) == (16, of_db) && told == expected, || format!("{} {told:?}", of(web)))
    };
    lab.wait_status(|status| is_bounded(status, 0));

    // Another pod does not wait, neither with this agent nor with the next one, and the tap stays.
    let began = Instant::now();
    pods.write(&both);
    lab.wait_status(|status| is_bounded(status, 1));
    let took = began.elapsed();
    eprintln!("flood: a tap of another pod after {took:.2?}, and before the flood after {usual:.2?}");
    assert!(took < usual + scaled(DELAY), "{took:?}");
    agent.stop();
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let after = lab.wait_status(|status| is_bounded(status, 1));
    let same = after.tap(web.veth_host());
    assert_eq!((same.ifindex, same.sessions[0].serial), (tap.ifindex, tap.sessions[0].serial));
    assert!(churn.try_wait().unwrap().is_none(), "the loop has ended");
    churn.kill().unwrap();
    churn.wait().unwrap();
    let warnings = agent.log_with(&["\"WARN\""]);
    assert!(warnings.iter().all(|line| line.contains("default/web")), "{warnings:#?}");
    agent.stop();
}

/// The NIC of a pod goes down and up 40 times a second. The agent uses a bounded part of a CPU, and mirrors the pod
/// afterwards.
#[test]
fn a_nic_that_flaps_costs_a_part_of_a_cpu() {
    const FLAPS: u32 = 400;
    const EACH: Duration = Duration::from_millis(25);
    const MOST: f64 = 0.3;
    let Node { web, db, lab } = &Node::bridged("flaps");
    let agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let (before, began) = (cpu_time(agent.pid()), Instant::now());
    for flap in 1..=FLAPS {
        let both = ["link set eth0 down", "link set eth0 up"].map(str::to_owned);
        assert!(batch(lab, web.netns(), both.into_iter()).wait().unwrap().success());
        thread::sleep((EACH * flap).saturating_sub(began.elapsed()));
    }
    let took = began.elapsed();
    let share = (cpu_time(agent.pid()) - before).as_secs_f64() / took.as_secs_f64();
    eprintln!("flaps: {FLAPS} in {took:.1?}, {:.1} % of a CPU", 100.0 * share);
    assert!(share < MOST, "{share} of a CPU");
    lab.wait_mirrored(&[web]);
    let comparison = Comparison::of(web.netns(), lab);
    db.ping(web.v4(), 5, 56);
    assert_eq!(comparison.is_equal().len(), 10);
    agent.stop();
}

/// Each namespace numbers its devices from 1, so the namespace that the tap is moved to can have devices with any small
/// index. (A clsact filter is not moved along.)
#[test]
fn a_tap_that_moves_away_while_no_agent_runs_copies_to_nobody() {
    let Node { web, db: _db, lab } = &Node::bridged("moved");
    let cell = Netns::new(&format!("{}-cell", lab.node().name()));
    cell.keep_quiet();
    let agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let (host, own) = (web.veth_host(), lab.ifindex(web.veth_host()));
    agent.kill();
    lab.node().ip(&format!("link set {host} netns {}", cell.name()));
    cell.ip(&format!("link set {host} up"));
    let others = (2..40).step_by(2).filter(|index| ![own, own - 1].contains(index));
    for index in others {
        cell.ip(&format!("link add t{index} index {index} type veth peer name u{index} index {}", index + 1));
        cell.ip(&format!("link set t{index} up"));
        cell.ip(&format!("link set u{index} up"));
    }
    let sent = || {
        let links = cell.ip("-json -stats link show");
        let links: Vec<serde_json::Value> = serde_json::from_str(&links).unwrap();
        let packets = |name: &str, way: &str| {
            let of = links.iter().filter(|link| link["ifname"].as_str().unwrap().starts_with(name));
            of.map(|link| link["stats64"][way]["packets"].as_u64().unwrap()).sum::<u64>()
        };
        (packets(host, "rx"), packets("t", "tx") + packets("u", "tx"))
    };
    let (received, before) = sent();
    for _ in 0..10 {
        web.send_frame(&Frame::new([2, 0, 0, 0, 0, 99], web.eth0().mac).bytes());
    }
    eventually(SOON, || check(sent().0 >= received + 10, || format!("{:?}", sent())));
    assert_eq!(sent().1, before, "copies in another namespace");
    assert!(lab.ifindex(MIRROR) > 0x706d_0000);
    lab.cleanup();
}

/// Root in a pod creates devices until a list of them takes megabytes. Neither a running agent nor the next one needs
/// more memory for that.
#[test]
fn twenty_thousand_devices_in_a_pod_take_no_memory() {
    const PAIRS: usize = 10_000;
    const MOST: f64 = 64.0;
    let Node { web, lab, .. } = &Node::bridged("thousands");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let (_, few) = memory(agent.pid());
    let began = Instant::now();
    let inside = (0..PAIRS).map(|n| format!("link add a{n} type veth peer name b{n}"));
    assert!(batch(lab, web.netns(), inside).wait().unwrap().success());
    let made = began.elapsed();
    let is_told = |status: &Status| {
        let told = reasons(status);
        check(told == [("default/web".to_owned(), "NetnsUnreadable".to_owned())], || format!("{told:?}"))
    };
    // A new veth to the pod causes an event on the node. Devices inside the pod do not.
    lab.node().ip(&format!("link add f0 type veth peer name g0 netns {}", web.netns().name()));
    lab.wait_status(is_told);
    let (_, running) = memory(agent.pid());
    agent.stop();
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_get("/readyz", 200);
    lab.wait_status(is_told);
    let (_, started) = memory(agent.pid());
    eprintln!(
        "thousands: made in {made:.1?}; at most {few:.1} MiB before, {running:.1} MiB with them, {started:.1} MiB of the next agent"
    );
    assert!(running < MOST && started < MOST, "{running} {started}");
    agent.stop();
}
