//! Tests of the whole command, with a server of this process: what is requested, and what the archive has.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs::{self, File},
    io::Read as _,
    path::Path,
    sync::{Arc, Mutex},
};

use flate2::read::GzDecoder;
use http::{Method, Request, Response};
use kube::{Client, client::Body};
use tower::service_fn;

use super::*;

const SECRET: &str = "correct-horse-battery-staple";

/// The files of an archive, by their paths.
pub(super) fn unpacked(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(GzDecoder::new(File::open(path).unwrap())).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.insert(entry.path().unwrap().to_string_lossy().into_owned(), bytes);
    }
    files
}

/// The outcome of a command.
struct Done {
    outcome: Result<(), String>,
    /// The files of the archive, without the directory of all of them.
    files: BTreeMap<String, String>,
    /// The methods and paths of the requests.
    requests: Vec<(Method, String)>,
}

impl Done {
    fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.files[path]).unwrap()
    }

    /// The lines of `errors.txt` about these kinds or texts.
    fn errors(&self, about: &[&str]) -> Vec<&str> {
        let is_one = |line: &&str| about.iter().any(|about| line.starts_with(&format!("{about}: ")));
        self.files["errors.txt"].lines().filter(is_one).collect()
    }
}

/// Runs the command. The server answers the paths of requests.
async fn run(answer: impl Fn(&str) -> (u16, String) + Send + 'static) -> Done {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Body>| {
        let uri = request.uri().to_string();
        let path = request.uri().path().to_owned();
        all.lock().unwrap().push((request.method().clone(), path));
        let (code, text) = answer(&uri);
        let response = Response::builder().status(code).body(Body::from(text.into_bytes())).unwrap();
        async move { Ok::<_, Infallible>(response) }
    });
    let (client, agents) = (Client::new(service, "shop"), "podmirror".to_owned());
    let cluster = Cluster { client, namespace: "shop".to_owned(), agents };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bug.tar.gz");
    let outcome = sysdump(Some(path.clone()), &cluster).await;
    let outcome = outcome.map_err(|error| mirror_client::in_words(error.as_ref()));
    let packed = if path.exists() { unpacked(&path) } else { BTreeMap::new() };
    let text = |(path, bytes): (String, Vec<u8>)| {
        let (_, path) = path.split_once('/').unwrap();
        (path.to_owned(), String::from_utf8(bytes).unwrap())
    };
    assert_eq!(
        fs::read_dir(&directory).unwrap().count(),
        usize::from(outcome.is_ok()),
        "no other file is left"
    );
    let requests = requests.lock().unwrap().clone();
    Done { outcome, files: packed.into_iter().map(text).collect(), requests }
}

fn version() -> (u16, String) {
    let names =
        ["buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion", "major", "minor", "platform"];
    let mut version = json!({ "gitVersion": "v1.34.1" });
    names.iter().for_each(|name| version[name] = "".into());
    (200, version.to_string())
}

fn refusal(code: u16, message: &str) -> (u16, String) {
    (code, json!({ "status": "Failure", "code": code, "message": message }).to_string())
}

fn list(items: &[Value]) -> (u16, String) {
    (200, json!({ "items": items, "metadata": {} }).to_string())
}

fn agent(name: &str) -> Value {
    let variable = json!({ "name": "PODMIRROR_LOG", "value": SECRET });
    let container = json!({
        "name": "agent", "env": [variable], "ports": [{ "name": "metrics", "containerPort": 10706 }],
    });
    json!({
        "metadata": {
            "name": name, "namespace": "podmirror",
            "annotations": { "kubectl.kubernetes.io/last-applied-configuration": SECRET },
        },
        "spec": { "containers": [container], "template": { "spec": { "containers": [container] } } },
        "status": { "containerStatuses": [{ "name": "agent", "ready": true, "restartCount": 1 }] },
    })
}

