//! Pod to pod on one node, for each pair of NIC kinds: both pods are mirrored to one target, which gets each packet
//! once, byte for byte.
//!
//! The kinds differ in the place of their taps. All pods are in one network.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
    thread,
};

use mirror_tests::{
    Agent, AttachMode, Capture, Lab, Neighbour, Netns, OneCpu, PodNs, PodSpec, PodsFile, SOON, TapStatus,
    check, eventually, has_kind,
};

use crate::{
    MIRROR, any_mode,
    pod_side::{sent, switch, talk, up},
    shows,
};

/// A kind of NIC, by the place of its tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// A veth, tapped on the node side.
    Veth,
    /// A veth that is tapped on the node side, and for ingress on the pod side, as with eBPF host routing.
    Bypassed,
    /// A veth that bypasses the node, tapped inside the pod.
    Past,
    /// Tapped inside the pod.
    Macvlan,
    /// Tapped inside the pod.
    Ipvlan,
    /// Tapped on the node side.
    Netkit,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Veth, Self::Bypassed, Self::Past, Self::Macvlan, Self::Ipvlan, Self::Netkit];

    /// The device type and the parent, for kinds over a device of the node.
    const fn over(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Macvlan => Some(("macvlan mode bridge", "up0")),
            Self::Ipvlan => Some(("ipvlan mode l2", "up2")),
            Self::Veth | Self::Bypassed | Self::Past | Self::Netkit => None,
        }
    }

    /// Whether the kernel has the kind.
    fn is_there(self, lab: &Lab) -> bool {
        match self {
            Self::Veth | Self::Bypassed | Self::Past => true,
            Self::Macvlan => has_kind(lab, "macvlan"),
            Self::Ipvlan => has_kind(lab, "ipvlan"),
            Self::Netkit => has_kind(lab, "netkit"),
        }
    }

    fn pod(self, lab: &Lab, switch: &Netns, name: &str) -> PodNs {
        match (self, self.over()) {
            (_, Some((kind, parent))) => lab.pod_over(name, kind, parent),
            (Self::Past, None) => lab.pod_elsewhere(name, switch, "br0"),
            (Self::Netkit, None) => lab.netkit_pod(name, "br0"),
            (_, None) => lab.pod(name, "br0"),
        }
    }

    /// Whether a tap of this kind is at its expected place.
    fn is_tapped(self, tap: &TapStatus) -> bool {
        let is_inside = !matches!(self, Self::Veth | Self::Bypassed | Self::Netkit);
        tap.is_attached() && tap.inside == is_inside && tap.pod_side.is_some() == (self == Self::Bypassed)
    }
}

in_both_modes!(an_ipvlan_and_what_differs_most_are_mirrored_once);

/// Kinds that not every kernel has, and those whose marks travel the furthest.
fn differ_most(kinds: [Kind; 2]) -> bool {
    matches!(kinds, [Kind::Bypassed, Kind::Ipvlan] | [Kind::Ipvlan, Kind::Netkit])
}

fn an_ipvlan_and_what_differs_most_are_mirrored_once(mode: AttachMode) {
    are_mirrored("pairs-ipvlan", mode, differ_most);
}

/// In one mode: the marks of a packet do not depend on it.
#[test]
fn pods_with_any_two_other_kinds_of_nics_are_mirrored_once() {
    are_mirrored("pairs", any_mode(), |kinds| !differ_most(kinds));
}

/// Checks pods of each selected pair of kinds that the kernel has.
fn are_mirrored(story: &str, mode: AttachMode, of: impl Fn([Kind; 2]) -> bool) {
    let lab = Lab::new(story);
    lab.bridge("br0");
    for (device, port) in [("up0", "up1"), ("up2", "up3")] {
        up(&lab, device, port);
        lab.node().ip(&format!("link set {port} master br0"));
    }
    let switch = switch(&lab);
    lab.node().ip(&format!("link add switch type veth peer name node netns {}", switch.name()));
    for (netns, port) in [(lab.node(), "switch"), (&switch, "node")] {
        netns.sysctl(&format!("ipv6/conf/{port}/disable_ipv6"), "1");
        netns.ip(&format!("link set {port} master br0 up"));
    }

    let kinds: Vec<_> = Kind::ALL.into_iter().filter(|kind| kind.is_there(&lab)).collect();
    let pairs = kinds
        .iter()
        .enumerate()
        .flat_map(|(place, first)| kinds[place..].iter().map(move |second| [*first, *second]));
    let pairs: Vec<_> = pairs.filter(|kinds| of(*kinds)).collect();
    if pairs.is_empty() {
        return;
    }
    let pod = |name: &str, kind: Kind| kind.pod(&lab, &switch, name);
    let of_kinds = |name: &str, place: usize| {
        let kinds: BTreeSet<_> = pairs.iter().map(|pair| pair[place]).collect();
        kinds.into_iter().map(|kind| (kind, pod(name, kind))).collect::<BTreeMap<_, _>>()
    };
    let (webs, dbs) = (of_kinds("web", 0), of_kinds("db", 1));
    let pods = PodsFile::new(&lab, &[]);
    let agent = Agent::run(&lab, mode, &pods, &[]);
    for [first, second] in pairs {
        eprintln!("{first:?} and {second:?}");
        are_mirrored_once(&lab, &pods, [(first, &webs[&first]), (second, &dbs[&second])]);
    }
    agent.stop();
}

