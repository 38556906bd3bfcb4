//! Runs the node: containerd with runc and CNI, kubelet, kube-proxy.

use std::{fs, os::unix::fs::PermissionsExt as _, os::unix::fs::symlink, path::Path, process::Command};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{
    BRIDGE, NODE, NODE_CIDRS, NODE_IP, NODE_IPS, POD_CIDRS, SERVICE_IP,
    binaries::Binaries,
    cilium,
    component::{Component, process},
    control::{answers, kubectl, wait_for},
    filter, images,
    machine::{self, families},
    multus, pki,
    state::{self, Cni},
};
use mirror_test_tools::process::{Run as _, command};

/// The components of any node, in the order of their start.
pub(super) const COMPONENTS: [&str; 2] = ["containerd", "kubelet"];
/// The component that translates service addresses, unless Cilium does.
pub(super) const KUBE_PROXY: &str = "kube-proxy";
/// The name under which CNI keeps its records.
pub(super) const NETWORK: &str = "podmirror-cluster";

/// Starts the components that do not run, and waits until the node accepts pods.
pub(super) fn up(binaries: &Binaries, cni: Cni) -> Result<()> {
    let cilium = if cni == Cni::Cilium { Some(cilium::Programs::locate()?) } else { None };
    configure(binaries, cni)?;
    if let Some(programs) = &cilium {
        cilium::configure(binaries, programs)?;
    }
    if cni == Cni::Multus {
        multus::configure(binaries)?;
        multus::up(binaries)?;
    }
    filter::let_pods_through()?;
    containerd(binaries).up(|| ctr(binaries).arg("version").succeeds())?;
    images::import_own(binaries)?;
    // The node's last report from before kubelet ended is still in the API server.
    let last = if process("kubelet").is_none() { ready_since(binaries) } else { None };
    kubelet(binaries).up(|| {
        let now = ready_since(binaries);
        answers(10248, "/healthz") && now.is_some() && now != last
    })?;
    match &cilium {
        Some(programs) => cilium::up(programs)?,
        None => kube_proxy(binaries).up(|| answers(10256, "/healthz") && filter::has_services(cni))?,
    }
    wait_for("the API server at its address for pods", || {
        let server = format!("--server=https://{SERVICE_IP}:443");
        kubectl(binaries).args([&server, "--request-timeout=1s", "get", "--raw", "/version"]).succeeds()
    })
}

/// containerd's own client.
pub(super) fn ctr(binaries: &Binaries) -> Command {
    let mut ctr = command(binaries.debian("usr/bin/ctr"));
    ctr.args(["--address", state::CONTAINERD, "--namespace", "k8s.io"]);
    ctr
}

/// Whether the node can run pods now.
pub(super) fn is_up(cni: Cni) -> bool {
    let network: &[_] = if cni == Cni::Cilium { &cilium::COMPONENTS } else { &[KUBE_PROXY] };
    COMPONENTS.iter().chain(network).all(|name| process(name).is_some())
}

/// Time of the last heartbeat of the ready node. `None` if the node is not ready, or if it has a taint.
fn ready_since(binaries: &Binaries) -> Option<String> {
    const READY: &str = r#"jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.lastHeartbeatTime}{end} {.spec.taints}"#;
    let node =
        kubectl(binaries).args(["get", "node", NODE, "--ignore-not-found", "-o", READY]).output().ok()?;
    let text = String::from_utf8(node.stdout).ok()?;
    match text.split_whitespace().collect::<Vec<_>>()[..] {
        ["True", heartbeat] => Some(heartbeat.to_owned()),
        _ => None,
    }
}

/// Writes the configurations, and the scripts in `bin`.
fn configure(binaries: &Binaries, cni: Cni) -> Result<()> {
    for dir in ["bin", "cni/net.d", "manifests"] {
        fs::create_dir_all(state::path(dir))?;
    }
    let debian = binaries.debian("");
    tool("bin/nft", &debian, "usr/sbin/nft")?;
    iptables("bin", &debian)?;
    let ctr = binaries.debian("usr/bin/ctr");
    script(
        "bin/ctr",
        &format!("exec '{}' --address {} --namespace k8s.io \"$@\"", ctr.display(), state::CONTAINERD),
    )?;
    write("containerd.toml", &containerd_config(binaries, cni), 0o644)?;
    write("cni/net.d/10-podmirror.conflist", &cni_config(cni).to_string(), 0o644)?;
    write("kubelet.json", &kubelet_config().to_string(), 0o644)?;
    write("kube-proxy.json", &kube_proxy_config(cni).to_string(), 0o644)
}

