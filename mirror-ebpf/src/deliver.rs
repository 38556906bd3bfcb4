//! The second stage: cuts the copy at the egress hook of the target's device, and encapsulates a copy for a tunnel.
//!
//! A tap cannot cut or encapsulate the pod's own packet, because that would damage it. So the tap program announces the
//! length and the target on this CPU, clones the packet, and withdraws the announcement. Everything between happens on
//! the same CPU, because the egress hook runs in the sender's context, before any queue. For a packet of another sender
//! nothing is announced, so `deliver` does not change it.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    btf_maps::PerCpuArray,
    helpers::bpf_skb_change_tail,
    macros::{btf_map, classifier},
    programs::TcContext,
};
use mirror_common::{
    abi::{
        DROPPED_DOWN, DROPPED_UNCUT, Delivery, HUB_EXPECTED, HUB_NONE, HUB_PASSED, OVERSIZE_DROP,
        OVERSIZE_FRAGMENT, OVERSIZE_SEGMENT, Session, TARGET_TUNNEL, TARGET_UP, Tunnel,
    },
    decide::Cloned,
    packet::MAX_SNAPLEN,
    verdict::Direction,
};

use crate::{COUNTERS, TARGETS, tunnel};

/// The announcement of a tap to `deliver`, and the answer, for the copy being made on this CPU.
#[btf_map(pin_by_name)]
pub(crate) static DELIVERY: PerCpuArray<Delivery, 1> = PerCpuArray::new();

/// The code of a clone that has not reached the relay hub: the device is down, or a program in the pod took it.
const ENETDOWN: i64 = 100;

/// Length of an Ethernet header, the minimum of a packet for a device.
const ETHERNET: u32 = 14;
/// Halvings of a range of [`MAX_SNAPLEN`] bytes until one byte is left.
const HALVINGS: u32 = MAX_SNAPLEN.ilog2() + 1;

/// Announces a copy of a session's packet while `clone` makes it. The code returned is that of the clone to the target.
/// `by_exit`: the copy leaves a pod by its relay device.
#[inline(always)]
pub(crate) fn announcing(
    session: &Session,
    direction: Direction,
    by_exit: bool,
    clone: impl FnOnce() -> i64,
) -> Cloned {
    let Session { serial, target, snaplen, key, .. } = *session;
    let announced = Delivery {
        snaplen,
        uncut: 0,
        target: target + 1,
        key,
        session: serial,
        direction: direction as u32,
        hub: if by_exit { HUB_EXPECTED } else { HUB_NONE },
        code: 0,
        len: 0,
        kept: 0,
    };
    // The map always has element 0. Without it `deliver` would not know the length, so no copy is made.
    let Some(delivery) = DELIVERY.get_ptr_mut(0) else {
        return Cloned { code: 0, is_uncut: true, removed: 0 };
    };
    // This tap sees a copy in transit: root in a pod can send one from its relay device to a NIC. A second announcement
    // would replace the first one, and the first tap would read the outcome of the second.
    // SAFETY: the element belongs to this CPU, and is valid for the whole program.
    if unsafe { (*delivery).target } != 0 {
        return Cloned { code: -ENETDOWN, is_uncut: false, removed: 0 };
    }
    // SAFETY: as above.
    unsafe { *delivery = announced };
    let code = clone();
    // SAFETY: as above. The second stage and the hub write it meanwhile; the compiler assumes so at the call.
    let Delivery { uncut, hub, code: passed, .. } = unsafe { *delivery };
    // SAFETY: as above.
    unsafe { (*delivery).target = 0 };
    // The hub drops what it has cloned, so the code of the clone to the relay device is meaningless.
    let code = match (uncut, by_exit, hub) {
        (DROPPED_DOWN, _, _) => -ENETDOWN,
        (_, false, _) => code,
        (_, true, HUB_PASSED) => i64::from(passed),
        (_, true, _) => -ENETDOWN,
    };
    let removed = note_delivered(session.id, direction as u32, code as u32 | uncut);
    Cloned { code, is_uncut: uncut == DROPPED_UNCUT, removed }
}

/// Notes the length of the copy that was announced last on this CPU, if the target accepted it (`failure` is 0).
/// Returns the bytes of the packet that the copy lacks.
///
/// A global function, so that the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn note_delivered(session: u32, direction: u32, failure: u32) -> u32 {
    match DELIVERY.get(0) {
        Some(&Delivery { snaplen, len, kept, .. }) if failure == 0 => {
            note_copy(session, direction, len, wanted(snaplen), kept)
        }
        _ => 0,
    }
}

/// Notes the length of a copy, see [`SessionCounters::note_copy`](mirror_common::abi::SessionCounters::note_copy).
#[inline(always)]
pub(crate) fn note_copy(session: u32, direction: u32, len: u32, wanted: u32, kept: u32) -> u32 {
    // Most copies are whole.
    if len == kept && len <= wanted {
        return 0;
    }
    let Some(counters) = COUNTERS.get_ptr_mut(session) else { return 0 };
    // The verifier must see the mask of the direction: it does not know the compiler's range analysis.
    let direction = core::hint::black_box(direction);
    // SAFETY: the element belongs to this CPU, and nothing interrupts this program on it.
    unsafe { (*counters).note_copy(direction, len, wanted, kept) }
}

/// The bytes of a copy that are requested at most, with this snap length.
#[inline(always)]
pub(crate) const fn wanted(snaplen: u32) -> u32 {
    if snaplen == 0 { u32::MAX } else { snaplen }
}

