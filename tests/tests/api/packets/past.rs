//! Answers with packets of the past: whose packets a recorder gives to a user, and what is missing.

use std::fs;

use mirror_tests::{
    Agent, Api, Container, Conversation, Lab, PacketFile, PodNs, SOON, Tail, Way, check, eventually,
};
use serde_json::json;

use super::{
    Packets,
    merging::{connect, interface, other_node, run_on},
    renewal::INCOMPLETE,
};
use crate::{Node, aggregation::GROUP, plugin::command, resources::run};

/// The parameters that select pods: all of the namespace, by labels, and by name.
const ALL: &str = "";
const LABELS: &str = "labelSelector=app%3Dweb&";
const NAMED: &str = "fieldSelector=metadata.name%3Dweb&";
/// Arguments of an agent with a recorder, and the annotations of a pod that it records.
const STREAM: [&str; 2] = ["--define-target", "live=stream"];
const RECORDED: [(&str, &str); 3] = [
    ("podmirror.io/mirror", "true"),
    ("podmirror.io/target", "live"),
    ("podmirror.io/filter", "tcp or icmp"),
];
/// Bytes that two pods exchange, each way. An answer at [`RATE`] lasts for seconds, and few of them are on their way.
const WORDS: usize = 2_000_000;
const RATE: &str = "2Mbit";

/// Starts the recorder of a node.
#[track_caller]
fn record(lab: &Lab) -> Tail {
    let mut recorder = lab.agent(&["recorder", "--target", "live", "--ring", "8MB"]);
    let recorder = Tail::of(&mut recorder, lab.files().join("none"));
    lab.wait_status(|status| check(status.target("live").up, || "nobody records".into()));
    recorder
}

/// The number of packets of a pod in a file.
fn count(api: &Api, file: &PacketFile, pod: &PodNs) -> usize {
    let name = interface(api, pod);
    file.packets.iter().filter(|packet| packet.interface == name).count()
}

/// Creates a pod of a node that is recorded, and another one to which it sends.
#[track_caller]
fn pair(api: &Api, lab: &Lab, names: [&str; 2]) -> ([PodNs; 2], [Container; 2]) {
    let pods = names.map(|name| lab.pod(name, "br0"));
    let containers = [run_on(api, lab, &pods[0], &RECORDED), run_on(api, lab, &pods[1], &[])];
    (pods, containers)
}

/// Waits until the answer to a request ends in this way and has this text. It never ends as `complete` before.
#[track_caller]
fn wait_answer(packets: &Packets<'_>, user: &str, uri: &str, end: &str, text: &str) {
    eventually(2 * SOON, || {
        let answer = packets.get(user, uri)?;
        let has = |text: &str| answer.contains(&format!("podmirror: {text}"));
        assert!(end == "end: complete" || !has("end: complete"), "{answer}");
        check(has(end) && has(text), || format!("not {end:?} and {text:?}: {answer}"))
    });
}

