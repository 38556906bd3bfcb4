//! Stories on a real node with Multus: pods with additional NICs, which the reference plugins of CNI create.
//!
//! `cargo xtask test --level multus` builds Multus and the node, and runs the stories one after the other. A story
//! creates the devices that its networks need on the node, and removes them after its pods are deleted.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::{
    cell::RefCell,
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use mirror_tests::{
    Answer, Cluster, Comparison, Frames, KubePod, Netns, PATIENCE, SOON, Status, TapStatus, check,
    eventually, pod_object, scaled,
};
use serde_json::{Value, json};

mod bandwidth;
mod kinds;
mod several;

/// Time for the coverage to be judged by several readings of the counters, one every two seconds.
const FEW_READINGS: Duration = Duration::from_secs(30);
/// Bytes of the page that the pods serve: enough for super-frames.
const PAGE: usize = 200_000;
/// The name of the node's own network.
const OWN: &str = "podmirror-cluster";
/// The relay device, through which copies leave a pod.
const EXIT: &str = "podmirror";

/// The devices that a story's networks need on the node. They are removed after the pods, because a plugin cannot undo
/// its work on devices that no longer exist.
struct Site<'a> {
    cluster: &'a Cluster,
    /// Another machine.
    far: Netns,
    /// Devices of the node that are moved into pods.
    lent: RefCell<Vec<String>>,
}

impl<'a> Site<'a> {
    #[track_caller]
    fn new(cluster: &'a Cluster) -> Self {
        let far = Netns::new(&format!("{}-far", cluster.namespace()));
        far.keep_quiet();
        Self { cluster, far, lent: RefCell::default() }
    }

    /// Creates a device of the node that leads to the other machine, which has this address there.
    #[track_caller]
    fn cable(&self, device: &str, address: &str) {
        let node = self.cluster.host().node();
        node.ip(&format!("link add {device} type veth peer name far{device} netns {}", self.far.name()));
        node.sysctl(&format!("ipv6/conf/{device}/disable_ipv6"), "1");
        node.ip(&format!("link set {device} up"));
        self.far.ip(&format!("address add {address} dev far{device}"));
        self.far.ip(&format!("link set far{device} up"));
    }

    /// Creates a veth pair with both ends on the node. The first has this address.
    #[track_caller]
    fn pair(&self, [own, other]: [&str; 2], address: &str) {
        let node = self.cluster.host().node();
        node.ip(&format!("link add {own} type veth peer name {other}"));
        node.sysctl(&format!("ipv6/conf/{own}/disable_ipv6"), "1");
        node.ip(&format!("address add {address} dev {own}"));
        node.ip(&format!("link set {own} up"));
    }

