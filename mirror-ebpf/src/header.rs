//! The beginning of a packet, as on the wire.

use aya_ebpf::{bindings::__sk_buff, btf_maps::PerCpuArray, helpers::bpf_skb_load_bytes, macros::btf_map};
use mirror_common::packet::{HEADER_BYTES, Header, LEN_OFFSET};

/// Bytes of the two MAC addresses, and of a VLAN tag behind them.
const MACS: u32 = 12;
const TAG: u32 = 4;

/// A buffer for each CPU, because before Linux 5.12 a program cannot read the stack at a variable offset. The header is
/// the first half; the second half is never used, see `load`. The type is in words, so that the program can clear it
/// word by word. All programs share it: its contents are used within one function only.
#[btf_map(pin_by_name)]
static HEADER: PerCpuArray<[[u64; HEADER_BYTES / 8]; 2], 1> = PerCpuArray::new();

/// Returns the beginning of the packet. A VLAN tag in the metadata is put back into its place.
#[inline(always)]
pub(crate) fn read(skb: *mut __sk_buff) -> Option<&'static Header> {
    let words: *mut u64 = HEADER.get_ptr_mut(0)?.cast();
    let header: *mut Header = words.cast();
    let start: *mut u8 = header.cast();
    // SAFETY: the context is valid for the whole program.
    let (len, tagged, protocol, tag) =
        unsafe { ((*skb).len, (*skb).vlan_present != 0, (*skb).vlan_proto, (*skb).vlan_tci) };
    // SAFETY: the element belongs to this CPU and is as long as a header; the verifier checks every access.
    unsafe {
        // Volatile, or the compiler would call a byte loop instead, which costs half of what a filter costs.
        for index in 0..HEADER_BYTES / 8 {
            words.add(index).write_volatile(0);
        }
        if !tagged {
            load(skb, 0, start, len, LEN_OFFSET as u32)?;
            return Some(with_len(header, len));
        }
        load(skb, 0, start, len, MACS)?;
        let [high, low] = (tag as u16).to_be_bytes();
        // `vlan_proto` is in network byte order.
        let [first, second] = (protocol as u16).to_ne_bytes();
        for (offset, byte) in [first, second, high, low].into_iter().enumerate() {
            *start.add(MACS as usize + offset) = byte;
        }
        let behind = start.add((MACS + TAG) as usize);
        load(skb, MACS, behind, len.saturating_sub(MACS), LEN_OFFSET as u32 - MACS - TAG)?;
        Some(with_len(header, len + TAG))
    }
}

/// # Safety
///
/// `header` is valid, and no other code uses it at the same time.
#[inline(always)]
unsafe fn with_len(header: *mut Header, len: u32) -> &'static Header {
    // SAFETY: by the contract of this function; the last four bytes contain the length.
    unsafe {
        header.cast::<u8>().add(LEN_OFFSET).cast::<[u8; 4]>().write(len.to_be_bytes());
        &*header
    }
}

/// Loads the `available` bytes at `offset`, but not more than `most`.
///
/// # Safety
///
/// [`HEADER_BYTES`] bytes can be written at `to`, and `most` is not more than that.
#[inline(always)]
unsafe fn load(skb: *mut __sk_buff, offset: u32, to: *mut u8, available: u32, most: u32) -> Option<()> {
    let bytes = if available < most { available } else { most };
    if bytes == 0 {
        return Some(());
    }
    // The same number again, in a form from which every verifier sees that it is 1 to `HEADER_BYTES`: the compiler's
    // comparison bounds another register (and only Linux 6.10 and newer track that they are equal).
    let bytes = (core::hint::black_box(bytes - 1) & (HEADER_BYTES as u32 - 1)) + 1;
    // SAFETY: by the contract of this function.
    let code = unsafe { bpf_skb_load_bytes(skb.cast(), offset, to.cast(), bytes) };
    (code == 0).then_some(())
}
