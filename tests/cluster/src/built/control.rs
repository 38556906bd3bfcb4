//! Runs the control plane: etcd, the API server, the controller manager and the scheduler. Calls kubectl.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{
    API_PORT, AUDIT_LOG, Mode, NODE_IP, POD_CIDRS, SERVICE_CIDRS, binaries::Binaries, component::Component,
    component::eventually, machine::families, pki::FRONT_PROXY, pki::kubeconfig, state,
};
use mirror_test_tools::process::{Run as _, command};

/// The components, in the order of their start.
pub(super) const COMPONENTS: [&str; 4] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];

/// The file of the audit policy.
const AUDIT_POLICY: &str = "audit-policy.json";

/// Starts the components that do not run, and waits until all answer.
pub(super) fn up(binaries: &Binaries, mode: Mode) -> Result<()> {
    etcd(binaries).up(|| answers(2379, "/health"))?;
    fs::write(state::path(AUDIT_POLICY), audit_policy().to_string())?;
    api_server(binaries, mode).up(|| kubectl(binaries).args(["get", "--raw", "/readyz"]).succeeds())?;
    if let Mode::ApiOnly(_) = mode {
        return Ok(());
    }
    controller_manager(binaries).up(|| is_healthy(binaries, 10257))?;
    scheduler(binaries).up(|| is_healthy(binaries, 10259))
}

/// Waits for the service account `default`. Without it, the API server refuses pods in the namespace.
pub(super) fn wait_for_service_account(binaries: &Binaries) -> Result<()> {
    wait_for("the service account `default`", || {
        kubectl(binaries).args(["get", "serviceaccount", "default", "--namespace=default"]).succeeds()
    })
}

/// kubectl as the administrator, without the environment of this process.
pub(super) fn kubectl(binaries: &Binaries) -> Command {
    let mut kubectl = command(binaries.built("kubectl"));
    kubectl.env_clear().env("HOME", state::DIR).env("KUBECONFIG", state::KUBECONFIG);
    kubectl
}

/// `kubectl apply` of an object.
pub(crate) fn apply(mut kubectl: Command, object: &Value) -> Result<()> {
    kubectl.args(["apply", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut kubectl = kubectl.spawn().context("kubectl")?;
    kubectl.stdin.take().context("kubectl has no input")?.write_all(object.to_string().as_bytes())?;
    if !kubectl.wait()?.success() {
        bail!("kubectl cannot apply {object}");
    }
    Ok(())
}

/// Waits until `is_so` is true.
pub(super) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(90);
    eventually(PATIENCE, || Ok(is_so().then_some(())))?.with_context(|| {
        format!("waited {} s for {what}; the logs are in {}/log", PATIENCE.as_secs(), state::DIR)
    })
}

/// etcd on loopback, without TLS. It does not wait for the disk, because its data is deleted with the cluster.
fn etcd(binaries: &Binaries) -> Component {
    let data = state::text("etcd");
    Component::new("etcd", binaries.built("etcd"), &[2379, 2380]).arguments(&format!(
        "--name=podmirror --data-dir={data} --unsafe-no-fsync
         --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379
         --listen-peer-urls=http://127.0.0.1:2380 --initial-advertise-peer-urls=http://127.0.0.1:2380
         --initial-cluster=podmirror=http://127.0.0.1:2380"
    ))
}

/// Records who requests packets, without bodies: each request at its end, and a watch at its beginning too.
fn audit_policy() -> Value {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{ "level": "Metadata", "resources": [{ "group": "packets.podmirror.io" }] }],
    })
}

/// The API server. Each version in [`KUBERNETES`](mirror_test_tools::KUBERNETES) has these options.
fn api_server(binaries: &Binaries, mode: Mode) -> Component {
    let (pki, policy) = (state::text("pki"), state::text(AUDIT_POLICY));
    let server =
        Component::new("kube-apiserver", binaries.api_server(mode), &[API_PORT]).arguments(&format!(
            "--etcd-servers=http://127.0.0.1:2379 --secure-port={API_PORT}
         --tls-cert-file={pki}/kube-apiserver.crt --tls-private-key-file={pki}/kube-apiserver.key
         --client-ca-file={pki}/ca.crt --cert-dir={pki}
         --service-account-issuer=https://kubernetes.default.svc.cluster.local
         --service-account-key-file={pki}/service-accounts.crt
         --service-account-signing-key-file={pki}/service-accounts.key
         --service-cluster-ip-range={} --allow-privileged=true
         --requestheader-client-ca-file={pki}/front-proxy-ca.crt --requestheader-allowed-names={FRONT_PROXY}
         --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group
         --requestheader-extra-headers-prefix=X-Remote-Extra-
         --proxy-client-cert-file={pki}/{FRONT_PROXY}.crt --proxy-client-key-file={pki}/{FRONT_PROXY}.key
         --audit-policy-file={policy} --audit-log-path={AUDIT_LOG} --audit-log-maxsize=16 --audit-log-maxbackup=1",
            families(&SERVICE_CIDRS).join(",")
        ));
    match mode {
        // No controller creates service accounts in this mode, and without one the API server would refuse pods. There
        // is no kube-proxy either, so the API server connects to the endpoints of a service.
        Mode::ApiOnly(_) => server.arguments(
            "--bind-address=127.0.0.1 --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount
             --enable-aggregator-routing=true",
        ),
        // Pods connect to the node's address, people and tests to loopback.
        Mode::Node(_) => server.arguments(&format!(
            "--bind-address=0.0.0.0 --advertise-address={NODE_IP} --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction
             --kubelet-client-certificate={pki}/kubelet-client.crt --kubelet-client-key={pki}/kubelet-client.key
             --kubelet-certificate-authority={pki}/ca.crt --kubelet-preferred-address-types=InternalIP"
        )),
    }
}

fn controller_manager(binaries: &Binaries) -> Component {
    let pki = state::text("pki");
    let config = kubeconfig("kube-controller-manager");
    let name = "kube-controller-manager";
    Component::new(name, binaries.built(name), &[10257]).arguments(&format!(
        "--kubeconfig={config} --authentication-kubeconfig={config} --authorization-kubeconfig={config}
         --bind-address=127.0.0.1 --leader-elect=false --use-service-account-credentials=true
         --service-account-private-key-file={pki}/service-accounts.key --root-ca-file={pki}/ca.crt
         --cluster-cidr={} --allocate-node-cidrs=true --service-cluster-ip-range={} --flex-volume-plugin-dir={}",
        families(&POD_CIDRS).join(","),
        families(&SERVICE_CIDRS).join(","),
        state::text("volume-plugins")
    ))
}

fn scheduler(binaries: &Binaries) -> Component {
    let config = kubeconfig("kube-scheduler");
    Component::new("kube-scheduler", binaries.built("kube-scheduler"), &[10259]).arguments(&format!(
        "--kubeconfig={config} --authentication-kubeconfig={config} --authorization-kubeconfig={config}
         --bind-address=127.0.0.1 --leader-elect=false"
    ))
}

/// Whether a component with a self-signed certificate reports that it is healthy.
fn is_healthy(binaries: &Binaries, port: u16) -> bool {
    let mut get = kubectl(binaries);
    get.args([&format!("--server=https://127.0.0.1:{port}"), "--insecure-skip-tls-verify"]);
    get.args(["get", "--raw", "/healthz"]).succeeds()
}

/// Whether the HTTP server at this loopback port answers 200.
pub(super) fn answers(port: u16, path: &str) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.split(' ').nth(1) == Some("200"))
}
