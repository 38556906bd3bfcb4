//! The tc hooks of a device: how our programs are attached to them, taken over, moved and detached.
//!
//! ```text
//! TCX (6.6 and newer)   bpf link, first in the chain, pinned; replaced in place by bpf_link_update     tcx ─► sys
//!                       for what a pod sends by a netkit device: the same, in the chain of that device
//! clsact (older)        cls_bpf filter under our handle at the lowest free priority; replaced under it  clsact
//!                       which filters there are, ours and those ahead of them                           filters
//! how all hooks stand                                                                                   survey
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
//! Inside a pod it is the same, in the pod's network namespace: a thread enters it to attach, and to look. A link is pinned
//! on the node. A filter has no pin, so a trace of it is left before it is attached, and goes after it (`pins`). Root in
//! the pod can remove a filter, and put programs and filters ahead of ours: `inside` looks again and again. No event tells
//! of a change of a chain on the node either: `chains` looks there.
//!
//! It touches what is ours and nothing else: no qdisc is ever deleted, no other program moved. Called by `bpf` for
//! the programs of this agent, and by `cleanup` and `status` without any.

mod chains;
mod clsact;
mod filters;
mod inside;
mod survey;
mod sys;
mod tcx;
#[cfg(test)]
mod tests;

mod versions;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use aya::programs::{SchedClassifier, TcAttachType, tc::TcHandle};
use mirror_common::verdict::Hook;
use tokio::time::Instant;

use self::{
    chains::Chains,
    filters::{AllFilters, AtHook, Filters},
    inside::{Inside, Places, view},
    survey::{inside_by_links, on_node, seen_inside},
    versions::Others,
};
pub use self::{
    survey::{Attached, Survey},
    versions::programs_of,
};
use super::{
    pins::{LinkPin, Pins},
    programs::Pair,
};
use crate::{
    model::{Device, Hidden, IfIndex, NetnsId, Program},
    netns::{Namespaces, Netns},
};

/// Handle of our filters ("pmir"): other software does not replace or remove them by handle.
const HANDLE: TcHandle = TcHandle::new(0x706d, 0x6972);

/// The shortest and the longest time between two looks at hooks of whose changes no event tells.
const EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The next look waits so many times as long as the last one has taken.
const REST: u32 = 100;

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

/// The network namespace of a hook: that of a pod, or the node's, which the thread is in.
struct Place(Option<Netns>);

impl Place {
    /// Does the work in the namespace.
    fn run<T: Send>(&self, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        match &self.0 {
            None => work(),
            Some(netns) => netns.enter(work).context("cannot enter the pod's network namespace")?,
        }
    }
}

/// The hooks of the node and inside its pods.
pub struct Hooks {
    pins: Pins,
    filters: Filters,
    namespaces: Namespaces,
    inside: Inside,
    chains: Chains,
    /// The hooks inside pods where this agent has tried to attach, and whether it has succeeded.
    attached: BTreeMap<(Device, Program), bool>,
}

impl Hooks {
    /// Attaches inside pods by these namespaces. Must be called within the runtime.
    pub fn new(pins: Pins, namespaces: Namespaces) -> anyhow::Result<Self> {
        let (filters, inside, chains) = (Filters::connect()?, Inside::default(), Chains::default());
        Ok(Self { pins, filters, namespaces, inside, chains, attached: BTreeMap::new() })
    }

