//! `kubectl mirror` as people use it on their own machine: only through the API server.

mod slow;
mod watching;

use std::{env, process::Command, time::Instant};

use mirror_tests::{
    AGENT, Cluster, Conversation, FilePacket, KubePod, OneCpu, PATIENCE, PacketFile, Pinging, SOON, Tail,
    check, dissected, eventually, pod_object, wireshark_finds_nothing_wrong,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

/// The plugin with these arguments, for the namespace of the story.
pub(crate) fn plugin(cluster: &Cluster, words: &[&str]) -> Command {
    let program = env::var_os("MIRROR_PLUGIN").unwrap();
    let mut plugin = Command::new(program);
    plugin.env("KUBECONFIG", cluster.kubeconfig()).args(words);
    plugin
}

/// The plugin's standard output. It must exit with 0.
#[track_caller]
fn told(cluster: &Cluster, words: &[&str]) -> String {
    let output = plugin(cluster, words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Starts `kubectl mirror tail` with these arguments and a file.
fn tail(cluster: &Cluster, words: &[&str]) -> Tail {
    let file = cluster.host().files().join("plugin.pcapng");
    Tail::of(plugin(cluster, &["tail", "--write"]).arg(&file).args(words), file)
}

/// Creates a Deployment of one pod.
#[track_caller]
fn deploy(cluster: &Cluster, name: &str) {
    workload(cluster, "Deployment", name);
}

/// Creates a workload of one pod.
#[track_caller]
fn workload(cluster: &Cluster, kind: &str, name: &str) {
    let template = pod_object(name, "exec sleep 3600");
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": name },
        "spec": {
            "replicas": 1, "selector": { "matchLabels": { "app": name } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    }));
}

/// Waits until the Deployment has a running pod that is none of these.
#[track_caller]
fn pod_of(cluster: &Cluster, deployment: &str, not: &[&str]) -> KubePod {
    let name = eventually(PATIENCE, || {
        let names = cluster
            .try_kubectl(&format!("get pods -l app={deployment} -o jsonpath={{.items[*].metadata.name}}"))?;
        let new = names.split_whitespace().find(|name| !not.contains(name));
        new.map(str::to_owned).ok_or_else(|| format!("no new pod: {names}"))
    });
    cluster.running(&name)
}

/// The interface name in a file for a pod's NIC.
fn interface(cluster: &Cluster, pod: &KubePod) -> String {
    format!("{}/{} eth0", cluster.namespace(), pod.name)
}

/// The directions of the pings and answers at a pod, in the order of the file.
fn directions(file: &PacketFile, cluster: &Cluster, pod: &KubePod) -> Vec<&'static str> {
    let name = interface(cluster, pod);
    let is_ping = |packet: &&FilePacket| packet.interface == name && packet.frame.bytes[23] == 1;
    file.packets.iter().filter(is_ping).map(|packet| packet.direction).collect()
}

/// Two pods of a Deployment, one after the other, ping and exchange TCP data. Each is read from its first tap on, and
/// Wireshark finds the right names, directions, checksums and order.
#[test]
fn a_deployment_is_read_also_when_its_pod_is_made_anew() {
    let cluster = &Cluster::new("plugin");
    let host = cluster.host();
    deploy(cluster, "web");
    let [db] = &cluster.pods([("db", None)]);
    let first = pod_of(cluster, "web", &[]);
    host.wait_taps(&[]);

    let begun = Instant::now();
    let reading = tail(cluster, &["deploy", "web", "--", "ip"]);
    host.wait_taps(&[&first.device]);
    first.ping(db.ip, 1);
    eventually(SOON, || {
        let seen = directions(&PacketFile::read(reading.path()), cluster, &first).len();
        check(seen == 2, || format!("{seen} packets"))
    });
    eprintln!("from the command to the first packet in the file: {:.2?}", begun.elapsed());
    first.ping(db.ip, 4);
    let converse = |pod: &KubePod| {
        let _in_order = OneCpu::of_this_thread();
        Conversation::between(&pod.netns, &db.netns, db.ip).exchange(200_000);
        Conversation::between(&db.netns, &pod.netns, pod.ip).exchange(200_000);
    };
    converse(&first);
    // The cluster stores the key nowhere.
    let mirrors: Value = serde_json::from_str(&cluster.kubectl("get mirrors -o json")).unwrap();
    let spec = &mirrors["items"][0]["spec"];
    assert_eq!((&spec["filter"], &spec["limits"]["duration"]), (&json!("ip"), &json!("15m")), "{mirrors:#}");
    let table = told(cluster, &["status"]);
    assert!(table.lines().count() == 2 && table.contains(" stream "), "{table}");

    cluster.kubectl(&format!("delete pod {}", first.name));
    let second = pod_of(cluster, "web", &[&first.name]);
    host.wait_taps(&[&second.device]);
    second.ping(db.ip, 5);
    converse(&second);
    let path = reading.path().to_owned();
    let file = reading.stop();
    assert!(file.packets.is_sorted_by_key(|packet| packet.time_ns));
    assert_eq!(file.interfaces.len(), 2, "{:?}", file.interfaces);
    let node = cluster.kubectl("get nodes -o jsonpath={.items[*].metadata.name}");
    assert_eq!(file.hardware, [&node[..]; 2]);
    wireshark_finds_nothing_wrong(&path, file.packets.len(), &["ip", "tcp", "icmp"]);
    let fields = ["frame.interface_name", "frame.packet_flags_direction", "ip.src", "ip.dst", "frame.len"];
    let packets = dissected(&path, "frame", &fields);
    for (pod, statistics) in [&first, &second].into_iter().zip(&file.statistics) {
        assert_eq!(directions(&file, cluster, pod), ["egress", "ingress"].repeat(5), "{:?}", file.interfaces);
        let (name, ip) = (interface(cluster, pod), pod.ip.to_string());
        let own: Vec<_> = packets.iter().filter(|packet| packet[0] == name).collect();
        // The counters count a super-frame once, while the file has several packets for it.
        let (received, lost) = *statistics;
        assert!(lost == 0 && (10..own.len() as u64).contains(&received), "{statistics:?} of {}", own.len());
        // The pod is the source of outbound packets (2), and the destination of inbound packets (1).
        let [sent, received] = [(2, "0x00000002"), (3, "0x00000001")].map(|(address, direction)| {
            let packets: Vec<_> = own.iter().filter(|packet| packet[address] == ip).collect();
            assert!(packets.iter().all(|packet| packet[1] == direction), "{packets:?}");
            let lengths = packets.iter().map(|packet| packet[4].parse::<u64>().unwrap());
            assert!(lengths.clone().max() <= Some(1514) && lengths.sum::<u64>() > 400_000);
            packets.len()
        });
        assert_eq!(sent + received, own.len());
    }
    assert_eq!(cluster.kubectl("get mirrors -o name"), "");
    host.wait_taps(&[]);
}

#[test]
fn a_service_and_a_statefulset_stand_for_their_pods() {
    let cluster = &Cluster::new("chosen");
    let host = cluster.host();
    workload(cluster, "StatefulSet", "web");
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "front" },
        "spec": { "selector": { "app": "web" }, "ports": [{ "port": 80 }] },
    }));
    let [db] = &cluster.pods([("db", None)]);
    let web = &pod_of(cluster, "web", &[]);
    assert_eq!(web.name, "web-0");
    for words in ["sts/web", "svc/front"] {
        let mut reading = tail(cluster, &[words, "--filter", "icmp"]);
        reading.wait_for_log("tail ends after 15m (--duration)");
        host.wait_taps(&[&web.device]);
        web.ping(db.ip, 3);
        let file = reading.stop();
        assert_eq!(directions(&file, cluster, web), ["egress", "ingress"].repeat(3), "{words}");
        assert_eq!((file.interfaces.len(), file.packets.len()), (1, 6), "{words}: {:?}", file.interfaces);
        host.wait_taps(&[]);
    }
    assert_eq!(cluster.kubectl("get mirrors -o name"), "");
}

