//! Services: a packet that the node translates between two mirrored pods is another packet at each of them. A reader
//! gets both views, each complete, so that an IDS can follow either connection.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
};

use mirror_common::{
    packet::header,
    sample::{DEFAULT_SEED, in_sample},
};
use mirror_tests::{Agent, Capture, Frames, Lab, Netns, PodNs, PodSpec, SOON, scaled};

use crate::{MIRROR, Node, any_mode, choice::flows, shows};

/// The addresses and ports of the services, and the port of their endpoints.
const V4: &str = "10.96.0.10";
const V6: &str = "fd96::10";
const PORT: u16 = 80;
const ENDPOINT: u16 = 8080;

/// Makes the node translate the service's addresses to those of a pod, as kube-proxy does, and the source to its own if
/// `masquerade`.
fn service(node: &Netns, endpoint: &PodNs, masquerade: bool) {
    let (v4, v6) = (endpoint.v4(), endpoint.v6());
    let source = if masquerade { "ct status dnat masquerade" } else { "" };
    let rules = format!(
        "table inet services {{
            chain before {{
                type nat hook prerouting priority -100
                ip daddr {V4} tcp dport {PORT} dnat ip to {v4}:{ENDPOINT}
                ip daddr {V4} udp dport {PORT} dnat ip to {v4}:{ENDPOINT}
                ip6 daddr {V6} tcp dport {PORT} dnat ip6 to [{v6}]:{ENDPOINT}
            }}
            chain after {{
                type nat hook postrouting priority 100
                {source}
            }}
        }}"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, rules).unwrap();
    node.run(&format!("nft -f {}", file.path().display()));
}

/// The same with IPVS, as in kube-proxy's mode ipvs: the service's addresses are the node's own.
fn ipvs_service(node: &Netns, endpoint: &PodNs) {
    node.ip("link add kube-ipvs0 up type dummy");
    for (service, endpoint) in [(V4, endpoint.v4()), (V6, endpoint.v6())] {
        node.ip(&format!("address add {service} dev kube-ipvs0"));
        let service = SocketAddr::new(service.parse().unwrap(), PORT);
        let server = SocketAddr::new(endpoint, ENDPOINT);
        for protocol in ["tcp", "udp"] {
            node.run(&format!("ipvsadm --add-service --{protocol}-service {service} --scheduler rr"));
            node.run(&format!(
                "ipvsadm --add-server --{protocol}-service {service} --real-server {server} --masquerading"
            ));
        }
    }
    node.sysctl("ipv4/vs/conntrack", "1");
}

/// Connects a client to the service, and exchanges a request and its answer.
fn connects(client: &PodNs, server: &PodNs, service: &str, endpoint: IpAddr) {
    let listener = server.netns().enter(|| TcpListener::bind((endpoint, ENDPOINT))).unwrap();
    let to = SocketAddr::new(service.parse().unwrap(), PORT);
    let mut client = client.netns().enter(|| TcpStream::connect_timeout(&to, scaled(SOON))).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(scaled(SOON))).unwrap();
    }
    let (question, answer) = ([1; 5000], [2; 50_000]);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut asked = [0; 5000];
            server.read_exact(&mut asked).unwrap();
            server.write_all(&answer).unwrap();
            assert_eq!(asked, question);
            drop(server);
        });
        client.write_all(&question).unwrap();
        let mut answered = Vec::new();
        client.read_to_end(&mut answered).unwrap();
        assert_eq!(answered, answer);
    });
}

/// Exchanges datagrams with answers, as in DNS, in as many conversations, each of a socket of its own. All have the same bytes.
fn asks(client: &PodNs, server: &PodNs, conversations: usize, times: usize) {
    let server = server.netns().enter(|| UdpSocket::bind((server.v4(), ENDPOINT))).unwrap();
    server.set_read_timeout(Some(scaled(SOON))).unwrap();
    let mut datagram = [0; 64];
    for _ in 0..conversations {
        let client = client.netns().enter(|| UdpSocket::bind((client.v4(), 0))).unwrap();
        client.connect((V4, PORT)).unwrap();
        client.set_read_timeout(Some(scaled(SOON))).unwrap();
        for _ in 0..times {
            client.send(b"question").unwrap();
            let (_, from) = server.recv_from(&mut datagram).unwrap();
            server.send_to(b"answer", from).unwrap();
            client.recv(&mut datagram).unwrap();
        }
    }
}