fn are_mirrored_once(lab: &Lab, pods: &PodsFile, both: [(Kind, &PodNs); 2]) {
    let [(_, web), (_, db)] = both;
    let bypassed = both.iter().filter(|(kind, _)| *kind == Kind::Bypassed);
    let _named: Vec<_> = bypassed.map(|(_, pod)| Neighbour::named_as_ciliums(lab, pod.veth_host())).collect();
    pods.write(&[web, db].map(|pod| PodSpec::of(pod).mirror("true").annotated("podmirror.io/nics", "eth0")));
    lab.wait_status(|status| {
        let is_tapped = |(kind, pod): &(Kind, &PodNs)| {
            let tap = status.taps.iter().find(|tap| tap.pod.as_ref().is_some_and(|of| of.name == pod.name()));
            tap.is_some_and(|tap| kind.is_tapped(tap))
        };
        check(status.taps.len() == 2 && both.iter().all(is_tapped), || format!("{:#?}", status.taps))
    });
    let inside = [web, db].map(|pod| Capture::start(pod.netns(), "eth0"));
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    let frames = || {
        [web, db]
            .iter()
            .zip(&inside)
            .map(|(pod, inside)| sent(pod.eth0(), &inside.frames()))
            .collect::<Vec<_>>()
    };
    shows(&mirror, || frames()[0].and(&frames()[1]));
    for (place, pod) in [web, db].into_iter().enumerate() {
        lab.wait_status(|status| {
            // The kernel can still send a packet itself, for example a neighbour probe.
            let sent = frames();
            let expected = [("egress copied", &sent[place]), ("ingress duplicate", &sent[1 - place])];
            let expected = expected.map(|(what, frames)| (what.to_owned(), frames.len() as u64)).into();
            let tap = status.taps.iter().find(|tap| tap.pod.as_ref().is_some_and(|of| of.name == pod.name()));
            let verdicts = tap.map(|tap| tap.verdicts()).unwrap_or_default();
            check(verdicts == expected, || format!("{verdicts:?} instead of {expected:?}"))
        });
    }
    pods.write(&[web, db].map(PodSpec::of));
    lab.wait_taps(&[]);
}

/// Another CPU processes the packets between the two taps, as after a NIC with receive packet steering. The records of
/// copied packets are shared by all CPUs. A packet whose record is missing is copied twice.
#[test]
fn no_packet_is_lost_that_changes_its_cpu_between_two_taps() {
    let cpus = OneCpu::usable();
    let lab = &Lab::new("cpus");
    let node = lab.node();
    node.ip("link add left type veth peer name right");
    for (bridge, port) in [("br0", "left"), ("br1", "right")] {
        lab.bridge(bridge);
        node.sysctl(&format!("ipv6/conf/{port}/disable_ipv6"), "1");
        node.ip(&format!("link set {port} master {bridge} up"));
        // The mask is in words of 32 bits.
        let mask = format!("{:x}{}", 1 << (cpus[1] % 32), ",00000000".repeat(cpus[1] / 32));
        let steer = format!("echo {mask} > /sys/class/net/{port}/queues/rx-0/rps_cpus");
        let exec = ["netns", "exec", node.name(), "sh", "-c", &steer];
        assert!(Command::new("ip").args(exec).status().unwrap().success(), "{steer}");
    }
    let (web, db) = (&lab.pod("web", "br0"), &lab.pod("db", "br1"));
    let pods = PodsFile::new(lab, &[web, db].map(|pod| PodSpec::of(pod).mirror("true")));
    let _agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web, db]);
    let inside = [web, db].map(|pod| (pod, Capture::of_headers(pod.netns(), "eth0")));
    let mirror = Capture::of_headers(node, MIRROR);
    let before = steered();
    {
        let _cpu = OneCpu::numbered(cpus[0]);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| web.udp_echo(db, db.v4(), &[20; 100]));
                scope.spawn(|| db.udp_echo(web, web.v6(), &[20; 100]));
            }
        });
    }
    let packets = eventually(SOON, || {
        let [sent, more] = inside.each_ref().map(|(pod, inside)| sent(pod.eth0(), &inside.frames()));
        let (sent, copies) = (sent.and(&more), mirror.frames());
        let again = copies.less(&sent);
        check(sent.less(&copies).is_empty(), || format!("not copied: {}", sent.less(&copies)))?;
        check(again.less(&sent).is_empty(), || format!("copied three times: {}", again.less(&sent)))?;
        Ok(sent.len())
    });
    assert!(packets >= 1600 && steered() > before, "{packets} packets");
}

/// How often CPUs have received packets from other CPUs, one or more each time.
fn steered() -> u64 {
    let lines = fs::read_to_string("/proc/net/softnet_stat").unwrap();
    lines.lines().map(|line| u64::from_str_radix(line.split(' ').nth(9).unwrap(), 16).unwrap()).sum()
}
