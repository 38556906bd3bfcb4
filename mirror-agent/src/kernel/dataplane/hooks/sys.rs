//! Calls of bpf(2) that aya lacks: netkit links, details and updates of links, and the ids of the programs in a
//! chain. `filter_programs` has the calls for the programs of filters.
//!
//! The structures are the parts of `union bpf_attr` that each call reads (linux/bpf.h).

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use crate::model::IfIndex;

/// The chain for packets that the peer of a netkit device sends (`BPF_NETKIT_PEER`, Linux 6.7).
pub(super) const NETKIT_PEER: u32 = 55;

/// The chains for packets that a device receives and sends (`BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`, Linux 6.6).
pub(super) const TCX_INGRESS: u32 = 46;
pub(super) const TCX_EGRESS: u32 = 47;

/// The largest number of programs in a chain (`BPF_MPROG_MAX`).
const MOST: usize = 64;

/// The beginning of `struct bpf_link_info` for a TCX or netkit link.
#[repr(C)]
#[derive(Default)]
pub(super) struct LinkInfo {
    kind: u32,
    id: u32,
    /// The id of the program.
    pub(super) program: u32,
    padding: u32,
    /// The index of the device, in its current namespace; 0 if the device no longer exists, or other software has
    /// detached the link.
    pub(super) ifindex: u32,
    attach_type: u32,
}

/// Calls bpf(2).
///
/// # Safety
///
/// `attributes` are those that the command reads, and each pointer in them points to as much memory as they specify.
pub(in crate::kernel::dataplane) unsafe fn bpf<T>(
    command: libc::c_int,
    attributes: &mut T,
) -> io::Result<i32> {
    // SAFETY: the kernel reads and writes `size_of::<T>()` bytes of the attributes; the caller guarantees the rest.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<T>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer as i32) }
}

