//! Filters as programs of the kernel: on any packet, their results equal those of their classic BPF.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use mirror_agent::kernel::dataplane::filter_programs::{FilterProgram, LoadError};
use mirror_common::abi::{FILTER_DIFFERS, FILTER_MATCHES};
use mirror_core::filter::{
    classic::{Instruction, Program},
    compile,
    ebpf::{Insn, translate_with},
};
use mirror_tests::{
    filters::{expression, frame},
    random::{Random, from_environment},
};

/// A program in the kernel.
struct Loaded(FilterProgram);

impl Loaded {
    /// Loads a program. Panics with the verifier's log if the kernel refuses the program.
    #[track_caller]
    fn new(insns: &[Insn]) -> Self {
        Self(FilterProgram::load(insns).unwrap_or_else(|error| panic!("{error}")))
    }

    /// Runs the program on a packet, and returns its result. The kernel creates no packet that is shorter than an
    /// Ethernet header, or longer than a page.
    fn run(&self, packet: &[u8]) -> io::Result<u32> {
        const BPF_PROG_TEST_RUN: libc::c_int = 10;
        /// The beginning of the part of `union bpf_attr` for this command.
        #[repr(C)]
        struct TestRun {
            program: u32,
            answer: u32,
            data_size_in: u32,
            data_size_out: u32,
            data_in: u64,
            data_out: u64,
            repeat: u32,
            duration: u32,
        }
        let mut run = TestRun {
            program: self.0.as_fd().as_raw_fd().cast_unsigned(),
            answer: 0,
            data_size_in: packet.len() as u32,
            data_size_out: 0,
            data_in: packet.as_ptr().expose_provenance() as u64,
            data_out: 0,
            repeat: 1,
            duration: 0,
        };
        // SAFETY: the packet has the given number of bytes, and the kernel writes no memory except these attributes.
        let code =
            unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut run, size_of::<TestRun>()) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(run.answer) }
    }
}

/// A program in all its forms.
struct Forms {
    text: String,
    program: Program,
    direct: Loaded,
    helper: Loaded,
    tagged: Loaded,
}

impl Forms {
    #[track_caller]
    fn new(text: &str, program: Program) -> Self {
        let [direct, helper] = [true, false].map(|has_direct| translate_with(&program, has_direct).unwrap());
        Self {
            text: text.to_owned(),
            direct: Loaded::new(&direct),
            helper: Loaded::new(&helper),
            tagged: Loaded::new(&[&behind_tag(), direct.as_slice()].concat()),
            program,
        }
    }

    /// Compares the results for a packet. `None`: the kernel does not create such a packet.
    #[track_caller]
    fn answer(&self, packet: &[u8]) -> Option<bool> {
        let answer = self.direct.run(packet).ok()?;
        let expected = self.program.matches(packet, packet.len() as u32);
        let expect = |what, answer, expected| {
            let expected = if expected { FILTER_MATCHES } else { FILTER_DIFFERS };
            assert_eq!(
                answer,
                expected,
                "{what}: {:?}, {packet:02x?}\n{}",
                self.text,
                self.program.explain()
            );
        };
        expect("direct", answer, expected);
        expect("helper", self.helper.run(packet).unwrap(), expected);
        let mut with_tag = packet.to_vec();
        with_tag.splice(12..12, TAG);
        let of_tagged = self.program.matches(&with_tag, with_tag.len() as u32);
        expect("tagged", self.tagged.run(packet).unwrap(), of_tagged);
        Some(expected)
    }
}

/// VLAN 100 with a priority.
const TAG: [u8; 4] = [0x81, 0x00, 0x60, 0x64];

/// Instructions that move the tag into the packet's metadata, and continue with the context in `r1`.
fn behind_tag() -> Vec<Insn> {
    const SKB_VLAN_PUSH: i32 = 18;
    const MOVE: u8 = 0xb7;
    const COPY: u8 = 0xbf;
    let [a, b, c, d] = TAG;
    vec![
        Insn::new(COPY, 6, 1, 0, 0),
        Insn::new(MOVE, 2, 0, 0, u16::from_ne_bytes([a, b]).into()),
        Insn::new(MOVE, 3, 0, 0, u16::from_be_bytes([c, d]).into()),
        Insn::new(0x85, 0, 0, 0, SKB_VLAN_PUSH),
        Insn::new(COPY, 1, 6, 0, 0),
    ]
}