    /// Creates a network for pods. A pod chooses its address in it.
    #[track_caller]
    fn network(&self, name: &str, mut plugin: Value) {
        self.lent.borrow_mut().extend(plugin["device"].as_str().map(str::to_owned));
        plugin["capabilities"]["ips"] = true.into();
        plugin["ipam"] = json!({ "type": "static" });
        let mut plugins = vec![plugin];
        if plugins[0]["capabilities"]["bandwidth"] == true {
            plugins.push(json!({ "type": "bandwidth", "capabilities": { "bandwidth": true } }));
        }
        self.cluster.apply(&json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": { "name": name },
            "spec": { "config": json!({ "cniVersion": "0.4.0", "plugins": plugins }).to_string() },
        }));
    }

    /// Creates a pod with `net1` in the first of these networks, `net2` in the second and so on, each with this
    /// address. It serves a page. The annotations say whether it is mirrored.
    #[track_caller]
    fn pod(&self, name: &str, networks: &[(&str, &str)], annotations: &[(&str, &str)]) -> KubePod {
        let networks: Vec<_> =
            networks.iter().map(|(name, address)| json!({ "name": name, "ips": [address] })).collect();
        self.pod_in(name, &networks.into(), annotations)
    }

    /// The same, with the networks in the form of Multus' annotation.
    #[track_caller]
    fn pod_in(&self, name: &str, networks: &Value, annotations: &[(&str, &str)]) -> KubePod {
        let serve = format!(
            "mkdir /www; head -c {PAGE} /dev/zero | tr '\\0' x > /www/index.html; exec httpd -f -p 80 -h /www"
        );
        let mut pod = pod_object(name, &serve);
        pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = networks.to_string().into();
        for (key, value) in annotations {
            pod["metadata"]["annotations"][*key] = (*value).into();
        }
        self.cluster.apply(&pod);
        self.cluster.running(name)
    }

    /// Deletes the pods of the story, and waits until the node has its devices back.
    #[track_caller]
    fn delete_pods(&self) {
        self.cluster.kubectl("delete pods --all --timeout=60s");
        eventually(PATIENCE, || {
            let devices = self.cluster.host().devices();
            let are_back = self.lent.borrow().iter().all(|device| devices.contains(device));
            check(are_back, || format!("not all of {:?} are back: {devices:?}", self.lent))
        });
    }

    /// Waits until exactly these NICs of `web` are mirrored, each in its network.
    #[track_caller]
    fn wait_mirrored(&self, expected: &[(&str, &str)]) -> Status {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        self.cluster.host().wait_status(|status| {
            let taps = || status.taps.iter();
            let are_attached = taps().all(TapStatus::is_attached);
            let of_web = taps().all(|tap| tap.pod.as_ref().is_some_and(|pod| pod.name == "web"));
            let mut nics: Vec<_> =
                taps().map(|tap| (tap.nic.as_str(), tap.network.as_deref().unwrap_or_default())).collect();
            nics.sort_unstable();
            check(are_attached && of_web && nics == expected, || format!("not {expected:?}: {status:#?}"))
        })
    }

    /// The full name of a network, as in Multus' status annotation.
    fn full(&self, network: &str) -> String {
        format!("{}/{network}", self.cluster.namespace())
    }

    /// Waits until the agent reports both directions of these NICs as covered, while `talk` sends packets.
    #[track_caller]
    fn wait_covered(&self, nics: &[&str], talk: impl Fn()) {
        eventually(FEW_READINGS, || {
            talk();
            let coverage = self.cluster.host().coverage()?;
            let is_covered = |nic: &&str| {
                let of_nic = coverage.iter().find(|of| of["nic"] == **nic);
                of_nic.is_some_and(|of| ["ingress", "egress"].iter().all(|way| of[way]["state"] == "Covered"))
            };
            check(nics.iter().all(is_covered), || format!("not covered: {coverage:#?}"))
        });
    }

    /// The reasons for everything that is not mirrored.
    fn reasons(&self) -> Vec<String> {
        let notes = self.cluster.host().status().notes.unwrap();
        let notes = notes["not_mirrored"].as_array().unwrap().iter();
        notes.map(|note| note["reason"].as_str().unwrap().to_owned()).collect()
    }

    /// The packets on the mirror interface while `talk` runs: each that these NICs of `web` send and receive, once and
    /// unchanged. The taps must have seen no others.
    #[track_caller]
    fn copied_during(&self, web: &KubePod, nics: &[&str], talk: impl FnOnce()) -> Frames {
        let comparison = Comparison::of_nics(&web.netns, nics, self.cluster.host());
        talk();
        let frames = comparison.is_equal();
        for tap in &self.cluster.host().status().taps {
            assert_eq!(tap.seen(), tap.total("copied") + tap.total("duplicate"), "{tap:#?}");
        }
        for nic in nics {
            let mac = web.mac_of(nic);
            let [to, from] = [0, 6].map(|at| frames.only(|frame| frame[at..at + 6] == mac).len());
            assert!(to >= 10 && from >= 10, "{to} packets to {nic}, {from} from it: {frames}");
        }
        frames
    }
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        self.delete_pods();
        for device in [BRIDGE, PAIR[0]] {
            let _ = self.cluster.host().node().try_run(&format!("ip link delete {device}"));
        }
    }
}

/// The bridge that the plugin `bridge` creates for the networks of stories, and does not remove.
const BRIDGE: &str = "pmtest-br0";

/// A veth of the node.
const PAIR: [&str; 2] = ["pmtest1", "pmtest2"];

fn bridge() -> Value {
    json!({ "type": "bridge", "bridge": BRIDGE })
}

/// The plugin that makes a NIC over a device of the node.
fn over(plugin: &str, device: &str, mode: &str) -> Value {
    json!({ "type": plugin, "master": device, "mode": mode })
}

/// The plugin that moves a device of the node into the pod.
fn device(name: &str) -> Value {
    json!({ "type": "host-device", "device": name })
}

fn ip(address: &str) -> IpAddr {
    address.parse().unwrap()
}

/// Small and large packets, and packets in fragments, in both directions.
#[track_caller]
fn ping(from: &Netns, to: &str) {
    for size in [56, 1400, 3000] {
        from.ping_every(Duration::from_millis(2), ip(to), 4, size);
    }
}

/// Fetches the page of a pod from a process in this namespace. The page must arrive completely.
#[track_caller]
fn fetch(inside: &Netns, from: &str) {
    eventually(SOON, || {
        let address = SocketAddr::new(ip(from), 80);
        let connection = inside.enter(|| TcpStream::connect_timeout(&address, scaled(SOON)));
        let connection = connection.map_err(|error| format!("{address}: {error}"))?;
        connection.set_read_timeout(Some(scaled(SOON))).unwrap();
        let request = format!("GET / HTTP/1.0\r\nHost: {from}\r\n\r\n");
        let page = Answer::to(&request, connection)?.body;
        check(page.len() == PAGE && page.bytes().all(|byte| byte == b'x'), || format!("{} bytes", page.len()))
    });
}
