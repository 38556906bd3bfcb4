//! Mirrors that tenants have made as large and as slow as they could, from an API server whose CRDs have no bounds. The
//! agent mirrors the pod of another tenant, answers its health checks, and keeps its memory small.
//!
//! The server has canned responses: a real one refuses such objects, because the CRDs have bounds.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{Agent, Capture, Lab, SOON, check, eventually, memory, pod_object};
use nix::sys::socket;
use serde_json::{Value, json};

use crate::{Inside, MIRROR};

const UID: &str = "5f0c9a52-7d3e-4c1b-9a64-0e8f1b2c3d4e";
/// Number of Mirrors of 1.3 MB (four pages of a list), and of Mirrors with a slow filter.
const LARGE: usize = 32;
const SLOW: usize = 200;
/// The limit of the chart is 256 MiB.
const MOST_MIB: f64 = 100.0;
/// The kubelet's timeout for a health check is 1 s. This machine runs other stories meanwhile.
const HEALTH: Duration = Duration::from_secs(5);

#[test]
fn hostile_mirrors_cost_neither_the_agent_nor_a_neighbour() {
    let lab = Lab::new("objects");
    lab.bridge("br0");
    let [web, db] = ["web", "db"].map(|name| lab.pod(name, "br0"));
    let _container = lab.container(web.netns(), &format!("kubepods/burstable/pod{UID}/1"));
    let mut pod = pod_object("web", "exec sleep 3600");
    pod["metadata"]["namespace"] = "shop".into();
    pod["metadata"]["uid"] = UID.into();
    pod["spec"]["nodeName"] = lab.node().name().into();
    pod["status"]["phase"] = "Running".into();
    let server = Server::start(&lab, pod);
    let kubeconfig = lab.files().join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let agent = Agent::with_environment(
        &lab,
        &["run", "--node-name", lab.node().name()],
        &[("KUBECONFIG", kubeconfig.to_str().unwrap())],
    );
    let mut longest = Duration::ZERO;
    let mut healthy = || {
        let asked = Instant::now();
        let answer = lab.request("GET", "/healthz")?;
        longest = longest.max(asked.elapsed());
        check(answer.status == 200, || format!("{answer:?}"))
    };
    eventually(SOON, &mut healthy);
    eventually(3 * SOON, || {
        healthy()?;
        let taps = lab.try_status()?.taps;
        check(taps.len() == 1 && !taps[0].sessions.is_empty(), || format!("{taps:?}"))
    });
    let (inside, mirror) = (Inside::of(&web), Capture::start(lab.node(), MIRROR));
    db.ping(web.v4(), 5, 56);
    eventually(SOON, || mirror.frames().same_as(&inside.capture.frames()));
    let (_, most) = memory(agent.pid());
    assert!(most < MOST_MIB, "{most} MiB");
    assert!(longest < HEALTH, "{longest:?}");
    agent.stop();
}

/// An API server with these objects, on loopback of the node. Stops on drop.
struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
}

struct Shared {
    pod: Value,
    /// The spec of a large Mirror.
    large: String,
    /// Connections of watches, which last until the end of the story.
    watches: Mutex<Vec<TcpStream>>,
}

impl Server {
    fn start(lab: &Lab, pod: Value) -> Self {
        let listener = lab.node().enter(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let shared = Arc::new(Shared { pod, large: large(), watches: Mutex::default() });
        let (accepting, to) = (listener.try_clone().unwrap(), Arc::clone(&shared));
        thread::spawn(move || {
            // The loop ends when the listener is shut down.
            for client in accepting.incoming().map_while(Result::ok) {
                let to = Arc::clone(&to);
                // The agent may close the connection at any time.
                thread::spawn(move || drop(to.answer(client)));
            }
        });
        Self { listener, shared }
    }

    fn kubeconfig(&self) -> String {
        let server = format!("http://{}", self.listener.local_addr().unwrap());
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": { "server": server } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "" } }],
            "current-context": "c",
        })
        .to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both).unwrap();
        for watch in self.shared.watches.lock().unwrap().drain(..) {
            // The agent has closed it.
            let _ = watch.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    /// Answers one request. Each connection has one.
    fn answer(&self, mut client: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(client.try_clone()?).lines();
        let request = lines.next().transpose()?.unwrap_or_default();
        while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let value = |key: &str| {
            query
                .split('&')
                .find_map(|field| field.strip_prefix(key)?.strip_prefix('=')?.parse::<usize>().ok())
        };
        // As servers before Kubernetes 1.32 do.
        if query.contains("sendInitialEvents") {
            return respond(client, 422, r#"{"kind":"Status","code":422,"reason":"Invalid"}"#);
        }
        if query.contains("watch=true") || query.contains("watch=1") {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            client.write_all(head.as_bytes())?;
            self.watches.lock().unwrap().push(client);
            return Ok(());
        }
        let from = value("continue").unwrap_or(0);
        let objects = match path.rsplit('/').next() {
            _ if method != "GET" => None,
            Some("pods" | "namespaces") => Some(1),
            Some("mirrors") => Some(LARGE + SLOW + 1),
            Some("clustermirrors" | "mirrortargets") => Some(0),
            _ => None,
        };
        let Some(objects) = objects else {
            return respond(client, 404, r#"{"kind":"Status","code":404,"reason":"NotFound"}"#);
        };
        let next = objects.min(from + value("limit").unwrap_or(objects));
        let object = |number| match path.rsplit('/').next() {
            Some("pods") => self.pod.to_string(),
            Some("namespaces") => json!({ "metadata": { "name": "shop", "uid": "shop" } }).to_string(),
            _ => mirror(number, &self.large),
        };
        let items: Vec<_> = (from..next).map(object).collect();
        let token = if next < objects { next.to_string() } else { String::new() };
        let metadata = json!({ "resourceVersion": "5", "continue": token });
        let items = items.join(",");
        respond(
            client,
            200,
            &format!(r#"{{"kind":"List","apiVersion":"v1","metadata":{metadata},"items":[{items}]}}"#),
        )
    }
}

fn respond(mut client: TcpStream, status: u16, body: &str) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    client.write_all(body.as_bytes())
}

/// The Mirrors of two tenants: the hostile ones in `aaa`, and the last one in `shop`.
fn mirror(number: usize, large: &str) -> String {
    let (namespace, spec) = if number < LARGE {
        ("aaa", large.to_owned())
    } else if number < LARGE + SLOW {
        let chains: Vec<_> = (1..40).map(|next| format!("ip6 protochain {next}")).collect();
        ("aaa", json!({ "podSelector": {}, "filter": chains.join(" or ") }).to_string())
    } else {
        ("shop", json!({ "podSelector": {} }).to_string())
    };
    let metadata = json!({
        "name": format!("mirror-{number}"), "namespace": namespace, "uid": format!("uid-{number}"),
        "resourceVersion": "5", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z",
    });
    format!(r#"{{"apiVersion":"podmirror.io/v1alpha1","kind":"Mirror","metadata":{metadata},"spec":{spec}}}"#)
}

/// A selector of 1.3 MB, which selects no pod.
fn large() -> String {
    let values: Vec<_> = (0..65_000).map(|value| format!("some-value-{value:07}")).collect();
    let expression = json!({ "key": "app", "operator": "In", "values": values });
    json!({ "podSelector": { "matchExpressions": [expression] } }).to_string()
}