#[test]
fn a_tail_that_is_killed_or_refused_leaves_no_tap() {
    let cluster = &Cluster::new("killed");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    let reading = tail(cluster, &["pod/web"]);
    // Only the pod with this name is tapped.
    host.wait_taps(&[&web.device]);
    reading.kill();
    host.wait_taps(&[]);
    // The Mirror that remains copies nothing.
    let mirrors = cluster.kubectl("get mirrors -o name");
    assert_eq!(mirrors.lines().count(), 1, "{mirrors}");
    web.ping(db.ip, 3);
    host.wait_taps(&[]);

    // The agent is killed, and the plugin connects again to the next one.
    let mut reading = tail(cluster, &["-l", "app=web", "--", "icmp"]);
    host.wait_taps(&[&web.device]);
    let pid = cluster.agent_pid().unwrap();
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    reading.wait_for_log("; retrying");
    eventually(PATIENCE, || {
        web.ping(db.ip, 1);
        let packets = PacketFile::read(reading.path()).packets.len();
        check(packets > 0, || "the next agent gives no packets yet".into())
    });
    // Statistics of the first agent's stream, if its process had time to count, and of the next one's.
    let file = reading.stop();
    assert_eq!(file.interfaces.len(), 2, "{:?}", file.interfaces);
    let (received, lost) = file.statistics.last().unwrap();
    assert_eq!((*received, *lost), (file.packets.len() as u64, 0), "{:?}", file.statistics);

    let refused = plugin(cluster, &["tail", "deploy/nosuch", "--write", "/dev/null"]).output().unwrap();
    let why = String::from_utf8(refused.stderr).unwrap();
    assert!(
        refused.status.code() == Some(1) && why.contains("deployments.apps \"nosuch\" not found"),
        "{why}"
    );
    host.wait_taps(&[]);
}

