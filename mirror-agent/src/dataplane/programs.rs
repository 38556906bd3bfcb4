//! The programs of this agent, loaded: what is attached to hooks.
//!
//! ```text
//! the programs      as they run at hooks
//! those of a pod    as they run inside one pod: they have to know its network namespace. The kernel takes some tenths of a
//!                   second to load them, so those for the next pod are loaded beforehand
//! ```
//!
//! Attaches nothing: `hooks` does.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, anyhow};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, Map, MapInfo},
    programs::SchedClassifier,
    util::nr_cpus,
};
use mirror_common::abi::{MAX_SESSIONS, SessionCounters};
use tracing::warn;

use super::pins::Pins;
use crate::model::{Device, NetnsId, Program};

/// The eBPF object, built by the build script.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"));

/// The names of variables of the programs; see `mirror-ebpf`.
const CALLS_FILTERS: &str = "CALLS_FILTERS";
const INSIDE: &str = "INSIDE";
/// The map with the only variable that is written after the programs are loaded: their network namespace.
const NETNS: &str = ".bss";

/// The name of the thread that loads programs for the next pod.
const LOADER: &str = "next-programs";

/// Memory for the counters of all sessions, in bytes: each session has 512 bytes of them for every possible CPU.
const COUNTER_MEMORY: usize = 64 << 20;
/// Sessions that fit on any machine.
const MIN_SESSIONS: u32 = 64;

/// The programs.
pub struct Programs {
    pins: Pins,
    ebpf: Ebpf,
    calls_filters: bool,
    /// Those of the pod that got the last tap inside: a tap has two programs.
    inside: Option<(NetnsId, Ebpf)>,
    /// Those for the next pod, which a thread loads.
    next: Option<JoinHandle<anyhow::Result<Ebpf>>>,
    /// The kernel's ids of the programs that this agent has loaded for hooks inside pods.
    inside_ids: BTreeMap<(Device, Program), u32>,
}

/// The program for one hook.
pub struct HookProgram<'a> {
    programs: &'a mut Programs,
    device: Device,
    which: Program,
}

impl Programs {
    /// Opens the object with the pinned maps, or with new ones, and loads the programs of the taps.
    ///
    /// # Errors
    ///
    /// The kernel refuses the object, a map or a program.
    pub fn load(pins: &Pins) -> anyhow::Result<Self> {
        match Self::try_load(pins, true) {
            Ok(programs) => Ok(programs),
            // Without a JIT compiler, and on AArch64 before Linux 6.0, the verifier refuses a tail call beside functions.
            Err(error) => match Self::try_load(pins, false) {
                Ok(programs) => {
                    warn!("this kernel runs no filters, so mirrors with a filter are refused: {error:#}");
                    Ok(programs)
                }
                Err(_) => Err(error),
            },
        }
    }

    fn try_load(pins: &Pins, calls_filters: bool) -> anyhow::Result<Self> {
        let ebpf = open(pins, calls_filters, false)?;
        let mut programs = Self {
            pins: pins.clone(),
            ebpf,
            calls_filters,
            inside: None,
            next: None,
            inside_ids: BTreeMap::new(),
        };
        for which in Program::TAP {
            loaded(&mut programs.ebpf, which)?;
        }
        programs.prepare_next();
        Ok(programs)
    }

    /// Whether the programs call those of filters.
    pub fn calls_filters(&self) -> bool {
        self.calls_filters
    }

    /// Takes a map out of the object.
    ///
    /// # Errors
    ///
    /// There is none of this name.
    pub fn take_map(&mut self, name: &str) -> anyhow::Result<Map> {
        self.ebpf.take_map(name).ok_or_else(|| anyhow!("the eBPF object has no map {name}"))
    }

    /// The kernel's id of a program; `None`: it is not loaded.
    pub fn id(&mut self, which: Program) -> anyhow::Result<Option<u32>> {
        Ok(program(&mut self.ebpf, which)?.info().ok().map(|info| info.id()))
    }

    /// The kernel's id of the program for a hook inside a pod; `None`: this agent has loaded none.
    pub fn id_inside(&self, device: Device, which: Program) -> Option<u32> {
        self.inside_ids.get(&(device, which)).copied()
    }

    /// Forgets the programs of all pods but these.
    pub fn keep_inside(&mut self, netns: &BTreeSet<NetnsId>) {
        self.inside_ids.retain(|(of, _), _| netns.contains(&of.netns));
        self.inside = self.inside.take().filter(|(of, _)| netns.contains(of));
    }

