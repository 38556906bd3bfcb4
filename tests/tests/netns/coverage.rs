//! Whether the agent reports correctly which packets a NIC carries and its tap does not see.

use std::time::Duration;

use mirror_tests::{
    Agent, AttachMode, Conversation, Flood, Frame, Lab, Neighbour, PodNs, PodSpec, PodsFile, check,
    eventually, kernel_is_at_least,
};
use serde_json::Value;

use crate::{Node, any_mode};

/// An alarm takes a few readings of the counters, one every two seconds.
pub(crate) const FEW_READINGS: Duration = Duration::from_secs(12);
/// The end of an alarm takes 20 s of covered traffic.
pub(crate) const CLEAR: Duration = Duration::from_secs(40);

/// Whether the kernel's counters of a pod's NIC include packets that other software hands to it past the node side of
/// its veth. Of the kernels on which the stories run, 5.10 does not count them.
fn shows_redirects() -> bool {
    kernel_is_at_least(6, 1)
}

/// The state of ingress when the tap sees all of it.
pub(crate) fn seen_ingress() -> &'static str {
    if shows_redirects() { "Covered" } else { "Unknown" }
}

/// The agent's report on the coverage of the pod's `eth0`.
fn coverage_of(lab: &Lab, pod: &PodNs) -> Result<Value, String> {
    let nics = lab.coverage()?;
    let found = nics.iter().find(|nic| nic["device"] == pod.veth_host()).cloned();
    found.ok_or_else(|| format!("no coverage of {}: {nics:?}", pod.name()))
}

/// Generates traffic until the pod has these states of ingress and egress.
#[track_caller]
pub(crate) fn wait_states(
    lab: &Lab,
    pod: &PodNs,
    deadline: Duration,
    states: [&str; 2],
    traffic: impl Fn(),
) -> Value {
    eventually(deadline, || {
        traffic();
        let coverage = coverage_of(lab, pod)?;
        let is_so = ["ingress", "egress"].into_iter().zip(states);
        let mut is_so = is_so.map(|(direction, state)| coverage[direction]["state"] == state);
        check(is_so.all(|is_so| is_so), || format!("not {states:?}: {coverage}"))?;
        Ok(coverage)
    })
}

/// Waits until a reading shows that the tap has seen everything that the NIC has carried. There must be no traffic.
#[track_caller]
fn wait_all_seen(lab: &Lab, pod: &PodNs) {
    eventually(FEW_READINGS, || {
        let coverage = coverage_of(lab, pod)?;
        let mut directions = ["ingress", "egress"].into_iter().map(|direction| &coverage[direction]);
        let is_whole = directions.all(|of| of["seen"] == of["carried"] && of["seen"] != 0);
        check(is_whole, || format!("{coverage}"))
    });
}

/// The reasons of the pods that are not completely mirrored, with their remedies.
pub(crate) fn reasons(lab: &Lab) -> Vec<(String, String)> {
    let notes = lab.status().notes.unwrap();
    let text = |note: &Value, key: &str| note[key].as_str().unwrap().to_owned();
    let notes = notes["not_mirrored"].as_array().unwrap().iter();
    notes.map(|note| (text(note, "reason"), text(note, "remedy"))).collect()
}

fn series(direction: &str, state: &str) -> String {
    format!(
        "podmirror_nic_coverage{{direction=\"{direction}\",namespace=\"default\",nic=\"eth0\",pod=\"web\",\
         state=\"{state}\"}}"
    )
}

/// For veths whose pods must not be tapped inside; the module `bypass` has the others.
#[test]
fn a_bypass_is_told_within_seconds_and_so_is_its_end() {
    let Node { web, db, lab } = &Node::bridged("bypass");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--pod-side-taps=off"], &[web]);
    let talk = || web.ping(db.v4(), 5, 56);

    // Without traffic the state is unknown.
    let idle = wait_states(lab, web, FEW_READINGS, ["Unknown", "Unknown"], || {});
    assert!(idle["egress"]["message"].as_str().unwrap().contains("too few packets"), "{idle}");
    wait_states(lab, web, FEW_READINGS, [seen_ingress(), "Covered"], talk);
    wait_all_seen(lab, web);
    assert_eq!(reasons(lab), []);

    // The answers reach the pod past its tap.
    let tap = || lab.status().tap(web.veth_host()).packets("ingress", "copied");
    let neighbour = Neighbour::behind(lab, db.veth_host(), web.veth_host());
    let before = tap();
    if shows_redirects() {
        let bypassed = wait_states(lab, web, FEW_READINGS, ["Bypassed", "Covered"], talk);
        assert_eq!(tap(), before, "the tap sees none of them");
        assert!(bypassed["ingress"]["message"].as_str().unwrap().contains("bpf_redirect_peer"), "{bypassed}");
        assert!(bypassed["ingress"]["seconds"].as_u64().unwrap() <= 3, "{bypassed}");
        eventually(FEW_READINGS, || {
            let reasons = reasons(lab);
            let is_told = |(reason, remedy): &(String, String)| {
                reason == "Bypassed" && remedy.contains("--pod-side-taps=auto")
            };
            check(reasons.len() == 1 && reasons.iter().all(is_told), || format!("{reasons:?}"))
        });
        agent.wait_for_log(&["partly mirrored", "\"Bypassed\"", "ingress: "]);
        let metrics = lab.wait_metrics(|metrics| metrics.contains_key(&series("ingress", "Bypassed")));
        assert_eq!(metrics[&series("egress", "Covered")], 1.0);
        assert!(!metrics.contains_key(&series("ingress", "Covered")), "{metrics:#?}");
        let words = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
        assert!(words.contains("Coverage of what reaches the pod: Bypassed, for "), "{words}");
        assert!(words.contains("bpfRedirectToPeer: Disabled"), "{words}");
        let table = lab.agent_exit(&["status"]).stdout;
        assert!(table.contains("\nCOVERAGE     NIC   INGRESS   SEEN/NIC"), "{table}");
    } else {
        // This kernel does not count them, so the agent must not claim coverage: after many more packets than a
        // judgement needs.
        eventually(FEW_READINGS, || {
            talk();
            let ingress = coverage_of(lab, web)?["ingress"].clone();
            let is_doubt = ingress["message"].as_str().unwrap().contains("this kernel does not count");
            assert_eq!(ingress["state"], "Unknown", "{ingress}");
            check(is_doubt, || format!("{ingress}"))
        });
        assert_eq!(tap(), before);
        assert_eq!(reasons(lab), []);
    }

    drop(neighbour);
    let again = wait_states(lab, web, CLEAR, [seen_ingress(), "Covered"], talk);
    if shows_redirects() {
        let [seen, carried] = ["seen", "carried"].map(|key| again["ingress"][key].as_u64().unwrap());
        assert!(seen < carried, "{again}");
    } else {
        wait_all_seen(lab, web);
    }
    eventually(FEW_READINGS, || {
        let reasons = reasons(lab);
        check(reasons.is_empty(), || format!("{reasons:?}"))
    });
    agent.stop();
}

