//! Events: which pods get one, and with which reason.

use mirror_tests::{AGENT, Cluster, SOON, check, eventually, pod_object};
use serde_json::Value;

/// The messages of the pod's Events with this reason.
fn messages(cluster: &Cluster, namespace: &str, pod: &str, reason: &str) -> Vec<String> {
    let events = cluster.kubectl(&format!("get events -o json --namespace {namespace}"));
    let events: Value = serde_json::from_str(&events).unwrap();
    let is_it = |event: &&Value| event["involvedObject"]["name"] == pod && event["reason"] == reason;
    let events = events["items"].as_array().unwrap().iter().filter(is_it);
    events.map(|event| event["message"].as_str().unwrap().to_owned()).collect()
}

/// Waits for an Event with this text in its message. It must be the only Event with its reason.
#[track_caller]
fn one_event(cluster: &Cluster, namespace: &str, pod: &str, reason: &str, text: &str) {
    eventually(SOON, || {
        let messages = messages(cluster, namespace, pod, reason);
        check(messages.len() == 1 && messages[0].contains(text), || format!("{reason}: {messages:?}"))
    });
}

#[test]
fn owners_of_pods_that_are_not_mirrored_are_told_once() {
    let cluster = &Cluster::new("told");
    let (host, namespace) = (cluster.host(), cluster.namespace());
    let [web, _bad, _unknown] = cluster.pods([("web", None), ("bad", None), ("unknown", None)]);
    cluster.kubectl("annotate pod bad podmirror.io/mirror=true podmirror.io/filter=tcp.port.80");
    cluster.kubectl("annotate pod unknown podmirror.io/mirror=sideways");
    let mut object = pod_object("on-the-node", "exec sleep 3600");
    object["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
    object["spec"]["hostNetwork"] = true.into();
    cluster.apply(&object);
    cluster.kubectl("wait pod on-the-node --for=condition=Ready --timeout=60s");
    // A pod in the agent's own namespace, which the manifests exclude.
    object["metadata"]["name"] = "excluded".into();
    object["metadata"]["namespace"] = AGENT.into();
    object["spec"]["hostNetwork"] = false.into();
    cluster.apply(&object);
    cluster.kubectl(&format!("-n {AGENT} wait pod excluded --for=condition=Ready --timeout=60s"));

    one_event(cluster, namespace, "bad", "BadSetting", "tcp.port.80");
    one_event(cluster, namespace, "unknown", "BadAnnotation", "sideways");
    one_event(cluster, namespace, "on-the-node", "HostNetwork", "network");
    one_event(cluster, AGENT, "excluded", "NamespaceExcluded", "namespace");

    // After another round of the loop there is still one Event.
    cluster.kubectl("annotate pod web podmirror.io/mirror=true");
    host.wait_taps(&[&web.device]);
    assert_eq!(messages(cluster, namespace, "bad", "BadSetting").len(), 1);
    assert_eq!(messages(cluster, namespace, "on-the-node", "HostNetwork").len(), 1);
    cluster.kubectl("annotate pod bad podmirror.io/filter=icmp --overwrite");
    eventually(SOON, || {
        let taps = host.status().taps;
        let is_bad = |tap: &mirror_tests::TapStatus| tap.pod.as_ref().is_some_and(|pod| pod.name == "bad");
        check(taps.len() == 2 && taps.iter().any(is_bad), || format!("{taps:#?}"))
    });
    cluster.kubectl(&format!("-n {AGENT} delete pod excluded"));
}
