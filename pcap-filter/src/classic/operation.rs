//! The instructions of classic BPF and their meaning.

use super::Operator;

/// An instruction: `struct sock_filter` of Linux, `struct bpf_insn` of libpcap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Instruction {
    /// The operation code.
    pub code: u16,
    /// Number of instructions to skip if a test passes.
    pub jt: u8,
    /// Number of instructions to skip if it does not pass.
    pub jf: u8,
    /// A constant, an offset or a memory index.
    pub k: u32,
}

/// The decoded form of an instruction. A load beyond the frame or a division by zero ends the program: the frame does
/// not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Loads `size` bytes (1, 2 or 4) of the frame into the accumulator, in network order: at `offset`, or at the index
    /// register plus `offset`.
    Load {
        /// Number of bytes.
        size: u8,
        /// Whether the index register is added.
        indexed: bool,
        /// Offset in the frame.
        offset: u32,
    },
    /// Loads the length of the IPv4 header at this offset into the index register: four times the lower half of a byte.
    LoadHeaderLength(u32),
    /// Sets a register to a constant.
    Set(Register, u32),
    /// Sets a register to the length of the frame.
    Length(Register),
    /// Sets a register to a word of memory.
    Read(Register, u32),
    /// Writes a register to a word of memory.
    Write(Register, u32),
    /// Sets the accumulator to the result.
    Compute(Operator, Operand),
    /// Changes the sign of the accumulator.
    Negate,
    /// Copies the accumulator to the index register.
    ToIndex,
    /// Copies the index register to the accumulator.
    ToAccumulator,
    /// Skips this number of instructions.
    Jump(u32),
    /// Compares the accumulator; skips `jt` instructions if the condition holds, else `jf`.
    Branch(Condition, Operand, u8, u8),
    /// Ends the program; 0: the frame does not match.
    Return(u32),
    /// Ends the program with the accumulator.
    ReturnAccumulator,
}

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// A.
    Accumulator,
    /// X.
    Index,
}

/// The right side of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// A constant.
    Constant(u32),
    /// The index register.
    Index,
}

/// The condition of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// The accumulator is equal to the operand.
    Equal,
    /// The accumulator is greater.
    Greater,
    /// The accumulator is greater or equal.
    GreaterOrEqual,
    /// Some bit is set in both.
    AnyBit,
}

// Instruction classes.
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MISC: u16 = 0x07;
// Load sizes.
const WORD: u16 = 0x00;
const HALF: u16 = 0x08;
const BYTE: u16 = 0x10;
// Load modes.
const IMM: u16 = 0x00;
const ABS: u16 = 0x20;
const IND: u16 = 0x40;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const MSH: u16 = 0xa0;
/// The operand is the index register.
const X: u16 = 0x08;
const NEG: u16 = 0x80;
const JA: u16 = 0x00;
/// Returns the accumulator.
const RET_A: u16 = 0x10;
const TAX: u16 = 0x00;
const TXA: u16 = 0x80;

const OPERATORS: [(Operator, u16); 10] = [
    (Operator::Add, 0x00),
    (Operator::Subtract, 0x10),
    (Operator::Multiply, 0x20),
    (Operator::Divide, 0x30),
    (Operator::Or, 0x40),
    (Operator::And, 0x50),
    (Operator::ShiftLeft, 0x60),
    (Operator::ShiftRight, 0x70),
    (Operator::Remainder, 0x90),
    (Operator::Xor, 0xa0),
];
const CONDITIONS: [(Condition, u16); 4] = [
    (Condition::Equal, 0x10),
    (Condition::Greater, 0x20),
    (Condition::GreaterOrEqual, 0x30),
    (Condition::AnyBit, 0x40),
];

