//! Drops every packet that arrives at a device: at the other end of the veth pair that replaces a dummy, at the device
//! of a tunnel, and at the relay hub.
//!
//! A dummy drops the packets that are sent to it. A veth passes them to its peer, where the node's own network stack
//! would accept copies of broadcasts and multicasts. A tunnel's device also receives packets that others send to its
//! port, and the node must not process them. The relay hub receives packets from one macvlan on it to another, and root
//! in a pod can create a macvlan. `create` calls this module. The sink is one classic BPF instruction in a tc filter.
//! It needs no other object, and is deleted with the device.

use std::io;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::{
    Handle,
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
    },
};

use super::socket::ask;

/// `TCA_BPF_OPS_LEN` and `TCA_BPF_OPS` (include/uapi/linux/pkt_cls.h).
const OPS_LEN: u16 = 4;
const OPS: u16 = 5;

/// `struct sock_filter` of `ret #2`: the filter is direct-action, and 2 is `TC_ACT_SHOT`.
fn drop_all() -> Vec<u8> {
    let (code, k) = (libc::BPF_RET | libc::BPF_K, 2_u32);
    let [low, high] = (code as u16).to_ne_bytes();
    let mut instruction = vec![low, high, 0, 0];
    instruction.extend(k.to_ne_bytes());
    instruction
}

/// Makes `ifindex` drop everything that it receives. The qdisc is clsact, so that the second stage finds its hook.
pub(super) async fn drop_received(handle: &Handle, ifindex: u32) -> io::Result<()> {
    let index = i32::try_from(ifindex).map_err(io::Error::other)?;
    let mut qdisc = TcMessage::with_index(index);
    qdisc.header.parent = TcHandle::CLSACT;
    qdisc.header.handle = TcHandle { major: 0xffff, minor: 0 };
    qdisc.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    ask(handle, RouteNetlinkMessage::NewQueueDiscipline(qdisc), flags).await?;

    let mut filter = TcMessage::with_index(index);
    filter.header.parent = TcHandle { major: 0xffff, minor: TcHandle::MIN_INGRESS };
    // The priority is in the upper half, the protocol (all) in the lower, in network byte order.
    filter.header.info = 1 << 16 | u32::from((libc::ETH_P_ALL as u16).to_be());
    let options = [
        TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        TcFilterBpfOption::Other(DefaultNla::new(OPS_LEN, 1_u16.to_ne_bytes().to_vec())),
        TcFilterBpfOption::Other(DefaultNla::new(OPS, drop_all())),
    ];
    filter.attributes = vec![
        TcAttribute::Kind(TcFilterBpf::KIND.to_owned()),
        TcAttribute::Options(options.map(TcOption::Bpf).into()),
    ];
    ask(handle, RouteNetlinkMessage::NewTrafficFilter(filter), flags).await.map(drop)
}
