//! Finds the pod of a process in the text of `/proc/<pid>/cgroup`. Pure; `procfs` calls it.
//!
//! The kubelet creates a cgroup for every pod, with the pod's UID in its name, for every cgroup version, driver and
//! runtime:
//!
//! | driver | path |
//! | --- | --- |
//! | cgroupfs | `…/kubepods[/burstable\|/besteffort]/pod<uid>/<container>` |
//! | systemd | `…/[…-]kubepods[-burstable\|-besteffort]-pod<uid, _ for ->.slice/<container>.scope` |
//!
//! The part of the path after the UID depends on the runtime, and the part before it on the cluster (kind, k3s, RKE).
//! Both parts are ignored, except for CRI-O's monitor and users' sessions. A UID can have any form: a UUID, a static
//! pod's hash, or another text. Only an underscore would not survive the systemd driver, and a dot ends the name of a
//! unit.
//!
//! If pods are nested (a cluster inside a pod), the result is the outermost pod: it belongs to this node's kubelet.
//! Users inside the pod choose the names below it. A pod that can write to its cgroup file system must not be able to
//! impersonate another pod.

/// The name of CRI-O's monitor of a container. It can be in the pod's cgroup, but it belongs to the runtime, and runs
/// in the node's namespaces.
const CRIO_MONITOR: &str = "crio-conmon-";
/// The cgroup of the sessions of the node's users. systemd delegates parts of it to them, so they can create a cgroup
/// with the name of any pod there. A kubelet of root creates none below it.
const SESSIONS: &str = "user.slice";

/// Returns the UID of the pod that a process with this `/proc/<pid>/cgroup` belongs to.
///
/// With several hierarchies (cgroup v1), the first that has a pod counts.
pub(super) fn pod_uid(cgroup: &str) -> Option<String> {
    // `<hierarchy>:<controllers>:<path>`; the path may contain colons.
    cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(uid_in_path)
}

fn uid_in_path(path: &str) -> Option<String> {
    let mut parent = "";
    let mut components = path.split('/').take_while(|component| *component != SESSIONS);
    let uid = components.find_map(|component| {
        let uid = systemd(component).or_else(|| cgroupfs(parent, component));
        parent = component;
        uid
    })?;
    let is_monitor = components.next().is_some_and(|container| container.starts_with(CRIO_MONITOR));
    (!is_monitor).then_some(uid)
}

/// The name of a slice contains the names of all its parent slices. If the kubelet uses the systemd driver and the
/// runtime does not, the runtime creates one directory named `<slice>:<prefix>:<container>`.
fn systemd(component: &str) -> Option<String> {
    let slice = component.split_once(':').map_or(component, |(slice, _)| slice);
    let (above, uid) = slice.strip_suffix(".slice")?.rsplit_once("-pod")?;
    let above =
        above.strip_suffix("-burstable").or_else(|| above.strip_suffix("-besteffort")).unwrap_or(above);
    let is_pod = above == "kubepods" || above.ends_with("-kubepods");
    (is_pod && !uid.is_empty()).then(|| uid.replace('_', "-"))
}

/// The upper part may be missing: inside a cgroup namespace, a path begins with `/..`.
fn cgroupfs(parent: &str, component: &str) -> Option<String> {
    let uid = component.strip_prefix("pod")?;
    let is_pod = matches!(parent, "kubepods" | "burstable" | "besteffort" | "..");
    (is_pod && !uid.is_empty() && !uid.contains('.')).then(|| uid.to_owned())
}

#[cfg(test)]
mod tests;
