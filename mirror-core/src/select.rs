//! Which devices are tapped, for which pods, and why the others are not.
//!
//! Pure: pods, resources, devices and policy in; taps, skips and complaints out. [`choose`] reads resources and
//! annotations, [`select`] finds the devices, [`coverage`] judges the resources. This module does not know the installed
//! state (`plan` does) and reads nothing itself.

mod attachments;
mod bad;
mod captures;
mod choice;
mod coverage;
mod filters;
mod inside;
mod nics;
mod policy;
mod resources;
#[cfg(test)]
mod tests;
mod unasked;
mod unread;
mod why;

use std::collections::BTreeMap;

use mirror_common::verdict::TapKind;

pub use self::attachments::Attachment;
pub use self::bad::{BadAnnotation, Problem};
pub use self::captures::{Capture, Readers};
pub use self::choice::{Choice, MIRROR, NICS, OVN_MIRROR, PREFIX, Wanted, choose};
pub use self::coverage::{Coverage, NotCovered, Standing, coverage};
pub use self::filters::Filters;
pub use self::inside::{see_inside, with_two_sides};
pub use self::nics::Nics;
use self::{
    inside::leads_out,
    nics::{former_name, is_nic},
};
pub use self::{
    policy::{Policy, TapsInside},
    resources::{Refusal, Selected, refusal},
    unasked::Unasked,
    unread::keep_installed,
    why::Why,
};
use crate::{
    destination::Destination,
    exit, mirror_iface,
    model::{Device, Link, LinkKind, LinkSnapshot, MirrorId, Origin, Owner, PodId, Session, Tap},
};

/// Most NICs of a pod that are tapped: those that annotations name, and then those of the lowest indexes. Root in a pod can
/// make any number, and the node's tables are for all pods.
const MOST_NICS: usize = 16;

/// A pod, a NIC or an interface that is selected but not tapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// The pod; `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The NIC, where the reason concerns a NIC; or the interface's name.
    pub nic: Option<String>,
    /// The mirror, where the reason concerns a mirror.
    pub mirror: Option<MirrorId>,
    /// Why not.
    pub why: Why,
}

impl Skipped {
    /// Whether the reason concerns this mirror, which is not the mirror `default`.
    fn concerns(&self, mirror: &MirrorId) -> bool {
        match &self.mirror {
            Some(of) => of == mirror,
            // A reason without a name of a mirror concerns the pod, or the mirror `default`.
            None => !self.why.is_of_one_mirror(),
        }
    }

    /// Whether the reason concerns a ClusterMirror alone, which is the administrator's matter.
    pub fn is_of_cluster_mirror(&self) -> bool {
        self.mirror.as_ref().is_some_and(|mirror| mirror.0.is_of_cluster_mirror())
    }

    /// Whether the reason concerns captures alone. The program that asked for the capture is told.
    pub fn is_of_capture(&self) -> bool {
        self.mirror.as_ref().is_some_and(|mirror| mirror.0.is_capture())
    }
}

/// The result of a selection: the wanted taps, and the reasons for missing ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Taps by the device that is tapped.
    pub taps: BTreeMap<Device, Tap>,
    /// Selected, but not tapped.
    pub skipped: Vec<Skipped>,
}

/// The taps for the wanted pods, the named interfaces and the interfaces of captures.
///
/// `links` must hold the node's devices and the devices inside each wanted pod. Of two claims to one device the first
/// in the order of `wanted` wins.
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
            // A program writes the records of a stream into a file of Ethernet frames.
            Some(link) if !link.is_ethernet && policy.streams().any(|name| *name == policy.target) => {
                selection.skipped.push(skip(Why::NotEthernet));
            }
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

/// The tap of an interface that the user named: one mirror, with the node's settings.
fn interface_tap(name: &str, policy: &Policy) -> Tap {
    let session = Session {
        directions: policy.interface_directions,
        settings: policy.settings.clone(),
        target: policy.target.clone(),
        origin: Origin::Interface,
        asked: 0,
        key: None,
    };
    Tap {
        owner: Owner::of_interface(name),
        kind: TapKind::Interface,
        is_limited: policy.limits.is_limited(),
        exit: None,
        pod_side: None,
        sessions: [(MirrorId::default(), session)].into(),
    }
}

