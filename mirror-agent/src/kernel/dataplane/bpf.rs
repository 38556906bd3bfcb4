//! The [`Dataplane`] of the kernel: the loaded programs of this agent, the pinned maps, the hooks.
//!
//! Carries out ops and reads the installed state back. The programs live as long as they are attached to a hook, so the
//! mirror outlives the agent. The next agent finds the maps by their pins and replaces the old programs with its own.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail};
use mirror_common::{abi::MAX_FILTERS, verdict::Hook};
use tokio::time::Instant;

use super::{
    Dataplane, TapCount,
    filter_programs::LoadError,
    hooks::{AttachMode, Hooks, Method},
    ledger::Entry,
    lock::PinsLock,
    maps::Maps,
    pins::Pins,
    programs::Programs,
    rings::Rings,
    unread::Unread,
};
use crate::{
    kernel::netns::Namespaces,
    model::{Actual, ActualTap, Device, HookState, IfIndex, Op, Program, Session},
    settings::CaptureFilter,
};

/// The [`Dataplane`] of the kernel.
pub struct Bpf {
    programs: Programs,
    maps: Maps,
    hooks: Hooks,
    method: Method,
    rings: Rings,
    /// The filters that the kernel has refused, with the error. The same agent on the same kernel is always refused
    /// again.
    refused: BTreeMap<CaptureFilter, String>,
    /// The last survey found no podmirror filter on the node.
    has_no_filters: bool,
    _lock: PinsLock,
}

impl Bpf {
    /// Loads the programs, with the pinned maps or new ones. Attaches nothing. `namespaces` will have the paths of
    /// pods' namespaces. Must be called within the runtime, with the pins' lock.
    pub fn load(
        pins: Pins,
        lock: PinsLock,
        mode: AttachMode,
        namespaces: Namespaces,
    ) -> anyhow::Result<Self> {
        let mut programs = Programs::load(&pins)?;
        let calls_filters = programs.calls_filters();
        let mut maps = Maps::from_fn(|name| programs.take_map(name), calls_filters)?;
        maps.clear_leftovers()?;
        let refused = maps.refused_filters();
        Ok(Self {
            programs,
            maps,
            hooks: Hooks::new(pins, namespaces)?,
            method: Method::choose(mode),
            rings: Rings::default(),
            refused,
            has_no_filters: false,
            _lock: lock,
        })
    }

    /// The method by which programs are attached.
    pub fn method(&self) -> Method {
        self.method
    }

    /// The map that withholds copies from mirror interfaces without readers.
    pub fn unread(&self) -> Unread {
        self.maps.unread.clone()
    }

    /// The rings of the captures.
    pub fn rings(&self) -> Rings {
        self.rings.clone()
    }
}

impl Bpf {
    /// Records a filter that the kernel refuses. The next plan omits the sessions with this filter, and reports the
    /// reason.
    fn unless_refused(&mut self, session: &Session, put: anyhow::Result<()>) -> anyhow::Result<()> {
        if let Err(error) = &put
            && let Some(refused @ LoadError::Refused(_)) = error.downcast_ref()
            && let Some(filter) = &session.settings.filter
        {
            // Users can request any number of filters, one after the other.
            if self.refused.len() >= MAX_FILTERS as usize {
                self.refused.clear();
            }
            self.refused.insert(filter.clone(), refused.to_string());
        }
        put
    }

    /// Fails if copies may bypass the second stage, which has just been attached.
    async fn check_second_stage(&mut self, device: Device) -> anyhow::Result<()> {
        let current = self.programs.id(Program::Deliver)?;
        let attached = self.hooks.attached(device, Program::Deliver).await?;
        match attached.hidden(self.method, current) {
            Some(hidden) => bail!("copies cannot be truncated or addressed at the device {device}: {hidden}"),
            None => Ok(()),
        }
    }
}

