//! Tests: agents and a server over connections in memory, with an API server that knows some tokens.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use http_body_util::Full;
use hyper::{Response, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::TokioExecutor;
use mirror_api::{
    SettingsSpec,
    packets::{ReadRequest, ReportRequest},
};
use mirror_common::verdict::Verdict;
use mirror_core::{
    model::PodId,
    status::{AttachedStatus, CounterStatus, LeftStatus, NodeStatus, Notes, SessionStatus, TapStatus},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
    join,
    sync::{Notify, Semaphore},
};

use super::*;
use crate::{
    apiserver::agents::{Agent, AgentOptions, Agents},
    report::Report,
    sources::kube::tests::fake::{self, Reply},
};

/// The API server's opinion on the token of a review.
fn reviewed(review: &Value) -> Value {
    assert_eq!(review["spec"]["audiences"], json!([GROUP]));
    let of = |account: &str, audience: &str, extra: &[(&str, &str)]| {
        let extra =
            extra.iter().map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), json!([value])));
        let extra: serde_json::Map<_, _> = extra.collect();
        let user =
            json!({ "username": format!("system:serviceaccount:podmirror:{account}"), "extra": extra });
        json!({ "authenticated": true, "audiences": [audience], "user": user })
    };
    let node_1 = [("node-name", "node-1"), ("pod-name", "agent-1"), ("pod-uid", "1")];
    let status = match review["spec"]["token"].as_str().unwrap() {
        "agent-1" => of("podmirror", GROUP, &node_1),
        "agent-2" => of("podmirror", GROUP, &[("pod-name", "agent-2"), ("pod-uid", "2")]),
        "of-a-replaced-pod" => of("podmirror", GROUP, &[("pod-name", "agent-2"), ("pod-uid", "1")]),
        "of-a-deleted-pod" => of("podmirror", GROUP, &[("pod-name", "agent-3"), ("pod-uid", "3")]),
        "of-no-pod" => of("podmirror", GROUP, &[]),
        "of-the-controller" => of("podmirror-controller", GROUP, &node_1),
        "of-another-audience" => of("podmirror", "https://kubernetes.default.svc", &node_1),
        _ => json!({ "authenticated": false, "error": "the token has expired" }),
    };
    let mut review = review.clone();
    review["status"] = status;
    review
}

/// A server, and the API server behind it.
struct Server {
    agents: Agents,
    client: Client,
    options: AgentOptions,
}

impl Server {
    fn new() -> Self {
        let client = fake::client_with_bodies(|request, body| match request.uri().path() {
            "/apis/authentication.k8s.io/v1/tokenreviews" => Reply::Object(reviewed(body)),
            "/api/v1/namespaces/podmirror/pods/agent-2" => Reply::Object(json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "agent-2", "uid": "2" },
                "spec": { "containers": [], "nodeName": "node-2" },
            })),
            _ => Reply::Status(404),
        });
        let options =
            AgentOptions { namespace: "podmirror".to_owned(), service_account: "podmirror".to_owned() };
        Self { agents: Agents::default(), client, options }
    }

    /// Connects an agent with this token.
    async fn connect(&self, token: &str) -> anyhow::Result<Upgraded> {
        let (agent, stream) = duplex(1 << 16);
        let serving = self.agents.serve(&self.client, &self.options, stream);
        let (connection, ()) = join!(become_agent(agent, "server", token), serving);
        connection
    }

    /// Connects the agent of node-1, which is not ready. Returns its task, too.
    async fn agent(&self) -> (Agent, JoinHandle<hyper::Result<()>>) {
        let before = self.agents.watch().borrow().get("node-1").map(|agent| agent.id);
        let connection = self.connect("agent-1").await.unwrap();
        let (_, reports) = watch::channel(Arc::new(Report::default()));
        let node = Arc::new(Node::new(reports, PathBuf::new(), Duration::from_secs(60)));
        let serving = tokio::spawn(async move { serve::serve(&node, connection).await });
        let mut agents = self.agents.watch();
        let is_new = |agent: &Agent| Some(agent.id) != before;
        let agents = agents.wait_for(|agents| agents.get("node-1").is_some_and(is_new)).await.unwrap();
        (agents["node-1"].clone(), serving)
    }
}

