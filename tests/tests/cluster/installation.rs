//! Upgraded and uninstalled.

use std::fs;

use mirror_tests::{AGENT, Cluster, Comparison, MIRROR, PATIENCE, Pinging};

#[test]
fn an_upgrade_does_not_interrupt_mirroring() {
    let cluster = &Cluster::new("upgrade");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    let before = cluster.agent_pid();
    let comparison = Comparison::of(&web.netns, host);
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
    cluster.uninstall();
    assert!(!fs::exists("/sys/fs/bpf/podmirror").unwrap(), "{:?}", host.pins());
    assert!(!host.devices().iter().any(|device| device == MIRROR));
    let state = host.network_state();
    assert!(
        !state.iter().any(|line| line.contains("tap_ingress") || line.contains("tap_egress")),
        "{state:#?}"
    );
    web.ping(db.ip, 5);
    // Installed again, it begins anew.
    cluster.install();
    host.wait_taps(&[&web.device, &db.device]);
}

#[test]
fn without_one_of_its_rights_it_copies_nothing_and_says_why() {
    let cluster = &Cluster::new("wanting");
    let host = cluster.host();
    let [_web] = &cluster.pods([("web", Some("true"))]);
    let manifests = fs::read_to_string(Cluster::manifests()).unwrap();
    for (right, complaint) in [
        ("NET_ADMIN", "cannot create the dummy device"),
        ("SYS_ADMIN", "cannot load the eBPF object"),
        ("SYS_PTRACE", "NetnsUnreadable"),
    ] {
        cluster.uninstall();
        let line = format!("              - {right}\n");
        assert_eq!(manifests.matches(&line).count(), 1, "{right}");
        cluster.kubectl_with("apply -f -", &manifests.replace(&line, ""));
        cluster.wait_agent_log(PATIENCE, &[complaint]);
        let is_mirrored =
            host.devices().iter().any(|device| device == MIRROR) && !host.status().taps.is_empty();
        assert!(!is_mirrored, "without {right}");
    }
    cluster.uninstall();
}
