//! Tests of the whole command, with a server of this process: what is requested, what the file has, and the exit code.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    fs,
    future::pending,
    io::Read as _,
    process,
    sync::{Arc, Mutex},
    thread,
};

use http::{Request, Response};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{Client, client::Body};
use mirror_capture::{
    blocks::Blocks,
    pcapng::{Interface, Packet, Statistics, Writer},
};
use serde_json::json;
use tokio::time::timeout;
use tower::service_fn;

use super::*;
use crate::{
    cli::{self, Command},
    workload::Selection,
};

/// Blocks of a server: an interface of a pod with packets of these times, and messages.
fn stream(pod: &str, times_ns: &[u64], messages: &[&str]) -> (u16, Vec<u8>) {
    let mut out = Vec::new();
    let mut writer = Writer::begin(&mut out, &Section::default());
    if !times_ns.is_empty() {
        let (name, hardware) = (pod.to_owned(), Some("node-a".to_owned()));
        let interface = writer.interface(&mut out, &Interface { name, hardware, ..Interface::default() });
        for time_ns in times_ns {
            let (time_ns, bytes, len) = (*time_ns, &[7][..], 1);
            Packet { interface, time_ns, bytes, len, direction: None, comment: None }.write(&mut out);
        }
    }
    for message in messages {
        Names { addresses: Vec::new(), comment: Some(format!("{SAYS}{message}")) }.write(&mut out);
    }
    (200, out)
}

fn refusal(code: u16, message: &str) -> (u16, Vec<u8>) {
    (
        code,
        json!({ "status": "Failure", "reason": "Some", "code": code, "message": message }).to_string().into(),
    )
}

/// The outcome of a command.
struct Done {
    /// The URIs of the requests.
    requests: Vec<String>,
    code: Result<ExitCode, String>,
    /// The blocks of the file.
    blocks: Vec<Block>,
}

impl Done {
    /// The times of the packets, in the order of the file.
    fn times_ns(&self) -> Vec<u64> {
        let time =
            |block: &Block| if let Block::Packet(packet) = block { Some(packet.time_ns) } else { None };
        self.blocks.iter().filter_map(time).collect()
    }
}

/// Runs `tail` with these words. The server answers each request by its URI, after a delay.
async fn run(words: &str, answer: impl Fn(&str) -> (Duration, (u16, Vec<u8>)) + Send + 'static) -> Done {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Body>| {
        let uri = request.uri().to_string();
        let (delay, (code, bytes)) = answer(&uri);
        all.lock().unwrap().push(uri);
        async move {
            sleep(delay).await;
            let response = Response::builder().status(code).body(Body::from(bytes)).unwrap();
            Ok::<_, Infallible>(response)
        }
    });
    let client = Client::new(service, "shop");
    let cluster = Cluster { client, namespace: "shop".to_owned(), agents: "podmirror".to_owned() };
    let file = tempfile::NamedTempFile::new().unwrap();
    let words = format!("kubectl-mirror tail --write {} {words}", file.path().display());
    let Command::Tail(args) = cli::read(words.split(' ').map(Into::into)).unwrap().command else {
        panic!("no tail")
    };
    let code = tail(args, &cluster).await.map_err(|error| mirror_client::in_words(error.as_ref()));
    let mut blocks = Blocks::default();
    blocks.push(&fs::read(file.path()).unwrap());
    let blocks = std::iter::from_fn(|| blocks.pop().unwrap()).collect();
    let requests = requests.lock().unwrap().clone();
    Done { requests, code, blocks }
}

/// An agent that was away leaves no gap between two requests: the server says what is missing.
#[tokio::test]
async fn packets_of_a_node_are_missing_and_those_of_a_pod_are_not() {
    let cases: [(&'static [&'static str], ExitCode); 3] = [
        (&["node-a: connection closed", "node-a: its packets are read"], ExitCode::from(INCOMPLETE)),
        (&["a request reads at most 50000 pods, and others are left out"], ExitCode::from(INCOMPLETE)),
        (
            &[
                "shop/db: OptedOut: no",
                "shop/db: its packets are read",
                "other messages: 10000 pods and NICs have messages",
                "50000 addresses have names, and no more get any",
            ],
            ExitCode::SUCCESS,
        ),
    ];
    for (messages, code) in cases {
        // The end of the command.
        let answer = move |_: &str| (Duration::from_secs(1), stream("shop/web eth0", &[1], messages));
        let done = run("-l app=web --duration 1s", answer).await;
        assert_eq!((done.times_ns(), done.code), (vec![1], Ok(code)), "{messages:?}");
    }
}

#[tokio::test]
async fn a_revoked_right_ends_the_command() {
    let end = "end: a right was revoked: alice may not";
    let answer = move |_: &str| (Duration::ZERO, stream("shop/web eth0", &[1], &[end]));
    let done = run("-l app=web", answer).await;
    assert_eq!((done.requests.len(), done.code), (1, Ok(ExitCode::from(INCOMPLETE))));
}

