//! Stories of a cluster: the agent as people install it, real pods, and a control plane that fails.
//!
//! `cargo xtask test --level cluster` runs them, one after the other. With the CNI plugin `ptp` it leaves out what does
//! not depend on how pods are wired.
#![expect(clippy::unwrap_used, reason = "tests")]

mod events;
mod installation;
mod lives;
mod many;
mod mirroring;
mod outages;

/// The node's address.
const NODE: &str = "10.245.0.1";