#[test]
fn random_filters_give_the_answers_of_their_classic_bpf() {
    let mut random = Random::from_clock("filters in the kernel");
    let (mut pairs, mut accepted, mut filters) = (0, 0, 0);
    for _ in 0..from_environment("MIRROR_FUZZ_PROGRAMS", || 400) {
        let text = expression(&mut random);
        let Ok(program) = compile(&text) else { continue };
        let forms = Forms::new(&text, program);
        filters += 1;
        for _ in 0..40 {
            if let Some(answer) = forms.answer(&frame(&mut random)) {
                pairs += 1;
                accepted += u32::from(answer);
            }
        }
    }
    assert!(
        filters > 0 && (pairs / 20..pairs).contains(&accepted),
        "{filters} filters, {pairs} pairs, {accepted} accepted"
    );
}

/// Instructions that libpcap's compiler does not emit: shifts that are too long, memory, the last instruction of a
/// kind.
#[test]
fn any_instruction_means_the_same() {
    const LOAD: u16 = 0x30;
    const TO_INDEX: u16 = 0x07;
    const TO_ACCUMULATOR: u16 = 0x87;
    let insn = |code, jt, jf, k| Instruction { code, jt, jf, k };
    let packet: Vec<u8> = (0..100_u8).map(|byte| byte.wrapping_mul(7)).collect();
    // Every operator on two registers, applied to two bytes of the packet.
    for code in [0x0c, 0x1c, 0x2c, 0x3c, 0x4c, 0x5c, 0x6c, 0x7c, 0x9c, 0xac] {
        for (left, right, constant) in [(20, 21, 13), (0, 30, 0), (30, 0, 0), (21, 3, 168), (40, 60, 24)] {
            let program = Program::new(vec![
                insn(LOAD, 0, 0, right),
                insn(TO_INDEX, 0, 0, 0),
                insn(0x03, 0, 0, 15),
                insn(LOAD, 0, 0, left),
                insn(code, 0, 0, 0),
                insn(0x61, 0, 0, 15),
                insn(0x0c, 0, 0, 0),
                insn(0x84, 0, 0, 0),
                insn(TO_INDEX, 0, 0, 0),
                insn(TO_ACCUMULATOR, 0, 0, 0),
                insn(0x35, 1, 0, constant),
                insn(0x16, 0, 0, 0),
                insn(0x06, 0, 0, 0),
            ]);
            Forms::new(&format!("{code:#x} of {left} and {right}"), program.unwrap()).answer(&packet);
        }
    }
    // A load with an index that is too large for a pointer.
    for index in [0, 90, 97, 0x7fff, 0x8000, 0xffff_fff0, u32::MAX] {
        for (code, offset) in [(0x40, 0), (0x48, 10), (0x50, 0x7000), (0x50, 3), (0x40, u32::MAX)] {
            let program =
                Program::new(vec![insn(0x01, 0, 0, index), insn(code, 0, 0, offset), insn(0x06, 0, 0, 1)]);
            Forms::new(&format!("{code:#x} at {index} and {offset}"), program.unwrap()).answer(&packet);
        }
    }
}

/// About as long as a text (1024 bytes) or a program (4096 instructions) can be, and hard for the verifier.
#[test]
fn the_longest_filters_are_loaded() {
    let list = |count: usize, one: fn(usize) -> String| (1..=count).map(one).collect::<Vec<_>>().join(" or ");
    for text in [
        format!("port {}", list(170, |port| port.to_string())),
        format!("not portrange {}", list(80, |port| format!("{}-{}", 3 * port, 3 * port + 1))),
        format!("host {}", list(70, |host| format!("10.0.0.{host}"))),
        format!("geneve and {}", list(40, |port| format!("tcp[{port}] > tcp[{port} + 1]"))),
        list(40, |port| format!("ip[ip[{port}]] = {port}")),
        list(9, |number| format!("protochain {number}")),
        list(90, |number| format!("vlan {number}")),
        list(30, |port| format!("(port {port} or vlan)")).replace(") or (", ") and ("),
        list(28, |number| format!("not geneve {number} and not port {number}")),
    ] {
        let forms = Forms::new(&text, compile(&text).unwrap());
        let mut random = Random::new(1);
        for _ in 0..100 {
            forms.answer(&frame(&mut random));
        }
    }
}

/// A program that reads an uninitialised register.
#[test]
fn a_program_that_the_kernel_refuses_says_why() {
    let insns = [Insn::new(0xbf, 0, 5, 0, 0), Insn::EXIT];
    let error = FilterProgram::load(&insns).unwrap_err();
    assert!(matches!(error, LoadError::Refused(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("the kernel refuses the filter") && text.contains("R5 !read_ok"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}
