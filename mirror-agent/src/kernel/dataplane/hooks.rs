//! The tc hooks of a device: attaches podmirror's programs to them, and replaces, moves and detaches the programs.
//!
//! ```text
//! TCX (6.6 and newer)   bpf link, first in the chain, pinned; replaced in place by bpf_link_update     tcx ─► sys
//!                       netkit, packets that the pod sends: the same, in the netkit device's own chain
//! clsact (older)        cls_bpf filter with podmirror's handle at the lowest free priority             clsact
//!                       list of podmirror's filters and of the filters ahead of them                   filters
//! state of all hooks                                                                                   survey
//! ```
//!
//! A packet passes the TCX chain of a hook first, then its filters. If an earlier agent attached by the other method,
//! its program is detached first, so nothing is copied there for a moment. That is rare: only `--attach` or another
//! kernel changes the method, and pins do not survive a reboot.
//!
//! Inside a pod it is the same, but a thread enters the pod's network namespace to attach and to read. A link is pinned
//! on the node. A filter has no pin, so the agent creates an attachment marker before it attaches the filter, and
//! deletes the marker after it has detached the filter (`pins`). Root in the pod can remove a filter, and can put
//! programs and filters ahead of podmirror's. So `inside` polls these hooks. The kernel sends no event for a change of
//! a chain on the node either, so `chains` polls those.
//!
//! This module changes podmirror's own programs and filters only: it deletes no qdisc and moves no other program.

mod chains;
mod clsact;
mod filters;
mod inside;
mod survey;
pub(super) mod sys;
mod tcx;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use aya::{
    maps::MapInfo,
    programs::{ProgramError, SchedClassifier, TcAttachType, loaded_programs, tc::TcHandle},
};
use mirror_common::verdict::Hook;
use tokio::time::Instant;
use tracing::info;

pub use self::survey::{Attached, Survey};
use self::{
    chains::Chains,
    filters::{AllFilters, AtHook, Filters},
    inside::{Inside, Places, view},
    survey::{inside_by_link, on_node, seen_inside},
};
use super::{pins::Pins, programs::Programs};
use crate::{
    kernel::netns::{Namespaces, Netns},
    model::{Device, Hidden, IfIndex, NetnsId, Program},
};

/// The handle of podmirror's filters ("pmir"), so that other software does not replace or remove them by handle.
const HANDLE: TcHandle = TcHandle::new(0x706d, 0x6972);

/// The shortest interval between two polls of hooks that send no events.
const EVERY: Duration = Duration::from_secs(1);

/// The way in which a program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// TCX links.
    Tcx,
    /// Filters of the clsact qdisc.
    Clsact,
}

/// The configured way to attach the tap programs; `None`: TCX where the kernel has it (6.6 and newer), else clsact.
pub type AttachMode = Option<Method>;

impl Method {
    /// Returns the method for a mode. `None` queries the kernel.
    pub fn choose(mode: AttachMode) -> Self {
        mode.unwrap_or_else(|| if has_tcx() { Self::Tcx } else { Self::Clsact })
    }

    /// The name of the method in `status` and in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// Whether the kernel has TCX. Queries the loopback device, which has the index 1 in every namespace.
fn has_tcx() -> bool {
    SchedClassifier::query_tcx(1, TcAttachType::Ingress).is_ok()
}

const fn attach_type(which: Program) -> TcAttachType {
    match which.hook() {
        Hook::Ingress => TcAttachType::Ingress,
        Hook::Egress => TcAttachType::Egress,
    }
}

/// The network namespace of a hook: that of a pod, or `None` for the node's, in which the calling thread runs.
type Place = Option<Netns>;

/// Runs `work` in the namespace.
fn run<T: Send>(place: &Place, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    match place {
        None => work(),
        Some(netns) => netns.enter(work).context("cannot enter the pod's network namespace")?,
    }
}

/// The hooks of the node and inside its pods.
pub struct Hooks {
    pins: Pins,
    filters: Filters,
    namespaces: Namespaces,
    inside: Inside,
    chains: Chains,
    /// The hooks inside pods where this agent has tried to attach, and whether it succeeded.
    attached: BTreeMap<(Device, Program), bool>,
    /// The programs whose filters on the node may be detached; `None`: those of all versions of podmirror, which have
    /// the same handle and names.
    only: Option<BTreeSet<u32>>,
}

impl Hooks {
    /// Connects to netlink. `namespaces` has the paths of the pods' namespaces. Must be called within the runtime.
    pub fn new(pins: Pins, namespaces: Namespaces) -> anyhow::Result<Self> {
        let (filters, inside, chains) = (Filters::connect()?, Inside::default(), Chains::default());
        Ok(Self { pins, filters, namespaces, inside, chains, attached: BTreeMap::new(), only: None })
    }

