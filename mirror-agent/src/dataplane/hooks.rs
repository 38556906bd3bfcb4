//! The two ways to attach a program to a tc hook: a TCX link, or a filter of the clsact qdisc.
//!
//! ```text
//! TCX (6.6 and newer)   bpf link, first in the chain, pinned; replaced in place by bpf_link_update
//! clsact (older)        cls_bpf filter under our handle at the lowest free priority; replaced under that handle
//! ```
//!
//! It touches what is ours and nothing else: no qdisc is ever deleted, no other program moved. Called by `bpf` for
//! the programs of this agent, and by `cleanup` without any.

use std::{collections::BTreeSet, fs, io, ops::RangeInclusive, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use aya::{
    maps::MapInfo,
    programs::{
        Link as _, LinkOrder, ProgramError, SchedClassifier, TcAttach, TcAttachType,
        links::{FdLink, PinnedLink},
        loaded_programs,
        tc::{self, NlOptions, SchedClassifierLink, TcHandle},
    },
};

use mirror_common::verdict::Hook;

use super::{
    clsact::{AllFilters, Filter, Filters},
    pins::Pins,
};
use crate::{
    cli::AttachMode,
    model::{HookState, IfIndex, Program},
};

/// Handle of our filters ("pmir"): no one else's replacement or removal by handle meets it.
pub const HANDLE: TcHandle = TcHandle::new(0x706d, 0x6972);
/// Priorities that are tried in turn: the first is taken where a filter of another kind or protocol has it.
const PRIORITIES: RangeInclusive<u16> = 1..=8;
/// The kernel detaches an unpinned link from a work queue: a matter of milliseconds.
const DETACH_DEADLINE: Duration = Duration::from_secs(2);

/// A way to attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// TCX links.
    Tcx,
    /// Filters of the clsact qdisc.
    Clsact,
}

impl Method {
    /// The method for a mode; `Auto` asks the kernel.
    pub fn choose(mode: AttachMode) -> Self {
        match mode {
            AttachMode::Tcx => Self::Tcx,
            AttachMode::Clsact => Self::Clsact,
            AttachMode::Auto if has_tcx() => Self::Tcx,
            AttachMode::Auto => Self::Clsact,
        }
    }

    /// The word for status and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// Whether the kernel has TCX: it answers a query about the loopback device, which is number 1 in every namespace.
fn has_tcx() -> bool {
    SchedClassifier::query_tcx(1, TcAttachType::Ingress).is_ok()
}

const fn attach_type(which: Program) -> TcAttachType {
    match which.hook() {
        Hook::Ingress => TcAttachType::Ingress,
        Hook::Egress => TcAttachType::Egress,
    }
}

/// What of ours stands at one hook.
#[derive(Debug, Clone, Default)]
pub struct Attached {
    /// A link is pinned for it.
    pub pinned: bool,
    /// Ids of the TCX programs there, where a link is pinned; empty where the kernel or the device is without.
    pub tcx: Vec<u32>,
    /// Our filters.
    pub filters: Vec<Filter>,
}

impl Attached {
    /// With what netlink and the pins have told already: asks for the TCX programs, where there may be one of ours.
    pub fn with(pinned: bool, filters: Vec<Filter>, ifindex: IfIndex, which: Program) -> Self {
        let tcx = match pinned {
            // No TCX in this kernel, or no such device any more: nothing can be attached there.
            true => SchedClassifier::query_tcx(ifindex.0, attach_type(which)).unwrap_or_default().1,
            false => Vec::new(),
        };
        Self { pinned, tcx: tcx.iter().map(|program| program.id()).collect(), filters }
    }

    /// The state for an agent whose program has the id `current`, if it is loaded, and that attaches by `method`.
    pub fn state(&self, method: Method, current: Option<u32>) -> HookState {
        let Self { pinned, tcx, filters } = self;
        match method {
            _ if !pinned && filters.is_empty() => HookState::Absent,
            Method::Tcx if *pinned && filters.is_empty() && current.is_some_and(|id| tcx.contains(&id)) => {
                HookState::Current
            }
            Method::Clsact
                if !pinned && matches!(filters[..], [filter] if Some(filter.program) == current) =>
            {
                HookState::Current
            }
            _ => HookState::Stale,
        }
    }

