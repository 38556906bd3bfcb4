//! Stories on a real node with Cilium: the agent as users install it, in Cilium's modes and over restarts of both.
//!
//! `cargo xtask test --level cilium` builds Cilium and the node, and runs the stories one after the other. A story
//! chooses the mode that it needs, and Cilium is restarted if it ran in another one.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use mirror_tests::{
    Answer, Cluster, Comparison, EDGE, Frames, KubePod, Netns, PATIENCE, SOON, Settings, check, eventually,
    list, pod_object, scaled,
};
use serde_json::{Value, json};

mod filters;
mod first;
mod paths;
mod restarts;

/// Time for the coverage to be judged by several readings of the counters, one every two seconds.
const FEW_READINGS: Duration = Duration::from_secs(30);
/// Bytes of the page that the pods serve: enough for super-frames.
const PAGE: usize = 200_000;

/// Two pods, each behind a service, on a node with Cilium. Only `web` is mirrored.
struct Scene<'a> {
    cluster: &'a Cluster,
    web: KubePod,
    db: KubePod,
    outside: Netns,
    /// The node port of the service `web`.
    node_port: u16,
}

impl<'a> Scene<'a> {
    #[track_caller]
    fn new(cluster: &'a Cluster, settings: Settings) -> Self {
        cluster.cilium_runs_with(settings);
        let server = format!(
            "mkdir /www; head -c {PAGE} /dev/zero | tr '\\0' x > /www/index.html; exec httpd -f -p 80 -h /www"
        );
        let mut web = pod_object("web", &server);
        web["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
        let objects =
            [web, pod_object("db", &server), service("web", "NodePort"), service("db", "ClusterIP")];
        cluster.apply(&list(&objects));
        let (web, db) = (cluster.running("web"), cluster.running("db"));
        cluster.host().wait_taps(&[&web.device]);
        let node_port =
            cluster.kubectl("get service web -o jsonpath={.spec.ports[0].nodePort}").parse().unwrap();
        let scene = Self { cluster, web, db, outside: cluster.outside(), node_port };
        // Cilium learns the pods of a service some time later.
        for (pod, service) in [("web", "db"), ("db", "web")] {
            let address = scene.service(service);
            eventually(PATIENCE, || scene.try_fetch_in(pod, address));
        }
        eventually(PATIENCE, || try_fetch(&scene.outside, scene.edge(), node_port));
        scene
    }

    /// The node's address on the outside network.
    fn edge(&self) -> IpAddr {
        EDGE[0].parse().unwrap()
    }

    /// The address outside.
    fn far(&self) -> IpAddr {
        EDGE[1].parse().unwrap()
    }

    /// The address of a service.
    #[track_caller]
    fn service(&self, name: &str) -> IpAddr {
        self.cluster.kubectl(&format!("get service {name} -o jsonpath={{.spec.clusterIP}}")).parse().unwrap()
    }

    /// Fetches the page from this address in a process of the pod. The page must arrive completely.
    #[track_caller]
    fn fetch_in(&self, pod: &str, from: IpAddr) {
        self.try_fetch_in(pod, from).unwrap();
    }

    fn try_fetch_in(&self, pod: &str, from: IpAddr) -> Result<(), String> {
        let page =
            self.cluster.try_kubectl(&format!("exec {pod} -- timeout 10 wget -q -O - http://{from}/"))?;
        is_whole(&page)
    }

    /// Waits until the agent reports both directions of `web` as covered, without any reason.
    #[track_caller]
    fn is_covered(&self) {
        self.wait_states(["Covered", "Covered"]);
        assert_eq!(self.reasons(), Vec::<String>::new());
    }

    /// Waits until `web` has these states of ingress and egress. Meanwhile packets are exchanged with another pod and
    /// with the node.
    #[track_caller]
    fn wait_states(&self, states: [&str; 2]) -> Value {
        let host = self.cluster.host();
        eventually(FEW_READINGS, || {
            self.db.ping(self.web.ip, 5);
            host.node().ping_every(Duration::from_millis(2), self.web.ip, 5, 56);
            let nics = host.coverage()?;
            let found = nics.iter().find(|nic| nic["device"] == self.web.device.as_str());
            let found = found.ok_or_else(|| format!("no coverage of web: {nics:?}"))?;
            let are = ["ingress", "egress"].map(|direction| found[direction]["state"].as_str().unwrap());
            check(are == states, || format!("not {states:?}: {found}")).map(|()| found.clone())
        })
    }

    /// The reasons of the pods that are not completely mirrored.
    fn reasons(&self) -> Vec<String> {
        let notes = self.cluster.host().status().notes.unwrap();
        let notes = notes["not_mirrored"].as_array().unwrap().iter();
        notes.map(|note| note["reason"].as_str().unwrap().to_owned()).collect()
    }

    /// The packets of `web` on the mirror interface while `action` runs: each that the pod sends and receives, once and
    /// unchanged.
    #[track_caller]
    fn copied_during(&self, action: impl FnOnce()) -> Frames {
        let comparison = Comparison::of(&self.web.netns, self.cluster.host());
        action();
        comparison.is_equal()
    }
}

/// A service of this type for the pod of this name.
fn service(name: &str, kind: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name },
        "spec": { "type": kind, "selector": { "app": name }, "ports": [{ "port": 80 }] },
    })
}

/// Fetches the page from a process in this namespace. The page must arrive completely.
#[track_caller]
fn fetch(inside: &Netns, from: IpAddr, port: u16) {
    try_fetch(inside, from, port).unwrap();
}

fn try_fetch(inside: &Netns, from: IpAddr, port: u16) -> Result<(), String> {
    let address = SocketAddr::new(from, port);
    let connection = inside.enter(|| TcpStream::connect_timeout(&address, scaled(SOON)));
    let connection = connection.map_err(|error| format!("{address}: {error}"))?;
    connection.set_read_timeout(Some(scaled(SOON))).unwrap();
    let request = format!("GET / HTTP/1.0\r\nHost: {from}\r\n\r\n");
    is_whole(&Answer::to(&request, connection)?.body)
}

fn is_whole(page: &str) -> Result<(), String> {
    check(page.len() == PAGE && page.bytes().all(|byte| byte == b'x'), || format!("{} bytes", page.len()))
}

/// The number of packets that the pod has sent, and that it has received.
fn by_direction(pod: &KubePod, frames: &Frames) -> [usize; 2] {
    let mac = pod.mac();
    let sent = frames.only(|frame| frame[6..12] == mac).len();
    [sent, frames.len() - sent]
}
