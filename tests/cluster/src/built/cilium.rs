//! Cilium as the CNI of the cluster. It also replaces kube-proxy.
//!
//! The agent and the operator run as processes of the machine, like the cluster's other components. Stories choose the
//! modes that change the path of packets ([`Settings`]). Cilium handles packets from other machines at the node devices
//! in its configuration, so the node gets a device that leads to an "outside" network namespace. The machine's own
//! devices are not changed. `node` starts Cilium; `down` removes it.

mod programs;
mod traces;

use std::{fs, os::unix::fs::symlink, process::Command};

use anyhow::{Context as _, Result};
use mirror_test_tools::process::{Run as _, command};

pub(super) use self::programs::Programs;
use super::{NODE, POD_CIDR, binaries::Binaries, component::Component, control::answers, node, pki, state};

/// The components, in the order of their start.
pub(super) const COMPONENTS: [&str; 2] = ["cilium-operator", "cilium-agent"];
/// A file that refers to the network namespace outside the node.
pub const OUTSIDE: &str = "/var/lib/podmirror-cluster/cilium/outside";
/// The node's address on the outside network, and the address of the outside.
pub const EDGE: [&str; 2] = ["10.246.0.1", "10.246.0.2"];
/// The node's device to the outside, and its peer.
const DEVICES: [&str; 2] = ["podmirror-ext0", "ext0"];
/// Port of the agent's health endpoint on loopback.
const HEALTH: u16 = 9879;

/// The modes of Cilium that change the path of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Attaches Cilium's programs by TCX, otherwise by filters of the clsact qdisc.
    pub tcx: bool,
    /// Each pod has a route, and a program on the node side of its veth for packets to the pod.
    pub endpoint_routes: bool,
    /// Packets pass the node's network stack. Otherwise `bpf_redirect_peer` hands them to the pod.
    pub legacy_host_routing: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { tcx: true, endpoint_routes: false, legacy_host_routing: false }
    }
}

