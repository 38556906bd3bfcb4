//! Selects the devices to tap for each pod, with a reason for each device that is not tapped.
//!
//! Pure: takes pods, resources, devices and policy; returns taps, skipped devices and problems. [`choose`] reads
//! resources and annotations, [`select`] finds the devices, [`coverage`] evaluates the resources. The installed state
//! is unknown here (`plan` knows it), and nothing is read from the system.

mod attachments;
mod bad;
mod captures;
mod choice;
mod coverage;
mod filters;
mod inside;
mod nics;
mod policy;
mod remedy;
mod resources;
#[cfg(test)]
mod tests;
mod unread;
mod why;

use std::collections::BTreeMap;

use mirror_common::verdict::TapKind;

pub use self::bad::{BadAnnotation, Problem};
pub use self::captures::{Capture, MAX_READERS, Readers, Wants};
pub use self::choice::{Choice, MIRROR, NICS, OVN_MIRROR, PREFIX, Wanted, choose};
pub use self::coverage::{Coverage, Installed, NotCovered, coverage};
pub use self::filters::Filters;
pub use self::inside::{see_inside, with_two_sides};
pub use self::nics::Nics;
use self::{
    inside::leads_out,
    nics::{former_name, is_nic},
    unread::NO_PROCESS,
};
pub use self::{
    policy::Policy,
    resources::{Selected, refusal},
    unread::keep_installed,
    why::Why,
};
use crate::{
    destination::Destination,
    exit, mirror_iface,
    model::{Device, Link, LinkKind, LinkSnapshot, MirrorId, Origin, Owner, PodId, Session, Tap, TapHead},
};

/// Maximum number of tapped NICs per pod: first those that annotations name, then those with the lowest indexes. Root
/// in a pod can create any number of devices, and the node's tables are shared by all pods.
const MOST_NICS: usize = 16;

/// A pod, a NIC or an interface that is selected but not tapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// The pod. `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The NIC, if the reason concerns a NIC; or the name of the interface.
    pub nic: Option<String>,
    /// The mirror, if the reason concerns a mirror.
    pub mirror: Option<MirrorId>,
    /// The reason.
    pub why: Why,
}

impl Skipped {
    /// A reason that concerns the NIC of a tap, or one of its mirrors. A message does not name the mirror `default`.
    pub fn of_nic(owner: &Owner, mirror: Option<&MirrorId>, why: Why) -> Self {
        let mirror = mirror.filter(|mirror| !mirror.0.is_default()).cloned();
        Self { pod: owner.pod.clone(), nic: Some(owner.nic.clone()), mirror, why }
    }

    /// Whether the reason concerns this mirror, which must not be the mirror `default`.
    fn concerns(&self, mirror: &MirrorId) -> bool {
        match &self.mirror {
            Some(of) if of == mirror => true,
            // If only captures want the pod, a reason that concerns the pod has the name of the first one.
            Some(_) if !(self.is_of_capture() && mirror.0.is_capture()) => false,
            // A reason without the name of a mirror concerns the pod, or the mirror `default`.
            _ => !self.why.is_of_one_mirror(),
        }
    }

    /// Whether the reason concerns only a ClusterMirror, which is the administrator's responsibility.
    pub fn is_of_cluster_mirror(&self) -> bool {
        self.mirror.as_ref().is_some_and(|mirror| mirror.0.is_of_cluster_mirror())
    }

    /// Whether the reason concerns only captures. It is reported to the program that requested the capture.
    pub fn is_of_capture(&self) -> bool {
        self.mirror.as_ref().is_some_and(|mirror| mirror.0.is_capture())
    }
}

/// The result of a selection: the wanted taps, and the reasons for the missing ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// The taps, by tapped device.
    pub taps: BTreeMap<Device, Tap>,
    /// What is selected but not tapped.
    pub skipped: Vec<Skipped>,
}

