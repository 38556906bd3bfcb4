//! The API of packets: its servers as processes beside the API server, agents on nodes, and kubectl as the client.
//!
//! The servers listen at [`BACKEND_IP`], which each node has too, with a relay to them.

mod agents;
mod bounds;
mod endings;
mod merging;
mod nodes;
mod past;
mod reasons;
mod renewal;
mod reports;
mod rights;

use std::{
    cell::RefCell,
    fs,
    io::Read,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use mirror_test_cluster::built::BACKEND_IP;
use mirror_tests::{Agent, Api, Lab, Relay, SOON, check, eventually, list, pod_object};
use serde_json::{Value, json};

use crate::aggregation::{GROUP, Registration, SERVICE};

/// The ServiceAccount of the agents.
const AGENT: &str = "agent";

/// The servers of the API, in the story's namespace. A cluster has only one such API, so a story waits until no other
/// story has it.
pub(crate) struct Packets<'a> {
    // Dropped first, so that the API server does not look for servers that have ended.
    registration: Registration<'a>,
    api: &'a Api,
    host: Lab,
    /// The port for the API server and the one for agents, of each server.
    ports: Vec<[u16; 2]>,
    /// The servers. A story can end some, and start others in their place.
    servers: Vec<Agent>,
    relays: RefCell<Vec<Relay>>,
}

impl<'a> Packets<'a> {
    /// Starts servers, with more arguments, and waits until the API server passes requests on to them.
    #[track_caller]
    pub(crate) fn start(api: &'a Api, servers: usize, arguments: &[&str]) -> Self {
        let listeners: Vec<_> =
            (0..2 * servers).map(|_| TcpListener::bind((BACKEND_IP, 0)).unwrap()).collect();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let ports: Vec<_> = listeners.chunks(2).map(|pair| [port(&pair[0]), port(&pair[1])]).collect();
        // The ports are free now, and unlikely to be taken before they are used.
        drop(listeners);
        let registration = Registration::new(api, &ports, true);
        api.kubectl(&format!("create secret generic {SERVICE}"));
        api.kubectl(&format!("create serviceaccount {AGENT}"));
        let host = Lab::at(Path::new("/proc/self/ns/net"), Path::new("/sys/fs/bpf"));
        let (servers, relays) = (Vec::new(), RefCell::default());
        let mut packets = Self { registration, api, host, ports, servers, relays };
        for number in 0..packets.ports.len() {
            packets.servers.push(packets.server(number, arguments));
        }
        for server in &packets.servers {
            server.wait_for_log(&["made a certificate"]);
        }
        packets.registration.wait();
        packets
    }

    /// Starts the server with this number.
    fn server(&self, number: usize, arguments: &[&str]) -> Agent {
        let [listen, agents_listen] = self.ports[number].map(|port| format!("{BACKEND_IP}:{port}"));
        let words = [
            "apiserver",
            "--namespace",
            self.api.namespace(),
            "--service",
            SERVICE,
            "--secret",
            SERVICE,
            "--agents-service-account",
            AGENT,
            "--apiserver-listen",
            &listen,
            "--agents-listen",
            &agents_listen,
        ];
        let kubeconfig = self.api.kubeconfig();
        let variables = [("KUBECONFIG", kubeconfig.to_str().unwrap())];
        // Without metrics, unless the story wants them.
        let silent: &[&str] = if arguments.contains(&"--listen") { &[] } else { &["--listen", ""] };
        Agent::with_environment(&self.host, &[&words[..], silent, arguments].concat(), &variables)
    }

    /// Lets the agent of a node reach the servers. Once for a node.
    #[track_caller]
    pub(crate) fn connect(&self, lab: &Lab) {
        lab.node().ip(&format!("address add {BACKEND_IP}/32 dev lo"));
        let relay = |[_, port]: &[u16; 2]| {
            Relay::start(lab.node(), SocketAddr::new(BACKEND_IP.parse().unwrap(), *port))
        };
        self.relays.borrow_mut().extend(self.ports.iter().map(relay));
    }

    /// Starts the agent of a node, with more arguments, and with a token for a pod of that node.
    #[track_caller]
    pub(crate) fn agent(&self, lab: &Lab, arguments: &[&str]) -> Agent {
        let name = lab.node().name();
        let token = lab.files().join("apiserver-token");
        fs::write(&token, self.token(name, &format!("--audience={GROUP}"))).unwrap();
        let service = format!("{}/{SERVICE}", self.api.namespace());
        let words = [
            "run",
            "--node-name",
            name,
            "--apiserver",
            &service,
            "--apiserver-token",
            token.to_str().unwrap(),
        ];
        let kubeconfig = self.api.kubeconfig();
        let variables = [("KUBECONFIG", kubeconfig.to_str().unwrap())];
        Agent::with_environment(lab, &[&words[..], arguments].concat(), &variables)
    }

