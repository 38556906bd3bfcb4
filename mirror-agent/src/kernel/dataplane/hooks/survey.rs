//! [`Survey`]: the state of all hooks at one moment, and [`Attached`]: the state of one hook.
//!
//! Evaluates what `Hooks` has read, and reads the TCX chains of the node's devices. Changes nothing. `bpf` uses it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::bail;
use mirror_common::verdict::Hook;
use mirror_core::hidden::{Ahead, at_exit, blindness};

use super::{
    Method,
    filters::{AllFilters, AtHook},
    inside::{Seen, View},
    tcx::{self, InChain},
};
use crate::model::{Device, Hidden, HookState, IfIndex, NetnsId, Program};

/// podmirror's programs at one hook, and the programs and filters of other software ahead of them.
#[derive(Debug, Clone, Default)]
pub struct Attached {
    /// The pin of podmirror's link.
    pub(super) pin: Option<PathBuf>,
    /// The TCX chain; empty if podmirror can have no program in it.
    pub(super) chain: Vec<InChain>,
    pub(super) filters: AtHook,
    /// A clsact filter cannot be attached here: the device has an ingress qdisc, and this is its egress.
    pub(super) lacks_hook: bool,
    /// podmirror's program should be attached and is not: other software has detached it, or its device is in another
    /// namespace now. A link on the node is judged so for the second stage only, because the entry of a target says
    /// that it cuts, also while no agent runs.
    pub(super) is_dead: bool,
    /// The hook is inside a pod, and its filter has no attachment marker.
    pub(super) is_untraced: bool,
    /// Programs, filters and queues that the pod has put at its relay device.
    pub(super) at_exit: Vec<Ahead>,
}

impl Attached {
    /// The state for an agent that attaches by `method` and whose loaded program has the id `current`. The hook is
    /// `Current` only if it has exactly one link or filter of podmirror, attached by that method, with that program.
    pub(super) fn state(&self, method: Method, current: Option<u32>) -> HookState {
        let Self { pin, chain, filters, is_dead, is_untraced, .. } = self;
        let runs = |id| chain.iter().any(|program| program.id == id);
        match (method, pin, &filters.ours[..]) {
            (_, None, []) if !is_dead => HookState::Absent,
            (Method::Tcx, Some(_), []) if current.is_some_and(runs) => HookState::Current,
            (Method::Clsact, None, [filter]) if Some(filter.program) == current && !is_untraced => {
                HookState::Current
            }
            (_, _, []) if *is_dead => HookState::Dead,
            _ => HookState::Stale,
        }
    }

    /// The reason why packets are hidden from the program with the id `current`; `None` if the state of the hook is not
    /// `Current`. A missing hook is reported in any state.
    pub fn hidden(&self, method: Method, current: Option<u32>) -> Option<Hidden> {
        if self.lacks_hook {
            return Some(Hidden::NoHook);
        }
        if self.state(method, current) != HookState::Current {
            return None;
        }
        let chain = self.chain.iter().take_while(|program| Some(program.id) != current);
        let ahead = chain.cloned().map(Ahead::from).chain(self.filters.ahead.iter().cloned());
        blindness(&ahead.collect::<Vec<_>>()).or_else(|| at_exit(&self.at_exit))
    }

    /// The method by which one of podmirror's programs (the ids `ours`) runs there.
    pub fn method(&self, ours: &BTreeSet<u32>) -> Option<Method> {
        if self.pin.is_some() && self.chain.iter().any(|program| ours.contains(&program.id)) {
            Some(Method::Tcx)
        } else if self.filters.ours.iter().any(|filter| ours.contains(&filter.program)) {
            Some(Method::Clsact)
        } else {
            None
        }
    }
}

/// The state of all hooks of the node and inside pods, read at one moment.
#[derive(Default)]
pub struct Survey {
    pub(super) pins: BTreeMap<(Device, Program), PathBuf>,
    /// The filters of the node.
    pub(super) filters: AllFilters,
    /// The hooks inside pods that have an attachment marker.
    pub(super) traces: BTreeSet<(Device, Program)>,
    pub(super) inside: BTreeMap<NetnsId, Seen>,
    /// The hooks inside pods where this agent has tried to attach, and whether it succeeded.
    pub(super) attached: BTreeMap<(Device, Program), bool>,
}

impl Survey {
    /// The hooks where podmirror may have a program: those with a pinned link, a filter or an attachment marker.
    pub fn hooks(&self) -> BTreeSet<(Device, Program)> {
        let filters = self.filters.hooks.keys().map(|(ifindex, which)| (Device::on_node(*ifindex), *which));
        self.pins.keys().copied().chain(filters).chain(self.traces.iter().copied()).collect()
    }

    /// Whether no filter of podmirror was found on the node, and every device could be read.
    pub fn has_no_filters(&self) -> bool {
        self.filters.hooks.is_empty() && self.filters.unread.is_empty()
    }

