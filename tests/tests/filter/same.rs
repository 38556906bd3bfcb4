//! The same text gives the same program in every process.
//!
//! The agent compares the programs of present taps with those that it compiles. If they differed without a reason,
//! every new agent would write all filters again.

use std::process::Command;

use mirror_core::filter::{
    classic, compile,
    ebpf::{Access, Ending, Insn, translate},
};
use mirror_tests::{filters::expression, random::Random};
use zerocopy::IntoBytes as _;

/// If this variable is set, the test prints its programs and does not compare them.
const PRINT: &str = "MIRROR_TEST_PRINT_PROGRAMS";
const TEXTS: usize = 300;

/// A hash of the programs of many texts (FNV-1a).
fn programs() -> String {
    let mut random = Random::new(1);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut compiled = 0;
    while compiled < TEXTS {
        let text = expression(&mut random);
        let (steps, classic) = (compile(&text), classic::compile(&text));
        let steps = steps.iter().flat_map(|steps| steps.as_bytes().to_vec());
        let ending = Ending { matches: 1, differs: 0, instructions: &[Insn::EXIT] };
        let insns = classic.iter().flat_map(|classic| translate(classic, Access::Direct, &ending).unwrap());
        compiled += usize::from(classic.is_ok());
        for byte in steps.chain(insns.flat_map(|insn| insn.as_bytes().to_vec())) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    format!("programs {hash:016x}")
}

#[test]
fn every_process_makes_the_same_programs() {
    let ours = programs();
    if std::env::var_os(PRINT).is_some() {
        println!("{ours}");
        return;
    }
    assert_eq!(programs(), ours, "once more in this process");
    for _ in 0..3 {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "same::every_process_makes_the_same_programs", "--nocapture"]).env(PRINT, "1");
        let output = again.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(&ours), "not {ours}: {text}");
    }
}
