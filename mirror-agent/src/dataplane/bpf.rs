//! The dataplane on the kernel: the programs of this agent, the pinned maps, the hooks.
//!
//! Carries out ops and reads back what stands. The programs live as long as a hook has them, so the mirror outlives
//! the agent; the next agent finds the maps by their pins and puts its programs in the old ones' places.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, anyhow};
use aya::{Ebpf, EbpfLoader, programs::SchedClassifier};

use super::{
    Dataplane,
    clsact::AllFilters,
    hooks::{Attached, Hooks, Method},
    maps::Maps,
    pins::{Pins, PinsLock},
};
use crate::{
    cli::AttachMode,
    model::{Actual, ActualTap, HookState, IfIndex, Op, Program},
};

/// The eBPF object, built by the build script.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"));

/// The dataplane.
pub struct Bpf {
    ebpf: Ebpf,
    maps: Maps,
    pins: Pins,
    hooks: Hooks,
    method: Method,
    /// Filters that no pin knows of have been looked for, and there was none.
    has_no_filters: bool,
    _lock: PinsLock,
}

impl Bpf {
    /// Loads the programs, with the maps that are pinned or new ones. Attaches nothing. Must be called within the
    /// runtime, with the pins' lock.
    pub fn load(pins: Pins, lock: PinsLock, mode: AttachMode) -> anyhow::Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(pins.maps())
            .load(OBJECT)
            .context("cannot load the eBPF object (are you root?)")?;
        for which in Program::TAP {
            let program = program(&mut ebpf, which)?;
            program.load().with_context(|| format!("cannot load {}", which.name()))?;
        }
        let maps = Maps::from_fn(|name| {
            ebpf.take_map(name).ok_or_else(|| anyhow!("the eBPF object has no map {name}"))
        })?;
        let hooks = Hooks::new(pins.clone())?;
        Ok(Self { ebpf, maps, pins, hooks, method: Method::choose(mode), has_no_filters: false, _lock: lock })
    }

    /// How programs are attached.
    pub fn method(&self) -> Method {
        self.method
    }
}

fn program(ebpf: &mut Ebpf, which: Program) -> anyhow::Result<&mut SchedClassifier> {
    let name = which.name();
    let program = ebpf.program_mut(name).ok_or_else(|| anyhow!("the eBPF object has no program {name}"))?;
    Ok(program.try_into()?)
}

impl Dataplane for Bpf {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        let entries = self.maps.taps()?;
        let target = self.maps.target()?;
        self.hooks.reconnect()?;
        let mut filters = AllFilters::new();
        // Filters outlive lost pins. Where they are not our way and none is left, there will be none.
        if self.method == Method::Clsact || !self.has_no_filters {
            filters = self.hooks.filters().await?;
            self.has_no_filters = filters.is_empty();
        }
        let pinned = self.pins.pinned_links().context("cannot list the pinned links")?;
        let pinned: BTreeSet<_> = pinned.into_iter().collect();
        let mut current = BTreeMap::new();
        for which in Program::ALL {
            current.insert(which, program(&mut self.ebpf, which)?.info().ok().map(|info| info.id()));
        }
        let state = |ifindex, which| {
            let hook = (ifindex, which);
            let filters = filters.get(&hook).cloned().unwrap_or_default();
            let attached = Attached::with(pinned.contains(&hook), filters, ifindex, which);
            attached.state(self.method, current.get(&which).copied().flatten())
        };
        let (deliver, taps): (BTreeSet<_>, BTreeSet<_>) =
            pinned.iter().chain(filters.keys()).partition(|(_, which)| *which == Program::Deliver);
        let devices = |hooks: BTreeSet<(IfIndex, Program)>| hooks.into_iter().map(|(ifindex, _)| ifindex);
        let mut actual = Actual::default();
        for ifindex in entries.keys().copied().chain(devices(taps)).collect::<BTreeSet<_>>() {
            let entry = entries.get(&ifindex);
            let ended = entry.map(|entry| self.maps.ended(entry)).transpose()?.flatten();
            let tap = entry.map(|entry| entry.tap.clone());
            let ingress = state(ifindex, Program::TapIngress);
            let egress = state(ifindex, Program::TapEgress);
            if tap.is_some() || ingress != HookState::Absent || egress != HookState::Absent {
                actual.taps.insert(ifindex, ActualTap { tap, ended, ingress, egress });
            }
        }
        for ifindex in devices(deliver) {
            let state = state(ifindex, Program::Deliver);
            if state != HookState::Absent {
                actual.deliver.insert(ifindex, state);
            }
        }
        actual.target = target;
        Ok(actual)
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        match op {
            Op::SetTarget(target) => self.maps.set_target(target),
            Op::PutTap(ifindex, tap) => self.maps.put_tap(*ifindex, tap),
            Op::RemoveTap(ifindex) => self.maps.remove_tap(*ifindex),
            Op::Attach(ifindex, which) => {
                let program = program(&mut self.ebpf, *which)?;
                // The second stage, which few agents need.
                if program.fd().is_err() {
                    program.load().with_context(|| format!("cannot load {}", which.name()))?;
                }
                let attached = self.hooks.attach(program, self.method, *ifindex, *which).await;
                attached.with_context(|| format!("{} at device {ifindex}", which.name()))
            }
            Op::Detach(ifindex, which) => self.hooks.detach(*ifindex, *which).await.map(drop),
        }
    }
}
