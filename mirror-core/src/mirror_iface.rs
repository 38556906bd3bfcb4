//! The mirror interface: which devices can be one, and how the agent creates and configures it.
//!
//! Pure: takes devices, returns changes and refusals. The reconcile loop applies the changes through `links`.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    destination::Destination,
    model::{
        ALIAS, DeviceTarget, FIRST_IFINDEX, IfIndex, Link, LinkChange, LinkKind, LinkSnapshot, Readable,
        TargetName,
    },
};

/// MTU in bytes of a mirror interface that the agent creates: the largest possible, so that every packet fits.
const DEFAULT_MTU: u32 = 65535;

/// Why `tapped` must not be tapped while `mirror` is the mirror interface. The copies would pass the tap again.
pub fn conflict(mirror: &Link, tapped: &Link, links: &LinkSnapshot) -> Option<String> {
    let device = &tapped.name;
    let mirror_peer = mirror.peer.filter(|peer| peer.nsid.is_none()).map(|peer| IfIndex(peer.ifindex));
    if mirror.ifindex == tapped.ifindex {
        Some(format!("{device} is the mirror interface itself"))
    } else if tapped.master == Some(mirror.ifindex) {
        // A bridge or a bond.
        Some(format!("{device} is a port of the mirror interface"))
    } else if mirror.kind == LinkKind::Veth && mirror_peer == Some(tapped.ifindex) {
        Some(format!("the mirror interface is the other end of {device}'s veth"))
    } else if mirror.kind == LinkKind::Veth
        && tapped.master.is_some()
        && mirror_peer.and_then(|peer| links.host.get(&peer)?.master) == tapped.master
    {
        Some(format!("copies on the mirror interface would come back through the bridge of {device}"))
    } else {
        None
    }
}

/// Why a device can never be a mirror interface, whatever is tapped.
pub fn refusal(mirror: &Link) -> Option<String> {
    let why = match mirror.kind {
        LinkKind::Loopback => "the loopback device delivers what is sent to it on the node itself",
        LinkKind::Ifb => "an ifb device puts every copy back into the path that it came from",
        _ => return None,
    };
    Some(format!("{} cannot be the mirror interface: {why}; choose another --mirror-iface", mirror.name))
}

/// The wanted mirror interface, and what is known about its device.
#[derive(Debug, Clone)]
pub struct MirrorIface {
    name: String,
    mtu: Option<u32>,
    offloads: bool,
    when_read: bool,
    /// The device is the agent's: podmirror created it, or it did not exist when the agent started. The agent creates it
    /// whenever it is missing. If a device of other software disappears, the agent waits until it exists again. `None`:
    /// not read yet.
    is_ours: Option<bool>,
    /// The changes for the agent's start that the device does not show yet.
    at_start: Vec<LinkChange>,
}

impl MirrorIface {
    /// A mirror interface of this name. `mtu` in bytes, if the user set one.
    pub fn new(name: &str, mtu: Option<u32>) -> Self {
        let name = name.to_owned();
        Self { name, mtu, offloads: true, when_read: false, is_ours: None, at_start: Vec::new() }
    }

    /// Whether the device gets super-frames and unfinished checksums. Otherwise the kernel segments each copy and
    /// completes its checksum.
    #[must_use]
    pub fn offloads(self, offloads: bool) -> Self {
        Self { offloads, ..self }
    }

