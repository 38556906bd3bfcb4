//! The tap programs in the kernel, packet by packet: `BPF_PROG_TEST_RUN` on crafted packets and real devices.
//!
//! No agent: the tests write the maps themselves and read the counters back. Whether the pure decision is right is
//! tested in `mirror-common`; here, whether the programs do what it says.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bench;
mod btf;
mod choice;
mod cut;
mod golden;
mod limits;
mod packets;
mod random;
mod returns;
mod sessions;
mod stream;
mod verdicts;
