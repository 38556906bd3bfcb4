//! `kubectl mirror` as people use it on their own machine: only through the API server.

mod slow;
mod watching;

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use mirror_tests::{
    Cluster, Conversation, FilePacket, KubePod, OneCpu, PATIENCE, PacketFile, Pinging, SOON, Tail, check,
    dissected, eventually, pod_object, wireshark_finds_nothing_wrong,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

/// The time after which `tail` has counters of packets that it has read.
const COUNTED: Duration = Duration::from_secs(5);
/// The exit code of `tail` if a part of the packets is missing.
const INCOMPLETE: i32 = 3;

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
pub(crate) fn tail(cluster: &Cluster, words: &[&str]) -> Tail {
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

/// Waits until the file has this number of pings and answers at a pod. It has all earlier packets then.
#[track_caller]
fn wait_pings(reading: &Tail, cluster: &Cluster, pod: &KubePod, count: usize) {
    eventually(PATIENCE, || {
        let seen = directions(&PacketFile::read(reading.path()), cluster, pod).len();
        check(seen == count, || format!("{seen} packets"))
    });
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
    wait_pings(&reading, cluster, &first, 2);
    eprintln!("from the command to the first packet in the file: {:.2?}", begun.elapsed());
    first.ping(db.ip, 4);
    // All of it fits into a burst of `--max-rate`: 50 ms at 100 Mbit/s.
    let converse = |pod: &KubePod| {
        let _in_order = OneCpu::of_this_thread();
        Conversation::between(&pod.netns, &db.netns, db.ip).exchange(100_000);
        Conversation::between(&db.netns, &pod.netns, pod.ip).exchange(100_000);
    };
    converse(&first);
    // The cluster stores nothing.
    assert_eq!(cluster.kubectl("get mirrors -o name"), "");

    cluster.kubectl(&format!("delete pod {}", first.name));
    let second = pod_of(cluster, "web", &[&first.name]);
    host.wait_taps(&[&second.device]);
    converse(&second);
    second.ping(db.ip, 5);
    wait_pings(&reading, cluster, &second, 10);
    // The counters come each second. They are written at the end.
    let read = Instant::now();
    eventually(PATIENCE, || check(read.elapsed() > COUNTED, || "there may be no counters yet".into()));
    let path = reading.path().to_owned();
    let file = reading.stop();
    assert!(file.packets.is_sorted_by_key(|packet| packet.time_ns));
    assert_eq!(file.interfaces.len(), 2, "{:?}", file.interfaces);
    let node = cluster.kubectl("get nodes -o jsonpath={.items[*].metadata.name}");
    assert_eq!(file.hardware, [&node[..]; 2]);
    wireshark_finds_nothing_wrong(&path, file.packets.len(), &["ip", "tcp", "icmp"]);
    let fields = ["frame.interface_name", "frame.packet_flags_direction", "ip.src", "ip.dst", "frame.len"];
    let packets = dissected(&path, "frame", &fields);
    // Counters can be some seconds old. They count a super-frame once, while the file has several packets for it.
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    assert!(file.limited.iter().all(|limited| *limited == 0), "{:?}", file.limited);
    let received: u64 = file.statistics.iter().map(|(received, _)| received).sum();
    assert!((1..packets.len() as u64).contains(&received), "{:?} of {}", file.statistics, packets.len());
    for pod in [&first, &second] {
        assert_eq!(directions(&file, cluster, pod), ["egress", "ingress"].repeat(5), "{:?}", file.interfaces);
        let (name, ip) = (interface(cluster, pod), pod.ip.to_string());
        let own: Vec<_> = packets.iter().filter(|packet| packet[0] == name).collect();
        // The pod is the source of outbound packets (2), and the destination of inbound packets (1).
        let [sent, received] = [(2, "0x00000002"), (3, "0x00000001")].map(|(address, direction)| {
            let packets: Vec<_> = own.iter().filter(|packet| packet[address] == ip).collect();
            assert!(packets.iter().all(|packet| packet[1] == direction), "{packets:?}");
            let lengths = packets.iter().map(|packet| packet[4].parse::<u64>().unwrap());
            assert!(lengths.clone().max() <= Some(1514) && lengths.sum::<u64>() > 200_000);
            packets.len()
        });
        assert_eq!(sent + received, own.len());
    }
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
        let mut reading = tail(cluster, &[words, "--", "icmp"]);
        reading.wait_for_log("tail ends after 15m (--duration)");
        host.wait_taps(&[&web.device]);
        web.ping(db.ip, 3);
        wait_pings(&reading, cluster, web, 6);
        let file = reading.stop();
        assert_eq!(directions(&file, cluster, web), ["egress", "ingress"].repeat(3), "{words}");
        assert_eq!((file.interfaces.len(), file.packets.len()), (1, 6), "{words}: {:?}", file.interfaces);
        host.wait_taps(&[]);
    }
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

    // The agent is killed, and the server reads on from the next one.
    let mut reading = tail(cluster, &["-l", "app=web", "--", "icmp"]);
    host.wait_taps(&[&web.device]);
    let pid = cluster.agent_pid().unwrap();
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    reading.wait_for_log(": its packets are read");
    eventually(PATIENCE, || {
        web.ping(db.ip, 1);
        let packets = PacketFile::read(reading.path()).packets.len();
        check(packets > 0, || "the next agent gives no packets yet".into())
    });
    reading.interrupt();
    let (code, file) = reading.end();
    assert_eq!(code, Some(INCOMPLETE), "{:#?}", file.comments);
    assert_eq!(file.interfaces.len(), 2, "one of each agent's stream: {:?}", file.interfaces);
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);

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
        // The pods are in the order of their names.
        let nic = &report["items"][1]["nics"][0];
        let is_seen = |direction: &str| nic[direction]["seen"].as_u64() >= Some(20);
        let is_covered = is_seen("ingress") && is_seen("egress") && nic["egress"]["state"] == "Covered";
        check(is_covered, || format!("{report:#}")).map(|()| report.clone())
    });
    let [of_db, of_web] = [0, 1].map(|pod| &report["items"][pod]);
    assert_eq!(of_web["metadata"], json!({ "namespace": namespace, "name": "web" }), "{report:#}");
    assert_eq!((&of_web["nics"][0]["name"], &of_db["nics"]), (&json!("eth0"), &json!([])), "{report:#}");
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
fn a_user_needs_rights_on_the_api_of_packets_and_none_on_the_agents() {
    let cluster = &Cluster::new("viewer");
    let namespace = cluster.namespace();
    let [web] = &cluster.pods([("web", Some("true"))]);
    cluster.host().wait_taps(&[&web.device]);
    cluster.kubectl("create serviceaccount viewer");
    let bind = |role: &str| {
        let of = format!("--clusterrole={role} --serviceaccount={namespace}:viewer");
        cluster.kubectl(&format!("create rolebinding {role} {of}"));
    };
    bind("view");
    let kubeconfig = cluster.kubeconfig_with(&cluster.kubectl("create token viewer"));
    let asked = |words: &[&str]| {
        let output = plugin(cluster, words).env("KUBECONFIG", &kubeconfig).output().unwrap();
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code().unwrap(), stdout, stderr)
    };
    // A role may take effect a moment later.
    let wait = |words: &[&str]| {
        eventually(SOON, || {
            let (code, text, why) = asked(words);
            check(code == 0, || why).map(|()| text)
        })
    };
    wait(&["status"]);
    let commands: [&[&str]; 4] = [
        &["explain", "web"],
        &["coverage"],
        &["top"],
        &["tail", "web", "--duration", "1s", "--write", "/dev/null"],
    ];
    let is_refused = |words: &[&str]| {
        let (code, text, why) = asked(words);
        let is_refused = why.starts_with("Error from server (Forbidden): ");
        assert!(code == 1 && text.is_empty() && is_refused, "{words:?}: {code} {text} {why}");
    };
    commands.into_iter().for_each(is_refused);

    bind("podmirror-packets");
    let text = wait(&["explain", "web"]);
    assert!(text.starts_with(&format!("{namespace}/web is mirrored.\n")), "{text}");
    for words in commands {
        let (code, _, why) = asked(words);
        assert_eq!(code, 0, "{words:?}: {why}");
    }
    // The role is that of one namespace.
    is_refused(&["explain", "-A", "web"]);
    let everywhere = told(cluster, &["explain", "-A", "web"]);
    assert!(everywhere.contains(&text[..text.find('\n').unwrap()]), "{everywhere}");
    let (code, _, why) = asked(&["explain", "nosuch"]);
    assert!(code == 1 && why.contains("pods \"nosuch\" not found"), "{why}");
}

/// The stories of the level api install no server of packets.
#[test]
fn check_finds_a_node_and_a_server_that_work() {
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
        let is_well = ["server", "resources", "agents", "versions", "packets"].into_iter().all(are_ok);
        // The results for the kernel and the network depend on this machine.
        check(is_well && output.status.success(), || format!("{report:#}"))
    });
}