    /// Opens a new netlink connection, in case the old one has ended.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        self.filters = Filters::connect()?;
        Ok(())
    }

    /// Reads the state of all hooks on the node and inside pods. Reads the filters of the node only if `filters` is
    /// true: that takes one or two requests for each device with a clsact or ingress qdisc.
    ///
    /// # Errors
    ///
    /// The pins or the qdiscs cannot be listed. A device that cannot be read does not fail the survey.
    pub async fn survey(&mut self, filters: bool) -> anyhow::Result<Survey> {
        let filters = if filters { self.filters.all().await? } else { AllFilters::default() };
        let pinned = self.pins.pinned_links().context("cannot list the pinned links")?;
        let pins: BTreeMap<_, _> = pinned
            .into_iter()
            .map(|(device, which)| ((device, which), self.pins.link(device, which)))
            .collect();
        let mut places = Places::new();
        for (device, which) in pins.keys().filter(|(device, _)| !device.is_on_node()) {
            places.entry(device.netns).or_default().0.insert((device.ifindex, *which));
        }
        let traces = self.pins.traces().context("cannot list the traces of filters")?;
        for (device, which) in &traces {
            let (hooks, hint) = places.entry(device.netns).or_default();
            hooks.insert((device.ifindex, *which));
            *hint = self.pins.trace(*device, *which);
        }
        self.attached.retain(|hook, _| pins.contains_key(hook) || traces.contains(hook));
        let inside = self.inside.see(&self.namespaces, places).await;
        let attached = self.attached.clone();
        let survey = Survey { pins, filters, traces, inside, attached };
        let of_node = survey.hooks().into_iter().filter(|(device, _)| device.is_on_node());
        self.chains.follow(&of_node.map(|(device, which)| (device.ifindex, which)).collect());
        Ok(survey)
    }

    /// The time of the next poll of hooks that send no events; `None` if podmirror has attached nothing there.
    pub fn look_due(&self) -> Option<Instant> {
        self.inside.due().into_iter().chain(self.chains.due()).min()
    }

    /// Discards the last view of a pod's namespace: it may be that of an earlier pod whose namespace had the same
    /// inode.
    pub fn doubt_inside(&mut self, netns: NetnsId) {
        self.inside.doubt(netns);
    }

    /// Polls the hooks inside one pod, or the chains of the node's hooks. Returns whether something has changed.
    pub async fn look(&mut self) -> bool {
        match (self.inside.due(), self.chains.due()) {
            (Some(inside), chains) if chains.is_none_or(|chains| inside <= chains) => {
                self.inside.look(&self.namespaces).await
            }
            _ => self.chains.look(),
        }
    }

    /// Returns podmirror's programs at one hook.
    ///
    /// # Errors
    ///
    /// The hook cannot be read.
    pub async fn attached(&self, device: Device, which: Program) -> anyhow::Result<Attached> {
        if device.is_on_node() {
            return self.attached_at(&None, device, which).await;
        }
        match self.place(device, which) {
            Ok(place) => self.attached_at(&place, device, which).await,
            Err(_) => Ok(inside_by_link(self.pins.pinned_link(device, which), device)),
        }
    }

    async fn attached_at(&self, place: &Place, device: Device, which: Program) -> anyhow::Result<Attached> {
        let pin = self.pins.pinned_link(device, which);
        let ifindex = device.ifindex;
        if let Some(netns) = place {
            let has_trace = self.pins.trace(device, which).is_some();
            let view = match view(netns, &[(ifindex, which)].into()).await {
                // A link can be judged without the filters, which may be too many to read.
                Err(_) if !has_trace => return Ok(inside_by_link(pin, device)),
                view => view?,
            };
            if let Some(error) = view.filters.unread.get(&ifindex).filter(|_| has_trace) {
                bail!("{error}");
            }
            return Ok(seen_inside(pin, &view, has_trace, ifindex, which));
        }
        on_node(pin, self.filters.of(ifindex, which).await?, ifindex, which)
    }

