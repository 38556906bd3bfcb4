//! Finds the BPF objects that the agent has made, and attaches other programs to the same hooks.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, Map, MapData, MapInfo, PerCpuArray},
    programs::{
        LinkOrder, Program, ProgramError, ProgramInfo, SchedClassifier, TcAttachType, XdpMode,
        loaded_programs,
        tc::{NlOptions, TcAttach},
    },
};

use crate::{AttachMode, Lab, Netns};

/// The ids of BPF objects. The kernel does not reuse an id soon, so an id that does not exist means a deleted object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BpfObjects {
    /// Maps.
    pub maps: BTreeSet<u32>,
    /// Links.
    pub links: BTreeSet<u32>,
    /// Programs.
    pub programs: BTreeSet<u32>,
}

impl BpfObjects {
    /// Collects the objects that an agent has pinned on the node, the programs that pinned links attach or that use
    /// pinned maps, and the programs of filters.
    pub fn of(lab: &Lab) -> Self {
        let mut objects = Self::default();
        let ours = lab.bpffs().join("podmirror");
        for pin in lab.pins().into_iter().filter(|pin| pin.starts_with(&ours)) {
            let fd = open_pin(&pin).unwrap_or_else(|error| panic!("{}: {error}", pin.display()));
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
            let id = |key: &str| {
                let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
                line.map(|id| id.trim().parse::<u32>().unwrap())
            };
            objects.maps.extend(id("map_id"));
            if id("map_type") == Some(PROGRAM_ARRAY) {
                objects.programs.extend(programs_in(&pin).into_values());
            }
            objects.links.extend(id("link_id"));
            objects.programs.extend(id("prog_id"));
        }
        let uses_ours = |program: &ProgramInfo| {
            let maps = program.map_ids().ok().flatten().unwrap_or_default();
            maps.iter().any(|map| objects.maps.contains(map))
        };
        let users: Vec<u32> =
            loaded_programs().flatten().filter(uses_ours).map(|program| program.id()).collect();
        objects.programs.extend(users);
        objects
    }

    /// Opens every link that is pinned below the node's directory, as another process could. A link that a process
    /// holds outlives its pin.
    pub fn hold_links(lab: &Lab) -> Vec<OwnedFd> {
        let is_link = |pin: &PathBuf| pin.parent().is_some_and(|directory| directory.ends_with("links"));
        lab.pins().iter().filter(|pin| is_link(pin)).map(|pin| open_pin(pin).unwrap()).collect()
    }

    /// Detaches every link that is pinned below the node's directory, as another process could (`BPF_LINK_DETACH`). The
    /// pins stay. Returns the number of links.
    pub fn detach_links(lab: &Lab) -> usize {
        const BPF_LINK_DETACH: libc::c_int = 34;
        let links = Self::hold_links(lab);
        for link in &links {
            let fd = link.as_raw_fd();
            // SAFETY: the attributes of the command are the descriptor alone, and live as long as the call.
            let code =
                unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, &raw const fd, size_of_val(&fd)) };
            assert_eq!(code, 0, "{}", io::Error::last_os_error());
        }
        links.len()
    }

    /// The objects that still exist.
    pub fn remaining(&self) -> Self {
        const BPF_PROG_GET_NEXT_ID: libc::c_int = 11;
        const BPF_MAP_GET_NEXT_ID: libc::c_int = 12;
        const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
        let of =
            |ids: &BTreeSet<u32>, next_id| ids.iter().copied().filter(|id| exists(*id, next_id)).collect();
        Self {
            maps: of(&self.maps, BPF_MAP_GET_NEXT_ID),
            links: of(&self.links, BPF_LINK_GET_NEXT_ID),
            programs: of(&self.programs, BPF_PROG_GET_NEXT_ID),
        }
    }
}

