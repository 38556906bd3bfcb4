//! A node for one contestant: pods, servers, and what copies the packets. Called by `main`, and by `load` for the
//! addresses.

use std::net::IpAddr;

use mirror_test_traffic::{
    plan::{Contestant, Kind, Scenario, Way},
    tools,
};
use mirror_tests::{
    Agent, AttachMode, Lab, MIRROR, Neighbour, Netns, OneCpu, PodNs, PodSpec, PodsFile, Reader,
};
use nix::sys::signal::Signal;

use crate::{http, load::Cpus};

/// Addresses that are no pod's.
const NODE: &str = "10.9.9.9";
const CLUSTER_IP: &str = "10.96.0.10";
/// The target that is a stream, and its ring: it holds all packets of a sample.
const STREAM: &str = "live";
const RING: &str = "64MiB";
const CUT_TO: &str = "96";
/// Where the servers listen.
pub(crate) const IPERF3_PORT: &str = "5201";
pub(crate) const SOCKPERF_PORT: &str = "11111";

/// A node for one contestant. The node is the last field but one, so that it goes after everything on it.
pub(crate) struct Stage {
    contestant: Contestant,
    agent: Option<Agent>,
    tail: Option<Agent>,
    program: Option<Neighbour>,
    servers: Vec<Reader>,
    client: PodNs,
    server: PodNs,
    other: PodNs,
    lab: Lab,
    far: Option<Far>,
}

/// The other node, and the pod there. Both nodes number their pods from 1, so that others have the client's addresses.
struct Far {
    server: PodNs,
    _others: Vec<PodNs>,
    _lab: Lab,
}

impl Stage {
    /// Makes it, with what the scenarios need.
    pub(crate) fn new(contestant: Contestant, scenarios: &[Scenario], cpus: Cpus) -> Self {
        let name = format!("traffic-{}", contestant as u8);
        let lab = Lab::new(&name);
        let [client, server, other] = ["client", "server", "other"].map(|name| lab.routed_pod(name));
        lab.node().ip(&format!("address add {NODE}/32 dev lo"));
        // All nodes translate addresses, so that connections are tracked on all of them, as with kube-proxy.
        lab.node().run("nft add table ip services");
        lab.node().run("nft add chain ip services prerouting { type nat hook prerouting priority dstnat ; }");
        lab.node().run(&format!(
            "nft add rule ip services prerouting ip daddr {CLUSTER_IP} dnat to {}",
            server.v4()
        ));
        let has_far = takes_part(contestant, scenarios, |scenario| scenario.way == Way::TwoNodes);
        let far = has_far.then(|| Far::new(&lab, &client, &name));
        let mut stage = Self {
            contestant,
            agent: None,
            tail: None,
            program: None,
            servers: Vec::new(),
            client,
            server,
            other,
            lab,
            far,
        };
        {
            let _on = OneCpu::numbered(cpus.reader);
            stage.mirror();
        }
        let _on = OneCpu::numbered(cpus.server);
        stage.serve_all(scenarios);
        stage
    }

    /// Who copies here.
    pub(crate) fn contestant(&self) -> Contestant {
        self.contestant
    }

    /// The network namespace of the client.
    pub(crate) fn client(&self) -> &Netns {
        self.client.netns()
    }

    /// The network namespace of the server.
    pub(crate) fn server(&self, way: Way) -> &Netns {
        match (way, &self.far) {
            (Way::TwoNodes, Some(far)) => far.server.netns(),
            (Way::OwnNode, _) => self.lab.node(),
            _ => self.server.netns(),
        }
    }

    /// The address by which the client reaches the server.
    pub(crate) fn address(&self, way: Way) -> IpAddr {
        let fixed = |text: &str| text.parse().unwrap();
        match (way, &self.far) {
            (Way::TwoNodes, Some(far)) => far.server.v4(),
            (Way::OwnNode, _) => fixed(NODE),
            (Way::ClusterIp, _) => fixed(CLUSTER_IP),
            _ => self.server.v4(),
        }
    }

