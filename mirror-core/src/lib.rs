//! The decisions of podmirror, as pure functions over plain data.
//!
//! ```text
//! pods, annotations, policy ─► select ─┐
//! devices of the node and its pods ────┴► Desired ─► plan ─► ops
//! what is installed ─────────────────────────────────┘
//! ```
//!
//! No clock, no environment, no I/O and no logging: the manifest names no crate that could. The agent brings the data
//! that it has read from the kernel and from Kubernetes, and carries the ops out.

pub mod annotations;
pub mod budget;
pub mod filter;
pub mod hidden;
pub mod mirror_iface;
pub mod model;
pub mod plan;
pub mod select;
pub mod settings;
pub mod status;
