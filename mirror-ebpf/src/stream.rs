//! Writes the records of streams: a packet into the ring of a session's target.
//!
//! The format and the rules are in `mirror_common::stream`; this file has the maps and the helpers.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP, BPF_RB_RING_SIZE},
    btf_maps::{Array, ArrayOfMaps, RingBuf},
    helpers::{
        bpf_ktime_get_ns, bpf_ringbuf_discard, bpf_ringbuf_query, bpf_ringbuf_reserve, bpf_ringbuf_submit,
        bpf_skb_load_bytes,
    },
    macros::btf_map,
};
use core::{arch::asm, ffi::c_void, hint::black_box, ptr};
use mirror_common::{
    abi::{MAX_SESSIONS, Session, TARGET_PLACES},
    stream::{self, HEAD, MAX_CAPTURE, RecordHead, SIZES},
    verdict::{Direction, Verdict},
};

use crate::deliver;

/// Size in bytes of the ring in the type of `STREAMS`. The agent chooses the size of each ring.
const EXAMPLE: usize = 1 << 16;

/// The ring of each target that is a stream, by the target's index.
#[btf_map(pin_by_name)]
static STREAMS: ArrayOfMaps<RingBuf<u8, EXAMPLE>, { TARGET_PLACES as usize }> = ArrayOfMaps::new();

/// Bytes that each session has taken of its ring since it was first used.
#[btf_map(pin_by_name)]
static TAKEN: Array<u64, { MAX_SESSIONS as usize }> = Array::new();

/// Bytes of these that the reader has returned. Written by the reading program, and for a new session by the agent.
#[btf_map(pin_by_name)]
static RETURNED: Array<u64, { MAX_SESSIONS as usize }> = Array::new();

/// Bit of the last argument of [`put_record`] with the direction; the snap length is below it.
const DIRECTION_SHIFT: u32 = 31;

/// Return values of [`put_record`], if it has written no record. Otherwise it returns the bytes that the record lacks.
const LOST: u32 = u32::MAX;
const DOWN: u32 = u32::MAX - 1;
const FAILED: u32 = u32::MAX - 2;

/// Writes a record of the packet for a session. Returns the bytes of the packet that the record lacks.
#[inline(always)]
pub(crate) fn record(skb: *mut __sk_buff, session: &Session, direction: Direction) -> Result<u32, Verdict> {
    // The black box keeps the compiler from a branch after which the verifier would know the direction.
    let direction = black_box(direction as u32);
    let form = session.snaplen & !(1 << DIRECTION_SHIFT) | direction << DIRECTION_SHIFT;
    match put_record(skb, session.target, session.id, session.serial, form) {
        LOST => Err(Verdict::Lost),
        DOWN => Err(Verdict::TargetDown),
        FAILED => Err(Verdict::Failed),
        removed => Ok(removed),
    }
}

/// Writes a record: `form` is the snap length and the direction.
///
/// A global function, so that the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn put_record(skb: *mut __sk_buff, ring: u32, session: u32, serial: u32, form: u32) -> u32 {
    let Some(ring) = STREAMS.get(ring) else { return DOWN };
    let ring: *mut c_void = ptr::from_ref(ring).cast_mut().cast();
    let (Some(taken), Some(returned)) = (TAKEN.get_ptr_mut(session), RETURNED.get(session)) else {
        return FAILED;
    };
    // SAFETY: the context is valid for the whole program.
    let (len, tagged, protocol, vlan_tci, gso_size) = unsafe {
        (
            (*skb).len,
            (*skb).vlan_present != 0,
            (*skb).vlan_proto,
            (*skb).vlan_tci as u16,
            (*skb).gso_size as u16,
        )
    };
    let snaplen = form & !(1 << DIRECTION_SHIFT);
    // A VLAN tag in metadata counts towards the snap length.
    let wanted = deliver::wanted(snaplen).saturating_sub(if tagged { 4 } else { 0 });
    let captured = len.min(wanted).min(MAX_CAPTURE);
    let head = RecordHead {
        // SAFETY: the helper has no preconditions.
        time_ns: unsafe { bpf_ktime_get_ns() },
        serial,
        session,
        len,
        captured,
        gso_size,
        direction: (form >> DIRECTION_SHIFT) as u16,
        // `vlan_proto` is in network byte order.
        vlan_protocol: if tagged { u16::from_be(protocol as u16) } else { 0 },
        vlan_tci: if tagged { vlan_tci } else { 0 },
    };
    // SAFETY: the map is a ring buffer.
    let (filled, size) = unsafe {
        (bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA.into()), bpf_ringbuf_query(ring, BPF_RB_RING_SIZE.into()))
    };
    let room = stream::room(captured);
    // SAFETY: an element of an array is valid for the whole program.
    let in_use = stream::in_use(unsafe { taken.read_volatile() }, *returned);
    if !stream::admits(in_use, room, filled, size) {
        return LOST;
    }
    let wake = if stream::wakes(room, filled, size) { BPF_RB_FORCE_WAKEUP } else { BPF_RB_NO_WAKEUP };
    let record = Record { skb, ring, head, wake: wake.into() };
    let failure = record.put();
    if failure != 0 {
        return failure;
    }
    add(taken, room);
    deliver::note_copy(session, form >> DIRECTION_SHIFT, len, wanted, captured)
}

/// Adds to a number that other CPUs also add to.
#[inline(always)]
fn add(number: *mut u64, more: u64) {
    // SAFETY: the number is an element of an array, which is valid for the whole program. `core` has no atomic addition
    // for a target without compare-and-swap; the kernel has always had this instruction.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) number, in(reg) more) };
}

struct Record {
    skb: *mut __sk_buff,
    ring: *mut c_void,
    head: RecordHead,
    wake: u64,
}

impl Record {
    /// Writes the record in the first of [`SIZES`] that fits. Returns 0, or why it was not written.
    #[inline(always)]
    fn put(&self) -> u32 {
        macro_rules! first_that_fits {
            ($($index:literal)*) => {
                $(if self.head.captured as usize <= SIZES[$index] - HEAD {
                    return self.write::<{ SIZES[$index] }>();
                })*
            };
        }
        first_that_fits!(0 1 2 3 4 5 6 7 8 9 10 11 12 13);
        FAILED
    }

    /// Writes it as a record of `SIZE` bytes.
    #[inline(always)]
    fn write<const SIZE: usize>(&self) -> u32 {
        // SAFETY: the map is a ring buffer.
        let record = unsafe { bpf_ringbuf_reserve(self.ring, SIZE as u64, 0) };
        if record.is_null() {
            return LOST;
        }
        // Here, after the helper, and minus one: a form from which every verifier sees that it is 1 to the available
        // room (before Linux 5.11 it forgets the bounds of a number on the stack).
        let last = black_box(u64::from(self.head.captured).wrapping_sub(1));
        // SAFETY: the reserved record is `SIZE` bytes long, and the verifier checks every access.
        let loaded = unsafe {
            record.cast::<RecordHead>().write(self.head);
            if last < (SIZE - HEAD) as u64 {
                bpf_skb_load_bytes(self.skb.cast(), 0, record.byte_add(HEAD), (last + 1) as u32)
            } else {
                -1
            }
        };
        // SAFETY: the record was reserved, and is submitted or discarded once.
        unsafe {
            if loaded == 0 {
                bpf_ringbuf_submit(record, self.wake);
                0
            } else {
                bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP.into());
                FAILED
            }
        }
    }
}
