//! The identities of the packets that were copied last, on any CPU.
//!
//! The rules are in `mirror_common::identity`; this file has the maps and the helpers.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::__sk_buff,
    btf_maps::Array,
    helpers::{bpf_jiffies64, bpf_skb_load_bytes},
    macros::btf_map,
};
use mirror_common::{
    identity::{self, Bytes, SLOTS},
    verdict::Hook,
};

use crate::netns;

/// The last copies, by identity. Taps write only changes, so in a steady flow the CPUs share the cache line.
#[btf_map(pin_by_name)]
static COPIES: Array<u64, { SLOTS as usize }> = Array::new();

/// Bytes of an Ethernet header. Devices without one are not tapped.
const ETHERNET: u32 = 14;

/// Operations of [`look`].
const COMPARE: u32 = 0;
const NOTE: u32 = 2;

/// Whether a copy made at another hook stands for the packet.
#[inline(always)]
pub(crate) fn is_still_copied(skb: *mut __sk_buff, hook: Hook) -> bool {
    look(skb, COMPARE | hook as u32) != 0
}

/// Notes that the packet was copied at this hook.
#[inline(always)]
pub(crate) fn note(skb: *mut __sk_buff, hook: Hook) {
    look(skb, NOTE | hook as u32);
}

/// Compares the packet with the last copy of its identity, or notes it. `how`: [`COMPARE`] or [`NOTE`], and the hook.
///
/// A global function, so that the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn look(skb: *mut __sk_buff, how: u32) -> u32 {
    // SAFETY: the context is valid for the whole program.
    let (ifindex, protocol) = unsafe { ((*skb).ifindex, (*skb).protocol as u16) };
    // A packet whose identity cannot be read is never noted, so it is never a duplicate.
    let Some(identity) = identity::identity(&mut Skb(skb), u16::from_be(protocol)) else {
        return 0;
    };
    let Some(noted) = COPIES.get_ptr_mut(identity::slot(identity)) else { return 0 };
    let place = identity::place(netns(), ifindex, how & 1 != 0);
    // SAFETY: the helper has no preconditions.
    let unit = identity::unit(unsafe { bpf_jiffies64() });
    // SAFETY: an element of an array stays valid, and the kernel accesses an aligned word atomically.
    let last = unsafe { noted.read_volatile() };
    if how & NOTE == 0 {
        return u32::from(identity::stands_for(last, identity, place, unit));
    }
    let this = identity::note(identity, place, unit);
    if last != this {
        // SAFETY: as above.
        unsafe { noted.write_volatile(this) };
    }
    0
}

/// The bytes of a packet.
struct Skb(*mut __sk_buff);

impl Bytes for Skb {
    #[inline(always)]
    fn network<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]> {
        self.words(ETHERNET + offset)
    }

    #[inline(always)]
    fn macs(&mut self) -> Option<[u32; 3]> {
        self.words(0)
    }
}

impl Skb {
    #[inline(always)]
    fn words<const N: usize>(&self, offset: u32) -> Option<[u32; N]> {
        direct(self.0, offset).or_else(|| {
            let mut words = MaybeUninit::<[u32; N]>::uninit();
            let (to, len) = (words.as_mut_ptr().cast(), 4 * N as u32);
            // SAFETY: the context is valid for the whole program, and the buffer has this length. It is filled if the
            // helper returns success.
            unsafe { (bpf_skb_load_bytes(self.0.cast(), offset, to, len) == 0).then(|| words.assume_init()) }
        })
    }
}

/// Returns the value at this offset, if it is in the linear part of the packet. A helper takes twice as long.
#[inline(always)]
fn direct<T: Copy>(skb: *mut __sk_buff, offset: u32) -> Option<T> {
    // SAFETY: the context is valid for the whole program.
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let start = data + offset as usize;
    // SAFETY: the verifier checks the bounds, and the alignment for a CPU that needs one.
    (start + size_of::<T>() <= end).then(|| unsafe { (start as *const T).read() })
}
