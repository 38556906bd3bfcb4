//! Filters of the clsact qdisc: adds, replaces and removes podmirror's filters.
//!
//! A filter is added with podmirror's handle at the lowest free priority. The kernel replaces a filter in one step:
//! each packet passes either the old program or the new one. `filters` lists the existing filters.

use std::{io, ops::RangeInclusive};

use anyhow::{Context as _, anyhow};
use aya::programs::{
    Link as _, ProgramError, SchedClassifier, TcAttach,
    tc::{self, NlOptions, SchedClassifierLink},
};

use super::{HANDLE, attach_type, filters::Filter};
use crate::model::{IfIndex, Program};

/// The priorities to try, in order. A filter of another kind or protocol can occupy one.
const PRIORITIES: RangeInclusive<u16> = 1..=8;

/// Attaches `program` at a hook: replaces the first of podmirror's `filters`, or uses a free priority if there is none.
/// Removes podmirror's other filters. The device must have the qdisc.
pub(super) fn attach(
    program: &mut SchedClassifier,
    filters: &[Filter],
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<()> {
    if let Some((filter, extra)) = filters.split_first() {
        let link = link(filter, ifindex, which)?;
        let attached = program.attach_to_link(link).context("cannot replace the program")?;
        // aya detaches a filter when its link is dropped. podmirror's filter has to outlive the agent.
        std::mem::forget(program.take_link(attached)?);
        return remove(extra, ifindex, which);
    }
    let mut refused = None;
    for priority in PRIORITIES {
        let options = NlOptions { priority, handle: HANDLE, classid: None };
        match program.attach(ifindex.0, TcAttach::Netlink { parent: attach_type(which).into(), options }) {
            Ok(attached) => {
                std::mem::forget(program.take_link(attached)?);
                return Ok(());
            }
            // A filter of another kind or protocol has this priority.
            Err(ProgramError::TcError(tc::TcError::NetlinkError(error)))
                if matches!(os_error(&error), Some(libc::EINVAL | libc::ENOSPC | libc::EEXIST)) =>
            {
                refused = Some(error);
            }
            Err(error) => return Err(error).context("cannot add a clsact filter"),
        }
    }
    Err(refused.map_or_else(|| anyhow!("no priority to try"), Into::into))
        .context("cannot add a clsact filter at any of podmirror's priorities")
}

/// Adds the clsact qdisc, unless the device has it or an ingress qdisc.
pub(super) fn add_qdisc(ifindex: IfIndex) -> anyhow::Result<()> {
    match tc::qdisc_add_clsact(ifindex.0) {
        Ok(()) => Ok(()),
        Err(tc::TcError::NetlinkError(error)) if os_error(&error) == Some(libc::EEXIST) => Ok(()),
        Err(error) => Err(error).context("cannot add the clsact qdisc"),
    }
}

/// Removes podmirror's filters.
pub(super) fn remove(filters: &[Filter], ifindex: IfIndex, which: Program) -> anyhow::Result<()> {
    for filter in filters {
        let removed = match link(filter, ifindex, which)?.detach() {
            // It was removed already, alone or with its device.
            Err(error) if matches!(os_error(&error), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
            removed => removed,
        };
        removed.with_context(|| format!("cannot remove the filter at priority {}", filter.priority))?;
    }
    Ok(())
}

fn link(filter: &Filter, ifindex: IfIndex, which: Program) -> anyhow::Result<SchedClassifierLink> {
    let parent = attach_type(which).into();
    Ok(SchedClassifierLink::attached(ifindex.0, parent, filter.priority, HANDLE, None)?)
}

/// The error number of the I/O error in the chain of causes.
fn os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.raw_os_error();
        }
        cause = error.source();
    }
    None
}
