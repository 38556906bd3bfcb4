//! The objects installed in the kernel: BPF maps, programs and tc hooks.
//!
//! The edge to BPF. This module carries out ops one by one and reads the installed state back. [`crate::plan`] decides
//! the ops and their order.

pub mod bpf;
#[cfg(test)]
pub(crate) mod fake;
pub mod filter_programs;
pub mod hooks;
mod ledger;
pub mod lock;
pub mod maps;
mod meters;
pub mod pins;
pub mod programs;
pub mod readout;
pub mod rings;
mod wire;

use std::future::Future;

use crate::model::{Actual, Op};

/// The kernel's side of the mirror, as the reconcile loop needs it.
pub trait Dataplane {
    /// The installed state, read back from the kernel.
    fn observe(&mut self) -> impl Future<Output = anyhow::Result<Actual>>;

    /// Carries out one op. After an error the state is that before the op or that after it, never between.
    fn apply(&mut self, op: &Op) -> impl Future<Output = anyhow::Result<()>>;
}
