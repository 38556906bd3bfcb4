//! Which instructions a program reaches, and what it knows of the packet there.

use super::super::classic::{Operation, Register};

/// How a form of the program reads the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Packet {
    /// Through pointers, as far as it is linear.
    Direct,
    /// With a helper.
    Helper,
    /// With a helper, and the VLAN tag is in metadata.
    Tagged,
}

/// What is known at an instruction, whichever way led there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// So many bytes of the packet are linear.
    pub(super) linear: u32,
    /// The index register is small enough to be added to a pointer.
    pub(super) index_is_small: bool,
    /// There is a pointer to the place in the index register, and so many bytes behind it are linear.
    pub(super) behind_index: Option<u32>,
}

/// Pointers to packets reach so far, and so do the offsets of eBPF's loads.
pub(super) const MAX_DIRECT: u32 = 0x7000;
/// The largest part of an offset in the index register, so that the sum stays below 64 KiB.
pub(super) const MAX_INDEX: u32 = 0x7fff;
/// Every packet of IPv4 has so many bytes, so the first check asks for all of them.
const USUAL: u32 = 34;

/// Whether the operation reads the packet.
pub(super) fn is_load(operation: Operation) -> bool {
    matches!(operation, Operation::Load { .. } | Operation::LoadHeaderLength(_))
}

/// Where a load ends, in bytes behind the index register if it counts.
fn end(operation: Operation) -> Option<u32> {
    match operation {
        Operation::Load { size, offset, .. } => offset.checked_add(size.into()),
        Operation::LoadHeaderLength(offset) => offset.checked_add(1),
        _ => None,
    }
}

/// Whether a load can succeed in this form of the program.
pub(super) fn is_possible(operation: Operation, packet: Packet) -> bool {
    let most = if packet == Packet::Direct { MAX_DIRECT } else { i32::MAX as u32 };
    end(operation).is_some_and(|end| end <= most)
}

/// How many bytes a check before a load at a fixed place asks for.
pub(super) fn to_check(end: u32) -> u32 {
    end.max(USUAL)
}

/// What is known at each instruction that is reached from the `entries`; `None`: it is not reached.
pub(super) fn reached(operations: &[Operation], packet: Packet, entries: &[bool]) -> Vec<Option<Known>> {
    const NOTHING: Known = Known { linear: 0, index_is_small: false, behind_index: None };
    let mut known: Vec<Option<Known>> = entries.iter().map(|is_entry| is_entry.then_some(NOTHING)).collect();
    for (at, operation) in operations.iter().enumerate() {
        let Some(mut after) = known.get(at).copied().flatten() else { continue };
        let skips: &[usize] = match *operation {
            Operation::Return(_) | Operation::ReturnAccumulator => continue,
            _ if is_load(*operation) && !is_possible(*operation, packet) => continue,
            Operation::Jump(skip) => &[skip as usize],
            Operation::Branch(_, _, jt, jf) => &[jt.into(), jf.into()],
            _ => &[0],
        };
        match *operation {
            Operation::Load { indexed: true, .. } => {
                after.index_is_small = true;
                after.behind_index = after.behind_index.max(end(*operation));
            }
            Operation::Load { .. } | Operation::LoadHeaderLength(_) => {
                let end = end(*operation).unwrap_or_default();
                if end > after.linear {
                    after.linear = to_check(end);
                }
            }
            _ => {}
        }
        if changes_index(*operation) {
            after.index_is_small = matches!(operation, Operation::LoadHeaderLength(_));
            after.behind_index = None;
        }
        for skip in skips {
            if let Some(place) = known.get_mut(at + 1 + skip) {
                *place = Some(match *place {
                    None => after,
                    Some(other) => Known {
                        linear: other.linear.min(after.linear),
                        index_is_small: other.index_is_small && after.index_is_small,
                        // `None` is less than any number.
                        behind_index: other.behind_index.min(after.behind_index),
                    },
                });
            }
        }
    }
    known
}

fn changes_index(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::ToIndex
            | Operation::LoadHeaderLength(_)
            | Operation::Set(Register::Index, _)
            | Operation::Length(Register::Index)
            | Operation::Read(Register::Index, _)
    )
}
