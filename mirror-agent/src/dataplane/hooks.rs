//! The tc hooks of a device: how our programs are attached to them, taken over, moved and detached.
//!
//! ```text
//! TCX (6.6 and newer)   bpf link, first in the chain, pinned; replaced in place by bpf_link_update     tcx
//! clsact (older)        cls_bpf filter under our handle at the lowest free priority; replaced under it  clsact
//!                       which filters there are, ours and those ahead of them                           filters
//! ```
//!
//! A packet passes the TCX chain of a hook first, then its filters. Where an earlier agent attached in the other way,
//! the link and the filter both exist for a moment. The filter is then a program of the second set, which makes no copy
//! that the link's program ahead of it has made already. So each packet is copied by exactly one of them.
//!
//! ```text
//! filter to TCX:  filter := second set    attach the link         remove the filter
//! TCX to filter:  add a filter of the second set    detach the link         filter := the program
//! ```
//!
//! Inside a pod there are TCX links alone. The chain there is not read in each round: the link says whether it still runs.
//!
//! It touches what is ours and nothing else: no qdisc is ever deleted, no other program moved. Called by `bpf` for
//! the programs of this agent, and by `cleanup` and `status` without any.

mod clsact;
mod filters;
mod tcx;
#[cfg(test)]
mod tests;

mod versions;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, anyhow, bail};
use aya::programs::{SchedClassifier, TcAttachType, tc::TcHandle};
use mirror_common::verdict::Hook;
use mirror_core::hidden::{Ahead, Picture, blindness};

pub use self::versions::programs_of;
use self::{
    filters::{AllFilters, AtHook, Filters},
    tcx::InChain,
    versions::Others,
};
use super::{
    pins::{LinkPin, Pins},
    programs::Pair,
};
use crate::{
    model::{Device, Hidden, HookState, IfIndex, Program},
    netns::Namespaces,
};

/// Handle of our filters ("pmir"): other software does not replace or remove them by handle.
const HANDLE: TcHandle = TcHandle::new(0x706d, 0x6972);

/// How the tap programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// TCX where the kernel has it (6.6 and newer), else clsact.
    Auto,
    /// TCX links.
    Tcx,
    /// Filters of the clsact qdisc.
    Clsact,
}

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

/// Our programs at one hook, and the programs and filters of others ahead of them.
#[derive(Debug, Clone, Default)]
pub struct Attached {
    /// The pinned links for it, of all versions.
    pins: Vec<LinkPin>,
    /// The TCX chain, where something of ours may be.
    chain: Vec<InChain>,
    /// The filters.
    filters: AtHook,
    /// A clsact filter cannot be put here: the device has an ingress qdisc, and this is its egress.
    lacks_hook: bool,
    /// None of the links runs: other software has detached them, or their device is in another namespace now. Read for
    /// the second stage only: an entry of a target says that it cuts, also while no agent runs.
    is_dead: bool,
}

impl Attached {
    /// The state for an agent whose program has the id `current`, if it is loaded, and that attaches by `method`. The
    /// hook is `Current` only if it has exactly one link or filter of ours, which runs that program, is of this version
    /// and is attached by that method.
    fn state(&self, method: Method, current: Option<u32>) -> HookState {
        let Self { pins, chain, filters, .. } = self;
        let runs = |id| chain.iter().any(|program| program.id == id);
        match (method, &pins[..], &filters.ours[..]) {
            (_, [], []) => HookState::Absent,
            (Method::Tcx, [pin], []) if pin.is_of_this_version() && current.is_some_and(runs) => {
                HookState::Current
            }
            (Method::Clsact, [], [filter]) if Some(filter.program) == current => HookState::Current,
            (_, _, []) if self.is_dead => HookState::Dead,
            _ => HookState::Stale,
        }
    }

    /// The reason why packets are hidden from the program with the id `current`. `None` for a hook whose state is not
    /// `Current`.
    pub fn hidden(&self, method: Method, current: Option<u32>) -> Option<Hidden> {
        let program = |InChain { id, name }: &InChain| Ahead::Program { name: name.clone(), id: *id };
        let mut picture = Picture { lacks_hook: self.lacks_hook, ahead: Vec::new() };
        if self.state(method, current) == HookState::Current {
            let chain = self.chain.iter();
            picture.ahead = chain.take_while(|program| Some(program.id) != current).map(program).collect();
            picture.ahead.extend(self.filters.ahead.iter().cloned());
        }
        blindness(&picture)
    }

    /// The method by which a program of ours (one of `ours`, by id) runs there.
    pub fn method(&self, ours: &BTreeSet<u32>) -> Option<Method> {
        if !self.pins.is_empty() && self.chain.iter().any(|program| ours.contains(&program.id)) {
            Some(Method::Tcx)
        } else if self.filters.ours.iter().any(|filter| ours.contains(&filter.program)) {
            Some(Method::Clsact)
        } else {
            None
        }
    }
}

/// The state of all hooks of the node, read at one moment.
pub struct Survey {
    pins: BTreeMap<(Device, Program), Vec<LinkPin>>,
    filters: AllFilters,
    others: Others,
}

