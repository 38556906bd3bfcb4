//! Creates netkit devices, and attaches another program to the egress of their pods. The `ip` of older distributions
//! can only create devices in L3 mode.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
};

use aya::{Ebpf, EbpfLoader, programs::SchedClassifier};
use rtnetlink::{LinkNetkit, packet_route::link::NetkitMode};

use crate::{Lab, Netns};

/// Creates a pair of devices in a namespace. `peer` is for a pod. With `l3` they have no Ethernet addresses and no ARP.
#[track_caller]
pub(crate) fn pair(netns: &Netns, primary: &str, peer: &str, l3: bool) {
    try_pair(netns, primary, peer, l3).unwrap();
}

fn try_pair(netns: &Netns, primary: &str, peer: &str, l3: bool) -> Result<(), rtnetlink::Error> {
    let mode = if l3 { NetkitMode::L3 } else { NetkitMode::L2 };
    let request = LinkNetkit::new(primary, peer, mode).build();
    netns.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().unwrap();
            tokio::spawn(connection);
            handle.link().add(request).execute().await
        })
    })
}

/// Whether the kernel has netkit.
pub(crate) fn has(netns: &Netns) -> bool {
    let made = try_pair(netns, "has-netkit", "has-netkit-peer", false);
    if made.is_ok() {
        netns.ip("link delete has-netkit");
    }
    made.is_ok()
}

/// A program like that of a CNI, after the other programs in the egress chain of a netkit pod. It is detached on drop.
#[derive(Debug)]
pub struct Shortcut {
    _ebpf: Ebpf,
    _link: OwnedFd,
}

impl Shortcut {
    /// Attaches a program that redirects each packet to the device `to` of the node. `device` is the node side of the
    /// pod's netkit.
    #[track_caller]
    pub fn attach(lab: &Lab, device: &str, to: &str) -> Self {
        let mut ebpf = EbpfLoader::new()
            .override_global("TARGET", &lab.ifindex(to), true)
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES")))
            .unwrap();
        let program: &mut SchedClassifier = ebpf.program_mut("elsewhere").unwrap().try_into().unwrap();
        program.load().unwrap();
        let ifindex = lab.ifindex(device);
        let link = lab.node().enter(|| attach_last(program, ifindex)).unwrap();
        Self { _ebpf: ebpf, _link: link }
    }
}

/// Attaches a program at the end of the egress chain of a netkit peer. aya cannot do this.
fn attach_last(program: &SchedClassifier, ifindex: u32) -> io::Result<OwnedFd> {
    const BPF_LINK_CREATE: libc::c_int = 28;
    const BPF_NETKIT_PEER: u32 = 55;
    /// Without a relative program, this is the end of the chain.
    const BPF_F_AFTER: u32 = 1 << 4;
    /// The part of `union bpf_attr` that the command reads.
    #[repr(C)]
    struct Create {
        program: u32,
        ifindex: u32,
        attach_type: u32,
        flags: u32,
        relative: u32,
        padding: u32,
        expected_revision: u64,
    }
    let create = Create {
        program: program.fd().unwrap().as_fd().as_raw_fd().cast_unsigned(),
        ifindex,
        attach_type: BPF_NETKIT_PEER,
        flags: BPF_F_AFTER,
        relative: 0,
        padding: 0,
        expected_revision: 0,
    };
    // SAFETY: the kernel reads the given number of bytes, which contain no pointers; the descriptor is new.
    unsafe {
        match libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const create, size_of::<Create>()) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}
