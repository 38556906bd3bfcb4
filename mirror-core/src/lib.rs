//! The decisions of podmirror, as pure functions over plain data.
//!
//! ```text
//! pods, annotations, policy ─► select ─┐
//! devices of the node and its pods ────┴► Desired ─► plan ─► ops
//! what is installed ─────────────────────────────────┘
//! ```
//!
//! Two modules decide nothing, and make bytes: `frame` makes frames as on a wire of frames as the kernel has them, and
//! `pcapng` makes capture files of these.
//!
//! No clock, no environment, no I/O and no logging: the manifest names no crate that could. The agent brings the data
//! that it has read from the kernel and from Kubernetes, and carries the ops out.

pub mod annotations;
pub mod budget;
pub mod collector;
pub mod coverage;
pub mod destination;
pub mod exit;
pub mod fair;
pub mod filter;
mod fnv;
pub mod frame;
pub mod hidden;
pub mod mirror_iface;
pub mod model;
pub mod networks;
pub mod pcapng;
pub mod plan;
pub mod select;
pub mod settings;
pub mod status;
pub mod targets;
pub mod tunnel;
