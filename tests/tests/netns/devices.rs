//! Copies leave through the tunnel device of other software, for example a CNI.

use mirror_tests::{Agent, AttachMode, Capture, Frames, Netns, Pinging, SOON, check, eventually};

use crate::{
    Inside, Node, any_mode,
    far::{Scene, named, unreached, wait_target},
    shows,
};

in_both_modes!(a_device_carries_copies_beside_the_packets_of_its_owner);

const MAKE: &str = "ip link add cni0 address 02:00:00:00:98:01 type vxlan dstport 4789 external";
const TARGET: [&str; 2] = ["--define-target", "far=vxlan:10.9.0.5:4789/vni=77/device=cni0"];
/// The owner's network: the addresses of this node and of the other machine, and the MAC address of the latter.
const NEAR: &str = "10.98.0.1";
const FAR: &str = "10.98.0.5";
const FAR_MAC: &str = "02:00:00:00:98:05";

/// Sets up the owner's network between the two nodes, with VNI 500. A route gives each packet its tunnel address, and
/// the owner has a filter at the device.
fn overlay(near: &Netns, far: &Netns) {
    near.run(MAKE);
    near.sysctl("ipv6/conf/cni0/disable_ipv6", "1");
    near.ip("link set cni0 mtu 1400");
    near.ip("link set cni0 up");
    near.ip(&format!("address add {NEAR}/32 dev cni0"));
    near.ip(&format!("neighbour add {FAR} lladdr {FAR_MAC} dev cni0 nud permanent"));
    near.ip(&format!("route add {FAR} encap ip id 500 dst 10.9.0.5 dev cni0"));
    near.tc("qdisc add dev cni0 clsact");
    near.tc("filter add dev cni0 ingress pref 7 protocol all u32 match u32 0 0 flowid 1:1");
    far.ip(&format!(
        "link add vx500 address {FAR_MAC} type vxlan id 500 dstport 4789 local 10.9.0.5 remote 10.9.0.1"
    ));
    far.sysctl("ipv6/conf/vx500/disable_ipv6", "1");
    far.ip("link set vx500 mtu 1400");
    far.ip("link set vx500 up");
    far.ip(&format!("address add {FAR}/32 dev vx500"));
    far.ip(&format!("neighbour add {NEAR} lladdr 02:00:00:00:98:01 dev vx500 nud permanent"));
    far.ip(&format!("route add {NEAR} dev vx500"));
}

/// The packets of the owner's network.
fn of_owner(frames: &Frames) -> Frames {
    frames.only(|frame| frame[..5] == [2, 0, 0, 0, 0x98] && frame[6..11] == [2, 0, 0, 0, 0x98])
}

fn a_device_carries_copies_beside_the_packets_of_its_owner(mode: AttachMode) {
    let scene = Scene::new("device", 9000);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    let near = lab.node();
    overlay(near, far);
    near.ping_every(std::time::Duration::from_millis(2), FAR.parse().unwrap(), 2, 56);
    let before = lab.network_state();
    let device = near.ip("-d link show cni0");
    let pods = scene.pods("far");
    let agent = Agent::run_until(lab, mode, &pods, &TARGET, &[web]);
    let status = wait_target(lab, "far", true);
    assert_eq!(status.target("far").device, "cni0");
    assert!(!lab.devices().iter().any(|device| device.starts_with("pm-")), "no device is made");

    // The owner's packets and the copies are sent at the same time.
    let (inside, copies) = (Inside::of(web), Capture::start(far, "vx4"));
    let (owner, arrived) = (Capture::start(near, "cni0"), Capture::start(far, "vx500"));
    let pinging = Pinging::start(near, FAR.parse().unwrap());
    web.ping(db.v4(), 20, 56);
    web.ping(db.v6(), 20, 1400);
    web.udp_echo(db, db.v4(), &[0, 1, 1472]);
    near.ping_every(std::time::Duration::from_millis(2), FAR.parse().unwrap(), 20, 1300);
    let pings = pinging.stop() + 20;
    shows(&copies, || inside.capture.frames());
    shows(&arrived, || of_owner(&owner.frames()));
    let (sent, received) = inside.stop();
    copies.stop().same_as(&sent.and(&received)).unwrap();
    let arrived = arrived.stop();
    assert_eq!(arrived.len(), 2 * pings, "each ping and its answer, and no copy");
    arrived.same_as(&of_owner(&owner.stop())).unwrap();
    assert_eq!(
        lab.status().tap(web.veth_host()).verdicts(),
        named(&[("egress copied", sent.len()), ("ingress copied", received.len())])
    );

    assert_eq!(near.ip("-d link show cni0"), device, "the agent changes nothing of the device");
    assert!(near.tc("filter show dev cni0 ingress").contains("pref 7"));
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}

/// Each problem with the device is a reason for this target only. Copying continues when the problem is solved.
#[test]
fn a_device_that_cannot_be_used_is_a_reason_until_it_can() {
    let scene = Scene::new("device-unfit", 1500);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    let pods = scene.pods("far");
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    let change = |lines: &[&str]| lines.iter().for_each(|line| drop(lab.node().run(line)));
    let counted = |verdict: &str| lab.status().tap(web.veth_host()).total(verdict);
    let stops = |lines: &[&str], part: &str| {
        change(lines);
        lab.wait_status(|status| {
            let why = unreached(status);
            check(!status.target("far").up && why.contains(part), || format!("not {part:?}: {why}"))
        });
        lab.wait_get("/readyz", 200);
        let (before, copies) = (counted("target_down"), Capture::start(far, "vx4"));
        web.ping(db.v4(), 3, 56);
        eventually(SOON, || {
            let now = counted("target_down");
            check(now == before + 6, || format!("{now} packets, {before} before"))
        });
        assert_eq!(copies.stop().len(), 0, "{part}");
    };
    let goes_on = |lines: &[&str]| {
        change(lines);
        wait_target(lab, "far", true);
        let before = counted("copied");
        eventually(SOON, || {
            // The program at the device is attached a little later.
            web.ping(db.v4(), 1, 56);
            check(counted("copied") > before, || "no copy".into())
        });
        let (before, inside, copies) = (counted("copied"), Inside::of(web), Capture::start(far, "vx4"));
        web.ping(db.v4(), 3, 56);
        shows(&copies, || inside.capture.frames());
        assert_eq!(counted("copied"), before + 6);
        copies.stop();
    };
    let delete = "ip link delete cni0";
    stops(&[], "the device cni0 does not exist");
    stops(&["ip link add cni0 type bridge"], "cni0 is of kind bridge");
    stops(&[delete, "ip link add cni0 type vxlan id 5 dstport 4789"], "cni0 is not in external mode");
    stops(&[delete, "ip link add cni0 type vxlan dstport 4790 external"], "cni0 uses port 4790");
    stops(&[delete, MAKE], "cni0 is down");
    stops(
        &["tc qdisc add dev cni0 root handle 9: pfifo", "ip link set cni0 up"],
        "tc qdisc replace dev cni0 root noqueue",
    );
    goes_on(&["tc qdisc replace dev cni0 root noqueue"]);
    stops(&["ip link set cni0 down"], "cni0 is down");
    goes_on(&["ip link set cni0 up"]);
    stops(&[delete], "the device cni0 does not exist");
    goes_on(&[MAKE, "ip link set cni0 up"]);
    agent.stop();
    lab.cleanup();
    assert!(lab.devices().contains(&"cni0".to_owned()), "it belongs to other software");
}
