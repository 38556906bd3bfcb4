//! Suricata reads copies: on the node's network, in a pod of its own, and from a stream.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream, UdpSocket},
    path::Path,
    thread,
};

use mirror_tests::{
    Agent, MIRROR, PodNs, PodSpec, PodsFile, Reader, Recipe, SOON, Tail, check, eventually, scaled,
};
use nix::sys::signal::Signal;

use crate::{Node, any_mode, streams::ends_well};

/// The number of the rule for pings, and those of the other rules.
const PING: u64 = 1_000_001;
const OTHERS: [u64; 3] = [1_000_002, 1_000_003, 1_000_004];
const LOG: &str = "/var/log/suricata/eve.json";

/// An alert: from, to, and the number of its rule.
type Alert = (String, String, u64);

/// The alerts so far, sorted.
fn alerts(log: &Path) -> Vec<Alert> {
    let text = fs::read_to_string(log).unwrap_or_default();
    // Suricata may still be writing the last line.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let events = whole.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let text_of = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let mut alerts: Vec<_> = events
        .filter(|event| event["event_type"] == "alert")
        .map(|event| {
            let number = event["alert"]["signature_id"].as_u64().unwrap();
            (text_of(&event["src_ip"]), text_of(&event["dest_ip"]), number)
        })
        .collect();
    alerts.sort();
    alerts
}

/// The alerts, without those of pings.
fn told(log: &Path) -> Vec<Alert> {
    alerts(log).into_iter().filter(|alert| alert.2 != PING).collect()
}

/// One alert per rule, from one pod to another.
fn once(from: &PodNs, to: &PodNs) -> Vec<Alert> {
    OTHERS.map(|rule| (from.v4().to_string(), to.v4().to_string(), rule)).to_vec()
}

/// Triggers each rule except that for pings once: a datagram, the end of a long upload, a request.
fn provoke(from: &PodNs, to: &PodNs) {
    let receiver = to.netns().enter(|| UdpSocket::bind((to.v4(), 0))).unwrap();
    let sender = from.netns().enter(|| UdpSocket::bind((from.v4(), 0))).unwrap();
    sender.send_to(b"open sesame", receiver.local_addr().unwrap()).unwrap();
    // The text leaves the pod in super-frames.
    converse(from, to, &("-".repeat(500_000) + "open sesame"), "thanks");
    let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    converse(from, to, "GET /admin HTTP/1.1\r\nHost: db\r\n\r\n", answer);
}

/// One pod sends a text to the other, which answers. Then both close.
fn converse(from: &PodNs, to: &PodNs, text: &str, answer: &str) {
    let listener = to.netns().enter(|| TcpListener::bind((to.v4(), 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let mut client = from.netns().enter(|| TcpStream::connect_timeout(&address, scaled(SOON))).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(scaled(SOON))).unwrap();
        stream.set_write_timeout(Some(scaled(SOON))).unwrap();
    }
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(text.as_bytes()).unwrap());
        let mut received = vec![0; text.len()];
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, text.as_bytes());
    });
    server.write_all(answer.as_bytes()).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let mut received = String::new();
    client.read_to_string(&mut received).unwrap();
    assert_eq!(received, answer);
}

/// Waits until Suricata reports pings: it prints that it has started before it reads.
fn wait_until_it_reads(node: &Node, log: &Path) {
    eventually(3 * SOON, || {
        node.web.ping(node.db.v4(), 1, 56);
        check(!alerts(log).is_empty(), || "no alert of a ping".into())
    });
}

/// Pings can be missed while Suricata starts, so only their source and destination are checked.
fn only_web_pings(node: &Node, log: &Path) {
    let Node { web, db, .. } = node;
    let is_one = |alert: &Alert| {
        alert.2 != PING || (&alert.0, &alert.1) == (&web.v4().to_string(), &db.v4().to_string())
    };
    assert!(alerts(log).iter().all(is_one), "{:?}", alerts(log));
}

