//! The programs that read packets, and captures: mirrors that such a program requests.
//!
//! Pure. A program can also read the stream of a target, to which other mirrors copy ([`Readers`]). A capture names
//! pods and interfaces, or selects pods as a Mirror does. It is one more session on their taps, with a target of its
//! own, so it changes no other mirror. `choose` and `select` add these sessions after all others; `resources` adds those
//! of selected pods. If a tap has no room for a capture of root, the newest reader of the API leaves the tap.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::{abi::MAX_SESSIONS_PER_TAP, verdict::TapKind};

use super::{Policy, Selection, Skipped, Wanted, Why, claim};
use crate::{
    model::{
        Device, Directions, Link, LinkKind, LinkSnapshot, MirrorId, Name, Origin, Owner, Pod, Resource,
        RingId, Session, Tap, TapHead, TargetName,
    },
    settings::Settings,
};

/// Maximum number of captures of readers of the API on a node. The others of `MAX_CAPTURES` are left to root, but not the
/// sessions of a tap or the memory of the rings.
pub const MAX_READERS: usize = 6;

/// The programs that read packets now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Readers {
    /// The programs that have requested a capture, in the order of their requests.
    pub captures: Vec<Capture>,
    /// The programs that read the stream of a target: the ring of each, by target. They do not own the mirrors that
    /// copy there.
    pub streams: BTreeMap<TargetName, RingId>,
}

impl Readers {
    /// The rings of all of them.
    pub fn rings(&self) -> BTreeSet<RingId> {
        self.captures.iter().map(|capture| capture.ring).chain(self.streams.values().copied()).collect()
    }

    /// The same readers except for the program that reads this ring.
    #[must_use]
    pub fn without(&self, ring: RingId) -> Self {
        let mut others = self.clone();
        others.captures.retain(|capture| capture.ring != ring);
        others.streams.retain(|_, of| *of != ring);
        others
    }
}

/// A request of a program that reads packets.
#[derive(Debug, Clone, PartialEq)]
pub struct Capture {
    /// The ring that the program reads. It also identifies the capture: the kernel never has two rings with the same
    /// id, so the remains of a killed agent are never taken for this capture.
    pub ring: RingId,
    /// The origin of its sessions: [`Origin::Capture`], or [`Origin::Reader`].
    pub origin: Origin,
    /// The packets to copy.
    pub wants: Wants,
    /// The directions to copy.
    pub directions: Directions,
    /// The filter, the sample, the snap length and the like.
    pub settings: Settings,
}

/// The packets of a capture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wants {
    /// Those of named pods and interfaces.
    Named {
        /// The pods, by namespace and name.
        pods: BTreeSet<(String, String)>,
        /// The interfaces of the node, by name.
        interfaces: BTreeSet<String>,
    },
    /// Those of the pods that a reader of the API selects. The request has the directions and settings, too.
    Reader(Box<Resource>),
}

impl Capture {
    /// The request of a reader for pods.
    pub(super) fn resource(&self) -> Option<&Resource> {
        if let Wants::Reader(resource) = &self.wants { Some(resource) } else { None }
    }

    /// The name of the capture's mirror.
    pub fn mirror(&self) -> MirrorId {
        MirrorId(Name::of_capture(self.ring.0))
    }

    /// The target of its sessions.
    pub fn target(&self) -> TargetName {
        TargetName(Name::of_capture(self.ring.0))
    }

    fn session(&self) -> Session {
        Session {
            directions: self.directions,
            settings: self.settings.clone(),
            target: self.target(),
            origin: self.origin,
            asked: 0,
            key: None,
        }
    }

    fn skip(&self, why: Why) -> Skipped {
        Skipped { pod: None, nic: None, mirror: Some(self.mirror()), why }
    }

    /// Whether a reader of the API requests interfaces.
    pub fn is_of_interfaces(&self) -> bool {
        self.origin == Origin::Reader && matches!(self.wants, Wants::Named { .. })
    }

    /// Adds the capture's session to the mirrors of a pod or tap. If there are too many then, removes and returns
    /// one: the newest reader of the API, or this capture if there is no reader.
    fn add_to(&self, mirrors: &mut BTreeMap<MirrorId, Session>) -> Option<MirrorId> {
        mirrors.insert(self.mirror(), self.session());
        if mirrors.len() <= MAX_SESSIONS_PER_TAP {
            return None;
        }
        let readers = mirrors.iter().filter(|(_, session)| session.origin == Origin::Reader);
        let newest = readers.map(|(mirror, _)| mirror).max_by_key(|mirror| mirror.0.capture_number());
        let last = newest.cloned().unwrap_or_else(|| self.mirror());
        mirrors.remove(&last);
        Some(last)
    }

