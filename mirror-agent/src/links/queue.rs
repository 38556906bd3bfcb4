//! The queue of a mirror interface whose copies the kernel segments. The queue keeps the copies in order. And no queue, for
//! the device of a tunnel.
//!
//! All CPUs send to a device without a queue at once, and each of them segments its own super-frame: the segments of
//! two frames mix. Behind a queue one CPU at a time segments and sends. Only a root qdisc with our handle is ever
//! removed. This module does not decide when (`mirror_iface` does). `netlink` and `create` call it.

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

/// First in, first out, counted in frames: part of every kernel that has qdiscs.
const KIND: &str = "pfifo";
/// "pm": by this handle we know the queue again.
const HANDLE: TcHandle = TcHandle { major: 0x706d, minor: 0 };
/// Frames that the queue holds, as many as devices usually have; super-frames of 64 KiB make 64 MiB of it.
const LIMIT: u32 = 1000;
/// `TCA_OPTIONS` (include/uapi/linux/rtnetlink.h). The crate knows no options of this kind.
const OPTIONS: u16 = 2;

/// Gives a device our queue. An error if other software has given it another queue.
pub(super) async fn give(handle: &Handle, ifindex: IfIndex) -> io::Result<()> {
    let mut queue = root_of(ifindex)?;
    // `struct tc_fifo_qopt`: the limit.
    let options = DefaultNla::new(OPTIONS, LIMIT.to_ne_bytes().to_vec());
    queue.attributes = vec![TcAttribute::Kind(KIND.to_owned()), TcAttribute::Other(options)];
    // Without NLM_F_REPLACE the request replaces only the kernel's default queue.
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    ask(handle, RouteNetlinkMessage::NewQueueDiscipline(queue), flags).await.map(drop)
}

/// Leaves a device without a queue, also one that the kernel would give its default queue.
pub(super) async fn none(handle: &Handle, ifindex: IfIndex) -> io::Result<()> {
    let mut queue = root_of(ifindex)?;
    queue.attributes = vec![TcAttribute::Kind("noqueue".to_owned())];
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    ask(handle, RouteNetlinkMessage::NewQueueDiscipline(queue), flags).await.map(drop)
}

/// Takes our queue away from a device, and leaves any other one.
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
        links::{
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
