//! Packets through the API, with kubectl alone: what its user sees of them, how soon, and for how long.

mod conversations;
mod host_network;

use std::{
    fs::{self, File},
    io,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use mirror_tests::{
    Cluster, PATIENCE, Pinging, Reader, SOON, Tail, check, eventually, list, memory, pod_object,
    random::from_environment, scaled,
};
use serde_json::json;

/// A user whose only right is to read packets.
const USER: &str = "alice";
/// The time from the command to the first packet, and the number of attempts.
const AT_ONCE: Duration = Duration::from_millis(1500);
const ATTEMPTS: usize = 5;
/// The duration of the stories about growth and conversations, unless `MIRROR_GROWTH_SECONDS` says otherwise.
const SECONDS: u64 = 10;
/// Requests before the first measurement: buffers and pools have their size then.
const FIRST: usize = 5;
/// How much larger a process may be at the end: memory in MiB, descriptors and threads. A request that leaves 6 KiB
/// would exceed it within half an hour.
const GROWTH: f64 = 8.0;
const FEW: usize = 8;

/// `kubectl get --raw` for packets of the story's namespace, with more parameters.
fn packets(cluster: &Cluster, parameters: &str) -> Command {
    let api = "/apis/packets.podmirror.io/v1alpha1/namespaces";
    let namespace = cluster.namespace();
    cluster.command(&format!("get --raw {api}/{namespace}/packets?watch=true&{parameters} --as={USER}"))
}

/// Gives the user the right, as the documents say, and waits until it takes effect.
#[track_caller]
fn allow(cluster: &Cluster) {
    cluster.kubectl(&format!("create rolebinding reader --clusterrole=podmirror-packets --user={USER}"));
    eventually(SOON, || {
        let output = packets(cluster, "labelSelector=none&timeoutSeconds=1").output().unwrap();
        check(output.status.success(), || format!("{output:?}"))
    });
}

/// Starts to read packets into a file.
fn read(cluster: &Cluster, parameters: &str) -> Tail {
    let file = cluster.host().files().join("packets.pcapng");
    Tail::of(packets(cluster, parameters).stdout(File::create(&file).unwrap()), file)
}

/// Waits until the file has this number of packets.
#[track_caller]
fn wait_packets(reading: &Tail, count: usize) {
    eventually(PATIENCE, || {
        let found = reading.file().packets.len();
        check(found == count, || format!("{found} packets, and not {count}"))
    });
}

/// The user starts one command, and tshark shows who talks with whom.
#[test]
fn kubectl_alone_shows_conversations_and_names() {
    let cluster = &Cluster::new("alone");
    let (host, namespace) = (cluster.host(), cluster.namespace());
    let server = "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www";
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "front" },
        "spec": { "selector": { "app": "db" }, "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    cluster.apply(&list(&[pod_object("web", "exec sleep 3600"), pod_object("db", server), service]));
    let (web, db) = (&cluster.running("web"), &cluster.running("db"));
    allow(cluster);
    let (from_kubectl, to_tshark) = io::pipe().unwrap();
    let mut command = packets(cluster, "filter=tcp+port+8080");
    let kubectl = Tail::of(command.stdout(to_tshark), PathBuf::from("-"));
    // The command holds the other end of the pipe, too.
    drop(command);
    let mut tshark = Command::new("tshark");
    tshark.args(["-i", "-", "-l", "-N", "n", "-z", "conv,tcp", "-z", "hosts", "-T", "fields"]);
    tshark.args(["-e", "frame.interface_name", "-e", "ip.src_host", "-e", "ip.dst_host"]);
    let mut tshark = Reader::fed_by(host, "tshark", tshark, from_kubectl);
    host.wait_taps(&[&web.device, &db.device]);
    let fetch = format!("exec web -- timeout 5 wget -q -O - http://{}:8080/", db.ip);
    // The server may not listen yet.
    eventually(SOON, || cluster.try_kubectl(&fetch));
    let [of_web, of_db] = ["web", "db"].map(|pod| format!("{pod}.{namespace}"));
    for pod in ["web", "db"] {
        tshark.wait_for(&format!("{namespace}/{pod} eth0\t{of_web}\t{of_db}\n"));
        tshark.wait_for(&format!("{namespace}/{pod} eth0\t{of_db}\t{of_web}\n"));
    }
    kubectl.kill();
    let shown = tshark.wait();
    // "web.shop:41234  <-> db.shop:8080  ..."
    let [one, other] = [format!("{of_web}:"), format!("{of_db}:8080")];
    let is_conversation =
        |line: &str| ["<->", one.as_str(), other.as_str()].iter().all(|part| line.contains(*part));
    assert!(shown.lines().any(is_conversation), "{shown}");
    let address = cluster.kubectl("get service front -o jsonpath={.spec.clusterIP}");
    let of_service = format!("{address}\tfront.{namespace}.svc");
    assert!(shown.lines().any(|line| line == of_service), "{shown}");
    host.wait_taps(&[]);
}

#[test]
fn the_first_packet_comes_within_1500_ms() {
    let cluster = &Cluster::new("soon");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    allow(cluster);
    let pinging = Pinging::start(&web.netns, db.ip);
    let times = [(); ATTEMPTS].map(|()| {
        host.wait_taps(&[]);
        let begun = Instant::now();
        let reading = read(cluster, "fieldSelector=metadata.name=web");
        eventually(PATIENCE, || check(!reading.file().packets.is_empty(), || "no packet yet".into()));
        let took = begun.elapsed();
        reading.kill();
        took
    });
    pinging.stop();
    eprintln!("from the command to the first packet: {times:.2?}");
    // The machine has other work, too, so not each attempt counts.
    assert!(times.iter().min() < Some(&scaled(AT_ONCE)), "{times:?}");
    host.wait_taps(&[]);
}

/// A request by name is for the next pod with this name, too, and its file has one section.
#[test]
fn a_replaced_pod_is_read_on() {
    let cluster = &Cluster::new("replaced");
    let host = cluster.host();
    let template = pod_object("web", "exec sleep 3600");
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "web" },
        "spec": {
            "serviceName": "web", "replicas": 1, "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    }));
    let [db] = &cluster.pods([("db", None)]);
    eventually(PATIENCE, || cluster.try_kubectl("get pod web-0").map(drop));
    let first = cluster.running("web-0");
    allow(cluster);
    let reading = read(cluster, "fieldSelector=metadata.name=web-0&filter=icmp");
    host.wait_taps(&[&first.device]);
    first.ping(db.ip, 5);
    wait_packets(&reading, 10);
    cluster.kubectl("delete pod web-0");
    eventually(PATIENCE, || {
        let uid = cluster.try_kubectl("get pod web-0 -o jsonpath={.metadata.uid}")?;
        check(uid != first.uid, || "it is the former one".into())
    });
    let second = cluster.running("web-0");
    host.wait_taps(&[&second.device]);
    second.ping(db.ip, 5);
    wait_packets(&reading, 20);
    let file = reading.file();
    let name = format!("{}/web-0 eth0", cluster.namespace());
    assert_eq!(file.interfaces, [&name[..]; 2]);
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    reading.kill();
    host.wait_taps(&[]);
}

/// Memory in MiB, open descriptors and threads of a process.
#[track_caller]
fn usage(pid: u32) -> (f64, usize, usize) {
    let count = |of: &str| fs::read_dir(format!("/proc/{pid}/{of}")).unwrap().count();
    (memory(pid).0, count("fd"), count("task"))
}

/// While one request lasts, others begin and end. `MIRROR_GROWTH_SECONDS=1800` makes it half an hour.
#[test]
fn half_an_hour_without_growth() {
    let time = Duration::from_secs(from_environment("MIRROR_GROWTH_SECONDS", || SECONDS));
    let cluster = &Cluster::new("growth");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    allow(cluster);
    let reading = read(cluster, "fieldSelector=metadata.name=web&filter=icmp");
    host.wait_taps(&[&web.device]);
    let pinging = Pinging::start(&web.netns, db.ip);
    let request = || {
        let output = packets(cluster, "timeoutSeconds=1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let processes = || [cluster.pids_of(&["run"]), cluster.pids_of(&["apiserver"])].concat();
    (0..FIRST).for_each(|_| request());
    let pids = processes();
    assert!(pids.len() > 1, "{pids:?}");
    let before: Vec<_> = pids.iter().map(|pid| usage(*pid)).collect();
    let (begun, mut requests) = (Instant::now(), 0);
    while begun.elapsed() < time {
        request();
        requests += 1;
    }
    let after = eventually(SOON, || {
        let after: Vec<_> = pids.iter().map(|pid| usage(*pid)).collect();
        let is_small = after.iter().zip(&before).all(|(after, before)| {
            after.0 < before.0 + GROWTH && after.1 <= before.1 + FEW && after.2 <= before.2 + FEW
        });
        check(is_small, || format!("agent and servers: {before:.1?} and then {after:.1?}"))?;
        Ok(after)
    });
    eprintln!("MiB, descriptors and threads after {requests} requests: {before:.1?} and then {after:.1?}");
    assert_eq!(processes(), pids, "a process has ended meanwhile");
    let sent = pinging.stop();
    wait_packets(&reading, 2 * sent);
    let statistics = reading.file().statistics;
    assert!(statistics.iter().all(|(_, lost)| *lost == 0), "{statistics:?}");
    reading.kill();
    host.wait_taps(&[]);
}