    /// The state of a hook, and the reason why packets are hidden there, for an agent that attaches by `method` and
    /// whose program has the id `current`.
    pub fn look(
        &self,
        device: Device,
        which: Program,
        method: Method,
        current: Option<u32>,
    ) -> (HookState, Option<Hidden>) {
        let Ok(attached) = self.at(device, which, method) else { return (HookState::Unknown, None) };
        let state = match (attached.state(method, current), self.attached.get(&(device, which))) {
            // Another filter has replaced the one that this agent has attached.
            (HookState::Stale, Some(true)) => HookState::Dead,
            // The agent has created the marker, and could not attach the filter.
            (HookState::Dead, Some(false)) => HookState::Stale,
            (state, _) => state,
        };
        (state, attached.hidden(method, current))
    }

    fn at(&self, device: Device, which: Program, method: Method) -> anyhow::Result<Attached> {
        let hook = (device, which);
        let pin = self.pins.get(&hook).cloned();
        let ifindex = device.ifindex;
        let has_trace = self.traces.contains(&hook);
        let view = match self.inside.get(&device.netns) {
            _ if device.is_on_node() => None,
            Some(Ok(view)) => Some(view),
            Some(Err(error)) if has_trace => bail!("{error}"),
            // Its links show whether they are still attached.
            Some(Err(_)) | None => return Ok(inside_by_link(pin, device)),
        };
        let filters = view.map_or(&self.filters, |view| &view.filters);
        // A link runs ahead of all filters, so its state does not depend on them.
        let needs_filters = view.is_none() || has_trace;
        if let Some(error) = filters.unread.get(&ifindex).filter(|_| needs_filters) {
            bail!("{error}");
        }
        let lacks_hook = method == Method::Clsact
            && which.hook() == Hook::Egress
            && filters.ingress_only.as_ref().is_some_and(|devices| devices.contains(&ifindex));
        let attached = match view {
            Some(view) => seen_inside(pin, view, has_trace, ifindex, which),
            None => {
                let filters = filters.hooks.get(&(ifindex, which)).cloned().unwrap_or_default();
                on_node(pin, filters, ifindex, which)?
            }
        };
        Ok(Attached { lacks_hook, ..attached })
    }
}

/// Returns podmirror's program at a hook inside a pod, judged by its link alone. A link whose device no longer exists,
/// or is in another namespace now, runs nothing there.
pub(super) fn inside_by_link(pin: Option<PathBuf>, device: Device) -> Attached {
    let link = pin.as_deref().and_then(tcx::link_info);
    let there = link.into_iter().filter(|link| link.ifindex == device.ifindex.0);
    let chain = there.map(|link| InChain { id: link.program, name: String::new() }).collect();
    Attached { pin, chain, ..Attached::default() }
}

/// Returns podmirror's programs at a hook inside a pod, from a view of the pod.
pub(super) fn seen_inside(
    pin: Option<PathBuf>,
    view: &View,
    has_trace: bool,
    ifindex: IfIndex,
    which: Program,
) -> Attached {
    let hook = (ifindex, which);
    let chain = view.chains.get(&hook).cloned().unwrap_or_default();
    let filters = view.filters.hooks.get(&hook).cloned().unwrap_or_default();
    let is_dead = has_trace && filters.ours.is_empty();
    let at_exit = view.at_exit.clone();
    Attached { pin, chain, filters, is_dead, is_untraced: !has_trace, at_exit, ..Attached::default() }
}

/// Adds the TCX chain to the data from netlink and the pins. Reads it only if podmirror can have a program in it.
pub(super) fn on_node(
    pin: Option<PathBuf>,
    mut filters: AtHook,
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<Attached> {
    let mut chain = match pin.is_none() && filters.ours.is_empty() {
        true => Vec::new(),
        false => tcx::chain(ifindex, which)?,
    };
    leave_out_siblings(which, &mut chain, &mut filters);
    let is_dead = which == Program::Deliver && pin.as_deref().is_some_and(|pin| !tcx::runs(pin, &chain));
    Ok(Attached { pin, chain, filters, is_dead, ..Attached::default() })
}

/// Removes podmirror's other program at the same hook from the lists. A collector's device can have both: the tap of
/// the collector and the second stage of the target. Both let packets go on to the other, so neither hides one.
pub(super) fn leave_out_siblings(which: Program, chain: &mut Vec<InChain>, filters: &mut AtHook) {
    let siblings = Program::ALL.into_iter().filter(|other| *other != which && other.hook() == which.hook());
    for sibling in siblings.map(Program::name) {
        chain.retain(|program| program.name != sibling);
        filters.ahead.retain(|ahead| !matches!(ahead, Ahead::Program { name, .. } if name == sibling));
    }
}
