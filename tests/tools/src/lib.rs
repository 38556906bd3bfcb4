//! Access of tests and tasks to the machine on which they run.
//!
//! Runs programs (`process`), finds and installs them (`programs`), unpacks Debian's packages into the cache (`apt`),
//! among them programs that read copies (`readers`), and writes container images (`archive`) and OCI layouts
//! (`layout`). `xtask` installs Rust toolchains.

#![expect(clippy::print_stdout, reason = "says what it installs, on a command line tool's output")]

pub mod apt;
pub mod arch;
pub mod archive;
#[path = "../../../xtask/src/ebpf.rs"]
#[expect(dead_code, reason = "what is for the build scripts and the tasks only")]
mod ebpf;
pub mod layout;
#[path = "../../../xtask/src/pins.rs"]
#[expect(dead_code, reason = "as above")]
mod pins;
pub mod process;
pub mod programs;
pub mod readers;

/// The oldest and the newest version of Kubernetes that the tests use.
pub const KUBERNETES: [&str; 2] = pins::KUBERNETES;
