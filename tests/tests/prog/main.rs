//! The tap programs in the kernel, packet by packet: `BPF_PROG_TEST_RUN` on crafted packets and real devices.
//!
//! There is no agent: the tests write the maps and read the counters themselves. `mirror-common` tests the pure
//! decision; these tests check that the programs follow it.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bench;
mod btf;
mod choice;
mod cut;
mod filters;
mod golden;
mod limits;
mod packets;
mod random;
mod returns;
mod stream;
mod verdicts;
