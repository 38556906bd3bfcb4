//! The agent is installed, upgraded and uninstalled, and runs without one of its rights.

use std::fs;

use mirror_tests::{AGENT, Cluster, Comparison, MIRROR, PATIENCE, Pinging, check, eventually};
use serde_json::{Value, json};

#[test]
fn uninstalled_it_leaves_nothing_on_the_node() {
    let cluster = &Cluster::new("uninstalled");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", Some("true"))]);
    host.wait_taps(&[&web.device, &db.device]);
    cluster.uninstall();
    cluster.has_left_nothing();
    web.ping(db.ip, 5);
    // After another installation, mirrors begin as before.
    cluster.install();
    host.wait_taps(&[&web.device, &db.device]);
}

/// With `ceilings.maxMirrorDuration=1h`.
fn each_mirror_has_to_end(cluster: &Cluster) {
    let mirror = |limits: &Value| {
        let metadata = json!({ "name": "short", "namespace": cluster.namespace() });
        let spec = json!({ "podSelector": {}, "limits": limits });
        json!({ "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": metadata, "spec": spec })
    };
    for limits in [json!({}), json!({ "duration": "61m" }), json!({ "packets": 5 })] {
        // The server reads a new policy after a moment.
        eventually(PATIENCE, || {
            let told = cluster.try_kubectl_with("create --dry-run=server -f -", &mirror(&limits).to_string());
            check(told.as_ref().is_err_and(|told| told.contains("at most 1h")), || {
                format!("{limits}: {told:?}")
            })
        });
    }
    let told = cluster
        .kubectl_with("create --dry-run=server -f -", &mirror(&json!({ "duration": "59m60s" })).to_string());
    assert!(told.contains("created"), "{told}");
}

#[test]
fn with_helm_it_is_installed_upgraded_and_uninstalled() {
    let cluster = &Cluster::new("helm");
    let host = cluster.host();
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
    let all = format!("--namespace {AGENT} --wait --timeout {}s", PATIENCE.as_secs());
    let [web, db, out] = &cluster.pods([("web", Some("true")), ("db", None), ("out", Some("false"))]);
    cluster.uninstall();
    // Nothing listens at the proxy's address, so an agent that used it for the API server would not become ready.
    let server = cluster.kubectl("get service kubernetes -n default -o jsonpath={.spec.clusterIP}");
    let values = format!(
        "--set extraEnv[0].name=HTTPS_PROXY --set extraEnv[0].value=http://127.0.0.1:9 \
         --set extraEnv[1].name=NO_PROXY --set extraEnv[1].value={server} \
         --set ceilings.maxMirrorDuration=1h --set enableMirror"
    );
    cluster.helm(&format!("install {AGENT} {chart} {all} --create-namespace {values}=true"));
    host.wait_taps(&[&web.device, &db.device]);
    cluster.wait_rolled_out();
    let tested = cluster.helm(&format!("test {AGENT} --namespace {AGENT} --timeout {}s", PATIENCE.as_secs()));
    assert!(tested.contains("Succeeded"), "{tested}");
    each_mirror_has_to_end(cluster);

    let ifindex = host.ifindex(MIRROR);
    let comparison = Comparison::of(&web.netns, host);
    let pinging = Pinging::start(&web.netns, out.ip);
    // A node whose architecture the image does not support is reported during the upgrade.
    let other = format!("{}-arm64", cluster.namespace());
    let labels = json!({"kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"});
    cluster
        .apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": other, "labels": labels}}));
    let told = cluster.helm(&format!("upgrade {AGENT} {chart} {all} {values}=false"));
    cluster.kubectl(&format!("delete node {other}"));
    assert!(
        told.contains(&format!("{other}: its architecture, arm64, is not in image.architectures")),
        "{told}"
    );
    assert_eq!(told.matches("its architecture").count(), 1, "{told}");
    host.wait_taps(&[&web.device]);
    // Another name would create another DaemonSet, and interrupt all mirrors until its first agent runs.
    let renamed = cluster
        .try_helm(&format!("upgrade {AGENT} {chart} {all} {values}=false --set fullnameOverride=other"));
    let why = renamed.unwrap_err();
    assert!(why.contains(&format!("Keep it with --set fullnameOverride={AGENT}")), "{why}");
    let sent = pinging.stop();
    assert_eq!(comparison.is_equal().len(), 2 * sent);
    assert_eq!(host.ifindex(MIRROR), ifindex, "an upgrade is not an uninstallation");

    cluster.helm(&format!("uninstall {AGENT} {all}"));
    cluster.has_left_nothing();
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
