//! [`FrontProxy`]: kube-apiserver as the only client, and the users for whom it sends requests.
//!
//! kube-apiserver authenticates a user and passes the name on in a header. Anyone could send such a header, so the
//! server accepts it only from a client with the certificate of kube-apiserver. A ConfigMap of each cluster has the
//! issuer and the names of that certificate, and the names of the headers.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::Context as _;
use http::{HeaderMap, HeaderValue};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    core::v1::ConfigMap,
};
use kube::{Api, Client, api::PostParams};
use mirror_api::packets::{GROUP, VERSION};
use percent_encoding::percent_decode_str;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, UnixTime, pem::PemObject as _},
    server::{ResolvesServerCert, WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::warn;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{
    PATIENCE,
    query::{Refusal, Scope},
};

/// The interval at which the ConfigMap is read.
const INTERVAL: Duration = Duration::from_secs(60);
/// The delay before the next attempt to read it for the first time.
const RETRY: Duration = Duration::from_secs(5);
/// Maximum length of an audit ID in bytes, as in the logs of kube-apiserver. A user can choose it, and it is in the log
/// for each pod.
const MAX_AUDIT_ID: usize = 64;
/// The lists of the ConfigMap: the common names of the certificate (an empty list allows any), the names of the headers
/// with the user, its UID and its groups, and the prefixes of headers with other facts.
const LISTS: [&str; 5] = [
    "requestheader-allowed-names",
    "requestheader-username-headers",
    "requestheader-uid-headers",
    "requestheader-group-headers",
    "requestheader-extra-headers-prefix",
];

/// What identifies kube-apiserver, and the client that asks it about rights.
pub struct FrontProxy {
    client: Client,
    known: watch::Sender<Option<Arc<Settings>>>,
}

/// A user that kube-apiserver has authenticated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The name.
    pub name: String,
    /// The UID, if the authenticator knows one.
    pub uid: Option<String>,
    /// The groups.
    pub groups: Vec<String>,
    /// Other facts, for authorisers.
    pub extra: BTreeMap<String, Vec<String>>,
    /// The ID of the request in the audit log of kube-apiserver, or its beginning.
    pub audit_id: Option<String>,
}

impl FrontProxy {
    /// Starts to read the ConfigMap. Must be called within the runtime.
    pub fn start(client: Client) -> Arc<Self> {
        let proxy = Arc::new(Self { client, known: watch::Sender::new(None) });
        tokio::spawn(Arc::clone(&proxy).follow());
        proxy
    }

    /// Reads the ConfigMap forever. While it cannot be read, the last contents count.
    async fn follow(self: Arc<Self>) {
        loop {
            match Settings::read(&self.client).await {
                Ok(settings) => drop(self.known.send_replace(Some(Arc::new(settings)))),
                Err(error) => {
                    let error = mirror_client::in_words(error.as_ref());
                    warn!(error, "cannot read how kube-apiserver identifies itself; the server retries");
                }
            }
            sleep(if self.is_ready() { INTERVAL } else { RETRY }).await;
        }
    }

    /// Whether the ConfigMap has been read.
    pub fn is_ready(&self) -> bool {
        self.known.borrow().is_some()
    }

    /// The TLS settings for a connection. A client without a certificate can connect, as a probe does.
    pub fn tls(&self, certificates: Arc<dyn ResolvesServerCert>) -> Arc<ServerConfig> {
        let known = self.known.borrow().clone();
        let verifier =
            known.map_or_else(WebPkiClientVerifier::no_client_auth, |known| Arc::clone(&known.verifier));
        Arc::new(ServerConfig::builder().with_client_cert_verifier(verifier).with_cert_resolver(certificates))
    }