/// Fails unless tshark finds exactly these connections, by client, server and port, each complete and without
/// additional packets.
#[track_caller]
fn has_connections(mirror: &Capture, expected: &[(IpAddr, IpAddr, u16)]) {
    let mistakes = ["retransmission", "out_of_order", "duplicate_ack", "lost_segment", "ack_lost_segment"];
    let mistakes = mistakes.map(|mistake| format!("tcp.analysis.{mistake}")).join(" || ");
    assert_eq!(mirror.dissected(&mistakes, &["frame.number", "_ws.col.Info"]), Vec::<String>::new());
    // An IPv4 packet has two of the addresses, and an IPv6 packet the other two.
    let fields = ["ip.src", "ipv6.src", "ip.dst", "ipv6.dst", "tcp.srcport", "tcp.dstport"];
    for flag in ["syn", "fin"] {
        let packets = mirror.dissected(&format!("tcp.flags.{flag} == 1"), &fields);
        let packets: Vec<Vec<_>> = packets.iter().map(|row| row.split_whitespace().collect()).collect();
        for (client, server, port) in expected {
            let (client, server, port) = (client.to_string(), server.to_string(), port.to_string());
            let count = |from: &str, to: &str, side: usize| {
                packets.iter().filter(|row| row[..2] == [from, to] && row[side] == port).count()
            };
            let found = (count(&client, &server, 3), count(&server, &client, 2));
            assert_eq!(found, (1, 1), "{flag} of {client} and {server}, port {port}: {packets:?}");
        }
        assert_eq!(packets.len(), 2 * expected.len(), "{flag}: {packets:?}");
    }
}

/// The captures of the mirrored pods and of the mirror interface.
struct Service<'a> {
    lab: &'a Lab,
    inside: Vec<Capture>,
    mirror: Capture,
    _agent: Agent,
}

impl<'a> Service<'a> {
    fn mirrored(lab: &'a Lab, pods: &[&PodNs]) -> Self {
        Self::annotated(lab, pods, &[], Capture::start)
    }

    fn annotated(
        lab: &'a Lab,
        pods: &[&PodNs],
        annotations: &[(&str, &str)],
        capture: fn(&Netns, &str) -> Capture,
    ) -> Self {
        let spec = |pod: &&PodNs| {
            let annotate = |spec: PodSpec, (key, value): &(&str, &str)| spec.annotated(key, value);
            annotations.iter().fold(PodSpec::of(pod).mirror("true"), annotate)
        };
        let agent = Agent::mirroring(lab, any_mode(), &pods.iter().map(spec).collect::<Vec<_>>(), &[], pods);
        let inside = pods.iter().map(|pod| capture(pod.netns(), "eth0")).collect();
        Self { lab, inside, mirror: capture(lab.node(), MIRROR), _agent: agent }
    }

    /// The packets of the mirrored pods.
    fn frames(&self) -> Frames {
        self.inside.iter().fold(Frames::default(), |all, pod| all.and(&pod.frames()))
    }

    /// Waits until the mirror interface has shown all packets of the mirrored pods, each once.
    #[track_caller]
    fn shows_all_views(&self) {
        shows(&self.mirror, || self.frames());
    }

    fn duplicates(&self, pods: &[&PodNs]) -> u64 {
        let status = self.lab.status();
        pods.iter().map(|pod| status.tap(pod.veth_host()).total("duplicate")).sum()
    }
}

/// Uses the service, whose client and endpoint are mirrored: the reader gets both views.
#[track_caller]
fn both_views_are_complete(node: &Node) -> Service<'_> {
    let Node { web, db, lab } = node;
    let service = Service::mirrored(lab, &[web, db]);
    connects(web, db, V4, db.v4());
    connects(web, db, V6, db.v6());
    asks(web, db, 1, 100);
    service.shows_all_views();
    let service_of = |text: &str| text.parse().unwrap();
    has_connections(
        &service.mirror,
        &[
            (web.v4(), service_of(V4), PORT),
            (web.v4(), db.v4(), ENDPOINT),
            (web.v6(), service_of(V6), PORT),
            (web.v6(), db.v6(), ENDPOINT),
        ],
    );
    assert_eq!(service.duplicates(&[web, db]), 0, "each packet was translated");
    service
}