impl Survey {
    /// The hooks where something of ours may stand: a link is pinned for it, or a filter is there.
    pub fn hooks(&self) -> BTreeSet<(Device, Program)> {
        let filters = self.filters.hooks.keys().map(|(ifindex, which)| (Device::on_node(*ifindex), *which));
        self.pins.keys().copied().chain(filters).collect()
    }

    /// Whether no filter of ours was found, and every device could be read.
    pub fn has_no_filters(&self) -> bool {
        self.filters.hooks.is_empty() && self.filters.unread.is_empty()
    }

    /// The state of a hook, and the reason why packets are hidden there, for an agent whose program has the id
    /// `current` and that attaches by `method`. A hook that cannot be read is `Stale`: an attempt to attach or to
    /// detach there returns the error.
    pub fn look(
        &self,
        device: Device,
        which: Program,
        method: Method,
        current: Option<u32>,
    ) -> (HookState, Option<Hidden>) {
        let method = if device.is_on_node() { method } else { Method::Tcx };
        match self.at(device, which, method) {
            Ok(attached) => (attached.state(method, current), attached.hidden(method, current)),
            Err(_) => (HookState::Stale, None),
        }
    }

    fn at(&self, device: Device, which: Program, method: Method) -> anyhow::Result<Attached> {
        let hook = (device, which);
        let mut pins = self.pins.get(&hook).cloned().unwrap_or_default();
        if !device.is_on_node() {
            return Ok(inside(pins, device));
        }
        let ifindex = device.ifindex;
        if let Some(error) = self.filters.unread.get(&ifindex) {
            bail!("{error}");
        }
        let mut filters = self.filters.hooks.get(&(ifindex, which)).cloned().unwrap_or_default();
        if which == Program::Deliver {
            self.others.leave_out(&mut pins, &mut filters);
        }
        let lacks_hook = method == Method::Clsact
            && which.hook() == Hook::Egress
            && self.filters.ingress_only.contains(&ifindex);
        attached(pins, filters, lacks_hook, ifindex, which)
    }
}

/// Our programs at a hook inside a pod, as their links say. A link whose device has gone, or is elsewhere now, runs
/// nothing there.
fn inside(pins: Vec<LinkPin>, device: Device) -> Attached {
    let carried = pins.iter().filter_map(|pin| tcx::carried(&pin.path));
    let there = carried.filter(|carried| carried.ifindex == device.ifindex.0);
    let chain = there.map(|carried| InChain { id: carried.program, name: String::new() }).collect();
    Attached { pins, chain, ..Attached::default() }
}

