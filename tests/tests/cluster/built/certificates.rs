//! The certificates of the packets API server by cert-manager, which does not run here: the story has CRDs for its
//! objects, and makes what the chart requests by them.

use std::net::SocketAddr;

use k8s_openapi::ByteString;
use mirror_tests::{
    AGENT, Cluster, PATIENCE, PacketFile, Pinging, check, eventually, list, served_certificate,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::{Value, json};

use crate::plugin::tail;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
/// cert-manager's API group, and the kinds of objects in the chart, with their plurals.
const GROUP: &str = "cert-manager.io";
const KINDS: [[&str; 2]; 2] = [["Certificate", "certificates"], ["Issuer", "issuers"]];
/// The APIService, the Service and the Deployment of the servers, and the label of their pods.
const API: &str = "v1alpha1.packets.podmirror.io";
const SERVER: &str = "podmirror-apiserver";
const PODS: &str = "app.kubernetes.io/component=apiserver";
/// The ports of a server for kube-apiserver and for agents.
const PORTS: [u16; 2] = [10708, 10709];

/// CRDs that accept any fields. Deleted on drop, with all of their objects.
struct Crds<'a>(&'a Cluster);

impl<'a> Crds<'a> {
    #[track_caller]
    fn install(cluster: &'a Cluster) -> Self {
        let crd = |[kind, plural]: [&str; 2]| {
            let names = json!({ "kind": kind, "plural": plural });
            let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
            let schema = json!({ "openAPIV3Schema": schema });
            let version = json!({ "name": "v1", "served": true, "storage": true, "schema": schema });
            json!({
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "metadata": { "name": format!("{plural}.{GROUP}") },
                "spec": { "group": GROUP, "scope": "Namespaced", "names": names, "versions": [version] },
            })
        };
        let crds = Self(cluster);
        cluster.apply(&list(&KINDS.map(crd)));
        // The API server has the resources some time later.
        eventually(PATIENCE, || crds.objects());
        crds
    }

    /// The names of all objects.
    fn objects(&self) -> Result<String, String> {
        let kinds = KINDS.map(|[_, plural]| format!("{plural}.{GROUP}")).join(",");
        self.0.try_kubectl(&format!("get {kinds} --all-namespaces -o name"))
    }
}

impl Drop for Crds<'_> {
    fn drop(&mut self) {
        let names = KINDS.map(|[_, plural]| format!("{plural}.{GROUP}")).join(" ");
        if let Err(error) = self.0.try_kubectl(&format!("delete --ignore-not-found crd {names}")) {
            eprintln!("CRDs stay: {error}");
        }
    }
}

/// The spec of an object in the agent's namespace.
#[track_caller]
fn spec(cluster: &Cluster, [kind, name]: [&str; 2]) -> Value {
    let object = cluster.kubectl(&format!("-n {AGENT} get {kind}.{GROUP} {name} -o json"));
    serde_json::from_str::<Value>(&object).unwrap()["spec"].take()
}

/// Makes the certificate that is requested, and writes it to its Secret. Returns it in DER.
#[track_caller]
fn issue(cluster: &Cluster, ca: &CertifiedIssuer<'_, KeyPair>, requested: &Value) -> Vec<u8> {
    let names: Vec<String> = serde_json::from_value(requested["dnsNames"].clone()).unwrap();
    let key = KeyPair::generate().unwrap();
    let signer: &Issuer<'_, KeyPair> = ca;
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, signer).unwrap();
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": { "name": requested["secretName"], "namespace": AGENT },
        "stringData": { "tls.crt": certificate.pem(), "tls.key": key.serialize_pem(), "ca.crt": ca.pem() },
    }));
    certificate.der().to_vec()
}

/// Checks the objects that the chart makes for cert-manager: who signs what, and where it is written. Returns the
/// requested certificates of the CA and of the servers.
fn requested(cluster: &Cluster) -> [Value; 2] {
    let [of_ca, own] = ["podmirror-apiserver-ca", SERVER].map(|name| spec(cluster, ["certificate", name]));
    let issuer = |name: &str| spec(cluster, ["issuer", name]);
    assert_eq!(
        own,
        json!({
            "dnsNames": [format!("{SERVER}.{AGENT}.svc")], "usages": ["digital signature", "server auth"],
            "privateKey": { "algorithm": "ECDSA", "rotationPolicy": "Always" },
            "secretName": format!("{SERVER}-tls"), "issuerRef": { "kind": "Issuer", "name": SERVER },
        })
    );
    assert_eq!(issuer(SERVER), json!({ "ca": { "secretName": of_ca["secretName"] } }));
    assert_eq!(
        of_ca,
        json!({
            "isCA": true, "commonName": "podmirror-apiserver-ca", "duration": "87600h",
            "privateKey": { "algorithm": "ECDSA" }, "secretName": "podmirror-apiserver-ca",
            "issuerRef": { "kind": "Issuer", "name": "podmirror-apiserver-self" },
        })
    );
    assert_eq!(issuer("podmirror-apiserver-self"), json!({ "selfSigned": {} }));
    // The CA of this certificate goes into caBundle.
    let annotation = r"jsonpath={.metadata.annotations.cert-manager\.io/inject-ca-from}:{.spec.caBundle}";
    let injected = cluster.kubectl(&format!("get apiservice {API} -o {annotation}"));
    assert_eq!(injected, format!("{AGENT}/{SERVER}:"));
    [of_ca, own]
}

