//! Kinds of devices that not every kernel has: tunnels (GENEVE, GRE and ERSPAN), and the dummy in a pod of KubeVirt.
//! The guests' kernels have all of them.

use std::net::UdpSocket;

use mirror_tests::{
    Agent, Capture, Frame, Frames, Lab, OneCpu, PodNs, PodSpec, PodsFile, SOON, TapDevice, check, eventually,
    has_kind, scaled,
};
use serde_json::json;

use crate::{
    Inside, MIRROR, Node, any_mode,
    far::{Scene, mirrored_into, wait_target_of},
    shows,
};

/// A name, the target, and the receiver at the other machine.
const KINDS: [[&str; 3]; 6] = [
    ["k1", "geneve:10.9.0.5:6081/vni=77/identity=true", "geneve id 77 remote 10.9.0.1 dstport 6081"],
    ["k2", "geneve:[fd09::5]:6081/vni=78", "geneve id 78 remote fd09::1 dstport 6081"],
    ["k3", "gre:10.9.0.5/key=4000000000", "gretap local 10.9.0.5 remote 10.9.0.1 key 4000000000"],
    ["k4", "gre:fd09::5/key=7", "ip6gretap local fd09::5 remote fd09::1 key 7"],
    ["k5", "erspan:10.9.0.5/session=1023", "erspan seq key 1023 local 10.9.0.5 remote 10.9.0.1 erspan_ver 1"],
    ["k6", "erspan:fd09::5/session=6", "ip6erspan seq key 6 local fd09::5 remote fd09::1 erspan_ver 1"],
];

/// The stories about tunnels run only on kernels with all types.
fn has_all_kinds() -> bool {
    let lab = Lab::new("kinds-probe");
    let has = ["geneve", "gretap", "ip6gretap"].iter().all(|kind| lab.node().has_link_kind(kind));
    assert!(
        has || std::env::var_os("MIRROR_TEST_GUEST").is_none(),
        "the kernels of the guests have all kinds"
    );
    has
}

/// The stories about a routed underlay, see `underlays`.
mod underlay {
    use crate::underlays::{
        OTHERS, Way, a_narrow_way_is_learned, frames_are_cut_and_fragmented, super_frames_are_segmented,
    };

