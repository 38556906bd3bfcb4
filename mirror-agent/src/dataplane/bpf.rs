//! The dataplane on the kernel: the programs of this agent, the pinned maps, the hooks.
//!
//! Carries out ops and reads back what stands. The programs live as long as a hook has them, so the mirror outlives
//! the agent; the next agent finds the maps by their pins and puts its programs in the old ones' places.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use mirror_common::verdict::Hook;
use tracing::debug;

use super::{
    Dataplane,
    hooks::{AttachMode, Hooks, Method},
    maps::Maps,
    pins::{Pins, PinsLock},
    programs::Programs,
};
use crate::model::{Actual, ActualTap, HookState, IfIndex, Op, Program};

/// The dataplane.
pub struct Bpf {
    programs: Programs,
    maps: Maps,
    hooks: Hooks,
    method: Method,
    /// Filters that no pin knows of have been looked for, and there was none.
    has_no_filters: bool,
    /// Other versions of the agent of which something may still run.
    other_versions: BTreeSet<u32>,
    _lock: PinsLock,
}

impl Bpf {
    /// Loads the programs, with the maps that are pinned or new ones. Attaches nothing. Must be called within the
    /// runtime, with the pins' lock.
    pub fn load(pins: Pins, lock: PinsLock, mode: AttachMode) -> anyhow::Result<Self> {
        let mut programs = Programs::load(&pins)?;
        let maps = Maps::from_fn(|name| programs.take_map(name))?;
        Ok(Self {
            programs,
            maps,
            hooks: Hooks::new(pins)?,
            method: Method::choose(mode),
            has_no_filters: false,
            other_versions: BTreeSet::new(),
            _lock: lock,
        })
    }

    /// How programs are attached.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Removes what is left of versions of which nothing runs any more. What cannot be is tried again.
    async fn retire_versions(&mut self) {
        match self.hooks.retire_versions().await {
            Ok(left) => self.other_versions = left,
            Err(error) => debug!("the pins of other versions: {error:#}"),
        }
    }
}

impl Dataplane for Bpf {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        let entries = self.maps.taps()?;
        let target = self.maps.target()?;
        self.hooks.reconnect()?;
        // Filters outlive lost pins. Where they are not our way and none is left, there will be none.
        let with_filters = self.method == Method::Clsact || !self.has_no_filters;
        let survey = self.hooks.survey(with_filters).await?;
        self.has_no_filters = survey.has_no_filters();
        self.retire_versions().await;
        let mut current = BTreeMap::new();
        for which in Program::ALL {
            current.insert(which, self.programs.id(which)?);
        }
        let look =
            |ifindex, which| survey.look(ifindex, which, self.method, current.get(&which).copied().flatten());
        let (deliver, taps): (BTreeSet<_>, BTreeSet<_>) =
            survey.hooks().into_iter().partition(|(_, which)| *which == Program::Deliver);
        let devices = |hooks: BTreeSet<(IfIndex, Program)>| hooks.into_iter().map(|(ifindex, _)| ifindex);
        let mut actual = Actual::default();
        for ifindex in entries.keys().copied().chain(devices(taps)).collect::<BTreeSet<_>>() {
            let entry = entries.get(&ifindex);
            let ended = entry.map(|entry| self.maps.ended(entry)).transpose()?.flatten();
            let tap = entry.map(|entry| entry.tap.clone());
            let (ingress, hidden_ingress) = look(ifindex, Program::TapIngress);
            let (egress, hidden_egress) = look(ifindex, Program::TapEgress);
            let hidden = [(Hook::Ingress, hidden_ingress), (Hook::Egress, hidden_egress)];
            let hidden = hidden.into_iter().filter_map(|(hook, hidden)| Some((hook, hidden?))).collect();
            if tap.is_some() || ingress != HookState::Absent || egress != HookState::Absent {
                actual.taps.insert(ifindex, ActualTap { tap, ended, ingress, egress, hidden });
            }
        }
        for ifindex in devices(deliver) {
            let (state, _) = look(ifindex, Program::Deliver);
            if state != HookState::Absent {
                actual.deliver.insert(ifindex, state);
            }
        }
        actual.other_versions.clone_from(&self.other_versions);
        actual.target = target;
        Ok(actual)
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        match op {
            Op::SetTarget(target) => self.maps.set_target(target),
            Op::PutTap(ifindex, tap) => self.maps.put_tap(*ifindex, tap),
            Op::RemoveTap(ifindex) => self.maps.remove_tap(*ifindex),
            Op::Attach(ifindex, which) => {
                let pair = &mut self.programs.of(*which);
                let attached = self.hooks.attach(pair, self.method, *ifindex, *which).await;
                if !self.other_versions.is_empty() {
                    self.retire_versions().await;
                }
                attached.with_context(|| format!("{} at device {ifindex}", which.name()))
            }
            Op::Detach(ifindex, which) => {
                let detached = self.hooks.detach(*ifindex, *which).await;
                if !self.other_versions.is_empty() {
                    self.retire_versions().await;
                }
                detached.map(drop)
            }
        }
    }
}
