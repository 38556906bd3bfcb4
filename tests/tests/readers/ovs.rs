//! Open vSwitch on another machine receives the packets of tunnels, and forwards the inner frames by the key.
//!
//! The first commands are those of docs/targets.md. The datapath is a kernel module, which the guests' kernels have
//! (`cargo xtask vm --kernel 6.12 --level readers -- ovs`). On another kernel the story reports that it was not run, and
//! fails if no story may be skipped.

use std::{collections::BTreeMap, env, fs, io::Write as _};

use mirror_tests::{Agent, Capture, Conversation, Netns, PodSpec, SOON, Switch, check, eventually};

use crate::{Node, any_mode};

const DOCUMENT: &str = include_str!("../../../docs/targets.md");
/// The bridge in the document.
const BRIDGE: &str = "br-ids";

/// A target. The port where its copies leave the switch has the same name.
struct Way {
    name: &'static str,
    target: &'static str,
    /// The port of the switch where its tunnel ends.
    tunnel: &'static str,
    key: u32,
}

const fn way(name: &'static str, target: &'static str, tunnel: &'static str, key: u32) -> Way {
    Way { name, target, tunnel, key }
}

/// The target of the document, and those of the other tunnel types.
const WAYS: [Way; 7] = [
    way("ids0", "vxlan:10.9.0.5:14789/vni=77", "copies", 77),
    way("vx6", "vxlan:[fd09::5]:14789/vni=78", "copies", 78),
    way("gn4", "geneve:10.9.0.5:16081/vni=77/identity=true", "in-geneve", 77),
    way("gn6", "geneve:[fd09::5]:16081/vni=78", "in-geneve", 78),
    way("gr4", "gre:10.9.0.5/key=4000000000", "in-gre", 4_000_000_000),
    way("gr6", "gre:fd09::5/key=7", "in-gre6", 7),
    way("er1", "erspan:10.9.0.5/session=1023", "in-erspan", 1023),
];
/// The ports for the tunnels of the other types, and their types.
const TUNNELS: [[&str; 2]; 4] = [
    ["in-geneve", "geneve options:dst_port=16081"],
    ["in-gre", "gre"],
    ["in-gre6", "ip6gre"],
    ["in-erspan", "erspan"],
];

/// The port for copies with any other key.
const OTHER: &str = "other";
/// A key that no copy has.
const OTHER_KEY: u32 = 79;

/// The document's commands for the receiver.
fn documented() -> Vec<&'static str> {
    let mut blocks = DOCUMENT.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let block = blocks.find(|block| block.starts_with("ovs-vsctl")).unwrap();
    block.lines().collect()
}

fn has_datapath(netns: &Netns) -> bool {
    let has = netns.has_datapath();
    let may_be_left_out =
        env::var_os("MIRROR_TEST_GUEST").is_none() && env::var("CI").ok().as_deref() != Some("true");
    let missing = "this kernel has no module openvswitch; the guests have it: `cargo xtask vm --kernel 6.12 --level \
        readers -- ovs`";
    assert!(has || may_be_left_out, "{missing}");
    if !has {
        // The output of print macros is not shown if a test passes.
        std::io::stderr().write_all(format!("NOT RUN: {missing}\n").as_bytes()).unwrap();
    }
    has
}

/// The packets and bytes that flows have forwarded, by port.
fn forwarded(switch: &Switch<'_>) -> BTreeMap<String, (usize, usize)> {
    let text = switch.asked(&format!("ovs-ofctl --names dump-flows {BRIDGE}"));
    let mut forwarded = BTreeMap::new();
    for line in text.lines() {
        let after = |name: &str| {
            let (_, rest) = line.split_once(name)?;
            rest.split([',', ' ']).next().map(|word| word.trim_matches('"'))
        };
        let Some(port) = after("actions=output:") else { continue };
        let count = |name| after(name).and_then(|count| count.parse::<usize>().ok()).unwrap();
        let (packets, bytes) = forwarded.entry(port.to_owned()).or_default();
        *packets += count("n_packets=");
        *bytes += count("n_bytes=");
    }
    forwarded
}

