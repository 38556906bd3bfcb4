//! The same text gives the same program in every process.
//!
//! The agent compares the installed programs with those that it compiles. If they differed without a reason, every new
//! agent would rewrite all filters.

use std::process::Command;

use mirror_core::filter::{
    compile,
    ebpf::{hash, translate},
};
use mirror_tests::{filters::expression, random::Random};

/// If this variable is set, the test prints its programs and does not compare them.
const PRINT: &str = "MIRROR_TEST_PRINT_PROGRAMS";
const TEXTS: usize = 300;

/// The hashes of the programs of many texts.
fn programs() -> String {
    let mut random = Random::new(1);
    let mut hashes = Vec::new();
    while hashes.len() < TEXTS {
        if let Ok(program) = compile(&expression(&mut random)) {
            hashes.push(hash(&translate(&program).unwrap()));
        }
    }
    format!("programs {hashes:x?}")
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