/// Returns the taps for the wanted pods, the named interfaces and the interfaces of captures.
///
/// `links` must contain the node's devices and the devices inside each wanted pod. If two pods claim the same device,
/// the first one in `wanted` wins.
pub fn select(
    wanted: &[Wanted<'_>],
    captures: &[Capture],
    links: &LinkSnapshot,
    policy: &Policy,
) -> Selection {
    let mut selection = Selection::default();
    for wanted in wanted {
        select_pod(wanted, links, policy, &mut selection);
    }
    for name in &policy.interfaces {
        let skip = |why| Skipped { pod: None, nic: Some(name.clone()), mirror: None, why };
        match links.by_name(name) {
            None => selection.skipped.push(skip(Why::NoSuchInterface)),
            Some(link) => {
                let tap = interface_tap(name, policy);
                if let Err(why) = claim(link, tap, links, policy, &mut selection) {
                    selection.skipped.push(skip(why));
                }
            }
        }
    }
    for capture in captures {
        capture.select(links, policy, &mut selection);
    }
    selection
}

/// Returns the tap of an interface that the user named: one mirror, with the node's settings.
fn interface_tap(name: &str, policy: &Policy) -> Tap {
    let session = Session {
        directions: policy.interface_directions,
        settings: policy.settings.clone(),
        target: policy.target.clone(),
        origin: Origin::Interface,
        asked: 0,
        key: None,
    };
    let head = TapHead::new(Owner::of_interface(name), TapKind::Interface);
    let head = TapHead { is_limited: policy.limits.is_limited(), ..head };
    Tap { head, sessions: [(MirrorId::default(), session)].into() }
}

/// Adds the taps of one pod: one for each of its NICs.
fn select_pod(wanted: &Wanted<'_>, links: &LinkSnapshot, policy: &Policy, selection: &mut Selection) {
    let Wanted { pod, mirrors, is_asked, .. } = wanted;
    // Reasons concern the pod, unless only captures want it.
    let mirror = mirrors.keys().next().filter(|_| mirrors.keys().all(|mirror| mirror.0.is_capture()));
    let skip = |nic: Option<&str>, why, selection: &mut Selection| {
        let (nic, mirror) = (nic.map(str::to_owned), mirror.cloned());
        selection.skipped.push(Skipped { pod: Some(pod.id.clone()), nic, mirror, why });
    };
    let host_network = Why::HostNetwork { is_asked: *is_asked };
    if pod.host_network {
        return skip(None, host_network, selection);
    }
    let inside = match links.pods.get(&pod.id.uid) {
        None => return skip(None, Why::NoNetns, selection),
        Some(Err(error)) => return skip(None, Why::NetnsUnreadable(error.clone()), selection),
        Some(Ok(inside)) if inside.is_host => return skip(None, host_network, selection),
        Some(Ok(inside)) => inside,
    };
    match inside.stale.as_deref() {
        Some(NO_PROCESS) => skip(None, Why::NoNetns, selection),
        Some(error) => skip(None, Why::NetnsUnreadable(error.to_owned()), selection),
        None => {}
    }
    let mut nics = Vec::new();
    let former_names: BTreeMap<_, _> =
        inside.links.iter().filter_map(|nic| Some((nic.ifindex, former_name(nic, &inside.links)?))).collect();
    let former = |nic: &Link| former_names.get(&nic.ifindex).copied();
    let is_former = |nic: &Link| former_names.values().any(|name| *name == nic.name);
    let has_name = |nic: &Link, name: &str| nic.name == name || former(nic) == Some(name);
    for nic in inside.links.iter().filter(|nic| !is_former(nic)) {
        let is_named = wanted.expected_nics().any(|(_, name)| has_name(nic, name));
        if is_nic(nic, is_named) {
            nics.push((!is_named, nic, inside.host_end(nic, &links.host)));
        }
    }
    if nics.is_empty() && inside.stale.is_none() {
        skip(None, Why::NoNic, selection);
    }
    for (mirror, name) in wanted.expected_nics().filter(|_| !nics.is_empty()) {
        let why = match inside.links.iter().find(|link| link.name == name && !exit::is_exit(link)) {
            Some(link) if link.kind == LinkKind::Loopback => Why::Loopback,
            Some(_) => continue,
            None => Why::NoSuchNic,
        };
        let (pod, mirror, nic) = (Some(pod.id.clone()), Some(mirror.clone()), Some(name.to_owned()));
        selection.skipped.push(Skipped { pod, nic, mirror, why });
    }
    nics.sort_by_key(|(is_unnamed, nic, _)| (*is_unnamed, nic.ifindex));
    let leads_to_node = nics.iter().any(|(_, _, host_end)| host_end.is_some());
    let has_way_out = leads_to_node || nics.iter().any(|(_, nic, _)| leads_out(nic));
    let mut count = 0;
    for (_, nic, host_end) in nics {
        let sessions = wanted.mirrors_of(&nic.name, former(nic));
        let is_named = wanted.named_nics().any(|(_, name)| has_name(nic, name));
        let network = pod.networks.of_nic(former(nic).unwrap_or(&nic.name));
        let is_tapped_inside = host_end.is_none() && (is_named || leads_out(nic));
        // The device sends through another NIC of the pod, or only inside the pod.
        let is_inner = match nic.kind {
            // If the NIC belongs to a network, it is not a device that a process in a container created.
            LinkKind::Veth => leads_to_node && network.is_none(),
            LinkKind::Dummy | LinkKind::Ifb => has_way_out,
            _ => has_way_out && network.is_none(),
        };
        if sessions.is_empty() || host_end.is_none() && !is_tapped_inside && is_inner {
            continue;
        }
        count += 1;
        if count > MOST_NICS {
            skip(None, Why::TooManyNics, selection);
            break;
        }
        let tap = |kind, link: &Link| {
            let owner = Owner {
                pod: Some(pod.id.clone()),
                netns: inside.netns,
                nic: nic.name.clone(),
                network: network.map(str::to_owned),
                device: link.name.clone(),
            };
            let is_limited = policy.limits.is_limited();
            Tap { head: TapHead { is_limited, ..TapHead::new(owner, kind) }, sessions: sessions.clone() }
        };
        let result = match host_end {
            Some(link) => claim(link, tap(TapKind::HostVeth, link), links, policy, selection),
            None if is_tapped_inside => {
                let device = Device::in_pod(inside.netns, nic.ifindex);
                let mut tap = tap(TapKind::PodNic, nic);
                tap.head.exit = exit::of(inside, links).filter(|_| exit::needs_exit(&tap, policy));
                inside::refusal(nic, &tap, pod, policy).map_or_else(|| take(device, tap, selection), Err)
            }
            None => Err(Why::NoHostInterface(kind_name(&nic.kind).to_owned())),
        };
        if let Err(why) = result {
            skip(Some(&nic.name), why, selection);
        }
    }
}

/// Claims a device of the node for a tap, which gets the bridge of the device, unless the device is claimed already or
/// conflicts with a mirror interface.
fn claim(
    link: &Link,
    mut tap: Tap,
    links: &LinkSnapshot,
    policy: &Policy,
    selection: &mut Selection,
) -> Result<(), Why> {
    // The kernel clones only frames to an Ethernet device (`__bpf_redirect_common`), and files and tunnels have frames.
    if !link.is_ethernet {
        return Err(Why::NotEthernet);
    }
    // A collector's device can be tapped for other targets. The programs count packets that it would copy to itself as
    // `loop`.
    let devices = policy.own_devices();
    let mirrors = devices.iter().filter_map(|device| links.by_name(device));
    if let Some(conflict) = mirrors.filter_map(|mirror| mirror_iface::conflict(mirror, link, links)).next() {
        return Err(Why::MirrorInterface(conflict));
    }
    if is_tunnels(link) && tap.sessions.values().any(|session| is_to_tunnel(session, policy)) {
        return Err(Why::TunnelInTunnel(kind_name(&link.kind).to_owned()));
    }
    tap.head.bridge = links.bridge_of(link);
    take(Device::on_node(link.ifindex), tap, selection)
}

fn is_to_tunnel(session: &Session, policy: &Policy) -> bool {
    policy.targets.get(&session.target).is_some_and(Destination::is_tunnel)
}

fn take(device: Device, tap: Tap, selection: &mut Selection) -> Result<(), Why> {
    match selection.taps.get(&device) {
        // The interface was named twice.
        Some(taken) if taken.head.owner == tap.head.owner => Ok(()),
        Some(taken) => Err(Why::TappedFor(taken.head.owner.pod.clone().unwrap_or_default())),
        None => {
            selection.taps.insert(device, tap);
            Ok(())
        }
    }
}

/// Whether a device can be a tunnel device whose packets get their tunnel addresses from a BPF program, as with Cilium.
/// Such a program uses `bpf_skb_set_tunnel_key`, like `deliver`, and the kernel has a single object per CPU for all
/// addresses that are set in this way.
fn is_tunnels(link: &Link) -> bool {
    const KINDS: [&str; 6] = ["vxlan", "geneve", "gretap", "ip6gretap", "erspan", "ip6erspan"];
    matches!(&link.kind, LinkKind::Other(kind) if KINDS.contains(&kind.as_str()))
}

fn kind_name(kind: &LinkKind) -> &str {
    match kind {
        LinkKind::Loopback => "loopback",
        LinkKind::Veth => "veth",
        LinkKind::Dummy => "dummy",
        LinkKind::Ifb => "ifb",
        LinkKind::IpvlanL3s => "ipvlan",
        LinkKind::Other(kind) if kind.is_empty() => "physical",
        LinkKind::Other(kind) => kind,
    }
}