    fn tell(story: &str, of: fn(&str, &[&Way])) {
        if super::has_all_kinds() {
            of(story, &OTHERS.iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn frames() {
        tell("kinds-frames", frames_are_cut_and_fragmented);
    }

    #[test]
    fn super_frames() {
        tell("kinds-super", super_frames_are_segmented);
    }

    #[test]
    fn narrow_way() {
        tell("kinds-narrow", a_narrow_way_is_learned);
    }
}

#[test]
fn each_kind_brings_every_frame_once_and_unchanged() {
    brings_every_frame("kinds", &OWN, |_| String::new());
}

/// Devices of other software, one of each type.
#[test]
fn each_kind_takes_a_device_of_other_software() {
    const DEVICES: [&str; 5] = ["gn0", "gt4", "gt6", "es4", "es6"];
    const DEVICE: [usize; 6] = [0, 0, 1, 2, 3, 4];
    brings_every_frame("kinds-devices", &DEVICES, |kind| format!("/device={}", DEVICES[DEVICE[kind]]));
}

/// The devices that the agent creates.
const OWN: [&str; 5] = ["pm-geneve6081", "pm-gre4", "pm-gre6", "pm-erspan4", "pm-erspan6"];

/// Mirrors one pod into all of them at once. `option`: a further option of each target.
fn start(scene: &Scene, option: impl Fn(usize) -> String) -> Agent {
    let Node { web, lab, .. } = &scene.node;
    let mut words = Vec::new();
    for (kind, [name, target, receiver]) in KINDS.into_iter().enumerate() {
        scene.receiver(name, receiver);
        words.extend(["--define-target".to_owned(), format!("{name}={target}{}", option(kind))]);
    }
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let pods = PodsFile::new(lab, &[mirrored_into(web, KINDS.iter().map(|[name, ..]| *name))]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &words, &[web]);
    KINDS.iter().for_each(|[name, ..]| drop(wait_target_of(lab, name, true, 1)));
    agent
}

/// The kernel's device for GRE over IPv6 drops a packet without a source address, for example of duplicate address
/// detection. All other types carry it.
#[test]
fn gre_over_ipv6_alone_drops_packets_without_a_source_address() {
    if !has_all_kinds() {
        return;
    }
    let _in_order = OneCpu::of_this_thread();
    let scene = Scene::new("kinds-nowhere", 9000);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    let agent = start(&scene, |_| String::new());
    let inside = Inside::of(web);
    let arrived = KINDS.map(|[name, ..]| (name, Capture::start(far, name)));
    let header = [0x60, 0, 0, 0, 0, 24, 58, 255];
    let to = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 9];
    let frame = Frame::new([0x33, 0x33, 0xff, 0, 0, 9], web.eth0().mac).ethertype(0x86dd).bytes();
    let frame = [&frame[..14], &header, &[0; 16], &to, &[135; 24]].concat();
    web.send_frame(&frame);
    web.ping(db.v6(), 1, 56);
    for (name, arrived) in arrived {
        let is_lost = |frame: &[u8]| name == "k4" && frame[22..38] == [0; 16];
        shows(&arrived, || inside.capture.frames().only(|frame| !is_lost(frame)));
        assert_eq!(arrived.stop().count(&frame), usize::from(name != "k4"), "{name}");
    }
    agent.stop();
    lab.cleanup();
}

/// One pod is mirrored into all of them at once. A GENEVE option carries the session and the direction of each copy.
fn brings_every_frame(story: &str, devices: &[&str; 5], option: impl Fn(usize) -> String) {
    if !has_all_kinds() {
        return;
    }
    let _in_order = OneCpu::of_this_thread();
    let scene = Scene::new(story, 9000);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    // Some types complete a partial checksum, others leave that to the receiver.
    for pod in [web, db] {
        pod.netns().run("ethtool -K eth0 tx off");
    }
    if devices != &OWN {
        let kinds = ["geneve dstport 6081", "gretap", "ip6gretap", "erspan", "ip6erspan"];
        for (device, kind) in devices.iter().zip(kinds) {
            lab.node().ip(&format!("link add {device} type {kind} external"));
            lab.node().sysctl(&format!("ipv6/conf/{device}/disable_ipv6"), "1");
            lab.node().ip(&format!("link set {device} mtu 8900"));
            lab.node().tc(&format!("qdisc replace dev {device} root noqueue"));
            lab.node().ip(&format!("link set {device} up"));
        }
    }
    let before = lab.network_state();
    let agent = start(&scene, option);
    for device in devices {
        // A queued copy would get the address of a later copy.
        assert!(lab.node().tc(&format!("qdisc show dev {device} root")).contains("noqueue"), "{device}");
    }
    let serial = lab.status().tap(web.veth_host()).session("k1").serial;
    let cable = Capture::start(far, "up1");
    let (sent, received) = scene.brings_every_frame(&KINDS.map(|[name, ..]| name), false);

    let mut directions = [0; 3];
    let is_geneve = |frame: &[u8]| frame[12..14] == [8, 0] && frame[36..38] == 6081_u16.to_be_bytes();
    for (frame, times) in cable.stop().only(is_geneve).iter() {
        // After Ethernet, IPv4, UDP, and 8 bytes of GENEVE.
        let option = &frame[50..62];
        assert_eq!((&option[..4], &option[4..8]), (&[0xff, 0x70, 1, 2][..], &serial.to_be_bytes()[..]));
        directions[usize::from(option[8])] += times;
    }
    assert_eq!(directions, [0, received, sent]);
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}

/// Gives the pod's NIC to a VM, as KubeVirt's bridge binding does (`bridgeBindingSpec` in its
/// `pkg/network/setup/netpod/netpod.go`), and returns the VM's TAP device. A device of this `kind`, which stays down,
/// keeps the NIC's name and addresses.
fn bridge_binding(lab: &Lab, pod: &PodNs, kind: &str) -> TapDevice {
    let netns = pod.netns();
    let mac = pod.eth0().mac.map(|byte| format!("{byte:02x}")).join(":");
    netns.sysctl("ipv6/conf/eth0/disable_ipv6", "1");
    netns.sysctl("ipv6/conf/default/disable_ipv6", "1");
    // The pod's kernel must not answer for the VM.
    netns.sysctl("ipv4/conf/all/arp_ignore", "1");
    let tap = TapDevice::new(netns, "tap0");
    for line in [
        "link add k6t-eth0 address 02:00:00:00:09:01 type bridge mcast_snooping 0",
        "address add 169.254.75.10/32 dev k6t-eth0",
        "link set k6t-eth0 up",
        "link set eth0 down",
        "link set eth0 name eth0-nic",
        "address flush dev eth0-nic",
        "link set eth0-nic address 02:00:00:00:09:01",
        "link set eth0-nic master k6t-eth0 up",
        "link set eth0-nic type bridge_slave learning off",
        "link set tap0 master k6t-eth0",
    ] {
        netns.ip(line);
    }
    netns.ip(&format!("link add eth0 address {mac} type {kind}"));
    netns.ip(&format!("address add {}/24 dev eth0", pod.v4()));
    for (netns, port) in [(netns, "eth0-nic"), (netns, "tap0"), (lab.node(), pod.veth_host())] {
        eventually(SOON, || {
            let link = netns.ip(&format!("-d -o link show dev {port}"));
            check(link.contains(" state forwarding "), || link)
        });
    }
    tap
}

/// The VM has the MAC address of the pod. Its packets pass the renamed NIC, which the NIC's former name means too.
#[test]
fn a_vm_of_kubevirt_is_mirrored_once() {
    let Node { web, db, lab } = &Node::bridged("kubevirt");
    // A bridge without ports replaces the dummy. It does not show that the NIC once had its name.
    let (kind, name) = if has_kind(lab, "dummy") { ("dummy", "eth0") } else { ("bridge", "eth0-nic") };
    let mut vm = bridge_binding(lab, web, kind);
    // A TAP device gets complete checksums.
    db.netns().run("ethtool -K eth0 tx off");
    let spec = PodSpec::of(web).mirror("true").annotated("podmirror.io/nics", name);
    let pods = PodsFile::new(lab, &[spec.annotated("podmirror.io/mirror.all", "true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let status = lab.wait_taps(&[web.veth_host()]);
    let tap = status.tap(web.veth_host());
    let mut mirrors: Vec<_> = tap.sessions.iter().map(|session| session.mirror.as_str()).collect();
    mirrors.sort_unstable();
    assert_eq!((tap.nic.as_str(), mirrors), ("eth0-nic", vec!["all", "default"]));

    let server = db.netns().enter(|| UdpSocket::bind((db.v4(), 12345))).unwrap();
    server.set_read_timeout(Some(scaled(SOON))).unwrap();
    let inside = Inside { capture: Capture::start(web.netns(), "tap0"), mac: web.eth0().mac };
    let mirror = Capture::start(lab.node(), MIRROR);
    let (own, other) = (web.eth0(), db.eth0());
    let question = Frame::new(Frame::BROADCAST, own.mac).arp_request(own.v4, other.v4).bytes();
    vm.receives(&question);
    eventually(SOON, || check(!inside.frames().1.is_empty(), || "no ARP reply".to_owned()));
    let mut sent = Frames::default().with(&question, 1);
    for (seed, size) in [32, 100, 700, 1486].into_iter().enumerate() {
        let datagram = Frame::new(other.mac, own.mac).filled(size, seed).ipv4(own.v4, other.v4).bytes();
        vm.receives(&datagram);
        let mut data = [0; 1500];
        let (length, from) = server.recv_from(&mut data).unwrap();
        server.send_to(&data[..length], from).unwrap();
        sent = sent.with(&datagram, 1);
    }
    eventually(SOON, || {
        let (of_vm, to_vm) = inside.frames();
        of_vm.same_as(&sent)?;
        check(to_vm.len() == sent.len(), || format!("{to_vm}"))
    });
    shows(&mirror, || inside.capture.frames());
    let each = sent.len() as u64;
    lab.wait_status(|status| {
        let sessions = &status.tap(web.veth_host()).sessions;
        let copied = ["egress", "ingress"].map(|direction| {
            sessions.iter().map(|session| session.packets(direction, "copied")).sum::<u64>()
        });
        check(copied == [each, each], || format!("{copied:?} copied"))
    });
    assert_eq!(lab.status().notes.unwrap()["not_mirrored"], json!([]));
    agent.stop();
}