fn packets() -> ReadRequest {
    serde_json::from_value(json!({
        "of": { "pods": { "namespace": "shop", "name": null, "labels": {}, "nics": null } }, "direction": null,
        "settings": {}, "superFrames": false, "sinceSeconds": null, "follow": true, "reader": "alice",
    }))
    .unwrap()
}

#[tokio::test]
async fn an_agent_speaks_for_the_node_of_its_token() {
    let server = Server::new();
    for (token, why) in [
        ("", "401 Unauthorized: there is no token"),
        ("expired", "401 Unauthorized: the token is not valid"),
        ("of-another-audience", "401 Unauthorized: the token is not valid"),
        (
            "of-the-controller",
            "403 Forbidden: the token is not one of system:serviceaccount:podmirror:podmirror",
        ),
        ("of-no-pod", "403 Forbidden: the token is bound to no pod"),
        ("of-a-replaced-pod", "403 Forbidden: the pod podmirror/agent-2 of the token is on no node"),
        ("of-a-deleted-pod", "403 Forbidden: the pod podmirror/agent-3 of the token is on no node"),
    ] {
        let error = server.connect(token).await.unwrap_err().to_string();
        assert!(error.contains(why), "{token}: {error}");
    }
    assert!(server.agents.watch().borrow().is_empty());
    for (token, node) in [("agent-1", "node-1"), ("agent-2", "node-2")] {
        let connection = server.connect(token).await.unwrap();
        server.agents.watch().wait_for(|agents| agents.keys().eq([node])).await.unwrap();
        drop(connection);
        server.agents.watch().wait_for(BTreeMap::is_empty).await.unwrap();
    }
}

#[tokio::test]
async fn the_newest_connection_of_a_node_gets_the_requests() {
    let server = Server::new();
    let (older, first) = server.agent().await;
    let (newer, second) = server.agent().await;
    assert!(newer.id > older.id);
    let request = packets();
    let refusal = newer.read(&request).await.unwrap_err();
    assert_eq!((refusal.code, refusal.retry), (503, Some(5)), "{refusal:?}");
    assert!(refusal.message.contains("not ready yet"), "{refusal:?}");
    let settings = SettingsSpec { filter: Some("tcp port".to_owned()), ..SettingsSpec::default() };
    let refusal = newer.read(&ReadRequest { settings, ..request.clone() }).await.unwrap_err();
    assert_eq!((refusal.code, refusal.retry), (400, None), "{refusal:?}");
    assert!(refusal.message.contains("filter \"tcp port\""), "{refusal:?}");

    // The older connection is open while somebody uses it.
    assert_eq!(older.read(&request).await.unwrap_err().code, 503);
    drop(older);
    // It ends with or without an error.
    let _ = first.await.unwrap();
    let agents = server.agents.watch();
    assert_eq!(agents.borrow()["node-1"].id, newer.id);
    second.abort();
    server.agents.watch().wait_for(BTreeMap::is_empty).await.unwrap();
    assert_eq!(newer.read(&request).await.unwrap_err().code, 503);
}

