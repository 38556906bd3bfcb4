//! The arguments of `deliver` for the kernel's helpers: the tunnel key of a copy, and the MTU lookup of its route.
//!
//! Pure: kernel structs, built from a [`Tunnel`]. `mirror-ebpf/src/tunnel.rs` calls the helpers.

use crate::abi::{TUNNEL_IPV6, TUNNEL_UDP, Tunnel};

/// `struct bpf_tunnel_key` of Linux 5.10. Later kernels have more fields, and accept this length too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Key {
    id: u32,
    remote: [u32; 4],
    tos: u8,
    ttl: u8,
    ext: u16,
    label: u32,
}

/// TTL of a packet: the kernel's default.
const TTL: u8 = 64;

impl Key {
    /// The tunnel key of a copy.
    #[inline(always)]
    pub fn of(tunnel: &Tunnel, id: u32) -> Self {
        let [first, rest @ ..] = tunnel.remote;
        // The helper requires an IPv4 address in host byte order.
        let first = if tunnel.flags & TUNNEL_IPV6 == 0 { u32::from_be(first) } else { first };
        Self { id, remote: [first, rest[0], rest[1], rest[2]], tos: 0, ttl: TTL, ext: 0, label: 0 }
    }
}

/// `struct erspan_metadata` (include/uapi/linux/erspan.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Erspan {
    version: u32,
    /// The index of a port, and unused bytes.
    rest: [u8; 8],
}

impl Erspan {
    /// The metadata of type II, which has the version 1.
    pub const TYPE_II: Self = Self { version: 1, rest: [0; 8] };
}

/// `struct bpf_fib_lookup` for IPv6: a lookup of the present MTU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Lookup {
    family: u8,
    protocol: u8,
    ports: [u16; 2],
    /// The length of a packet. If it is too long, the kernel writes the MTU here.
    length: u16,
    ifindex: u32,
    flow: u32,
    from: [u32; 4],
    to: [u32; 4],
    vlan: [u16; 2],
    addresses: [[u16; 3]; 2],
}

const AF_INET6: u8 = 10;
/// The return code for a packet that is too long (`BPF_FIB_LKUP_RET_FRAG_NEEDED`).
const TOO_LONG: i64 = 8;
/// The minimum MTU of IPv6 in bytes.
const IPV6_MTU: u32 = 1280;

impl Lookup {
    /// The lookup before a copy of this length in bytes, through the device with this index; `None`: the result would
    /// not matter.
    ///
    /// A router may have reported a smaller MTU to the node since the agent's last reading. Then GRE and ERSPAN over
    /// IPv6 would send an ICMP error to the sender of the inner packet: to the pod.
    #[inline(always)]
    pub fn of(tunnel: &Tunnel, len: u32, ifindex: u32) -> Option<Self> {
        let tells_sender = tunnel.flags & (TUNNEL_IPV6 | TUNNEL_UDP) == TUNNEL_IPV6;
        let kept = if len < tunnel.room { len } else { tunnel.room };
        if !tells_sender || kept + tunnel.headers <= IPV6_MTU {
            return None;
        }
        Some(Self { family: AF_INET6, length: u16::MAX, ifindex, to: tunnel.remote, ..Self::default() })
    }

    /// Maximum bytes of a frame in one packet, after the kernel's answer. Without an answer, this is the agent's value:
    /// before Linux 5.12, and on a node that does not forward IPv6.
    #[inline(always)]
    pub fn room(&self, tunnel: &Tunnel, code: i64) -> u32 {
        let mtu = self.length as u32;
        if code == TOO_LONG && mtu > tunnel.headers && mtu - tunnel.headers < tunnel.room {
            mtu - tunnel.headers
        } else {
            tunnel.room
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tunnel(flags: u32) -> Tunnel {
        Tunnel { remote: [0x0500_090a, 2, 3, 4], room: 1452, headers: 48, flags, ..Tunnel::default() }
    }

    /// The kernel rejects other lengths.
    #[test]
    fn the_structs_are_as_long_as_the_kernels() {
        assert_eq!((size_of::<Key>(), size_of::<Erspan>(), size_of::<Lookup>()), (28, 12, 64));
        let at = core::mem::offset_of!(Lookup, length);
        assert_eq!((at, core::mem::offset_of!(Lookup, to)), (6, 32));
    }

    #[test]
    fn a_key_has_the_address_as_the_helper_takes_it() {
        let remote = |flags| Key::of(&tunnel(flags), 7).remote;
        assert_eq!(remote(0)[0], u32::from_be(0x0500_090a));
        assert_eq!(remote(TUNNEL_IPV6), [0x0500_090a, 2, 3, 4]);
    }

    proptest! {
        /// Only GRE and ERSPAN over IPv6 use the lookup, and only for a copy that may be too long for some route.
        #[test]
        fn the_mtu_is_asked_where_the_pod_would_be_told(flags in 0..16_u32, len in 0..70_000_u32) {
            let is_gre = flags & TUNNEL_IPV6 != 0 && flags & TUNNEL_UDP == 0;
            let asked = Lookup::of(&tunnel(flags), len, 9).is_some();
            prop_assert_eq!(asked, is_gre && len > IPV6_MTU - 48);
        }

        /// The answer never increases the room, and a frame of the resulting length fits.
        #[test]
        fn an_answer_only_takes_room_away(length: u16, code in prop_oneof![Just(TOO_LONG), -40..10_i64]) {
            let room = Lookup { length, ..Lookup::default() }.room(&tunnel(TUNNEL_IPV6), code);
            prop_assert!(0 < room && room <= 1452);
            let is_known = code == TOO_LONG && length > 48;
            prop_assert_eq!(room, if is_known { 1452.min(u32::from(length) - 48) } else { 1452 });
        }
    }
}
