//! TCX links: first in the chain, pinned, taken over in place, detached.
//!
//! A link carries a program at a hook. The links of every version of the agent are alike, so the link of an earlier
//! agent gets the new program in one step (`bpf_link_update`), and its pin moves to this version's directory. That is
//! why an upgrade neither misses a packet nor copies one twice. Called by [`Hooks`](super::Hooks) only.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use anyhow::Context as _;
use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcAttach,
    links::{FdLink, PinnedLink},
    tc::SchedClassifierLink,
};

use super::attach_type;
use crate::{
    dataplane::pins::LinkPin,
    model::{IfIndex, Program},
};

/// A program can go between the list of a chain and the look at it.
const LOOKS: usize = 4;

/// A program in a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InChain {
    pub(super) id: u32,
    pub(super) name: String,
}

/// The programs at a hook, in the order in which they run; none where the kernel has no TCX, or the device has gone.
pub(super) fn chain(ifindex: IfIndex, which: Program) -> anyhow::Result<Vec<InChain>> {
    let mut looks = 0;
    loop {
        looks += 1;
        match SchedClassifier::query_tcx(ifindex.0, attach_type(which)) {
            Ok((_, programs)) => {
                let programs = programs.iter().map(|program| InChain {
                    id: program.id(),
                    name: program.name_as_str().unwrap_or_default().to_owned(),
                });
                return Ok(programs.collect());
            }
            Err(ProgramError::SyscallError(error))
                if matches!(error.io_error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL)) =>
            {
                return Ok(Vec::new());
            }
            Err(_) if looks < LOOKS => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot list the programs of device {ifindex}"));
            }
        }
    }
}

/// Puts `program` at a hook: in the place of the first of these links that still exists, else first in the chain. The
/// other links are detached. `own` is the path where this version pins the link.
pub(super) fn attach(
    program: &mut SchedClassifier,
    pins: &[LinkPin],
    own: &Path,
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<()> {
    if take_over(program, pins, own, ifindex, which)? {
        return Ok(());
    }
    let attach = TcAttach::Tcx { attach_type: attach_type(which), order: LinkOrder::first() };
    let id = program.attach(ifindex.0, attach).context("cannot attach a TCX link")?;
    let link = FdLink::try_from(program.take_link(id)?)?;
    link.pin(own).with_context(|| format!("cannot pin {}", own.display()))?;
    Ok(())
}

/// Puts `program` in the place of the first of these links that still exists, and detaches the others. Returns whether
/// one exists.
pub(super) fn take_over(
    program: &mut SchedClassifier,
    pins: &[LinkPin],
    own: &Path,
    ifindex: IfIndex,
    which: Program,
) -> anyhow::Result<bool> {
    let mut stands = false;
    for pin in pins {
        let path = &pin.path;
        let replaced = !stands
            && replace(program, path)
                .with_context(|| format!("cannot put the new program in the old one's place at {}", path.display()))?
            // Otherwise the device is in another namespace now, and another device has the index.
            && runs_at(program, ifindex, which)?;
        if !replaced {
            remove(path)?;
            continue;
        }
        stands = true;
        if path != own {
            fs::rename(path, own)
                .with_context(|| format!("cannot move {} to {}", path.display(), own.display()))?;
        }
    }
    Ok(stands)
}

/// Replaces the program of a pinned link by `program`; `false`: the link's device has gone, or other software has
/// detached the link.
fn replace(program: &mut SchedClassifier, pin: &Path) -> anyhow::Result<bool> {
    let link = SchedClassifierLink::try_from(FdLink::from(PinnedLink::from_pin(pin)?))?;
    match program.attach_to_link(link) {
        Ok(id) => {
            // The pin keeps the link; this handle of it may go.
            drop(program.take_link(id)?);
            Ok(true)
        }
        Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOLINK) => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// What a link carries, and where.
pub(super) struct Carried {
    /// Id of the program.
    pub(super) program: u32,
    /// Index of the device, in the namespace that it is in now; 0: it has gone, or other software has detached the link.
    pub(super) ifindex: u32,
}

/// What a pinned link carries; `None`: there is no such link any more. aya does not show the device of a link.
pub(super) fn carried(pin: &Path) -> Option<Carried> {
    const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
    /// The attributes of `BPF_OBJ_GET_INFO_BY_FD`.
    #[repr(C)]
    struct GetInfo {
        fd: u32,
        len: u32,
        info: u64,
    }
    /// The beginning of `struct bpf_link_info`, for a TCX link.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
        program: u32,
        padding: u32,
        ifindex: u32,
        attach_type: u32,
    }
    let link = open(pin).ok()?;
    let mut info = Info::default();
    let request = GetInfo {
        fd: link.as_raw_fd().cast_unsigned(),
        len: size_of::<Info>() as u32,
        info: (&raw mut info).expose_provenance() as u64,
    };
    // SAFETY: the kernel reads as many bytes as the call says, and writes as many bytes of `info` as the request says.
    let done = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw const request, size_of::<GetInfo>())
    };
    (done == 0).then_some(Carried { program: info.program, ifindex: info.ifindex })
}

/// Whether the program of a pinned link stands in a chain.
pub(super) fn runs(pin: &Path, chain: &[InChain]) -> bool {
    let link = PinnedLink::from_pin(pin).map(FdLink::from);
    let program = link.ok().and_then(|link| Some(link.info().ok()?.program_id()));
    chain.iter().any(|there| Some(there.id) == program)
}

/// Whether a program stands in the chain of a device of this namespace.
fn runs_at(program: &SchedClassifier, ifindex: IfIndex, which: Program) -> anyhow::Result<bool> {
    let id = program.info()?.id();
    Ok(chain(ifindex, which)?.iter().any(|program| program.id == id))
}

/// Detaches a pinned link and removes its pin. Afterwards the program does not run there, even if another process holds
/// the link.
pub(super) fn remove(pin: &Path) -> anyhow::Result<()> {
    match detach(pin) {
        Ok(()) => fs::remove_file(pin).with_context(|| format!("cannot remove {}", pin.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot detach the link {}", pin.display())),
    }
}

/// Detaches a pinned link from its device, wherever that is: aya has no call for `BPF_LINK_DETACH` (5.9 and newer).
fn detach(pin: &Path) -> io::Result<()> {
    const BPF_LINK_DETACH: libc::c_int = 34;
    /// The attributes of `BPF_LINK_DETACH`.
    #[repr(C)]
    struct LinkDetach {
        link_fd: u32,
    }
    let link = open(pin)?;
    let request = LinkDetach { link_fd: link.as_raw_fd().cast_unsigned() };
    // SAFETY: the kernel reads as many bytes as the call says.
    let detached =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, &raw const request, size_of::<LinkDetach>()) };
    if detached == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Opens a pinned object.
fn open(pin: &Path) -> io::Result<OwnedFd> {
    const BPF_OBJ_GET: libc::c_int = 7;
    /// The part of `union bpf_attr` that `BPF_OBJ_GET` reads.
    #[repr(C)]
    struct ObjGet {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let get = ObjGet { pathname: path.as_ptr().expose_provenance() as u64, bpf_fd: 0, file_flags: 0 };
    // SAFETY: the kernel reads as many bytes as the call says, and the string behind the pointer, which lives until the
    // end of this function.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw const get, size_of::<ObjGet>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