    /// A token of the agents' ServiceAccount, with more arguments, bound to the agent's pod of this node.
    #[track_caller]
    fn token(&self, node: &str, arguments: &str) -> String {
        let name = format!("agent-{node}");
        let mut pod = pod_object(&name, "exec sleep 3600");
        pod["spec"]["nodeName"] = node.into();
        pod["spec"]["serviceAccountName"] = AGENT.into();
        self.api.apply(&pod);
        let running = "{\"status\":{\"phase\":\"Running\"}}";
        self.api.kubectl(&format!("patch pod {name} --subresource=status --patch {running}"));
        let bound = format!("--bound-object-kind=Pod --bound-object-name={name}");
        self.api.kubectl(&format!("create token {AGENT} {bound} {arguments}")).trim().to_owned()
    }

    /// Waits until each server has the agents of these nodes.
    #[track_caller]
    pub(crate) fn wait_connected(&self, nodes: &[&Lab]) {
        for (server, lab) in self.servers.iter().flat_map(|server| nodes.iter().map(move |lab| (server, lab)))
        {
            server.wait_for_log(&["has connected", lab.node().name()]);
        }
    }

    /// Gives a user rights in the story's namespace, or everywhere. Returns the name of the user.
    #[track_caller]
    fn grant(&self, user: &str, everywhere: bool, rules: &Value) -> String {
        let namespace = self.api.namespace();
        let user = format!("{namespace}-{user}");
        let of_cluster = if everywhere { "Cluster" } else { "" };
        let metadata = json!({ "name": user, "labels": { "story": namespace } });
        let (group, version) = ("rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1");
        let role = format!("{of_cluster}Role");
        self.api.apply(&list(&[
            json!({ "apiVersion": version, "kind": role, "metadata": metadata, "rules": rules }),
            json!({
                "apiVersion": version, "kind": format!("{role}Binding"), "metadata": metadata,
                "roleRef": { "apiGroup": group, "kind": role, "name": user },
                "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
            }),
        ]));
        user
    }

    /// The URI of a request in the story's namespace, for example `packets?watch=true`.
    pub(crate) fn uri(&self, request: &str) -> String {
        format!("/apis/{GROUP}/v1alpha1/namespaces/{}/{request}", self.api.namespace())
    }

    /// The answer to a request of a user, as text.
    fn get(&self, user: &str, uri: &str) -> Result<String, String> {
        self.api.try_kubectl(&format!("get --raw {uri} --as={user}"))
    }

    /// Starts to read the packets of a request of a user.
    fn stream(&self, user: &str, uri: &str) -> Stream {
        let mut command = self.api.command(&format!("get --raw {uri} --as={user}"));
        let mut kubectl = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let collect = |mut from: Box<dyn Read + Send>| {
            let bytes = Arc::new(Mutex::new(Vec::new()));
            let sink = Arc::clone(&bytes);
            thread::spawn(move || {
                let mut buffer = [0; 1 << 16];
                while let Ok(length @ 1..) = from.read(&mut buffer) {
                    sink.lock().unwrap().extend_from_slice(&buffer[..length]);
                }
            });
            bytes
        };
        let bytes = collect(Box::new(kubectl.stdout.take().unwrap()));
        let errors = collect(Box::new(kubectl.stderr.take().unwrap()));
        Stream { kubectl, bytes, errors }
    }
}

impl Drop for Packets<'_> {
    fn drop(&mut self) {
        let of_story = format!("--selector=story={}", self.api.namespace());
        if let Err(error) =
            self.api.try_kubectl(&format!("delete clusterroles,clusterrolebindings {of_story}"))
        {
            eprintln!("rights of the story stay: {error}");
        }
    }
}

/// `kubectl get --raw` as it reads packets. It is killed on drop.
struct Stream {
    kubectl: Child,
    bytes: Arc<Mutex<Vec<u8>>>,
    errors: Arc<Mutex<Vec<u8>>>,
}

impl Stream {
    /// The bytes so far.
    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    /// The error messages so far.
    fn errors(&self) -> String {
        String::from_utf8_lossy(&self.errors.lock().unwrap()).into_owned()
    }

    /// The exit status, if it has ended.
    fn ended(&mut self) -> Option<ExitStatus> {
        self.kubectl.try_wait().unwrap()
    }

    /// Waits until the answer has begun.
    #[track_caller]
    fn wait_begun(&self) {
        eventually(SOON, || check(!self.bytes().is_empty(), || format!("no answer yet: {}", self.errors())));
    }

    /// Waits until the server ends the answer for this reason. Returns all bytes.
    #[track_caller]
    fn wait_end(mut self, deadline: Duration, reason: &str) -> Vec<u8> {
        let told = format!("podmirror: end: {reason}");
        eventually(deadline, || {
            let (status, bytes) = (self.ended(), self.bytes());
            // The last bytes are read after the end of kubectl.
            let is_told = bytes.windows(told.len()).any(|part| part == told.as_bytes());
            check(is_told && status.is_some_and(|status| status.success()), || {
                format!("{status:?} and {} bytes, not {told:?}: {}", bytes.len(), self.errors())
            })?;
            Ok(bytes)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}
