//! The chart's `apiserver.hostNetwork`, for a control plane that cannot connect to pods.

use std::net::{SocketAddr, TcpStream};

use mirror_tests::{AGENT, Cluster, KubePod, PATIENCE, SOON, check, eventually};
use serde_json::{Value, json};

use super::{USER, allow, read, wait_packets};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
/// The server's ports: for kube-apiserver, for agents, and for health and metrics.
const PORTS: [u16; 3] = [10708, 10709, 10710];
/// States of a pod of the server: ready at an address of its own, ready at the node's, or the node has no free ports.
const IN_POD: &str = "in a pod";
const AT_NODE: &str = "at the node";
const NO_PORTS: &str = "no free ports";

/// Waits until these are the pods of the server, and the API is served.
#[track_caller]
fn wait_servers(cluster: &Cluster, expected: &[&str]) {
    let node = cluster.address().to_string();
    let state = |pod: &Value| {
        let condition = |kind: &str| {
            let mut all = pod["status"]["conditions"].as_array().into_iter().flatten();
            all.find(|condition| condition["type"] == kind).cloned().unwrap_or_default()
        };
        let scheduled = condition("PodScheduled");
        let has_no_ports = scheduled["message"].as_str().is_some_and(|why| why.contains("free ports"));
        let is_ready =
            condition("Ready")["status"] == "True" && pod["metadata"]["deletionTimestamp"].is_null();
        match is_ready {
            true if pod["status"]["podIP"] == node.as_str() => AT_NODE,
            true => IN_POD,
            false if has_no_ports => NO_PORTS,
            false => "begins or ends",
        }
    };
    eventually(PATIENCE, || {
        let pods = format!("-n {AGENT} get pods -l app.kubernetes.io/component=apiserver -o json");
        let pods: Value = serde_json::from_str(&cluster.try_kubectl(&pods)?).unwrap();
        let mut states: Vec<_> = pods["items"].as_array().unwrap().iter().map(state).collect();
        states.sort_unstable();
        check(states == expected, || format!("{states:?}, and not {expected:?}"))
    });
    cluster.wait_served();
}

/// Which of the ports are open at the node.
fn open(cluster: &Cluster) -> Vec<u16> {
    let is_open = |port: &u16| {
        let server = SocketAddr::new(cluster.address(), *port);
        cluster.host().node().enter(|| TcpStream::connect_timeout(&server, SOON)).is_ok()
    };
    PORTS.into_iter().filter(is_open).collect()
}

/// The components with a NetworkPolicy.
fn policies(cluster: &Cluster) -> Vec<String> {
    let labels = r"jsonpath={.items[*].metadata.labels.app\.kubernetes\.io/component}";
    let components = cluster.kubectl(&format!("-n {AGENT} get networkpolicies -o {labels}"));
    components.split_whitespace().map(str::to_owned).collect()
}

/// The policy lets everyone reach the server's ports, and the server reach kube-apiserver.
#[track_caller]
fn the_policy_is_that_of_the_server(cluster: &Cluster) {
    let spec = cluster.kubectl(&format!("-n {AGENT} get networkpolicy podmirror-apiserver -o json"));
    let spec: Value = serde_json::from_str::<Value>(&spec).unwrap()["spec"].take();
    let ports = |ports: &[Value]| {
        let ports: Vec<_> = ports.iter().map(|port| json!({ "port": port, "protocol": "TCP" })).collect();
        json!({ "ports": ports })
    };
    let ingress = json!([ports(&["https".into(), "agents".into()]), ports(&["metrics".into()])]);
    assert_eq!((&spec["ingress"], &spec["policyTypes"]), (&ingress, &json!(["Ingress", "Egress"])));
    assert_eq!(spec["egress"], json!([ports(&[443.into(), 6443.into()])]));
}

/// A user reads the packets and the report of a pod.
#[track_caller]
fn packets_and_reports_are_served(cluster: &Cluster, [web, db]: [&KubePod; 2]) {
    let reading = read(cluster, "fieldSelector=metadata.name=web&filter=icmp");
    cluster.host().wait_taps(&[&web.device]);
    web.ping(db.ip, 5);
    wait_packets(&reading, 10);
    let reports =
        format!("/apis/packets.podmirror.io/v1alpha1/namespaces/{}/podreports", cluster.namespace());
    let report = cluster.kubectl(&format!("get --raw {reports}/web --as={USER}"));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["metadata"]["name"], &report["nics"][0]["name"]), (&json!("web"), &json!("eth0")));
    reading.kill();
    cluster.host().wait_taps(&[]);
}

/// The value comes and goes by upgrades. Of two replicas on one node, one has its ports and serves, and Helm does not
/// wait for the other one.
#[test]
fn the_server_has_the_network_of_the_node_until_the_value_is_taken_back() {
    let cluster = &Cluster::new("hostnetwork");
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    cluster.uninstall();
    let all = format!("--namespace {AGENT} --wait --timeout {}s", PATIENCE.as_secs());
    let set = |words: &str, values: &str| {
        cluster.helm(&format!("{words} {AGENT} {CHART} {all} --set networkPolicy.enabled=true {values}"));
        cluster.wait_rolled_out();
    };
    let is_in_pods = || {
        wait_servers(cluster, &[IN_POD, IN_POD]);
        assert_eq!(open(cluster), [0_u16; 0]);
        assert_eq!(policies(cluster), ["apiserver", "controller"]);
        the_policy_is_that_of_the_server(cluster);
    };
    let is_at_node = |servers: &[&str]| {
        wait_servers(cluster, servers);
        assert_eq!(open(cluster), PORTS);
        // A NetworkPolicy does not apply to the network of a node.
        assert_eq!(policies(cluster), ["controller"]);
        packets_and_reports_are_served(cluster, [web, db]);
    };
    set("install --create-namespace", "");
    is_in_pods();
    allow(cluster);
    set("upgrade", "--set apiserver.hostNetwork=true");
    is_at_node(&[AT_NODE, NO_PORTS]);
    set("upgrade", "");
    is_in_pods();
    packets_and_reports_are_served(cluster, [web, db]);
    set("upgrade", "--set apiserver.hostNetwork=true --set apiserver.replicas=1");
    is_at_node(&[AT_NODE]);

    cluster.helm(&format!("uninstall {AGENT} {all}"));
    cluster.has_left_nothing();
    eventually(PATIENCE, || check(open(cluster).is_empty(), || "a port is still open".into()));
    assert_eq!(policies(cluster), [""; 0]);
    assert_eq!(cluster.kubectl("get apiservice v1alpha1.packets.podmirror.io --ignore-not-found"), "");
}