    /// Opens the namespace of a hook.
    fn place(&self, device: Device, which: Program) -> io::Result<Place> {
        if device.is_on_node() {
            return Ok(None);
        }
        let hint = self.pins.trace(device, which);
        self.namespaces.find(device.netns, hint.as_deref()).map(Some)
    }

    /// The name in `status` of the method by which a program of podmirror runs at a hook.
    pub fn word(method: Method, device: Device, which: Program) -> &'static str {
        let is_netkit = || tcx::is_netkit(device.ifindex, which).unwrap_or_default();
        if method == Method::Tcx && device.is_on_node() && is_netkit() { "netkit" } else { method.name() }
    }

    /// Returns the names of all programs, of any software, at both hooks of a device on the node.
    ///
    /// # Errors
    ///
    /// The hooks cannot be read.
    pub async fn programs_at(&self, ifindex: IfIndex) -> anyhow::Result<BTreeSet<String>> {
        let mut names = self.filters.names(ifindex).await?;
        for which in Program::TAP {
            names.extend(tcx::chain(ifindex, which)?.into_iter().map(|program| program.name));
        }
        Ok(names)
    }

    /// Attaches the program at a hook by `method`. Replaces podmirror's program there without a gap and without a
    /// second copy of a packet. A program that is attached by the other method is detached first.
    ///
    /// A missing egress hook of a tap is no error: [`Survey::look`] reports it as [`Hidden::NoHook`].
    ///
    /// # Errors
    ///
    /// The kernel refuses. Then the old program, the new one or none is attached.
    pub async fn attach(
        &mut self,
        programs: &mut Programs,
        method: Method,
        device: Device,
        which: Program,
    ) -> anyhow::Result<()> {
        if device.is_on_node() {
            let attached = self.attach_at(&None, programs, method, device, which).await;
            self.chains.touched((device.ifindex, which));
            return attached.map(drop);
        }
        self.inside.touched(device, which);
        self.attached.insert((device, which), false);
        let place = self.place(device, which)?;
        let is_attached = self.attach_at(&place, programs, method, device, which).await?;
        self.attached.insert((device, which), is_attached);
        Ok(())
    }

    /// Returns whether the hook exists, so that the program is attached.
    async fn attach_at(
        &self,
        place: &Place,
        programs: &mut Programs,
        method: Method,
        device: Device,
        which: Program,
    ) -> anyhow::Result<bool> {
        let Attached { filters: AtHook { ours, .. }, .. } = self.attached_at(place, device, which).await?;
        let pin = self.pins.link(device, which);
        let ifindex = device.ifindex;
        // Loaded here, because loading starts a thread. Started in the pod's namespace, it would keep the namespace
        // alive.
        let program = programs.of(device, which)?;
        match method {
            Method::Tcx => {
                run(place, || {
                    clsact::remove(&ours, ifindex, which)?;
                    tcx::attach(program, &pin, ifindex, which)
                })?;
                if !device.is_on_node() {
                    self.pins.erase_trace(device, which)?;
                }
            }
            Method::Clsact => {
                tcx::remove(&pin)?;
                if ours.is_empty() {
                    run(place, || clsact::add_qdisc(ifindex))?;
                    // A filter at the egress of an ingress qdisc would run at its ingress.
                    if which.hook() == Hook::Egress && self.is_ingress_only(place, ifindex).await? {
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
                run(place, || clsact::attach(program, &ours, ifindex, which))?;
            }
        }
        Ok(true)
    }

    async fn is_ingress_only(&self, place: &Place, ifindex: IfIndex) -> anyhow::Result<bool> {
        match place {
            None => self.filters.is_ingress_only(ifindex).await,
            Some(netns) => {
                let hook = [(ifindex, Program::TapEgress)].into();
                let ingress_only = view(netns, &hook).await?.filters.ingress_only;
                Ok(ingress_only.context("there are too many qdiscs beside it")?.contains(&ifindex))
            }
        }
    }

    /// Detaches podmirror's program from a hook, even if the device no longer exists. Returns whether there was one.
    ///
    /// # Errors
    ///
    /// A program cannot be read or removed. All others are removed.
    pub async fn detach(&mut self, device: Device, which: Program) -> anyhow::Result<bool> {
        let pin = self.pins.pinned_link(device, which);
        let unlinked = pin.as_deref().map_or(Ok(()), tcx::remove);
        let has_filters = if device.is_on_node() {
            self.chains.left((device.ifindex, which));
            let AtHook { mut ours, .. } = self.filters.of(device.ifindex, which).await?;
            if let Some(only) = &self.only {
                ours.retain(|filter| only.contains(&filter.program));
            }
            clsact::remove(&ours, device.ifindex, which)?;
            !ours.is_empty()
        } else {
            self.inside.left(device, which);
            self.attached.remove(&(device, which));
            self.remove_inside(device, which).await?
        };
        unlinked?;
        Ok(pin.is_some() || has_filters)
    }

    /// Detaches every program from the hooks on the node and inside pods, and continues after a failure. Returns the
    /// number of hooks that had a program, and the failures.
    ///
    /// # Errors
    ///
    /// The hooks cannot be listed.
    pub async fn detach_all(&mut self) -> anyhow::Result<(usize, Vec<anyhow::Error>)> {
        let (taps, others): (Vec<_>, Vec<_>) =
            self.survey(true).await?.hooks().into_iter().partition(|(_, program)| program.is_tap());
        let (mut detached, mut errors) = (0, Vec::new());
        // The taps first: without the second stage, a tap would go on and make uncut copies.
        for (device, program) in taps.into_iter().chain(others) {
            match self.detach(device, program).await {
                Ok(was_there) => detached += usize::from(was_there),
                Err(error) => errors.push(error),
            }
        }
        Ok((detached, errors))
    }

    /// Removes podmirror's filter from a hook inside a pod, then its attachment marker. Returns whether there was a
    /// marker.
    async fn remove_inside(&self, device: Device, which: Program) -> anyhow::Result<bool> {
        if self.pins.trace(device, which).is_none() {
            return Ok(false);
        }
        match self.place(device, which) {
            // The pod no longer exists, and neither does the filter.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            place => {
                let place = place.context("cannot open the pod's network namespace")?;
                let mut ours = match &place {
                    Some(netns) => inside::ours(netns, device.ifindex, which).await?,
                    None => Vec::new(),
                };
                // The kernel reuses the inodes of deleted namespaces, so this could be the filter of another node's
                // agent.
                let programs = programs_of(&self.pins)?;
                ours.retain(|filter| programs.contains(&filter.program));
                run(&place, || clsact::remove(&ours, device.ifindex, which))?;
            }
        }
        self.pins.erase_trace(device, which).context("cannot remove the trace of a filter")?;
        Ok(true)
    }
}

