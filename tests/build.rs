//! Builds the eBPF objects for the tests: podmirror's own, and those that they are compared with.

#[path = "../xtask/src/ebpf.rs"]
#[expect(dead_code, reason = "what is for the tasks only")]
mod ebpf;
#[path = "../xtask/src/pins.rs"]
#[expect(dead_code, reason = "as above")]
mod pins;

use std::{
    env,
    path::{Path, PathBuf},
};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = root.canonicalize().unwrap_or(root);
    println!("cargo::rerun-if-changed=build.rs");
    ebpf::rerun_if_changed(&root);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    match ebpf::run(&root, ebpf::Action::Build, &out_dir) {
        Ok(objects) => {
            println!("cargo::rustc-env=PODMIRROR_EBPF={}", objects.mirror.display());
            println!("cargo::rustc-env=PODMIRROR_PROBES={}", objects.probes.display());
        }
        Err(why) => println!("cargo::error={why}"),
    }
}
