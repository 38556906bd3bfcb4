//! The loaded eBPF programs of this agent. `hooks` attaches them.
//!
//! ```text
//! node side     one set of programs for all hooks on the node
//! pod side      one set for each pod, with the inode of its network namespace in a variable. The kernel needs a tenth
//!               of a second to load a program, so the one for the next pod is loaded in advance, but not while the
//!               agent starts: most nodes need none
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::{Array, Map, MapInfo},
    programs::SchedClassifier,
    util::nr_cpus,
};
use mirror_common::abi::{MAX_SESSIONS, SessionCounters};
use tracing::warn;

use super::{filter_programs, pins::Pins};
use crate::model::{Device, NetnsId, Program};

/// The eBPF object, built by the build script.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"));

/// The names of variables of the programs, declared in `mirror-ebpf`.
const CALLS_FILTERS: &str = "CALLS_FILTERS";
const INSIDE: &str = "INSIDE";
/// The map with the only variable that is written after the programs are loaded: the inode of their network namespace.
const NETNS: &str = ".bss";

/// The name of the thread that loads programs for the next pod.
const LOADER: &str = "next-programs";
/// The pause before this thread loads the first set, unless a pod needs it earlier.
const START: Duration = Duration::from_secs(30);

/// The memory for the counters of all sessions, in bytes. A session needs 528 bytes for every possible CPU.
const COUNTER_MEMORY: usize = 66 << 20;
/// The minimum number of sessions, on any machine.
const MIN_SESSIONS: u32 = 64;

/// The programs and the maps of the eBPF object.
pub struct Programs {
    pins: Pins,
    ebpf: Ebpf,
    calls_filters: bool,
    /// The programs for the pod that got the last tap inside: such a tap can need two programs.
    inside: Option<(NetnsId, Ebpf)>,
    /// The programs for the next pod, which a thread loads. The sender ends the thread's pause.
    next: Option<(Sender<()>, JoinHandle<anyhow::Result<Ebpf>>)>,
    /// The kernel's ids of the programs that this agent has loaded for hooks inside pods.
    inside_ids: BTreeMap<(Device, Program), u32>,
}

