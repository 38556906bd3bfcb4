//! The reachable instructions of a program, and what is known about the packet at each of them.

use super::super::classic::{Operation, Register};

/// The form of the program: how it reads the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Packet {
    /// Through pointers, as far as the packet is linear.
    Direct,
    /// With a helper.
    Helper,
    /// With a helper, while the VLAN tag is in metadata.
    Tagged,
}

/// The facts at an instruction, for every path that leads to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// The number of bytes of the packet that are linear.
    pub(super) linear: u32,
    /// The index register is small enough to be added to a pointer.
    pub(super) index_is_small: bool,
    /// A pointer to the offset in the index register exists, and this number of bytes after it is linear.
    pub(super) behind_index: Option<u32>,
}

/// Maximum offset of packet pointers, and of eBPF's loads.
pub(super) const MAX_DIRECT: u32 = 0x7000;
/// Maximum value of the index register as a part of an offset, so that the sum stays below 64 KiB.
pub(super) const MAX_INDEX: u32 = 0x7fff;
/// Every packet of IPv4 has at least this number of bytes, so the first check covers all of them.
const USUAL: u32 = 34;

/// Whether the operation reads the packet.
pub(super) fn is_load(operation: Operation) -> bool {
    matches!(operation, Operation::Load { .. } | Operation::LoadHeaderLength(_))
}

/// The end of a load, in bytes; counted from the index register if the load uses it.
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

/// The number of bytes that a check before a load at a fixed offset covers.
pub(super) fn to_check(end: u32) -> u32 {
    end.max(USUAL)
}

/// The facts at each instruction that is reachable from the `entries`. `None`: it is unreachable.
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
