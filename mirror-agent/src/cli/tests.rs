//! The files that are made of the commands: tests compare them, or write them, as `cargo xtask gen` does.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod reference;

use std::{env, fs, path::Path};

use super::crds::crds;

/// Compares a file of the work tree with its text, or writes it.
fn compare(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    if env::var_os("PODMIRROR_WRITE_GENERATED").is_some() {
        fs::write(&path, text).unwrap();
    }
    assert!(fs::read_to_string(&path).unwrap() == text, "{file}: `cargo xtask gen` writes it");
}

#[test]
fn the_crds_of_the_chart_are_up_to_date() {
    compare("deploy/chart/files/crds.yaml", &crds().unwrap());
}
