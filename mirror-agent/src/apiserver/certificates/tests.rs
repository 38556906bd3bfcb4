//! Tests: the certificates of two replicas, as an agent verifies them, and files.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

mod histories;

use std::{
    fs, mem,
    sync::{Mutex, MutexGuard},
};

use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    pki_types::{ServerName, UnixTime},
};
use serde_json::Value;
use tokio::time::advance;

use super::*;
use crate::sources::kube::tests::fake::{self, Reply};

const LIFETIME: Duration = Duration::from_secs(365 * DAY);
const NAME: &str = "podmirror-apiserver.podmirror.svc";

/// The objects of an API server, and the requests for them.
#[derive(Debug)]
struct Objects {
    service: Value,
    secret: Value,
    version: u64,
    /// Another replica writes before the next write.
    is_raced: bool,
    requests: Vec<String>,
}

#[derive(Clone)]
struct Server(Arc<Mutex<Objects>>);

impl Server {
    fn new() -> Self {
        let metadata = |name: &str| json!({ "name": name, "resourceVersion": "0" });
        let spec = json!({ "groupPriorityMinimum": 100, "versionPriority": 100 });
        Self(Arc::new(Mutex::new(Objects {
            service: json!({
                "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
                "metadata": metadata("v1alpha1.packets.podmirror.io"), "spec": spec,
            }),
            secret: json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata("ca") }),
            version: 0,
            is_raced: false,
            requests: Vec::new(),
        })))
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.0.lock().unwrap()
    }

    fn client(&self) -> Client {
        let server = self.clone();
        fake::client_with_bodies(move |request, body| {
            let mut objects = server.objects();
            let objects = &mut *objects;
            let (method, path) = (request.method().as_str(), request.uri().path());
            let object = match path {
                "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.packets.podmirror.io" => {
                    objects.requests.push(format!("{method} APIService"));
                    &mut objects.service
                }
                "/api/v1/namespaces/podmirror/secrets/ca" => {
                    objects.requests.push(format!("{method} Secret"));
                    &mut objects.secret
                }
                _ => return Reply::Status(404),
            };
            if method != "GET" {
                objects.version += 1;
                let version = json!(objects.version.to_string());
                if mem::take(&mut objects.is_raced) {
                    object["metadata"]["resourceVersion"] = version.clone();
                }
                if body["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                    return Reply::Status(409);
                }
                if method == "PUT" {
                    *object = body.clone();
                } else {
                    object["spec"]["caBundle"] = body["spec"]["caBundle"].clone();
                }
                object["metadata"]["resourceVersion"] = version;
            }
            Reply::Object(object.clone())
        })
    }

    fn take_requests(&self) -> Vec<String> {
        mem::take(&mut self.objects().requests)
    }

    /// The certificates in caBundle.
    fn bundle(&self) -> Vec<CertificateDer<'static>> {
        let bundle = self.objects().service["spec"]["caBundle"].clone();
        let bundle: ByteString = serde_json::from_value(bundle).unwrap();
        CertificateDer::pem_slice_iter(&bundle.0).map(Result::unwrap).collect()
    }
}

/// A replica, and what its loop remembers.
struct Running(Arc<Certificates>, (String, Instant));

impl Running {
    fn new(server: &Server) -> Self {
        let source = Source::Own { namespace: "podmirror".into(), secret: "ca".into() };
        let certificates = Certificates::new(source, server.client(), vec![NAME.into()], LIFETIME);
        Self(certificates, (String::new(), Instant::now()))
    }

    /// Steps until nothing is left to do. Returns the certificate.
    async fn run(&mut self, now: Duration) -> CertificateDer<'static> {
        for _ in 0..10 {
            if self.0.step(&mut self.1, now).await.unwrap() {
                return served(&self.0).unwrap();
            }
        }
        panic!("there is always something to do");
    }
}

fn served(certificates: &Certificates) -> Option<CertificateDer<'static>> {
    certificates.leaf.borrow().as_ref().map(|(_, certified)| certified.cert[0].clone())
}