#[tokio::test]
async fn what_cannot_be_read_is_an_error_at_once() {
    for (code, text) in [(403, "alice may not"), (409, "no packets can be read")] {
        let done = run("-A -l app=web", move |_: &str| (Duration::ZERO, refusal(code, text))).await;
        assert_eq!((done.code, done.requests.len()), (Err(text.to_owned()), 1));
    }
    // kube-apiserver knows no such API, or does not reach its server.
    for (code, text) in [(404, "the cluster has no API of packets"), (400, "the API of packets: text")] {
        let done = run("-l app=web", move |_: &str| (Duration::ZERO, (code, b"text\n".to_vec()))).await;
        assert!(done.code.clone().is_err_and(|why| why.starts_with(text)), "{:?}", done.code);
    }
}

/// Only a write shows that a pipe has no reader any more, and without packets there is nothing to write.
#[cfg(unix)]
#[tokio::test]
async fn the_end_of_the_reader_ends_the_command_without_a_packet() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fifo");
    assert!(process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let never = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
    let client = Client::new(never, "shop");
    let cluster = Cluster { client, namespace: "shop".to_owned(), agents: "podmirror".to_owned() };
    let words = format!("kubectl-mirror tail --write {} -l app=web", path.display());
    let Command::Tail(args) = cli::read(words.split(' ').map(Into::into)).unwrap().command else {
        panic!("no tail")
    };
    let reader = thread::spawn(move || fs::File::open(path).unwrap().read_exact(&mut [0; 12]).unwrap());
    let ended = timeout(Duration::from_secs(60), tail(args, &cluster)).await;
    assert_eq!(ended.unwrap().unwrap(), ExitCode::SUCCESS, "the end of the reader");
    reader.join().unwrap();
}

/// kube-apiserver can wait longer than the command for a server that it cannot reach.
#[tokio::test]
async fn a_request_without_an_answer_is_missing() {
    let never = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
    let client = Client::new(never, "shop");
    let cluster = Cluster { client, namespace: "shop".to_owned(), agents: "podmirror".to_owned() };
    for (answered, code) in [
        (0, Err("the API server has not answered in time".to_owned())),
        (1, Ok(ExitCode::from(INCOMPLETE))),
        (2, Ok(ExitCode::SUCCESS)),
    ] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let words = "kubectl-mirror tail pod web-0 web-1".split(' ').map(Into::into);
        let Command::Tail(args) = cli::read(words).unwrap().command else { panic!("no tail") };
        let pods = Some(["web-0", "web-1"].map(str::to_owned).into());
        let sources = request::all(&args, &Selection { labels: LabelSelector::default(), pods }).unwrap();
        let mut tail =
            Tail::new(&args, &cluster, sources, Sink::open(Some(file.path()), None).await.unwrap());
        tail.end = Instant::now();
        (0..answered).for_each(|id| tail.take((id, What::Began)));
        tail.finish().await.unwrap();
        assert_eq!(tail.judge().map_err(|why| why.to_string()), code);
    }
}

#[tokio::test]
async fn the_past_of_several_pods_is_in_order_and_complete_or_not() {
    let whole = |uri: &str| {
        let (pod, times_ns) =
            if uri.contains("web-0") { ("shop/web-0 eth0", [1, 4]) } else { ("shop/web-1 eth0", [2, 3]) };
        let messages = ["node-a: recorded packets of the last 60 s: 2", "end: complete"];
        (Duration::ZERO, stream(pod, &times_ns, &messages))
    };
    let words = "pod web-0 web-1 --since 1m --no-follow";
    let done = run(words, whole).await;
    assert_eq!(done.times_ns(), [1, 2, 3, 4]);
    let mut requests = done.requests;
    requests.sort();
    for (uri, pod) in requests.iter().zip(["web-0", "web-1"]) {
        let parameters = format!("?watch=true&fieldSelector=metadata.name%3D{pod}&since=1m&follow=false&");
        assert!(uri.contains(&parameters), "{uri}");
    }
    // The server sends no counters here.
    assert_eq!(done.code, Ok(ExitCode::from(INCOMPLETE)));

    let cases: [(&'static [&'static str], ExitCode); 4] = [
        (&["end: complete"], ExitCode::SUCCESS),
        (&["node-b: NoPast: no past: no recorder", "end: complete"], ExitCode::from(INCOMPLETE)),
        (&["node-b: its agent is not connected", "end: complete"], ExitCode::from(INCOMPLETE)),
        (&["end: the server ends"], ExitCode::from(INCOMPLETE)),
    ];
    for (messages, code) in cases {
        let answer = move |_: &str| {
            let (status, mut bytes) = stream("shop/web eth0", &[1], messages);
            Statistics { time_ns: 1, received: Some(1), dropped: Some(0), ..Statistics::default() }
                .write(&mut bytes);
            (Duration::ZERO, (status, bytes))
        };
        let done = run("-l= --since 1m --no-follow", answer).await;
        assert_eq!((done.times_ns(), done.code), (vec![1], Ok(code)), "{messages:?}");
    }
    let nothing =
        run("-l= --since 1m --no-follow", |_: &str| (Duration::ZERO, stream("", &[], &["end: complete"])))
            .await;
    assert!(
        nothing.code.clone().is_err_and(|why| why.starts_with("nothing is recorded")),
        "{:?}",
        nothing.code
    );
}
