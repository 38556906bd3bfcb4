//! Stories of third-party programs that read copies: Suricata, softflowd with nfdump, tshark, Open vSwitch.
//!
//! They run the commands of docs/recipes.md and docs/targets.md. `cargo xtask test --level readers` installs the
//! programs of Debian 13.
#![expect(clippy::unwrap_used, reason = "tests")]

use mirror_tests::{AttachMode, Lab, Netns, PodNs};

mod dissectors;
mod extcap;
mod flows;
mod ovs;
mod streams;
mod suricata;

/// The attach mode: no story here depends on it.
fn any_mode() -> AttachMode {
    if AttachMode::Tcx.is_applicable() { AttachMode::Tcx } else { AttachMode::Clsact }
}

/// Two pods and their node. The node is the last field, so it is dropped last.
struct Node {
    web: PodNs,
    db: PodNs,
    lab: Lab,
}

impl Node {
    fn new(story: &str) -> Self {
        let lab = Lab::new(story);
        lab.bridge("br0");
        let node = Self { web: lab.pod("web", "br0"), db: lab.pod("db", "br0"), lab };
        // Both pods learn each other's address. Until then, the bridge floods.
        node.web.ping(node.db.v4(), 2, 56);
        node.web.ping(node.db.v6(), 2, 56);
        node
    }

    /// A directly connected machine. The node sends packets for 10.9.0.5 and fd09::5 there, whether or not the machine
    /// has these addresses. As on a NIC without offloads, all packets on the link are complete.
    fn cable(&self) -> Netns {
        let node = self.lab.node();
        let far = Netns::new(&format!("{}-far", node.name()));
        far.keep_quiet();
        let mac = "02:00:00:00:02:05";
        let peer = format!("name up1 mtu 9000 address {mac} netns {}", far.name());
        node.ip(&format!("link add up0 mtu 9000 type veth peer {peer}"));
        node.run("ethtool -K up0 tx off");
        far.ip("link set up1 up");
        node.ip("link set up0 up");
        node.ip("address add 10.9.0.1/24 dev up0");
        node.ip("address add fd09::1/64 dev up0 nodad");
        for address in ["10.9.0.5", "fd09::5"] {
            node.ip(&format!("neighbour replace {address} lladdr {mac} dev up0 nud permanent"));
        }
        far
    }
}
