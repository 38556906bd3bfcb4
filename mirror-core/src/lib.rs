//! The decisions of podmirror, as pure functions over plain data.
//!
//! ```text
//! pods, annotations, policy ─► select ─┐
//! devices of the node and its pods ────┴► Desired ─► plan ─► ops
//! installed state ───────────────────────────────────┘
//! ```
//!
//! No clock, no environment, no I/O and no logging: the manifest lists no crate that could. The agent passes in the
//! data that it reads from the kernel and from Kubernetes, and applies the ops.

pub mod annotations;
pub mod budget;
pub mod collector;
pub mod coverage;
pub mod destination;
pub mod exit;
pub mod fair;
pub mod filter;
mod fnv;
pub mod hidden;
pub mod mirror_iface;
pub mod model;
pub mod networks;
pub mod plan;
pub mod select;
pub mod settings;
pub mod status;
pub mod targets;
pub mod tunnel;
