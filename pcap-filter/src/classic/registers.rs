//! Computes values: the instructions that load a value into a register, and the contents of the registers afterwards.

use super::{
    super::{
        ast::Operator,
        value::{Field, Slot, Value},
    },
    MEMORY_WORDS, Operand, Operation, Register,
};

/// The known contents of the registers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Registers {
    /// The accumulator: a value and the mask that was applied.
    pub(super) accumulator: Option<(Value, u32)>,
    pub(super) index: Option<Value>,
}

/// Instructions, and the contents of the registers after them.
#[derive(Debug, Default)]
pub(super) struct Code {
    pub(super) operations: Vec<Operation>,
    pub(super) registers: Registers,
    /// The number of memory words that hold parts of a value, counted from the first word. The slots are at the other
    /// end.
    words_in_use: u32,
    /// Whether a value needs more words than there are.
    pub(super) is_too_deep: bool,
}

/// The words that are not used by slots.
const WORDS: u32 = MEMORY_WORDS as u32 - 5;

impl Registers {
    /// The facts that hold on both of two paths.
    pub(super) fn either(&self, other: &Self) -> Self {
        let accumulator = self.accumulator.clone().filter(|known| other.accumulator.as_ref() == Some(known));
        let index = self.index.clone().filter(|known| other.index.as_ref() == Some(known));
        Self { accumulator, index }
    }

    /// Removes the facts about a slot that got another value.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.accumulator.take_if(|(value, _)| value.slots().contains(slot));
        self.index.take_if(|value| value.slots().contains(slot));
    }

    pub(super) fn has(&self, value: &Value) -> bool {
        self.accumulator.as_ref().is_some_and(|(known, mask)| known == value && *mask == u32::MAX)
    }
}

/// The memory word of a slot.
pub(super) fn word(slot: Slot) -> u32 {
    MEMORY_WORDS as u32 - 1 - slot as u32
}

impl Code {
    pub(super) fn new(registers: Registers) -> Self {
        Self { registers, ..Self::default() }
    }

    /// Loads a value into the accumulator.
    pub(super) fn accumulator(&mut self, value: &Value) {
        if self.registers.has(value) {
            return;
        }
        match value {
            Value::Constant(constant) => self.push(Operation::Set(Register::Accumulator, *constant)),
            Value::Length => self.push(Operation::Length(Register::Accumulator)),
            Value::Slot(slot) => self.push(Operation::Read(Register::Accumulator, word(*slot))),
            Value::Ipv4Header(_) => {
                self.index(value);
                self.push(Operation::ToAccumulator);
            }
            Value::Field(Field { start, offset, size }) => {
                if let Some(start) = start {
                    self.index(start);
                }
                let indexed = start.is_some();
                self.push(Operation::Load { size: *size, indexed, offset: *offset });
            }
            Value::Binary(operator, parts) => self.compute(*operator, &parts.0, &parts.1),
            // The comparison itself is done by the test, see `emit`.
            Value::Greater(parts) => self.operands(&parts.0, &parts.1),
        }
        self.registers.accumulator = Some((value.clone(), u32::MAX));
    }

    /// Loads a value into the index register. The accumulator is unchanged if [`is_direct`].
    pub(super) fn index(&mut self, value: &Value) {
        if self.registers.index.as_ref() == Some(value) {
            return;
        }
        match value {
            _ if self.registers.has(value) => self.push(Operation::ToIndex),
            Value::Constant(constant) => self.push(Operation::Set(Register::Index, *constant)),
            Value::Length => self.push(Operation::Length(Register::Index)),
            Value::Slot(slot) => self.push(Operation::Read(Register::Index, word(*slot))),
            Value::Ipv4Header(at) => self.push(Operation::LoadHeaderLength(*at)),
            _ => {
                self.accumulator(value);
                self.push(Operation::ToIndex);
            }
        }
        self.registers.index = Some(value.clone());
    }

    /// Loads one value into the accumulator and the other one into the index register.
    pub(super) fn operands(&mut self, left: &Value, right: &Value) {
        if is_direct(right) {
            self.accumulator(left);
            self.index(right);
        } else if keeps_index(left) {
            self.index(right);
            self.accumulator(left);
        } else if words(left).max(1 + words(right)) < words(right).max(1 + words(left)) {
            let kept = self.kept(left);
            self.index(right);
            self.push(Operation::Read(Register::Accumulator, kept));
            self.registers.accumulator = Some((left.clone(), u32::MAX));
            self.words_in_use = kept;
        } else {
            let kept = self.kept(right);
            self.accumulator(left);
            self.push(Operation::Read(Register::Index, kept));
            self.registers.index = Some(right.clone());
            self.words_in_use = kept;
        }
    }

    fn compute(&mut self, operator: Operator, left: &Value, right: &Value) {
        use Operator::{Add, And, Multiply, Or, Subtract, Xor};
        match (operator, left, right) {
            (Subtract, Value::Constant(0), _) => {
                self.accumulator(right);
                self.push(Operation::Negate);
                return;
            }
            (_, _, Value::Constant(constant)) => {
                self.accumulator(left);
                self.push(Operation::Compute(operator, Operand::Constant(*constant)));
                return;
            }
            // The order is free if it does not save memory.
            (Add | And | Multiply | Or | Xor, _, _) if is_direct(left) && !is_direct(right) => {
                self.operands(right, left);
            }
            (Add | And | Multiply | Or | Xor, _, _) if keeps_index(right) && !is_direct(right) => {
                self.operands(right, left);
            }
            _ => self.operands(left, right),
        }
        self.push(Operation::Compute(operator, Operand::Index));
    }

    /// Stores a value in memory. Returns the word.
    fn kept(&mut self, value: &Value) -> u32 {
        self.accumulator(value);
        let word = self.words_in_use;
        self.is_too_deep |= word >= WORDS;
        self.words_in_use += 1;
        self.push(Operation::Write(Register::Accumulator, word));
        word
    }

    pub(super) fn push(&mut self, operation: Operation) {
        self.operations.push(operation);
    }
}

/// Whether a single instruction loads the value into the index register.
fn is_direct(value: &Value) -> bool {
    matches!(value, Value::Constant(_) | Value::Length | Value::Slot(_) | Value::Ipv4Header(_))
}

/// Whether the value can be loaded into the accumulator without changing the index register.
fn keeps_index(value: &Value) -> bool {
    match value {
        Value::Constant(_) | Value::Length | Value::Slot(_) | Value::Field(Field { start: None, .. }) => true,
        Value::Binary(Operator::Subtract, parts) if parts.0 == Value::Constant(0) => keeps_index(&parts.1),
        Value::Binary(_, parts) => matches!(parts.1, Value::Constant(_)) && keeps_index(&parts.0),
        _ => false,
    }
}

/// The number of memory words that the computation of the value needs.
fn words(value: &Value) -> u32 {
    match value {
        Value::Field(Field { start: Some(start), .. }) => words(start),
        Value::Binary(_, parts) | Value::Greater(parts) => {
            let (left, right) = (&parts.0, &parts.1);
            if is_direct(right) || keeps_index(left) {
                words(left).max(words(right))
            } else {
                let (left, right) = (words(left), words(right));
                left.max(1 + right).min(right.max(1 + left))
            }
        }
        _ => 0,
    }
}
