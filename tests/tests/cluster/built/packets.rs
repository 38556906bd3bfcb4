//! Outages of the packets API: its parts are killed while packets are read, and it is absent.

use std::{collections::BTreeSet, time::Duration};

use mirror_tests::{AGENT, Cluster, PATIENCE, PacketFile, SOON, check, dissected, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::{nothing_is_lost_during, plugin::tail};

/// The APIService, and the Deployment of the servers.
const API: &str = "v1alpha1.packets.podmirror.io";
const SERVER: &str = "podmirror-apiserver";
/// The exit code of `tail` if a part of the packets is missing.
const INCOMPLETE: i32 = 3;
/// How `tail` reports a time without packets.
const GAP: &str = "no packets were read between ";
/// Number of pings that are read completely after an outage.
const PINGS: usize = 10;

/// Kills the processes with these arguments, and waits until as many others run.
#[track_caller]
fn kill_all(cluster: &Cluster, arguments: &[&str]) {
    let before = cluster.pids_of(arguments);
    assert!(!before.is_empty(), "nothing runs with {arguments:?}");
    for pid in &before {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    }
    eventually(PATIENCE, || {
        let now = cluster.pids_of(arguments);
        let are_others = now.len() == before.len() && now.iter().all(|pid| !before.contains(pid));
        check(are_others, || format!("{arguments:?}: {before:?} were killed, and {now:?} run"))
    });
}

/// The plugin goes on after each outage, says what is missing, and leaves nothing.
#[test]
fn agent_server_and_api_server_are_killed_during_a_stream() {
    let cluster = &Cluster::new("killed");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    let reading = tail(cluster, &["pod/web", "--", "icmp"]);
    host.wait_taps(&[&web.device]);
    let mut size = 100;
    let mut goes_on_after = |outage: &str| {
        let read = || PacketFile::read(reading.path()).packets;
        let before = read().len();
        eventually(PATIENCE, || {
            web.ping(db.ip, 1);
            check(read().len() > before, || format!("nothing is read after {outage}"))
        });
        // From now on nothing is lost. The pings are recognised by their size.
        size += 1;
        web.netns.ping_every(Duration::from_millis(2), db.ip, PINGS, size);
        eventually(SOON, || {
            let is_one = |length: usize| length == 14 + 20 + 8 + size;
            let found = read().iter().filter(|packet| is_one(packet.frame.length)).count();
            check(found == 2 * PINGS, || format!("{found} packets after {outage}"))
        });
    };
    goes_on_after("the start");
    kill_all(cluster, &["run"]);
    goes_on_after("the end of the agent");
    kill_all(cluster, &["apiserver"]);
    goes_on_after("the end of the servers");
    // It has not withdrawn its address: the Service leads to it as soon as it is back.
    kill(Pid::from_raw(cluster.component("kube-apiserver").unwrap()), Signal::SIGKILL).unwrap();
    cluster.stop("kube-apiserver");
    cluster.bring_back();
    goes_on_after("the end of the API server");
    // Nobody reads what was for the earlier streams.
    host.wait_status(|status| {
        let sessions: Vec<_> = status.taps.iter().map(|tap| tap.sessions.len()).collect();
        check(sessions == [1], || format!("{sessions:?} sessions"))
    });
    reading.interrupt();
    let path = reading.path().to_owned();
    let exit = reading.exit();

    assert_eq!(exit.code, Some(INCOMPLETE), "{exit:?}");
    // The server itself goes on after the end of the agent.
    let gaps = exit.stderr.lines().filter(|line| line.contains(GAP)).count();
    assert!(gaps >= 2 && exit.stderr.contains(": its packets are read"), "{exit:?}");
    let file = PacketFile::read(&path);
    let in_file = file.comments.iter().filter(|comment| comment.contains(GAP)).count();
    assert_eq!(in_file, gaps, "{:#?}", file.comments);
    let frames: BTreeSet<_> = file.packets.iter().map(|packet| &packet.frame.bytes).collect();
    assert_eq!(frames.len(), file.packets.len(), "a packet is there twice");
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    // tshark reads the file to its end.
    assert_eq!(dissected(&path, "icmp", &["frame.number"]).len(), file.packets.len());
    host.wait_taps(&[]);
}

/// While the APIService exists without its server, Kubernetes completes the deletion of no namespace, as with any
/// APIService. Without the APIService it does, and mirrors need neither.
#[test]
fn an_absent_server_and_an_uninstallation_hold_up_no_namespace() {
    let cluster = &Cluster::new("absent");
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    cluster.host().wait_taps(&[&web.device]);
    let make = |suffix: &str| {
        let name = format!("{}-{suffix}", cluster.namespace());
        // The label is for the next tests, if this one is killed.
        let metadata = json!({ "name": name, "labels": { "podmirror-story": "" } });
        cluster.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata }));
        name
    };
    let (held, late) = (make("held"), make("late"));
    nothing_is_lost_during(cluster, [web, db], || {
        cluster.kubectl(&format!("-n {AGENT} scale deployment {SERVER} --replicas=0"));
        // The API server's list of its resources is some time old.
        eventually(2 * PATIENCE, || {
            let listed = cluster.try_kubectl("api-resources --output=name")?;
            check(!listed.contains("packets.podmirror.io"), || listed.clone())
        });
        cluster.kubectl(&format!("delete namespace {held} --wait=false"));
        let conditions =
            format!("get namespace {held} -o jsonpath={{.status.conditions[?(@.status==\"True\")].type}}");
        eventually(PATIENCE, || {
            let conditions = cluster.try_kubectl(&conditions)?;
            check(conditions.contains("NamespaceDeletionDiscoveryFailure"), || conditions.clone())
        });
        cluster.kubectl(&format!("delete apiservice {API}"));
        // Kubernetes tries again within a minute.
        eventually(2 * PATIENCE, || {
            let left = cluster.try_kubectl(&format!("get namespace {held} --ignore-not-found -o name"))?;
            check(left.is_empty(), || left.clone())
        });
    });

    cluster.install();
    cluster.uninstall();
    // kubectl waits for the end.
    cluster.kubectl(&format!("delete namespace {late} --timeout={}s", PATIENCE.as_secs()));
    cluster.has_left_nothing();
}