    /// Starts a program that reads, for one sample. Only then, because a packet socket anywhere on the machine makes the
    /// kernel take the time of every packet.
    pub(crate) fn start_reader(&self, cpus: Cpus) -> Option<Reader> {
        let ring = self.lab.files().join("ring.pcap");
        let (netns, device, more): (&Netns, &str, &[&str]) = match self.contestant {
            Contestant::TcxRead | Contestant::MirredRead => (self.lab.node(), MIRROR, &[]),
            Contestant::Tcpdump => (self.client.netns(), "eth0", &[]),
            Contestant::Tcpdump96 => (self.client.netns(), "eth0", &["-s", CUT_TO]),
            // Two files of 64 MB, so that the disk does not fill up.
            Contestant::TcpdumpFile => (self.client.netns(), "eth0", &["-C", "64", "-W", "2"]),
            Contestant::TcpdumpVeth => (self.lab.node(), self.client.veth_host(), &[]),
            _ => return None,
        };
        let _on = OneCpu::numbered(cpus.reader);
        let mut command = netns.command("tcpdump");
        command.args(["-n", "-Z", "root", "-i", device]).args(more).arg("-w");
        match self.contestant {
            Contestant::TcpdumpFile => command.arg(ring),
            _ => command.arg("/dev/null"),
        };
        let mut reader = Reader::start(&self.lab, "tcpdump", command);
        reader.wait_for("listening on");
        Some(reader)
    }

    /// Ends the reader of a sample, and returns the part of its packets that it has lost, in percent.
    pub(crate) fn stop_reader(reader: Reader) -> f64 {
        let said = reader.stop(Signal::SIGTERM);
        let (received, dropped) = tools::tcpdump(&said).unwrap_or_else(|why| panic!("{why}"));
        assert!(received > 0, "there was nothing for tcpdump: {said}");
        100.0 * dropped as f64 / received as f64
    }

    /// The copies so far, for the report; nothing where the readers count them, or where there are none. Panics if there
    /// should be copies.
    pub(crate) fn copies(&self) -> Option<String> {
        let title = self.contestant.title();
        match self.contestant {
            Contestant::Off | Contestant::OffAgain => None,
            Contestant::Unselected | Contestant::BareClone | Contestant::Mirred | Contestant::MirredRead => {
                let link = self.lab.node().ip(&format!("-j -s link show dev {MIRROR}"));
                let link: serde_json::Value = serde_json::from_str(&link).unwrap();
                let sent = link[0]["stats64"]["tx"]["packets"].as_u64().unwrap();
                if self.contestant == Contestant::Unselected {
                    assert_eq!(sent, 0, "{title}: only the other pod is mirrored, and it is silent");
                    return None;
                }
                assert!(sent > 0, "{title}: nothing was copied");
                Some(format!("{title}: {sent} copies."))
            }
            Contestant::Tcpdump
            | Contestant::Tcpdump96
            | Contestant::TcpdumpFile
            | Contestant::TcpdumpVeth => None,
            _ => {
                let status = self.lab.status();
                let session = status.tap(self.client.veth_host()).session("default");
                let (seen, copied) = (session.seen(), session.total("copied"));
                match self.contestant {
                    Contestant::TcxFilter => {
                        assert!(seen > 0 && copied == 0, "{title}: {:?}", session.verdicts())
                    }
                    _ => assert!(copied > 0, "{title}: nothing was copied: {:?}", session.verdicts()),
                }
                Some(format!("{title}: {copied} copies of {seen} packets."))
            }
        }
    }

    /// Ends what must end well.
    pub(crate) fn end(self) {
        if let Some(tail) = self.tail {
            tail.stop();
        }
        if let Some(agent) = self.agent {
            agent.stop();
        }
    }