impl Operation {
    /// Encodes the operation.
    pub fn encode(self) -> Instruction {
        let load = |register| if register == Register::Accumulator { LD } else { LDX };
        let code_of =
            |operator| OPERATORS.iter().find(|(known, _)| *known == operator).map_or(0, |(_, code)| *code);
        let condition_code =
            |condition| CONDITIONS.iter().find(|(known, _)| *known == condition).map_or(0, |(_, code)| *code);
        let (code, k) = match self {
            Self::Load { size, indexed, offset } => {
                let size = match size {
                    1 => BYTE,
                    2 => HALF,
                    _ => WORD,
                };
                (LD | size | if indexed { IND } else { ABS }, offset)
            }
            Self::LoadHeaderLength(offset) => (LDX | MSH | BYTE, offset),
            Self::Set(register, value) => (load(register) | IMM, value),
            Self::Length(register) => (load(register) | LEN, 0),
            Self::Read(register, place) => (load(register) | MEM, place),
            Self::Write(Register::Accumulator, place) => (ST, place),
            Self::Write(Register::Index, place) => (STX, place),
            Self::Compute(operator, Operand::Constant(value)) => (ALU | code_of(operator), value),
            Self::Compute(operator, Operand::Index) => (ALU | code_of(operator) | X, 0),
            Self::Negate => (ALU | NEG, 0),
            Self::ToIndex => (MISC | TAX, 0),
            Self::ToAccumulator => (MISC | TXA, 0),
            Self::Jump(skip) => (JMP | JA, skip),
            Self::Branch(condition, operand, jt, jf) => {
                let (source, k) = match operand {
                    Operand::Constant(value) => (0, value),
                    Operand::Index => (X, 0),
                };
                return Instruction { code: JMP | condition_code(condition) | source, jt, jf, k };
            }
            Self::Return(value) => (RET, value),
            Self::ReturnAccumulator => (RET | RET_A, 0),
        };
        Instruction { code, jt: 0, jf: 0, k }
    }
}

impl Instruction {
    /// Decodes the instruction. `None`: classic BPF has no such instruction.
    pub fn decode(self) -> Option<Operation> {
        let Self { code, jt, jf, k } = self;
        let operand = if code & X == 0 { Operand::Constant(k) } else { Operand::Index };
        let of_frame = |size, indexed| Some(Operation::Load { size, indexed, offset: k });
        Some(match code {
            _ if code == LD | ABS | WORD => of_frame(4, false)?,
            _ if code == LD | ABS | HALF => of_frame(2, false)?,
            _ if code == LD | ABS | BYTE => of_frame(1, false)?,
            _ if code == LD | IND | WORD => of_frame(4, true)?,
            _ if code == LD | IND | HALF => of_frame(2, true)?,
            _ if code == LD | IND | BYTE => of_frame(1, true)?,
            _ if code == LDX | MSH | BYTE => Operation::LoadHeaderLength(k),
            _ if code == LD | IMM => Operation::Set(Register::Accumulator, k),
            _ if code == LDX | IMM => Operation::Set(Register::Index, k),
            _ if code == LD | LEN => Operation::Length(Register::Accumulator),
            _ if code == LDX | LEN => Operation::Length(Register::Index),
            _ if code == LD | MEM => Operation::Read(Register::Accumulator, k),
            _ if code == LDX | MEM => Operation::Read(Register::Index, k),
            ST => Operation::Write(Register::Accumulator, k),
            STX => Operation::Write(Register::Index, k),
            _ if code == ALU | NEG => Operation::Negate,
            _ if code == MISC | TAX => Operation::ToIndex,
            _ if code == MISC | TXA => Operation::ToAccumulator,
            _ if code == JMP | JA => Operation::Jump(k),
            RET => Operation::Return(k),
            _ if code == RET | RET_A => Operation::ReturnAccumulator,
            _ if code & 0x07 == ALU => {
                let (operator, _) = OPERATORS.iter().find(|(_, known)| ALU | known == code & !X)?;
                Operation::Compute(*operator, operand)
            }
            _ => {
                let (condition, _) = CONDITIONS.iter().find(|(_, known)| JMP | known == code & !X)?;
                Operation::Branch(*condition, operand, jt, jf)
            }
        })
    }
}