impl Programs {
    /// Opens the object with the pinned maps, or with new ones, and loads the programs of the taps.
    ///
    /// # Errors
    ///
    /// The kernel refuses the object, a map or a program.
    pub fn load(pins: &Pins) -> anyhow::Result<Self> {
        match Self::try_load(pins, true) {
            // Without a JIT compiler, and on AArch64 before Linux 6.0, the verifier refuses a tail call in a program
            // with functions.
            Err(error) if is_refused(&error) => match Self::try_load(pins, false) {
                Ok(programs) => {
                    warn!("this kernel runs no filters, so mirrors with a filter are refused: {error:#}");
                    Ok(programs)
                }
                Err(_) => Err(error),
            },
            loaded => loaded,
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
        programs.prepare_next(START);
        Ok(programs)
    }

    /// Whether the tap programs call the programs of filters.
    pub fn calls_filters(&self) -> bool {
        self.calls_filters
    }

    /// Takes a map out of the object.
    ///
    /// # Errors
    ///
    /// The object has no map of this name.
    pub fn take_map(&mut self, name: &str) -> anyhow::Result<Map> {
        self.ebpf.take_map(name).ok_or_else(|| anyhow!("the eBPF object has no map {name}"))
    }

    /// Returns the kernel's id of a program; `None` if it is not loaded.
    pub fn id(&mut self, which: Program) -> anyhow::Result<Option<u32>> {
        Ok(program(&mut self.ebpf, which)?.info().ok().map(|info| info.id()))
    }

    /// Returns the kernel's id of the program for a hook inside a pod; `None` if this agent has loaded none.
    pub fn id_inside(&self, device: Device, which: Program) -> Option<u32> {
        self.inside_ids.get(&(device, which)).copied()
    }

    /// Forgets the programs of all pods except these.
    pub fn keep_inside(&mut self, netns: &BTreeSet<NetnsId>) {
        self.inside_ids.retain(|(of, _), _| netns.contains(&of.netns));
        self.inside = self.inside.take().filter(|(of, _)| netns.contains(of));
    }

    /// Returns the program for one hook of a device, and loads it first if necessary.
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn of(&mut self, device: Device, which: Program) -> anyhow::Result<&mut SchedClassifier> {
        match device.is_on_node() {
            true => loaded(&mut self.ebpf, which),
            false => self.load_inside(device, which),
        }
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

    /// Returns the programs for a pod with this namespace. Uses the programs that were loaded in advance, unless the
    /// kernel refused them.
    fn next(&mut self, netns: NetnsId) -> anyhow::Result<Ebpf> {
        let next = self.next.take().and_then(|(needed, thread)| {
            // An error says that the thread does not pause any more.
            let _ = needed.send(());
            thread.join().ok()?.ok()
        });
        let mut ebpf = next.map_or_else(|| open(&self.pins, self.calls_filters, true), Ok)?;
        put_into(&mut ebpf, netns)?;
        self.prepare_next(Duration::ZERO);
        Ok(ebpf)
    }

    /// Starts to load the program for the next pod, after a pause. It loads the program for packets that reach the pod,
    /// the only one that most taps inside pods need.
    fn prepare_next(&mut self, pause: Duration) {
        // Opened on this thread, because opening creates missing pins. The other thread could do so while the pins are
        // being removed.
        let opened = open(&self.pins, self.calls_filters, true);
        self.next = opened.ok().and_then(|mut ebpf| {
            let (needed, is_needed) = mpsc::channel();
            let load = move || {
                if is_needed.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
                    bail!("the agent ends");
                }
                loaded(&mut ebpf, Program::TapIngress)?;
                Ok(ebpf)
            };
            Some((needed, thread::Builder::new().name(LOADER.to_owned()).spawn(load).ok()?))
        });
    }
}

/// Writes the namespace in which the programs of an object will run. They must not be attached yet.
fn put_into(ebpf: &mut Ebpf, netns: NetnsId) -> anyhow::Result<()> {
    let variable = ebpf.map_mut(NETNS).ok_or_else(|| anyhow!("the eBPF object has no map {NETNS}"))?;
    Ok(Array::<_, u32>::try_from(variable)?.set(0, &(netns.ino as u32), 0)?)
}

/// Opens the object with the pinned maps. `inside`: for programs inside pods.
fn open(pins: &Pins, calls_filters: bool, inside: bool) -> anyhow::Result<Ebpf> {
    let cpus = nr_cpus().map_err(|(what, error)| anyhow!("cannot read {what}: {error}"))?.get();
    // A pinned map keeps the size that an earlier agent gave it.
    let pinned = MapInfo::from_pin(pins.maps().join("COUNTERS")).ok().map(|info| info.max_entries());
    EbpfLoader::new()
        // Without a line for each step: a log of all steps can be too large for the verifier, which answers ENOSPC then,
        // and not why it refuses a program.
        .verifier_log_level(VerifierLogLevel::STATS)
        .default_map_pin_directory(pins.maps())
        .map_max_entries("COUNTERS", pinned.unwrap_or_else(|| sessions_that_fit(cpus)))
        .override_global(CALLS_FILTERS, &u32::from(calls_filters), true)
        .override_global(INSIDE, &u32::from(inside), true)
        .load(OBJECT)
        .context("cannot load the eBPF object (are you root?)")
}

/// The number of sessions whose counters fit into [`COUNTER_MEMORY`], for this number of possible CPUs.
fn sessions_that_fit(cpus: u32) -> u32 {
    let bytes = cpus as usize * size_of::<SessionCounters>();
    u32::try_from(COUNTER_MEMORY / bytes).unwrap_or(u32::MAX).clamp(MIN_SESSIONS, MAX_SESSIONS)
}

fn program(ebpf: &mut Ebpf, which: Program) -> anyhow::Result<&mut SchedClassifier> {
    let name = which.name();
    let program = ebpf.program_mut(name).ok_or_else(|| anyhow!("the eBPF object has no program {name}"))?;
    Ok(program.try_into()?)
}

/// Whether the verifier has refused a program. After any other error, for example for lack of memory, a later attempt
/// can succeed.
fn is_refused(error: &anyhow::Error) -> bool {
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(filter_programs::is_refusal)
}

/// Returns the program, and loads it first if necessary: few agents need the second stage.
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

    /// The verifier answers `EINVAL` to a tail call that the kernel does not support. An agent that takes another error
    /// for that answer would run without filters until its end.
    #[test]
    fn only_a_refusal_by_the_verifier_means_that_no_filter_works() {
        let failed = |errno| {
            let error = anyhow::Error::new(io::Error::from_raw_os_error(errno));
            is_refused(&error.context("cannot load tap_ingress"))
        };
        for errno in [libc::EINVAL, libc::EACCES, libc::E2BIG] {
            assert!(failed(errno), "{errno}");
        }
        for errno in [libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EPERM, libc::EMFILE, libc::ENOSPC] {
            assert!(!failed(errno), "{errno}");
        }
        assert!(!is_refused(&anyhow!("the eBPF object has no program tap_ingress")));
    }

    /// The documentation states these numbers.
    #[test]
    fn counters_take_no_more_memory_on_a_large_machine() {
        for (cpus, sessions) in [(1, 4096), (32, 4096), (128, 1024), (450, 291), (1024, 128), (8192, 64)] {
            assert_eq!(sessions_that_fit(cpus), sessions, "{cpus} CPUs");
        }
    }
}
