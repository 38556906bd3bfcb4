//! The mirror interface shows all packets that a mirrored pod sends and receives, once and byte for byte.

use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Frame, Frames, Lab, PodNs, PodSpec, PodsFile, check,
};

use crate::{Inside, MIRROR, Node, shows};

in_both_modes!(
    a_pod_on_a_bridge_is_mirrored_completely,
    a_routed_pod_is_mirrored_completely,
    two_mirrored_pods_on_a_bridge_are_mirrored_once,
    two_mirrored_routed_pods_are_mirrored_once,
    frames_of_all_sizes_are_mirrored,
    only_what_a_pod_receives_is_mirrored,
);

/// IP traffic in both directions and in many sizes.
pub(crate) fn talk(web: &PodNs, db: &PodNs) {
    for (address, back) in [(db.v4(), web.v4()), (db.v6(), web.v6())] {
        web.ping(address, 10, 56);
        db.ping(back, 10, 1400);
        // From below the minimum frame size to fragments of the largest datagram.
        web.udp_echo(db, address, &[0, 1, 22, 64, 512, 1400, 1452, 1473, 4000, 9000, 32000, 65507]);
        let conversation = Conversation::open(web, db, address);
        conversation.exchange(1);
        conversation.exchange(1_000_000);
        let conversation = Conversation::open(db, web, back);
        conversation.exchange(300_000);
    }
}

/// Traffic that is not IP unicast: tags, other protocols, multicast, ARP.
pub(crate) fn talk_in_frames(from: &PodNs, to: &PodNs) {
    let (source, destination) = (from.eth0(), to.eth0());
    let frame = || Frame::new(destination.mac, source.mac);
    for frame in [
        frame().filled(60, 1),
        frame().vlan(100).filled(64, 2),
        frame().vlan(100).vlan(200).filled(1400, 3),
        frame().tag(0x88a8, 7).vlan(200).filled(200, 4),
        frame().vlan(5).filled(20, 5).ipv4(source.v4, destination.v4),
        Frame::new(Frame::BROADCAST, source.mac).filled(60, 6),
        Frame::new(Frame::BROADCAST, source.mac).arp_request(source.v4, destination.v4),
        Frame::new([1, 0, 0x5e, 1, 2, 3], source.mac).filled(100, 7),
        Frame::new([0x33, 0x33, 0, 0, 1, 2], source.mac).filled(100, 8),
        frame().filled(15, 9),
        frame().filled(1514, 10),
    ] {
        from.send_frame(&frame.bytes());
    }
}

/// The bytes that the counters have: without the outer VLAN tag, which the kernel keeps beside the packet data.
fn counted_bytes(frames: &Frames) -> u64 {
    let tagged = frames.only(|frame| matches!(frame[12..14], [0x81, 0] | [0x88, 0xa8])).len();
    (frames.bytes() - 4 * tagged) as u64
}

/// Waits until a tap has counted all packets that its pod has sent and received, all of them as copied.
#[track_caller]
fn all_copied(lab: &Lab, pod: &PodNs, inside: &Inside) {
    lab.wait_status(|status| {
        let tap = status.tap(pod.veth_host());
        let (sent, received) = inside.frames();
        let right = [("egress", &sent), ("ingress", &received)].into_iter().all(|(direction, frames)| {
            tap.packets(direction, "copied") == frames.len() as u64
                && tap.bytes(direction, "copied") == counted_bytes(frames)
        });
        let all = tap.seen() == (sent.len() + received.len()) as u64;
        check(right && all, || {
            format!("{} sent and {} received are not all counted", sent.len(), received.len())
        })
    });
}

