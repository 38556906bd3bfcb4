//! Instructions of eBPF.

use zerocopy::{Immutable, IntoBytes};

use super::super::classic::Operator;

/// An instruction of eBPF: `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct Insn {
    /// The operation code.
    pub code: u8,
    /// The destination and source registers, four bits each, in the order of the machine's bit fields.
    pub registers: u8,
    /// A memory offset, or the number of instructions to skip.
    pub offset: i16,
    /// A constant.
    pub immediate: i32,
}

impl Insn {
    /// Builds an instruction from its fields.
    pub const fn new(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Self {
        let registers = if cfg!(target_endian = "little") {
            destination | source << 4
        } else {
            destination << 4 | source
        };
        Self { code, registers, offset, immediate }
    }

    /// The end of a program. `r0` is the return value.
    pub const EXIT: Self = Self::new(JMP | 0x90, 0, 0, 0, 0);
}

// Instruction classes, and bits of the operation codes.
pub(super) const LDX: u8 = 0x01;
pub(super) const ST: u8 = 0x02;
pub(super) const STX: u8 = 0x03;
pub(super) const ALU: u8 = 0x04;
pub(super) const JMP: u8 = 0x05;
pub(super) const JMP32: u8 = 0x06;
pub(super) const ALU64: u8 = 0x07;
pub(super) const SOURCE: u8 = 0x08;
pub(super) const MEM: u8 = 0x60;
pub(super) const DOUBLE: u8 = 0x18;
pub(super) const ADD: u8 = 0x00;
pub(super) const SUB: u8 = 0x10;
pub(super) const OR: u8 = 0x40;
pub(super) const AND: u8 = 0x50;
pub(super) const LSH: u8 = 0x60;
pub(super) const RSH: u8 = 0x70;
pub(super) const NEG: u8 = 0x80;
pub(super) const MOV: u8 = 0xb0;
/// Converts to network byte order.
pub(super) const TO_BIG_ENDIAN: u8 = ALU | 0xd0 | SOURCE;
pub(super) const JA: u8 = 0x00;
pub(super) const JEQ: u8 = 0x10;
pub(super) const JGT: u8 = 0x20;
pub(super) const JGE: u8 = 0x30;
pub(super) const JSET: u8 = 0x40;
pub(super) const JNE: u8 = 0x50;
pub(super) const JLT: u8 = 0xa0;
pub(super) const JLE: u8 = 0xb0;
pub(super) const CALL: u8 = 0x80;

/// The size bits of a load or a store.
pub(super) fn size_code(size: u8) -> u8 {
    match size {
        1 => 0x10,
        2 => 0x08,
        _ => 0x00,
    }
}

/// The operation bits of an arithmetic instruction.
pub(super) fn operator_code(operator: Operator) -> u8 {
    match operator {
        Operator::Add => ADD,
        Operator::Subtract => SUB,
        Operator::Multiply => 0x20,
        Operator::Divide => 0x30,
        Operator::Or => OR,
        Operator::And => AND,
        Operator::ShiftLeft => LSH,
        Operator::ShiftRight => RSH,
        Operator::Remainder => 0x90,
        Operator::Xor => 0xa0,
    }
}
