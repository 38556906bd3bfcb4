//! Services: kube-proxy translates their addresses, and each mirrored pod's view of a conversation is complete.
//!
//! A node with the CNI plugin `bridge` has kube-proxy's mode nftables, and a node with `ptp` its mode iptables.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use mirror_tests::{Capture, Cluster, Frames, KubePod, MIRROR, SOON, eventually, list, pod_object};
use serde_json::json;

/// The ports of the Service and of its server.
const PORT: u16 = 80;
const ENDPOINT: u16 = 8080;
/// Questions with answers in one conversation over UDP.
const QUESTIONS: usize = 5;
/// The client, the address that it calls, and the client that the server sees. The node masquerades what comes to its
/// own port, and what a pod sends to itself.
const CALLS: [[&str; 3]; 3] = [["web", "service", "web"], ["web", "node", "node"], ["db", "service", "node"]];

/// The addresses of the pods, the Service and the node, in one family.
struct Family {
    web: IpAddr,
    db: IpAddr,
    service: IpAddr,
    node: IpAddr,
}

/// A Service with TCP and UDP at one port.
struct Service<'a> {
    cluster: &'a Cluster,
    web: &'a KubePod,
    db: &'a KubePod,
    families: Vec<Family>,
    /// Its ports at the node, for TCP and for UDP.
    node_ports: [u16; 2],
}

impl Service<'_> {
    fn calls(&self) -> impl Iterator<Item = (&Family, [&'static str; 3])> {
        self.families.iter().flat_map(|family| CALLS.map(|call| (family, call)))
    }

    /// The addresses for TCP and UDP.
    fn at(&self, family: &Family, called: &str) -> [SocketAddr; 2] {
        match called {
            "service" => [PORT; 2].map(|port| (family.service, port).into()),
            _ => self.node_ports.map(|port| (family.node, port).into()),
        }
    }

    fn fetch(&self, client: &str, from: SocketAddr) -> Result<String, String> {
        self.cluster.try_kubectl(&format!("exec {client} -- timeout 5 wget -q -O - http://{from}/"))
    }

    /// Connects, and asks over UDP, as in DNS.
    fn call(&self, family: &Family, client: &str, called: &str) {
        let [tcp, udp] = self.at(family, called);
        assert_eq!(self.fetch(client, tcp).unwrap(), "hello\n");
        let (pod, source) = if client == "web" { (self.web, family.web) } else { (self.db, family.db) };
        let server = self.db.netns.enter(|| UdpSocket::bind((family.db, ENDPOINT))).unwrap();
        let client = pod.netns.enter(|| UdpSocket::bind((source, 0))).unwrap();
        client.connect(udp).unwrap();
        for socket in [&client, &server] {
            socket.set_read_timeout(Some(SOON)).unwrap();
        }
        let mut datagram = [0; 64];
        for _ in 0..QUESTIONS {
            client.send(b"question").unwrap();
            let (_, from) = server.recv_from(&mut datagram).unwrap();
            server.send_to(b"answer", from).unwrap();
            client.recv(&mut datagram).unwrap();
        }
    }

    /// What tshark finds at the mirror interface: the packets that begin and end connections, and all datagrams, each
    /// with its client, its way and its server.
    fn found(&self, mirror: &Capture) -> Vec<String> {
        let names = ["ip.src", "ipv6.src", "ip.dst", "ipv6.dst"];
        let ports = ["tcp.srcport", "udp.srcport", "tcp.dstport", "udp.dstport"];
        let addresses = self.cluster.host().node().ip("-o address show");
        let addresses = addresses.split_whitespace().filter_map(|word| word.split('/').next()?.parse().ok());
        let mut clients: BTreeMap<IpAddr, _> = addresses.map(|address| (address, "node")).collect();
        let mut servers = BTreeMap::new();
        for family in &self.families {
            clients.extend([(family.web, "web"), (family.db, "db")]);
            servers.insert((family.db, ENDPOINT).into(), "db");
            for called in ["service", "node"] {
                servers.extend(self.at(family, called).map(|address| (address, called)));
            }
        }
        let tell = |row: &String| {
            let fields: Vec<_> = row.split('\t').collect();
            // One of two fields is empty.
            let [from, to] = [0, 2].map(|at| {
                let [ip, port] = [at, at + 4].map(|at| [fields[at], fields[at + 1]].concat());
                SocketAddr::new(ip.parse().unwrap(), port.parse().unwrap())
            });
            let packet =
                match fields[8].strip_prefix("0x").map(|flags| u16::from_str_radix(flags, 16).unwrap()) {
                    None => "UDP",
                    Some(flags) if flags & 1 != 0 => "FIN",
                    Some(flags) if flags & 0x10 != 0 => "SYN/ACK",
                    Some(_) => "SYN",
                };
            let end = |client: SocketAddr, server| Some((clients.get(&client.ip())?, servers.get(&server)?));
            match (end(from, to), end(to, from)) {
                (Some((client, server)), None) => line(from.ip(), client, ">", server, packet),
                (None, Some((client, server))) => line(from.ip(), client, "<", server, packet),
                _ => format!("of no call: {row}"),
            }
        };
        // A redirect of the node quotes the packet that it redirects.
        let filter = "(udp || tcp.flags.syn == 1 || tcp.flags.fin == 1) && !icmp && !icmpv6";
        let fields = [&names[..], &ports, &["tcp.flags"]].concat();
        let mut found: Vec<_> = mirror.dissected(filter, &fields).iter().map(tell).collect();
        found.sort();
        found
    }

    /// The same for complete conversations, as the mirrored pods have them.
    fn complete(&self, mirrored: &[&KubePod]) -> Vec<String> {
        let mut complete = Vec::new();
        for (family, [client, called, seen]) in self.calls() {
            let views = [[client, client, called], ["db", seen, "db"]];
            for [_, client, server] in
                views.iter().filter(|[of, ..]| mirrored.iter().any(|pod| pod.name == *of))
            {
                let line = |(way, packet)| line(family.web, client, way, server, packet);
                complete.extend([(">", "SYN"), ("<", "SYN/ACK"), (">", "FIN"), ("<", "FIN")].map(line));
                complete.extend([[(">", "UDP"), ("<", "UDP")]; QUESTIONS].concat().into_iter().map(line));
            }
        }
        complete.sort();
        complete
    }
}

