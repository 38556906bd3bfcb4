//! An API server with canned responses, for objects that a real one refuses.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Result, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex},
    thread,
};

use mirror_tests::{Agent, Lab, pod_object};
use nix::sys::socket;
use serde_json::{Value, json};

/// Each story has a loopback device of its own.
const PORT: u16 = 6443;
/// The UID of the pod.
const UID: &str = "5f0c9a52-7d3e-4c1b-9a64-0e8f1b2c3d4e";
/// The cgroup of its processes, for [`Lab::container`].
pub(crate) const CGROUP: &str = "kubepods/burstable/pod5f0c9a52-7d3e-4c1b-9a64-0e8f1b2c3d4e/1";

/// For each kind, the number of objects, and the JSON of each. A server has no other kinds.
pub(crate) type Objects = BTreeMap<&'static str, (usize, Box<dyn Fn(usize) -> String + Send + Sync>)>;

/// The server, on loopback of the node. Stops on drop, and can be started again.
pub(crate) struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
}

struct Shared {
    objects: Objects,
    /// The kind and the connection of each watch.
    watches: Mutex<Vec<(String, TcpStream)>>,
}

/// The pod `web` in the namespace `shop`, and its namespace.
pub(crate) fn web(lab: &Lab, annotations: &Value) -> Objects {
    let mut pod = pod_object("web", "exec sleep 3600");
    pod["metadata"]["namespace"] = "shop".into();
    pod["metadata"]["uid"] = UID.into();
    pod["metadata"]["annotations"] = annotations.clone();
    pod["spec"]["nodeName"] = lab.node().name().into();
    pod["status"]["phase"] = "Running".into();
    let namespace = json!({ "metadata": { "name": "shop", "uid": "shop" } });
    let one = |object: Value| (1, Box::new(move |_| object.to_string()) as Box<_>);
    [("pods", one(pod)), ("namespaces", one(namespace))].into()
}

/// Starts an agent of this server, which may be away.
pub(crate) fn agent(lab: &Lab, arguments: &[&str]) -> Agent {
    let kubeconfig = lab.files().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://127.0.0.1:{PORT}") } }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "" } }],
        "current-context": "c",
    });
    fs::write(&kubeconfig, config.to_string()).unwrap();
    let words = [&["run", "--node-name", lab.node().name()], arguments].concat();
    Agent::with_environment(lab, &words, &[("KUBECONFIG", kubeconfig.to_str().unwrap())])
}

impl Server {
    pub(crate) fn start(lab: &Lab, objects: Objects) -> Self {
        let listener = lab.node().enter(|| TcpListener::bind((Ipv4Addr::LOCALHOST, PORT))).unwrap();
        let shared = Arc::new(Shared { objects, watches: Mutex::default() });
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

    /// Sends a changed object to the watches of this kind. Returns their number.
    pub(crate) fn send(&self, kind: &str, object: &str) -> usize {
        let event = format!(r#"{{"type":"MODIFIED","object":{object}}}"#) + "\n";
        let watches = self.shared.watches.lock().unwrap();
        let of_kind = watches.iter().filter(|(of, _)| of == kind);
        of_kind.filter(|(_, watch)| { watch }.write_all(event.as_bytes()).is_ok()).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both).unwrap();
        for (_, watch) in self.shared.watches.lock().unwrap().drain(..) {
            // The agent has closed it.
            let _ = watch.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    /// Answers one request. Each connection has one.
    fn answer(&self, mut client: TcpStream) -> Result<()> {
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
        let kind = path.rsplit('/').next().unwrap_or_default();
        let Some((number, object)) = self.objects.get(kind).filter(|_| method == "GET") else {
            return respond(client, 404, r#"{"kind":"Status","code":404,"reason":"NotFound"}"#);
        };
        // As servers before Kubernetes 1.32 do.
        if query.contains("sendInitialEvents") {
            return respond(client, 422, r#"{"kind":"Status","code":422,"reason":"Invalid"}"#);
        }
        if query.contains("watch=true") || query.contains("watch=1") {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            client.write_all(head.as_bytes())?;
            self.watches.lock().unwrap().push((kind.to_owned(), client));
            return Ok(());
        }
        let from = value("continue").unwrap_or(0);
        let next = (*number).min(from + value("limit").unwrap_or(*number));
        let items = (from..next).map(object).collect::<Vec<_>>().join(",");
        let token = if next < *number { next.to_string() } else { String::new() };
        let metadata = json!({ "resourceVersion": "5", "continue": token });
        respond(
            client,
            200,
            &format!(r#"{{"kind":"List","apiVersion":"v1","metadata":{metadata},"items":[{items}]}}"#),
        )
    }
}

fn respond(mut client: TcpStream, status: u16, body: &str) -> Result<()> {
    let head = format!(
        "HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    client.write_all(body.as_bytes())
}