/// Writes a file of the state if its text differs: kube-proxy exits when its configuration file is written.
fn write(name: &str, text: &str, mode: u32) -> Result<()> {
    let path = state::path(name);
    if !fs::read_to_string(&path).is_ok_and(|present| present == text) {
        fs::write(&path, text).with_context(|| name.to_owned())?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Writes a program that is one line of shell.
pub(super) fn script(name: &str, line: &str) -> Result<()> {
    write(name, &format!("#!/bin/sh\n{line}\n"), 0o755)
}

/// Writes a program that runs one of Debian's packages, which are unpacked in `root` with their libraries.
pub(super) fn tool(name: &str, root: &Path, program: &str) -> Result<()> {
    let root = root.display();
    script(
        name,
        &format!(
            "LD_LIBRARY_PATH='{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu' \
             XTABLES_LIBDIR='{root}/usr/lib/x86_64-linux-gnu/xtables' exec '{root}'/{program} \"$@\""
        ),
    )
}

/// Writes the programs of iptables into a directory of the state.
pub(super) fn iptables(dir: &str, root: &Path) -> Result<()> {
    for name in ["iptables", "ip6tables"] {
        for suffix in ["", "-save", "-restore"] {
            let name = format!("{name}{suffix}");
            tool(&format!("{dir}/{name}"), root, &format!("usr/sbin/xtables-nft-multi {name}"))?;
        }
    }
    Ok(())
}

/// Creates a link to kubectl at a path that does not depend on the version.
pub(super) fn link_kubectl(binaries: &Binaries) -> Result<()> {
    let link = state::path("bin/kubectl");
    fs::create_dir_all(state::path("bin"))?;
    if link.is_symlink() {
        fs::remove_file(&link)?;
    }
    Ok(symlink(binaries.built("kubectl"), link)?)
}

fn containerd(binaries: &Binaries) -> Component {
    Component::new("containerd", binaries.debian("usr/bin/containerd"), &[])
        .arguments(&format!("--config={}", state::text("containerd.toml")))
        .finds_in(binaries.debian("usr/bin"))
}

/// The setting `restrict_oom_score_adj` is for machines without CAP_SYS_RESOURCE, such as some containers. Without the
/// setting, runc fails there and prints no reason.
fn containerd_config(binaries: &Binaries, cni: Cni) -> String {
    let (dir, socket, pause) = (state::DIR, state::CONTAINERD, images::PAUSE);
    let runc = binaries.debian("usr/sbin/runc");
    let plugins = match cni {
        Cni::Bridge | Cni::Ptp => binaries.debian("usr/lib/cni"),
        Cni::Cilium | Cni::Multus => state::path("cni/bin"),
    };
    format!(
        r#"version = 2
root = "{dir}/containerd"
state = "{dir}/containerd-state"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{dir}/containerd-opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
netns_mounts_under_state_dir = true
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{}"
conf_dir = "{dir}/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{}"
Root = "{dir}/runc"
SystemdCgroup = false
"#,
        plugins.display(),
        runc.display()
    )
}

fn cni_config(cni: Cni) -> Value {
    let ipam = json!({
        "type": "host-local",
        "dataDir": state::text("cni/ipam"),
        "ranges": families(&NODE_CIDRS).iter().map(|cidr| json!([{ "subnet": cidr }])).collect::<Vec<_>>(),
        "routes": families(&["0.0.0.0/0", "::/0"]).iter().map(|all| json!({ "dst": all })).collect::<Vec<_>>(),
    });
    let bridge = json!({
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": true,
        "hairpinMode": true,
        "ipam": ipam,
    });
    let plugin = match cni {
        Cni::Bridge => bridge,
        Cni::Multus => multus::config(&bridge),
        Cni::Ptp => json!({ "type": "ptp", "ipam": ipam }),
        Cni::Cilium => json!({ "type": "cilium-cni" }),
    };
    json!({ "cniVersion": "0.4.0", "name": NETWORK, "plugins": [plugin] })
}

fn kubelet(binaries: &Binaries) -> Component {
    Component::new("kubelet", binaries.built("kubelet"), &[10248, 10250]).arguments(&format!(
        "--config={} --kubeconfig={} --root-dir={} --cert-dir={} --hostname-override={NODE} --node-ip={}",
        state::text("kubelet.json"),
        pki::kubeconfig("kubelet"),
        state::text("kubelet"),
        state::text("kubelet/pki"),
        families(&NODE_IPS).join(","),
    ))
}

/// The limits for evicting pods and for collecting images are almost zero, because this machine has other uses and its
/// disk may be nearly full.
fn kubelet_config() -> Value {
    let pki = |name: &str| state::text(&format!("pki/{name}"));
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": pki("ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "address": NODE_IP,
        "tlsCertFile": pki("kubelet-server.crt"),
        "tlsPrivateKeyFile": pki("kubelet-server.key"),
        "containerRuntimeEndpoint": format!("unix://{}", state::CONTAINERD),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "oomScoreAdj": 0,
        "podLogsDir": machine::POD_LOGS,
        "staticPodPath": state::MANIFESTS,
        "volumePluginDir": state::text("volume-plugins"),
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "clusterDomain": "cluster.local",
    })
}

fn kube_proxy(binaries: &Binaries) -> Component {
    Component::new("kube-proxy", binaries.built("kube-proxy"), &[10249, 10256])
        .arguments(&format!("--config={}", state::text("kube-proxy.json")))
        .finds_in(state::path("bin"))
}

/// kube-proxy must not change the machine's settings of connection tracking.
fn kube_proxy_config(cni: Cni) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": filter::proxy_mode(cni),
        "clusterCIDR": families(&POD_CIDRS).join(","),
        "clientConnection": { "kubeconfig": pki::kubeconfig("kube-proxy") },
        "hostnameOverride": NODE,
        "bindAddress": NODE_IP,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": ["primary"],
        "oomScoreAdj": 0,
        "conntrack": { "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s" },
    })
}
