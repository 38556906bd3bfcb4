//! Writes eBPF: assigns registers and memory, and resolves jumps to labels that are not placed yet.

use std::collections::HashMap;

use mirror_common::abi::{FILTER_DIFFERS, FILTER_MATCHES};

use super::{
    super::classic::{Condition, Operand, Operator, Register},
    insn::{
        ADD, ALU, ALU64, AND, CALL, DOUBLE, Insn, JA, JEQ, JGE, JGT, JLE, JLT, JMP, JMP32, JNE, JSET, LDX,
        LSH, MEM, MOV, NEG, OR, RSH, SOURCE, ST, STX, SUB, TO_BIG_ENDIAN, operator_code, size_code,
    },
    ways::Packet,
};

/// The target of a jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Label {
    /// An instruction of classic BPF, in one of the forms of the program.
    Operation(Packet, usize),
    /// The end of a form, with its answer.
    Answer(Packet, bool),
    /// The last instruction of a form.
    End(Packet),
    /// The start for packets without a VLAN tag in metadata.
    Untagged,
    /// The header was written to the stack.
    HeaderIsMade,
    /// In a load of the tagged form: the bytes are after the tag.
    Behind(usize),
    /// In a load of the tagged form: the two words with the bytes are in registers.
    WordsAreThere(usize),
    /// In a load of the tagged form: the bytes are loaded.
    Done(usize),
}

impl Label {
    pub(super) fn answer(matches: bool, packet: Packet) -> Self {
        Self::Answer(packet, matches)
    }
}

// Registers. Those from `CONTEXT` to `FRAME_LENGTH` survive calls.
/// The answer. Before that, a scratch register.
pub(super) const SCRATCH: u8 = 0;
const ARGUMENT: u8 = 1;
/// The start of the packet, in the direct form.
pub(super) const DATA: u8 = 2;
/// The end of the linear part.
pub(super) const DATA_END: u8 = 3;
/// An offset in the packet.
pub(super) const OFFSET: u8 = 4;
const CONTEXT: u8 = 6;
const ACCUMULATOR: u8 = 7;
pub(super) const INDEX: u8 = 8;
/// In the tagged form, the length of the frame with the tag.
pub(super) const FRAME_LENGTH: u8 = 9;
const STACK: u8 = 10;

// Fields of `struct __sk_buff`.
const SKB_LEN: i16 = 0;
const SKB_VLAN_PRESENT: i16 = 20;
const SKB_VLAN_TCI: i16 = 24;
const SKB_VLAN_PROTO: i16 = 28;
const SKB_DATA: i16 = 76;
const SKB_DATA_END: i16 = 80;
const SKB_LOAD_BYTES: i32 = 26;

// Offsets on the stack. The memory of classic BPF is above them.
/// The first 20 bytes of a frame with its tag.
pub(super) const HEADER: i16 = -88;
/// The bytes that the helper has loaded.
pub(super) const LOADED: i16 = -96;

/// The eBPF register for a register of classic BPF.
pub(super) fn register(register: Register) -> u8 {
    match register {
        Register::Accumulator => ACCUMULATOR,
        Register::Index => INDEX,
    }
}

/// The stack offset of a memory word.
fn word(place: u32) -> i16 {
    -4 * (place as i16 + 1)
}

#[derive(Default)]
pub(super) struct Assembler {
    insns: Vec<Insn>,
    /// The jumps, by position.
    jumps: Vec<(usize, Label)>,
    labels: HashMap<Label, usize>,
    /// The position of the newest label.
    last_placed: usize,
}

impl Assembler {
    fn push(&mut self, code: u8, destination: u8, source: u8, offset: i16, immediate: u32) {
        self.insns.push(Insn::new(code, destination, source, offset, immediate.cast_signed()));
    }

    fn jump_if(&mut self, code: u8, left: u8, right: u8, constant: u32, label: Label) {
        self.jumps.push((self.insns.len(), label));
        self.push(code, left, right, 0, constant);
    }