/// Triggers alerts from both pods, the mirrored one and another one, and ends Suricata.
fn tells_of_the_mirrored_pod_alone(node: &Node, quiet: &PodNs, log: &Path, suricata: Reader) {
    let Node { web, db, lab } = node;
    quiet.ping(db.v4(), 2, 56);
    wait_until_it_reads(node, log);
    provoke(quiet, db);
    provoke(web, db);
    eventually(SOON, || {
        let alerts = told(log);
        check(alerts.len() >= OTHERS.len(), || format!("{alerts:?}"))
    });
    suricata.stop(Signal::SIGTERM);
    assert_eq!(told(log), once(web, db));
    only_web_pings(node, log);
    let status = lab.status();
    assert_eq!(status.taps.len(), 1);
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.total("copied"), tap.seen(), "{tap:?}");
}

#[test]
fn on_the_nodes_network_it_tells_of_the_mirrored_pod_once() {
    let node = &Node::new("ids-node");
    let Node { web, lab, .. } = node;
    let quiet = lab.pod("quiet", "br0");
    let before = lab.network_state();
    let recipe = Recipe::of(lab, "suricata-node");
    assert!(recipe.is_on_the_nodes_network() && recipe.words().contains(&MIRROR));
    // If a Suricata pod starts before the agent, it exits, and the kubelet restarts it.
    let too_early = recipe.command(lab.node()).output().unwrap();
    assert_eq!(too_early.status.code(), Some(1), "{too_early:?}");

    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(&quiet)]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let offloads = lab.node().run(&format!("ethtool -k {MIRROR}"));
    let suricata = Reader::start(lab, "suricata", recipe.command(lab.node()));
    tells_of_the_mirrored_pod_alone(node, &quiet, &recipe.file(LOG), suricata);
    assert_eq!(lab.node().run(&format!("ethtool -k {MIRROR}")), offloads);
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}

#[test]
fn in_a_pod_of_its_own_it_needs_one_capability() {
    let node = &Node::new("ids-pod");
    let Node { web, lab, .. } = node;
    let (quiet, ids) = (lab.pod("quiet", "br0"), lab.pod("ids", "br0"));
    ids.ping(web.v4(), 2, 56);
    let before = lab.network_state();
    let offloads = || ids.netns().run("ethtool -k eth0");
    let offloads_before = offloads();
    let recipe = Recipe::of(lab, "suricata");
    assert!(!recipe.is_on_the_nodes_network());
    let key = "app.kubernetes.io/name";
    let web_spec = PodSpec::of(web).mirror("true").annotated("podmirror.io/target", "ids");
    let ids_spec = PodSpec::of(&ids).mirror("false").labelled(key, recipe.label(key));
    let pods = PodsFile::new(lab, &[web_spec, ids_spec, PodSpec::of(&quiet)]);
    let target = format!("ids=pod:default/{key}=suricata");
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--define-target", &target], &[web]);
    lab.wait_status(|status| check(status.target("ids").up, || "the target is down".into()));

    let suricata = Reader::start(lab, "suricata", recipe.command(ids.netns()));
    tells_of_the_mirrored_pod_alone(node, &quiet, &recipe.file(LOG), suricata);
    assert_eq!(offloads(), offloads_before);
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}

/// No mirror, no annotation, and a reader without any capability.
#[test]
fn from_a_stream_it_tells_of_the_captured_pod() {
    let node = &Node::new("ids-stream");
    let Node { web, db, lab } = node;
    let quiet = lab.pod("quiet", "br0");
    quiet.ping(db.v4(), 2, 56);
    let recipe = Recipe::of(lab, "suricata");
    let agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(&quiet)], &[], &[]);
    let words =
        ["suricata", "-c", "/etc/ids/suricata.yaml", "-S", "/etc/ids/local.rules", "-l", "/var/log/suricata"];
    let suricata = recipe.command_of(lab.node(), &[&words[..], &["-r", "/dev/stdin"]].concat());
    let (tail, pipe) = Tail::piped(lab, &["tail", "--pod", "default/web"]);
    let suricata = Reader::fed_by(lab, "suricata", suricata, pipe);
    let log = recipe.file(LOG);
    wait_until_it_reads(node, &log);
    provoke(&quiet, db);
    provoke(web, db);
    eventually(SOON, || {
        let alerts = told(&log);
        check(alerts.len() >= OTHERS.len(), || format!("{alerts:?}"))
    });
    ends_well(tail);
    let said = suricata.wait();
    assert_eq!(told(&log), once(web, db), "{said}");
    only_web_pings(node, &log);
    agent.stop();
    lab.cleanup();
}
