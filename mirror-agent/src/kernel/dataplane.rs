//! The objects installed in the kernel: BPF maps, programs and tc hooks.
//!
//! The interface to BPF. This module carries out ops one by one and reads the installed state back. [`crate::plan`]
//! decides the ops and their order.

pub mod bpf;
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

pub(crate) use self::meters::now_ns;
use crate::model::{Actual, Device, IfIndex, Op};

/// The number of packets and bytes that a session of a tap has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapCount {
    /// The number of the session.
    pub serial: u32,
    /// The sum over all verdicts, by direction.
    pub seen: [Count; Direction::COUNT],
}

/// The interface to the kernel's part of the mirror that the reconcile loop uses.
pub trait Dataplane {
    /// The installed state, read back from the kernel.
    fn observe(&mut self) -> impl Future<Output = anyhow::Result<Actual>>;

    /// The time of the next poll of hooks that send no events: those inside pods, and the chains on the node. `None` if
    /// podmirror has attached nothing there.
    fn look_due(&self) -> Option<Instant>;

    /// Polls these hooks. Returns whether one has changed, so that a round is necessary.
    fn look(&mut self) -> impl Future<Output = bool>;

    /// Carries out one op. After an error the state is either that before the op or that after it.
    fn apply(&mut self, op: &Op) -> impl Future<Output = anyhow::Result<()>>;

    /// Returns what one session of each of these taps has seen. Taps without a session are left out.
    fn seen(&mut self, devices: &[Device]) -> anyhow::Result<BTreeMap<Device, TapCount>>;

    /// Returns the names of all programs, of any software, at both tc hooks of a device on the node. The kernel keeps
    /// 15 bytes of a name.
    fn programs_at(&mut self, device: IfIndex) -> impl Future<Output = anyhow::Result<BTreeSet<String>>>;
}

/// Whether an op failed because its device, or the device's namespace, no longer exists.
pub fn says_gone(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| match cause.raw_os_error() {
        Some(code) => code == libc::ENODEV,
        None => cause.kind() == io::ErrorKind::NotFound,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) mod fake;
}