    /// Places a label at the next instruction.
    pub(super) fn place(&mut self, label: Label) {
        // A jump to the next instruction is dropped, unless another label points to the position after it.
        if self.last_placed != self.insns.len()
            && self.jumps.last() == Some(&(self.insns.len().wrapping_sub(1), label))
            && self.insns.last().is_some_and(|last| last.code == JMP | JA)
        {
            self.insns.pop();
            self.jumps.pop();
        }
        self.last_placed = self.insns.len();
        self.labels.insert(label, self.insns.len());
    }

    pub(super) fn start(&mut self) {
        self.copy_register(CONTEXT, ARGUMENT);
        self.set_register(ACCUMULATOR, 0);
        self.set_register(INDEX, 0);
    }

    pub(super) fn if_untagged(&mut self, label: Label) {
        self.push(LDX | MEM, SCRATCH, CONTEXT, SKB_VLAN_PRESENT, 0);
        self.jump_if(JMP | JEQ, SCRATCH, 0, 0, label);
    }

    pub(super) fn load_pointers(&mut self) {
        self.push(LDX | MEM, DATA, CONTEXT, SKB_DATA, 0);
        self.push(LDX | MEM, DATA_END, CONTEXT, SKB_DATA_END, 0);
    }

    /// Writes the start of the frame with its tag to the stack, and the frame's length to a register.
    pub(super) fn make_header(&mut self) {
        self.push(LDX | MEM, FRAME_LENGTH, CONTEXT, SKB_LEN, 0);
        self.add(FRAME_LENGTH, 4);
        for place in [HEADER, HEADER + 8, HEADER + 16] {
            self.push(ST | MEM | DOUBLE, STACK, 0, place, 0);
        }
        // Loads as many bytes as exist. Each load is checked against the length.
        for bytes in [16, 14, 12] {
            self.set_register(OFFSET, 0);
            self.call_load_bytes(HEADER, bytes);
            self.jump_if(JMP | JEQ, SCRATCH, 0, 0, Label::HeaderIsMade);
        }
        self.place(Label::HeaderIsMade);
        self.push(LDX | MEM, SCRATCH, STACK, HEADER + 12, 0);
        self.push(STX | MEM, STACK, SCRATCH, HEADER + 16, 0);
        // The kernel stores the protocol in network byte order.
        self.push(LDX | MEM, SCRATCH, CONTEXT, SKB_VLAN_PROTO, 0);
        self.push(STX | MEM | size_code(2), STACK, SCRATCH, HEADER + 12, 0);
        self.push(LDX | MEM, SCRATCH, CONTEXT, SKB_VLAN_TCI, 0);
        self.push(TO_BIG_ENDIAN, SCRATCH, 0, 0, 16);
        self.push(STX | MEM | size_code(2), STACK, SCRATCH, HEADER + 14, 0);
    }

    pub(super) fn set(&mut self, to: Register, value: u32) {
        self.set_register(register(to), value);
    }

    pub(super) fn set_register(&mut self, to: u8, value: u32) {
        self.push(ALU | MOV, to, 0, 0, value);
    }

    pub(super) fn length(&mut self, to: Register, is_tagged: bool) {
        if is_tagged {
            self.copy_register(register(to), FRAME_LENGTH);
        } else {
            self.push(LDX | MEM, register(to), CONTEXT, SKB_LEN, 0);
        }
    }

    pub(super) fn read(&mut self, to: Register, place: u32) {
        self.push(LDX | MEM, register(to), STACK, word(place), 0);
    }

    pub(super) fn write(&mut self, from: Register, place: u32) {
        self.push(STX | MEM, STACK, register(from), word(place), 0);
    }

    pub(super) fn compute(&mut self, operator: Operator, operand: Operand) {
        let code = ALU | operator_code(operator);
        match operand {
            Operand::Constant(value) => self.push(code, ACCUMULATOR, 0, 0, value),
            Operand::Index => self.push(code | SOURCE, ACCUMULATOR, INDEX, 0, 0),
        }
    }