/// Runs traffic until the agent has judged `readings` times. Fails if it raises an alarm.
#[track_caller]
pub(crate) fn no_alarm(lab: &Lab, pods: &[&PodNs], readings: usize, traffic: impl Fn()) {
    let mut carried = Vec::new();
    // The agent reads again after 2 s, and later if reading takes long, as on a busy machine.
    eventually(Duration::from_secs(180), || {
        traffic();
        let coverages = pods.iter().map(|pod| coverage_of(lab, pod)).collect::<Result<Vec<_>, _>>()?;
        for direction in ["ingress", "egress"] {
            let states = coverages.iter().map(|coverage| &coverage[direction]["state"]);
            assert!(states.into_iter().all(|state| state != "Bypassed"), "{coverages:#?}");
        }
        let now = coverages[0]["egress"]["carried"].as_u64().unwrap();
        if carried.last() != Some(&now) {
            carried.push(now);
        }
        check(carried.len() > readings, || format!("{} of {readings} readings", carried.len()))
    });
}

#[test]
fn floods_super_frames_and_tags_raise_no_alarm() {
    let mode = any_mode();
    let Node { web, db, lab } = &Node::bridged("floods");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")]);
    let agent = Agent::run_until(lab, mode, &pods, &[], &[web, db]);
    let both = [web, db];
    let talk = || web.ping(db.v4(), 5, 56);
    wait_states(lab, web, FEW_READINGS, [seen_ingress(), "Covered"], talk);

    // As fast as possible, one packet at a time.
    let flood = Flood::start(web, db);
    no_alarm(lab, &both, 4, || flood.go_on(1));
    // An agent starts while packets flow.
    agent.stop();
    let agent = Agent::run_until(lab, mode, &pods, &[], &[web, db]);
    no_alarm(lab, &both, 3, || flood.go_on(1));
    flood.stop();

    // Super-frames. Then the pod segments them itself, and the node side merges them again (GRO).
    let tcp = Conversation::open(web, db, db.v4());
    no_alarm(lab, &both, 3, || tcp.exchange(4 << 20));
    web.netns().run("ethtool -K eth0 tso off gso off");
    lab.node().run(&format!("ethtool -K {} gro on", web.veth_host()));
    no_alarm(lab, &both, 4, || tcp.exchange(1 << 20));
    // And the node segments what the NIC does not accept.
    lab.node().run(&format!("ethtool -K {} tso off", db.veth_host()));
    no_alarm(lab, &both, 4, || tcp.exchange(1 << 20));

    // Tagged frames, which the NIC counts and the pod's stack drops.
    let tagged = Frame::new(db.eth0().mac, web.eth0().mac).vlan(7).filled(1000, 7).bytes();
    no_alarm(lab, &both, 4, || (0..50).for_each(|_| web.send_frame(&tagged)));
    wait_states(lab, db, FEW_READINGS, [seen_ingress(), "Covered"], talk);
    assert_eq!(reasons(lab), []);
    agent.stop();
}

/// The kernel announces no change of a TCX chain, but the NIC's counters show it, so the agent checks before its next
/// tick.
#[test]
fn a_program_that_comes_first_later_is_found_by_what_is_missing() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("hides-later");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let talk = || web.ping(db.v4(), 5, 56);
    wait_states(lab, web, FEW_READINGS, ["Covered", "Covered"], talk);
    let neighbour = Neighbour::with_the_last_word(lab, web.veth_host());
    let hidden = wait_states(lab, web, FEW_READINGS * 2, ["Hidden", "Hidden"], talk);
    assert!(hidden["ingress"]["message"].as_str().unwrap().contains("\"last_word\""), "{hidden}");
    assert!(reasons(lab).iter().all(|(reason, _)| reason == "Hidden"), "{:?}", reasons(lab));
    assert!(agent.log_with(&["\"Bypassed\""]).is_empty(), "one reason: {:#?}", agent.log());
    drop(neighbour);
    pods.write_to_wake(&[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    wait_states(lab, web, FEW_READINGS, ["Covered", "Covered"], talk);
    agent.stop();
}