/// A recorder has the packets of two pods. A user gets those of the requested pods, NICs and directions, cut to the
/// requested length, and those of deleted pods only if the request has no labels.
#[test]
fn a_user_gets_the_recorded_packets_of_the_requested_pods() {
    let node @ Node { api, lab } = &Node::new("packets-past");
    let pods = node.pods(["web", "db"]);
    let annotations =
        [("podmirror.io/mirror", "true"), ("podmirror.io/target", "live"), ("podmirror.io/filter", "icmp")];
    let mut containers = run(node, &pods, &annotations);
    let [web, db] = &pods;
    let packets = Packets::start(api, 1, &[]);
    packets.connect(lab);
    let agent = packets.agent(lab, &STREAM);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let alice = packets.grant("alice", false, &rules);
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(&alice, &brief));
    lab.wait_mirrored(&[web, db]);
    let uri = |of: &str| packets.uri(&format!("packets?{of}follow=false&since=1h&watch=true"));
    let refused = packets.get(&alice, &uri(ALL)).unwrap_err();
    assert!(refused.contains("(Conflict)") && refused.contains("no recorder runs on this node"), "{refused}");

    let recorder = record(lab);
    web.ping(db.v4(), 5, 56);
    let file = |of: &str| {
        // The agent's own pod, which has no process here, is one of all pods.
        let is_whole = [LABELS, NAMED].iter().any(|selected| of.starts_with(selected));
        let end = if is_whole { "complete" } else { "incomplete" };
        PacketFile::parse(&packets.stream(&alice, &uri(of)).wait_end(SOON, end))
    };
    // The packets of web and of db.
    let counts = |of: &str| {
        let file = file(of);
        pods.each_ref().map(|pod| count(api, &file, pod))
    };
    let wait_counts = |of: &str, expected: [usize; 2]| {
        eventually(SOON, || {
            let counts = counts(of);
            check(counts == expected, || format!("{of:?}: {counts:?}, and not {expected:?}"))
        });
    };
    // A packet between two recorded pods is kept once, with the sender.
    wait_counts(ALL, [5, 5]);
    assert_eq!([counts(LABELS), counts(NAMED)], [[5, 0]; 2]);
    let directions = ["Egress", "Ingress"].map(|direction| counts(&format!("direction={direction}&")));
    assert_eq!(directions, [[5, 5], [0, 0]]);
    let cut = file("snapLength=80&").packets.into_iter().map(|packet| packet.frame);
    let lengths: Vec<_> = cut.map(|frame| (frame.bytes.len(), frame.length)).collect();
    assert_eq!(lengths, [(80, 98); 10]);

    drop(containers.remove(0));
    api.kubectl("delete pod web --grace-period=0 --force");
    lab.wait_mirrored(&[db]);
    wait_counts(LABELS, [0, 0]);
    wait_counts(NAMED, [5, 0]);
    assert_eq!(["eth0", "net1"].map(|nic| counts(&format!("{NAMED}nics={nic}&"))), [[5, 0], [0, 0]]);
    wait_counts(ALL, [5, 5]);
    // Its author has switched mirrors off since. The user learns that its packets are missing.
    api.kubectl("annotate --overwrite pod db podmirror.io/mirror=false");
    let opted_out = format!("{}/db: OptedOut: ", api.namespace());
    eventually(SOON, || {
        let answer = packets.get(&alice, &uri("fieldSelector=metadata.name%3Ddb&"));
        let expected = format!("(Conflict): no packets can be read: {opted_out}");
        check(answer.as_ref().is_err_and(|why| why.contains(&expected)), || format!("{answer:?}"))
    });
    assert_eq!(counts(ALL), [5, 0]);
    let file = file(ALL);
    let says = |comment: &String| comment.starts_with(&format!("podmirror: {opted_out}"));
    assert!(file.comments.iter().any(says), "{:#?}", file.comments);
    recorder.kill();
    agent.stop();
}

