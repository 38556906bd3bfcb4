//! Changes the machine outside of the cluster's own directory, and undoes these changes for `down`.
//!
//! The first `up` records the state of the machine, so that `down` removes only what the cluster has added, and
//! restores the old values of settings.

use std::{
    fs,
    io::ErrorKind,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{mount::MntFlags, mount::umount2, sys::signal::Signal};
use serde_json::{Value, json};

use super::{
    BACKEND_IP, BRIDGE, NODE_IPS, POD_CIDRS, SERVICE_CIDRS, cilium, component::Process,
    component::eventually, state, state::Cni,
};
use mirror_test_tools::process::{Run as _, command, step};

/// Settings that kubelet, the CNI plugins and Cilium change.
const SYSCTLS: [&str; 8] = [
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/fib_multipath_use_neigh",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/forwarding",
    "vm/overcommit_memory",
];

/// The kernel module that passes bridged packets to the packet filter, and the directory of its settings.
const MODULE: &str = "br_netfilter";
const BRIDGE_FILTER: &str = "/proc/sys/net/bridge";

/// The setting that keeps new devices from having IPv6.
const NO_IPV6: &str = "net/ipv6/conf/default/disable_ipv6";

/// The kubelet's default directory for the logs of pods. podmirror looks there for proof that a static pod is the node's
/// own.
pub(super) const POD_LOGS: &str = "/var/log/pods";

/// Directories that the cluster's programs create at fixed paths, innermost first.
const DIRS: [&str; 15] = [
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet",
    "/var/lib/cni/results",
    "/var/lib/cni",
    "/var/log/containers",
    POD_LOGS,
    "/run/containerd/s",
    "/run/containerd",
    "/usr/libexec/kubernetes/kubelet-plugins/volume/exec",
    "/usr/libexec/kubernetes/kubelet-plugins/volume",
    "/usr/libexec/kubernetes/kubelet-plugins",
    "/usr/libexec/kubernetes",
    "/run/kubernetes",
    "/run/mount",
    "/opt/containerd",
];

/// Checks that no other node runs here, and records the state of the machine, unless it is recorded.
pub(super) fn record() -> Result<()> {
    let file = state::path("before.json");
    if file.exists() {
        return Ok(());
    }
    if let Some(dir) = kubepods().first() {
        bail!("{} exists: another Kubernetes runs pods on this machine, and two would fight", dir.display());
    }
    for cidr in families(&POD_CIDRS).iter().chain(families(&SERVICE_CIDRS)) {
        let routes = ip_route(cidr).args(["show", "root", cidr]).read()?;
        if let Some(route) = routes.lines().next() {
            bail!("the addresses of pods and services, {cidr}, are in use on this machine: {route}");
        }
    }
    let absent: Vec<_> = DIRS.into_iter().filter(|dir| !Path::new(dir).exists()).collect();
    let sysctl =
        |name: &str| Some((name.to_owned(), Value::from(fs::read_to_string(sysctl(name)).ok()?.trim())));
    let sysctls: serde_json::Map<_, _> = SYSCTLS.into_iter().filter_map(sysctl).collect();
    fs::write(
        file,
        json!({
            "absent": absent,
            "bridge_filter": Path::new(BRIDGE_FILTER).exists(),
            "sysctls": sysctls,
        })
        .to_string(),
    )?;
    Ok(())
}

/// The first of these, which is for IPv4, or both of them if the machine has IPv6.
pub(super) fn families<'a>(both: &'a [&'static str; 2]) -> &'a [&'static str] {
    let has_ipv6 = fs::read_to_string(sysctl(NO_IPV6)).is_ok_and(|no| no.trim() == "0");
    if has_ipv6 { both } else { &both[..1] }
}

/// Gives the machine the node's addresses, and passes bridged packets to kube-proxy's rules.
pub(super) fn prepare(cni: Cni) -> Result<()> {
    let is_bridged = matches!(cni, Cni::Bridge | Cni::Multus);
    if is_bridged && !Path::new(BRIDGE_FILTER).exists() && !command("modprobe").arg(MODULE).succeeds() {
        step(&format!(
            "the kernel has no {MODULE}: pods do not reach each other by the addresses of services"
        ));
    }
    add_addresses(families(&NODE_IPS))?;
    keep_services()?;
    if families(&NODE_IPS).len() == 1 {
        step("the machine has no IPv6: pods and services have none either");
    }
    if cni == Cni::Cilium { cilium::prepare() } else { Ok(()) }
}

/// Gives loopback these addresses.
pub(super) fn add_addresses(addresses: &[&str]) -> Result<()> {
    for address in addresses {
        command("ip").args(["address", "replace", address, "dev", "lo"]).run()?;
    }
    Ok(())
}

/// Discards what is sent to a service before kube-proxy has its rules. By a default route, another machine could answer:
/// kube-apiserver accepts any answer about the health of an aggregated API, and keeps that connection.
fn keep_services() -> Result<()> {
    families(&SERVICE_CIDRS)
        .iter()
        .try_for_each(|cidr| ip_route(cidr).args(["replace", cidr, "dev", "lo"]).run())
}

/// `ip route` for the family of these addresses.
fn ip_route(cidr: &str) -> Command {
    let mut ip = command("ip");
    ip.args([if cidr.contains(':') { "-6" } else { "-4" }, "route"]);
    ip
}

/// Kills the processes in the cgroups of pods, and containerd's shims. `record` has checked that there were no such
/// cgroups before.
pub(super) fn kill_pods() -> Result<()> {
    let left = || {
        let mut pids = Vec::new();
        kubepods().iter().for_each(|dir| pids_in(dir, &mut pids));
        pids.into_iter().filter_map(Process::of).collect::<Vec<_>>()
    };
    let empty = eventually(Duration::from_secs(20), || {
        let left = left();
        left.iter().for_each(|process| process.signal(Signal::SIGKILL));
        Ok(left.is_empty().then_some(()))
    })?;
    empty.with_context(|| format!("processes of pods cannot be killed: {:?}", left()))
}

/// Kills containerd's shims. They outlive containerd, so that containerd can be restarted.
pub(super) fn kill_shims() -> Result<()> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        let Some(process) = Process::of(pid) else { continue };
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<_> = words.split(|byte| *byte == 0).collect();
        let is_shim = words.first().is_some_and(|program| program.ends_with(b"containerd-shim-runc-v2"));
        if is_shim && words.contains(&state::CONTAINERD.as_bytes()) {
            process.kill()?;
        }
    }
    Ok(())
}