    /// The program for one hook of a device.
    pub fn of(&mut self, device: Device, which: Program) -> HookProgram<'_> {
        HookProgram { programs: self, device, which }
    }

    fn load_inside(&mut self, device: Device, which: Program) -> anyhow::Result<&mut SchedClassifier> {
        let netns = device.netns;
        let ebpf = match self.inside.take() {
            Some((of, ebpf)) if of == netns => ebpf,
            _ => self.next(netns)?,
        };
        let Self { inside, inside_ids, .. } = self;
        let (_, ebpf) = inside.insert((netns, ebpf));
        let program = loaded(ebpf, which)?;
        inside_ids.insert((device, which), program.info()?.id());
        Ok(program)
    }

    /// Programs for a pod with this namespace: those that were loaded beforehand, if the kernel has taken them.
    fn next(&mut self, netns: NetnsId) -> anyhow::Result<Ebpf> {
        let next = self.next.take().and_then(|thread| thread.join().ok()).and_then(Result::ok);
        let mut ebpf = next.map_or_else(|| open(&self.pins, self.calls_filters, true), Ok)?;
        put_into(&mut ebpf, netns)?;
        self.prepare_next();
        Ok(ebpf)
    }

    /// Begins to load the programs for the next pod: that of what reaches it, which most taps inside pods have alone.
    fn prepare_next(&mut self) {
        // Opened here, because that makes pins that are missing: a thread could do it while they are removed.
        let opened = open(&self.pins, self.calls_filters, true);
        self.next = opened.ok().and_then(|mut ebpf| {
            let load = move || {
                loaded(&mut ebpf, Program::TapIngress)?;
                Ok(ebpf)
            };
            thread::Builder::new().name(LOADER.to_owned()).spawn(load).ok()
        });
    }
}

impl HookProgram<'_> {
    /// The program, loaded.
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn get(&mut self) -> anyhow::Result<&mut SchedClassifier> {
        if self.device.is_on_node() {
            loaded(&mut self.programs.ebpf, self.which)
        } else {
            self.programs.load_inside(self.device, self.which)
        }
    }
}

/// Tells the programs of an object in which network namespace they will run. They are not attached yet.
fn put_into(ebpf: &mut Ebpf, netns: NetnsId) -> anyhow::Result<()> {
    let variable = ebpf.map_mut(NETNS).ok_or_else(|| anyhow!("the eBPF object has no map {NETNS}"))?;
    Ok(Array::<_, u32>::try_from(variable)?.set(0, &(netns.ino as u32), 0)?)
}

/// Opens the object, and with it the pinned maps. `inside`: for programs inside pods.
fn open(pins: &Pins, calls_filters: bool, inside: bool) -> anyhow::Result<Ebpf> {
    let cpus = nr_cpus().map_err(|(what, error)| anyhow!("cannot read {what}: {error}"))?.get();
    // A map that is pinned keeps the size that an earlier agent gave it.
    let pinned = MapInfo::from_pin(pins.maps().join("COUNTERS")).ok().map(|info| info.max_entries());
    EbpfLoader::new()
        .default_map_pin_directory(pins.maps())
        .map_max_entries("COUNTERS", pinned.unwrap_or_else(|| sessions_that_fit(cpus)))
        .override_global(CALLS_FILTERS, &u32::from(calls_filters), true)
        .override_global(INSIDE, &u32::from(inside), true)
        .load(OBJECT)
        .context("cannot load the eBPF object (are you root?)")
}

/// The number of sessions whose counters fit into [`COUNTER_MEMORY`], on a machine with so many possible CPUs.
fn sessions_that_fit(cpus: u32) -> u32 {
    let bytes = cpus as usize * size_of::<SessionCounters>();
    u32::try_from(COUNTER_MEMORY / bytes).unwrap_or(u32::MAX).clamp(MIN_SESSIONS, MAX_SESSIONS)
}

fn program(ebpf: &mut Ebpf, which: Program) -> anyhow::Result<&mut SchedClassifier> {
    let name = which.name();
    let program = ebpf.program_mut(name).ok_or_else(|| anyhow!("the eBPF object has no program {name}"))?;
    Ok(program.try_into()?)
}

/// The program, loaded now if it was not yet loaded: few agents need the second stage.
fn loaded(ebpf: &mut Ebpf, which: Program) -> anyhow::Result<&mut SchedClassifier> {
    let program = program(ebpf, which)?;
    if program.fd().is_err() {
        program.load().with_context(|| format!("cannot load {}", which.name()))?;
    }
    Ok(program)
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
