//! Requests for packets that the API server passes on to the server of an APIService: what that server and the audit
//! log learn of the user.

use std::{
    io::{self, BufRead as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use mirror_test_cluster::built::BACKEND_IP;
use mirror_tests::{Api, Lab, PATIENCE, SOON, audited, check, eventually, list, wait_audited};
use rustls::{
    RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use serde_json::{Value, json};

use crate::resources::file;

pub(crate) const GROUP: &str = "packets.podmirror.io";
/// The Service of the servers.
pub(crate) const SERVICE: &str = "packets";
/// The body of an answer to a request for packets.
const PACKETS: &str = "some packets\n";

/// The APIService for packets, deleted on drop. A cluster has only one, so a story waits until no other story has it.
pub(crate) struct Registration<'a> {
    api: &'a Api,
    _turn: MutexGuard<'static, ()>,
}

impl<'a> Registration<'a> {
    /// Registers servers that listen at [`BACKEND_IP`], each with a port for the API server and one for agents.
    /// `is_verified`: the API server verifies their certificates, when they have written their CA.
    #[track_caller]
    pub(crate) fn new(api: &'a Api, servers: &[[u16; 2]], is_verified: bool) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        // A story that failed has deleted its APIService too.
        let registration = Self { api, _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) };
        let slice = |(number, [https, agents]): (usize, &[u16; 2])| {
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {
                    "name": format!("{SERVICE}-{number}"), "labels": { "kubernetes.io/service-name": SERVICE },
                },
                "ports": [{ "name": "https", "port": https }, { "name": "agents", "port": agents }],
                "endpoints": [{ "addresses": [BACKEND_IP] }],
            })
        };
        // An API server before Kubernetes 1.33 reads these instead.
        let subset = |[https, agents]: &[u16; 2]| {
            json!({
                "addresses": [{ "ip": BACKEND_IP }],
                "ports": [{ "name": "https", "port": https }, { "name": "agents", "port": agents }],
            })
        };
        let endpoints = json!({
            "apiVersion": "v1", "kind": "Endpoints", "metadata": { "name": SERVICE },
            "subsets": servers.iter().map(subset).collect::<Vec<_>>(),
        });
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": SERVICE },
            "spec": { "ports": [{ "name": "https", "port": 443 }, { "name": "agents", "port": 10709 }] },
        });
        let of_group = json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": { "name": format!("v1alpha1.{GROUP}") },
            "spec": {
                "group": GROUP, "version": "v1alpha1", "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": !is_verified, "service": { "name": SERVICE, "namespace": api.namespace() },
            },
        });
        let slices = servers.iter().enumerate().map(slice);
        api.apply(&list(&slices.chain([endpoints, service, of_group]).collect::<Vec<_>>()));
        registration
    }

    /// Waits until the API server has reached a server.
    #[track_caller]
    pub(crate) fn wait(&self) {
        eventually(PATIENCE, || {
            // The only condition is Available.
            let fields = "{.status.conditions[*].status}:{.status.conditions[*].message}";
            let available =
                self.api.try_kubectl(&format!("get apiservice v1alpha1.{GROUP} -o jsonpath={fields}"))?;
            check(available.starts_with("True"), || available)
        });
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.api.try_kubectl(&format!("delete apiservice v1alpha1.{GROUP}")) {
            eprintln!("the APIService stays: {error}");
        }
    }
}

/// A request that the server has received.
#[derive(Debug, Clone)]
struct Seen {
    uri: String,
    headers: Vec<String>,
    /// The client's certificate, which the server has verified.
    certificate: Option<Vec<u8>>,
}

impl Seen {
    /// The values of a header.
    fn values(&self, name: &str) -> Vec<&str> {
        let headers = self.headers.iter().filter_map(|header| header.split_once(": "));
        headers.filter(|(of, _)| of.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }
}

/// A server behind the API server, until the process ends.
struct Server {
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Starts a server that verifies the certificates of clients by this authority. A client needs none.
    #[track_caller]
    fn start(authority: &str) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
        let clients = WebPkiClientVerifier::builder(roots.into()).allow_unauthenticated().build().unwrap();
        let [certificate, key] =
            ["pem", "key"].map(|end| file(&format!("mirror-client/tests/pki/own.{end}")));
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let tls = ServerConfig::builder().with_client_cert_verifier(clients);
        let tls = Arc::new(tls.with_single_cert(vec![certificate], key).unwrap());
        let listener = TcpListener::bind((BACKEND_IP, 0)).unwrap();
        let server = Self { port: listener.local_addr().unwrap().port(), seen: Arc::default() };
        let seen = Arc::clone(&server.seen);
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let (tls, seen) = (Arc::clone(&tls), Arc::clone(&seen));
                thread::spawn(move || answer(tls, connection, &seen));
            }
        });
        server
    }

    /// The requests with this URI.
    fn requests(&self, uri: &str) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|request| request.uri == uri).cloned().collect()
    }
}

