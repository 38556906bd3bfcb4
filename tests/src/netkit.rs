//! Makes netkit devices. The `ip` of older distributions makes only those of the mode L3.

use rtnetlink::{LinkNetkit, packet_route::link::NetkitMode};

use crate::Netns;

/// Makes two devices in a namespace, which are one pair. `peer` is the one for a pod. With `l3` they have no addresses, and
/// no ARP.
#[track_caller]
pub(crate) fn pair(netns: &Netns, primary: &str, peer: &str, l3: bool) {
    try_pair(netns, primary, peer, l3).unwrap();
}

fn try_pair(netns: &Netns, primary: &str, peer: &str, l3: bool) -> Result<(), rtnetlink::Error> {
    let mode = if l3 { NetkitMode::L3 } else { NetkitMode::L2 };
    let request = LinkNetkit::new(primary, peer, mode).build();
    netns.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().unwrap();
            tokio::spawn(connection);
            handle.link().add(request).execute().await
        })
    })
}

/// Whether the kernel has netkit.
pub(crate) fn has(netns: &Netns) -> bool {
    let made = try_pair(netns, "has-netkit", "has-netkit-peer", false);
    if made.is_ok() {
        netns.ip("link delete has-netkit");
    }
    made.is_ok()
}