/// Verifies a server's certificate as an agent does.
fn verify(
    roots: &[CertificateDer<'static>],
    certificate: &CertificateDer<'_>,
    name: &'static str,
    now: Duration,
) -> Result<(), rustls::Error> {
    let mut store = RootCertStore::empty();
    roots.iter().for_each(|root| store.add(root.clone()).unwrap());
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build().unwrap();
    let (name, now) = (ServerName::try_from(name).unwrap(), UnixTime::since_unix_epoch(now));
    verifier.verify_server_cert(certificate, &[], &name, &[], now).map(drop)
}

#[tokio::test(start_paused = true)]
async fn two_replicas_have_a_ca_and_replace_it_in_time() {
    let server = Server::new();
    let begun = now();
    let day = |day: u64| begun + Duration::from_secs(day * DAY);
    let (mut one, mut two) = (Running::new(&server), Running::new(&server));
    assert!(!one.0.is_ready());

    // One replica makes the CA. The APIService is always read first.
    server.objects().is_raced = true;
    let of_one = one.run(begun).await;
    let writes = [Some("PUT Secret"), Some("PUT Secret"), Some("PATCH APIService"), None, None];
    let steps = writes.into_iter().map(|write| ["GET APIService", "GET Secret"].into_iter().chain(write));
    assert_eq!(server.take_requests(), steps.flatten().collect::<Vec<_>>());
    let of_two = two.run(begun).await;
    assert!(server.take_requests().iter().all(|request| request.starts_with("GET ")));
    assert!(one.0.is_ready() && two.0.is_ready());
    let first = server.bundle();
    assert_eq!(first.len(), 1);
    assert_ne!(of_one, of_two);
    for certificate in [&of_one, &of_two] {
        // Also by a clock that is six days wrong.
        for now in [begun - Duration::from_secs(6 * DAY), begun, day(6)] {
            assert_eq!(verify(&first, certificate, NAME, now), Ok(()));
        }
        verify(&first, certificate, "podmirror-apiserver.shop.svc", begun).unwrap_err();
        verify(&first, certificate, NAME, day(8)).unwrap_err();
    }

    // The same CA signs for two thirds of its life.
    for at in (4..=243).step_by(2) {
        for replica in [&mut one, &mut two] {
            let certificate = replica.run(day(at)).await;
            assert_eq!(verify(&first, &certificate, NAME, day(at + 2)), Ok(()), "day {at}");
        }
    }
    assert_eq!(server.bundle(), first);

    // Clients get to know the next one before it signs.
    let old = [one.run(day(243)).await, two.run(day(243)).await];
    assert_eq!([one.run(day(244)).await, two.run(day(244)).await], old);
    let both = server.bundle();
    assert_eq!(both.len(), 2);
    assert_eq!(both[1..], first);
    advance(LOOK).await;
    for (replica, old) in [&mut one, &mut two].into_iter().zip(&old) {
        let new = replica.run(day(244)).await;
        assert_eq!(verify(&both, old, NAME, day(244)), Ok(()));
        assert_eq!(verify(&both[..1], &new, NAME, day(244)), Ok(()));
        verify(&first, &new, NAME, day(244)).unwrap_err();
    }
    assert_eq!(server.bundle(), both);

    // The old one is trusted until it ends.
    one.run(day(364)).await;
    assert_eq!(server.bundle(), both);
    one.run(day(366)).await;
    assert_eq!(server.bundle(), both[..1]);

    // A CA that is taken away is used no more.
    server.objects().secret["data"] = Value::Null;
    let certificates = [one.run(day(366)).await, two.run(day(366)).await];
    let next = server.bundle();
    assert_eq!(next.len(), 1);
    for certificate in &certificates {
        assert_eq!(verify(&next, certificate, NAME, day(366)), Ok(()));
        verify(&both, certificate, NAME, day(366)).unwrap_err();
    }
}

#[tokio::test(start_paused = true)]
async fn an_api_service_that_is_applied_again_soon_has_the_ca() {
    let server = Server::new();
    let keeper = tokio::spawn(Running::new(&server).0.keep());
    sleep(LOOK).await;
    let trusted = server.bundle();
    server.objects().service["spec"]["caBundle"] = json!("");
    sleep(Duration::from_secs(30)).await;
    assert_eq!((trusted.len(), server.bundle()), (1, trusted));
    keeper.abort();
}

#[tokio::test(start_paused = true)]
async fn files_are_read_again_and_a_half_of_a_pair_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::Files(dir.path().to_owned());
    let certificates = Certificates::new(source, fake::client(|_| Reply::Never), Vec::new(), LIFETIME);
    let keeper = tokio::spawn(Arc::clone(&certificates).keep());
    sleep(LOOK).await;
    assert!(!certificates.is_ready());

    let write = |file: &str, text: String| fs::write(dir.path().join(file), text).unwrap();
    let [old, new] = [0, 1].map(|_| rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap());
    write("tls.crt", old.cert.pem());
    write("tls.key", old.signing_key.serialize_pem());
    sleep(LOOK).await;
    assert!(certificates.is_ready());
    assert_eq!(served(&certificates).as_ref(), Some(old.cert.der()));

    write("tls.crt", new.cert.pem());
    sleep(2 * LOOK).await;
    assert_eq!(served(&certificates).as_ref(), Some(old.cert.der()));
    write("tls.key", new.signing_key.serialize_pem());
    sleep(LOOK).await;
    assert_eq!(served(&certificates).as_ref(), Some(new.cert.der()));
    keeper.abort();
}
