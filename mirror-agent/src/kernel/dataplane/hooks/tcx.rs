//! TCX and netkit links: attaches them first in the chain, pins, updates and detaches them.
//!
//! A packet that a pod sends by a netkit device passes the chain of that device (`BPF_NETKIT_PEER`) before it reaches
//! the node side, and a CNI program in the chain may redirect it. So the tap is first in that chain, and is attached
//! through the device on the node side. Otherwise netkit works like TCX.
//!
//! The link of an earlier agent gets the new program in one step (`bpf_link_update`), so an upgrade neither misses a
//! packet nor copies one twice.

use std::{fs, io, path::Path};

use anyhow::Context as _;
use aya::programs::{
    LinkOrder, SchedClassifier, TcAttach,
    links::{FdLink, PinnedLink},
};
use mirror_common::verdict::Hook;
use mirror_core::hidden::Ahead;

use super::{
    attach_type,
    sys::{self, LinkInfo},
};
use crate::model::{IfIndex, Program};

/// The number of attempts to read a chain: a program can be unloaded between the list of ids and the read of its name.
const LOOKS: usize = 4;

/// A program in a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InChain {
    pub(super) id: u32,
    pub(super) name: String,
}

impl From<InChain> for Ahead {
    fn from(InChain { id, name }: InChain) -> Self {
        Self::Program { name, id }
    }
}

/// Returns the programs at a hook, in the order in which they run. The list is empty if the kernel has no TCX or the
/// device no longer exists.
pub(super) fn chain(ifindex: IfIndex, which: Program) -> anyhow::Result<Vec<InChain>> {
    let mut looks = 0;
    loop {
        looks += 1;
        let programs =
            ids(ifindex, which)?.into_iter().map(|id| Ok(InChain { id, name: sys::program_name(id)? }));
        match programs.collect::<io::Result<_>>() {
            Err(_) if looks < LOOKS => {}
            programs => {
                return programs.with_context(|| format!("cannot list the programs of device {ifindex}"));
            }
        }
    }
}

/// Returns the ids of the programs of a [`chain`].
pub(super) fn ids(ifindex: IfIndex, which: Program) -> anyhow::Result<Vec<u32>> {
    if which == Program::TapIngress
        && let Some(ids) = netkit_chain(ifindex)?
    {
        return Ok(ids);
    }
    match sys::query(ifindex, tcx_chain(which)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL)) => Ok(Vec::new()),
        ids => ids.with_context(|| format!("cannot list the programs of device {ifindex}")),
    }
}

const fn tcx_chain(which: Program) -> u32 {
    match which.hook() {
        Hook::Ingress => sys::TCX_INGRESS,
        Hook::Egress => sys::TCX_EGRESS,
    }
}

/// Attaches `program` at a hook: updates the link that is pinned at `pin`, if it still exists. Otherwise creates a new
/// link, first in the chain, and pins it there.
pub(super) fn attach(
    program: &mut SchedClassifier,
    pin: &Path,
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<()> {
    let replaced =
        replace(program, pin).with_context(|| format!("cannot replace the program at {}", pin.display()))?;
    // The link is elsewhere if its device was moved to another namespace, and another device has the index now.
    if replaced && runs_at(program, ifindex, which)? {
        return Ok(());
    }
    remove(pin)?;
    if is_netkit(ifindex, which)? {
        let link = sys::attach_first(program.fd()?, ifindex, sys::NETKIT_PEER)
            .context("cannot attach a netkit link")?;
        return sys::pin(&link, pin).with_context(|| format!("cannot pin {}", pin.display()));
    }
    let attach = TcAttach::Tcx { attach_type: attach_type(which), order: LinkOrder::first() };
    let id = program.attach(ifindex.0, attach).context("cannot attach a TCX link")?;
    let link = FdLink::try_from(program.take_link(id)?)?;
    link.pin(pin).with_context(|| format!("cannot pin {}", pin.display()))?;
    Ok(())
}

/// Whether the hook is the chain for packets that the pod sends by a netkit device.
pub(super) fn is_netkit(ifindex: IfIndex, which: Program) -> anyhow::Result<bool> {
    Ok(which == Program::TapIngress && netkit_chain(ifindex)?.is_some())
}

/// Returns the ids of the programs for packets that the pod sends, in order; `None` if the device is not the node side
/// of a netkit pair.
fn netkit_chain(ifindex: IfIndex) -> anyhow::Result<Option<Vec<u32>>> {
    match sys::query(ifindex, sys::NETKIT_PEER) {
        Ok(programs) => Ok(Some(programs)),
        // Another kind of device, the pod side, a device that no longer exists, or a kernel without netkit.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENXIO | libc::EACCES | libc::ENODEV | libc::EINVAL)
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error).with_context(|| format!("cannot list the programs of device {ifindex}")),
    }
}

/// Replaces the program of a pinned link by `program`. Returns `false` if there is no such pin, the link's device no
/// longer exists, or other software has detached the link.
fn replace(program: &SchedClassifier, pin: &Path) -> anyhow::Result<bool> {
    let program = program.fd()?;
    match sys::open(pin).and_then(|link| sys::update(&link, program)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOLINK)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the program and the device of a pinned link; `None` if the link no longer exists.
pub(super) fn link_info(pin: &Path) -> Option<LinkInfo> {
    sys::link_info(&sys::open(pin).ok()?).ok()
}

/// Whether the program of a pinned link is in a chain.
pub(super) fn runs(pin: &Path, chain: &[InChain]) -> bool {
    let link = PinnedLink::from_pin(pin).map(FdLink::from);
    let program = link.ok().and_then(|link| Some(link.info().ok()?.program_id()));
    chain.iter().any(|there| Some(there.id) == program)
}

/// Whether a program is in the chain of a device of this namespace.
fn runs_at(program: &SchedClassifier, ifindex: IfIndex, which: Program) -> anyhow::Result<bool> {
    let id = program.info()?.id();
    Ok(chain(ifindex, which)?.iter().any(|program| program.id == id))
}

/// Detaches a pinned link and removes its pin. Afterwards the program does not run there, even if another process holds
/// the link.
pub(super) fn remove(pin: &Path) -> anyhow::Result<()> {
    match sys::open(pin).and_then(|link| sys::detach(&link)) {
        Ok(()) => fs::remove_file(pin).with_context(|| format!("cannot remove {}", pin.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot detach the link {}", pin.display())),
    }
}
