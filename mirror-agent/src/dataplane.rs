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
pub mod unread;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io,
};

use mirror_common::verdict::Direction;
use mirror_core::coverage::Count;
use tokio::time::Instant;

use crate::model::{Actual, Device, IfIndex, Op};

/// What a session of a tap has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapCount {
    /// The number of the session.
    pub serial: u32,
    /// The sum over all verdicts, by direction.
    pub seen: [Count; Direction::COUNT],
}

/// The kernel's side of the mirror, as the reconcile loop needs it.
pub trait Dataplane {
    /// The installed state, read back from the kernel.
    fn observe(&mut self) -> impl Future<Output = anyhow::Result<Actual>>;

    /// When the hooks are to be looked at again of which no event tells: those inside pods, and the chains on the node.
    /// `None`: nothing of ours is there.
    fn look_due(&self) -> Option<Instant>;

    /// Looks at such hooks. Returns whether something has changed, so that there must be a round.
    fn look(&mut self) -> impl Future<Output = bool>;

    /// Carries out one op. After an error the state is that before the op or that after it, never between.
    fn apply(&mut self, op: &Op) -> impl Future<Output = anyhow::Result<()>>;

    /// What a session of each of these taps has seen. Taps without a session are left out.
    fn seen(&mut self, devices: &[Device]) -> anyhow::Result<BTreeMap<Device, TapCount>>;

    /// The names of the programs at both tc hooks of a device of the node, of all software. The kernel keeps 15 bytes of a
    /// name.
    fn programs_at(&mut self, device: IfIndex) -> impl Future<Output = anyhow::Result<BTreeSet<String>>>;
}

/// Whether an op has failed because its device, or the namespace of that, is not there any more.
pub fn says_gone(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| match cause.raw_os_error() {
        Some(code) => code == libc::ENODEV,
        None => cause.kind() == io::ErrorKind::NotFound,
    })
}
