//! Collectors: pods that are targets. Finds the device of the node that leads to a collector, or the reason why there
//! is none.
//!
//! Pure. The reconcile loop calls [`of`] before it reads the devices inside the pods, and [`target`] after that. The
//! device is the node side of the pod's veth: packets that are sent to it arrive at the pod's NIC. The agent does not
//! create, change or delete such devices.

use std::fmt;

use crate::{
    destination::{Destination, PodNic},
    model::{DeviceTarget, Link, LinkKind, LinkSnapshot, Pod},
};

/// Why copies cannot go to a collector now.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Absent {
    /// There is no list of pods yet.
    NoList,
    /// This node has no such pod.
    NoPod,
    /// The pod shares the node's network namespace.
    HostNetwork,
    /// No process of the pod runs on this node yet.
    NoNetns,
    /// The pod's network namespace cannot be read, for this reason.
    NetnsUnreadable(String),
    /// The pod does not have this NIC, or has no NIC yet.
    NoNic(Option<String>),
    /// No veth leads from the node to this NIC.
    NoVeth(String),
    /// The device that leads to the pod is down, or the NIC is.
    Down(String),
}

impl Absent {
    /// Whether the reason is transient, while the agent or the pod starts.
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::NoList | Self::NoNetns | Self::NoNic(None))
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoList => write!(f, "the pods of this node are not known yet"),
            Self::NoPod => write!(f, "no such pod is on this node"),
            Self::HostNetwork => {
                write!(f, "the pod uses the node's own network and has no veth; name a device instead")
            }
            Self::NoNetns => write!(f, "no process of the pod runs on this node yet"),
            Self::NetnsUnreadable(error) => write!(f, "the pod's network namespace cannot be read: {error}"),
            Self::NoNic(None) => write!(f, "the pod has no interface but loopback yet"),
            Self::NoNic(Some(nic)) => write!(f, "the pod has no interface {nic:?}"),
            Self::NoVeth(nic) => write!(f, "the pod's interface {nic:?} has no veth peer on the node"),
            Self::Down(nic) => write!(f, "the pod's interface {nic:?} or the node side of its veth is down"),
        }
    }
}

/// The candidate pods, whose devices must be read. Several pods can have a label. In a file, several can have the same
/// name.
pub fn of<'a>(nic: &'a PodNic, pods: &'a [Pod]) -> impl Iterator<Item = &'a Pod> {
    pods.iter().filter(|pod| pod.id.namespace == nic.namespace && nic.which.is(pod))
}

/// Returns the device that leads to a collector, and why nothing can be copied there. Of several pods, the first
/// reachable one is used.
pub fn target(nic: &PodNic, pods: &[Pod], links: &LinkSnapshot) -> (DeviceTarget, Option<Absent>) {
    let mut not_reached = None;
    for pod in of(nic, pods) {
        let (target, absent) = match of_pod(nic, pod, links) {
            Ok(target) if target.up => return (target, None),
            Ok(target) => (target, Absent::Down(nic_name(nic, pod, links))),
            Err(why) => (none(nic), why),
        };
        not_reached.get_or_insert((target, Some(absent)));
    }
    not_reached.unwrap_or_else(|| (none(nic), Some(Absent::NoPod)))
}

/// Returns the target to use until there is a list of pods: the one that an earlier agent wrote, if its device still
/// exists.
pub fn until_listed(
    nic: &PodNic,
    before: Option<&DeviceTarget>,
    links: &LinkSnapshot,
) -> (DeviceTarget, Option<Absent>) {
    let before = before.filter(|before| before.destination.pod() == Some(nic));
    let link = before.and_then(|before| links.host.get(&before.ifindex?));
    let link =
        link.filter(|link| leads_away(link) && before.is_some_and(|before| before.device == link.name));
    match before.zip(link) {
        Some((before, link)) => (with_state(before.clone(), link, links), None),
        None => (none(nic), Some(Absent::NoList)),
    }
}

fn of_pod(nic: &PodNic, pod: &Pod, links: &LinkSnapshot) -> Result<DeviceTarget, Absent> {
    if pod.host_network {
        return Err(Absent::HostNetwork);
    }
    let (inside, link) = nic_of(nic, pod, links)?;
    let target = DeviceTarget { collector: inside.address.filter(|address| *address != [0; 6]), ..none(nic) };
    Ok(with_state(target, link, links))
}

/// The NIC inside the pod, and the node side of its veth.
fn nic_of<'a>(nic: &PodNic, pod: &Pod, links: &'a LinkSnapshot) -> Result<(&'a Link, &'a Link), Absent> {
    let inside = match links.pods.get(&pod.id.uid) {
        None => return Err(Absent::NoNetns),
        Some(Err(error)) => return Err(Absent::NetnsUnreadable(error.clone())),
        Some(Ok(inside)) if inside.is_host => return Err(Absent::HostNetwork),
        Some(Ok(inside)) => inside,
    };
    let is_meant = |link: &&Link| match &nic.nic {
        Some(name) => link.name == *name,
        None => link.kind != LinkKind::Loopback,
    };
    let mut candidates = inside.links.iter().filter(is_meant).peekable();
    let first = candidates.peek().map(|link| link.name.clone());
    let found = candidates.find_map(|link| Some((link, inside.host_end(link, &links.host)?)));
    match (found, first) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => Err(Absent::NoVeth(name)),
        (None, None) => Err(Absent::NoNic(nic.nic.clone())),
    }
}

fn nic_name(nic: &PodNic, pod: &Pod, links: &LinkSnapshot) -> String {
    nic_of(nic, pod, links).map(|(inside, _)| inside.name.clone()).unwrap_or_default()
}

fn none(nic: &PodNic) -> DeviceTarget {
    DeviceTarget { destination: Destination::Pod(nic.clone()), ..DeviceTarget::default() }
}

fn with_state(target: DeviceTarget, link: &Link, links: &LinkSnapshot) -> DeviceTarget {
    DeviceTarget {
        device: link.name.clone(),
        ifindex: Some(link.ifindex),
        up: link.up && link.carrier,
        queueless: link.queueless,
        guarded: true,
        bridge: links.bridge_of(link),
        ..target
    }
}

/// Whether the peer of a veth is in another namespace.
fn leads_away(link: &Link) -> bool {
    link.kind == LinkKind::Veth && link.peer.is_some_and(|peer| peer.nsid.is_some())
}

#[cfg(test)]
mod tests;
