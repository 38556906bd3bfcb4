//! The eBPF programs of filters: loads them into the kernel, and puts them into `FILTERS`, where the tap programs call
//! them.
//!
//! aya loads programs of an object file only, so this module calls bpf(2) itself (`hooks/sys`). `maps` decides the slot
//! of each filter, and `mirror_core::filter` generates the instructions. Tests and benchmarks load programs through this
//! module too.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    ptr,
};

use anyhow::{Context as _, anyhow, bail};
use aya::maps::{Array, Map, MapData};
use libc::{E2BIG, EACCES, EINVAL, ENOENT, EPERM};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use thiserror::Error;

use super::hooks::sys::{bpf, bpf_fd};
use crate::{filter::ebpf::Insn, settings::CaptureFilter};

/// The name of these programs in the kernel.
pub const NAME: &CStr = c"mirror_filter";

/// The size in bytes of the verifier's log, whose last lines are shown.
const LOG_BYTES: usize = 1 << 16;
/// The log level `BPF_LOG_STATS`: the verifier logs why it refuses a program, without a line for each instruction.
const LOG_LEVEL: u32 = 4;

// Commands of bpf(2).
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const PROG_LOAD: libc::c_int = 5;

/// A loaded program of a filter. The kernel keeps it while this descriptor or an element of `FILTERS` refers to it.
#[derive(Debug)]
pub struct FilterProgram(OwnedFd);

/// The reason why a program was not loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The verifier refuses the program, now and always.
    #[error("the kernel refuses the filter: {0}")]
    Refused(String),
    /// The kernel cannot load the program at the moment.
    #[error("the kernel cannot load the filter: {0}")]
    Failed(#[from] io::Error),
}

impl FilterProgram {
    /// Loads a program.
    ///
    /// # Errors
    ///
    /// The kernel refuses it, or has no memory for it.
    pub fn load(insns: &[Insn]) -> Result<Self, LoadError> {
        let mut loaded = load(insns, &mut []);
        if errno(&loaded) == Some(EPERM) {
            // Before Linux 5.11 the memory of a program counts as locked memory of its user. If the limit cannot be
            // raised, the kernel returns the same error again.
            let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
            loaded = load(insns, &mut []);
        }
        match loaded {
            Err(error) if is_refusal(&error) => {
                let mut log = vec![0; LOG_BYTES];
                match load(insns, &mut log) {
                    Ok(program) => Ok(program),
                    Err(_) => Err(LoadError::Refused(format!("{error}: {}", last_lines(&log)))),
                }
            }
            Err(error) if error.raw_os_error() == Some(EPERM) => {
                let why =
                    "the limit of locked memory (RLIMIT_MEMLOCK) is too low, or a capability is missing";
                Err(LoadError::Failed(io::Error::new(error.kind(), format!("{error}: {why}"))))
            }
            loaded => Ok(loaded?),
        }
    }
}

impl AsFd for FilterProgram {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The maps `FILTERS` and `FILTER_HASHES`.
pub(super) struct Filters {
    programs: FilterMap,
    hashes: Array<MapData, u64>,
    are_called: bool,
}

impl Filters {
    /// Takes the maps from `get`, which returns a map by its name. `are_called`: whether the tap programs call the
    /// programs of filters.
    pub(super) fn from_fn(
        get: &mut impl FnMut(&str) -> anyhow::Result<Map>,
        are_called: bool,
    ) -> anyhow::Result<Self> {
        let programs = FilterMap::new(get("FILTERS")?)?;
        Ok(Self { programs, hashes: get("FILTER_HASHES")?.try_into()?, are_called })
    }

    /// The reason why no filter works; `None` if the tap programs call filters.
    pub(super) fn refused(&self) -> Option<LoadError> {
        let why = "this kernel runs none: it needs a JIT compiler (net.core.bpf_jit_enable = 1), and on AArch64 \
                   Linux 6.0 or newer";
        (!self.are_called).then(|| LoadError::Refused(why.to_owned()))
    }

    /// Reads the hash of the program at a place.
    pub(super) fn hash(&self, place: u32) -> anyhow::Result<u64> {
        self.hashes.get(&place, 0).context("cannot read the hash of a filter")
    }

    /// Loads a filter, and puts it at a place that no session uses.
    pub(super) fn put(&mut self, place: u32, filter: &CaptureFilter) -> anyhow::Result<()> {
        if let Some(refused) = self.refused() {
            bail!(refused);
        }
        let insns = filter.instructions().map_err(|why| anyhow!("the filter {filter:?}: {why}"))?;
        let program = FilterProgram::load(&insns)?;
        // The hash last: if the agent is killed here, no hash belongs to a missing program.
        self.hashes.set(place, &0, 0).context("cannot clear the hash of a filter")?;
        self.programs.set(place, &program)?;
        self.hashes.set(place, &filter.hash, 0).context("cannot write the hash of a filter")
    }