    /// Shifts by the index register. eBPF itself uses only the last five bits of it.
    pub(super) fn shift(&mut self, operator: Operator) {
        self.push(JMP32 | JLT, INDEX, 0, 2, 32);
        self.push(ALU | MOV, ACCUMULATOR, 0, 0, 0);
        self.push(JMP | JA, 0, 0, 1, 0);
        self.compute(operator, Operand::Index);
    }

    pub(super) fn negate(&mut self) {
        self.push(ALU | NEG, ACCUMULATOR, 0, 0, 0);
    }

    pub(super) fn copy(&mut self, to: Register, from: Register) {
        self.push(ALU | MOV | SOURCE, register(to), register(from), 0, 0);
    }

    /// Four times the lower half of the byte in the index register.
    pub(super) fn header_length(&mut self) {
        self.push(ALU | AND, INDEX, 0, 0, 0x0f);
        self.push(ALU | LSH, INDEX, 0, 0, 2);
    }

    // The following operations have 64 bits, for pointers and for sums that must not wrap around.

    pub(super) fn copy_register(&mut self, to: u8, from: u8) {
        self.push(ALU64 | MOV | SOURCE, to, from, 0, 0);
    }

    pub(super) fn add_register(&mut self, to: u8, from: u8) {
        self.push(ALU64 | ADD | SOURCE, to, from, 0, 0);
    }

    pub(super) fn add(&mut self, to: u8, value: u32) {
        self.push(ALU64 | ADD, to, 0, 0, value);
    }

    pub(super) fn subtract(&mut self, to: u8, value: u32) {
        self.push(ALU64 | SUB, to, 0, 0, value);
    }

    pub(super) fn if_beyond(&mut self, left: u8, right: u8, label: Label) {
        self.jump_if(JMP | JGT | SOURCE, left, right, 0, label);
    }

    pub(super) fn if_greater(&mut self, left: u8, constant: u32, label: Label) {
        self.jump_if(JMP | JGT, left, 0, constant, label);
    }

    pub(super) fn if_less(&mut self, left: u8, constant: u32, label: Label) {
        self.jump_if(JMP | JLT, left, 0, constant, label);
    }

    pub(super) fn if_not_equal(&mut self, left: u8, constant: u32, label: Label) {
        self.jump_if(JMP | JNE, left, 0, constant, label);
    }

    pub(super) fn if_index_is_zero(&mut self, label: Label) {
        self.jump_if(JMP | JEQ, INDEX, 0, 0, label);
    }

    pub(super) fn jump(&mut self, label: Label) {
        self.jump_if(JMP | JA, 0, 0, 0, label);
    }

    /// Jumps if the accumulator fulfils the condition, or if it does not, for `negated`. `AnyBit` cannot be negated.
    pub(super) fn branch(&mut self, condition: Condition, negated: bool, operand: Operand, label: Label) {
        let code = match (condition, negated) {
            (Condition::Equal, false) => JEQ,
            (Condition::Equal, true) => JNE,
            (Condition::Greater, false) => JGT,
            (Condition::Greater, true) => JLE,
            (Condition::GreaterOrEqual, false) => JGE,
            (Condition::GreaterOrEqual, true) => JLT,
            (Condition::AnyBit, _) => JSET,
        };
        match operand {
            Operand::Constant(value) => self.jump_if(JMP32 | code, ACCUMULATOR, 0, value, label),
            Operand::Index => self.jump_if(JMP32 | code | SOURCE, ACCUMULATOR, INDEX, 0, label),
        }
    }

    /// Loads bytes in network byte order.
    pub(super) fn load(&mut self, to: u8, base: u8, offset: i16, size: u8) {
        self.push(LDX | MEM | size_code(size), to, base, offset, 0);
        if size > 1 {
            self.push(TO_BIG_ENDIAN, to, 0, 0, 8 * u32::from(size));
        }
    }

    pub(super) fn load_stack(&mut self, to: u8, place: i16, size: u8) {
        self.load(to, STACK, place, size);
    }

