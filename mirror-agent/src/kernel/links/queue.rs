//! The queue of a mirror interface whose copies the kernel segments: it keeps the segments in order. Also removes the
//! queue of a tunnel's device.
//!
//! Without a queue, all CPUs send to a device at once, each segments its own super-frame, and the segments of two
//! frames mix. With a queue, one CPU at a time segments and sends. The module removes a root qdisc only if it has
//! podmirror's handle. `mirror_iface` decides when. `netlink` and `create` call it.

use std::io;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::{
    Handle,
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};

use super::socket::ask;
use crate::model::IfIndex;

/// First in, first out, counted in frames. Every kernel with qdiscs has it.
const KIND: &str = "pfifo";
/// The handle ("pm") that identifies podmirror's queue.
const HANDLE: TcHandle = TcHandle { major: 0x706d, minor: 0 };
/// The length of the queue in frames, as usual for devices; 64 MiB if all are super-frames of 64 KiB.
const LIMIT: u32 = 1000;
/// `TCA_OPTIONS` (include/uapi/linux/rtnetlink.h). The crate does not define the options of this kind.
const OPTIONS: u16 = 2;

/// Adds podmirror's queue to a device. Fails if other software has added another queue.
pub(super) async fn give(handle: &Handle, ifindex: IfIndex) -> io::Result<()> {
    let mut queue = root_of(ifindex)?;
    // `struct tc_fifo_qopt`: the limit.
    let options = DefaultNla::new(OPTIONS, LIMIT.to_ne_bytes().to_vec());
    queue.attributes = vec![TcAttribute::Kind(KIND.to_owned()), TcAttribute::Other(options)];
    // Without NLM_F_REPLACE the request replaces only the kernel's default queue.
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    ask(handle, RouteNetlinkMessage::NewQueueDiscipline(queue), flags).await.map(drop)
}

/// Sets a device to have no queue, even if the kernel would give it the default one.
pub(super) async fn none(handle: &Handle, ifindex: IfIndex) -> io::Result<()> {
    let mut queue = root_of(ifindex)?;
    queue.attributes = vec![TcAttribute::Kind("noqueue".to_owned())];
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    ask(handle, RouteNetlinkMessage::NewQueueDiscipline(queue), flags).await.map(drop)
}

/// Removes podmirror's queue from a device, and keeps any other one.
pub(super) async fn take(handle: &Handle, ifindex: IfIndex) -> io::Result<()> {
    let queue = RouteNetlinkMessage::DelQueueDiscipline(root_of(ifindex)?);
    match ask(handle, queue, 0).await {
        // The root qdisc has another handle, or is the kernel's default.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        taken => taken.map(drop),
    }
}

fn root_of(ifindex: IfIndex) -> io::Result<TcMessage> {
    let mut queue = TcMessage::with_index(i32::try_from(ifindex.0).map_err(io::Error::other)?);
    (queue.header.parent, queue.header.handle) = (TcHandle::ROOT, HANDLE);
    Ok(queue)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::process::Command;

    use rtnetlink::LinkVeth;

    use super::*;
    use crate::{
        kernel::links::{
            LinkTable as _,
            netlink::Netlink,
            tests::{add, by_name, handle, on_a_node},
        },
        model::LinkChange,
    };

    fn tc(words: &str) -> String {
        let output = Command::new("tc").args(words.split(' ')).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_queue_of_ours_comes_and_goes_and_that_of_others_stays() {
        on_a_node(|| async {
            let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
            add(&handle, LinkVeth::new("a", "b").build()).await;
            let is_queueless = async |netlink: &mut Netlink| by_name(netlink, "a").await.unwrap().queueless;
            let ifindex = by_name(&mut netlink, "a").await.unwrap().ifindex;
            for is_up in [false, true] {
                if is_up {
                    netlink.apply(&LinkChange::SetUp(ifindex)).await.unwrap();
                }
                assert!(is_queueless(&mut netlink).await);
                netlink.apply(&LinkChange::SetQueue(ifindex, true)).await.unwrap();
                assert!(!is_queueless(&mut netlink).await);
                let shown = tc("qdisc show dev a");
                assert!(shown.contains("pfifo 706d: root") && shown.contains("limit 1000p"), "{shown}");
                for _ in 0..2 {
                    netlink.apply(&LinkChange::SetQueue(ifindex, false)).await.unwrap();
                    assert!(is_queueless(&mut netlink).await);
                }
            }
            tc("qdisc add dev a root handle 9: pfifo limit 7");
            let theirs = tc("qdisc show dev a");
            assert!(theirs.contains("pfifo 9: root"), "{theirs}");
            netlink.apply(&LinkChange::SetQueue(ifindex, true)).await.unwrap_err();
            netlink.apply(&LinkChange::SetQueue(ifindex, false)).await.unwrap();
            assert_eq!(tc("qdisc show dev a"), theirs);
            netlink.apply(&LinkChange::SetQueue(IfIndex(4711), true)).await.unwrap();
        });
    }
}
