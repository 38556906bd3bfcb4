//! Root inside a pod, with all rights over the pod's namespace: random actions.
//!
//! Each action may fail, for example if its device does not exist. Actions that need a missing kernel feature (for
//! example netem or fq) always fail.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use mirror_tests::{Frame, Lab, Neighbour, Netns, PodNs, random::Random};

/// The alias of the agent's own devices.
const ALIAS: &str = "podmirror";
/// The ifindex of relay devices (`mirror_core::exit::IFINDEX`), for devices that imitate one.
const EXIT_INDEX: u32 = 0x706d_0000;
/// The ethertype of frames that are sent into the relay device. None of them may arrive anywhere.
pub(super) const FORGED: u16 = 0x88b6;

const AT_EXIT: &[&str] = &[
    "link delete podmirror",
    "link set podmirror down",
    "link set podmirror up",
    "link set podmirror name hidden",
    "link set hidden name podmirror",
    "link delete hidden",
    "link set podmirror mtu 100",
    "link set podmirror address 02:09:09:09:09:09",
    "link set podmirror type macvlan mode bridge",
    "link set podmirror type macvlan mode vepa",
    "link set podmirror type macvlan mode source",
    "link set podmirror type macvlan mode private",
    "link set podmirror promisc on",
    "link set podmirror arp on multicast on",
    "link set podmirror netns CELL",
    "link set podmirror master inner",
    "address add 10.9.9.9/24 dev podmirror",
    "link add podmirror type veth peer name other",
    "link add podmirror type bridge",
    "link add other index INDEX type veth peer name another",
    "link add link eth1 name other index INDEX type macvlan mode bridge",
    "link add link eth1 name other index INDEX type macvlan mode private",
    "link delete other",
    "link add link podmirror name above type macvlan mode bridge",
    "link set above up alias podmirror",
];

const AT_NICS: &[&str] = &[
    "link set NIC down",
    "link set NIC up",
    "link set NIC up",
    "link set NIC mtu 500",
    "link set NIC mtu 9000",
    "link set NIC address 02:08:08:08:08:08",
    "link set NIC address 02:00:00:00:00:01",
    "link set NIC promisc on",
    "link set NIC txqueuelen 1",
    "link set NIC master inner",
    "link set NIC nomaster",
    "link add link eth1 name over type macvlan mode private",
    "link add inner type bridge",
    "link set inner up",
    "link delete inner",
    "link add many index 7777 type veth peer name more",
    "link delete many",
    "tuntap add dev tap0 mode tap",
    "tuntap delete dev tap0 mode tap",
];

const AT_HOOKS: &[&str] = &[
    "qdisc add dev DEV clsact",
    "qdisc delete dev DEV clsact",
    "qdisc replace dev DEV ingress",
    "qdisc delete dev DEV ingress",
    "qdisc replace dev DEV root tbf rate 1mbit burst 2k latency 5ms",
    "qdisc replace dev DEV root pfifo limit 1",
    "qdisc replace dev DEV root blackhole",
    "qdisc replace dev DEV root netem delay 10ms duplicate 50%",
    "qdisc replace dev DEV root fq",
    "qdisc delete dev DEV root",
    "filter add dev DEV ingress pref 1 protocol all u32 match u32 0 0 flowid 1:1",
    "filter add dev DEV egress pref 1 protocol all u32 match u32 0 0 flowid 1:1",
    "filter add dev DEV egress pref 1 protocol all u32 match u32 0 0 action drop",
    "filter add dev DEV egress pref 1 protocol all u32 match u32 0 0 action mirred egress redirect dev podmirror",
    "filter add dev DEV egress pref 1 protocol all u32 match u32 0 0 action mirred egress mirror dev podmirror",
    "filter add dev DEV ingress pref 1 protocol all u32 match u32 0 0 action mirred egress redirect dev podmirror",
    "filter add dev DEV egress pref 1 protocol all u32 match u32 0 0 action mirred egress mirror dev eth1",
    "filter add dev DEV ingress pref 1 protocol all u32 match u32 0 0 action mirred egress redirect dev lo",
    "filter delete dev DEV ingress",
    "filter delete dev DEV egress",
];

/// A pod under attack, and the state of the attack.
pub(super) struct Hostile<'a> {
    pub(super) pod: &'a PodNs,
    /// An additional namespace in which the pod can hide devices.
    cell: Netns,
    programs: Vec<Neighbour>,
    random: Random,
    /// The number of frames that the pod has sent from its NICs.
    pub(super) sent: usize,
}

impl<'a> Hostile<'a> {
    pub(super) fn new(lab: &Lab, pod: &'a PodNs, random: Random) -> Self {
        let cell = Netns::new(&format!("{}-cell", lab.node().name()));
        cell.keep_quiet();
        Self { pod, cell, programs: Vec::new(), random, sent: 0 }
    }