/// Answers a request for packets or for the resources of the group, and closes the connection.
fn answer(tls: Arc<ServerConfig>, connection: TcpStream, seen: &Mutex<Vec<Seen>>) -> io::Result<()> {
    let tls = ServerConnection::new(tls).map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(tls, connection);
    let head = (&mut stream).lines().take_while(|line| !line.as_ref().is_ok_and(String::is_empty));
    let head = head.collect::<io::Result<Vec<_>>>()?;
    let Some((request, headers)) = head.split_first() else { return Ok(()) };
    let uri = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let path = uri.split('?').next().unwrap_or_default();
    let (status, body) = if path == format!("/apis/{GROUP}/v1alpha1") {
        let packets = json!({
            "name": "packets", "singularName": "", "namespaced": true, "kind": "Packets", "verbs": ["watch"],
        });
        let resources = json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{GROUP}/v1alpha1"),
            "resources": [packets],
        });
        ("200 OK", resources.to_string())
    } else if path.ends_with("/packets") {
        ("200 OK", PACKETS.to_owned())
    } else {
        ("404 Not Found", String::new())
    };
    let chain = stream.conn.peer_certificates().unwrap_or_default();
    let certificate = chain.first().map(|certificate| certificate.to_vec());
    seen.lock().unwrap().push(Seen { uri, headers: headers.to_vec(), certificate });
    let head = "Content-Type: application/json\r\nConnection: close\r\nContent-Length";
    write!(stream, "HTTP/1.1 {status}\r\n{head}: {}\r\n\r\n{body}", body.len())?;
    stream.conn.send_close_notify();
    stream.flush()
}

#[test]
fn a_server_behind_the_api_server_and_the_audit_log_learn_who_requests_packets() {
    let lab = Lab::new("aggregation");
    let api = Api::new(&lab, "aggregation");
    let front_proxy = eventually(SOON, || {
        api.try_kubectl("get configmap extension-apiserver-authentication --namespace=kube-system -o json")
    });
    let front_proxy: Value = serde_json::from_str(&front_proxy).unwrap();
    let front_proxy = |key: &str| front_proxy["data"][key].as_str().unwrap();
    let server = Server::start(front_proxy("requestheader-client-ca-file"));
    let registration = Registration::new(&api, &[[server.port; 2]], false);
    registration.wait();
    api.apply(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": "readers" },
        "rules": [{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }],
    }));
    let namespace = api.namespace();
    api.kubectl("create serviceaccount alice");
    api.kubectl(&format!("create rolebinding alice --role=readers --serviceaccount={namespace}:alice"));
    let alice = api.kubeconfig_with(&api.kubectl("create token alice"));

    // The keys are in the order in which the API server passes them on.
    let query = "fieldSelector=metadata.name%3Dweb&filter=tcp+port+443&watch=true";
    let uri = format!("/apis/{GROUP}/v1alpha1/namespaces/{namespace}/packets?{query}");
    // The API server learns of the role and of the APIService after some moments.
    let packets =
        eventually(SOON, || api.try_kubectl(&format!("get --raw {uri} --kubeconfig={}", alice.display())));
    assert_eq!(packets, PACKETS);
    let seen = server.requests(&uri);
    let [request] = &seen[..] else { panic!("{seen:#?}") };
    let user = format!("system:serviceaccount:{namespace}:alice");
    assert_eq!(request.values("X-Remote-User"), [&user]);
    let groups = request.values("X-Remote-Group");
    assert!(groups.contains(&format!("system:serviceaccounts:{namespace}").as_str()), "{groups:?}");
    let certificate = request.certificate.as_ref().unwrap();
    let names: Vec<String> = serde_json::from_str(front_proxy("requestheader-allowed-names")).unwrap();
    let has = |name: &String| certificate.windows(name.len()).any(|part| part == name.as_bytes());
    assert!(names.iter().any(has), "no certificate of {names:?}");

    let is_complete = |event: &Value, code: u16| {
        let is_one = event["requestURI"] == uri && event["responseStatus"]["code"] == code;
        is_one && event["stage"] == "ResponseComplete"
    };
    let event = wait_audited(|event| is_complete(event, 200));
    assert_eq!(event["user"]["username"], user);
    assert_eq!((&event["verb"], &event["level"]), (&json!("watch"), &json!("Metadata")));
    assert_eq!(request.values("Audit-Id"), [event["auditID"].as_str().unwrap()]);
    let web = json!({
        "apiGroup": GROUP, "apiVersion": "v1alpha1", "resource": "packets", "namespace": namespace, "name": "web",
    });
    assert_eq!(event["objectRef"], web);

    // A user without the right gets nothing, and the server does not hear of the request.
    let refused = api.try_kubectl(&format!("get --raw {uri} --as=mallory")).unwrap_err();
    assert!(refused.contains("(Forbidden)") && refused.contains("mallory"), "{refused}");
    let event = wait_audited(|event| is_complete(event, 403) && event["impersonatedUser"] != Value::Null);
    assert_eq!((&event["impersonatedUser"]["username"], &event["objectRef"]), (&json!("mallory"), &web));
    assert_eq!(server.requests(&uri).len(), 1);

    let others = audited(|event| event["objectRef"]["apiGroup"] != GROUP);
    assert!(others.is_empty(), "the log has other requests: {others:#?}");
}
