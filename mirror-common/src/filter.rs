//! The compiled capture filter: a bounded program of tests on a frame's first bytes, and its evaluation.
//!
//! A program is a list of steps. Each loads a value, masks it, tests whether it lies in a range, and jumps forward,
//! accepts, or rejects. Classic BPF would do the same for the filters of tcpdump, without its arithmetic. The agent
//! compiles programs (`filter` there); the tap programs and `explain` evaluate them with [`matches`]. This module does
//! not know the language. An evaluation cannot loop, fail or read outside of the header, with any program.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::packet::{HEADER_BYTES, Header, LEN_OFFSET, len};

/// Steps that a program can have. A power of two, as above; jump targets from here on end the evaluation.
pub const MAX_FILTER_STEPS: usize = 128;

/// Filters that one node can have; equal ones are one.
pub const MAX_FILTERS: u32 = 1024;
/// Places for them in `FILTERS`: all filters can be replaced before the places of the old ones are free.
pub const FILTER_PLACES: u32 = 2 * MAX_FILTERS;

/// Jump target: the packet matches.
pub const ACCEPT: u8 = 254;
/// Jump target: the packet does not match.
pub const REJECT: u8 = 255;

/// A test: whether `load & mask` lies in `low..=low + span`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FilterStep {
    /// The bits of the loaded value that count.
    pub mask: u32,
    /// The least value that passes.
    pub low: u32,
    /// How much greater than `low` a value may be to pass.
    pub span: u32,
    /// Where the load of four bytes begins, in bytes from the start of the frame.
    pub offset: u8,
    /// Where the loaded value ends: a frame that ends before it is rejected. 0 for the length of the frame.
    pub end: u8,
    /// Where the IPv4 header begins whose length is added to `offset` and `end`.
    pub ip_header: u8,
    /// 0x0f to add it, 0 not to.
    pub ip_header_mask: u8,
    /// By how many bits the loaded bytes are shifted right: 24 leaves one byte, 16 two, 0 all four.
    pub shift: u8,
    /// The step to go on with if the test passes, greater than this step's index; or [`ACCEPT`], [`REJECT`].
    pub jump_true: u8,
    /// The same if it does not pass.
    pub jump_false: u8,
    /// Zero.
    pub reserved: u8,
}

impl FilterStep {
    /// Loads `size` bytes (1, 2 or 4) at `offset`, behind the IPv4 header that begins at `ip_header` unless that is 0;
    /// or, with a size of 0, the length of the frame. The step has no test and no targets yet.
    pub const fn load(offset: u8, size: u8, ip_header: u8) -> Self {
        let (offset, end) =
            if size == 0 { (LEN_OFFSET as u8, 0) } else { (offset, offset.saturating_add(size)) };
        Self {
            mask: u32::MAX,
            low: 0,
            span: 0,
            offset,
            end,
            ip_header,
            ip_header_mask: if ip_header == 0 { 0 } else { 0x0f },
            shift: match size {
                1 => 24,
                2 => 16,
                _ => 0,
            },
            jump_true: REJECT,
            jump_false: REJECT,
            reserved: 0,
        }
    }
}

/// A compiled filter. A filter of zeros matches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FilterProgram {
    /// How many of `steps` are in use, from the first on.
    pub len: u32,
    /// The steps; evaluation begins with the first.
    pub steps: [FilterStep; MAX_FILTER_STEPS],
}

impl Default for FilterProgram {
    fn default() -> Self {
        Self { len: 0, steps: [FilterStep::default(); MAX_FILTER_STEPS] }
    }
}

/// Whether a frame matches.
///
/// As in classic BPF, a load beyond the frame ends the evaluation: the frame does not match, even if the test stands
/// inside a `not`.
#[inline(always)]
pub fn matches(program: &FilterProgram, header: &Header) -> bool {
    matches_cut(program, header, len(header))
}

/// Whether a frame matches whose first `captured` bytes alone are in a capture file.
///
/// As in libpcap, a test of the length sees the length on the wire, which is that of `header`, and a load beyond
/// `captured` ends the evaluation.
#[inline(always)]
pub fn matches_cut(program: &FilterProgram, header: &Header, captured: u32) -> bool {
    let mut next = 0_u8;
    // Each step leads to a later step, so a valid program ends within the bound.
    for _ in 0..=MAX_FILTER_STEPS {
        if next as usize >= MAX_FILTER_STEPS {
            return next == ACCEPT;
        }
        // The eBPF verifier must see the mask, because it does not know the compiler's conclusions.
        let step = &program.steps[core::hint::black_box(next) as usize & (MAX_FILTER_STEPS - 1)];
        // No branches here, because the verifier would have to follow them in every round. A frame that ends before its
        // IPv4 header has zeros there, and is rejected for the bytes behind the header.
        let ip_header_bytes = 4 * u32::from(byte(header, step.ip_header.into()) & step.ip_header_mask);
        if ip_header_bytes + u32::from(step.end) > captured {
            return false;
        }
        let at = ip_header_bytes + u32::from(step.offset);
        let word = [byte(header, at), byte(header, at + 1), byte(header, at + 2), byte(header, at + 3)];
        let value = u32::from_be_bytes(word).wrapping_shr(step.shift.into());
        let passes = (value & step.mask).wrapping_sub(step.low) <= step.span;
        next = if passes { step.jump_true } else { step.jump_false };
    }
    false
}

