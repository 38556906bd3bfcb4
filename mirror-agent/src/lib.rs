//! The agent of podmirror: finds the selected pods' devices, attaches the tap programs to them, and reports the
//! results.
//!
//! ```text
//! pods/   what pods there are ─┐
//! links/  what devices there are ─┴► select ─► plan ─► dataplane/  (BPF maps and tc hooks)
//!            (pure: select, plan, model)          └─ reconcile: the loop around it ─► report ─► admin, metrics
//! ```
//!
//! A library so that the tests can reach the pure parts; `main.rs` only parses and calls `cmd`.

mod accept;
pub mod admin;
pub mod apiserver;
mod backoff;
pub mod cli;
pub mod cmd;
pub mod control;
pub mod controller;
mod cpu;
pub mod dataplane;
pub mod events;
pub mod health;
pub mod links;
pub mod metrics;
pub mod mirror_node;
pub mod netns;
pub mod notes;
mod pace;
pub mod pods;
pub mod readers;
pub mod reconcile;
pub mod recording;
pub mod report;
mod told;
pub mod when_read;

use mirror_core::{annotations, filter, mirror_iface, model, plan, select, settings};