impl Settings {
    fn options(self) -> [(&'static str, bool); 3] {
        [
            ("enable-tcx", self.tcx),
            ("enable-endpoint-routes", self.endpoint_routes),
            ("enable-host-legacy-routing", self.legacy_host_routing),
        ]
    }
}

/// Returns an error if Cilium's programs are missing and cannot be built on this machine.
pub fn can_be_brought() -> Result<()> {
    Programs::locate()?.can_be_brought()
}

/// Writes the settings for the next start of the agent.
pub fn set(settings: Settings) -> Result<()> {
    let dir = state::path("cilium/config");
    fs::create_dir_all(&dir)?;
    for (name, value) in settings.options() {
        fs::write(dir.join(name), value.to_string())?;
    }
    Ok(())
}

/// The settings for the next start of the agent.
pub fn settings() -> Result<Settings> {
    let is_on = |name: &str| -> Result<bool> {
        Ok(fs::read_to_string(state::path("cilium/config").join(name))?.trim() == "true")
    };
    Ok(Settings {
        tcx: is_on("enable-tcx")?,
        endpoint_routes: is_on("enable-endpoint-routes")?,
        legacy_host_routing: is_on("enable-host-legacy-routing")?,
    })
}

/// The command `cilium-dbg`, which queries the running agent.
pub fn dbg() -> Result<Command> {
    Ok(command(Programs::locate()?.built("cilium-dbg")))
}

/// Cilium's options. One file per option: the form of a mounted ConfigMap.
fn options() -> [(&'static str, String); 27] {
    [
        ("agent-health-port", HEALTH.to_string()),
        ("bpf-map-dynamic-size-ratio", "0.0025".to_owned()),
        ("cni-exclusive", "false".to_owned()),
        ("datapath-mode", "veth".to_owned()),
        ("devices", DEVICES[0].to_owned()),
        ("direct-routing-device", DEVICES[0].to_owned()),
        ("enable-bpf-masquerade", "true".to_owned()),
        ("enable-endpoint-health-checking", "false".to_owned()),
        ("enable-envoy-config", "false".to_owned()),
        ("enable-health-checking", "false".to_owned()),
        ("enable-hubble", "false".to_owned()),
        ("enable-ipv4", "true".to_owned()),
        ("enable-ipv4-masquerade", "true".to_owned()),
        ("enable-ipv6", "false".to_owned()),
        ("enable-ipv6-masquerade", "false".to_owned()),
        ("enable-l2-neigh-discovery", "false".to_owned()),
        ("enable-l7-proxy", "false".to_owned()),
        ("identity-allocation-mode", "crd".to_owned()),
        ("ipam", "kubernetes".to_owned()),
        ("ipv4-native-routing-cidr", POD_CIDR.to_owned()),
        ("k8s-kubeconfig-path", pki::kubeconfig("admin")),
        ("kube-proxy-replacement", "true".to_owned()),
        ("monitor-aggregation", "medium".to_owned()),
        ("operator-api-serve-addr", "127.0.0.1:9234".to_owned()),
        // Where the agent sets sysctls: only those of the network.
        ("procfs", state::text("cilium/proc")),
        ("routing-mode", "native".to_owned()),
        ("synchronize-k8s-nodes", "true".to_owned()),
    ]
}

/// Writes the configuration, the commands that the agent calls, and the directory of the CNI plugins.
pub(super) fn configure(binaries: &Binaries, programs: &Programs) -> Result<()> {
    let config = state::path("cilium/config");
    if !config.exists() {
        set(Settings::default())?;
    }
    for (name, value) in options() {
        fs::write(config.join(name), value)?;
    }
    let net = state::path("cilium/proc/sys/net");
    for dir in ["cilium/proc/sys", "cilium/bin", "cni/bin"] {
        fs::create_dir_all(state::path(dir))?;
    }
    if !net.is_symlink() {
        symlink("/proc/sys/net", net)?;
    }
    let root = &programs.debian();
    node::tool("cilium/bin/clang", root, "usr/lib/llvm-19/bin/clang")?;
    node::tool("cilium/bin/ipset", root, "usr/sbin/ipset")?;
    node::iptables("cilium/bin", root)?;
    for (name, program) in
        [("loopback", binaries.debian("usr/lib/cni/loopback")), ("cilium-cni", programs.built("cilium-cni"))]
    {
        let link = state::path("cni/bin").join(name);
        if !link.is_symlink() {
            symlink(program, link)?;
        }
    }
    traces::note()
}

/// Creates the device to the outside.
pub(super) fn prepare() -> Result<()> {
    let [node_end, far_end] = DEVICES;
    let [node, outside] = EDGE;
    if !fs::exists(OUTSIDE)? {
        fs::create_dir_all(state::path("cilium"))?;
        fs::write(OUTSIDE, "")?;
        command("unshare").args([&format!("--net={OUTSIDE}"), "true"]).run()?;
    }
    if !fs::exists(format!("/sys/class/net/{node_end}"))? {
        ip(&format!("link add {node_end} type veth peer name {far_end} netns {OUTSIDE}"))?;
    }
    ip(&format!("address replace {node}/24 dev {node_end}"))?;
    ip(&format!("link set {node_end} up"))?;
    let there = [
        "link set lo up".to_owned(),
        format!("address replace {outside}/24 dev {far_end}"),
        format!("link set {far_end} up"),
        format!("route replace {POD_CIDR} via {node}"),
    ];
    there.iter().try_for_each(|words| {
        command("nsenter").args([&format!("--net={OUTSIDE}"), "ip"]).args(words.split(' ')).run()
    })
}

fn ip(words: &str) -> Result<()> {
    command("ip").args(words.split(' ')).run()
}

/// Starts Cilium, and waits until pods can be wired. The API server must already know the node.
pub(super) fn up(programs: &Programs) -> Result<()> {
    operator(programs).up(|| answers(9234, "/healthz"))?;
    agent(programs).up(|| answers(HEALTH, "/healthz"))
}

fn operator(programs: &Programs) -> Component {
    component("cilium-operator", programs, &[9234])
}

fn agent(programs: &Programs) -> Component {
    component("cilium-agent", programs, &[HEALTH])
        .arguments(&format!("--lib-dir={}", programs.library().display()))
        .finds_in(state::path("cilium/bin"))
}

fn component(name: &'static str, programs: &Programs, ports: &'static [u16]) -> Component {
    Component::new(name, programs.built(name), ports)
        .arguments(&format!("--config-dir={}", state::text("cilium/config")))
        .with("K8S_NODE_NAME", NODE)
        .with("CILIUM_K8S_NAMESPACE", "kube-system")
}

/// Removes what Cilium has left on the machine, and the device to the outside, whose namespace is deleted with the
/// state's directory. The components must have ended.
pub(super) fn clear() -> Result<()> {
    let removed = traces::remove(&Programs::locate()?);
    let device = DEVICES[0];
    if fs::exists(format!("/sys/class/net/{device}"))? {
        ip(&format!("link delete {device}"))?;
    }
    removed.context("Cilium has left something")
}