/// Completes the information from netlink and the pins: reads the TCX chain, where a program of ours may be in it.
fn attached(
    pins: Vec<LinkPin>,
    mut filters: AtHook,
    lacks_hook: bool,
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<Attached> {
    let mut chain = match pins.is_empty() && filters.ours.is_empty() {
        true => Vec::new(),
        false => tcx::chain(ifindex, which)?,
    };
    leave_out_siblings(which, &mut chain, &mut filters);
    let is_dead = which == Program::Deliver && !pins.iter().any(|pin| tcx::runs(&pin.path, &chain));
    Ok(Attached { pins, chain, filters, lacks_hook, is_dead })
}

/// Leaves out our other program of the same hook. A collector's device can have both: the tap of the collector and the
/// second stage of the target. Neither ends the way of a packet that the other has to see, so neither hides one.
fn leave_out_siblings(which: Program, chain: &mut Vec<InChain>, filters: &mut AtHook) {
    let siblings = Program::ALL.into_iter().filter(|other| *other != which && other.hook() == which.hook());
    for sibling in siblings.map(Program::name) {
        chain.retain(|program| program.name != sibling);
        filters.ahead.retain(|ahead| !matches!(ahead, Ahead::Program { name, .. } if name == sibling));
    }
}

/// The hooks of the node.
pub struct Hooks {
    pins: Pins,
    filters: Filters,
    namespaces: Namespaces,
}

impl Hooks {
    /// Attaches inside pods by these namespaces. Must be called within the runtime.
    pub fn new(pins: Pins, namespaces: Namespaces) -> anyhow::Result<Self> {
        Ok(Self { pins, filters: Filters::connect()?, namespaces })
    }

    /// Connects again, should the connection have ended.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        self.filters = Filters::connect()?;
        Ok(())
    }

    /// The state of all hooks of the node. Filters are read only if `filters` is true: that takes a request or two for
    /// each device with a qdisc for filters.
    ///
    /// # Errors
    ///
    /// The pins or the qdiscs cannot be listed. A device that cannot be read makes nothing else fail.
    pub async fn survey(&self, filters: bool) -> anyhow::Result<Survey> {
        let filters = if filters { self.filters.all().await? } else { AllFilters::default() };
        let mut pins = BTreeMap::<_, Vec<_>>::new();
        for pin in self.pins.pinned_links().context("cannot list the pinned links")? {
            pins.entry((pin.device, pin.program)).or_default().push(pin);
        }
        Ok(Survey { pins, filters, others: Others::look(&self.pins)? })
    }

    /// Our programs at one hook.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub async fn attached(&self, device: Device, which: Program) -> anyhow::Result<Attached> {
        let mut pins = self.links_at(device, which)?;
        if !device.is_on_node() {
            return Ok(inside(pins, device));
        }
        let ifindex = device.ifindex;
        let mut filters = self.filters.of(ifindex, which).await?;
        if which == Program::Deliver {
            Others::look(&self.pins)?.leave_out(&mut pins, &mut filters);
        }
        attached(pins, filters, false, ifindex, which)
    }

    /// The names of the programs at both hooks of a device of the node, of all software.
    ///
    /// # Errors
    ///
    /// They cannot be read.
    pub async fn programs_at(&self, ifindex: IfIndex) -> anyhow::Result<BTreeSet<String>> {
        let mut names = self.filters.names(ifindex).await?;
        for which in Program::TAP {
            names.extend(tcx::chain(ifindex, which)?.into_iter().map(|program| program.name));
        }
        Ok(names)
    }

    fn links_at(&self, device: Device, which: Program) -> anyhow::Result<Vec<LinkPin>> {
        self.pins.links_at(device, which).context("cannot list the pinned links")
    }

    /// Attaches the program at a hook by `method`. It takes the place of our program there, of any version and attached
    /// by any method, without a gap and without a second copy of a packet.
    ///
    /// A missing egress hook of a tap is no error: [`Survey::look`] reports it as [`Hidden::NoHook`].
    ///
    /// # Errors
    ///
    /// The kernel refuses. Then the old program still runs, or the new one does, or both do.
    pub async fn attach(
        &self,
        pair: &mut impl Pair,
        method: Method,
        device: Device,
        which: Program,
    ) -> anyhow::Result<()> {
        let Attached { pins, filters: AtHook { ours, .. }, .. } = self.attached(device, which).await?;
        let own = self.pins.link(device, which);
        let ifindex = device.ifindex;
        if !device.is_on_node() {
            let program = pair.program()?;
            let attached =
                self.namespaces.enter(device.netns, || tcx::attach(program, &pins, &own, ifindex, which));
            return attached.context("cannot enter the pod's network namespace")?;
        }
        match method {
            Method::Tcx if ours.is_empty() => tcx::attach(pair.program()?, &pins, &own, ifindex, which),
            Method::Tcx => {
                let behind = clsact::attach(pair.behind()?, &ours, ifindex, which)?;
                tcx::attach(pair.program()?, &pins, &own, ifindex, which)?;
                clsact::remove(&[behind], ifindex, which)
            }
            Method::Clsact => {
                if ours.is_empty() {
                    clsact::add_qdisc(ifindex)?;
                    // A filter at the egress of an ingress qdisc would run at its ingress.
                    if which.hook() == Hook::Egress && self.filters.is_ingress_only(ifindex).await? {
                        remove_links(&pins)?;
                        return match which {
                            Program::Deliver | Program::Hub => Err(anyhow!("{}", Hidden::NoHook)),
                            Program::TapIngress | Program::TapEgress => Ok(()),
                        };
                    }
                }
                if !tcx::take_over(pair.program()?, &pins, &own, ifindex, which)? {
                    return clsact::attach(pair.program()?, &ours, ifindex, which).map(drop);
                }
                let behind = clsact::attach(pair.behind()?, &ours, ifindex, which)?;
                tcx::remove(&own)?;
                clsact::attach(pair.program()?, &[behind], ifindex, which).map(drop)
            }
        }
    }

    /// Removes our programs of every version from a hook, also when the device has gone. Returns whether there was one.
    ///
    /// # Errors
    ///
    /// A program cannot be read or removed. All others are removed.
    pub async fn detach(&self, device: Device, which: Program) -> anyhow::Result<bool> {
        let others = if which == Program::Deliver { Others::look(&self.pins)? } else { Others::default() };
        self.detach_but(&others, device, which).await
    }

    /// As [`Self::detach`], and also a second stage that the taps of another version may still need: for the end of
    /// the mirror, when those taps have been detached.
    ///
    /// # Errors
    ///
    /// As above.
    pub async fn detach_all(&self, device: Device, which: Program) -> anyhow::Result<bool> {
        self.detach_but(&Others::default(), device, which).await
    }

    async fn detach_but(&self, others: &Others, device: Device, which: Program) -> anyhow::Result<bool> {
        let mut filters = AtHook::default();
        let mut pins = self.links_at(device, which)?;
        others.leave_out(&mut pins, &mut filters);
        let unlinked = remove_links(&pins);
        if !device.is_on_node() {
            return unlinked.map(|()| !pins.is_empty());
        }
        let ifindex = device.ifindex;
        filters = self.filters.of(ifindex, which).await?;
        others.leave_out(&mut Vec::new(), &mut filters);
        clsact::remove(&filters.ours, ifindex, which)?;
        unlinked?;
        Ok(!pins.is_empty() || !filters.ours.is_empty())
    }
}

/// Detaches these links. Goes on after a failure.
fn remove_links(pins: &[LinkPin]) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    for pin in pins {
        let removed = tcx::remove(&pin.path);
        outcome = outcome.and(removed);
    }
    outcome
}