/// Users see it in their terminals: the reason for a refusal, and why reports cannot be parsed.
#[tokio::test]
async fn a_text_of_an_agent_is_cut_and_printable() {
    let server = Server::new();
    let connection = server.connect("agent-1").await.unwrap();
    let long = "\x1b[2J".to_owned() + &"x".repeat(60_000);
    let answer = service_fn(move |request: Request<Incoming>| {
        let (status, text) = match request.uri().path() {
            "/v1/packets" => (StatusCode::SERVICE_UNAVAILABLE, long.clone()),
            _ => (StatusCode::OK, json!([long]).to_string()),
        };
        async move { Response::builder().status(status).body(Full::<Bytes>::from(text)) }
    });
    tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(connection, answer));
    let mut agents = server.agents.watch();
    let agents = agents.wait_for(|agents| agents.contains_key("node-1")).await.unwrap();
    let agent = agents["node-1"].clone();
    drop(agents);
    let request = ReportRequest { namespace: None, name: None, interval_millis: None };
    let [read, reports] = [agent.read(&packets()).await.map(drop), agent.reports(&request).await.map(drop)];
    for refusal in [read.unwrap_err(), reports.unwrap_err()] {
        let message = &refusal.message;
        assert!(message.contains(r"\u{1b}[2Jxxx"), "{message}");
        assert!(message.len() < 2048 && !message.contains(char::is_control), "{message}");
    }
}

/// The node has no state to report, and says so to each.
#[tokio::test]
async fn requests_for_reports_wait_for_those_before_them() {
    let server = Server::new();
    let (agent, _serving) = server.agent().await;
    let request = ReportRequest { namespace: None, name: None, interval_millis: None };
    let answers = join_all((0..12).map(|_| agent.reports(&request))).await;
    for refusal in answers.into_iter().map(Result::unwrap_err) {
        assert_eq!(refusal.code, 503, "{refusal:?}");
        assert!(refusal.message.contains("no podmirror state"), "{refusal:?}");
    }
}

/// The status of a node with a tap and this number of packets.
fn with_packets(packets: u64) -> NodeStatus {
    let counter = CounterStatus {
        direction: "ingress".into(),
        result: Verdict::Copied.name().into(),
        packets,
        bytes: packets * 100,
    };
    let session = SessionStatus {
        mirror: "default".into(),
        target: "default".into(),
        serial: 1,
        tunnel_key: None,
        origin: "pod".into(),
        direction: "both".into(),
        settings: BTreeMap::new(),
        ended: None,
        left: LeftStatus::default(),
        counters: vec![counter],
        misfits: Vec::new(),
    };
    let tap = TapStatus {
        ifindex: 7,
        device: "veth7".into(),
        inside: false,
        pod: Some(PodId { uid: "1".into(), namespace: "shop".into(), name: "web".into() }),
        nic: "eth0".into(),
        network: None,
        attached: AttachedStatus::default(),
        pod_side: None,
        sessions: vec![session],
    };
    NodeStatus {
        version: "1".into(),
        agent_running: true,
        targets: Vec::new(),
        taps: vec![tap],
        notes: Some(Notes::default()),
    }
}

/// On a busy node, a reading can take seconds before it has the counters.
#[tokio::test(start_paused = true)]
async fn rates_are_those_between_the_moments_of_the_counters() {
    let (begun, seconds) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let status = move || {
        let second = seconds.fetch_add(8, Ordering::Relaxed);
        async move { anyhow::Ok((with_packets(100 * second), begun + Duration::from_secs(second))) }
    };
    let request = ReportRequest { namespace: None, name: None, interval_millis: Some(5000) };
    let answer = reports::measure(request, &Arc::new(Semaphore::new(2)), status).await.unwrap();
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    let expected = json!({ "packets": 100.0, "bytes": 10_000.0 });
    assert_eq!(answer[0]["nics"][0]["rates"]["copied"], expected, "{answer}");
}

/// Without the notes of the loop, pods that are not mirrored would be missing. Rates are those of mirrored pods.
#[tokio::test(start_paused = true)]
async fn a_report_without_the_notes_of_the_loop_is_an_error() {
    for (interval_millis, is_error) in [(None, true), (Some(1000), false)] {
        let status = || async { Ok((NodeStatus { notes: None, ..with_packets(0) }, Instant::now())) };
        let request = ReportRequest { namespace: None, name: None, interval_millis };
        let answer = reports::measure(request, &Arc::new(Semaphore::new(2)), status).await;
        assert_eq!(answer.is_err(), is_error, "{answer:?}");
    }
}