/// Calls [`bpf`] with a command that returns a new descriptor.
///
/// # Safety
///
/// The same as for [`bpf`].
pub(in crate::kernel::dataplane) unsafe fn bpf_fd<T>(
    command: libc::c_int,
    attributes: &mut T,
) -> io::Result<OwnedFd> {
    // SAFETY: guaranteed by the caller.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The attributes of `BPF_OBJ_PIN` and `BPF_OBJ_GET`.
#[repr(C)]
struct Object {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Opens a pinned object.
pub(super) fn open(pin: &Path) -> io::Result<OwnedFd> {
    const BPF_OBJ_GET: libc::c_int = 7;
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut get = Object { pathname: path.as_ptr().expose_provenance() as u64, bpf_fd: 0, file_flags: 0 };
    // SAFETY: the attributes of the command. The string lives until the end of this function.
    unsafe { bpf_fd(BPF_OBJ_GET, &mut get) }
}

/// Pins an object.
pub(super) fn pin(object: &OwnedFd, to: &Path) -> io::Result<()> {
    const BPF_OBJ_PIN: libc::c_int = 6;
    let path = CString::new(to.as_os_str().as_bytes())?;
    let bpf_fd = object.as_raw_fd().cast_unsigned();
    let mut pin = Object { pathname: path.as_ptr().expose_provenance() as u64, bpf_fd, file_flags: 0 };
    // SAFETY: the attributes of the command. The string lives until the end of this function.
    unsafe { bpf(BPF_OBJ_PIN, &mut pin) }.map(drop)
}

/// Reads the beginning of the kernel's information about an object.
fn info<T>(object: &OwnedFd, info: &mut T) -> io::Result<()> {
    const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
    #[repr(C)]
    struct GetInfo {
        fd: u32,
        len: u32,
        info: u64,
    }
    let mut get = GetInfo {
        fd: object.as_raw_fd().cast_unsigned(),
        len: size_of::<T>() as u32,
        info: (&raw mut *info).expose_provenance() as u64,
    };
    // SAFETY: the attributes of the command. The kernel writes at most `len` bytes to `info`, all of them numbers.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut get) }.map(drop)
}

/// Returns the program and the device of a TCX or netkit link.
pub(super) fn link_info(link: &OwnedFd) -> io::Result<LinkInfo> {
    let mut found = LinkInfo::default();
    info(link, &mut found).map(|()| found)
}

/// Returns the name of a program; empty if it has none.
pub(super) fn program_name(id: u32) -> io::Result<String> {
    const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
    /// The beginning of `struct bpf_prog_info`. The kernel copies no instructions and no maps without buffers for them.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        before: [u64; 8],
        name: [u8; 16],
    }
    // SAFETY: the attributes of the command: `prog_id`, and those that it lacks are 0.
    let program = unsafe { bpf_fd(BPF_PROG_GET_FD_BY_ID, &mut [id]) }?;
    let mut found = Info::default();
    info(&program, &mut found)?;
    let name = found.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Returns the ids of the programs at a hook of a device, in the order in which they run.
pub(super) fn query(ifindex: IfIndex, attach_type: u32) -> io::Result<Vec<u32>> {
    const BPF_PROG_QUERY: libc::c_int = 16;
    #[repr(C)]
    #[derive(Default)]
    struct Query {
        ifindex: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        prog_ids: u64,
        count: u32,
        padding: u32,
        prog_attach_flags: u64,
        link_ids: u64,
        link_attach_flags: u64,
        revision: u64,
    }
    let mut ids = [0_u32; MOST];
    let mut query = Query {
        ifindex: ifindex.0,
        attach_type,
        prog_ids: ids.as_mut_ptr().expose_provenance() as u64,
        count: MOST as u32,
        ..Query::default()
    };
    // SAFETY: the attributes of the command. The kernel writes at most `count` numbers to `ids`.
    unsafe { bpf(BPF_PROG_QUERY, &mut query) }?;
    Ok(ids.into_iter().take(query.count as usize).collect())
}

/// Attaches a program at the first place of a hook of a device.
pub(super) fn attach_first(program: impl AsFd, ifindex: IfIndex, attach_type: u32) -> io::Result<OwnedFd> {
    const BPF_LINK_CREATE: libc::c_int = 28;
    /// Without a reference program, this means the first place.
    const BPF_F_BEFORE: u32 = 1 << 3;
    #[repr(C)]
    struct Create {
        prog_fd: u32,
        ifindex: u32,
        attach_type: u32,
        flags: u32,
        relative: u32,
        padding: u32,
        expected_revision: u64,
    }
    let mut create = Create {
        prog_fd: program.as_fd().as_raw_fd().cast_unsigned(),
        ifindex: ifindex.0,
        attach_type,
        flags: BPF_F_BEFORE,
        relative: 0,
        padding: 0,
        expected_revision: 0,
    };
    // SAFETY: the attributes of the command. They have no pointers.
    unsafe { bpf_fd(BPF_LINK_CREATE, &mut create) }
}

/// Replaces the program of a link.
///
/// # Errors
///
/// `ENOLINK`: the link's device no longer exists, or the link was detached.
pub(super) fn update(link: &OwnedFd, program: impl AsFd) -> io::Result<()> {
    const BPF_LINK_UPDATE: libc::c_int = 29;
    let (link_fd, new_prog_fd) = (link.as_raw_fd(), program.as_fd().as_raw_fd());
    // SAFETY: the attributes of the command, and those that it lacks are 0. They have no pointers.
    unsafe { bpf(BPF_LINK_UPDATE, &mut [link_fd, new_prog_fd]) }.map(drop)
}

/// Detaches a link from its device, in whichever namespace that is (5.9 and newer).
pub(super) fn detach(link: &OwnedFd) -> io::Result<()> {
    const BPF_LINK_DETACH: libc::c_int = 34;
    // SAFETY: the attributes of the command: `link_fd`. They have no pointers.
    unsafe { bpf(BPF_LINK_DETACH, &mut [link.as_raw_fd()]) }.map(drop)
}