    /// The method by which a program of ours (one of `ours`, by id) runs there.
    pub fn method(&self, ours: &BTreeSet<u32>) -> Option<Method> {
        if self.pinned && self.tcx.iter().any(|id| ours.contains(id)) {
            Some(Method::Tcx)
        } else if self.filters.iter().any(|filter| ours.contains(&filter.program)) {
            Some(Method::Clsact)
        } else {
            None
        }
    }
}

/// The hooks of the node.
pub struct Hooks {
    pins: Pins,
    filters: Filters,
}

impl Hooks {
    /// Must be called within the runtime.
    pub fn new(pins: Pins) -> anyhow::Result<Self> {
        Ok(Self { pins, filters: Filters::connect()? })
    }

    /// Connects anew, should the connection have ended.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        self.filters = Filters::connect()?;
        Ok(())
    }

    /// What of ours stands at one hook.
    pub async fn attached(&self, ifindex: IfIndex, which: Program) -> anyhow::Result<Attached> {
        let filters = self.filters.of(ifindex, which).await?;
        Ok(Attached::with(self.pins.link(ifindex, which).exists(), filters, ifindex, which))
    }

    /// Attaches `program` at a hook by `method`, in the place of what of ours is there.
    pub async fn attach(
        &self,
        program: &mut SchedClassifier,
        method: Method,
        ifindex: IfIndex,
        which: Program,
    ) -> anyhow::Result<()> {
        let attached = self.attached(ifindex, which).await?;
        match method {
            Method::Tcx => {
                self.attach_tcx(program, ifindex, which)?;
                self.remove_filters(&attached.filters, ifindex, which)
            }
            Method::Clsact => {
                if attached.filters.is_empty() {
                    add_clsact(ifindex)?;
                    // A device has one of the two, and what is put at the egress of an ingress qdisc runs at its ingress.
                    if which.hook() == Hook::Egress && !self.filters.has_clsact(ifindex).await? {
                        bail!(
                            "the device has an ingress qdisc, which has no egress hook; replace it by clsact"
                        );
                    }
                }
                attach_clsact(program, &attached.filters, ifindex, which)?;
                self.remove_link(ifindex, which).await
            }
        }
    }

    /// Removes what of ours is at a hook, also when the device has gone. Whether there was anything.
    pub async fn detach(&self, ifindex: IfIndex, which: Program) -> anyhow::Result<bool> {
        let attached = self.attached(ifindex, which).await?;
        self.remove_filters(&attached.filters, ifindex, which)?;
        self.remove_link(ifindex, which).await?;
        Ok(attached.pinned || !attached.filters.is_empty())
    }

    fn attach_tcx(
        &self,
        program: &mut SchedClassifier,
        ifindex: IfIndex,
        which: Program,
    ) -> anyhow::Result<()> {
        let pin = self.pins.link(ifindex, which);
        if pin.exists() {
            match replace_tcx(program, &pin) {
                Ok(true) if runs_at(program, ifindex, which)? => return Ok(()),
                // Its device has gone, or has been moved to another namespace, and another one has the index now.
                Ok(_) => fs::remove_file(&pin)?,
                Err(error) => return Err(error.context("cannot put the new program in the old one's place")),
            }
        }
        let attach = TcAttach::Tcx { attach_type: attach_type(which), order: LinkOrder::first() };
        let id = program.attach(ifindex.0, attach).context("cannot attach a TCX link")?;
        let link = FdLink::try_from(program.take_link(id)?)?;
        link.pin(&pin).with_context(|| format!("cannot pin {}", pin.display()))?;
        Ok(())
    }

