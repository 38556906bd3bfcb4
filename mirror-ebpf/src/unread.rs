//! Mirror interfaces that nobody reads.
//!
//! The agent looks for readers, and this file knows only a time: until then, nothing is copied. The agent sets it a few ms
//! ahead, again and again. So copies are made again by themselves if an agent is late or has ended. The tap programs call
//! it for targets with `TARGET_WHEN_READ`.

use aya_ebpf::{btf_maps::Array, helpers::bpf_ktime_get_ns, macros::btf_map};
use mirror_common::abi::TARGET_PLACES;

/// For each target, the time until which nobody reads it: ns of the monotonic clock; 0: somebody may. The agent writes
/// it.
#[btf_map(pin_by_name)]
static UNREAD: Array<u64, { TARGET_PLACES as usize }> = Array::new();

/// Whether nobody reads a target now.
#[inline(always)]
pub(crate) fn is_unread(target: u32) -> bool {
    // SAFETY: the helper takes nothing, and only reads the clock.
    UNREAD.get(target).is_some_and(|until| *until != 0 && unsafe { bpf_ktime_get_ns() } < *until)
}
