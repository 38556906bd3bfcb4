//! A node for one contestant: its network, the servers, and the software that copies the packets.

use std::{
    collections::BTreeSet,
    fs,
    sync::{Mutex, PoisonError},
};

use mirror_test_traffic::{
    plan::{Contestant, Kind, Scenario, Way},
    tools,
};
use mirror_tests::{Agent, AttachMode, MIRROR, Neighbour, Netns, OneCpu, PodSpec, PodsFile, Reader, check};
use nix::sys::signal::Signal;

use crate::{http, load::Cpus, network::Network};

/// The stream target, and the size of its ring, which holds all packets of a sample.
const STREAM: &str = "live";
const RING: &str = "64MiB";
const CUT_TO: &str = "96";
/// Ports of the servers.
pub(crate) const IPERF3_PORT: u16 = 5201;
pub(crate) const SOCKPERF_PORT: u16 = 11111;
pub(crate) const REDIS_PORT: u16 = 6379;
/// Starts a Redis server as the user nobody; the arguments follow. Debian's package redis-server would start a service
/// of the machine. redis-tools contains the same binary, which acts as a server if it is called by that name.
const REDIS: [&str; 8] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "bash",
    "-c",
    r#"exec -a redis-server redis-check-rdb "$@""#,
    "bash",
];

/// tcpdump's options for two files of 64 MB, so that the disk does not fill up.
const RING_OF_FILES: [&str; 4] = ["-C", "64", "-W", "2"];
/// Among fewer packets than this, a filter that matches one of 128 may match none.
const A_FEW_PACKETS: u64 = 10_000;

/// Held by the stage whose agent starts.
static TURN: Mutex<()> = Mutex::new(());

/// A node for one contestant. The network is the last field, so that it is dropped after everything on it.
pub(crate) struct Stage {
    contestant: Contestant,
    agent: Option<Agent>,
    tail: Option<Agent>,
    program: Option<Neighbour>,
    servers: Vec<Reader>,
    pub(crate) network: Network,
}

impl Stage {
    /// Creates the node with everything that the scenarios need.
    pub(crate) fn new(contestant: Contestant, scenarios: &[Scenario], cpus: Cpus) -> Self {
        let mut scenarios = scenarios.to_vec();
        scenarios.retain(|scenario| scenario.contestants().contains(&contestant));
        let network = Network::new(&format!("traffic-{}", contestant as u8), &scenarios);
        let mut stage =
            Self { contestant, agent: None, tail: None, program: None, servers: Vec::new(), network };
        {
            // Agents start one after the other: verifying their programs takes some tenths of a second of this CPU.
            let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let _on = OneCpu::numbered(cpus.reader);
            stage.mirror();
        }
        let _on = OneCpu::numbered(cpus.server);
        stage.serve_all(&scenarios);
        stage
    }

    pub(crate) fn contestant(&self) -> Contestant {
        self.contestant
    }