    /// Unpins the link and waits until the kernel has detached it.
    async fn remove_link(&self, ifindex: IfIndex, which: Program) -> anyhow::Result<()> {
        let pin = self.pins.link(ifindex, which);
        let program = match PinnedLink::from_pin(&pin) {
            Ok(link) => FdLink::from(link).info().map(|info| info.program_id()).unwrap_or_default(),
            Err(_) if !pin.exists() => return Ok(()),
            Err(error) => return Err(error).with_context(|| format!("cannot open {}", pin.display())),
        };
        fs::remove_file(&pin).with_context(|| format!("cannot remove {}", pin.display()))?;
        let still_there = || {
            SchedClassifier::query_tcx(ifindex.0, attach_type(which))
                .is_ok_and(|(_, programs)| programs.iter().any(|info| info.id() == program))
        };
        tokio::time::timeout(DETACH_DEADLINE, async {
            while still_there() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .map_err(|_| anyhow!("the kernel has not detached the link {}", pin.display()))
    }

    fn remove_filters(&self, filters: &[Filter], ifindex: IfIndex, which: Program) -> anyhow::Result<()> {
        for filter in filters {
            remove_filter(filter, ifindex, which)?;
        }
        Ok(())
    }

    /// The filters of ours, also where no pin and no map entry knows of them any more.
    pub async fn filters(&self) -> anyhow::Result<AllFilters> {
        self.filters.all().await
    }
}

/// Puts `program` in the place of the one that a pinned link runs; `false`: the link's device has gone.
fn replace_tcx(program: &mut SchedClassifier, pin: &std::path::Path) -> anyhow::Result<bool> {
    let link = SchedClassifierLink::try_from(FdLink::from(PinnedLink::from_pin(pin)?))?;
    match program.attach_to_link(link) {
        Ok(id) => {
            // The pin keeps the link; this handle of it may go.
            drop(program.take_link(id)?);
            Ok(true)
        }
        Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOLINK) => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether a program stands in the TCX chain of a device of this namespace.
fn runs_at(program: &SchedClassifier, ifindex: IfIndex, which: Program) -> anyhow::Result<bool> {
    let id = program.info()?.id();
    let (_, chain) = SchedClassifier::query_tcx(ifindex.0, attach_type(which))?;
    Ok(chain.iter().any(|info| info.id() == id))
}

fn attach_clsact(
    program: &mut SchedClassifier,
    filters: &[Filter],
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<()> {
    if let Some((filter, extra)) = filters.split_first() {
        let link = filter_link(filter, ifindex, which)?;
        let id = program.attach_to_link(link).context("cannot put the new program in the old one's place")?;
        // aya detaches a filter when its link is dropped; ours outlives the agent.
        std::mem::forget(program.take_link(id)?);
        return extra.iter().try_for_each(|filter| remove_filter(filter, ifindex, which));
    }
    let mut refused = None;
    for priority in PRIORITIES {
        let options = NlOptions { priority, handle: HANDLE, classid: None };
        match program.attach(ifindex.0, TcAttach::Netlink { parent: attach_type(which).into(), options }) {
            Ok(id) => {
                std::mem::forget(program.take_link(id)?);
                return Ok(());
            }
            // A filter of another kind or protocol has this priority.
            Err(ProgramError::TcError(tc::TcError::NetlinkError(error)))
                if matches!(os_error(&error), Some(libc::EINVAL | libc::ENOSPC)) =>
            {
                refused = Some(error);
            }
            Err(error) => return Err(error).context("cannot add a clsact filter"),
        }
    }
    Err(refused.map_or_else(|| anyhow!("no priority to try"), Into::into))
        .context("cannot add a clsact filter at any of our priorities")
}

/// Adds the clsact qdisc where it is missing.
fn add_clsact(ifindex: IfIndex) -> anyhow::Result<()> {
    match tc::qdisc_add_clsact(ifindex.0) {
        Ok(()) => Ok(()),
        Err(tc::TcError::NetlinkError(error)) if os_error(&error) == Some(libc::EEXIST) => Ok(()),
        Err(error) => Err(error).context("cannot add the clsact qdisc"),
    }
}

/// The number of the operating system's error behind another.
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

fn remove_filter(filter: &Filter, ifindex: IfIndex, which: Program) -> anyhow::Result<()> {
    let removed = match filter_link(filter, ifindex, which)?.detach() {
        // It has gone by itself, or with its device.
        Err(error) if matches!(os_error(&error), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
        removed => removed,
    };
    removed.with_context(|| format!("cannot remove the filter at priority {}", filter.priority))
}

fn filter_link(filter: &Filter, ifindex: IfIndex, which: Program) -> anyhow::Result<SchedClassifierLink> {
    let parent = attach_type(which).into();
    Ok(SchedClassifierLink::attached(ifindex.0, parent, filter.priority, HANDLE, None)?)
}

/// Ids of the loaded programs that use the map of taps with this pin: the proof that a filter is ours.
pub fn programs_of(pins: &Pins) -> anyhow::Result<BTreeSet<u32>> {
    let map = MapInfo::from_pin(pins.maps().join("TAPS")).context("cannot open the map of taps")?.id();
    let programs = loaded_programs()
        .filter_map(Result::ok)
        .filter(|program| program.map_ids().ok().flatten().is_some_and(|maps| maps.contains(&map)));
    Ok(programs.map(|program| program.id()).collect())
}
