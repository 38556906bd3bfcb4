//! Checks that a program is safe, by the rules of Linux (`bpf_check_classic`).

use super::{Instruction, MAX_INSTRUCTIONS, MEMORY_WORDS, Operand, Operation, Operator};

/// Whether every jump leads forward to an instruction, the program ends with a return, no constant divides by zero or
/// shifts too far, and memory is written before it is read.
pub(super) fn is_valid(instructions: &[Instruction]) -> bool {
    if !(1..=MAX_INSTRUCTIONS).contains(&instructions.len()) {
        return false;
    }
    // For each instruction that is reached, the memory words that are written on every path to it.
    let mut written: Vec<Option<u16>> = vec![None; instructions.len()];
    if let Some(first) = written.first_mut() {
        *first = Some(0);
    }
    for (at, instruction) in instructions.iter().enumerate() {
        let Some(operation) = instruction.decode() else { return false };
        if !is_valid_alone(operation) {
            return false;
        }
        let before = written.get(at).copied().flatten();
        let mut after = before.unwrap_or(u16::MAX);
        let skips = match operation {
            Operation::Read(_, place) if after & 1 << place == 0 => return false,
            Operation::Write(_, place) => {
                after |= 1 << place;
                vec![0]
            }
            Operation::Jump(skip) => vec![skip as usize],
            Operation::Branch(_, _, jt, jf) => vec![jt.into(), jf.into()],
            Operation::Return(_) | Operation::ReturnAccumulator => continue,
            _ => vec![0],
        };
        for skip in skips {
            // This also checks the jumps of instructions that are not reached.
            let Some(place) = written.get_mut(at + 1 + skip) else { return false };
            if before.is_some() {
                *place = Some(place.unwrap_or(u16::MAX) & after);
            }
        }
    }
    true
}

/// Whether the instruction is safe at any position.
fn is_valid_alone(operation: Operation) -> bool {
    match operation {
        Operation::Read(_, place) | Operation::Write(_, place) => (place as usize) < MEMORY_WORDS,
        Operation::Compute(Operator::Divide | Operator::Remainder, Operand::Constant(value)) => value != 0,
        Operation::Compute(Operator::ShiftLeft | Operator::ShiftRight, Operand::Constant(value)) => {
            value < 32
        }
        _ => true,
    }
}