/// Whether an object with this id exists. `next_id` is the command that returns the next id of its kind.
///
/// Does not open the object. If a process opens a program array that has lost its last user, and closes it again, the
/// kernel clears the map twice. If the first clearing is still pending then, the kernel never frees the map
/// (`prog_array_map_clear()` in kernel/bpf/arraymap.c, Linux 6.18).
fn exists(id: u32, next_id: libc::c_int) -> bool {
    /// The part of `union bpf_attr` that the command uses.
    #[repr(C)]
    struct NextId {
        start: u32,
        next: u32,
        open_flags: u32,
    }
    let mut attr = NextId { start: id - 1, next: 0, open_flags: 0 };
    // SAFETY: the kernel reads and writes the given number of bytes.
    let code = unsafe { libc::syscall(libc::SYS_bpf, next_id, &raw mut attr, size_of::<NextId>()) };
    code == 0 && attr.next == id
}

/// The type of a map (include/uapi/linux/bpf.h).
const PROGRAM_ARRAY: u32 = 3;

/// The kernel's ids of the programs in a pinned program array, by index. aya does not read such an array.
pub fn programs_in(pin: &Path) -> BTreeMap<u32, u32> {
    /// The part of `union bpf_attr` that the command reads.
    #[repr(C)]
    struct Lookup {
        map: u32,
        _padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
    let map = open_pin(pin).unwrap_or_else(|error| panic!("{}: {error}", pin.display()));
    let program = |place: u32| {
        let mut id = 0_u32;
        let lookup = Lookup {
            map: map.as_raw_fd().cast_unsigned(),
            _padding: 0,
            key: (&raw const place).expose_provenance() as u64,
            value: (&raw mut id).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: the kernel reads the given number of bytes, and the key through its pointer; it writes the number
        // through the pointer of the value.
        let code = unsafe {
            libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_ELEM, &raw const lookup, size_of::<Lookup>())
        };
        (code == 0).then_some((place, id))
    };
    let places = MapInfo::from_pin(pin).unwrap().max_entries();
    (0..places).filter_map(program).collect()
}

/// Opens a pinned object of any kind (`BPF_OBJ_GET`).
fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    /// The part of `union bpf_attr` that the command reads.
    #[repr(C)]
    struct ObjGet {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    const BPF_OBJ_GET: libc::c_int = 7;
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attr = ObjGet { pathname: path.as_ptr().addr() as u64, bpf_fd: 0, file_flags: 0 };
    // SAFETY: the kernel reads the given number of bytes and the string at the pointer; the descriptor is new.
    unsafe {
        match libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw const attr, size_of::<ObjGet>()) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

/// Another program on a device of the node, not podmirror's. It counts the packets at both hooks and lets them pass. It
/// is detached on drop.
#[derive(Debug)]
pub struct Neighbour {
    ebpf: Ebpf,
    /// The device's namespace if the program is attached by filters: the kernel removes filters only from there, but
    /// links from anywhere.
    filters: Option<Netns>,
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let Self { ebpf, filters: Some(netns) } = self else { return };
        netns.enter(|| {
            for (_, program) in ebpf.programs_mut() {
                if let Program::SchedClassifier(program) = program {
                    // The device may no longer exist.
                    let _ = program.unload();
                }
            }
        });
    }
}

impl Neighbour {
    /// Attaches the program by filters of the clsact qdisc, which must exist, with this priority.
    #[track_caller]
    pub fn attach_clsact(lab: &Lab, device: &str, priority: u16) -> Self {
        Self::attach(lab, device, |attach_type| TcAttach::Netlink {
            parent: attach_type.into(),
            options: NlOptions { priority, ..NlOptions::default() },
        })
    }

    /// Attaches the program by TCX, after the present programs.
    #[track_caller]
    pub fn attach_tcx(lab: &Lab, device: &str) -> Self {
        Self::attach(lab, device, |attach_type| TcAttach::Tcx { attach_type, order: LinkOrder::last() })
    }

    /// Attaches the program by TCX, before the present programs.
    #[track_caller]
    pub fn attach_tcx_first(lab: &Lab, device: &str) -> Self {
        Self::attach(lab, device, |attach_type| TcAttach::Tcx { attach_type, order: LinkOrder::first() })
    }

    /// Attaches by TCX, before the present programs, a program that ends the chain for every packet.
    #[track_caller]
    pub fn with_the_last_word(lab: &Lab, device: &str) -> Self {
        Self::attach_program("last_word", 0, lab, device, |attach_type| TcAttach::Tcx {
            attach_type,
            order: LinkOrder::first(),
        })
    }

    /// Attaches a program that hands every packet that `device` receives to the NIC that is the peer of `to`, so that
    /// the packet does not pass `to`, as eBPF host routing does. Uses TCX where the kernel has it.
    #[track_caller]
    pub fn behind(lab: &Lab, device: &str, to: &str) -> Self {
        Self::last_at("behind", own_mode(), TcAttachType::Ingress, lab.ifindex(to), lab, device)
    }

    /// The same, by a program with one of Cilium's names, attached in this mode.
    #[track_caller]
    pub fn of_cilium(lab: &Lab, mode: AttachMode, device: &str, to: &str) -> Self {
        Self::last_at("cil_from_container", mode, TcAttachType::Ingress, lab.ifindex(to), lab, device)
    }

    /// Attaches a program with one of Cilium's names that lets every packet pass. Uses TCX where the kernel has it.
    #[track_caller]
    pub fn named_as_ciliums(lab: &Lab, device: &str) -> Self {
        Self::last_at("cil_to_container", own_mode(), TcAttachType::Egress, 0, lab, device)
    }

    #[track_caller]
    fn last_at(
        program: &str,
        mode: AttachMode,
        hook: TcAttachType,
        target: u32,
        lab: &Lab,
        device: &str,
    ) -> Self {
        if mode == AttachMode::Clsact {
            lab.node().try_run(&format!("tc qdisc add dev {device} clsact"));
        }
        Self::attach_at(program, &[hook], target, lab, device, in_way(mode, LinkOrder::last))
    }

    /// Attaches a program that only clones every packet to the device `target` of the node. Uses TCX where the kernel
    /// has it, else clsact, whose qdisc must exist.
    #[track_caller]
    pub fn that_clones(lab: &Lab, device: &str, target: &str) -> Self {
        let target = lab.ifindex(target);
        Self::attach_program("bare_clone", target, lab, device, in_way(own_mode(), LinkOrder::first))
    }

    /// Attaches this program to a device of any namespace: at both tc hooks, before the present programs, or by XDP.
    /// Fails if there is no such device, or no more room.
    pub fn inside(netns: &Netns, device: &str, name: &str) -> Result<Self, ProgramError> {
        let mut ebpf = EbpfLoader::new().load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES"))).unwrap();
        let device = CString::new(device).unwrap();
        netns.enter(|| match ebpf.program_mut(name).unwrap() {
            Program::Xdp(program) => {
                program.load()?;
                program.attach(device.as_c_str(), XdpMode::Skb).map(drop)
            }
            program => {
                let program: &mut SchedClassifier = program.try_into()?;
                program.load()?;
                [TcAttachType::Ingress, TcAttachType::Egress].into_iter().try_for_each(|attach_type| {
                    let how = TcAttach::Tcx { attach_type, order: LinkOrder::first() };
                    program.attach(device.as_c_str(), how).map(drop)
                })
            }
        })?;
        Ok(Self { ebpf, filters: None })
    }

    /// Attaches a program to the egress of a device of any namespace, before the present programs. It writes the last
    /// two bytes of a frame's number (see [`Frame::filled`](crate::Frame::filled)) to `tc_index`.
    #[track_caller]
    pub fn that_marks(netns: &Netns, device: &str) -> Self {
        let mut ebpf = EbpfLoader::new().load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES"))).unwrap();
        let program: &mut SchedClassifier = ebpf.program_mut("marker").unwrap().try_into().unwrap();
        program.load().unwrap();
        let how = match own_mode() {
            AttachMode::Tcx => TcAttach::Tcx { attach_type: TcAttachType::Egress, order: LinkOrder::first() },
            AttachMode::Clsact => {
                netns.try_run(&format!("tc qdisc add dev {device} clsact"));
                // Of filters with the same priority, the newest runs first.
                let options = NlOptions { priority: 1, ..NlOptions::default() };
                TcAttach::Netlink { parent: TcAttachType::Egress.into(), options }
            }
        };
        let device = CString::new(device).unwrap();
        netns.enter(|| program.attach(device.as_c_str(), how).map(drop)).unwrap();
        Self { ebpf, filters: (own_mode() == AttachMode::Clsact).then(|| Netns::at(netns.path())) }
    }

    #[track_caller]
    fn attach(lab: &Lab, device: &str, how: impl Fn(TcAttachType) -> TcAttach + Sync) -> Self {
        Self::attach_program("neighbour", 0, lab, device, how)
    }

    #[track_caller]
    fn attach_program(
        name: &str,
        target: u32,
        lab: &Lab,
        device: &str,
        how: impl Fn(TcAttachType) -> TcAttach + Sync,
    ) -> Self {
        Self::attach_at(name, &[TcAttachType::Ingress, TcAttachType::Egress], target, lab, device, how)
    }

    #[track_caller]
    fn attach_at(
        name: &str,
        hooks: &[TcAttachType],
        target: u32,
        lab: &Lab,
        device: &str,
        how: impl Fn(TcAttachType) -> TcAttach + Sync,
    ) -> Self {
        let mut ebpf = EbpfLoader::new()
            .override_global("TARGET", &target, true)
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES")))
            .unwrap();
        let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
        program.load().unwrap();
        let device = CString::new(device).unwrap();
        let node = lab.node();
        let has_filters = node.enter(|| {
            let mut has_filters = false;
            for attach_type in hooks {
                let how = how(*attach_type);
                has_filters |= matches!(how, TcAttach::Netlink { .. });
                program.attach(device.as_c_str(), how).unwrap();
            }
            has_filters
        });
        Self { ebpf, filters: has_filters.then(|| Netns::at(node.path())) }
    }

    /// The number of packets that the program has seen.
    pub fn seen(&self) -> u64 {
        let seen: PerCpuArray<_, u64> = self.ebpf.map("SEEN").unwrap().try_into().unwrap();
        seen.get(&0, 0).unwrap().iter().sum()
    }
}

/// The mode that the kernel prefers.
fn own_mode() -> AttachMode {
    if AttachMode::Tcx.is_applicable() { AttachMode::Tcx } else { AttachMode::Clsact }
}

/// Attaches by TCX, at this position in the chain, or by a filter of the clsact qdisc.
fn in_way(mode: AttachMode, order: fn() -> LinkOrder) -> impl Fn(TcAttachType) -> TcAttach + Sync {
    move |attach_type| match mode {
        AttachMode::Tcx => TcAttach::Tcx { attach_type, order: order() },
        AttachMode::Clsact => TcAttach::Netlink { parent: attach_type.into(), options: NlOptions::default() },
    }
}

impl Lab {
    /// Accounts of ring space that do not balance: bytes taken by a session, and bytes returned by its readers.
    pub fn room_in_use(&self) -> Vec<(u64, u64)> {
        let [taken, returned] = ["TAKEN", "RETURNED"].map(|name| {
            let pin = self.pins().into_iter().find(|pin| pin.ends_with(name)).unwrap();
            let map = Map::from_map_data(MapData::from_pin(pin).unwrap()).unwrap();
            Array::<MapData, u64>::try_from(map).unwrap()
        });
        let accounts = taken.iter().zip(returned.iter());
        let accounts = accounts.map(|(taken, returned)| (taken.unwrap(), returned.unwrap()));
        accounts.filter(|(taken, returned)| taken != returned).collect()
    }
}
