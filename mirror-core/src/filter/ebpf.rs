//! Translates classic BPF to an eBPF program (`BPF_PROG_TYPE_SCHED_CLS`) that returns whether a packet matches.
//!
//! The kernel's own translation cannot be used: a failed load ends its program with 0, and 0 is `TC_ACT_OK`. Here a
//! failed load jumps to the same end as any other mismatch. The program returns `FILTER_MATCHES` or `FILTER_DIFFERS`,
//! and neither is a verdict of tc.
//!
//! The program is written up to three times, because a packet is read in three ways:
//!
//! ```text
//! VLAN tag     ┌─► tagged: bpf_skb_load_bytes for each load, as if the tag were in the packet
//! in metadata? ┤
//!              └─► direct: reads the linear part of the packet through pointers. Before a load beyond it,
//!                  it continues at the same instruction of ─┐
//!                  helper: bpf_skb_load_bytes for each load ◄┘
//! ```
//!
//! All three keep the accumulator, the index register and the memory at the same places, so the direct form can switch
//! to the helper form at any load. Only reachable instructions of each form are written, because the verifier rejects
//! others.
//!
//! There is one difference from Linux's own classic BPF: a shift by more than 31 bits gives 0, as in libpcap.
//!
//! This module does not call the kernel: the dataplane loads the programs. They run on Linux 5.10 and newer.

mod assemble;
mod insn;
mod loads;
#[cfg(test)]
mod tests;
mod ways;

use zerocopy::IntoBytes as _;

use self::{
    assemble::{Assembler, Label},
    ways::{Packet, reached},
};
use super::classic::{Condition, Operand, Operation, Operator, Program, Register};
use crate::fnv::fnv1a;

pub use self::insn::Insn;

/// Translates a program. `None`: one of its forms is too long for the jumps of eBPF (32 767 instructions).
pub fn translate(program: &Program) -> Option<Vec<Insn>> {
    translate_with(program, true)
}

/// As [`translate`]. Tests leave out the direct form.
pub fn translate_with(program: &Program, has_direct: bool) -> Option<Vec<Insn>> {
    let operations: Vec<Operation> =
        program.instructions().iter().filter_map(|instruction| instruction.decode()).collect();
    let mut assembler = Assembler::default();
    assembler.start();
    let is_read = operations.iter().any(|operation| ways::is_load(*operation));
    let sees_frame = is_read || operations.iter().any(|operation| matches!(operation, Operation::Length(_)));
    let mut from_start = vec![false; operations.len()];
    if let Some(first) = from_start.first_mut() {
        *first = true;
    }
    if sees_frame {
        assembler.if_untagged(Label::Untagged);
        assembler.make_header();
        form(&mut assembler, &operations, Packet::Tagged, &from_start);
        assembler.place(Label::Untagged);
    }
    let mut entries = from_start;
    if has_direct {
        if is_read {
            assembler.load_pointers();
        }
        entries = form(&mut assembler, &operations, Packet::Direct, &entries);
    }
    form(&mut assembler, &operations, Packet::Helper, &entries);
    assembler.finish()
}

/// Writes one form of the program, as far as it can be reached from the `entries`. Returns the instructions from which
/// it can switch to the helper form.
fn form(assembler: &mut Assembler, operations: &[Operation], packet: Packet, entries: &[bool]) -> Vec<bool> {
    let reached = reached(operations, packet, entries);
    let mut writer = Writer { assembler, packet };
    let mut left = Vec::new();
    for (at, (operation, known)) in operations.iter().zip(&reached).enumerate() {
        left.push(known.is_some_and(|known| {
            writer.assembler.place(Label::Operation(packet, at));
            writer.operation(at, *operation, &known)
        }));
    }
    assembler.end(packet);
    left
}

/// Writes the program in one of its three forms.
struct Writer<'a> {
    assembler: &'a mut Assembler,
    packet: Packet,
}

impl Writer<'_> {
    /// Writes an operation. Returns whether it can switch to the helper form.
    fn operation(&mut self, at: usize, operation: Operation, known: &ways::Known) -> bool {
        let next = |skip: usize| Label::Operation(self.packet, at + 1 + skip);
        match operation {
            Operation::Load { .. } | Operation::LoadHeaderLength(_) => {
                return self.load(at, operation, known);
            }
            Operation::Set(register, value) => self.assembler.set(register, value),
            Operation::Length(register) => self.assembler.length(register, self.packet == Packet::Tagged),
            Operation::Read(register, place) => self.assembler.read(register, place),
            Operation::Write(register, place) => self.assembler.write(register, place),
            Operation::Compute(operator, operand) => self.compute(operator, operand),
            Operation::Negate => self.assembler.negate(),
            Operation::ToIndex => self.assembler.copy(Register::Index, Register::Accumulator),
            Operation::ToAccumulator => self.assembler.copy(Register::Accumulator, Register::Index),
            Operation::Jump(skip) => self.assembler.jump(next(skip as usize)),
            Operation::Branch(condition, operand, jt, jf) => {
                let (on_true, on_false) = (next(jt.into()), next(jf.into()));
                // The fall-through costs no instruction.
                match (condition, jt) {
                    (Condition::AnyBit, _) | (_, 1..) => {
                        self.assembler.branch(condition, false, operand, on_true);
                        self.assembler.jump(on_false);
                    }
                    (_, 0) => {
                        self.assembler.branch(condition, true, operand, on_false);
                        self.assembler.jump(on_true);
                    }
                }
            }
            Operation::Return(value) => self.assembler.jump(Label::answer(value != 0, self.packet)),
            Operation::ReturnAccumulator => {
                let nothing = Operand::Constant(0);
                self.assembler.branch(Condition::Equal, true, nothing, Label::answer(true, self.packet));
                self.assembler.jump(Label::answer(false, self.packet));
            }
        }
        false
    }

    fn compute(&mut self, operator: Operator, operand: Operand) {
        let divides = matches!(operator, Operator::Divide | Operator::Remainder);
        let shifts = matches!(operator, Operator::ShiftLeft | Operator::ShiftRight);
        match operand {
            Operand::Index if divides => {
                self.assembler.if_index_is_zero(Label::answer(false, self.packet));
                self.assembler.compute(operator, operand);
            }
            Operand::Index if shifts => self.assembler.shift(operator),
            _ => self.assembler.compute(operator, operand),
        }
    }
}

/// Number of low bits of a [`hash`] that hold the number of instructions. The kernel accepts at most a million.
const LENGTH_BITS: u32 = 20;

/// Hashes instructions (FNV-1a), with their number in the lower 20 bits. Two programs of the same text have the same
/// hash if they have the same instructions.
pub fn hash(insns: &[Insn]) -> u64 {
    fnv1a(insns.as_bytes()) << LENGTH_BITS | insns.len() as u64 & ((1 << LENGTH_BITS) - 1)
}

/// The number of instructions of a program with this [`hash`].
pub const fn length(hash: u64) -> usize {
    (hash & ((1 << LENGTH_BITS) - 1)) as usize
}
