//! Formats a program as readable lines, like `tcpdump -d`.

use std::fmt::Write as _;

use super::{Condition, Instruction, Operand, Operation, Operator, Register};

pub(super) fn explain(instructions: &[Instruction]) -> String {
    let mut text = String::new();
    for (at, instruction) in instructions.iter().enumerate() {
        let Some(operation) = instruction.decode() else { continue };
        let (name, argument) = line(operation, at);
        let line = match operation {
            Operation::Branch(_, _, jt, jf) => {
                let (yes, no) = (at + 1 + usize::from(jt), at + 1 + usize::from(jf));
                format!("({at:03}) {name:<8} {argument:<16} jt {yes}\tjf {no}")
            }
            _ => format!("({at:03}) {name:<8} {argument}"),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// The name of the instruction, and its argument.
fn line(operation: Operation, at: usize) -> (&'static str, String) {
    let of = |register, one, other| if register == Register::Accumulator { one } else { other };
    let operand = |operand| match operand {
        Operand::Constant(value) => format!("#{value:#x}"),
        Operand::Index => "x".to_owned(),
    };
    match operation {
        Operation::Load { size, indexed, offset } => {
            let name = match size {
                1 => "ldb",
                2 => "ldh",
                _ => "ld",
            };
            (name, if indexed { format!("[x + {offset}]") } else { format!("[{offset}]") })
        }
        Operation::LoadHeaderLength(offset) => ("ldxb", format!("4*([{offset}]&0xf)")),
        Operation::Set(register, value) => (of(register, "ld", "ldx"), format!("#{value:#x}")),
        Operation::Length(register) => (of(register, "ld", "ldx"), "#pktlen".to_owned()),
        Operation::Read(register, place) => (of(register, "ld", "ldx"), format!("M[{place}]")),
        Operation::Write(register, place) => (of(register, "st", "stx"), format!("M[{place}]")),
        Operation::Compute(operator, right) => {
            let name = match operator {
                Operator::Add => "add",
                Operator::Subtract => "sub",
                Operator::Multiply => "mul",
                Operator::Divide => "div",
                Operator::Remainder => "mod",
                Operator::And => "and",
                Operator::Or => "or",
                Operator::Xor => "xor",
                Operator::ShiftLeft => "lsh",
                Operator::ShiftRight => "rsh",
            };
            let is_number = !matches!(operator, Operator::And | Operator::Or | Operator::Xor);
            match right {
                Operand::Constant(value) if is_number => (name, format!("#{value}")),
                _ => (name, operand(right)),
            }
        }
        Operation::Negate => ("neg", String::new()),
        Operation::ToIndex => ("tax", String::new()),
        Operation::ToAccumulator => ("txa", String::new()),
        Operation::Jump(skip) => ("ja", (at + 1 + skip as usize).to_string()),
        Operation::Branch(condition, right, ..) => {
            let name = match condition {
                Condition::Equal => "jeq",
                Condition::Greater => "jgt",
                Condition::GreaterOrEqual => "jge",
                Condition::AnyBit => "jset",
            };
            (name, operand(right))
        }
        Operation::Return(value) => ("ret", format!("#{value}")),
        Operation::ReturnAccumulator => ("ret", "a".to_owned()),
    }
}