    /// The present settings, if this is the certificate of kube-apiserver, with those of its issuers.
    pub(super) fn admits(&self, peer: &[CertificateDer<'_>]) -> Option<Arc<Settings>> {
        self.known.borrow().clone().filter(|known| known.is_kube_apiserver(peer).unwrap_or_default())
    }

    /// The user of a request.
    ///
    /// # Errors
    ///
    /// 401: the client is not kube-apiserver, or there is not exactly one user.
    pub fn user(&self, peer: &[CertificateDer<'_>], headers: &HeaderMap) -> Result<User, Refusal> {
        let user = self.admits(peer).and_then(|known| known.user(headers));
        user.ok_or_else(|| Refusal::new(401, "Unauthorized", "this server serves kube-apiserver alone"))
    }

    /// Has kube-apiserver authorise the access of a user.
    ///
    /// # Errors
    ///
    /// 403: the user has no such right. 503: there is no answer.
    pub async fn authorise(&self, user: &User, scope: &Scope) -> Result<(), Refusal> {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let [verb, resource, namespace, name] = scope.attributes().map(some);
        let [group, version] = [GROUP, VERSION].map(some);
        let place =
            ResourceAttributes { group, version, verb, resource, namespace, name, ..Default::default() };
        let User { name, uid, groups, extra, .. } = user.clone();
        let spec = SubjectAccessReviewSpec {
            user: Some(name),
            uid,
            groups: Some(groups),
            extra: Some(extra),
            resource_attributes: Some(place),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let error = match timeout(PATIENCE, reviews.create(&PostParams::default(), &review)).await {
            Ok(Ok(review)) if review.status.as_ref().is_some_and(|status| status.allowed) => return Ok(()),
            Ok(Ok(_)) => {
                let ([verb, resource, namespace, name], User { name: user, .. }) = (scope.attributes(), user);
                let object = format!("{resource}.{GROUP} {name:?} in namespace {namespace:?}");
                return Err(Refusal::new(403, "Forbidden", format!("user {user:?} cannot {verb} {object}")));
            }
            Ok(Err(error)) => mirror_client::in_words(&error),
            Err(_) => "no answer".to_owned(),
        };
        Err(Refusal::unavailable(format!("the API server cannot authorise the request: {error}")))
    }
}

/// The contents of the ConfigMap.
#[derive(Debug)]
pub(super) struct Settings {
    verifier: Arc<dyn ClientCertVerifier>,
    lists: [Vec<String>; LISTS.len()],
}

impl Settings {
    async fn read(client: &Client) -> anyhow::Result<Self> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
        let map = timeout(PATIENCE, maps.get("extension-apiserver-authentication")).await;
        Self::parse(&map.context("the API server does not answer")??.data.unwrap_or_default())
    }

    fn parse(data: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        let authority = data.get("requestheader-client-ca-file");
        let authority = authority.context("kube-apiserver has no --requestheader-client-ca-file")?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
            roots.add(certificate?)?;
        }
        let verifier = WebPkiClientVerifier::builder(roots.into()).allow_unauthenticated().build()?;
        let mut lists = <[Vec<String>; LISTS.len()]>::default();
        for (list, key) in lists.iter_mut().zip(LISTS) {
            let text = data.get(key).map_or("null", String::as_str);
            *list = serde_json::from_str::<Option<_>>(text).context(key)?.unwrap_or_default();
        }
        Ok(Self { verifier, lists })
    }

    fn is_kube_apiserver(&self, peer: &[CertificateDer<'_>]) -> Option<bool> {
        let (own, issuers) = peer.split_first()?;
        // The handshake has verified it. Since then it can have expired, or the ConfigMap can have changed.
        self.verifier.verify_client_cert(own, issuers, UnixTime::now()).ok()?;
        let (_, own) = X509Certificate::from_der(own).ok()?;
        let names = own.subject().iter_common_name().map(|name| name.as_str().ok());
        let (names, [allowed, ..]) = (names.collect::<Option<Vec<_>>>()?, &self.lists);
        Some(allowed.is_empty() || allowed.iter().any(|name| names == [name.as_str()]))
    }

    /// The user in these headers, if there is exactly one, and if all texts are UTF-8.
    fn user(&self, headers: &HeaderMap) -> Option<User> {
        let text = |value: &HeaderValue| String::from_utf8(value.as_bytes().to_vec()).ok();
        let values = |names: &[String]| -> Option<Vec<String>> {
            names.iter().flat_map(|name| headers.get_all(name)).map(text).collect()
        };
        let [_, user, uid, groups, prefixes] = &self.lists;
        let [name] = <[String; 1]>::try_from(values(user)?).ok().filter(|[name]| !name.is_empty())?;
        let mut extra = BTreeMap::<_, Vec<_>>::new();
        for (header, value) in headers {
            let rest = |prefix: &String| header.as_str().strip_prefix(&prefix.to_lowercase());
            if let Some(key) = prefixes.iter().find_map(rest) {
                let key = percent_decode_str(key).decode_utf8_lossy().into_owned();
                extra.entry(key).or_default().push(text(value)?);
            }
        }
        let (uid, groups) = (values(uid)?.pop(), values(groups)?);
        let mut audit_id = headers.get("audit-id").and_then(text);
        audit_id.iter_mut().for_each(|id| id.truncate(id.floor_char_boundary(MAX_AUDIT_ID)));
        Some(User { name, uid, groups, extra, audit_id })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use http::HeaderName;

    use super::*;

    #[test]
    fn the_headers_that_the_config_map_names_have_exactly_one_user() {
        let authority = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap().cert.pem();
        let always =
            [("requestheader-client-ca-file", authority.as_str()), ("requestheader-allowed-names", "null")];
        let listed = [
            ("requestheader-username-headers", r#"["X-Remote-User", "X-User"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
            ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#),
        ];
        let user = |listed: &[(&str, &str)], headers: &[(&str, &[u8])]| {
            let data = always.iter().chain(listed).map(|(key, text)| ((*key).to_owned(), (*text).to_owned()));
            let header = |(name, value): &(&str, &[u8])| {
                (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value).unwrap())
            };
            Settings::parse(&data.collect()).unwrap().user(&headers.iter().map(header).collect())
        };
        let zoe = ("X-Remote-User", "Zoë".as_bytes());
        let text = |text: &str| text.to_owned();
        let headers: [(&str, &[u8]); 8] = [
            zoe,
            // An old kube-apiserver passes this header on as the user has sent it, and does not list it.
            ("X-Remote-Uid", b"7"),
            ("X-Remote-Group", b"dev"),
            ("X-Remote-Group", b"ops"),
            ("X-Remote-Extra-Example.org%2fScope", b"a"),
            ("X-Remote-Extra-Example.org%2fScope", b"b"),
            ("Audit-Id", b"12-34"),
            ("X-Remote", b"no such header"),
        ];
        let expected = User {
            name: text("Zoë"),
            uid: None,
            groups: ["dev", "ops"].map(text).into(),
            extra: [(text("example.org/scope"), ["a", "b"].map(text).into())].into(),
            audit_id: Some(text("12-34")),
        };
        let without_uid = &listed[..3];
        assert_eq!(user(without_uid, &headers), Some(expected.clone()));
        // A header that the ConfigMap does not list sets nothing.
        assert_eq!(user(&listed, &headers), Some(User { uid: Some(text("7")), ..expected.clone() }));
        let User { name, audit_id, .. } = expected;
        assert_eq!(user(&listed[..1], &headers), Some(User { name, audit_id, ..User::default() }));
        assert_eq!(user(&listed[1..], &headers), None);
        assert_eq!(user(without_uid, &[]), None);
        assert_eq!(user(without_uid, &[("X-Remote-User", b"")]), None);
        for second in [("X-Remote-User", &b"bob"[..]), ("X-User", b"bob"), ("X-Remote-Group", b"\xff")] {
            assert_eq!(user(without_uid, &[zoe, second]), None, "{second:?}");
        }
        let long = "é".repeat(100_000);
        let chosen = user(without_uid, &[zoe, ("Audit-Id", long.as_bytes())]).unwrap();
        assert_eq!(chosen.audit_id, Some("é".repeat(32)));
        assert!(Settings::parse(&BTreeMap::new()).is_err());
    }
}