    /// Whether copies are made only while somebody reads the device.
    #[must_use]
    pub fn when_read(self, when_read: bool) -> Self {
        Self { when_read, ..self }
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The changes that are needed now.
    ///
    /// The agent brings an existing device up, and sets the MTU that the user configured, only when the agent
    /// starts, and tries again until the device shows it. If a user sets the device down later, it stays down.
    /// Unwanted offloads are switched off whenever they are on, because they would change the documented form of the
    /// copies. If offloads are off, a device of the agent gets podmirror's queue, so that copies keep their order.
    pub fn changes(&mut self, links: &LinkSnapshot) -> Vec<LinkChange> {
        let named = links.by_name(&self.name);
        let half_made = named.filter(|link| is_half_made(link));
        let link = named.filter(|link| !is_half_made(link));
        let first = self.is_ours.is_none();
        let is_own = *self.is_ours.get_or_insert_with(|| link.is_none_or(is_ours));
        let mut changes: Vec<_> =
            half_made.map(|link| LinkChange::Delete(link.ifindex)).into_iter().collect();
        if link.is_none() && is_own {
            let mtu = self.mtu.unwrap_or(DEFAULT_MTU);
            let (name, offloads) = (self.name.clone(), self.offloads);
            changes.push(LinkChange::CreateMirror { name, mtu, offloads });
        }
        let missing = link.map(|link| self.missing(link)).unwrap_or_default();
        if first {
            self.at_start.clone_from(&missing);
        } else {
            // The queue is tried once: if it is other software's, the removal succeeds and changes nothing.
            let is_queue = |change: &LinkChange| matches!(change, LinkChange::SetQueue(..));
            self.at_start.retain(|change| missing.contains(change) && !is_queue(change));
        }
        let is_due = |change: &LinkChange| {
            let is_offload = matches!(change, LinkChange::SetOffloads(..) | LinkChange::SetQueue(..));
            is_offload && !self.offloads || self.at_start.contains(change)
        };
        changes.extend(missing.into_iter().filter(is_due));
        // With an address, the node would send packets of its own to the device, and they would look like copies.
        let peer = link.and_then(|link| links.host.get(&IfIndex(link.peer?.ifindex)));
        let ours = link.into_iter().chain(peer).filter(|link| is_ours(link));
        let addressed = ours.filter(|link| links.addresses.contains_key(&link.ifindex));
        changes.extend(addressed.map(|link| LinkChange::RemoveAddresses(link.ifindex)));
        changes
    }

    /// The changes after which a device has all wanted settings.
    fn missing(&self, link: &Link) -> Vec<LinkChange> {
        let mtu = self.mtu.filter(|mtu| *mtu != link.mtu).map(|mtu| LinkChange::SetMtu(link.ifindex, mtu));
        let up = (!link.up).then_some(LinkChange::SetUp(link.ifindex));
        [mtu, up, self.switch(link), self.queue(link)].into_iter().flatten().collect()
    }

    /// The change of a device's offloads, if one is needed.
    ///
    /// Wanted offloads are switched on again only on the agent's own device and only when the agent starts, because an
    /// earlier agent may have switched them off. For other software's devices the original setting is unknown.
    fn switch(&self, link: &Link) -> Option<LinkChange> {
        let is_due = match (self.offloads, &link.offloads) {
            (false, Some(now)) => !now.on.is_empty(),
            // The offloads are unknown: try the change, so that there is an error to report.
            (false, None) => true,
            (true, now) => is_ours(link) && now.as_ref().is_some_and(|now| !now.off.is_empty()),
        };
        is_due.then_some(LinkChange::SetOffloads(link.ifindex, self.offloads))
    }

    /// The change of a device's queue, if one is needed. Only the agent's own devices get a queue: adding one takes the
    /// device out of service for some milliseconds, and other software's device can carry more than copies.
    fn queue(&self, link: &Link) -> Option<LinkChange> {
        let is_due = self.offloads != link.queueless && is_ours(link);
        is_due.then_some(LinkChange::SetQueue(link.ifindex, !self.offloads))
    }

    /// Whether copies can be reordered: the kernel segments them, and the device is other software's and has no queue.
    pub fn loses_order(&self, links: &LinkSnapshot) -> bool {
        let link = links.by_name(&self.name);
        !self.offloads && link.is_some_and(|link| link.queueless && !is_ours(link))
    }

    /// The unwanted offloads that the device cannot switch off.
    pub fn fixed_offloads<'a>(&self, links: &'a LinkSnapshot) -> Option<&'a BTreeSet<String>> {
        let offloads = links.by_name(&self.name)?.offloads.as_ref();
        offloads.map(|offloads| &offloads.fixed).filter(|fixed| !self.offloads && !fixed.is_empty())
    }

    /// The target, with the current state of the device.
    pub fn target(&self, links: &LinkSnapshot) -> DeviceTarget {
        let (destination, device) = (Destination::Device(self.name.clone()), self.name.clone());
        let none = DeviceTarget { destination, device, ..DeviceTarget::default() };
        match links.by_name(&self.name).filter(|link| refusal(link).is_none()) {
            None => none,
            Some(link) => {
                let readable = self.readable(link, links);
                DeviceTarget {
                    ifindex: Some(link.ifindex),
                    up: link.up && link.carrier,
                    queueless: link.queueless,
                    when_read: readable.is_some(),
                    other_end: readable.and_then(|readable| readable.other_end),
                    ..none
                }
            }
        }
    }

    /// The devices to check for readers, if copies are made only while there is one. This works only for the agent's
    /// own devices, which nothing but a packet socket can read. Other software's device could forward a copy.
    fn readable(&self, link: &Link, links: &LinkSnapshot) -> Option<Readable> {
        if !self.when_read || !is_ours(link) {
            return None;
        }
        let other_end = match link.kind {
            LinkKind::Dummy => None,
            LinkKind::Veth => {
                let peer = link.peer.filter(|peer| peer.nsid.is_none())?;
                let peer = links.host.get(&IfIndex(peer.ifindex))?;
                if !is_ours(peer) || peer.master.is_some() {
                    return None;
                }
                Some(peer.ifindex)
            }
            _ => return None,
        };
        Some(Readable { device: link.ifindex, other_end })
    }
}

