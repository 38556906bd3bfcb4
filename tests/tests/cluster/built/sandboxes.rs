//! Pods that lose their sandbox.

use mirror_tests::{Cluster, Comparison};

#[test]
fn a_pod_with_a_new_sandbox_is_mirrored_again() {
    let cluster = &Cluster::new("sandbox");
    let host = cluster.host();
    let [web, db] = cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    let (uid, sandbox) = (web.uid.clone(), cluster.task(&web.uid, "sandbox").unwrap());
    cluster.kill_task(&web, "sandbox");
    // After this, only the kernel holds the pod's namespace.
    drop(web);
    let web = cluster.with_new_sandbox("web", &uid, sandbox);
    host.wait_taps(&[&web.device]);
    let comparison = Comparison::of(&web.netns, host);
    web.ping(db.ip, 5);
    assert_eq!(comparison.is_equal().len(), 10);
}
