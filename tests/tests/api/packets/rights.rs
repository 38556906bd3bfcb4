//! Who reads what: the rights of users, and what the server believes of a client.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use mirror_test_cluster::built::{BACKEND_IP, KUBECONFIG};
use mirror_tests::{Api, Lab, SOON, check, eventually, list, pod_object, scaled, wait_audited};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde_json::{Value, json};

use super::Packets;
use crate::aggregation::{GROUP, SERVICE};

/// How pcapng begins.
const SECTION: &str = "\n\r\r\n";

/// A connection to the port of a server for the API server.
pub(super) type Connection = StreamOwned<ClientConnection, TcpStream>;

/// The rule that allows one verb on a resource.
fn rule(verb: &str, resource: &str) -> Value {
    json!({ "apiGroups": [GROUP], "resources": [resource], "verbs": [verb] })
}

/// Creates pods that are on no node, so that a request for them waits for packets.
fn make_pods(api: &Api) {
    api.apply(&list(&["web", "db"].map(|name| pod_object(name, "exec sleep 3600"))));
}

#[test]
fn users_namespaces_pods_and_verbs_each_with_its_audit_line() {
    let lab = Lab::new("packets-rights");
    let api = Api::new(&lab, "packets-rights");
    make_pods(&api);
    let packets = Packets::start(&api, 1, &[]);
    let (namespace, server) = (api.namespace(), &packets.servers[0]);
    let mut of_web = rule("watch", "packets");
    of_web["resourceNames"] = json!(["web"]);
    let reports = [rule("get", "podreports"), rule("list", "podreports")];
    let alice = &packets.grant("alice", false, &json!([rule("watch", "packets"), reports[0], reports[1]]));
    let bob = &packets.grant("bob", false, &json!([of_web]));
    let carol =
        &packets.grant("carol", true, &json!([rule("watch", "packets"), rule("watch", "nodepackets")]));
    let mallory = &format!("{namespace}-mallory");

    // The API server learns of the resources and of the roles after some moments.
    eventually(4 * SOON, || {
        let found = api.try_kubectl(&format!("api-resources --api-group={GROUP} --output=name"))?;
        let names: Vec<_> = found.lines().filter_map(|line| line.split('.').next()).collect();
        check(names == ["nodepackets", "packets", "podreports"], || found.clone())
    });
    for user in [alice, carol] {
        let uri = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
        eventually(SOON, || packets.get(user, &uri));
    }
    let of_web =
        packets.uri("packets?fieldSelector=metadata.name%3Dweb&nics=net1&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(bob, &of_web));
    eventually(SOON, || api.try_kubectl(&format!("get podreports --as={alice}")));

    let of = |place: &str, request: &str| format!("/apis/{GROUP}/v1alpha1/{place}{request}");
    let (here, there) = (format!("namespaces/{namespace}/"), "namespaces/default/");
    // A second each; kubectl repeats a request that the server wants to have later.
    let all = "packets?timeoutSeconds=1&watch=true";
    let named =
        |name: &str| format!("packets?fieldSelector=metadata.name%3D{name}&timeoutSeconds=1&watch=true");
    let of_story = format!("packets?labelSelector=story%3D{namespace}&timeoutSeconds=1&watch=true");
    let (web, db) = (named("web"), named("db"));
    let [here, web, db, of_story] = [&here, &web, &db, &of_story].map(String::as_str);
    let of_node = "nodepackets?fieldSelector=metadata.name%3Dnode-1&watch=true";
    for (user, place, request, verb, resource, name, code) in [
        (alice, here, all, "watch", "packets", None, 200),
        (alice, here, web, "watch", "packets", Some("web"), 200),
        (alice, here, "packets", "list", "packets", None, 403),
        (alice, there, all, "watch", "packets", None, 403),
        (alice, "", all, "watch", "packets", None, 403),
        (alice, "", of_node, "watch", "nodepackets", Some("node-1"), 403),
        (alice, here, "podreports", "list", "podreports", None, 200),
        (alice, here, "podreports/web", "get", "podreports", Some("web"), 404),
        (alice, here, "podreports?watch=true", "watch", "podreports", None, 403),
        (bob, here, web, "watch", "packets", Some("web"), 200),
        (bob, here, db, "watch", "packets", Some("db"), 403),
        (bob, here, all, "watch", "packets", None, 403),
        (bob, here, "podreports", "list", "podreports", None, 403),
        (carol, "", of_story, "watch", "packets", None, 200),
        (carol, here, web, "watch", "packets", Some("web"), 200),
        // The request has no interface.
        (carol, "", of_node, "watch", "nodepackets", Some("node-1"), 400),
        (carol, here, "podreports", "list", "podreports", None, 403),
        (mallory, here, all, "watch", "packets", None, 403),
        (mallory, here, web, "watch", "packets", Some("web"), 403),
        (mallory, "", of_node, "watch", "nodepackets", Some("node-1"), 403),
        (mallory, here, "podreports", "list", "podreports", None, 403),
    ] {
        let uri = of(place, request);
        let answer = packets.get(user, &uri);
        assert_eq!(answer.is_ok(), code == 200, "{user} {uri}: {answer:?}");
        let event = wait_audited(|event| {
            let is_one = event["requestURI"] == uri && event["impersonatedUser"]["username"] == *user;
            is_one && event["stage"] == "ResponseComplete"
        });
        assert_eq!(
            (&event["responseStatus"]["code"], &event["verb"]),
            (&json!(code), &json!(verb)),
            "{event:#}"
        );
        let mut object = json!({ "apiGroup": GROUP, "apiVersion": "v1alpha1", "resource": resource });
        if let Some(namespace) = place.split('/').nth(1) {
            object["namespace"] = json!(namespace);
        }
        if let Some(name) = name {
            object["name"] = json!(name);
        }
        assert_eq!(event["objectRef"], object);
        match answer {
            Ok(text) if resource == "packets" => {
                assert!(
                    text.starts_with(SECTION) && text.contains("podmirror: end: timeoutSeconds"),
                    "{text:?}"
                );
                // The lines of the server's log name the user, and the line of the audit log.
                let id = event["auditID"].as_str().unwrap();
                server.wait_for_log(&["a user has read packets", user, id]);
            }
            Ok(text) => assert!(text.contains("\"kind\":\"PodReportList\""), "{text}"),
            Err(text) => {
                let reason = match code {
                    400 => "(BadRequest): interface \"\": ",
                    404 => "(NotFound): ",
                    _ => "(Forbidden): ",
                };
                assert!(text.contains(reason), "{user} {uri}: {text}");
            }
        }
    }
    // Those that the API server has refused have not reached the server.
    assert_eq!(server.log_with(&["a user reads packets", mallory]), Vec::<String>::new());
}

/// A file of the cluster's PKI.
pub(super) fn pki(name: &str) -> PathBuf {
    Path::new(KUBECONFIG).with_file_name("pki").join(name)
}

/// A client that connects to a server directly.
pub(super) struct Direct {
    tls: Arc<ClientConfig>,
    name: ServerName<'static>,
    port: u16,
}

impl Direct {
    /// A client with the certificate of a file and its key beside it.
    #[track_caller]
    pub(super) fn new(packets: &Packets<'_>, certificate: Option<&Path>) -> Self {
        let [port, _] = packets.ports[0];
        // What the API server verifies it with.
        let output = "--output=go-template={{.spec.caBundle|base64decode}}";
        let authority = packets.api.kubectl(&format!("get apiservice v1alpha1.{GROUP} {output}"));
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let tls = ClientConfig::builder().with_root_certificates(roots);
        let tls = match certificate {
            None => tls.with_no_client_auth(),
            Some(file) => {
                let own = CertificateDer::from_pem_file(file).unwrap();
                let key = PrivateKeyDer::from_pem_file(file.with_extension("key")).unwrap();
                tls.with_client_auth_cert(vec![own], key).unwrap()
            }
        };
        let name = ServerName::try_from(format!("{SERVICE}.{}.svc", packets.api.namespace())).unwrap();
        Self { tls: Arc::new(tls), name, port }
    }

    /// Sends a request, after whose answer the server closes the connection.
    pub(super) fn send(&self, uri: &str, headers: &[(&str, &str)]) -> io::Result<Connection> {
        let tls = ClientConnection::new(Arc::clone(&self.tls), self.name.clone()).unwrap();
        let connection = TcpStream::connect((BACKEND_IP, self.port)).unwrap();
        connection.set_read_timeout(Some(scaled(SOON))).unwrap();
        let mut stream = StreamOwned::new(tls, connection);
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let request = format!("GET {uri} HTTP/1.1\r\nHost: packets\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes())?;
        Ok(stream)
    }
}

/// Sends a request to a server directly. Returns the status code and the answer, or why there is none.
pub(super) fn ask(
    packets: &Packets<'_>,
    certificate: Option<&Path>,
    uri: &str,
    headers: &[(&str, &str)],
) -> Result<(u16, String), String> {
    let mut answer = Vec::new();
    let sent = Direct::new(packets, certificate).send(uri, headers);
    let answered = sent.and_then(|mut stream| stream.read_to_end(&mut answer));
    if let Err(error) = answered
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        return Err(error.to_string());
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    code.map(|code| (code, answer.clone())).ok_or_else(|| format!("no answer: {answer:?}"))
}

/// Makes a client certificate with this name, signed by an authority of the cluster.
fn certificate(lab: &Lab, authority: &str, name: &str) -> PathBuf {
    let file = lab.files().join(format!("{name}.crt"));
    let mut openssl = Command::new("openssl");
    openssl
        .args(["req", "-x509", "-newkey", "ec", "-noenc", "-days", "1", "-config"])
        .arg(pki("openssl.cnf"));
    openssl.args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", &format!("/CN={name}")]);
    openssl.args(["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=clientAuth"]);
    openssl
        .arg("-CA")
        .arg(pki(&format!("{authority}.crt")))
        .arg("-CAkey")
        .arg(pki(&format!("{authority}.key")));
    let output =
        openssl.arg("-out").arg(&file).arg("-keyout").arg(file.with_extension("key")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    file
}

/// The header with the user of a request.
fn as_user(user: &str) -> (&str, &str) {
    ("X-Remote-User", user)
}

#[test]
fn a_forged_user_is_refused() {
    let lab = Lab::new("packets-forged");
    let api = Api::new(&lab, "packets-forged");
    make_pods(&api);
    let packets = Packets::start(&api, 1, &[]);
    let alice = &packets.grant("alice", false, &json!([rule("watch", "packets")]));
    let uri = &packets.uri("packets?timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, uri));
    let front_proxy = pki("front-proxy-client.crt");
    let other_name = certificate(&lab, "front-proxy-ca", "other-name");
    let other_issuer = certificate(&lab, "ca", "front-proxy-client");
    let group = ("X-Remote-Group", "system:authenticated");
    let admins = ("X-Remote-Group", "system:masters");

    let code = |certificate: Option<&Path>, uri: &str, headers: &[(&str, &str)]| {
        ask(&packets, certificate, uri, headers).map(|(code, _)| code)
    };
    let discovery = &format!("/apis/{GROUP}/v1alpha1");
    for uri in [uri.as_str(), discovery, "/apis", "/metrics", "/healthz"] {
        for certificate in [None, Some(other_name.as_path())] {
            assert_eq!(code(certificate, uri, &[as_user(alice), group]), Ok(401), "{certificate:?} {uri}");
        }
    }
    code(Some(&other_issuer), uri, &[as_user(alice), group]).unwrap_err();

    // The API server has authorised its own requests, and the server asks it once more.
    let asked = |headers: &[(&str, &str)]| code(Some(&front_proxy), uri, headers);
    assert_eq!(asked(&[as_user(alice), group]), Ok(200));
    assert_eq!(asked(&[as_user("mallory"), admins]), Ok(200));
    assert_eq!(code(Some(&front_proxy), discovery, &[as_user("system:kube-aggregator")]), Ok(200));
    for headers in [&[group][..], &[as_user("")], &[as_user("mallory"), as_user(alice)]] {
        assert_eq!(asked(headers), Ok(401), "{headers:?}");
    }
    let (code, answer) = ask(&packets, Some(&front_proxy), uri, &[as_user("mallory"), group]).unwrap();
    let (_, status) = answer.split_once("\r\n\r\n").unwrap();
    let status: Value = serde_json::from_str(status).unwrap();
    assert_eq!((code, &status["kind"], &status["reason"]), (403, &json!("Status"), &json!("Forbidden")));
}
