//! Many pods at a time.

use std::time::{Duration, Instant};

use mirror_tests::{Cluster, PATIENCE, check, eventually, list, pod_object, scaled};

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
    eventually(PATIENCE, || {
        let there = host.devices();
        devices.retain(|device| there.contains(device));
        check(devices.is_empty(), || format!("{devices:?} are still there"))
    });
    let gone = Instant::now();
    host.wait_taps(&[]);
    let late = gone.elapsed();
    assert!(late < scaled(Duration::from_secs(1)), "{late:?}");
}