fn a_pod_is_mirrored_completely(mode: AttachMode, node: Node) {
    let Node { web, db, lab } = &node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let _agent = Agent::run(lab, mode, &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    assert!(
        status.tap(web.veth_host()).attached.values().all(|attached| attached == mode.name()),
        "{status:?}"
    );
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    talk_in_frames(web, db);
    talk_in_frames(db, web);
    shows(&mirror, || inside.capture.frames());
    all_copied(lab, web, &inside);
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    for frames in [sent, received] {
        assert!(frames.iter().any(|(frame, _)| frame.len() > 1514), "TCP uses super-frames");
    }
}

fn a_pod_on_a_bridge_is_mirrored_completely(mode: AttachMode) {
    a_pod_is_mirrored_completely(mode, Node::bridged("bridge"));
}

fn a_routed_pod_is_mirrored_completely(mode: AttachMode) {
    a_pod_is_mirrored_completely(mode, Node::routed("routed"));
}

/// Two mirrored pods. `by_the_node` selects the received frames that the node has sent, not the other pod.
fn two_pods_are_mirrored_once(mode: AttachMode, node: Node, by_the_node: fn(&[u8]) -> bool) {
    let Node { web, db, lab } = &node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("both")]);
    let _agent = Agent::run_until(lab, mode, &pods, &[], &[web, db]);
    let (at_web, at_db) = (Inside::of(web), Inside::of(db));
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    talk_in_frames(web, db);
    talk_in_frames(db, web);
    shows(&mirror, || {
        let of = |inside: &Inside| {
            let (sent, received) = inside.frames();
            sent.and(&received.only(by_the_node))
        };
        of(&at_web).and(&of(&at_db))
    });
    lab.wait_status(|status| {
        [(web, &at_web), (db, &at_db)].into_iter().try_for_each(|(pod, inside)| {
            let tap = status.tap(pod.veth_host());
            let (sent, received) = inside.frames();
            let by_the_node = received.only(by_the_node).len();
            let expected = [sent.len(), by_the_node, received.len() - by_the_node];
            let counted = [("egress", "copied"), ("ingress", "copied"), ("ingress", "duplicate")]
                .map(|(direction, verdict)| tap.packets(direction, verdict) as usize);
            let all = tap.seen() as usize == sent.len() + received.len();
            check(counted == expected && all, || format!("{counted:?} are counted, not {expected:?}"))
        })
    });
    let mut expected = Frames::default();
    for inside in [at_web, at_db] {
        let (sent, received) = inside.stop();
        expected = expected.and(&sent).and(&received.only(by_the_node));
    }
    mirror.stop().same_as(&expected).unwrap();
}

fn two_mirrored_pods_on_a_bridge_are_mirrored_once(mode: AttachMode) {
    two_pods_are_mirrored_once(mode, Node::bridged("two-bridged"), |_| false);
}

fn two_mirrored_routed_pods_are_mirrored_once(mode: AttachMode) {
    // The node answers for the gateway and solicits the pods: ARP, and neighbour discovery (ICMPv6 133 to 137). A pod's
    // multicasts and non-IP frames are not routed.
    two_pods_are_mirrored_once(mode, Node::routed("two-routed"), |frame| match frame[12..14] {
        [0x08, 0x06] => true,
        [0x86, 0xdd] => frame[20] == 58 && (133..=137).contains(&frame[54]),
        _ => false,
    });
}

fn frames_of_all_sizes_are_mirrored(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("sizes");
    lab.node().ip("link set br0 mtu 65521");
    [web, db].iter().for_each(|pod| pod.set_mtu(lab, 65521));
    let _agent = Agent::mirroring(lab, mode, &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    let mut frames = 0;
    for size in [15, 59, 60, 63, 64, 65, 1513, 1514, 1515, 1518, 4096, 9014, 16384, 32768, 65534, 65535] {
        for (from, to) in [(web, db), (db, web)] {
            from.send_frame(&Frame::new(to.eth0().mac, from.eth0().mac).filled(size, size).bytes());
            frames += 1;
        }
    }
    shows(&mirror, || inside.capture.frames());
    all_copied(lab, web, &inside);
    let (sent, received) = inside.stop();
    assert_eq!(sent.and(&received).len(), frames);
    mirror.stop().same_as(&sent.and(&received)).unwrap();
}

fn only_what_a_pod_receives_is_mirrored(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("ingress");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("ingress")]);
    let _agent = Agent::run(lab, mode, &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    assert_eq!(status.tap(web.veth_host()).direction, "ingress");
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    shows(&mirror, || inside.frames().1);
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&received).unwrap();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.packets("ingress", "copied"), received.len() as u64, "{tap:?}");
    assert_eq!(tap.packets("egress", "other_direction"), sent.len() as u64, "{tap:?}");
    assert_eq!(tap.seen(), (sent.len() + received.len()) as u64, "{tap:?}");
}
