//! Loads of packet bytes, in the three forms of a program.

use super::{
    super::classic::{Operation, Register},
    Writer,
    assemble::{DATA, DATA_END, FRAME_LENGTH, HEADER, INDEX, LOADED, Label, OFFSET, SCRATCH, register},
    ways::{Known, MAX_INDEX, Packet, is_possible, to_check},
};

/// Offsets of the VLAN tag's start and end in a frame.
const TAG: u32 = 12;
const TAG_END: u32 = 16;

/// A load, either at a fixed or at an indexed offset.
#[derive(Clone, Copy)]
struct Load {
    to: Register,
    size: u8,
    indexed: bool,
    offset: u32,
}

impl Load {
    fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::Load { size, indexed, offset } => {
                Some(Self { to: Register::Accumulator, size, indexed, offset })
            }
            Operation::LoadHeaderLength(offset) => {
                Some(Self { to: Register::Index, size: 1, indexed: false, offset })
            }
            _ => None,
        }
    }

    fn end(self) -> u32 {
        self.offset + u32::from(self.size)
    }
}

impl Writer<'_> {
    /// Writes a load. Returns whether it can switch to the helper form.
    pub(super) fn load(&mut self, at: usize, operation: Operation, known: &Known) -> bool {
        let helper = Label::Operation(Packet::Helper, at);
        let Some(load) = Load::of(operation) else { return false };
        if !is_possible(operation, self.packet) {
            let is_direct = self.packet == Packet::Direct;
            self.assembler.jump(if is_direct { helper } else { Label::answer(false, self.packet) });
            return is_direct;
        }
        match self.packet {
            Packet::Direct => return self.direct(load, known, helper),
            Packet::Helper => self.with_helper(load, 0),
            Packet::Tagged => self.tagged(at, load),
        }
        if load.to == Register::Index {
            self.assembler.header_length();
        }
        false
    }

    fn direct(&mut self, load: Load, known: &Known, helper: Label) -> bool {
        let assembler = &mut *self.assembler;
        let (base, checked) =
            if load.indexed { (OFFSET, known.behind_index) } else { (DATA, Some(known.linear)) };
        if checked.is_none() {
            if !known.index_is_small {
                assembler.if_greater(INDEX, MAX_INDEX, helper);
            }
            assembler.copy_register(OFFSET, DATA);
            assembler.add_register(OFFSET, INDEX);
        }
        let is_checked = checked >= Some(load.end());
        if !is_checked {
            assembler.copy_register(SCRATCH, base);
            assembler.add(SCRATCH, if load.indexed { load.end() } else { to_check(load.end()) });
            assembler.if_beyond(SCRATCH, DATA_END, helper);
        }
        assembler.load(register(load.to), base, load.offset as i16, load.size);
        if load.to == Register::Index {
            assembler.header_length();
        }
        !is_checked
    }

    /// Loads from the packet, `before` bytes ahead of the load's own offset.
    fn with_helper(&mut self, load: Load, before: u32) {
        let differs = Label::answer(false, self.packet);
        if load.indexed {
            self.assembler.copy_register(OFFSET, INDEX);
            self.assembler.add(OFFSET, load.offset - before);
            // The helper uses only the lower 32 bits of its argument.
            self.assembler.if_greater(OFFSET, i32::MAX as u32, differs);
        } else {
            self.assembler.set_register(OFFSET, load.offset - before);
        }
        self.helper(load);
    }

    /// Loads from the offset in `OFFSET`.
    fn helper(&mut self, load: Load) {
        self.assembler.skb_load_bytes(load.size, Label::answer(false, self.packet));
        self.assembler.load_stack(register(load.to), LOADED, load.size);
    }

    /// Loads as if the VLAN tag were in the packet. Bytes before the end of the tag are read from `HEADER` on the
    /// stack.
    fn tagged(&mut self, at: usize, load: Load) {
        if load.offset >= TAG_END {
            return self.with_helper(load, TAG_END - TAG);
        }
        let differs = Label::answer(false, self.packet);
        if !load.indexed {
            self.assembler.if_less(FRAME_LENGTH, load.end(), differs);
            return self.assembler.load_bytes(register(load.to), HEADER + load.offset as i16, load.size);
        }
        let (behind, done) = (Label::Behind(at), Label::Done(at));
        self.assembler.copy_register(OFFSET, INDEX);
        self.assembler.add(OFFSET, load.offset);
        self.assembler.if_greater(OFFSET, TAG_END - 1, behind);
        self.assembler.copy_register(SCRATCH, OFFSET);
        self.assembler.add(SCRATCH, load.size.into());
        self.assembler.if_beyond(SCRATCH, FRAME_LENGTH, differs);
        self.assembler.load_header(register(load.to), load.size, Label::WordsAreThere(at));
        self.assembler.jump(done);
        self.assembler.place(behind);
        self.assembler.subtract(OFFSET, TAG_END - TAG);
        self.assembler.if_greater(OFFSET, i32::MAX as u32, differs);
        self.helper(load);
        self.assembler.place(done);
    }
}