#[test]
fn a_mirror_is_switched_on_and_off_and_judged() {
    let cluster = &Cluster::new("onoff");
    let host = cluster.host();
    deploy(cluster, "web");
    let web = pod_of(cluster, "web", &[]);
    told(cluster, &["on", "deploy/web", "--filter", "icmp", "--duration", "1h"]);
    host.wait_taps(&[&web.device]);
    // The status is written some seconds later.
    eventually(3 * SOON, || {
        let list: Value = serde_json::from_str(&told(cluster, &["status", "-o", "json"])).unwrap();
        let [name, covered] =
            ["/metadata/name", "/status/pods/covered"].map(|path| list["items"][0].pointer(path));
        check((name, covered) == (Some(&json!("deploy-web")), Some(&json!(1))), || format!("{list:#}"))
    });
    told(cluster, &["on", "deploy/web", "--direction", "egress"]);
    let mirror: Value = serde_json::from_str(&cluster.kubectl("get mirror deploy-web -o json")).unwrap();
    assert_eq!((&mirror["spec"]["filter"], &mirror["spec"]["direction"]), (&Value::Null, &json!("Egress")));
    told(cluster, &["off", "deploy/web"]);
    host.wait_taps(&[]);
    assert_eq!(told(cluster, &["status"]), "");
}

#[test]
fn the_nodes_say_how_a_pod_is_mirrored_and_what_it_carries() {
    let cluster = &Cluster::new("asked");
    let host = cluster.host();
    let namespace = cluster.namespace();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);

    let text = told(cluster, &["explain", "pod/web"]);
    let place = format!("It is tapped at the node side of its veth, {} ", web.device);
    assert!(text.starts_with(&format!("{namespace}/web is mirrored.\n")) && text.contains(&place), "{text}");
    let text = told(cluster, &["explain", "db"]);
    assert!(text.starts_with(&format!("{namespace}/db is not mirrored.\n")), "{text}");

    let pinging = Pinging::start(&web.netns, db.ip);
    // The agent compares every 2 s, and needs some packets. Before Linux 6.7, ingress cannot be proved to be covered.
    let report = eventually(PATIENCE, || {
        let report: Value = serde_json::from_str(&told(cluster, &["coverage", "-o", "json"])).unwrap();
        let nic = &report["nics"][0];
        let is_seen = |direction: &str| nic[direction]["seen"].as_u64() >= Some(20);
        let is_covered = is_seen("ingress") && is_seen("egress") && nic["egress"]["state"] == "Covered";
        check(is_covered, || format!("{report:#}")).map(|()| report.clone())
    });
    let nic = &report["nics"][0];
    assert_eq!([&nic["namespace"], &nic["pod"], &nic["nic"]], [namespace, "web", "eth0"], "{report:#}");
    assert_eq!(
        (report["nics"].as_array().unwrap().len(), &report["unanswered"]),
        (1, &json!([])),
        "{report:#}"
    );
    let table = told(cluster, &["coverage"]);
    let row = table.lines().nth(1).unwrap();
    assert!(row.starts_with(namespace) && row.contains(" Covered "), "{table}");

    // 20 pings per second, and their answers. On a busy machine, neither these nor the readings are evenly spaced.
    eventually(PATIENCE, || {
        let top = told(cluster, &["top", "-A"]);
        let row: Vec<_> = top.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row[..3], [namespace, "web", "eth0"], "{top}");
        // Rates of packets to the pod, packets from the pod, copied packets, and lost packets.
        let rates = [4, 6, 8, 10].map(|cell| row[cell].parse::<f64>().unwrap_or(f64::NAN));
        let [ingress, egress, copied, lost] = rates;
        let is_near = |rate: f64| (10.0..40.0).contains(&rate);
        let is_right = is_near(ingress) && is_near(egress) && copied >= ingress.max(egress) && lost == 0.0;
        check(is_right, || top.clone())
    });
    pinging.stop();
}

