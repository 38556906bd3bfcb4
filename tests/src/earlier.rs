//! Sets up what an agent of ABI version 3 leaves on a node: programs at the hooks, pinned maps and links.
//!
//! `fixtures/mirror-v3.o` is the eBPF object of commit cfe38f3, the last commit of that version, without debug
//! information (`fixtures/README.md`). This module loads, pins and attaches it as that agent did: with the same
//! directories, names, handle and order. It writes the bytes of the maps itself, because the sources no longer have the
//! types of that version.

use std::{ffi::CString, fs, path::PathBuf};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        links::FdLink,
        tc::{NlOptions, TcAttach, TcHandle, qdisc_add_clsact},
    },
};

use crate::{AttachMode, Lab, MIRROR, PodNs};

/// Handle of the agent's filters.
const HANDLE: TcHandle = TcHandle::new(0x706d, 0x6972);
/// Size of a value of `TAPS`: flags, number of sessions, and four sessions of eight numbers.
const TAP_BYTES: usize = 4 * (2 + 4 * 8);
/// Size of a value of `TARGETS`: ifindex, flags, a name of 16 bytes.
const TARGET_BYTES: usize = 4 * 2 + 16;

/// What an agent of version 3 has left. Nothing is removed on drop.
#[derive(Debug)]
pub struct EarlierAgent {
    ebpf: Ebpf,
    mode: AttachMode,
    directory: PathBuf,
}

impl EarlierAgent {
    /// Makes the mirror interface, and mirrors these pods: whole packets, or the first `snaplen` bytes of each packet.
    #[track_caller]
    pub fn mirroring(lab: &Lab, mode: AttachMode, pods: &[&PodNs], snaplen: Option<u32>) -> Self {
        let node = lab.node();
        // As the agent does it where the kernel has no dummy driver.
        let ends = [MIRROR, "mirror0p"];
        node.ip(&format!("link add {} type veth peer name {}", ends[0], ends[1]));
        for end in ends {
            let settings = "alias podmirror mtu 65535 arp off multicast off addrgenmode none";
            node.ip(&format!("link set {end} {settings}"));
            node.ip(&format!("link set {end} up"));
        }
        let directory = lab.bpffs().join("podmirror/v3");
        fs::create_dir_all(directory.join("links")).unwrap();
        let ebpf = EbpfLoader::new()
            .default_map_pin_directory(&directory)
            .load(aya::include_bytes_aligned!("../fixtures/mirror-v3.o"))
            .unwrap();
        let mut agent = Self { ebpf, mode, directory };
        let (is_up, is_queueless) = (1, 2);
        let mut target = [0; TARGET_BYTES];
        write(&mut target, &[lab.ifindex(MIRROR), is_up | is_queueless]);
        target[8..8 + MIRROR.len()].copy_from_slice(MIRROR.as_bytes());
        let mut targets: Array<_, [u8; TARGET_BYTES]> =
            agent.ebpf.map_mut("TARGETS").unwrap().try_into().unwrap();
        targets.set(0, &target, 0).unwrap();
        if snaplen.is_some() {
            agent.attach(lab, MIRROR, "deliver", TcAttachType::Egress);
        }
        for (id, pod) in (0..).zip(pods) {
            let (at_peer, both) = (1, 3);
            let mut tap = [0; TAP_BYTES];
            // Flags and number of sessions; id, target, directions, flags, filter, sample, seed, snaplen.
            write(&mut tap, &[at_peer, 1, id, 0, both, 0, 0, 0, 0, snaplen.unwrap_or(0)]);
            let mut taps: HashMap<_, u32, [u8; TAP_BYTES]> =
                agent.ebpf.map_mut("TAPS").unwrap().try_into().unwrap();
            taps.insert(&lab.ifindex(pod.veth_host()), &tap, 0).unwrap();
            agent.attach(lab, pod.veth_host(), "tap_ingress", TcAttachType::Ingress);
            agent.attach(lab, pod.veth_host(), "tap_egress", TcAttachType::Egress);
        }
        agent
    }

    #[track_caller]
    fn attach(&mut self, lab: &Lab, device: &str, name: &str, attach_type: TcAttachType) {
        let ifindex = lab.ifindex(device);
        let program: &mut SchedClassifier = self.ebpf.program_mut(name).unwrap().try_into().unwrap();
        if program.fd().is_err() {
            program.load().unwrap();
        }
        let pin = self.directory.join(format!("links/{ifindex}-{name}"));
        let (mode, device) = (self.mode, CString::new(device).unwrap());
        lab.node().enter(|| match mode {
            AttachMode::Tcx => {
                let order = LinkOrder::first();
                let id = program.attach(ifindex, TcAttach::Tcx { attach_type, order }).unwrap();
                FdLink::try_from(program.take_link(id).unwrap()).unwrap().pin(pin).unwrap();
            }
            AttachMode::Clsact => {
                // It may be there already.
                let _ = qdisc_add_clsact(device.as_c_str());
                let options = NlOptions { priority: 1, handle: HANDLE, classid: None };
                let attach = TcAttach::Netlink { parent: attach_type.into(), options };
                let id = program.attach(ifindex, attach).unwrap();
                std::mem::forget(program.take_link(id).unwrap());
            }
        });
    }

    /// Ends the agent's process. The objects that it has pinned and attached stay.
    pub fn end(self) {}
}

/// Writes numbers in the kernel's byte order.
fn write(bytes: &mut [u8], numbers: &[u32]) {
    for (bytes, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *bytes = number.to_ne_bytes();
    }
}
