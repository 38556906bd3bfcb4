//! `kubectl mirror` as people use it on their own machine: only through the API server.

mod slow;
mod watching;

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use mirror_tests::{
    Cluster, Conversation, FilePacket, KubePod, OneCpu, PATIENCE, PacketFile, Tail, check, dissected,
    eventually, pod_object, wireshark_finds_nothing_wrong,
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