/// Undoes everything except the state's directory. Continues after an error, and returns the first error.
pub(super) fn restore() -> Result<()> {
    let mut outcomes = vec![unmount(), remove_cgroups()];
    if Path::new("/sys/class/net").join(BRIDGE).exists() {
        outcomes.push(command("ip").args(["link", "delete", BRIDGE]).run());
    }
    for address in NODE_IPS.into_iter().chain([BACKEND_IP]) {
        // "1: lo    inet 10.245.0.1/32 scope …"
        let shown = command("ip").args(["-o", "address", "show", "dev", "lo", "to", address]).read()?;
        if let Some(address) = shown.split_whitespace().nth(3) {
            outcomes.push(command("ip").args(["address", "delete", address, "dev", "lo"]).run());
        }
    }
    for cidr in families(&SERVICE_CIDRS) {
        if !ip_route(cidr).args(["show", cidr, "dev", "lo"]).read()?.is_empty() {
            outcomes.push(ip_route(cidr).args(["delete", cidr, "dev", "lo"]).run());
        }
    }
    if let Ok(before) = fs::read_to_string(state::path("before.json")) {
        let before: Value = serde_json::from_str(&before).context("before.json")?;
        for (name, value) in before["sysctls"].as_object().into_iter().flatten() {
            outcomes.push(set_sysctl(name, value.as_str().unwrap_or_default()));
        }
        if before["bridge_filter"] == false && Path::new(BRIDGE_FILTER).exists() {
            outcomes.push(command("modprobe").args(["-r", MODULE]).run());
        }
        remove_files(&before);
    }
    outcomes.into_iter().collect()
}

