//! Creates certificates, keys and kubeconfigs with openssl at the first `up`, for this cluster alone.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::{
    process::{command, step},
    programs::{self, Program},
};
use serde_json::json;

use super::{API_PORT, NODE, NODE_IP, SERVICE_IP, state};

/// The certificate authority of the cluster, and the one for the API server as a client of the servers behind it.
const CA: &str = "ca";
const FRONT_PROXY_CA: &str = "front-proxy-ca";
/// The common name of the API server's certificate for the servers behind it.
pub(super) const FRONT_PROXY: &str = "front-proxy-client";

/// A certificate: its subject, its purpose, the addresses of a server, and who signs it.
struct Certificate {
    name: &'static str,
    subject: String,
    usage: &'static str,
    addresses: Option<String>,
    authority: &'static str,
}

impl Certificate {
    fn client(name: &'static str, subject: impl Into<String>) -> Self {
        Self { name, subject: subject.into(), usage: "clientAuth", addresses: None, authority: CA }
    }

    fn server(name: &'static str, subject: impl Into<String>, addresses: String) -> Self {
        Self { usage: "serverAuth", addresses: Some(addresses), ..Self::client(name, subject) }
    }
}

/// The clients of the API server, each with its subject for RBAC.
fn clients() -> [(&'static str, String); 5] {
    [
        ("admin", "/O=system:masters/CN=admin".to_owned()),
        ("kube-controller-manager", "/CN=system:kube-controller-manager".to_owned()),
        ("kube-scheduler", "/CN=system:kube-scheduler".to_owned()),
        ("kube-proxy", "/CN=system:kube-proxy".to_owned()),
        ("kubelet", format!("/O=system:nodes/CN=system:node:{NODE}")),
    ]
}

/// Creates missing files.
pub(super) fn make() -> Result<()> {
    let dir = state::path("pki");
    let done = dir.join("made");
    if done.exists() {
        return Ok(());
    }
    programs::bring(&[Program::of("openssl", "openssl")])?;
    step("making certificates and kubeconfigs");
    fs::create_dir_all(&dir)?;
    // The system's configuration would add its own extensions.
    fs::write(dir.join("openssl.cnf"), "[req]\ndistinguished_name=dn\n[dn]\n")?;
    for (name, subject) in [(CA, "/CN=podmirror-cluster"), (FRONT_PROXY_CA, "/CN=front-proxy-ca")] {
        issue(
            &dir,
            name,
            subject,
            &["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"],
            &[],
        )?;
    }
    let services = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc";
    let mut certificates = vec![
        Certificate::server(
            "kube-apiserver",
            "/CN=kube-apiserver",
            format!("IP:127.0.0.1,IP:{NODE_IP},IP:{SERVICE_IP},DNS:localhost,{services}"),
        ),
        // Only its key is used: it signs the tokens of service accounts.
        Certificate::client("service-accounts", "/CN=service-accounts"),
        Certificate::client("kubelet-client", "/O=system:masters/CN=kube-apiserver"),
        Certificate::server(
            "kubelet-server",
            format!("/O=system:nodes/CN=system:node:{NODE}"),
            format!("IP:{NODE_IP},DNS:{NODE}"),
        ),
        Certificate {
            authority: FRONT_PROXY_CA,
            ..Certificate::client(FRONT_PROXY, format!("/CN={FRONT_PROXY}"))
        },
    ];
    certificates.extend(clients().map(|(name, subject)| Certificate::client(name, subject)));
    for certificate in &certificates {
        let Certificate { name, subject, usage, addresses, authority } = certificate;
        let mut extensions = vec![
            "basicConstraints=critical,CA:FALSE".to_owned(),
            "keyUsage=critical,digitalSignature".to_owned(),
            format!("extendedKeyUsage={usage}"),
        ];
        extensions.extend(addresses.iter().map(|addresses| format!("subjectAltName={addresses}")));
        let extensions: Vec<_> = extensions.iter().map(String::as_str).collect();
        let [certificate, key] = ["crt", "key"].map(|end| format!("{authority}.{end}"));
        issue(&dir, name, subject, &extensions, &["-CA", &certificate, "-CAkey", &key])?;
    }
    for (name, _) in clients() {
        fs::write(kubeconfig(name), kubeconfig_of(name))?;
    }
    fs::write(done, "")?;
    Ok(())
}

/// Path of the kubeconfig of a client.
pub(super) fn kubeconfig(client: &str) -> String {
    match client {
        "admin" => state::KUBECONFIG.to_owned(),
        other => state::text(&format!("pki/{other}.kubeconfig")),
    }
}

/// Text of a kubeconfig. It is JSON, which is also YAML.
fn kubeconfig_of(client: &str) -> String {
    let file = |name: &str| state::text(&format!("pki/{name}"));
    let name = "podmirror-cluster";
    let cluster = json!({
        "server": format!("https://127.0.0.1:{API_PORT}"),
        "certificate-authority": file("ca.crt"),
    });
    let user = json!({
        "client-certificate": file(&format!("{client}.crt")),
        "client-key": file(&format!("{client}.key")),
    });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": name, "cluster": cluster }],
        "users": [{ "name": client, "user": user }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": client } }],
        "current-context": name,
    })
    .to_string()
}

/// Creates a key and its certificate, signed by the authority in `by` or self-signed.
fn issue(dir: &Path, name: &str, subject: &str, extensions: &[&str], by: &[&str]) -> Result<()> {
    let mut request = command("openssl");
    request.current_dir(dir).args([
        "req",
        "-x509",
        "-config",
        "openssl.cnf",
        "-newkey",
        "ec",
        "-noenc",
        "-days",
        "3650",
    ]);
    request.args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", subject]).args(by);
    for extension in extensions {
        request.args(["-addext", extension]);
    }
    request.args(["-keyout", &format!("{name}.key"), "-out", &format!("{name}.crt")]);
    let output = request.output().context("openssl")?;
    if !output.status.success() {
        // openssl prints its progress on the same stream, so it is shown after a failure only.
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("openssl (3.0 or newer is needed) makes no certificate for {name}: {told}");
    }
    Ok(())
}
