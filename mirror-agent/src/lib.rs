//! The agent of podmirror: finds the selected pods' devices, attaches the tap programs to them, and reports the
//! results.
//!
//! ```text
//! sources  what pods and mirrors there are ─┐
//! kernel   what devices there are ──────────┴► select ─► plan ─► kernel  BPF maps and tc hooks
//!                                   (pure: mirror-core) └─ reconcile: the loop around it ─► report
//! ```
//!
//! The rooms. Each names only rooms above it (`xtask/src/layers.rs`):
//!
//! | room | contents |
//! | --- | --- |
//! | `util` | accept loops, pauses, rate limits |
//! | [`kernel`] | the edges to Linux: devices, BPF, network namespaces |
//! | [`sources`] | the edge to the pods, Mirrors and MirrorTargets: the Kubernetes API, or a file |
//! | [`report`] | the results of a round, and their readers: metrics, probes, `status`, Events, MirrorNode |
//! | [`reconcile`] | the loop |
//! | [`capture`] | packets for programs on the node and users of the packets API |
//! | [`controller`] | sums of the nodes' reports, once in a cluster |
//! | [`apiserver`] | the server of the packets API, on any node |
//! | [`cli`] | flags and commands, which connect the parts |
//!
//! A library so that the tests can reach the pure parts; `main.rs` only parses and calls `cli`.

pub mod apiserver;
pub mod capture;
pub mod cli;
pub mod controller;
pub mod kernel;
pub mod reconcile;
pub mod report;
pub mod sources;
mod util;

use mirror_core::{annotations, filter, mirror_iface, model, plan, select, settings};