    /// Lets the contestant copy the client's packets.
    fn mirror(&mut self) {
        let (lab, client) = (&self.lab, &self.client);
        let mirrored = || PodSpec::of(client).mirror("true");
        let other = || PodSpec::of(&self.other);
        let stream = ["--target", &format!("{STREAM}=stream")];
        let streamed = || mirrored().annotated("podmirror.io/target", STREAM);
        let (spec, flags, mode): (PodSpec, &[&str], _) = match self.contestant {
            Contestant::Tcx | Contestant::TcxRead => (mirrored(), &[], AttachMode::Tcx),
            Contestant::TcxFilter => {
                // Port 1: nothing here uses it.
                (mirrored().annotated("podmirror.io/filter", "tcp port 1"), &[], AttachMode::Tcx)
            }
            Contestant::Clsact => (mirrored(), &[], AttachMode::Clsact),
            Contestant::Stream => (streamed(), &stream, AttachMode::Tcx),
            Contestant::Stream96 => {
                (streamed().annotated("podmirror.io/snaplen", CUT_TO), &stream, AttachMode::Tcx)
            }
            Contestant::Unselected => (other().mirror("true"), &[], AttachMode::Tcx),
            // The agent makes the mirror interface, and mirrors nothing.
            Contestant::BareClone | Contestant::Mirred | Contestant::MirredRead => {
                (PodSpec::of(client), &[], AttachMode::Clsact)
            }
            _ => return,
        };
        let agent = Agent::run(lab, mode, &PodsFile::new(lab, &[spec]), flags);
        match self.contestant {
            Contestant::BareClone => {
                lab.wait_mirrored(&[]);
                self.program = Some(Neighbour::that_clones(lab, client.veth_host(), MIRROR));
            }
            Contestant::Mirred | Contestant::MirredRead => {
                lab.wait_mirrored(&[]);
                let device = client.veth_host();
                lab.node().tc(&format!("qdisc add dev {device} clsact"));
                for hook in ["ingress", "egress"] {
                    lab.node().tc(&format!(
                        "filter add dev {device} {hook} protocol all u32 match u32 0 0 \
                         action mirred egress mirror dev {MIRROR}"
                    ));
                }
            }
            Contestant::Unselected => drop(lab.wait_mirrored(&[&self.other])),
            _ => drop(lab.wait_mirrored(&[client])),
        }
        if matches!(self.contestant, Contestant::Stream | Contestant::Stream96) {
            let words = ["tail", "--target", STREAM, "--super-frames", "--buffer", RING, "-w", "/dev/null"];
            self.tail = Some(Agent::readable(lab, &words));
            lab.wait_status(|status| {
                mirror_tests::check(status.target(STREAM).up, || "nobody reads".to_owned())
            });
        }
        self.agent = Some(agent);
    }

    /// Starts the servers that the scenarios need.
    fn serve_all(&mut self, scenarios: &[Scenario]) {
        let contestant = self.contestant;
        let needs = |is_it: &dyn Fn(&Scenario) -> bool| takes_part(contestant, scenarios, is_it);
        for way in [Way::SameNode, Way::OwnNode, Way::TwoNodes] {
            // A ClusterIP leads to the pod of the same node.
            let leads_there = |scenario: &Scenario| {
                scenario.way == way || (way == Way::SameNode && scenario.way == Way::ClusterIp)
            };
            if needs(&leads_there) {
                let words = ["iperf3", "--server", "--port", IPERF3_PORT, "--forceflush"];
                self.serve(way, &words, "Server listening");
            }
        }
        for (kind, more) in [(Kind::TcpSockperf, &["--tcp"][..]), (Kind::UdpSockperf, &[])] {
            if needs(&|scenario| scenario.kind == kind) {
                let words = ["sockperf", "server", "-i", "0.0.0.0", "-p", SOCKPERF_PORT];
                self.serve(Way::SameNode, &[&words[..], more].concat(), "PORT = ");
            }
        }
        if needs(&|scenario| scenario.kind == Kind::Http) {
            http::serve(self.server.netns());
        }
    }

    /// Starts a server where the client looks for it, and waits until it says that it listens.
    fn serve(&mut self, way: Way, words: &[&str], listening: &str) {
        let mut command = self.server(way).command(words[0]);
        command.args(&words[1..]);
        let name = format!("{}-{}", words[0], self.servers.len());
        let mut server = Reader::start(&self.lab, &name, command);
        server.wait_for(listening);
        self.servers.push(server);
    }
}

/// Whether the contestant takes part in such a scenario.
fn takes_part(contestant: Contestant, scenarios: &[Scenario], is_it: impl Fn(&Scenario) -> bool) -> bool {
    scenarios.iter().any(|scenario| is_it(scenario) && scenario.contestants().contains(&contestant))
}

impl Far {
    /// A second node with a pod, a cable between the nodes, and routes.
    fn new(lab: &Lab, client: &PodNs, name: &str) -> Self {
        let far = Lab::new(&format!("{name}-far"));
        let others: Vec<_> = ["one", "two", "three"].map(|name| far.routed_pod(name)).into();
        let server = far.routed_pod("server");
        lab.node().ip(&format!("link add up0 type veth peer name up0 netns {}", far.node().name()));
        for (node, own, to, pod) in [(lab.node(), 1, 2, server.v4()), (far.node(), 2, 1, client.v4())] {
            node.ip("link set up0 up");
            node.ip(&format!("address add 10.9.0.{own}/24 dev up0"));
            // The other node has a pod with the same address.
            node.ip(&format!("route replace {pod} via 10.9.0.{to}"));
        }
        Self { server, _others: others, _lab: far }
    }
}
