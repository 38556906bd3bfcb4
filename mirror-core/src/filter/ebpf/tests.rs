//! Tests without a kernel: the form of programs. The test level `prog` loads them and compares their answers.
#![expect(clippy::expect_used, reason = "tests")]

use super::{
    super::classic::{Instruction, MAX_INSTRUCTIONS, Operation, Program},
    super::compile,
    Insn, hash, length, translate, translate_with,
};

const FILTERS: [&str; 8] = [
    "1 < 2",
    "len > 100",
    "tcp port 80 or 443",
    "vlan 7 and ip6 protochain 6",
    "geneve and tcp[13] & 2 != 0",
    "ether[ether[0] * 4:4] / tcp[20] << ip[1] > 5",
    "ether[40000] = 1 and ether[3000000000] = 1",
    "-ip[ip[2:2] - 1] % 3 = 1",
];

fn is_jump(insn: &Insn) -> bool {
    let (class, operation) = (insn.code & 0x07, insn.code & 0xf0);
    (class == 0x05 || class == 0x06) && operation != 0x80 && operation != 0x90
}

#[test]
fn every_instruction_is_reached_and_no_load_ends_the_program() {
    for text in FILTERS {
        let program = compile(text).expect("a filter");
        for has_direct in [true, false] {
            let insns = translate_with(&program, has_direct).expect("it is short");
            assert!(insns.ends_with(&[Insn::EXIT]), "{text}");
            let mut reached = vec![false; insns.len()];
            reached[0] = true;
            for (at, insn) in insns.iter().enumerate() {
                assert!(reached[at], "{text}: instruction {at} is not reached");
                // The class of the kernel's packet loads, which end the program if they fail.
                assert_ne!(insn.code & 0x07, 0, "{text}");
                if is_jump(insn) {
                    assert!(insn.offset >= 0, "{text}: a jump back");
                    reached[at + 1 + insn.offset as usize] = true;
                }
                if insn.code != 0x05 && *insn != Insn::EXIT {
                    reached[at + 1] = true;
                }
            }
        }
    }
}

#[test]
fn a_filter_that_sees_no_packet_reads_none() {
    let insns = translate(&compile("1 < 2").expect("a filter")).expect("it is short");
    assert!(insns.len() < 8, "{insns:?}");
}

#[test]
fn a_program_that_is_too_long_for_jumps_is_refused() {
    // A byte of the tag at each offset, with the longest loads.
    let load = Operation::Load { size: 4, indexed: true, offset: 0 }.encode();
    let mut instructions: Vec<Instruction> = vec![load; MAX_INSTRUCTIONS - 1];
    instructions.push(Operation::ReturnAccumulator.encode());
    let program = Program::new(instructions).expect("a program");
    assert_eq!(translate(&program), None);
}

#[test]
fn programs_that_differ_have_different_hashes() {
    let hashes = FILTERS.map(|text| {
        let program = compile(text).expect("a filter");
        let insns = translate(&program).expect("it is short");
        assert_eq!(length(hash(&insns)), insns.len());
        hash(&insns)
    });
    let unique: std::collections::BTreeSet<_> = hashes.iter().collect();
    assert_eq!(unique.len(), FILTERS.len());
    assert_eq!(hash(&[]), 0xcbf2_9ce4_8422_2325 << 20);
}