/// The packets of the other node are there.
#[test]
fn an_agent_that_is_killed_while_it_sends_the_past_leaves_it_incomplete() {
    let Node { api, lab } = &Node::new("packets-cut");
    let other = &other_node("packets-cut-b");
    let _relay = api.connect(other);
    let ([web, db], _containers) = &pair(api, lab, ["web", "db"]);
    let ([far, peer], _other_containers) = &pair(api, other, ["far", "peer"]);
    api.kubectl("label pods web far tier=front");
    let packets = Packets::start(api, 1, &["--max-rate", RATE]);
    let ([agent, of_other], alice) = connect(&packets, [lab, other], &STREAM);
    lab.wait_mirrored(&[web]);
    other.wait_mirrored(&[far]);
    let recorders = [lab, other].map(record);
    Conversation::open(web, db, db.v4()).exchange(WORDS);
    far.ping(peer.v4(), 5, 56);

    let cut = "packets?labelSelector=tier%3Dfront&snapLength=80&follow=false&since=1h&watch=true";
    let cut = packets.uri(cut);
    let whole = || {
        wait_answer(&packets, &alice, &cut, "end: complete", "");
        PacketFile::parse(&packets.stream(&alice, &cut).wait_end(SOON, "complete"))
    };
    let file = whole();
    let bytes: usize = file.packets.iter().map(|packet| packet.frame.length).sum();
    let recorded = [web, far].map(|pod| count(api, &file, pod));
    assert!(bytes > WORDS && recorded[1] == 10, "{bytes} bytes, {recorded:?} packets");

    let path = lab.files().join("plugin.pcapng");
    let words = format!("tail -l tier=front --since 1h --no-follow --as {alice} --write {}", path.display());
    let reading = Tail::of(&mut command(api, &words), path.clone());
    eventually(SOON, || {
        let file = PacketFile::parse(&fs::read(&path).unwrap_or_default());
        check(count(api, &file, web) > 0, || "no packets yet".into())
    });
    agent.kill();
    let exit = reading.exit();
    let node = format!(": {}: ", lab.node().name());
    let is_why = |text: &str| text.contains(&node) && !text.contains("recorded packets of the last");
    assert!(exit.code == Some(INCOMPLETE) && exit.stderr.lines().any(is_why), "{exit:?}");
    let file = PacketFile::whole(&path);
    let [of_web, of_far] = [web, far].map(|pod| count(api, &file, pod));
    assert!((1..recorded[0]).contains(&of_web) && of_far == 10, "{of_web} of {recorded:?}, {of_far}");
    let ends: Vec<_> =
        file.comments.iter().filter(|comment| comment.starts_with("podmirror: end: ")).collect();
    let is_told = file.comments.iter().any(|comment| is_why(comment));
    assert!(is_told && ends == ["podmirror: end: incomplete"], "{:#?}", file.comments);

    // The recorder has kept them.
    let agent = packets.agent(lab, &STREAM);
    let file = whole();
    assert_eq!([web, far].map(|pod| count(api, &file, pod)), recorded);
    recorders.into_iter().for_each(Tail::kill);
    [agent, of_other].into_iter().for_each(Agent::stop);
}

/// The server has no connection to an agent yet, as after its start. No object says which node had a deleted pod.
#[test]
fn the_past_lacks_the_node_of_an_agent_that_is_not_connected() {
    let Node { api, lab } = &Node::new("packets-unknown");
    let other = &other_node("packets-unknown-b");
    let _relay = api.connect(other);
    let ([web, _db], _containers) = &pair(api, lab, ["web", "db"]);
    let ([far, peer], other_containers) = pair(api, other, ["far", "peer"]);
    let packets = Packets::start(api, 1, &[]);
    let (agents, alice) = connect(&packets, [lab, other], &STREAM);
    lab.wait_mirrored(&[web]);
    other.wait_mirrored(&[&far]);
    let recorders = [lab, other].map(record);
    far.ping(peer.v4(), 5, 56);
    drop(other_containers);
    api.kubectl("delete pods far peer --grace-period=0 --force");
    other.wait_mirrored(&[]);
    let uri = packets.uri("packets?fieldSelector=metadata.name%3Dfar&follow=false&since=1h&watch=true");
    let has_all = || {
        wait_answer(&packets, &alice, &uri, "end: complete", "");
        let file = PacketFile::parse(&packets.stream(&alice, &uri).wait_end(SOON, "complete"));
        assert_eq!(file.packets.len(), 10);
    };
    has_all();

    let name = other.node().name();
    packets.relays.borrow()[1].set(Way::Refused);
    packets.servers[0].wait_for_log(&["has ended", name]);
    let missing = format!("{name}: its agent is not connected");
    wait_answer(&packets, &alice, &uri, "end: incomplete", &missing);
    packets.relays.borrow()[1].set(Way::Open);
    has_all();
    recorders.into_iter().for_each(Tail::kill);
    agents.into_iter().for_each(Agent::stop);
}