/// Cuts an announced copy, and encapsulates it if its target is a tunnel. Drops the copy if the kernel cannot do that.
/// All other packets pass.
#[classifier]
fn deliver(ctx: TcContext) -> i32 {
    let Some(delivery) = DELIVERY.get_ptr_mut(0) else { return TC_ACT_UNSPEC };
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the element belongs to this CPU.
    let announced = unsafe { *delivery };
    if announced.target == 0 {
        return TC_ACT_UNSPEC;
    }
    let wanted = wanted(announced.snaplen);
    let Some(target) = TARGETS.get(announced.target - 1) else { return TC_ACT_UNSPEC };
    // The encapsulated packet of a tunnel's copy may leave by the device of another target.
    // SAFETY: the context is valid for the whole program.
    if unsafe { (*skb).ifindex } != target.ifindex {
        return TC_ACT_UNSPEC;
    }
    let (len, _) = wire_len(skb);
    let done = match target.flags & TARGET_TUNNEL {
        0 => cut(skb, wanted, u32::MAX),
        _ => send(skb, wanted, &target.tunnel, &announced),
    };
    match done {
        Done::Passes => {
            let (kept, _) = wire_len(skb);
            // SAFETY: as above.
            unsafe {
                (*delivery).len = len;
                (*delivery).kept = kept;
            }
            TC_ACT_UNSPEC
        }
        // Only a copy made by a tap is dropped here, because only a tap announces anything. The tap learns of the drop
        // from the code of the clone.
        Done::TooLong => TC_ACT_SHOT,
        Done::Refused => {
            // The agent may have written the target since the tap read it. For a target that is down, neither the room
            // nor the address is valid. The kernel copies a value from its beginning on, so the flags are read last.
            let is_up = TARGETS.get(announced.target - 1).is_some_and(|target| target.flags & TARGET_UP != 0);
            // SAFETY: as above.
            unsafe { (*delivery).uncut = if is_up { DROPPED_UNCUT } else { DROPPED_DOWN } };
            TC_ACT_SHOT
        }
    }
}

/// The outcome for a copy.
enum Done {
    /// It is delivered.
    Passes,
    /// It does not fit into the tunnel, and must not be cut.
    TooLong,
    /// The kernel could not cut or encapsulate it.
    Refused,
}

/// Returns the length of a frame as on a wire, with a VLAN tag that is in metadata; and the length of that tag.
#[inline(always)]
fn wire_len(skb: *mut __sk_buff) -> (u32, u32) {
    // SAFETY: the context is valid for the whole program.
    let (len, tagged) = unsafe { ((*skb).len, (*skb).vlan_present != 0) };
    let tag = if tagged { 4 } else { 0 };
    (len + tag, tag)
}

/// Cuts a copy to `wanted` bytes, a VLAN tag included, or to the minimum that the kernel allows: a sender of long
/// headers must not be able to keep its packets from the reader. Refuses a copy that then has more than `most` bytes.
#[inline(always)]
fn cut(skb: *mut __sk_buff, wanted: u32, most: u32) -> Done {
    let (len, tag) = wire_len(skb);
    if len <= wanted {
        return Done::Passes;
    }
    let kept = wanted.saturating_sub(tag).clamp(ETHERNET, MAX_SNAPLEN);
    // Refused for a copy of an encapsulated packet, for a length below the headers, and without memory.
    // SAFETY: no packet pointer is held.
    let is_cut = unsafe { bpf_skb_change_tail(skb, kept, 0) } == 0 || cut_to_least(skb, kept) != 0;
    if is_cut && wire_len(skb).0 <= most { Done::Passes } else { Done::Refused }
}

/// Cuts a copy to the minimum that the kernel allows (more than `refused` bytes). Returns 0 if it is unchanged.
///
/// The kernel refuses a length below the headers, without returning the minimum. So this halves the range between a
/// length that is refused and one that is not. A global function, so that the verifier knows nothing of its numbers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cut_to_least(skb: *mut __sk_buff, refused: u32) -> u32 {
    let (mut refused, mut is_cut) = (refused, 0);
    // SAFETY: the context is valid for the whole program.
    let mut allowed = unsafe { (*skb).len }.min(MAX_SNAPLEN);
    for _ in 0..HALVINGS {
        let length = refused + (allowed.saturating_sub(refused) >> 1);
        // SAFETY: no packet pointer is held.
        if unsafe { bpf_skb_change_tail(skb, length, 0) } == 0 {
            (allowed, is_cut) = (length, 1);
        } else {
            refused = length;
        }
    }
    is_cut
}

/// Makes a copy fit into the tunnel, and encapsulates it.
#[inline(always)]
fn send(skb: *mut __sk_buff, wanted: u32, tunnel: &Tunnel, announced: &Delivery) -> Done {
    let (len, _) = wire_len(skb);
    // SAFETY: the context is valid for the whole program.
    let is_super_frame = unsafe { (*skb).gso_size != 0 };
    let room = match tunnel.oversize {
        OVERSIZE_FRAGMENT => u32::MAX,
        OVERSIZE_SEGMENT if is_super_frame && len <= wanted => u32::MAX,
        _ => tunnel::room(skb, tunnel, len.min(wanted)),
    };
    if tunnel.oversize == OVERSIZE_DROP && len.min(wanted) > room {
        return Done::TooLong;
    }
    match cut(skb, wanted.min(room), room) {
        Done::Passes if tunnel::address(skb, tunnel, announced) => Done::Passes,
        _ => Done::Refused,
    }
}