/// One pod is mirrored into all tunnels at once.
#[test]
fn it_forwards_every_frame_once_by_the_key_of_its_tunnel() {
    let node = Node::new("ovs");
    if !has_datapath(node.lab.node()) {
        return;
    }
    let far = node.cable();
    let Node { web, db, lab } = &node;
    far.ip("address add 10.9.0.5/24 dev up1");
    far.ip("address add fd09::5/64 dev up1 nodad");
    // The switch's ports must not send packets by themselves.
    far.sysctl("ipv6/conf/default/disable_ipv6", "1");
    let (before, far_before) = (lab.network_state(), far.devices());

    let switch = Switch::start(lab, &far);
    for line in documented() {
        if line.starts_with("ovs-") { switch.run(line) } else { drop(far.run(line)) }
    }
    let tunnel = |[port, kind]: [&str; 2]| {
        let options = "options:remote_ip=flow options:key=flow";
        format!("-- add-port {BRIDGE} {port} -- set interface {port} {options} type={kind}")
    };
    let ports: Vec<_> = WAYS[1..].iter().map(|way| way.name).chain([OTHER]).collect();
    let port = |port: &&str| format!("-- add-port {BRIDGE} {port} -- set interface {port} type=internal");
    let more: Vec<_> = TUNNELS.map(tunnel).into_iter().chain(ports.iter().map(port)).collect();
    switch.run(&format!("ovs-vsctl {}", more.join(" ")));
    ports.iter().for_each(|port| drop(far.ip(&format!("link set {port} up"))));
    let flow = |way: &Way| format!("in_port={},tun_id={},actions=output:{}\n", way.tunnel, way.key, way.name);
    let other = |way: &Way| format!("in_port={},tun_id={OTHER_KEY},actions=output:{OTHER}\n", way.tunnel);
    let mut flows: String = WAYS[1..].iter().map(flow).chain(WAYS.iter().map(other)).collect();
    flows += &format!("priority=0,actions=output:{OTHER}\n");
    fs::write(lab.files().join("flows"), flows).unwrap();
    switch.run(&format!("ovs-ofctl add-flows {BRIDGE} /run/story/flows"));
    for device in far.devices().iter().filter(|device| device.contains("_sys")) {
        // Otherwise the device merges consecutive segments again.
        far.run(&format!("ethtool -K {device} gro off"));
    }

    let mut pod = PodSpec::of(web);
    let mut words = Vec::new();
    for Way { name, target, .. } in &WAYS {
        pod = pod.annotated(&format!("podmirror.io/mirror.{name}"), "true");
        pod = pod.annotated(&format!("podmirror.io/target.{name}"), name);
        words.extend(["--define-target".to_owned(), format!("{name}={target}/oversize=segment")]);
    }
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let agent = Agent::mirroring(lab, any_mode(), &[pod, PodSpec::of(db)], &words, &[web]);
    lab.wait_status(|status| {
        let down: Vec<_> = WAYS.iter().map(|way| way.name).filter(|name| !status.target(name).up).collect();
        check(down.is_empty(), || format!("{down:?} are down"))
    });

    let inside = Capture::start(web.netns(), "eth0");
    let arrived = WAYS.map(|way| Capture::of_wire(&far, way.name));
    let strays = Capture::of_wire(&far, OTHER);
    web.ping(db.v4(), 10, 56);
    web.ping(db.v6(), 10, 1400);
    web.udp_echo(db, db.v4(), &[0, 1, 1472]);
    Conversation::open(web, db, db.v4()).exchange(100_000);
    for (way, arrived) in WAYS.iter().zip(&arrived) {
        eventually(2 * SOON, || {
            let same = arrived.frames().same_as(&inside.frames().on_a_wire());
            same.map_err(|why| format!("{}: {why}", way.target))
        });
    }
    let inside = inside.stop();
    let all = inside.on_a_wire();
    assert!(inside.len() < all.len(), "some are super-frames");
    let mut expected: BTreeMap<_, _> =
        WAYS.iter().map(|way| (way.name.to_owned(), (all.len(), all.bytes()))).collect();
    expected.insert(OTHER.to_owned(), (0, 0));
    // The daemon reads the counters of the datapath periodically.
    eventually(SOON, || {
        let forwarded = forwarded(&switch);
        check(forwarded == expected, || format!("{forwarded:?}, expected: {expected:?}"))
    });
    let datapath = switch.asked("ovs-dpctl show");
    assert!(datapath.contains(" lost:0\n"), "{datapath}");
    arrived.into_iter().for_each(|arrived| arrived.stop().same_as(&all).unwrap());
    assert_eq!(strays.stop().len(), 0);
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.sessions.len(), WAYS.len());
    for session in &tap.sessions {
        let counted = [session.total("copied"), session.seen()];
        assert_eq!(counted, [inside.len() as u64; 2], "{session:?}");
    }

    switch.end(BRIDGE);
    eventually(SOON, || check(far.devices() == far_before, || format!("{:?} are left", far.devices())));
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}
