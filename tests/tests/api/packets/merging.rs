//! One answer with the packets of several nodes: whose packets it has, their order, and the names of their addresses.

use std::{net::IpAddr, thread};

use mirror_tests::{Agent, Api, Capture, Container, Frames, Lab, PacketFile, PodNs, SOON, check, eventually};
use serde_json::json;

use super::{Packets, Stream};
use crate::{
    Node,
    aggregation::GROUP,
    resources::{mirrors, run},
};

/// Creates a pod of this node, and starts a process of it.
#[track_caller]
pub(super) fn run_on(api: &Api, lab: &Lab, pod: &PodNs, annotations: &[(&str, &str)]) -> Container {
    let mut object = api.object(pod.name(), annotations);
    object["spec"]["nodeName"] = lab.node().name().into();
    api.apply(&object);
    api.start(lab, pod)
}

/// Another node, with a bridge for pods.
pub(super) fn other_node(story: &str) -> Lab {
    let lab = Lab::new(story);
    lab.bridge("br0");
    lab
}

/// Starts the agents of these nodes, with more arguments, and makes a user who reads packets.
#[track_caller]
pub(super) fn connect<const N: usize>(
    packets: &Packets<'_>,
    labs: [&Lab; N],
    arguments: &[&str],
) -> ([Agent; N], String) {
    let agents = labs.map(|lab| {
        packets.connect(lab);
        packets.agent(lab, arguments)
    });
    packets.wait_connected(&labs);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let alice = packets.grant("alice", false, &rules);
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(&alice, &brief));
    (agents, alice)
}

/// The name of the interface of a pod in a file.
pub(super) fn interface(api: &Api, pod: &PodNs) -> String {
    format!("{}/{} eth0", api.namespace(), pod.name())
}

/// Whether the answer so far has exactly the packets of each pod that were captured inside it, each once and unchanged.
fn compare(stream: &Stream, captures: &[(String, Capture)]) -> Result<PacketFile, String> {
    let file = PacketFile::parse(&stream.bytes());
    for (interface, capture) in captures {
        let packets = file.packets.iter().filter(|packet| packet.interface == *interface);
        let frames = packets.fold(Frames::default(), |all, packet| all.with(&packet.frame.bytes, 1));
        frames.same_as(&capture.frames().ipv4()).map_err(|error| format!("{interface}: {error}"))?;
    }
    Ok(file)
}

#[test]
fn three_nodes_and_two_replicas_make_one_file() {
    let Node { api, lab } = &Node::new("packets-merged");
    let others = ["packets-merged-b", "packets-merged-c"].map(other_node);
    let _relays = others.each_ref().map(|lab| api.connect(lab));
    let labs = [lab, &others[0], &others[1]];
    let pods = [1, 2, 3]
        .map(|number| ["web", "db"].map(|name| labs[number - 1].pod(&format!("{name}{number}"), "br0")));
    let _containers: Vec<_> = labs
        .iter()
        .zip(&pods)
        .flat_map(|(lab, pods)| pods.each_ref().map(|pod| run_on(api, lab, pod, &[])))
        .collect();
    let mut packets = Packets::start(api, 2, &[]);
    let (agents, alice) = connect(&packets, labs, &[]);
    // The API server chooses a replica for each request.
    let counts = || [0, 1].map(|number| packets.servers[number].log_with(&["a user reads packets"]).len());
    let mut streams = [None, None];
    for _ in 0..50 {
        if streams.iter().all(Option::is_some) {
            break;
        }
        let before = counts();
        let stream = packets.stream(&alice, &packets.uri("packets?filter=icmp&watch=true"));
        stream.wait_begun();
        let replica = eventually(SOON, || {
            let now = counts();
            (0..2).find(|replica| now[*replica] > before[*replica]).ok_or_else(|| format!("{now:?}"))
        });
        streams[replica].get_or_insert(stream);
    }
    let [first, second] = streams.map(Option::unwrap);
    for (lab, pods) in labs.iter().zip(&pods) {
        lab.wait_status(|status| {
            let is_read = |pod: &PodNs| mirrors(status, pod).len() == 2;
            check(pods.iter().all(is_read) && status.taps.iter().all(|tap| tap.is_attached()), || {
                "two readers of each pod are expected".into()
            })
        });
    }
    let captures: Vec<_> =
        pods.iter().flatten().map(|pod| (interface(api, pod), Capture::start(pod.netns(), "eth0"))).collect();
    let ping = || {
        thread::scope(|scope| {
            for [web, db] in &pods {
                scope.spawn(move || web.ping(db.v4(), 20, 56));
            }
        });
    };
    ping();
    let mut nodes = labs.map(|lab| lab.node().name().to_owned());
    nodes.sort();
    for stream in [&first, &second] {
        let file = eventually(SOON, || compare(stream, &captures));
        assert_eq!(file.packets.len(), 6 * 40, "{:#?}", file.interfaces);
        let mut hardware = file.hardware.clone();
        hardware.sort();
        hardware.dedup();
        assert_eq!(hardware, nodes);
    }
    // On a busy machine, the packets of a node can be late. All of them are in order as soon as none is.
    eventually(2 * SOON, || {
        let before = compare(&first, &captures)?.packets.len();
        ping();
        let file = eventually(SOON, || compare(&first, &captures));
        let new = &file.packets[before..];
        let is_sorted = new.is_sorted_by_key(|packet| packet.time_ns);
        let node_of = |interface: &str| interface.split(' ').next().and_then(|pod| pod.chars().last());
        let turns =
            new.windows(2).filter(|two| node_of(&two[0].interface) != node_of(&two[1].interface)).count();
        check(is_sorted && turns > 2, || format!("{turns} turns, in order of time: {is_sorted}"))
    });

    packets.servers.remove(1).stop();
    let file = PacketFile::parse(&second.wait_end(SOON, "the server ends"));
    assert!(file.statistics.len() >= 6, "{file:#?}");
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    // The other replica goes on.
    ping();
    eventually(SOON, || compare(&first, &captures));
    drop(first);
    for lab in labs {
        lab.wait_mirrored(&[]);
    }
    agents.into_iter().for_each(Agent::stop);
}