/// Removes the state's directory, unless a file system is mounted in it, which could hold data of another program.
pub(super) fn remove_state() -> Result<()> {
    if let Some(mount) = mounts()?.first() {
        bail!("{} is still mounted, and {} is left as it is", mount.display(), state::DIR);
    }
    fs::remove_dir_all(state::DIR).context(state::DIR)
}

/// The mount points in the state's directory, innermost first.
fn mounts() -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mounts")?;
    let paths = table.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
    let mut mounts: Vec<_> = paths.filter(|path| path.starts_with(state::DIR)).collect();
    mounts.reverse();
    Ok(mounts)
}

fn unmount() -> Result<()> {
    for mount in mounts()? {
        umount2(&mount, MntFlags::MNT_DETACH).with_context(|| mount.display().to_string())?;
    }
    Ok(())
}

/// The cgroup of all pods in each hierarchy: one with version 2, one per controller with version 1.
fn kubepods() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let roots = std::iter::once(root.to_owned()).chain(hierarchies);
    roots.map(|dir| dir.join("kubepods")).filter(|dir| dir.is_dir()).collect()
}

/// The processes in a cgroup and in those below it.
fn pids_in(cgroup: &Path, pids: &mut Vec<i32>) {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.extend(own.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    below(cgroup).iter().for_each(|dir| pids_in(dir, pids));
}

fn below(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn remove_cgroups() -> Result<()> {
    fn remove(cgroup: &Path) -> std::io::Result<()> {
        below(cgroup).iter().try_for_each(|dir| remove(dir))?;
        fs::remove_dir(cgroup)
    }
    for dir in kubepods() {
        // A killed process may take a moment to end.
        let removed = eventually(Duration::from_secs(10), || Ok(remove(&dir).ok()))?;
        removed.with_context(|| format!("{} cannot be removed", dir.display()))?;
    }
    Ok(())
}

/// Removes what the cluster's programs have left at fixed paths: their files, and the directories that did not exist
/// before and are empty now.
fn remove_files(before: &Value) {
    let absent: Vec<_> =
        before["absent"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let _ = fs::remove_file("/var/lib/kubelet/device-plugins/kubelet.sock");
    let tasks = state::path("containerd-state/io.containerd.runtime.v2.task/k8s.io");
    let tasks = fs::read_dir(tasks).into_iter().flatten().flatten();
    let ids: Vec<_> = tasks.map(|task| task.file_name().to_string_lossy().into_owned()).collect();
    for result in fs::read_dir("/var/lib/cni/results").into_iter().flatten().flatten() {
        let name = result.file_name().to_string_lossy().into_owned();
        if name.starts_with(super::node::NETWORK) || ids.iter().any(|id| name.contains(id)) {
            let _ = fs::remove_file(result.path());
        }
    }
    for socket in fs::read_dir("/run/containerd/s").into_iter().flatten().flatten() {
        // A killed shim leaves its socket behind, and containerd's configuration does not set where the sockets are.
        let nobody = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
        if UnixStream::connect(socket.path()).is_err_and(nobody) {
            let _ = fs::remove_file(socket.path());
        }
    }
    for link in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
        if fs::read_link(link.path()).is_ok_and(|target| target.starts_with(state::DIR)) {
            let _ = fs::remove_file(link.path());
        }
    }
    if absent.contains(&POD_LOGS) {
        // A kubelet that was killed leaves logs.
        let _ = fs::remove_dir_all(POD_LOGS);
    }
    for dir in DIRS.into_iter().filter(|dir| absent.contains(dir)) {
        // Not recursive: a directory that is not empty is in use by other software.
        if fs::remove_dir(dir).is_err() && Path::new(dir).exists() {
            step(&format!("{dir} is left: it is not empty"));
        }
    }
}

fn sysctl(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

/// Sets a sysctl if its value differs, because for some sysctls writing the same value has an effect.
fn set_sysctl(name: &str, value: &str) -> Result<()> {
    let file = sysctl(name);
    if fs::read_to_string(&file)?.trim() != value {
        fs::write(&file, value).with_context(|| file.display().to_string())?;
    }
    Ok(())
}
