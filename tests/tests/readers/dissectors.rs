//! tshark reads the tunnels' packets between the machines: the keys, the inner frames, and their checksums.

use mirror_tests::{Agent, Capture, Conversation, PodSpec, PodsFile, SOON, check, eventually};

use crate::{Node, any_mode};

/// The kind of the device (ERSPAN is part of GRE), the target, and a display filter of tshark for its packets.
const KINDS: [[&str; 3]; 8] = [
    ["vxlan", "vxlan:10.9.0.5:4789/vni=77/oversize=segment", "vxlan.vni == 77"],
    ["vxlan", "vxlan:[fd09::5]:4789/vni=78/oversize=segment", "vxlan.vni == 78"],
    ["geneve", "geneve:10.9.0.5:6081/vni=77/oversize=segment", "geneve.vni == 77"],
    ["geneve", "geneve:[fd09::5]:6081/vni=78/identity=true/oversize=segment", "geneve.vni == 78"],
    ["gretap", "gre:10.9.0.5/key=4000000000/oversize=segment", "gre.key == 4000000000"],
    ["ip6gretap", "gre:fd09::5/key=7/oversize=segment", "gre.key == 7"],
    ["gretap", "erspan:10.9.0.5/session=1023/oversize=segment", "erspan.spanid == 1023"],
    ["ip6gretap", "erspan:fd09::5/session=6", "erspan.spanid == 6"],
];

/// The tunnel carries exactly the pod's frames, with the right addresses and numbers.
#[test]
fn every_kind_is_what_its_name_says() {
    let node = Node::new("dissect");
    let far = node.cable();
    let Node { web, db, lab } = &node;
    // Other ports of clients can be those of protocols, whose dissectors find the packets malformed. tshark's `-d`, as in
    // `dissected`, would hide the tunnels too.
    [web, db].into_iter().for_each(|pod| pod.netns().sysctl("ipv4/ip_local_port_range", "61000 65535"));
    let kinds: Vec<_> = KINDS.iter().filter(|[kind, ..]| lab.node().has_link_kind(kind)).collect();
    let is_guest = std::env::var_os("MIRROR_TEST_GUEST").is_some();
    assert!(kinds.len() >= if is_guest { KINDS.len() } else { 2 }, "this kernel has {kinds:?}");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    for [_, target, is_it] in kinds {
        let target = format!("far={target}");
        let agent = Agent::run(lab, any_mode(), &pods, &["--define-target", &target, "--target", "far"]);
        lab.wait_mirrored(&[web]);
        lab.wait_status(|status| check(status.target("far").up, || "the target is down".into()));
        let (inside, cable) = (Capture::start(web.netns(), "eth0"), Capture::start(&far, "up1"));
        web.ping(db.v4(), 5, 56);
        web.ping(db.v6(), 5, 1000);
        web.udp_echo(db, db.v4(), &[1, 100, 1400]);
        Conversation::open(web, db, db.v4()).exchange(if target.contains("segment") {
            100_000
        } else {
            1000
        });
        let addresses = ["eth.src", "eth.dst"];
        let expected = || {
            let frames = inside.frames();
            let frames = if target.contains("segment") { frames.on_a_wire() } else { frames };
            let of = |frame: &[u8]| [6, 0].map(|at| mac(&frame[at..at + 6])).join("\t");
            let mut lines: Vec<_> = frames.iter().flat_map(|(frame, times)| vec![of(frame); times]).collect();
            lines.sort();
            lines
        };
        let read = || {
            let last = |line: &String| {
                line.split('\t').map(|all| all.rsplit(',').next().unwrap()).collect::<Vec<_>>().join("\t")
            };
            let mut lines: Vec<_> = cable.dissected(is_it, &addresses).iter().map(last).collect();
            lines.sort();
            lines
        };
        eventually(SOON, || {
            let (now, all) = (read().len(), expected().len());
            check(now == all, || format!("{target}: {now} of {all} frames"))
        });
        assert_eq!(read(), expected(), "{target}");
        // Everything that the node has sent belongs to this tunnel, with this key.
        let sent = cable.dissected("eth.dst == 02:00:00:00:02:05", &["frame.number"]);
        assert_eq!(sent.len(), expected().len(), "{target}");
        let wrong = "_ws.malformed || _ws.short || _ws.expert.severity == 8388608 || ip.checksum.status == Bad || \
            tcp.checksum.status == Bad || udp.checksum.status == Bad || icmp.checksum.status == Bad || \
            icmpv6.checksum.status == Bad";
        assert_eq!(
            cable.dissected(wrong, &["frame.number", "_ws.expert.message"]),
            Vec::<String>::new(),
            "{target}"
        );
        for (protocol, least) in [("tcp", 6), ("udp", 6), ("icmp", 10), ("icmpv6", 10)] {
            let good = cable.dissected(&format!("{protocol}.checksum.status == Good"), &["frame.number"]);
            assert!(good.len() >= least, "{target}: {} good checksums of {protocol}", good.len());
        }
        inside.stop();
        cable.stop();
        agent.stop();
        lab.cleanup();
    }
}

fn mac(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}