    /// Adds the capture's pods to the wanted ones. Returns the pods that it, or a reader, cannot have.
    pub(super) fn choose<'a>(
        &self,
        pods: &'a [Pod],
        policy: &Policy,
        wanted: &mut Vec<Wanted<'a>>,
    ) -> Vec<Skipped> {
        let mut refused = Vec::new();
        let Wants::Named { pods: named, .. } = &self.wants else { return refused };
        for (namespace, name) in named {
            let is_named = |pod: &&Pod| pod.id.namespace == *namespace && pod.id.name == *name;
            let Some(pod) = pods.iter().find(is_named) else {
                refused.push(self.skip(Why::NoSuchPod(format!("{namespace}/{name}"))));
                continue;
            };
            let refusal = if policy.exclude_namespaces.contains(namespace) {
                Some((self.mirror(), Why::NamespaceExcluded))
            } else if let Some(wanted) = wanted.iter_mut().find(|wanted| wanted.pod.id.uid == pod.id.uid) {
                let last = self.add_to(&mut wanted.mirrors);
                if let Some(last) = &last {
                    wanted.nics.remove(last);
                }
                last.map(|last| (last, Why::TooManyMirrors))
            } else {
                let mirrors = [(self.mirror(), self.session())].into();
                wanted.push(Wanted { pod, mirrors, nics: BTreeMap::new(), is_asked: false });
                None
            };
            if let Some((mirror, why)) = refusal {
                let (pod, mirror) = (Some(pod.id.clone()), Some(mirror));
                refused.push(Skipped { pod, nic: None, mirror, why });
            }
        }
        refused
    }

    /// Adds the capture's interfaces to the taps: to the existing tap of a device, or as a new tap.
    pub(super) fn select(&self, links: &LinkSnapshot, policy: &Policy, selection: &mut Selection) {
        let Wants::Named { interfaces, .. } = &self.wants else { return };
        for name in interfaces {
            if let Err(why) = self.select_interface(name, links, policy, selection) {
                selection.skipped.push(Skipped { nic: Some(name.clone()), ..self.skip(why) });
            }
        }
    }

    fn select_interface(
        &self,
        name: &str,
        links: &LinkSnapshot,
        policy: &Policy,
        selection: &mut Selection,
    ) -> Result<(), Why> {
        let link = links.by_name(name).ok_or(Why::NoSuchInterface)?;
        if let Some(tap) = selection.taps.get_mut(&Device::on_node(link.ifindex)) {
            let last = self.add_to(&mut tap.sessions);
            let why = Why::TooManyMirrors;
            let skipped = last.map(|last| Skipped::of_nic(&tap.head.owner, Some(&last), why));
            selection.skipped.extend(skipped);
            return Ok(());
        }
        let head = TapHead::new(Owner::of_interface(name), kind(link));
        let head = TapHead { is_limited: policy.limits.is_limited(), ..head };
        let sessions = [(self.mirror(), self.session())].into();
        claim(link, Tap { head, sessions }, links, policy, selection)
    }
}

impl Selection {
    /// Removes the interfaces that lead into these pods from the captures of readers of the API, which must not
    /// read these pods.
    pub fn bar(&mut self, barred: &[(&Pod, Why)], captures: &[Capture], links: &LinkSnapshot) {
        for capture in captures.iter().filter(|capture| capture.is_of_interfaces()) {
            let Wants::Named { interfaces, .. } = &capture.wants else { continue };
            for link in interfaces.iter().filter_map(|name| links.by_name(name)) {
                let Some((_, why)) = barred.iter().find(|(pod, _)| leads_into(link, pod, links)) else {
                    continue;
                };
                if let Some(tap) = self.taps.get_mut(&Device::on_node(link.ifindex)) {
                    tap.sessions.remove(&capture.mirror());
                }
                let nic = Some(link.name.clone());
                self.skipped.push(Skipped { nic, ..capture.skip(why.clone()) });
            }
        }
        self.taps.retain(|_, tap| !tap.sessions.is_empty());
    }
}

/// Whether a device of the node leads into the network namespace of a pod, or may do so.
fn leads_into(link: &Link, pod: &Pod, links: &LinkSnapshot) -> bool {
    let nsid = link.peer.and_then(|peer| peer.nsid);
    !pod.host_network
        && nsid.is_some()
        && match links.pods.get(&pod.id.uid) {
            Some(Ok(inside)) if inside.is_host => false,
            Some(Ok(inside)) if inside.nsid.is_some() || inside.stale.is_none() => inside.nsid == nsid,
            // It may be this namespace.
            Some(_) => true,
            // No process of the pod runs yet, but its veth may exist.
            None => links.pods.values().flatten().all(|other| other.nsid != nsid),
        }
}

/// How a named device relates to the NIC behind it. A veth that leads into another namespace is treated as a pod's, so
/// that its directions are the same whether or not the pod is known.
fn kind(link: &Link) -> TapKind {
    let leads_away = link.kind == LinkKind::Veth && link.peer.is_some_and(|peer| peer.nsid.is_some());
    if leads_away { TapKind::HostVeth } else { TapKind::Interface }
}

#[cfg(test)]
mod tests;
