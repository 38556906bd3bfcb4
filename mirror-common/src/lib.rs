//! What the eBPF programs and the agent share: the wire types of the BPF maps and the decision about a packet.
//!
//! `no_std`, allocates nothing, reads no clock and does no I/O, so that the same code runs in the kernel and
//! under `cargo test`. It is not the place for anything that knows a kernel object: maps, `__sk_buff` and helpers
//! are in `mirror-ebpf`, everything about pods and devices is in `mirror-agent`. Both call it.
#![no_std]
#![forbid(unsafe_code)]

pub mod abi;
pub mod decide;
pub mod filter;
pub mod limit;
pub mod marks;
pub mod packet;
pub mod sample;
pub mod verdict;
