//! Captured packets in the form of capture files. The agent and the kubectl plugin share this crate. Pure, without
//! dependencies.
//!
//! ```text
//! frame: frames as the kernel has them ─► frames as on the wire
//! pcapng: frames ─► file        blocks: file ─► blocks
//! merge: packets of several files by time        combined: their interfaces and counters in one file
//! ```

pub mod blocks;
pub mod combined;
pub mod frame;
pub mod merge;
pub mod pcapng;