    /// Removes the program at a place, if there is one.
    pub(super) fn clear(&mut self, place: u32) -> anyhow::Result<()> {
        self.programs.clear(place)
    }
}

/// The map `FILTERS`.
pub struct FilterMap(MapData);

impl FilterMap {
    /// Wraps the map.
    ///
    /// # Errors
    ///
    /// The map is of another type.
    pub fn new(map: Map) -> anyhow::Result<Self> {
        match map {
            Map::ProgramArray(data) => Ok(Self(data)),
            _ => bail!("the map of filters is not an array of programs"),
        }
    }

    /// Puts a program at a place.
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn set(&mut self, place: u32, program: &FilterProgram) -> anyhow::Result<()> {
        let fd = program.0.as_raw_fd();
        self.call(MAP_UPDATE_ELEM, place, Some(&fd)).context("cannot write a filter")
    }

    /// Removes the program at a place, if there is one.
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn clear(&mut self, place: u32) -> anyhow::Result<()> {
        match self.call(MAP_DELETE_ELEM, place, None) {
            Err(error) if error.raw_os_error() != Some(ENOENT) => Err(error).context("cannot clear a filter"),
            _ => Ok(()),
        }
    }

    fn call(&self, command: libc::c_int, place: u32, value: Option<&i32>) -> io::Result<()> {
        let value = value.map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the key and the value have the sizes of the map's, and live until the call returns.
        unsafe { element(command, self.0.fd(), (&raw const place).cast(), value.cast()) }
    }
}

/// Calls bpf(2) with a command for an element of a map.
///
/// # Errors
///
/// The kernel refuses, or the map has no such element.
///
/// # Safety
///
/// The key and the value have the sizes of the map's, and are valid for what the command reads and writes. A pointer
/// that it does not use is null.
pub unsafe fn element(
    command: libc::c_int,
    map: impl AsFd,
    key: *const u8,
    value: *const u8,
) -> io::Result<()> {
    /// The part of `union bpf_attr` that these commands read.
    #[repr(C)]
    struct Element {
        map: u32,
        _padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let map = map.as_fd().as_raw_fd().cast_unsigned();
    let (key, value) = (address(key), address(value));
    // SAFETY: guaranteed by the caller.
    unsafe { bpf(command, &mut Element { map, _padding: 0, key, value, flags: 0 }) }.map(drop)
}

/// Loads a program. The verifier writes its messages to `log`, unless that is empty.
fn load(insns: &[Insn], log: &mut [u8]) -> io::Result<FilterProgram> {
    const SCHED_CLS: u32 = 3;
    /// The beginning of the fields of `union bpf_attr` for this command.
    #[repr(C)]
    struct Program {
        kind: u32,
        count: u32,
        insns: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
    }
    let license = c"Dual MIT/GPL";
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().zip(NAME.to_bytes()) {
        *to = *from;
    }
    let mut program = Program {
        kind: SCHED_CLS,
        count: insns.len() as u32,
        insns: address(insns.as_ptr()),
        license: address(license.as_ptr()),
        log_level: if log.is_empty() { 0 } else { LOG_LEVEL },
        log_size: log.len() as u32,
        log: if log.is_empty() { 0 } else { address(log.as_mut_ptr()) },
        kernel_version: 0,
        flags: 0,
        name,
    };
    // SAFETY: the pointers are those of buffers that live until the call returns, with their sizes.
    unsafe { bpf_fd(PROG_LOAD, &mut program) }.map(FilterProgram)
}

fn address<T>(of: *const T) -> u64 {
    of.expose_provenance() as u64
}

/// Whether the verifier has refused a program. It would refuse it again.
pub(super) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EINVAL | EACCES | E2BIG))
}

fn errno<T>(result: &io::Result<T>) -> Option<i32> {
    result.as_ref().err().and_then(io::Error::raw_os_error)
}

/// Returns the last two lines that the verifier has written, without its statistics.
fn last_lines(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    let text = String::from_utf8_lossy(log.get(..end).unwrap_or(log));
    let statistics = ["processed ", "verification time ", "stack depth "];
    let is_reason = |line: &&str| !line.is_empty() && !statistics.iter().any(|word| line.starts_with(word));
    let mut lines: Vec<_> = text.lines().rev().filter(is_reason).take(2).collect();
    lines.reverse();
    lines.join("; ")
}
