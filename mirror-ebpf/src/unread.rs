//! The state of mirror interfaces without a reader.
//!
//! The agent looks for readers, and this file only compares a time: until then, nothing is copied. While there is no
//! reader, the agent keeps the time a few ms in the future. So copies start again by themselves if an agent is late or
//! has ended. Called by the tap programs for targets with `TARGET_WHEN_READ`.

use aya_ebpf::{btf_maps::Array, helpers::bpf_ktime_get_ns, macros::btf_map};
use mirror_common::abi::TARGET_PLACES;

/// For each target, the time until which it has no reader, in ns of the monotonic clock; 0: it may have one. The agent
/// writes it.
#[btf_map(pin_by_name)]
static UNREAD: Array<u64, { TARGET_PLACES as usize }> = Array::new();

/// Whether a target has no reader now.
#[inline(always)]
pub(crate) fn is_unread(target: u32) -> bool {
    // SAFETY: the helper takes nothing, and only reads the clock.
    UNREAD.get(target).is_some_and(|until| *until != 0 && unsafe { bpf_ktime_get_ns() } < *until)
}
