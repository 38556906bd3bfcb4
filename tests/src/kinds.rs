//! Kinds of NICs that the running kernel supports.

use crate::{Lab, kernel_is_at_least, netkit};

/// Whether the kernel can create NICs of this kind (macvlan, ipvlan, dummy, netkit). A guest's kernel supports every
/// kind of its version; another kernel may be built without some, but never without macvlan.
#[track_caller]
pub fn has_kind(lab: &Lab, kind: &str) -> bool {
    let node = lab.node();
    let made = match kind {
        "netkit" => netkit::has(node),
        "dummy" => node.try_run("ip link add has-kind type dummy").status.success(),
        _ => {
            node.ip("link add has-lower type veth peer name has-peer");
            let made = node.try_run(&format!("ip link add link has-lower name has-kind type {kind}"));
            node.ip("link delete has-lower");
            made.status.success()
        }
    };
    if kind == "dummy" && made {
        node.ip("link delete has-kind");
    }
    let is_old = kind == "netkit" && !kernel_is_at_least(6, 7);
    let must = kind == "macvlan" || std::env::var_os("MIRROR_TEST_GUEST").is_some() && !is_old;
    assert!(made || !must, "this kernel cannot make a NIC of the kind {kind}");
    if !made {
        eprintln!("not applicable: this kernel has no {kind}");
    }
    made
}