#[test]
fn names_follow_addresses() {
    let node @ Node { api, lab } = &Node::new("packets-names");
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let set = |pod: &PodNs, addresses: &[IpAddr]| {
        let all: Vec<_> = addresses.iter().map(|address| json!({ "ip": address })).collect();
        let patch = json!({ "status": { "podIP": addresses[0], "podIPs": all } });
        api.kubectl(&format!("patch pod {} --subresource=status --type=merge --patch={patch}", pod.name()));
    };
    let serve = |name: &str| -> IpAddr {
        api.kubectl(&format!("create service clusterip {name} --tcp=80"));
        let address = api.kubectl(&format!("get service {name} -o jsonpath={{.spec.clusterIP}}"));
        address.parse().unwrap()
    };
    set(web, &[web.v4(), web.v6()]);
    let checkout = serve("checkout");
    let packets = Packets::start(api, 1, &[]);
    let (agents, alice) = connect(&packets, [lab], &[]);
    let stream = packets.stream(&alice, &packets.uri("packets?watch=true"));
    // Of two names of an address, the later one counts.
    let wait_named = |expected: &[(IpAddr, String)]| {
        eventually(SOON, || {
            let file = PacketFile::parse(&stream.bytes());
            for (address, name) in expected {
                let newest = file.names.iter().rev().find(|(of, _)| of == address);
                check(newest.is_some_and(|(_, newest)| newest == name), || {
                    format!("{address} is not {name}: {:#?}", file.names)
                })?;
            }
            Ok(file)
        })
    };
    let namespace = api.namespace();
    let of_web = |address: IpAddr| (address, format!("web.{namespace}"));
    wait_named(&[of_web(web.v4()), of_web(web.v6()), (checkout, format!("checkout.{namespace}.svc"))]);
    set(db, &[db.v4()]);
    let later = serve("later");
    wait_named(&[(db.v4(), format!("db.{namespace}")), (later, format!("later.{namespace}.svc"))]);
    // The address of one pod becomes that of the other.
    let new: IpAddr = "10.0.9.9".parse().unwrap();
    set(web, &[new]);
    set(db, &[web.v4()]);
    let file = wait_named(&[of_web(new), (web.v4(), format!("db.{namespace}"))]);
    assert_eq!(file.names.iter().filter(|(address, _)| *address == web.v6()).count(), 1);
    let is_of_story =
        |name: &str| name.ends_with(&format!(".{namespace}")) || name.ends_with(&format!(".{namespace}.svc"));
    assert!(file.names.iter().all(|(_, name)| is_of_story(name)), "{:#?}", file.names);
    agents.into_iter().for_each(Agent::stop);
}

#[test]
fn a_pod_that_matches_later_is_read() {
    let Node { api, lab } = &Node::new("packets-later");
    let other = &other_node("packets-later-b");
    let _relay = api.connect(other);
    let [web, db] = &["web", "db"].map(|name| lab.pod(name, "br0"));
    let [far, peer] = &["far", "peer"].map(|name| other.pod(name, "br0"));
    let _containers =
        [(lab, web), (lab, db), (other, far), (other, peer)].map(|(lab, pod)| run_on(api, lab, pod, &[]));
    let packets = Packets::start(api, 1, &[]);
    let (agents, alice) = connect(&packets, [lab, other], &[]);
    let stream =
        packets.stream(&alice, &packets.uri("packets?labelSelector=tier%3Dfront&filter=icmp&watch=true"));
    stream.wait_begun();
    let mut captures = Vec::new();
    let mut read = |lab: &Lab, pod: &PodNs, peer: &PodNs| {
        lab.wait_mirrored(&[]);
        api.kubectl(&format!("label pod {} tier=front", pod.name()));
        lab.wait_mirrored(&[pod]);
        captures.push((interface(api, pod), Capture::start(pod.netns(), "eth0")));
        pod.ping(peer.v4(), 10, 56);
        eventually(SOON, || compare(&stream, &captures))
    };
    read(lab, web, db);
    let file = read(other, far, peer);
    assert_eq!(file.interfaces, [interface(api, web), interface(api, far)]);
    assert_eq!(file.hardware, [lab.node().name(), other.node().name()]);
    assert_eq!(file.packets.len(), 40);
    // It matches no longer, and the other one still does.
    api.kubectl("label pod web tier-");
    lab.wait_mirrored(&[]);
    web.ping(db.v4(), 5, 200);
    captures.remove(0);
    far.ping(peer.v4(), 5, 200);
    let file = eventually(SOON, || compare(&stream, &captures));
    assert_eq!(file.packets.len(), 50);
    agents.into_iter().for_each(Agent::stop);
}
