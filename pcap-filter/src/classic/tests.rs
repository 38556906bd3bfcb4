//! Tests without libpcap: the length of programs, the checker, the evaluator, and the output of programs. The target
//! `filter` of the package `mirror-tests` compares the answers with libpcap's.
#![expect(clippy::expect_used, reason = "tests")]

use proptest::prelude::*;

use super::{
    super::compile, Condition, Instruction, MAX_INSTRUCTIONS, Operand, Operation, Operator, Program, Register,
};

fn many(qualifiers: &str, count: usize) -> String {
    let ids: Vec<String> = (1..=count).map(|id| id.to_string()).collect();
    format!("{qualifiers} {}", ids.join(" or "))
}

fn program(operations: &[Operation]) -> Option<Program> {
    Program::new(operations.iter().map(|operation| operation.encode()).collect())
}

/// The output of `tcpdump -d` for the same filters (libpcap 1.10.3).
#[test]
fn common_filters_are_as_short_as_those_of_libpcap() {
    for (text, theirs) in [
        ("icmp", 6),
        ("arp", 4),
        ("udp port 53", 20),
        ("port 53", 24),
        ("host 10.0.0.1", 14),
        ("tcp[tcpflags] & tcp-syn != 0", 11),
        ("tcp port 443 and not net 10.0.0.0/8", 26),
        ("tcp[((tcp[12:1] & 0xf0) >> 2):4] = 0x47455420", 16),
        ("vlan 100 and tcp port 80", 27),
        ("mpls 1024 and host 10.0.0.1", 17),
        ("ip[12:4] = ip[16:4]", 10),
        ("len - 14 > 100", 5),
        ("len > 1", 4),
    ] {
        let ours = compile(text).expect("a filter");
        assert!(ours.instructions().len() <= theirs, "{text}\n{}", ours.explain());
    }
}

#[test]
fn a_program_is_shown_as_tcpdump_shows_it() {
    let shown = compile("tcp[((tcp[12:1] & 0xf0) >> 2):4] = 0x47455420").expect("a filter").explain();
    let expected = "\
(000) ldh      [12]
(001) jeq      #0x800           jt 2\tjf 15
(002) ldb      [23]
(003) jeq      #0x6             jt 4\tjf 15
(004) ldh      [20]
(005) jset     #0x1fff          jt 15\tjf 6
(006) ldxb     4*([14]&0xf)
(007) ldb      [x + 26]
(008) and      #0xf0
(009) rsh      #2
(010) add      x
(011) tax
(012) ld       [x + 14]
(013) jeq      #0x47455420      jt 14\tjf 15
(014) ret      #262144
(015) ret      #0
";
    assert_eq!(shown, expected);
}

#[test]
fn any_byte_of_a_frame_can_be_asked_for() {
    let far = compile("ether[8000] = 7").expect("a filter");
    let mut frame = vec![0; 8001];
    frame[8000] = 7;
    assert!(far.matches(&frame, 8001));
    assert!(!far.matches(&frame[..8000], 8001));
}

/// `geneve or tcp`: on a packet that is not Geneve, `tcp` looks at the same place as without `geneve`.
#[test]
fn without_a_header_of_geneve_one_looks_outside() {
    let mut tcp = vec![0; 60];
    tcp[12] = 8;
    tcp[14] = 0x45;
    tcp[23] = 6;
    for (text, expected) in [
        ("geneve or tcp", true),
        ("not geneve and tcp", true),
        ("geneve and tcp", false),
        ("geneve or udp", false),
    ] {
        assert_eq!(compile(text).expect("a filter").matches(&tcp, 60), expected, "{text}");
    }
}