impl Dataplane for Bpf {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        self.maps.refresh()?;
        self.maps.settle()?;
        self.maps.clear_unused_filters()?;
        self.hooks.reconnect()?;
        // Filters outlive lost pins, so they are searched for. If this agent attaches no filters and has found none,
        // there will be none.
        let with_filters = self.method == Method::Clsact || !self.has_no_filters;
        let survey = self.hooks.survey(with_filters).await?;
        self.has_no_filters = survey.has_no_filters();
        let mut current = BTreeMap::new();
        for which in Program::ALL {
            current.insert(which, self.programs.id(which)?);
        }
        let look = |device: Device, which| {
            let current = match device.is_on_node() {
                true => current.get(&which).copied().flatten(),
                false => self.programs.id_inside(device, which),
            };
            survey.look(device, which, self.method, current)
        };
        let (taps, others): (BTreeSet<_>, BTreeSet<_>) =
            survey.hooks().into_iter().partition(|(_, which)| which.is_tap());
        let hooked = taps.into_iter().map(|(device, _)| device);
        let mut actual = Actual {
            targets: self.maps.targets(),
            ceilings: self.maps.meters.ceilings()?,
            refused: self.refused.clone(),
            ..Actual::empty(self.maps.capacity())
        };
        for device in self.maps.taps().keys().copied().chain(hooked).collect::<BTreeSet<_>>() {
            let entry = self.maps.taps().get(&device);
            let (ingress, hidden_ingress) = look(device, Program::TapIngress);
            let (egress, hidden_egress) = look(device, Program::TapEgress);
            let hidden = [(Hook::Ingress, hidden_ingress), (Hook::Egress, hidden_egress)];
            let installed = ActualTap {
                ended: entry.map(|entry| self.maps.ended(entry)).transpose()?.unwrap_or_default(),
                tap: entry.map(Entry::tap),
                ingress,
                egress,
                hidden: hidden.into_iter().filter_map(|(hook, hidden)| Some((hook, hidden?))).collect(),
            };
            if installed != ActualTap::default() {
                actual.taps.insert(device, installed);
            }
        }
        for (device, which) in others {
            let (state, hidden) = look(device, which);
            match which {
                _ if state == HookState::Absent => {}
                Program::Hub => drop(actual.hubs.insert(device.ifindex, state)),
                _ => {
                    actual.deliver.insert(device.ifindex, state);
                    actual.passed_by.extend(hidden.map(|hidden| (device.ifindex, hidden)));
                }
            }
        }
        self.programs.keep_inside(&actual.taps.keys().map(|device| device.netns).collect());
        Ok(actual)
    }

    fn look_due(&self) -> Option<Instant> {
        self.hooks.look_due()
    }

    async fn look(&mut self) -> bool {
        self.hooks.look().await
    }

    fn seen(&mut self, devices: &[Device]) -> anyhow::Result<BTreeMap<Device, TapCount>> {
        self.maps.seen(devices)
    }

    async fn programs_at(&mut self, device: IfIndex) -> anyhow::Result<BTreeSet<String>> {
        self.hooks.programs_at(device).await
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        match op {
            Op::SetTarget(name, target) => self.maps.set_target(name, target, &self.rings),
            Op::RemoveTarget(name) => self.maps.remove_target(name),
            Op::SetCeilings(ceilings) => self.maps.meters.set_ceilings(ceilings),
            Op::PutTap(device, head) => {
                let sides = [Some(*device), head.pod_side()];
                sides.into_iter().flatten().for_each(|side| self.hooks.doubt_inside(side.netns));
                self.maps.put_tap(*device, head)
            }
            Op::RemoveTap(device) => self.maps.remove_tap(*device),
            Op::AddSession(device, mirror, session) => {
                let added = self.maps.add_session(*device, mirror, session);
                self.unless_refused(session, added)
            }
            Op::ChangeSession(device, mirror, session) => {
                let changed = self.maps.change_session(*device, mirror, session);
                self.unless_refused(session, changed)
            }
            Op::RemoveSession(device, mirror) => self.maps.remove_session(*device, mirror),
            Op::Attach(device, which) => {
                let attached = self.hooks.attach(&mut self.programs, self.method, *device, *which).await;
                attached.with_context(|| format!("{} at device {device}", which.name()))?;
                if *which == Program::Deliver {
                    self.check_second_stage(*device).await?;
                }
                Ok(())
            }
            Op::Detach(device, which) => self.hooks.detach(*device, *which).await.map(drop),
        }
    }
}
