//! Evaluates a program on the host, as libpcap does.

use super::{Condition, Instruction, MEMORY_WORDS, Operand, Operation, Register};

/// Returns the result of the program for the frame.
///
/// A valid program ends, because jumps only lead forward. An invalid one ends too: an operation that is impossible
/// rejects the frame.
pub(super) fn evaluate(instructions: &[Instruction], frame: &[u8], len: u32) -> u32 {
    run(instructions, frame, len).unwrap_or(0)
}

/// Returns `None` for a load beyond the frame, or a division by zero.
fn run(instructions: &[Instruction], frame: &[u8], len: u32) -> Option<u32> {
    let (mut a, mut x) = (0_u32, 0_u32);
    let mut memory = [0_u32; MEMORY_WORDS];
    let mut at = 0_usize;
    loop {
        let operation = instructions.get(at)?.decode()?;
        at += 1;
        let set = |register, value, a: &mut u32, x: &mut u32| match register {
            Register::Accumulator => *a = value,
            Register::Index => *x = value,
        };
        let right = |operand| match operand {
            Operand::Constant(value) => value,
            Operand::Index => x,
        };
        match operation {
            Operation::Load { size, indexed, offset } => {
                let start = offset.checked_add(if indexed { x } else { 0 })? as usize;
                let bytes = frame.get(start..start.checked_add(size.into())?)?;
                a = bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
            }
            Operation::LoadHeaderLength(offset) => x = 4 * u32::from(frame.get(offset as usize)? & 0x0f),
            Operation::Set(register, value) => set(register, value, &mut a, &mut x),
            Operation::Length(register) => set(register, len, &mut a, &mut x),
            Operation::Read(register, place) => set(register, *memory.get(place as usize)?, &mut a, &mut x),
            Operation::Write(register, place) => {
                *memory.get_mut(place as usize)? = if register == Register::Index { x } else { a };
            }
            Operation::Compute(operator, operand) => a = operator.apply(a, right(operand))?,
            Operation::Negate => a = a.wrapping_neg(),
            Operation::ToIndex => x = a,
            Operation::ToAccumulator => a = x,
            Operation::Jump(skip) => at += skip as usize,
            Operation::Branch(condition, operand, jt, jf) => {
                let right = right(operand);
                let holds = match condition {
                    Condition::Equal => a == right,
                    Condition::Greater => a > right,
                    Condition::GreaterOrEqual => a >= right,
                    Condition::AnyBit => a & right != 0,
                };
                at += usize::from(if holds { jt } else { jf });
            }
            Operation::Return(value) => return Some(value),
            Operation::ReturnAccumulator => return Some(a),
        }
    }
}