/// Ends the mirrors of agents of other versions, whose maps this version cannot read: detaches their programs and
/// removes their pins. Nothing is copied until this agent has attached its own programs. If a program cannot be
/// detached, its version's pins stay for the next attempt.
///
/// # Errors
///
/// The pins or hooks cannot be listed, or a program cannot be detached.
pub async fn end_other_versions(pins: &Pins, namespaces: &Namespaces) -> anyhow::Result<()> {
    for other in pins.other_versions()? {
        let dir = other.maps();
        let mut hooks = Hooks::new(other.clone(), namespaces.clone())?;
        hooks.only = Some(programs_of(&other)?);
        let (hooks, errors) = hooks.detach_all().await?;
        if let Some(error) = errors.into_iter().next() {
            return Err(
                error.context(format!("cannot end the mirror of another version in {}", dir.display()))
            );
        }
        other.remove_version()?;
        info!(hooks, dir = %dir.display(), "ended the mirror of another version of the agent");
    }
    Ok(())
}

/// Returns the ids of the loaded programs that use a pinned map. Only a filter with such a program is podmirror's.
///
/// # Errors
///
/// The pins cannot be listed, or a program cannot be read.
pub fn programs_of(pins: &Pins) -> anyhow::Result<BTreeSet<u32>> {
    let paths = match fs::read_dir(pins.maps()) {
        // `cleanup` does not create the directory.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => {
            entries.and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>())
        }
    };
    let paths = paths.context("cannot list the pinned maps")?;
    let is_file = |path: &PathBuf| !path.is_dir();
    let maps = paths.into_iter().filter(is_file).filter_map(|path| MapInfo::from_pin(path).ok());
    let maps: BTreeSet<_> = maps.map(|map| map.id()).collect();
    let mut users = BTreeSet::new();
    for program in loaded_programs() {
        let (ids, id) = match program.and_then(|program| Ok((program.map_ids()?, program.id()))) {
            // The program was unloaded in the meantime.
            Err(ProgramError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {
                continue;
            }
            read => read.context("cannot read a loaded program")?,
        };
        if ids.is_some_and(|ids| ids.iter().any(|map| maps.contains(map))) {
            users.insert(id);
        }
    }
    Ok(users)
}