    /// Connects again, should the connection have ended.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        self.filters = Filters::connect()?;
        Ok(())
    }

    /// The state of all hooks of the node and inside pods. The filters of the node are read only if `filters` is true: that
    /// takes a request or two for each device with a qdisc for filters.
    ///
    /// # Errors
    ///
    /// The pins or the qdiscs cannot be listed. A device that cannot be read makes nothing else fail.
    pub async fn survey(&mut self, filters: bool) -> anyhow::Result<Survey> {
        let filters = if filters { self.filters.all().await? } else { AllFilters::default() };
        let mut pins = BTreeMap::<_, Vec<_>>::new();
        let mut places = Places::new();
        for pin in self.pins.pinned_links().context("cannot list the pinned links")? {
            if !pin.device.is_on_node() {
                places.entry(pin.device.netns).or_default().0.insert((pin.device.ifindex, pin.program));
            }
            pins.entry((pin.device, pin.program)).or_default().push(pin);
        }
        let mut traces = BTreeSet::new();
        for trace in self.pins.traces().context("cannot list the traces of filters")? {
            let (hooks, hint) = places.entry(trace.device.netns).or_default();
            hooks.insert((trace.device.ifindex, trace.program));
            *hint = Some(trace.netns);
            traces.insert((trace.device, trace.program));
        }
        self.attached.retain(|hook, _| pins.contains_key(hook) || traces.contains(hook));
        let inside = self.inside.see(&self.namespaces, places).await;
        let attached = self.attached.clone();
        let survey = Survey { pins, filters, traces, inside, attached, others: Others::look(&self.pins)? };
        let of_node = survey.hooks().into_iter().filter(|(device, _)| device.is_on_node());
        self.chains.follow(&of_node.map(|(device, which)| (device.ifindex, which)).collect());
        Ok(survey)
    }

    /// When the hooks are to be looked at again of which no event tells; `None`: nothing of ours is there.
    pub fn look_due(&self) -> Option<Instant> {
        self.inside.due().into_iter().chain(self.chains.due()).min()
    }

    /// What was seen in a pod's namespace may be that of another pod, whose namespace had the same number.
    pub fn doubt_inside(&mut self, netns: NetnsId) {
        self.inside.doubt(netns);
    }

    /// Looks at the hooks inside one pod, or at the chains of the node's hooks. Returns whether something has changed.
    pub async fn look(&mut self) -> bool {
        match (self.inside.due(), self.chains.due()) {
            (Some(inside), chains) if chains.is_none_or(|chains| inside <= chains) => {
                self.inside.look(&self.namespaces).await
            }
            _ => self.chains.look(),
        }
    }

    /// Our programs at one hook.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub async fn attached(&self, device: Device, which: Program) -> anyhow::Result<Attached> {
        if device.is_on_node() {
            return self.attached_at(&Place(None), device, which).await;
        }
        match self.place(device, which) {
            Ok(place) => self.attached_at(&place, device, which).await,
            Err(_) => Ok(inside_by_links(self.links_at(device, which)?, device)),
        }
    }

    async fn attached_at(&self, place: &Place, device: Device, which: Program) -> anyhow::Result<Attached> {
        let mut pins = self.links_at(device, which)?;
        let ifindex = device.ifindex;
        if let Some(netns) = &place.0 {
            let has_trace = !self.pins.traces_at(device, which)?.is_empty();
            let view = match view(netns, &[(ifindex, which)].into()).await {
                // Links do without, however many filters there are.
                Err(_) if !has_trace => return Ok(inside_by_links(pins, device)),
                view => view?,
            };
            if let Some(error) = view.filters.unread.get(&ifindex).filter(|_| has_trace) {
                bail!("{error}");
            }
            return Ok(seen_inside(pins, &view, has_trace, ifindex, which));
        }
        let mut filters = self.filters.of(ifindex, which).await?;
        if which == Program::Deliver {
            Others::look(&self.pins)?.leave_out(&mut pins, &mut filters);
        }
        on_node(pins, filters, ifindex, which)
    }

    /// The namespace of a hook.
    fn place(&self, device: Device, which: Program) -> io::Result<Place> {
        if device.is_on_node() {
            return Ok(Place(None));
        }
        let traces = self.pins.traces_at(device, which)?;
        let hint = traces.first().map(|trace| trace.netns.as_path());
        self.namespaces.find(device.netns, hint).map(Some).map(Place)
    }

    /// The word for status, of a method by which a program of ours runs at a hook.
    pub fn word(method: Method, device: Device, which: Program) -> &'static str {
        let is_netkit = || tcx::is_netkit(device.ifindex, which).unwrap_or_default();
        if method == Method::Tcx && device.is_on_node() && is_netkit() { "netkit" } else { method.name() }
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
        &mut self,
        pair: &mut impl Pair,
        method: Method,
        device: Device,
        which: Program,
    ) -> anyhow::Result<()> {
        if device.is_on_node() {
            let attached = self.attach_at(&Place(None), pair, method, device, which).await;
            self.chains.touched((device.ifindex, which));
            return attached.map(drop);
        }
        self.inside.touched(device, which);
        self.attached.insert((device, which), false);
        let place = self.place(device, which)?;
        let is_attached = self.attach_at(&place, pair, method, device, which).await?;
        self.attached.insert((device, which), is_attached);
        Ok(())
    }

    /// Returns whether there is such a hook.
    async fn attach_at(
        &self,
        place: &Place,
        pair: &mut impl Pair,
        method: Method,
        device: Device,
        which: Program,
    ) -> anyhow::Result<bool> {
        let Attached { pins, filters: AtHook { ours, .. }, .. } =
            self.attached_at(place, device, which).await?;
        let own = self.pins.link(device, which);
        let ifindex = device.ifindex;
        // Loaded here: it starts a thread, which must not begin in the pod's namespace and keep that alive.
        pair.program()?;
        match method {
            Method::Tcx => {
                place.run(|| {
                    if ours.is_empty() {
                        return tcx::attach(pair.program()?, &pins, &own, ifindex, which);
                    }
                    let behind = clsact::attach(pair.behind()?, &ours, ifindex, which)?;
                    tcx::attach(pair.program()?, &pins, &own, ifindex, which)?;
                    clsact::remove(&[behind], ifindex, which)
                })?;
                if !device.is_on_node() {
                    self.pins.erase_traces(device, which)?;
                }
            }
            Method::Clsact => {
                if ours.is_empty() {
                    place.run(|| clsact::add_qdisc(ifindex))?;
                    // A filter at the egress of an ingress qdisc would run at its ingress.
                    if which.hook() == Hook::Egress && self.is_ingress_only(place, ifindex).await? {
                        remove_links(&pins)?;
                        return match which {
                            Program::Deliver | Program::Hub => Err(anyhow!("{}", Hidden::NoHook)),
                            Program::TapIngress | Program::TapEgress => Ok(false),
                        };
                    }
                }
                if !device.is_on_node() {
                    let netns = self.namespaces.path(device.netns).unwrap_or_default();
                    let left = self.pins.leave_trace(device, which, &netns);
                    left.context("cannot leave the trace of a filter")?;
                }
                place.run(|| {
                    if !tcx::take_over(pair.program()?, &pins, &own, ifindex, which)? {
                        return clsact::attach(pair.program()?, &ours, ifindex, which).map(drop);
                    }
                    let behind = clsact::attach(pair.behind()?, &ours, ifindex, which)?;
                    tcx::remove(&own)?;
                    clsact::attach(pair.program()?, &[behind], ifindex, which).map(drop)
                })?;
            }
        }
        Ok(true)
    }

    async fn is_ingress_only(&self, place: &Place, ifindex: IfIndex) -> anyhow::Result<bool> {
        match &place.0 {
            None => self.filters.is_ingress_only(ifindex).await,
            Some(netns) => {
                let hook = [(ifindex, Program::TapEgress)].into();
                Ok(view(netns, &hook).await?.filters.ingress_only.contains(&ifindex))
            }
        }
    }

    /// Removes our programs of every version from a hook, also when the device has gone. Returns whether there was one.
    ///
    /// # Errors
    ///
    /// A program cannot be read or removed. All others are removed.
    pub async fn detach(&mut self, device: Device, which: Program) -> anyhow::Result<bool> {
        let others = if which == Program::Deliver { Others::look(&self.pins)? } else { Others::default() };
        self.detach_but(&others, device, which).await
    }

    /// As [`Self::detach`], and also a second stage that the taps of another version may still need: for the end of
    /// the mirror, when those taps have been detached.
    ///
    /// # Errors
    ///
    /// As above.
    pub async fn detach_all(&mut self, device: Device, which: Program) -> anyhow::Result<bool> {
        self.detach_but(&Others::default(), device, which).await
    }

    async fn detach_but(&mut self, others: &Others, device: Device, which: Program) -> anyhow::Result<bool> {
        let mut filters = AtHook::default();
        let mut pins = self.links_at(device, which)?;
        others.leave_out(&mut pins, &mut filters);
        let unlinked = remove_links(&pins);
        if device.is_on_node() {
            self.chains.left((device.ifindex, which));
        }
        let has_filters = match device.is_on_node() {
            true => {
                filters = self.filters.of(device.ifindex, which).await?;
                others.leave_out(&mut Vec::new(), &mut filters);
                clsact::remove(&filters.ours, device.ifindex, which)?;
                !filters.ours.is_empty()
            }
            false => {
                self.inside.left(device, which);
                self.attached.remove(&(device, which));
                self.remove_inside(device, which).await?
            }
        };
        unlinked?;
        Ok(!pins.is_empty() || has_filters)
    }

    /// Removes our filter from a hook inside a pod, and then its trace. Returns whether there was a trace.
    async fn remove_inside(&self, device: Device, which: Program) -> anyhow::Result<bool> {
        if self.pins.traces_at(device, which)?.is_empty() {
            return Ok(false);
        }
        match self.place(device, which) {
            // The pod has gone, and the filter with it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            place => {
                let place = place.context("cannot open the pod's network namespace")?;
                let mut ours = match &place.0 {
                    Some(netns) => inside::ours(netns, device.ifindex, which).await?,
                    None => Vec::new(),
                };
                // Namespaces get the numbers of others that have gone: it could be the filter of another node's agent.
                let programs = Others::with_own(&self.pins)?;
                ours.retain(|filter| programs.have(filter.program));
                place.run(|| clsact::remove(&ours, device.ifindex, which))?;
            }
        }
        self.pins.erase_traces(device, which).context("cannot remove the trace of a filter")?;
        Ok(true)
    }
}

/// How long to wait between two looks, of which the last one has taken so long.
fn rest(took: Duration) -> Duration {
    (took * REST).clamp(EVERY.0, EVERY.1)
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