/// The mirror interfaces of the targets of a node, and how missing ones are created.
#[derive(Debug, Clone)]
pub struct MirrorIfaces {
    template: MirrorIface,
    of: BTreeMap<TargetName, MirrorIface>,
}

impl MirrorIfaces {
    /// Creates an empty set. All its mirror interfaces are like `template`, apart from the name.
    pub const fn new(template: MirrorIface) -> Self {
        Self { template, of: BTreeMap::new() }
    }

    /// Updates the set from the targets. The state of a mirror interface is kept while its target uses it.
    pub fn follow(&mut self, targets: &BTreeMap<TargetName, Destination>) {
        self.of.retain(|name, mirror| {
            targets.get(name).and_then(Destination::device).is_some_and(|device| device == mirror.name)
        });
        for (name, to) in targets {
            if let (Some(device), false) = (to.device(), self.of.contains_key(name)) {
                let mirror = MirrorIface { name: device.to_owned(), ..self.template.clone() };
                self.of.insert(name.clone(), mirror);
            }
        }
    }

    /// The mirror interface of each target that has one.
    pub fn iter(&self) -> impl Iterator<Item = (&TargetName, &MirrorIface)> {
        self.of.iter()
    }

    /// The changes that are needed now.
    pub fn changes(&mut self, links: &LinkSnapshot) -> Vec<LinkChange> {
        self.of.values_mut().flat_map(|mirror| mirror.changes(links)).collect()
    }
}

/// The devices that podmirror created, complete or not. The alias alone is no proof: root in a pod can set it on a NIC,
/// and when the pod ends, the kernel moves a physical NIC back to the node, and some CNIs move other NICs. Of
/// podmirror's veth pairs both ends are on the node, and the peer has the alias, or is not up yet.
pub fn ours(links: &LinkSnapshot) -> impl Iterator<Item = &Link> {
    let is_pair = |link: &Link| {
        let peer = link.peer.filter(|peer| peer.nsid.is_none());
        let peer = peer.and_then(|peer| links.host.get(&IfIndex(peer.ifindex)));
        peer.is_some_and(|peer| is_ours(peer) || !peer.up)
    };
    let is_whole = move |link: &Link| is_ours(link) && (link.kind != LinkKind::Veth || is_pair(link));
    links.host.values().filter(move |link| is_whole(link) || is_half_made(link))
}

/// Deletes podmirror's devices, of any agent, that are no longer needed. `names` are the devices to keep.
pub fn left_behind(names: &BTreeSet<&str>, links: &LinkSnapshot) -> Vec<LinkChange> {
    let is_mirror = |link: &Link| names.contains(link.name.as_str());
    // If a mirror interface is a veth, its peer has podmirror's alias too.
    let peer = |link: &Link| {
        let peer = link.peer.filter(|peer| peer.nsid.is_none())?;
        links.host.get(&IfIndex(peer.ifindex))
    };
    let left = ours(links).filter(|link| !is_mirror(link) && !peer(link).is_some_and(is_mirror));
    left.map(|link| LinkChange::Delete(link.ifindex)).collect()
}

/// Whether a device has podmirror's alias and a kind that podmirror creates: dummy, veth, or tunnel device.
pub fn is_ours(link: &Link) -> bool {
    is_of_our_kind(link) && link.alias.as_deref() == Some(ALIAS)
}

/// Whether an agent was killed while it created this device. The first request sets one of podmirror's indexes, a later
/// one the alias, and the last one brings the device up.
pub fn is_half_made(link: &Link) -> bool {
    is_of_our_kind(link) && link.ifindex >= FIRST_IFINDEX && link.alias.is_none() && !link.up
}

fn is_of_our_kind(link: &Link) -> bool {
    matches!(link.kind, LinkKind::Dummy | LinkKind::Veth) || link.external.is_some()
}

#[cfg(test)]
mod tests;
