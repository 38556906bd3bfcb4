//! Upgraded and uninstalled.

use std::fs;

use mirror_tests::{AGENT, Cluster, PATIENCE, Pinging, check, eventually};

use crate::{Comparison, MIRROR};

#[test]
fn an_upgrade_does_not_interrupt_mirroring() {
    let cluster = &Cluster::new("upgrade");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    let before = cluster.agent_pid();
    let comparison = Comparison::of(web, host);
    let pinging = Pinging::start(&web.netns, db.ip);
    cluster.kubectl(&format!("-n {AGENT} rollout restart daemonset/{AGENT}"));
    cluster.wait_rolled_out();
    assert_ne!(cluster.agent_pid(), before);
    let sent = pinging.stop();
    assert_eq!(comparison.is_equal().len(), 2 * sent);
    assert_eq!(host.wait_taps(&[&web.device]).tap(&web.device).total("failed"), 0);
}

#[test]
fn uninstalled_it_leaves_nothing_on_the_node() {
    let cluster = &Cluster::new("uninstalled");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", Some("true"))]);
    host.wait_taps(&[&web.device, &db.device]);
    cluster.kubectl(&format!("delete -f {}", Cluster::manifests()));
    eventually(PATIENCE, || check(cluster.agent_pid().is_none(), || "the agent still runs".into()));
    assert!(!fs::exists("/sys/fs/bpf/podmirror").unwrap(), "{:?}", host.pins());
    assert!(!host.devices().iter().any(|device| device == MIRROR));
    let state = host.network_state();
    assert!(
        !state.iter().any(|line| line.contains("tap_ingress") || line.contains("tap_egress")),
        "{state:#?}"
    );
    web.ping(db.ip, 5);
    // What the story's end takes for granted.
    cluster.install();
    host.wait_taps(&[&web.device, &db.device]);
}