/// The CA of cert-manager, in caBundle as its cainjector writes it. The servers begin with the first Secret, and use the
/// next one without an interruption.
#[test]
fn certificates_of_cert_manager_are_served_and_renewed_during_a_stream() {
    let cluster = &Cluster::new("certificates");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    cluster.uninstall();
    let crds = Crds::install(cluster);
    // Without --wait: the servers have no certificate yet.
    cluster.helm(&format!(
        "install {AGENT} {CHART} --namespace {AGENT} --create-namespace --set apiserver.certManager.enabled=true"
    ));
    let [of_ca, own] = requested(cluster);
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, of_ca["commonName"].as_str().unwrap());
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let ca = &CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let first = issue(cluster, ca, &own);
    let bundle = json!({ "spec": { "caBundle": ByteString(ca.pem().into_bytes()) } });
    cluster.kubectl(&format!("patch apiservice {API} --type=merge --patch={bundle}"));
    let timeout = PATIENCE.as_secs();
    cluster.kubectl(&format!("-n {AGENT} rollout status deployment/{SERVER} --timeout={timeout}s"));
    cluster.wait_rolled_out();
    cluster.wait_served();

    let addresses = cluster.kubectl(&format!("-n {AGENT} get pods -l {PODS} -o jsonpath={{..podIP}}"));
    let servers: Vec<_> = addresses
        .split_whitespace()
        .flat_map(|address| PORTS.map(|port| SocketAddr::new(address.parse().unwrap(), port)))
        .collect();
    assert_eq!(servers.len(), 2 * PORTS.len(), "{addresses}");
    // Each new connection is verified, at any time.
    let name = own["dnsNames"][0].as_str().unwrap();
    let served = |server: &SocketAddr| served_certificate(*server, name, vec![ca.der().clone()]).unwrap();
    assert!(servers.iter().all(|server| served(server) == first));

    let mut reading = tail(cluster, &["pod/web", "--", "icmp"]);
    reading.wait_for_log("tail ends after 15m (--duration)");
    host.wait_taps(&[&web.device]);
    let pinging = Pinging::start(&web.netns, db.ip);
    let second = issue(cluster, ca, &own);
    // After a change of a pod, the kubelet renews its files at once, and otherwise within minutes.
    cluster.kubectl(&format!("-n {AGENT} annotate pods -l {PODS} story=renewed"));
    eventually(PATIENCE, || {
        cluster
            .kubectl(&format!("get --raw /apis/packets.podmirror.io/v1alpha1/namespaces/{AGENT}/podreports"));
        let certificates: Vec<_> = servers.iter().map(served).collect();
        let renewed = certificates.iter().filter(|certificate| **certificate == second).count();
        check(renewed == servers.len(), || format!("{renewed} of {} certificates", servers.len()))
    });
    let sent = pinging.stop();
    eventually(PATIENCE, || {
        let packets = PacketFile::read(reading.path()).packets.len();
        check(packets == 2 * sent, || format!("{packets} packets of {sent} pings and their answers"))
    });
    // It exits with 0, so there is no gap.
    let file = reading.stop();
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    host.wait_taps(&[]);

    // The servers have made no CA themselves.
    let secrets = "get secrets --field-selector=type!=helm.sh/release.v1 -o name";
    assert_eq!(cluster.kubectl(&format!("-n {AGENT} {secrets}")), format!("secret/{SERVER}-tls\n"));
    let trusted = cluster.kubectl(&format!("get apiservice {API} -o jsonpath={{.spec.caBundle}}"));
    assert_eq!(bundle["spec"]["caBundle"], trusted.as_str());
    cluster.helm(&format!("uninstall {AGENT} --namespace {AGENT} --wait --timeout {timeout}s"));
    // cert-manager keeps the Secrets of its certificates.
    cluster.kubectl(&format!("-n {AGENT} delete secret {SERVER}-tls"));
    cluster.has_left_nothing();
    assert_eq!(crds.objects().unwrap(), "");
}