#[test]
fn who_may_not_ask_the_agents_hears_what_the_api_server_knows() {
    let cluster = &Cluster::new("viewer");
    let namespace = cluster.namespace();
    let [web] = &cluster.pods([("web", None)]);
    cluster.apply(&json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": { "name": "mine" },
        "spec": { "podSelector": { "matchLabels": { "app": "web" } }, "filter": "icmp" },
    }));
    cluster.host().wait_taps(&[&web.device]);
    cluster.kubectl("create serviceaccount viewer");
    cluster.kubectl(&format!(
        "create rolebinding viewer --clusterrole=view --serviceaccount={namespace}:viewer"
    ));
    let kubeconfig = cluster.kubeconfig_with(&cluster.kubectl("create token viewer"));
    let asked = |words: &[&str]| {
        let output = plugin(cluster, words).env("KUBECONFIG", &kubeconfig).output().unwrap();
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code().unwrap(), stdout, stderr)
    };
    // A role may take effect a moment later.
    let (code, text, why) = eventually(SOON, || {
        let (code, text, why) = asked(&["explain", "web"]);
        check(text.contains(" selects it. Target: "), || format!("{code} {text} {why}"))
            .map(|()| (code, text, why))
    });
    assert_eq!(code, 0, "{text} {why}");
    assert!(text.contains(&format!("Mirror {namespace}/mine selects it.")), "{text}");
    assert!(text.contains("filter: \"icmp\"\n"), "{text}");
    assert!(text.ends_with("because it gives root on the node.\n") && text.contains(&right()), "{text}");
    assert!(why.contains("cannot read the ClusterMirrors"), "{why}");
    for words in ["coverage", "top"] {
        let (code, text, why) = asked(&[words]);
        assert!(code == 1 && text.is_empty() && why.contains(&right()), "{code} {text} {why}");
    }

    // The administrator gets the agent's answer, that there is no such pod.
    let text = told(cluster, &["explain", "web"]);
    assert!(text.contains("Requested by the Mirror mine of the namespace."), "{text}");
    let missing = plugin(cluster, &["explain", "nosuch"]).output().unwrap();
    let why = String::from_utf8(missing.stderr).unwrap();
    assert!(missing.status.code() == Some(1) && why.contains("pods \"nosuch\" not found"), "{why}");
    // No agent is ready in that namespace: the API server's message is shown, and the command fails.
    let elsewhere = plugin(cluster, &["explain", "web", "--agents", namespace]).output().unwrap();
    let text = String::from_utf8(elsewhere.stdout).unwrap();
    let why = String::from_utf8(elsewhere.stderr).unwrap();
    assert!(elsewhere.status.code() == Some(1) && text.contains("/mine selects it."), "{text} {why}");
    assert!(why.contains("no ready podmirror agent there"), "{why}");
}

/// The agents' own data needs a kubelet, so the stories of the level api only have agents that do not answer.
#[test]
fn check_hears_the_agents_of_a_node_that_works() {
    let cluster = &Cluster::new("checked");
    cluster.host().wait_taps(&[]);
    eventually(PATIENCE, || {
        let output = plugin(cluster, &["check", "-o", "json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap();
        let are_ok = |of: &str| {
            let mut results = findings.iter().filter(|finding| finding["check"] == of);
            results.clone().count() > 0 && results.all(|finding| finding["result"] == "OK")
        };
        let is_well = ["server", "resources", "agents", "versions", "failures"].into_iter().all(are_ok);
        // The results for the kernel and the network depend on this machine.
        check(is_well && output.status.success(), || format!("{report:#}"))
    });
}

/// The right to query the agents, as the plugin names it.
fn right() -> String {
    format!("`list` on pods, and `get` and `create` on pods/exec, in namespace {AGENT}")
}
