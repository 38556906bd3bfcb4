//! Classic BPF: a graph of tests laid out as the instructions that libpcap makes, and their evaluation.
//!
//! Classic BPF has an accumulator, an index register, 16 words of memory, and jumps forward. It can do everything that
//! the language can say, on any byte of a frame. Three things read a program: [`Program::matches`] on the host,
//! [`Program::explain`] for people, and the translator to eBPF (`super::ebpf`) for the kernel. All three read
//! [`Operation`]s, so that a code of an instruction has its meaning in one place.
//!
//! A program sees the frame as on the wire: a VLAN tag is in it, not in metadata. It uses no extension of a kernel.

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

/// The longest program that a kernel takes (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;
/// The words of memory that a program has (`BPF_MEMWORDS`).
pub const MEMORY_WORDS: usize = 16;
/// What a program returns for a frame that matches: tcpdump's largest snap length. 0 is for the others.
pub const ACCEPT: u32 = 262_144;

/// A program that has passed [`Program::new`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    instructions: Vec<Instruction>,
}

impl Program {
    /// Takes instructions of anybody; `None`: they can do harm, or a kernel would not take them.
    pub fn new(instructions: Vec<Instruction>) -> Option<Self> {
        check::is_valid(&instructions).then_some(Self { instructions })
    }

    /// The instructions; the first one is evaluated first.
    pub fn instructions(&self) -> &[Instruction] {
        &self.instructions
    }

    /// Whether a frame matches. `frame`: its first bytes, all or as many as were captured. `len`: its length on the
    /// wire.
    pub fn matches(&self, frame: &[u8], len: u32) -> bool {
        evaluate::evaluate(&self.instructions, frame, len) != 0
    }

    /// One line for each instruction, as `tcpdump -d` prints it.
    pub fn explain(&self) -> String {
        explain::explain(&self.instructions)
    }
}