    /// The packets that the mirrored pod's NIC for this way has sent and received.
    pub(crate) fn packets(&self, way: Way) -> u64 {
        let dev = self.network.pod.netns().enter(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
        tools::packets(&dev, self.network.nic(way)).unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts a program that reads, for one sample. Only then, because a packet socket anywhere on the machine makes
    /// the kernel take a timestamp of every packet.
    pub(crate) fn start_reader(&self, cpus: Cpus, way: Way) -> Option<Reader> {
        let network = &self.network;
        let nic = network.nic(way);
        let ring = network.lab.files().join("ring.pcap");
        let (netns, device, more): (&Netns, &str, &[&str]) = match self.contestant {
            Contestant::TcxRead | Contestant::MirredRead => (network.lab.node(), MIRROR, &[]),
            Contestant::Tcpdump => (network.pod.netns(), nic, &[]),
            Contestant::Tcpdump96 => (network.pod.netns(), nic, &["-s", CUT_TO]),
            Contestant::TcpdumpFile => (network.pod.netns(), nic, &RING_OF_FILES),
            Contestant::TcpdumpVeth => (network.lab.node(), network.pod.veth_host(), &[]),
            Contestant::TcpdumpVethFile => (network.lab.node(), network.pod.veth_host(), &RING_OF_FILES),
            _ => return None,
        };
        let _on = OneCpu::numbered(cpus.reader);
        let mut command = netns.command("tcpdump");
        command.args(["-n", "-Z", "root", "-i", device]).args(more).arg("-w");
        match self.contestant {
            Contestant::TcpdumpFile | Contestant::TcpdumpVethFile => command.arg(ring),
            _ => command.arg("/dev/null"),
        };
        let mut reader = Reader::start(&network.lab, "tcpdump", command);
        reader.wait_for("listening on");
        Some(reader)
    }

    /// Ends the reader of a sample, and returns the share of packets that it has lost, in percent.
    pub(crate) fn stop_reader(reader: Reader) -> f64 {
        let said = reader.stop(Signal::SIGTERM);
        let (received, dropped) = tools::tcpdump(&said).unwrap_or_else(|why| panic!("{why}"));
        assert!(received > 0, "there was nothing for tcpdump: {said}");
        100.0 * dropped as f64 / received as f64
    }

    /// The copies so far, for the report; `None` if the readers count them, or if there are none. Panics if copies are
    /// missing.
    pub(crate) fn copies(&self) -> Option<String> {
        let title = self.contestant.title();
        // The filter matches one packet of 128, so possibly none of a few.
        let may_be_none = matches!(self.contestant, Contestant::TcxFew | Contestant::MirredFew)
            && self.packets(Way::SameNode) < A_FEW_PACKETS;
        match self.contestant {
            Contestant::Off | Contestant::OffAgain => None,
            Contestant::Unselected
            | Contestant::BareClone
            | Contestant::Mirred
            | Contestant::MirredRead
            | Contestant::MirredFew => {
                let link = self.network.lab.node().ip(&format!("-j -s link show dev {MIRROR}"));
                let link: serde_json::Value = serde_json::from_str(&link).unwrap();
                let sent = link[0]["stats64"]["tx"]["packets"].as_u64().unwrap();
                if self.contestant == Contestant::Unselected {
                    assert_eq!(sent, 0, "{title}: only the other pod is mirrored, and it is silent");
                    return None;
                }
                assert!(sent > 0 || may_be_none, "{title}: nothing was copied");
                Some(format!("{title}: {sent} copies."))
            }
            Contestant::Tcpdump
            | Contestant::Tcpdump96
            | Contestant::TcpdumpFile
            | Contestant::TcpdumpVeth
            | Contestant::TcpdumpVethFile => None,
            _ => {
                let status = self.network.lab.status();
                let sessions = status.taps.iter().map(|tap| tap.session("default"));
                let sessions: Vec<_> = sessions.collect();
                let seen: u64 = sessions.iter().map(|session| session.seen()).sum();
                let copied: u64 = sessions.iter().map(|session| session.total("copied")).sum();
                match self.contestant {
                    Contestant::TcxFilter => assert!(seen > 0 && copied == 0, "{title}: {sessions:?}"),
                    // While the agent is late, copies are made.
                    Contestant::TcxUnread => assert!(copied < seen, "{title}: {sessions:?}"),
                    _ => assert!(copied > 0 || may_be_none, "{title}: nothing was copied: {sessions:?}"),
                }
                Some(format!("{title}: {copied} copies of {seen} packets."))
            }
        }
    }

    /// Ends everything that must end without an error.
    pub(crate) fn end(self) {
        if let Some(tail) = self.tail {
            tail.stop();
        }
        if let Some(agent) = self.agent {
            agent.stop();
        }
    }

    /// Starts copying the packets of the mirrored pod.
    fn mirror(&mut self) {
        let Network { lab, pod, other: silent, .. } = &self.network;
        let mirrored = || PodSpec::of(pod).mirror("true");
        let other = || PodSpec::of(silent);
        let stream = ["--define-target", &format!("{STREAM}=stream")];
        let streamed = || mirrored().annotated("podmirror.io/target", STREAM);
        let (spec, flags, mode): (PodSpec, &[&str], _) = match self.contestant {
            Contestant::Tcx | Contestant::TcxRead => (mirrored(), &[], AttachMode::Tcx),
            Contestant::TcxFreed => {
                // VXLAN without a remote frees the packets that it sends. Not every kernel has a dummy device.
                lab.node().ip(&format!("link add {MIRROR} type vxlan id 1 dstport 4789 nolearning"));
                lab.node().ip(&format!("link set {MIRROR} arp off up"));
                (mirrored(), &[], AttachMode::Tcx)
            }
            Contestant::TcxUnread => (mirrored(), &["--when-read"], AttachMode::Tcx),
            Contestant::TcxFilter => {
                // Nothing here uses port 1.
                (mirrored().annotated("podmirror.io/filter", "tcp port 1"), &[], AttachMode::Tcx)
            }
            // The IP identification counts the packets of a connection.
            Contestant::TcxFew => {
                (mirrored().annotated("podmirror.io/filter", "ip[4:2] & 0x7f = 0"), &[], AttachMode::Tcx)
            }
            Contestant::Clsact => (mirrored(), &[], AttachMode::Clsact),
            Contestant::Stream => (streamed(), &stream, AttachMode::Tcx),
            Contestant::Stream96 => {
                (streamed().annotated("podmirror.io/snaplen", CUT_TO), &stream, AttachMode::Tcx)
            }
            Contestant::Unselected => (other().mirror("true"), &[], AttachMode::Tcx),
            // The agent creates the mirror interface, and mirrors nothing.
            Contestant::BareClone | Contestant::Mirred | Contestant::MirredRead | Contestant::MirredFew => {
                (PodSpec::of(pod), &[], AttachMode::Clsact)
            }
            _ => return,
        };
        let agent = Agent::run(lab, mode, &PodsFile::new(lab, &[spec]), flags);
        match self.contestant {
            Contestant::BareClone => {
                lab.wait_mirrored(&[]);
                self.program = Some(Neighbour::that_clones(lab, pod.veth_host(), MIRROR));
            }
            Contestant::Mirred | Contestant::MirredRead | Contestant::MirredFew => {
                let matches = match self.contestant {
                    Contestant::MirredFew => "ip u32 match u16 0 0x007f at 4",
                    _ => "all u32 match u32 0 0",
                };
                lab.wait_mirrored(&[]);
                let device = pod.veth_host();
                lab.node().tc(&format!("qdisc add dev {device} clsact"));
                for hook in ["ingress", "egress"] {
                    lab.node().tc(&format!(
                        "filter add dev {device} {hook} protocol {matches} \
                         action mirred egress mirror dev {MIRROR}"
                    ));
                }
            }
            Contestant::Unselected => drop(lab.wait_mirrored(&[silent])),
            // Each NIC of the pod has a tap.
            _ => drop(lab.wait_status(|status| {
                let taps = status.taps.iter().filter(|tap| tap.attached.values().all(|how| how != "none"));
                check(taps.count() == pod.nics().len(), || format!("{:?}", status.taps))
            })),
        }
        if matches!(self.contestant, Contestant::Stream | Contestant::Stream96) {
            let words = ["tail", "--target", STREAM, "--super-frames", "--buffer", RING, "-w", "/dev/null"];
            self.tail = Some(Agent::readable(lab, &words));
            lab.wait_status(|status| check(status.target(STREAM).up, || "nobody reads".to_owned()));
        }
        self.agent = Some(agent);
    }

    /// Starts the servers that the scenarios need.
    fn serve_all(&mut self, scenarios: &[Scenario]) {
        let iperf3 = format!("iperf3 --server --port {IPERF3_PORT} --forceflush");
        for Scenario { way, .. } in self.places(scenarios, &[Kind::TcpBandwidth, Kind::UdpBandwidth]) {
            self.serve(way, &words(&iperf3), "Server listening");
        }
        let sockperf = format!("sockperf server -i 0.0.0.0 -p {SOCKPERF_PORT}");
        for (kind, more) in [(Kind::TcpSockperf, " --tcp"), (Kind::UdpSockperf, "")] {
            for Scenario { way, .. } in self.places(scenarios, &[kind]) {
                self.serve(way, &words(&format!("{sockperf}{more}")), "PORT = ");
            }
        }
        for Scenario { way, .. } in self.places(scenarios, &[Kind::Http]) {
            http::serve(self.network.server(way));
        }
        for Scenario { way, parameter, .. } in self.places(scenarios, &[Kind::RedisGet, Kind::RedisSet]) {
            let address = self.network.address(way, REDIS_PORT);
            let redis = format!(
                "--bind {} --port {} --protected-mode no --appendonly no --dir / --save",
                address.ip(),
                address.port()
            );
            // No snapshots, and no file to load, which would be in the working directory.
            self.serve(way, &[&REDIS[..], &words(&redis), &[""]].concat(), "Ready to accept connections");
            // The value for `get`: redis-benchmark uses one key.
            self.network.server(way).run(&format!(
                "redis-benchmark --csv -h {} -p {} -t set -n 1 -c 1 -d {parameter}",
                address.ip(),
                address.port()
            ));
        }
    }

    /// For each namespace that needs a server for these kinds, one of the scenarios that need it.
    fn places(&self, scenarios: &[Scenario], kinds: &[Kind]) -> Vec<Scenario> {
        let mut places = BTreeSet::new();
        let of_kinds = scenarios.iter().filter(|scenario| kinds.contains(&scenario.kind));
        of_kinds.filter(|scenario| places.insert(self.network.server(scenario.way).name())).copied().collect()
    }

    /// Starts a server where the client expects it, and waits until it prints that it listens.
    fn serve(&mut self, way: Way, words: &[&str], listening: &str) {
        let mut command = self.network.server(way).command(words[0]);
        command.args(&words[1..]);
        let name = format!("{}-{}", words[0], self.servers.len());
        let mut server = Reader::start(&self.network.lab, &name, command);
        server.wait_for(listening);
        self.servers.push(server);
    }
}

/// The words of a command line.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}
