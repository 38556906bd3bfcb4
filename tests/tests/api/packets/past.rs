//! Answers with packets of the past: whose packets a recorder gives to a user.

use mirror_tests::{PacketFile, SOON, Tail, check, eventually};
use serde_json::json;

use super::Packets;
use crate::{Node, aggregation::GROUP, resources::run};

/// The parameters that select pods: all of the namespace, by labels, and by name.
const ALL: &str = "";
const LABELS: &str = "labelSelector=app%3Dweb&";
const NAMED: &str = "fieldSelector=metadata.name%3Dweb&";

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
    let agent = packets.agent(lab, &["--define-target", "live=stream"]);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let alice = packets.grant("alice", false, &rules);
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(&alice, &brief));
    lab.wait_mirrored(&[web, db]);
    let uri = |of: &str| packets.uri(&format!("packets?{of}follow=false&since=1h&watch=true"));
    let refused = packets.get(&alice, &uri(ALL)).unwrap_err();
    assert!(refused.contains("(Conflict)") && refused.contains("no recorder runs on this node"), "{refused}");

    let recorder = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    lab.wait_status(|status| check(status.target("live").up, || "nobody records".into()));
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
        pods.each_ref().map(|pod| {
            let name = format!("{}/{} eth0", api.namespace(), pod.name());
            file.packets.iter().filter(|packet| packet.interface == name).count()
        })
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
