//! The edges to Linux: the devices of the node, BPF, and network namespaces.
//!
//! ```text
//! reconcile ─┬► dataplane  BPF maps, programs and tc hooks ─┬─► netns
//!            └► links      devices and /proc ───────────────┘
//! when_read: a thread that looks for readers of mirror interfaces
//! ```
//!
//! `reconcile` uses [`links`] and [`dataplane`] through their traits. Nothing here decides which packets are copied,
//! and nothing knows Kubernetes or flags.

pub(crate) mod cpu;
pub mod dataplane;
pub mod links;
pub mod netns;
pub mod when_read;