    /// Loads bytes at any offset of the stack, one by one: the verifier accepts only aligned loads there.
    pub(super) fn load_bytes(&mut self, to: u8, place: i16, size: u8) {
        self.push(LDX | MEM | size_code(1), to, STACK, place, 0);
        for byte in 1..i16::from(size) {
            self.push(ALU | LSH, to, 0, 0, 8);
            self.push(LDX | MEM | size_code(1), SCRATCH, STACK, place + byte, 0);
            self.push(ALU | OR | SOURCE, to, SCRATCH, 0, 0);
        }
    }

    /// Loads from the offset in `OFFSET`, 0 to 15, of the header on the stack.
    ///
    /// Before Linux 5.12 a program cannot read the stack at a computed offset. So two words of 8 bytes are read, and
    /// the bytes are shifted out of them.
    pub(super) fn load_header(&mut self, to: u8, size: u8, words_are_there: Label) {
        const HIGH: u8 = 1;
        const LOW: u8 = 2;
        self.push(LDX | MEM | DOUBLE, HIGH, STACK, HEADER, 0);
        self.push(LDX | MEM | DOUBLE, LOW, STACK, HEADER + 8, 0);
        self.if_less(OFFSET, 8, words_are_there);
        self.copy_register(HIGH, LOW);
        self.push(LDX | MEM | DOUBLE, LOW, STACK, HEADER + 16, 0);
        self.subtract(OFFSET, 8);
        self.place(words_are_there);
        for word in [HIGH, LOW] {
            self.push(TO_BIG_ENDIAN, word, 0, 0, 64);
        }
        self.push(ALU64 | LSH, OFFSET, 0, 0, 3);
        self.push(ALU64 | LSH | SOURCE, HIGH, OFFSET, 0, 0);
        // Two steps, because a shift by 64 has no effect.
        self.push(ALU64 | RSH, LOW, 0, 0, 8);
        self.push(ALU64 | MOV, SCRATCH, 0, 0, 56);
        self.push(ALU64 | SUB | SOURCE, SCRATCH, OFFSET, 0, 0);
        self.push(ALU64 | RSH | SOURCE, LOW, SCRATCH, 0, 0);
        self.push(ALU64 | OR | SOURCE, HIGH, LOW, 0, 0);
        self.push(ALU64 | RSH, HIGH, 0, 0, 64 - 8 * u32::from(size));
        self.copy_register(to, HIGH);
    }

    /// Loads from the offset in `OFFSET` to `LOADED`.
    pub(super) fn skb_load_bytes(&mut self, size: u8, on_failure: Label) {
        self.call_load_bytes(LOADED, size.into());
        self.if_not_equal(SCRATCH, 0, on_failure);
    }

    fn call_load_bytes(&mut self, to: i16, bytes: u32) {
        self.copy_register(1, CONTEXT);
        self.copy_register(2, OFFSET);
        self.copy_register(3, STACK);
        self.add(3, i32::from(to).cast_unsigned());
        self.set_register(4, bytes);
        self.push(JMP | CALL, 0, 0, 0, SKB_LOAD_BYTES.cast_unsigned());
    }

    /// Writes the end of a form: the answers that it uses.
    pub(super) fn end(&mut self, packet: Packet) {
        let mut answers = vec![(true, FILTER_MATCHES), (false, FILTER_DIFFERS)];
        answers.retain(|(matches, _)| {
            let label = Label::answer(*matches, packet);
            self.jumps.iter().any(|(_, target)| *target == label)
        });
        for (matches, answer) in &answers {
            self.place(Label::answer(*matches, packet));
            self.set_register(SCRATCH, *answer);
            self.jump(Label::End(packet));
        }
        if !answers.is_empty() {
            self.place(Label::End(packet));
            self.insns.push(Insn::EXIT);
        }
    }

    /// Resolves the jumps and returns the program. `None`: a jump is too long.
    pub(super) fn finish(mut self) -> Option<Vec<Insn>> {
        for (at, label) in self.jumps {
            let skip = self.labels.get(&label)?.checked_sub(at + 1)?;
            self.insns.get_mut(at)?.offset = i16::try_from(skip).ok()?;
        }
        Some(self.insns)
    }
}
