//! The dataplane on the kernel: the programs of this agent, the pinned maps, the hooks.
//!
//! Carries out ops and reads back what stands. The programs live as long as a hook has them, so the mirror outlives
//! the agent; the next agent finds the maps by their pins and puts its programs in the old ones' places.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, anyhow};
use aya::{Ebpf, EbpfLoader, programs::SchedClassifier, util::nr_cpus};
use mirror_common::abi::{MAX_SESSIONS, SessionCounters};

use super::{
    Dataplane,
    clsact::AllFilters,
    hooks::{Attached, Hooks, Method},
    lock::PinsLock,
    maps::{Maps, TapEntry},
    pins::Pins,
};
use crate::{
    cli::AttachMode,
    model::{Actual, ActualTap, Device, HookState, Op, Program},
};

/// The eBPF object, built by the build script.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"));

/// Memory for the counters of all sessions, in bytes: each session has 512 bytes of them for every possible CPU.
const COUNTER_MEMORY: usize = 64 << 20;
/// Sessions that fit on any machine.
const MIN_SESSIONS: u32 = 64;

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
        let cpus = nr_cpus().map_err(|(what, error)| anyhow!("cannot read {what}: {error}"))?.get();
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(pins.maps())
            .map_max_entries("COUNTERS", sessions_that_fit(cpus))
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

/// How many sessions have counters in [`COUNTER_MEMORY`], on a machine with so many possible CPUs.
fn sessions_that_fit(cpus: u32) -> u32 {
    let bytes = cpus as usize * size_of::<SessionCounters>();
    u32::try_from(COUNTER_MEMORY / bytes).unwrap_or(u32::MAX).clamp(MIN_SESSIONS, MAX_SESSIONS)
}

fn program(ebpf: &mut Ebpf, which: Program) -> anyhow::Result<&mut SchedClassifier> {
    let name = which.name();
    let program = ebpf.program_mut(name).ok_or_else(|| anyhow!("the eBPF object has no program {name}"))?;
    Ok(program.try_into()?)
}

impl Dataplane for Bpf {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        self.maps.refresh()?;
        let mut entries = self.maps.taps()?;
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
        let on_node = taps.into_iter().map(|(ifindex, _)| Device::on_node(ifindex));
        let mut actual = Actual {
            targets: self.maps.targets(),
            ceilings: self.maps.ceilings()?,
            ..Actual::empty(self.maps.capacity())
        };
        for device in entries.keys().copied().chain(on_node).collect::<BTreeSet<_>>() {
            let entry = entries.remove(&device);
            let installed = ActualTap {
                ended: entry.as_ref().map(TapEntry::ended).unwrap_or_default(),
                tap: entry.map(|entry| entry.tap()),
                ingress: state(device.ifindex, Program::TapIngress),
                egress: state(device.ifindex, Program::TapEgress),
            };
            if installed != ActualTap::default() {
                actual.taps.insert(device, installed);
            }
        }
        for (ifindex, which) in deliver {
            let state = state(ifindex, which);
            if state != HookState::Absent {
                actual.deliver.insert(ifindex, state);
            }
        }
        Ok(actual)
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        match op {
            Op::SetTarget(name, target) => self.maps.set_target(name, target),
            Op::RemoveTarget(name) => self.maps.remove_target(name),
            Op::SetCeilings(ceilings) => self.maps.set_ceilings(ceilings),
            Op::PutTap(device, head) => self.maps.put_tap(*device, head),
            Op::RemoveTap(device) => self.maps.remove_tap(*device),
            Op::AddSession(device, mirror, session) => self.maps.add_session(*device, mirror, session),
            Op::ChangeSession(device, mirror, session) => self.maps.change_session(*device, mirror, session),
            Op::RemoveSession(device, mirror) => self.maps.remove_session(*device, mirror),
            Op::Attach(device, which) => {
                let program = program(&mut self.ebpf, *which)?;
                // The second stage, which few agents need.
                if program.fd().is_err() {
                    program.load().with_context(|| format!("cannot load {}", which.name()))?;
                }
                let attached = self.hooks.attach(program, self.method, device.ifindex, *which).await;
                attached.with_context(|| format!("{} at device {device}", which.name()))
            }
            Op::Detach(device, which) => self.hooks.detach(device.ifindex, *which).await.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of the documents.
    #[test]
    fn counters_take_no_more_memory_on_a_large_machine() {
        for (cpus, sessions) in [(1, 4096), (32, 4096), (128, 1024), (450, 291), (1024, 128), (8192, 64)] {
            assert_eq!(sessions_that_fit(cpus), sessions, "{cpus} CPUs");
        }
    }
}
