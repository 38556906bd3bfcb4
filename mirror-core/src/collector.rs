//! Collectors: pods that are targets. Finds the device of the node that leads to a collector, or the reason why there
//! is none.
//!
//! Pure. The reconcile loop calls [`of`] before it reads the devices inside the pods, and [`target`] after that. The
//! device is the node side of the pod's veth: packets that are sent to it arrive at the pod's NIC. The agent does not
//! create, change or delete such devices.

use crate::{
    destination::{Destination, PodNic},
    model::{DeviceTarget, Link, LinkKind, LinkSnapshot, Pod},
};

/// Why copies cannot go to a collector now, and whether the reason is transient, while the agent or the pod starts.
pub type Absent = (String, bool);

/// The reason for a pod in the node's network namespace.
const HOST_NETWORK: &str = "the pod uses the node's own network and has no veth; name a device instead";

fn lasting<T>(why: impl Into<String>) -> Result<T, Absent> {
    Err((why.into(), false))
}

fn passing<T>(why: &str) -> Result<T, Absent> {
    Err((why.to_owned(), true))
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
            Ok(target) => {
                let nic = nic_name(nic, pod, links);
                let why = format!("the pod's interface {nic:?} or the node side of its veth is down");
                (target, (why, false))
            }
            Err(why) => (none(nic), why),
        };
        not_reached.get_or_insert((target, Some(absent)));
    }
    not_reached.unwrap_or_else(|| (none(nic), Some(("no such pod is on this node".to_owned(), false))))
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
        None => (none(nic), Some(("the pods of this node are not known yet".to_owned(), true))),
    }
}

fn of_pod(nic: &PodNic, pod: &Pod, links: &LinkSnapshot) -> Result<DeviceTarget, Absent> {
    if pod.host_network {
        return lasting(HOST_NETWORK);
    }
    let (inside, link) = nic_of(nic, pod, links)?;
    let target = DeviceTarget { collector: inside.address.filter(|address| *address != [0; 6]), ..none(nic) };
    Ok(with_state(target, link, links))
}

/// The NIC inside the pod, and the node side of its veth.
fn nic_of<'a>(nic: &PodNic, pod: &Pod, links: &'a LinkSnapshot) -> Result<(&'a Link, &'a Link), Absent> {
    let inside = match links.pods.get(&pod.id.uid) {
        None => return passing("no process of the pod runs on this node yet"),
        Some(Err(error)) => return lasting(format!("the pod's network namespace cannot be read: {error}")),
        Some(Ok(inside)) if inside.is_host => return lasting(HOST_NETWORK),
        Some(Ok(inside)) => inside,
    };
    let is_meant = |link: &&Link| match &nic.nic {
        Some(name) => link.name == *name,
        None => link.kind != LinkKind::Loopback,
    };
    let mut candidates = inside.links.iter().filter(is_meant).peekable();
    let first = candidates.peek().map(|link| link.name.clone());
    let found = candidates.find_map(|link| Some((link, inside.host_end(link, &links.host)?)));
    match (found, first, &nic.nic) {
        (Some(found), ..) => Ok(found),
        (None, Some(nic), _) => lasting(format!("the pod's interface {nic:?} has no veth peer on the node")),
        (None, None, Some(nic)) => lasting(format!("the pod has no interface {nic:?}")),
        (None, None, None) => passing("the pod has no interface but loopback yet"),
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