#[test]
fn a_chain_of_headers_is_followed() {
    let mut frame = vec![0; 14 + 40];
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    // Hop-by-hop options of 16 bytes, an authentication header of 12, a fragment, and UDP.
    frame[20] = 0;
    frame.extend([51, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend([44, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend([17, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend([0; 8]);
    let answers = |text: &str| compile(text).expect("a filter").matches(&frame, frame.len() as u32);
    assert!(answers("ip6 protochain \\udp"));
    assert!(answers("protochain 51"));
    assert!(!answers("ip6 protochain \\tcp"));
    assert!(!answers("ip protochain \\udp"));
    assert!(!answers("ip6 proto \\udp"), "without the chain, only a fragment header is looked behind");
}

#[test]
fn arithmetic_that_needs_much_memory_fits() {
    let sum = |open: &str, close: &str| {
        let fields: Vec<String> = (0..24).map(|at| format!("tcp[{at}]{close}")).collect();
        format!("{}{} = 1", open.repeat(24), fields.join(" - "))
    };
    assert!(compile(&sum("(", ")")).is_ok());
    let nested = format!("{}tcp[0]{} = 1", "tcp[1] - (".repeat(24), ")".repeat(24));
    assert!(compile(&nested).is_ok());
}

/// Jumps over more than 255 instructions take two steps.
#[test]
fn a_list_of_ports_is_as_long_as_the_text_allows() {
    let program = compile(&many("port", 200)).expect("a filter");
    let mut frame = vec![0; 60];
    frame[12] = 8;
    frame[14] = 0x45;
    frame[23] = 17;
    for (port, expected) in [(0_u16, false), (1, true), (99, true), (200, true), (201, false)] {
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        assert_eq!(program.matches(&frame, 60), expected, "{port}");
    }
}

#[test]
fn a_filter_that_is_too_large_says_how_large_it_may_be() {
    let error = compile(&many("ip6 protochain", 26)).expect_err("too large");
    assert!(error.reason.contains("4096 instructions"), "{error}");
}

#[test]
fn no_filter_keeps_the_compiler_busy() {
    let texts = [
        many("port", 100_000),
        "(".repeat(100_000),
        "(port 1 or host 10.0.0.1) and not vlan and ".repeat(60) + "ip",
        "-".repeat(400) + "1 < 2",
        "1 % ".repeat(400) + "1 < 2",
        format!("{}1{} = 1", "ip[".repeat(150), "]".repeat(150)),
    ];
    for text in texts {
        assert!(compile(&text).expect_err("it is too large").to_string().len() < 1_000_000);
    }
}

#[test]
fn what_a_kernel_would_refuse_is_refused() {
    use Operation::{Branch, Compute, Jump, Load, Read, Return, Write};
    let constant = Operand::Constant;
    let load = Load { size: 1, indexed: false, offset: 0 };
    assert!(program(&[load, Return(1)]).is_some());
    for (what, operations) in [
        ("nothing", vec![]),
        ("no end", vec![load]),
        ("a jump behind the end", vec![Jump(1), Return(1)]),
        ("a branch behind the end", vec![Branch(Condition::Equal, constant(0), 0, 1), Return(1)]),
        ("a division by zero", vec![Compute(Operator::Divide, constant(0)), Return(1)]),
        ("a shift by 32", vec![Compute(Operator::ShiftLeft, constant(32)), Return(1)]),
        ("memory that is not there", vec![Write(Register::Accumulator, 16), Return(1)]),
        ("memory that nothing has written", vec![Read(Register::Accumulator, 0), Return(1)]),
        (
            "memory that one way has not written",
            vec![
                Branch(Condition::Equal, constant(0), 1, 0),
                Write(Register::Index, 3),
                Read(Register::Index, 3),
                Return(1),
            ],
        ),
        ("too many", vec![Return(1); MAX_INSTRUCTIONS + 1]),
    ] {
        assert!(program(&operations).is_none(), "{what}");
    }
    assert!(Program::new(vec![Instruction { code: 0xffff, jt: 0, jf: 0, k: 0 }]).is_none());
}

#[test]
fn a_load_beyond_the_frame_and_a_division_by_zero_reject() {
    use Operation::{Compute, Load, LoadHeaderLength, Return, Set};
    let load = |size, indexed, offset| Load { size, indexed, offset };
    for (operations, expected) in [
        (vec![load(4, false, 0), Return(1)], true),
        (vec![load(4, false, 1), Return(1)], false),
        (vec![load(1, false, u32::MAX), Return(1)], false),
        (vec![Set(Register::Index, u32::MAX), load(1, true, 1), Return(1)], false),
        (vec![LoadHeaderLength(4), Return(1)], false),
        (vec![Compute(Operator::Divide, Operand::Index), Return(1)], false),
        (vec![Compute(Operator::Remainder, Operand::Index), Return(1)], false),
        (vec![Set(Register::Index, 1), Compute(Operator::Divide, Operand::Index), Return(1)], true),
    ] {
        let program = program(&operations).expect("a program");
        assert_eq!(program.matches(&[1, 2, 3, 4], 4), expected, "{}", program.explain());
    }
}

proptest! {
    /// Decoding reverses encoding, and nothing else can be decoded.
    #[test]
    fn an_instruction_is_decoded_as_it_was_encoded(code: u16, jt: u8, jf: u8, k: u32) {
        let instruction = Instruction { code, jt, jf, k };
        if let Some(operation) = instruction.decode() {
            prop_assert_eq!(operation.encode().code, code);
            prop_assert_eq!(operation.encode().decode(), Some(operation));
        }
    }

    /// Any program that passes the checker ends, and reads nothing outside the frame.
    #[test]
    fn no_program_can_do_harm(
        parts in proptest::collection::vec((0_u16..0xc0, 0_u8..4, 0_u8..4, 0_u32..40), 1..60),
        frame in proptest::collection::vec(any::<u8>(), 0..80),
    ) {
        let mut instructions: Vec<Instruction> =
            parts.iter().map(|&(code, jt, jf, k)| Instruction { code, jt, jf, k }).collect();
        instructions.retain(|instruction| instruction.decode().is_some());
        instructions.extend([Operation::Return(1).encode(); 45]);
        if let Some(program) = Program::new(instructions) {
            program.matches(&frame, frame.len() as u32);
        }
    }
}