/// Adds the taps of one pod: a tap for each of its NICs.
fn select_pod(wanted: &Wanted<'_>, links: &LinkSnapshot, policy: &Policy, selection: &mut Selection) {
    let Wanted { pod, mirrors, is_asked, .. } = wanted;
    // A reason concerns the pod, unless only a capture wants the pod.
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
    if let Some(error) = &inside.stale {
        skip(None, Why::NetnsUnreadable(error.clone()), selection);
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
        // What it sends leaves by another NIC of the pod, or stays in the pod.
        let is_inner = match nic.kind {
            // One of a network is no device of a container.
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
        let tap = |kind, link: &Link| Tap {
            owner: Owner {
                pod: Some(pod.id.clone()),
                netns: inside.netns,
                nic: nic.name.clone(),
                network: network.map(str::to_owned),
                device: link.name.clone(),
            },
            kind,
            is_limited: policy.limits.is_limited(),
            exit: None,
            pod_side: None,
            sessions: sessions.clone(),
        };
        let result = match host_end {
            Some(link) => claim(link, tap(TapKind::HostVeth, link), links, policy, selection),
            None if is_tapped_inside => {
                let device = Device::in_pod(inside.netns, nic.ifindex);
                let tap = tap(TapKind::PodNic, nic);
                let exit = exit::of(inside, links).filter(|_| exit::needs_exit(&tap, policy));
                let tap = Tap { exit, ..tap };
                inside::refusal(nic, &tap, pod, policy).map_or_else(|| take(device, tap, selection), Err)
            }
            None => Err(Why::NoHostInterface(kind_name(&nic.kind).to_owned())),
        };
        if let Err(why) = result {
            skip(Some(&nic.name), why, selection);
        }
    }
}

/// Takes a device of the node for a tap, unless it is taken or entangled with a mirror interface.
fn claim(
    link: &Link,
    tap: Tap,
    links: &LinkSnapshot,
    policy: &Policy,
    selection: &mut Selection,
) -> Result<(), Why> {
    // A collector's device may be tapped for other targets. The programs count its packets to itself as `loop`.
    let devices = policy.own_devices();
    let mirrors = devices.iter().filter_map(|device| links.by_name(device));
    if let Some(conflict) = mirrors.filter_map(|mirror| mirror_iface::conflict(mirror, link, links)).next() {
        return Err(Why::MirrorInterface(conflict));
    }
    if is_tunnels(link) && tap.sessions.values().any(|session| is_to_tunnel(session, policy)) {
        return Err(Why::TunnelInTunnel(kind_name(&link.kind).to_owned()));
    }
    take(Device::on_node(link.ifindex), tap, selection)
}

fn is_to_tunnel(session: &Session, policy: &Policy) -> bool {
    policy.targets.get(&session.target).is_some_and(Destination::is_tunnel)
}

fn take(device: Device, tap: Tap, selection: &mut Selection) -> Result<(), Why> {
    match selection.taps.get(&device) {
        // An interface that was named twice.
        Some(taken) if taken.owner == tap.owner => Ok(()),
        Some(taken) => Err(Why::TappedFor(taken.owner.pod.clone().unwrap_or_default())),
        None => {
            selection.taps.insert(device, tap);
            Ok(())
        }
    }
}

/// Whether a device may be a tunnel's to whose packets a program gives their addresses, as Cilium's does. It does so by
/// `bpf_skb_set_tunnel_key`, like `deliver`, and all addresses given on a CPU are one object of the kernel.
fn is_tunnels(link: &Link) -> bool {
    const KINDS: [&str; 11] = [
        "vxlan",
        "geneve",
        "gre",
        "gretap",
        "ip6gre",
        "ip6gretap",
        "erspan",
        "ip6erspan",
        "ipip",
        "ip6tnl",
        "xfrm",
    ];
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
