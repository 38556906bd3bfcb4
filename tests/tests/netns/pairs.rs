//! Pod to pod on one node, for each pair of kinds of NIC: both pods are mirrored to one target, which gets each packet once,
//! byte for byte.
//!
//! The kinds differ in where their taps are. All pods are in one network.

use mirror_tests::{
    Agent, AttachMode, Capture, Frames, Lab, Neighbour, Netns, PodNs, PodSpec, PodsFile, TapStatus, check,
    has_netkit,
};

use crate::{
    MIRROR,
    pod_side::{talk, wait_counted},
    shows,
};

/// A kind of NIC, by the place of its tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A veth, tapped at the node's end.
    Veth,
    /// A veth that is tapped at the node's end, and inside the pod for what reaches it, as with eBPF host routing.
    Bypassed,
    /// A veth past the node, tapped inside the pod.
    Past,
    /// Tapped inside the pod.
    Macvlan,
    /// Tapped inside the pod.
    Ipvlan,
    /// Tapped at the node's end.
    Netkit,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Veth, Self::Bypassed, Self::Past, Self::Macvlan, Self::Ipvlan, Self::Netkit];

    /// The kind of the device, for those over a device of the node, and that device.
    const fn over(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Macvlan => Some(("macvlan mode bridge", "up0")),
            Self::Ipvlan => Some(("ipvlan mode l2", "up2")),
            Self::Veth | Self::Bypassed | Self::Past | Self::Netkit => None,
        }
    }

    /// Whether the kernel has the kind. Those of the guests with TCX have all.
    fn is_there(self, lab: &Lab) -> bool {
        let made = match (self, self.over()) {
            (_, Some((kind, parent))) => {
                let made =
                    lab.node().try_run(&format!("ip link add link {parent} name has-kind type {kind}"));
                let made = made.status.success();
                if made {
                    lab.node().ip("link delete has-kind");
                }
                made
            }
            (Self::Netkit, None) => has_netkit(lab),
            (_, None) => true,
        };
        let must = self == Self::Macvlan || std::env::var_os("MIRROR_TEST_GUEST").is_some();
        assert!(made || !must, "this kernel cannot make a NIC of the kind {self:?}");
        if !made {
            eprintln!("not applicable: this kernel has no {self:?}");
        }
        made
    }

    fn pod(self, lab: &Lab, switch: &Netns, name: &str) -> PodNs {
        match (self, self.over()) {
            (_, Some((kind, parent))) => lab.pod_over(name, kind, parent),
            (Self::Past, None) => lab.pod_elsewhere(name, switch, "br0"),
            (Self::Netkit, None) => lab.netkit_pod(name, "br0"),
            (_, None) => lab.pod(name, "br0"),
        }
    }

    /// Whether a tap of this kind is where it is meant to be.
    fn is_tapped(self, tap: &TapStatus) -> bool {
        let is_inside = !matches!(self, Self::Veth | Self::Bypassed | Self::Netkit);
        tap.is_attached() && tap.inside == is_inside && tap.pod_side.is_some() == (self == Self::Bypassed)
    }
}

/// The frames that a pod has sent. All ipvlans over one device have one MAC address, so their frames are told by the
/// sender in ARP and IP.
fn sent(pod: &PodNs, frames: &Frames) -> Frames {
    let nic = pod.eth0();
    frames.only(|frame| {
        frame[6..12] == nic.mac
            && match frame[12..14] {
                [0x08, 0x00] => frame[26..30] == nic.v4.octets(),
                [0x08, 0x06] => frame[28..32] == nic.v4.octets(),
                _ => frame[22..38] == nic.v6.octets(),
            }
    })
}

in_both_modes!(pods_with_any_two_kinds_of_nics_are_mirrored_once);

fn pods_with_any_two_kinds_of_nics_are_mirrored_once(mode: AttachMode) {
    let lab = Lab::new("pairs");
    lab.bridge("br0");
    for (device, port) in [("up0", "up1"), ("up2", "up3")] {
        lab.node().ip(&format!("link add {device} type veth peer name {port}"));
        for end in [device, port] {
            lab.node().sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1");
            lab.node().ip(&format!("link set {end} up"));
        }
        lab.node().ip(&format!("link set {port} master br0"));
    }
    let switch = Netns::new(&format!("{}-switch", lab.node().name()));
    switch.keep_quiet();
    switch.ip("link add br0 type bridge mcast_snooping 0");
    lab.node().ip(&format!("link add switch type veth peer name node netns {}", switch.name()));
    for (netns, port) in [(lab.node(), "switch"), (&switch, "node")] {
        netns.sysctl(&format!("ipv6/conf/{port}/disable_ipv6"), "1");
        netns.ip(&format!("link set {port} master br0 up"));
    }
    switch.ip("link set br0 up");

    let kinds: Vec<_> = Kind::ALL.into_iter().filter(|kind| kind.is_there(&lab)).collect();
    let pod = |name: &str, kind: &Kind| kind.pod(&lab, &switch, name);
    let webs: Vec<_> = kinds.iter().map(|kind| pod("web", kind)).collect();
    let dbs: Vec<_> = kinds.iter().map(|kind| pod("db", kind)).collect();
    let pods = PodsFile::new(&lab, &[PodSpec::of(&webs[0])]);
    let agent = Agent::run(&lab, mode, &pods, &[]);
    for (place, (first, web)) in kinds.iter().zip(&webs).enumerate() {
        for (second, db) in kinds.iter().zip(&dbs).skip(place) {
            eprintln!("{first:?} and {second:?}");
            are_mirrored_once(&lab, &pods, [(*first, web), (*second, db)]);
        }
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
    let frames =
        || [web, db].iter().zip(&inside).map(|(pod, inside)| sent(pod, &inside.frames())).collect::<Vec<_>>();
    shows(&mirror, || frames()[0].and(&frames()[1]));
    let [of_web, of_db] = [frames()[0].len(), frames()[1].len()];
    for (pod, sent, received) in [(web, of_web, of_db), (db, of_db, of_web)] {
        wait_counted(lab, pod, &[("egress", "copied", sent), ("ingress", "duplicate", received)]);
    }
    pods.write(&[web, db].map(PodSpec::of));
    lab.wait_taps(&[]);
}
