//! The common part of the eBPF programs and the agent: the wire types of the BPF maps and the decision about a packet.
//!
//! `no_std`, allocates nothing, reads no clock and does no I/O, so that the same code runs in the kernel and under
//! `cargo test`. Code about kernel objects is elsewhere: maps, `__sk_buff` and helpers are in `mirror-ebpf`, pods and
//! devices are in `mirror-agent`. Both call this crate.
#![no_std]
#![forbid(unsafe_code)]

pub mod abi;
pub mod counters;
pub mod decide;
pub mod facts;
pub mod identity;
pub mod limit;
pub mod marks;
pub mod packet;
pub mod sample;
pub mod stream;
pub mod tunnel;
pub mod verdict;