#[test]
fn both_views_of_a_service_are_complete() {
    let node = &Node::routed("service");
    let Node { web, db, lab } = node;
    service(lab.node(), db, false);
    let service = both_views_are_complete(node);
    // Without a translation, the packet after the router is the same: the mirror interface shows it as its sender sent
    // it.
    let before = service.mirror.frames();
    web.ping(db.v4(), 20, 56);
    let sent = |pod: &PodNs, inside: &Capture| {
        let mac = pod.eth0().mac;
        inside.frames().only(|frame| frame[6..12] == mac && frame[12..14] == [8, 0] && frame[23] == 1)
    };
    let [of_web, of_db] = &service.inside[..] else { unreachable!() };
    shows(&service.mirror, || before.and(&sent(web, of_web)).and(&sent(db, of_db)));
    assert_eq!(service.duplicates(&[web, db]), 40);
}

#[test]
#[ignore = "needs a kernel with IPVS, as in a guest: cargo xtask vm --kernel 5.10 --level netns -- ipvs"]
fn both_views_of_an_ipvs_service_are_complete() {
    let node = &Node::routed("service-ipvs");
    ipvs_service(node.lab.node(), &node.db);
    both_views_are_complete(node);
}

/// If one of the two pods is mirrored, the reader gets that pod's view, and nothing of the other one.
#[test]
fn the_view_of_one_pod_is_complete() {
    for (name, is_client) in [("service-client", true), ("service-backend", false)] {
        let Node { web, db, lab } = &Node::routed(name);
        service(lab.node(), db, false);
        let pod = if is_client { web } else { db };
        let service = Service::mirrored(lab, &[pod]);
        connects(web, db, V4, db.v4());
        connects(web, db, V6, db.v6());
        asks(web, db, 1, 100);
        service.shows_all_views();
        let (servers, port) = match is_client {
            true => ([V4, V6].map(|service| service.parse().unwrap()), PORT),
            false => ([db.v4(), db.v6()], ENDPOINT),
        };
        let [v4, v6] = servers;
        has_connections(&service.mirror, &[(web.v4(), v4, port), (web.v6(), v6, port)]);
        assert_eq!(service.duplicates(&[pod]), 0, "{name}");
    }
}

/// Each view is a connection with its own endpoints, so a sample may have one of them and not the other one.
#[test]
fn a_sample_takes_each_view_whole_or_not_at_all() {
    const CONVERSATIONS: usize = 100;
    let Node { web, db, lab } = &Node::routed("service-sample");
    service(lab.node(), db, false);
    // Many short packets in a burst: more than tcpdump's ring holds of super-frames.
    let sample = [("podmirror.io/sample", "50%")];
    let service = Service::annotated(lab, &[web, db], &sample, Capture::of_wire);
    asks(web, db, CONVERSATIONS, 3);
    let taken = |frame: &[u8]| in_sample(&header(frame, frame.len() as u32), DEFAULT_SEED, 1 << 31);
    shows(&service.mirror, || service.frames().only(taken));
    let (all, kept) = (flows(&service.frames()), flows(&service.mirror.frames()));
    for (flow, packets) in &kept {
        assert_eq!(all[flow], *packets, "flow {flow:?}");
    }
    // The two views of a connection have the client's address and port in common.
    let mut views = BTreeMap::<Vec<u8>, Vec<bool>>::new();
    for flow in all.keys() {
        let client =
            flow.iter().find(|end| IpAddr::from([end[0], end[1], end[2], end[3]]) == web.v4()).unwrap();
        views.entry(client.clone()).or_default().push(kept.contains_key(flow));
    }
    let kinds: BTreeSet<Vec<bool>> = views.into_values().filter(|of_both| of_both.len() == 2).collect();
    assert_eq!(kinds.len(), 4, "none, one, the other, both: {kinds:?}");
}

/// The client's own pod is the endpoint: the node masquerades, and sends each packet back to the pod that has sent it.
#[test]
fn a_pod_that_calls_itself_through_a_service_is_seen_both_ways() {
    let Node { web, db, lab } = &Node::routed("service-itself");
    lab.node().ip("address add 192.0.2.1/32 dev lo");
    lab.node().ip(&format!("address add 192.0.2.1/32 dev {}", web.veth_host()));
    service(lab.node(), web, true);
    let service = Service::mirrored(lab, &[web, db]);
    connects(web, web, V4, web.v4());
    asks(web, web, 1, 20);
    service.shows_all_views();
    let node = "192.0.2.1".parse().unwrap();
    has_connections(&service.mirror, &[(web.v4(), V4.parse().unwrap(), PORT), (node, web.v4(), ENDPOINT)]);
    assert_eq!(service.duplicates(&[web, db]), 0);
}