fn line(family: IpAddr, client: &str, way: &str, server: &str, packet: &str) -> String {
    format!("IPv{} {client} {way} {server} {packet}", if family.is_ipv4() { 4 } else { 6 })
}

/// A pod calls a Service and its port at the node, and the server calls itself through the Service, while both pods or
/// one of them are mirrored.
#[test]
fn every_mirrored_pods_view_of_a_service_is_complete() {
    let cluster = &Cluster::new("service");
    let host = cluster.host();
    let server = format!("mkdir /www; echo hello > /www/index.html; exec httpd -f -p {ENDPOINT} -h /www");
    let ports = ["TCP", "UDP"].map(|protocol| {
        json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT, "targetPort": ENDPOINT })
    });
    let spec = json!({
        "type": "NodePort", "ipFamilyPolicy": "PreferDualStack", "selector": { "app": "db" }, "ports": ports,
    });
    let service =
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "db" }, "spec": spec });
    cluster.apply(&list(&[pod_object("web", "exec sleep 3600"), pod_object("db", &server), service]));
    let (web, db) = (&cluster.running("web"), &cluster.running("db"));
    let get = |what: &str| cluster.kubectl(&format!("get {what}"));
    let addresses = |what: &str| -> Vec<IpAddr> {
        get(what).split_whitespace().map(|word| word.parse().unwrap()).collect()
    };
    let of_pod = |pod: &str| addresses(&format!("pod {pod} -o jsonpath={{.status.podIPs[*].ip}}"));
    let (of_web, of_db) = (of_pod("web"), of_pod("db"));
    let of_node = addresses("nodes -o jsonpath={..addresses[?(@.type==\"InternalIP\")].address}");
    let of_service = addresses("service db -o jsonpath={.spec.clusterIPs[*]}");
    let family = |(at, web): (usize, &IpAddr)| Family {
        web: *web,
        db: of_db[at],
        service: of_service[at],
        node: of_node[at],
    };
    let node_port =
        |at: usize| get(&format!("service db -o jsonpath={{.spec.ports[{at}].nodePort}}")).parse().unwrap();
    if cluster.is_built() {
        assert_eq!(of_web.iter().map(IpAddr::is_ipv4).collect::<Vec<_>>(), [true, false], "{of_web:?}");
    }
    let service = &Service {
        cluster,
        web,
        db,
        families: of_web.iter().enumerate().map(family).collect(),
        node_ports: [0, 1].map(node_port),
    };
    for (family, [client, called, _]) in service.calls() {
        // kube-proxy learns the pod of the Service some time later.
        eventually(SOON, || service.fetch(client, service.at(family, called)[0]));
    }

    for mirrored in [&[web, db][..], &[web], &[db]] {
        for pod in [web, db] {
            let mirror = mirrored.iter().any(|mirrored| mirrored.name == pod.name);
            cluster.kubectl(&format!("annotate --overwrite pod {} podmirror.io/mirror={mirror}", pod.name));
        }
        let devices: Vec<_> = mirrored.iter().map(|pod| pod.device.as_str()).collect();
        host.wait_taps(&devices);
        let inside: Vec<_> = mirrored.iter().map(|pod| Capture::start(&pod.netns, "eth0")).collect();
        let mirror = Capture::start(host.node(), MIRROR);
        for (family, [client, called, _]) in service.calls() {
            service.call(family, client, called);
        }
        let conversations = |capture: &Capture| {
            capture.frames().only(|frame| match frame[12..14] {
                [0x08, 0x00] => [6, 17].contains(&frame[23]),
                [0x86, 0xdd] => [6, 17].contains(&frame[20]),
                _ => false,
            })
        };
        let sum = || inside.iter().fold(Frames::default(), |sum, pod| sum.and(&conversations(pod)));
        eventually(SOON, || conversations(&mirror).same_as(&sum()));
        assert_eq!(service.found(&mirror), service.complete(mirrored));
        let mistakes =
            ["retransmission", "out_of_order", "duplicate_ack", "lost_segment", "ack_lost_segment"];
        let mistakes = mistakes.map(|mistake| format!("tcp.analysis.{mistake}")).join(" || ");
        assert_eq!(mirror.dissected(&mistakes, &["frame.number", "_ws.col.Info"]), Vec::<String>::new());
        let status = host.status();
        for tap in devices.iter().map(|device| status.tap(device)) {
            assert_eq!(tap.seen(), tap.total("copied") + tap.total("duplicate"), "{tap:#?}");
        }
    }
}
