//! Classic BPF: lays out a graph of tests as the instructions that libpcap generates, and evaluates them.
//!
//! Classic BPF has an accumulator, an index register, 16 words of memory, and forward jumps. It can express the
//! whole language, on any byte of a frame. A program has three consumers: [`Program::matches`],
//! [`Program::explain`] for people, and translators in the crates that use this one. All three use [`Operation`]s,
//! so that the meaning of an instruction code is defined in one place.
//!
//! A program sees the frame as on the wire: a VLAN tag is in its bytes, not in metadata. Extensions of a kernel are not
//! used.

mod check;
mod emit;
mod evaluate;
mod explain;
mod operation;
mod registers;
#[cfg(test)]
mod tests;

pub use self::operation::{Condition, Instruction, Operand, Operation, Register};

pub(super) use self::emit::lay_out;
pub use super::ast::Operator;

/// Maximum number of instructions that a kernel accepts (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;
/// Number of memory words (`BPF_MEMWORDS`).
pub const MEMORY_WORDS: usize = 16;
/// The result for a frame that matches: tcpdump's largest snap length. The result for other frames is 0.
pub const ACCEPT: u32 = 262_144;

/// A program that [`Program::new`] has validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    instructions: Vec<Instruction>,
}

impl Program {
    /// Validates untrusted instructions. `None`: they are unsafe, or a kernel would reject them.
    pub fn new(instructions: Vec<Instruction>) -> Option<Self> {
        check::is_valid(&instructions).then_some(Self { instructions })
    }

    /// The instructions, in order of evaluation.
    pub fn instructions(&self) -> &[Instruction] {
        &self.instructions
    }

    /// Whether a frame matches. `frame`: its captured bytes, from its beginning. `len`: its length on the wire.
    pub fn matches(&self, frame: &[u8], len: u32) -> bool {
        evaluate::evaluate(&self.instructions, frame, len) != 0
    }

    /// One line for each instruction, as `tcpdump -d` prints it.
    pub fn explain(&self) -> String {
        explain::explain(&self.instructions)
    }
}