    /// Performs one random action, and sends a frame from each NIC.
    pub(super) fn act(&mut self) {
        let nic = self.random.pick(&["eth0", "eth1"]);
        let device = self.random.pick(&["eth0", "eth1", "podmirror", "podmirror", "lo"]);
        match self.random.below(10) {
            0..3 => {
                let words = self.random.pick(AT_EXIT);
                let words = words.replace("CELL", self.cell.name()).replace("INDEX", &EXIT_INDEX.to_string());
                self.pod.netns().try_run(&format!("ip {words}"));
            }
            3 | 4 => {
                let words = self.random.pick(AT_NICS).replace("NIC", nic);
                self.pod.netns().try_run(&format!("ip {words}"));
            }
            5 | 6 => {
                let words = self.random.pick(AT_HOOKS).replace("DEV", device);
                self.pod.netns().try_run(&format!("tc {words}"));
            }
            7 => {
                let program =
                    self.random.pick(&["forger", "last_word", "swallow", "swallow_early", "answer"]);
                if self.programs.len() < 3 {
                    self.programs.extend(Neighbour::inside(self.pod.netns(), device, program));
                } else {
                    self.programs.remove(0);
                }
            }
            8 => {
                let mut alias: &[u8] = self.random.pick(&[b"\xff\xfe", b"plain", b""]);
                let mut ip = self.pod.netns().command("ip");
                if self.random.one_in(2) {
                    if self.random.one_in(2) {
                        alias = ALIAS.as_bytes();
                    }
                    ip.args(["link", "set", "dev", device, "alias"]).arg(OsStr::from_bytes(alias));
                } else {
                    ip.args(["link", "property", "add", "dev", device, "altname"])
                        .arg(OsStr::from_bytes(alias));
                }
                ip.output().unwrap();
            }
            _ if self.random.one_in(2) => self.go_away(nic),
            _ => self.forge(),
        }
        self.send();
    }

    /// Moves a NIC to another namespace or renames it, sends from there, and restores it.
    fn go_away(&mut self, nic: &str) {
        let (pod, cell) = (self.pod.netns(), &self.cell);
        if self.random.one_in(2) {
            pod.try_run(&format!("ip link set {nic} netns {}", cell.name()));
            cell.try_run(&format!("ip link set {nic} up"));
            self.send();
            self.cell.try_run(&format!("ip link set {nic} netns {}", pod.name()));
        } else {
            pod.try_run(&format!("ip link set {nic} name hidden-nic"));
            self.send();
            pod.try_run(&format!("ip link set hidden-nic name {nic}"));
        }
    }

    /// Sends frames into the relay device, of all sizes, to all and to addresses of others.
    fn forge(&mut self) {
        let Ok(exit) = self.pod.netns().try_sender("podmirror") else { return };
        for number in 0..20 {
            let to = self.random.pick(&[Frame::BROADCAST, [2, 0, 0, 0, 0, 1], [2, 9, 9, 9, 9, 9]]);
            let length = self.random.pick(&[60, 99, 1514, 9000]);
            let frame = Frame::new(to, [2, 9, 9, 9, 9, 9]).ethertype(FORGED).filled(length, number);
            // The relay hub drops the frame and returns an error.
            let _ = exit.send(&frame.bytes());
        }
    }

    /// Sends a frame from each NIC that exists, in either namespace.
    fn send(&mut self) {
        for (netns, nic) in [(self.pod.netns(), "eth0"), (self.pod.netns(), "eth1"), (&self.cell, "eth1")] {
            let Ok(socket) = netns.try_sender(nic) else { continue };
            let frame = Frame::new(Frame::BROADCAST, [2, 7, 7, 7, 7, 7]).filled(200, self.sent);
            self.sent += 1;
            // A device that is down refuses the frame.
            let _ = socket.send(&frame.bytes());
        }
    }

    /// Stops, and restores the NICs and the namespace.
    pub(super) fn stop(mut self) {
        self.programs.clear();
        let pod = self.pod.netns();
        for nic in self.pod.nics() {
            let name = &nic.name;
            self.cell.try_run(&format!("ip link set {name} netns {}", pod.name()));
            pod.try_run(&format!("ip link set hidden-nic name {name}"));
        }
        // Only the relay device stays, if it exists: the agent has to repair it.
        for device in pod.devices() {
            if !["lo", "eth0", "eth1", "podmirror"].contains(&device.as_str()) {
                pod.try_run(&format!("ip link delete {device}"));
            }
        }
        for device in ["lo", "eth0", "eth1", "podmirror"] {
            for what in ["root", "clsact", "ingress"] {
                pod.try_run(&format!("tc qdisc delete dev {device} {what}"));
            }
        }
        // The pod's own device with the name of the relay device.
        if !pod.run("ip -o link show").contains(&format!("{EXIT_INDEX}: podmirror")) {
            pod.try_run("ip link delete podmirror");
        }
        for nic in self.pod.nics() {
            let [a, b, c, d, e, f] = nic.mac;
            let name = &nic.name;
            pod.ip(&format!("link set {name} nomaster"));
            pod.ip(&format!("link set {name} down"));
            pod.ip(&format!(
                "link set {name} address {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x} mtu 1500"
            ));
            pod.ip(&format!("link set {name} promisc off alias well txqueuelen 1000"));
            pod.ip(&format!("link set {name} up"));
            pod.ip(&format!("address replace {}/24 dev {name}", nic.v4));
        }
    }
}