/// Rates are measured over seconds, in which others get their answers.
#[tokio::test(start_paused = true)]
async fn measurements_of_rates_do_not_wait_for_each_other() {
    let status = || async {
        let (targets, taps) = (Vec::new(), Vec::new());
        let notes = Some(Notes::default());
        let status = NodeStatus { version: "1".into(), agent_running: true, targets, taps, notes };
        anyhow::Ok((status, Instant::now()))
    };
    let request = ReportRequest { namespace: None, name: None, interval_millis: Some(5000) };
    let (places, begun) = (Arc::new(Semaphore::new(2)), Instant::now());
    let answers = join_all((0..8).map(|_| reports::measure(request.clone(), &places, status))).await;
    for answer in answers {
        assert_eq!(answer.unwrap(), b"[]");
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// Another pod can get the address of a server that is gone.
#[tokio::test(start_paused = true)]
async fn a_dial_ends_with_the_endpoint() {
    let dials = Arc::new(Notify::new());
    let dialled = Arc::clone(&dials);
    let client = fake::client(move |_| {
        dialled.notify_one();
        Reply::Never
    });
    let (_, reports) = watch::channel(Arc::new(Report::default()));
    let lasts = Duration::from_secs(60);
    let node = Arc::new(Node::new(reports, PathBuf::new(), lasts));
    let options = Options {
        namespace: "podmirror".to_owned(),
        service: "server".to_owned(),
        token: PathBuf::new(),
        max_duration: lasts,
        bpffs: PathBuf::new(),
    };
    let server: SocketAddr = "192.0.2.1:10709".parse().unwrap();
    let servers = watch::Sender::new(BTreeSet::from([server]));
    let dial = Arc::new(Dial { options, client, node });
    let keeping = tokio::spawn(dial.keep(server, servers.subscribe()));
    dials.notified().await;
    let ended = Instant::now();
    servers.send_replace(BTreeSet::new());
    keeping.await.unwrap();
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());
}

/// Otherwise a connection could have any number of tokens reviewed.
#[tokio::test(start_paused = true)]
async fn an_agent_with_another_version_learns_that_of_the_server_and_is_disconnected() {
    let begun = Instant::now();
    let server = Server::new();
    let (mut agent, stream) = duplex(1 << 16);
    let asked = async move {
        let request = "GET /agent HTTP/1.1\r\nHost: server\r\nConnection: upgrade\r\n\
                       Upgrade: podmirror-packets/9\r\nAuthorization: Bearer agent-1\r\n\r\n";
        agent.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        agent.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    };
    let (answer, ()) = join!(asked, server.agents.serve(&server.client, &server.options, stream));
    assert!(answer.starts_with("HTTP/1.1 426 Upgrade Required\r\n"), "{answer}");
    assert!(answer.contains("upgrade: podmirror-packets/1\r\n"), "{answer}");
    assert!(answer.ends_with("this server speaks podmirror-packets/1"), "{answer}");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(server.agents.watch().borrow().is_empty());
}

#[test]
fn ready_endpoints_are_dialled_at_the_port_for_agents() {
    let endpoint =
        |address: &str, conditions: Value| json!({ "addresses": [address], "conditions": conditions });
    let slice = |port: &str| {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv6", "metadata": {},
            "ports": [{ "name": "https", "port": 10708 }, { "name": port, "port": 10709 }],
            "endpoints": [
                endpoint("fd00::1", json!({ "ready": true })),
                endpoint("fd00::2", json!({ "ready": false, "serving": true, "terminating": true })),
                endpoint("fd00::3", json!({})),
                endpoint("server.example", json!({ "ready": true })),
            ],
        });
        endpoints(&serde_json::from_value(slice).unwrap())
    };
    let expected =
        ["[fd00::1]:10709", "[fd00::3]:10709"].map(|address| address.parse::<SocketAddr>().unwrap());
    assert_eq!(slice("agents"), expected);
    assert!(slice("other").is_empty());
}
