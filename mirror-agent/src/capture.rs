//! Packets for programs on the node and for users of the packets API.
//!
//! ```text
//! control    agent: gives a ring to a program that asks on the socket, and a capture to reconcile
//! tail       program: asks, and reads the ring ─► recording: writes pcapng
//! readers    agent: does both for a server of the packets API (`apiserver`)
//! ```
//!
//! No packet passes through the loop: the program that asks for a ring reads it. Nothing here selects pods, which
//! `mirror_core::select` does, and nothing starts a loop.

pub mod control;
pub mod readers;
pub mod recording;
pub mod tail;
