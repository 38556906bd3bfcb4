//! Many pods at a time.

use std::{fs, time::Instant};

use mirror_tests::{Agent, Cluster, PATIENCE, check, eventually, list, pod_object};

#[test]
fn thirty_pods_that_go_at_once_leave_no_tap() {
    const PODS: usize = 30;
    let cluster = &Cluster::new("many");
    let host = cluster.host();
    let objects: Vec<_> = (0..PODS)
        .map(|number| {
            let mut object = pod_object(&format!("pod{number}"), "exec sleep 3600");
            object["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
            object
        })
        .collect();
    cluster.apply(&list(&objects));
    cluster.kubectl("wait pods --all --for=condition=Ready --timeout=120s");
    let status =
        host.wait_status(|status| check(status.taps.len() == PODS, || format!("{} taps", status.taps.len())));
    let mut devices: Vec<_> = status.taps.into_iter().map(|tap| tap.device).collect();

    cluster.kubectl("delete pods --all --wait=false");
    let is_there = |device: &String| fs::exists(format!("/sys/class/net/{device}")).unwrap();
    eventually(PATIENCE, || {
        devices.retain(is_there);
        check(devices.is_empty(), || format!("{devices:?} are still there"))
    });
    let gone = Instant::now();
    host.wait_taps(&[]);
    let late = gone.elapsed();
    assert!(late < mirror_tests::scaled(std::time::Duration::from_secs(1)), "{late:?}");
}

#[test]
fn a_node_has_a_thousand_pods() {
    const EACH: usize = 250;
    let cluster = &Cluster::new("thousand");
    let host = cluster.host();
    cluster.uninstall();
    let namespace = cluster.namespace();
    cluster.kubectl(&format!("annotate namespace {namespace} podmirror.io/mirror=true"));
    let mut objects = Vec::new();
    for number in 0..EACH {
        for mirror in [None, Some("false"), Some("sideways"), Some("egress")] {
            let name = format!("pod{number}-{}", mirror.unwrap_or("inherits"));
            let mut object = pod_object(&name, "exec sleep 3600");
            // A node that is none: nobody runs them, and the agent is told that it is there.
            object["spec"]["nodeName"] = "elsewhere".into();
            if let Some(mirror) = mirror {
                object["metadata"]["annotations"]["podmirror.io/mirror"] = mirror.into();
            }
            objects.push(object);
        }
    }
    cluster.kubectl_with("create -f -", &list(&objects).to_string());

    let agent = Agent::start(host, &["run", "--node-name", "elsewhere"]);
    host.wait_get("/readyz", 200);
    let metrics = host.metrics();
    let told = |name: &str| metrics.get(name).copied().unwrap_or_default();
    assert_eq!(told("podmirror_bad_annotations"), EACH as f64);
    assert_eq!(told("podmirror_skipped_pods{reason=\"NoNetns\"}"), (3 * EACH) as f64);
    assert_eq!(host.status().taps, []);
    // A value that is none counts as if it did not stand there, and each owner is told, once.
    let events = || {
        let events = cluster.kubectl("get events --field-selector reason=BadAnnotation -o name");
        events.lines().count()
    };
    eventually(PATIENCE, || check(events() == EACH, || format!("{} are told", events())));
    cluster.kubectl("delete pods --all --wait=false");
    host.wait_metrics(|metrics| {
        !metrics.contains_key("podmirror_bad_annotations") || metrics["podmirror_bad_annotations"] == 0.0
    });
    agent.stop();
    assert_eq!(events(), EACH);
    host.cleanup();
}