/// A byte of the header, without a check that could fail.
#[inline(always)]
fn byte(header: &Header, at: u32) -> u8 {
    header[at as usize & (HEADER_BYTES - 1)]
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "tests")]

    use proptest::prelude::*;

    use super::*;
    use crate::packet::header;

    const fn step(offset: u8, size: u8, ip_header: u8) -> FilterStep {
        FilterStep { jump_true: ACCEPT, ..FilterStep::load(offset, size, ip_header) }
    }

    fn program(steps: &[FilterStep]) -> FilterProgram {
        let mut program = FilterProgram { len: steps.len() as u32, ..FilterProgram::default() };
        program.steps[..steps.len()].copy_from_slice(steps);
        program
    }

    #[test]
    fn loads_are_in_network_order_and_checked_against_the_length() {
        let frame = [0x12, 0x34, 0x56, 0x78, 0x9a];
        for (offset, size, low) in [(0, 1, 0x12), (1, 2, 0x3456), (1, 4, 0x3456_789a)] {
            let program = program(&[FilterStep { low, ..step(offset, size, 0) }]);
            let end = u32::from(offset + size);
            assert!(matches(&program, &header(&frame, end)));
            assert!(!matches(&program, &header(&frame, end - 1)), "the frame ends before the value");
        }
    }

    #[test]
    fn a_load_beyond_the_frame_rejects_on_either_branch() {
        let step = FilterStep { jump_false: ACCEPT, ..step(10, 1, 0) };
        assert!(matches(&program(&[step]), &header(&[], 11)));
        assert!(!matches(&program(&[step]), &header(&[], 10)));
    }

    #[test]
    fn an_offset_behind_the_ipv4_header_moves_with_its_length() {
        let mut frame = [0; 64];
        frame[14] = 0x46;
        frame[14 + 24] = 7;
        let step = FilterStep { low: 7, ..step(14, 1, 14) };
        assert!(matches(&program(&[step]), &header(&frame, 39)));
        assert!(!matches(&program(&[step]), &header(&frame, 38)));
        assert!(
            !matches(&program(&[step]), &header(&frame, 14)),
            "there is no first byte to take the length from"
        );
        frame[14] = 0x45;
        assert!(!matches(&program(&[step]), &header(&frame, 64)));
    }

    #[test]
    fn the_length_can_be_tested() {
        let program = program(&[FilterStep { low: 60, span: 40, ..step(0, 0, 0) }]);
        let seen = [59, 60, 100, 101].map(|len| matches(&program, &header(&[], len)));
        assert_eq!(seen, [false, true, true, false]);
    }

    #[test]
    fn a_cut_frame_keeps_its_length_and_loses_its_bytes() {
        let longer = program(&[FilterStep { low: 100, span: u32::MAX - 100, ..step(0, 0, 0) }]);
        let loads = program(&[step(20, 1, 0)]);
        let header = header(&[0; 40], 1514);
        assert!(matches_cut(&longer, &header, 40));
        assert!(matches_cut(&loads, &header, 21));
        assert!(!matches_cut(&loads, &header, 20));
    }

    #[test]
    fn a_program_of_zeros_matches_nothing() {
        assert!(!matches(&FilterProgram::default(), &header(&[], 60)));
    }

    #[test]
    fn the_longest_program_comes_to_its_end() {
        let mut steps = [FilterStep { jump_true: 0, ..step(0, 1, 0) }; MAX_FILTER_STEPS];
        for (index, step) in steps.iter_mut().enumerate() {
            step.jump_true = if index + 1 == MAX_FILTER_STEPS { ACCEPT } else { index as u8 + 1 };
        }
        assert!(matches(&program(&steps), &header(&[], 60)));
    }

    proptest! {
        /// With any contents of the map, evaluation ends and reads nothing outside.
        #[test]
        fn no_program_can_do_harm(bytes in proptest::collection::vec(any::<u8>(), size_of::<FilterProgram>()),
                                  frame in proptest::array::uniform32(any::<u8>()), len: u32) {
            let program = FilterProgram::read_from_bytes(&bytes).expect("every bit pattern is a program");
            matches(&program, &header(&frame, len));
        }
    }
}