#[tokio::test]
async fn an_archive_has_what_can_be_read_and_says_what_is_missing() {
    let log: String = (0..MOST_BYTES).map(|number| format!("{number}\n")).collect();
    let end = log.clone();
    let done = run(move |uri| {
        let path = uri.split('?').next().unwrap_or_default();
        match path {
            "/version" => version(),
            "/apis/apps/v1/namespaces/podmirror/daemonsets" => list(&[agent("podmirror")]),
            "/api/v1/namespaces/podmirror/pods" => list(&[agent("podmirror-a"), agent("podmirror-b")]),
            "/api/v1/namespaces/podmirror/pods/podmirror-a/log" if uri.contains("previous") => {
                (200, "it was killed\n".to_owned())
            }
            "/api/v1/namespaces/podmirror/pods/podmirror-a/log" => (200, log.clone()),
            "/api/v1/namespaces/podmirror/pods/podmirror-a:10706/proxy/metrics" => {
                (200, "podmirror_up 1\n".to_owned())
            }
            "/api/v1/namespaces/podmirror/pods/podmirror-b:10706/proxy/metrics" => {
                refusal(503, "error trying to reach service: \u{1b} refused")
            }
            "/apis/podmirror.io/v1alpha1/mirrors" => {
                (200, json!({ "items": [{}], "metadata": { "continue": "more" } }).to_string())
            }
            "/apis/podmirror.io/v1alpha1/clustermirrors" => (404, "404 page not found\n".to_owned()),
            "/apis/podmirror.io/v1alpha1/mirrortargets" => (200, "\"text\"".to_owned()),
            path if path.ends_with("/podreports") => (404, "404 page not found\n".to_owned()),
            _ => refusal(403, "alice may not"),
        }
    })
    .await;
    assert_eq!(done.outcome, Ok(()));
    assert_eq!(done.json("versions.json")["server"]["gitVersion"], "v1.34.1");
    assert!(done.files["check.txt"].starts_with("CHECK "), "{:?}", done.files["check.txt"]);
    let redacted = json!([{ "name": "PODMIRROR_LOG", "value": "<redacted>" }]);
    let sets = done.json("daemonsets.json");
    assert_eq!(sets[0]["spec"]["template"]["spec"]["containers"][0]["env"], redacted);
    let pods = done.json("pods.json");
    assert_eq!(
        (&pods[1]["metadata"]["name"], &pods[1]["spec"]["containers"][0]["env"]),
        (&json!("podmirror-b"), &redacted)
    );
    assert_eq!(done.files["pods/podmirror-a/agent.previous.log"], "it was killed\n");
    assert_eq!(done.files["pods/podmirror-a/agent.metrics"], "podmirror_up 1\n");
    let log = &done.files["pods/podmirror-a/agent.log"];
    assert!(
        log.len() > MOST_BYTES - 10 && log.len() <= MOST_BYTES && end.ends_with(&format!("\n{log}")),
        "the end"
    );
    for (path, text) in &done.files {
        assert!(!text.contains(SECRET), "{path}");
    }
    let about = [
        "mirrors",
        "clustermirrors",
        "mirrortargets",
        "nodes",
        "podreports",
        "pods/podmirror-a/agent.log",
        "pods/podmirror-b/agent.log",
        "pods/podmirror-b/agent.metrics",
    ];
    assert_eq!(
        done.errors(&about),
        [
            "nodes: alice may not",
            "mirrors: there are more, which are left out",
            "clustermirrors: 404 page not found",
            "podreports: the cluster has no API of packets; the chart's apiserver.enabled installs it",
            "pods/podmirror-a/agent.log: the text is long, and its beginning is left out",
            "pods/podmirror-b/agent.log: alice may not",
            "pods/podmirror-b/agent.metrics: error trying to reach service: \\u{1b} refused",
        ]
    );
    // `check` asks for the rights of its user.
    for (method, path) in &done.requests {
        let is_read = *method == Method::GET || path.ends_with("/selfsubjectaccessreviews");
        assert!(is_read && !path.contains("secret") && !path.ends_with("/packets"), "{method} {path}");
    }
}

#[tokio::test]
async fn without_an_answer_there_is_no_archive() {
    let done = run(|_| refusal(401, "Unauthorized")).await;
    assert_eq!((done.outcome, done.requests.len()), (Err("Unauthorized".to_owned()), 1));
}
