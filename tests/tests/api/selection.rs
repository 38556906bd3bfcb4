//! Which pods are mirrored: annotations of the pod, of its namespace, and the agent's flags, which override both.

use mirror_tests::{SOON, check, eventually};
use serde_json::Value;

use crate::Node;

const MIRROR: &str = "podmirror.io/mirror";

#[test]
fn the_most_specific_word_counts() {
    let node = &Node::new("words");
    let Node { api, lab } = node;
    let pods = node.pods(["silent", "in", "out", "sends", "ovn"]);
    let [silent, yes, no, sends, ovn] = &pods;
    let words: [&[(&str, &str)]; 5] = [
        &[],
        &[(MIRROR, "true")],
        &[(MIRROR, "false")],
        &[(MIRROR, "egress")],
        &[("ovn.kubernetes.io/mirror", "true")],
    ];
    let _containers: Vec<_> =
        pods.iter().zip(words).map(|(pod, annotations)| api.run(lab, pod, annotations)).collect();
    let namespace =
        |word: &str| api.kubectl(&format!("annotate --overwrite namespace {} {word}", api.namespace()));

    let agent = api.agent(lab, &["--kube-ovn-annotations"]);
    let status = lab.wait_mirrored(&[yes, sends, ovn]);
    assert_eq!(status.tap(yes.veth_host()).direction, "both");
    assert_eq!(status.tap(sends.veth_host()).direction, "egress");
    node.is_mirrored(yes, silent);
    // The namespace's annotation applies only to pods without their own.
    namespace("podmirror.io/mirror=ingress");
    let status = lab.wait_mirrored(&[silent, yes, sends, ovn]);
    let directions = [silent, yes, sends].map(|pod| status.tap(pod.veth_host()).direction.clone());
    assert_eq!(directions, ["ingress", "both", "egress"]);
    namespace("podmirror.io/mirror-");
    lab.wait_mirrored(&[yes, sends, ovn]);
    agent.stop();

    // The agent's flag applies where neither has an annotation.
    let agent = api.agent(lab, &["--enable-mirror", "--kube-ovn-annotations"]);
    lab.wait_mirrored(&[silent, yes, sends, ovn]);
    namespace("podmirror.io/mirror=false");
    lab.wait_mirrored(&[yes, sends, ovn]);
    api.kubectl(&format!("annotate pod silent {MIRROR}=true"));
    api.kubectl(&format!("annotate --overwrite pod in {MIRROR}=false"));
    lab.wait_mirrored(&[silent, sends, ovn]);
    node.is_mirrored(silent, no);
    agent.stop();
}

#[test]
fn administrators_stand_above_annotations() {
    let node = &Node::new("gates");
    let Node { api, lab } = node;
    let [web, out] = &node.pods(["web", "out"]);
    let _containers = [api.run(lab, web, &[(MIRROR, "true")]), api.run(lab, out, &[])];
    for (flag, namespace, reason) in [
        ("--allow-namespaces", "elsewhere", "NamespaceNotAllowed"),
        ("--exclude-namespaces", api.namespace(), "NamespaceExcluded"),
    ] {
        let agent = api.agent(lab, &[flag, namespace]);
        // The pod's author gets one Event, and the node's status shows it; a pod that requests nothing is not
        // mentioned.
        let pod = format!("{}/web", api.namespace());
        lab.wait_status(|status| {
            let told = status.notes.as_ref().map(|notes| &notes["not_mirrored"]);
            let told: Vec<_> = told.and_then(Value::as_array).into_iter().flatten().collect();
            let is_it = matches!(told[..], [one] if one["pod"] == *pod && one["reason"] == reason);
            check(is_it && status.taps.is_empty(), || format!("{flag} {namespace}"))
        });
        eventually(SOON, || {
            let events = api.kubectl(&format!("get events -o name --field-selector reason={reason}"));
            check(events.lines().count() == 1, || format!("{reason}: {events}"))
        });
        agent.stop();
    }
}
