//! Another API server of the same cluster. A test can cut its connection to the store, so that the server answers with
//! old objects.
//!
//! It is the same program with the same arguments, except for its port, its connection to etcd and those of the test,
//! and it writes no audit log. [`Api`] starts it.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use crate::{Kubectl, Way, check, eventually, process::Process, relay::Relay};

/// Timeout for the start of an API server.
const START: Duration = Duration::from_secs(90);

/// An API server that can be made to lag behind. It is killed on drop.
#[derive(Debug)]
pub struct LaggingApi {
    // Declared before the relay to etcd, so that it is dropped first.
    _process: Process,
    store: Relay,
    address: SocketAddr,
}

impl LaggingApi {
    /// Starts the server with more arguments, and waits until it has the story's pods.
    #[track_caller]
    pub(crate) fn start(kubectl: &Kubectl, more: &[&str]) -> Self {
        let components = kubectl.cluster().components().expect("the cluster was built here");
        let pid = components.pid("kube-apiserver").expect("the API server runs");
        let process = Path::new("/proc").join(pid.to_string());
        let line = fs::read_to_string(process.join("cmdline")).unwrap();
        let (program, arguments) = line.trim_end_matches('\0').split_once('\0').unwrap();
        let value = |name: &str| arguments.split('\0').find_map(|word| word.strip_prefix(name)).unwrap();
        let etcd = value("--etcd-servers=http://").parse().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to_store = listener.local_addr().unwrap();
        let store = Relay::with_listener(listener, etcd);
        // The port is free now, and unlikely to be taken before it is used.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let mut command = Command::new(program);
        command.current_dir(fs::read_link(process.join("cwd")).unwrap()).env_clear().stdout(Stdio::null());
        let others = ["--etcd-servers=", "--secure-port=", "--audit-log-path="];
        let is_ours = |word: &&str| !others.iter().any(|other| word.starts_with(other));
        command.args(arguments.split('\0').filter(is_ours)).args([
            format!("--etcd-servers=http://{to_store}"),
            format!("--secure-port={}", address.port()),
            // Otherwise both servers would publish the same endpoint.
            "--endpoint-reconciler-type=none".to_owned(),
        ]);
        command.args(more);
        let lagging = Self { _process: Process::start(&mut command), store, address };
        let pods = kubectl.kubectl("get pods -o name");
        eventually(START, || {
            // A server that loses its store before it has started completely ends.
            kubectl.try_kubectl(&format!("--server=https://{address} get --raw /readyz"))?;
            let path = format!("/api/v1/namespaces/{}/pods?resourceVersion=0", kubectl.namespace());
            let known = kubectl.try_kubectl(&format!("--server=https://{address} get --raw {path}"))?;
            let is_known =
                |pod: &str| known.contains(&format!("\"name\":\"{}\"", pod.trim_start_matches("pod/")));
            check(pods.lines().all(is_known), || known)
        });
        lagging
    }

    /// Sets how the relay treats the traffic between the server and the store. The server keeps the objects in its
    /// memory.
    pub fn set_store(&self, way: Way) {
        self.store.set(way);
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
