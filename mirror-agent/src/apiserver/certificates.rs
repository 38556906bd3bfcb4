//! [`Certificates`]: the certificate of this server, and the CA by which kube-apiserver and the agents verify it.
//!
//! ```text
//! Secret      tls.crt, tls.key  the CA of all replicas            ┐ each written only if it is
//!             old.crt           the CA before it                  │ as it was read
//! APIService  caBundle          both, the old one until it ends   ┘
//! in memory   a certificate of each replica, signed by the CA
//! ```
//!
//! In a step, a replica reads the APIService, then the Secret, and [`decide`]s on one write or on a certificate:
//!
//! * A write to caBundle follows a read of the Secret that is newer than the last such write, or it fails. So no late
//!   write brings an older CA back.
//! * A CA signs only after it has been read in caBundle. A CA leaves caBundle when it has expired, or when the CA
//!   that replaced it is replaced itself, two thirds of a CA's lifetime later. By then, all certificates that the
//!   CA has signed have expired.
//!
//! To revoke the CA, empty the Secret: the replicas make a new one, and use no other after their next steps.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::Context as _;
use k8s_openapi::{
    ByteString, api::core::v1::Secret, kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use mirror_api::packets::{GROUP, VERSION};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use crate::util::backoff::Backoff;

const DAY: u64 = 86_400;
/// The longest lifetime of a server's certificate.
const LEAF: Duration = Duration::from_secs(7 * DAY);
/// The longest time between two steps, if nothing is left to do. An APIService that is deleted and applied again has no
/// caBundle until the next step.
const STEP: Duration = Duration::from_secs(20);
/// The longest time for which clients may know an earlier caBundle only.
const LOOK: Duration = Duration::from_secs(600);
/// Maximum difference of two clocks that does no harm. Certificates begin this long before they are made.
const SKEW: Duration = Duration::from_secs(7 * DAY);
/// The pauses after a write, a conflict or a failure.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(300));
/// Maximum duration of a step.
const PATIENCE: Duration = Duration::from_secs(30);
/// The common name of each CA.
const CA: &str = "podmirror-apiserver-ca";

/// The origin of the certificate.
#[derive(Debug, Clone)]
pub enum Source {
    /// The replicas make it.
    Own {
        /// The namespace of the Secret.
        namespace: String,
        /// The Secret of the CA. It exists, and is empty at first.
        secret: String,
    },
    /// The files `tls.crt` and `tls.key` of a directory. cert-manager renews them.
    Files(PathBuf),
}

/// The certificate of this server.
#[derive(Debug)]
pub struct Certificates {
    source: Source,
    services: Api<APIService>,
    names: Vec<String>,
    lifetime: Duration,
    leaf: watch::Sender<Option<(Leaf, Arc<CertifiedKey>)>>,
}

/// What a replica has read in the Secret, without the key. Times count from the UNIX epoch.
#[derive(Debug)]
struct Ca {
    pem: String,
    ends: Duration,
    /// The PEM of the CA before it. Empty if it has ended.
    old: String,
}

/// A certificate of the server, without the key.
#[derive(Debug, Clone)]
struct Leaf {
    /// The PEM of the CA that has signed it.
    ca: String,
    ends: Duration,
}

#[derive(Debug)]
enum Do {
    /// Make a CA, and write it to the Secret, with the present one as the old one.
    Replace,
    /// Write this to caBundle.
    Trust(String),
    /// Make a certificate, signed by the CA.
    Issue,
}

/// Returns what a replica has to do next. `is_settled`: it has read the same caBundle for as long as [`look`].
fn decide(
    ca: Option<&Ca>,
    bundle: &str,
    is_settled: bool,
    leaf: Option<&Leaf>,
    lifetime: Duration,
    now: Duration,
) -> Option<Do> {
    let Some(ca) = ca.filter(|ca| is_fresh(ca.ends, lifetime, now)) else { return Some(Do::Replace) };
    let trusted = ca.pem.clone() + &ca.old;
    if bundle != trusted {
        return Some(Do::Trust(trusted));
    }
    let is_due = leaf.is_none_or(|leaf| {
        if leaf.ca == ca.pem {
            return !is_fresh(leaf.ends, of_leaf(lifetime), now);
        }
        // Some clients may not have read the new CA yet. Until they have, the old one is used, if it can be.
        is_settled || leaf.ends <= now || !trusted.contains(&leaf.ca)
    });
    is_due.then_some(Do::Issue)
}

/// Whether a third of a life is left, and not more than a whole one: then a clock was wrong, and it may not have begun.
fn is_fresh(ends: Duration, life: Duration, now: Duration) -> bool {
    (life / 3..=life + SKEW).contains(&ends.saturating_sub(now))
}

/// The lifetime of a server's certificate: less than the third of a CA's life that is left when it is replaced.
fn of_leaf(lifetime: Duration) -> Duration {
    LEAF.min(lifetime / 4)
}

/// The time after which clients know a new caBundle.
fn look(lifetime: Duration) -> Duration {
    LOOK.min(lifetime / 64)
}

impl Certificates {
    /// No certificate, until [`Self::keep`] has one. `names`: the DNS names of the server. `lifetime`: of a CA.
    pub fn new(source: Source, client: Client, names: Vec<String>, lifetime: Duration) -> Arc<Self> {
        let leaf = watch::Sender::new(None);
        Arc::new(Self { source, services: Api::all(client), names, lifetime, leaf })
    }

    /// Whether there is a certificate that has not ended.
    pub fn is_ready(&self) -> bool {
        self.leaf.borrow().as_ref().is_some_and(|(leaf, _)| leaf.ends > now())
    }

    /// Keeps the certificate, the CA and caBundle valid. Never returns.
    pub async fn keep(self: Arc<Self>) {
        let (mut backoff, mut seen) = (BACKOFF, (String::new(), Instant::now()));
        loop {
            let step = timeout(PATIENCE, self.step(&mut seen, now())).await;
            let is_done = step.map_err(anyhow::Error::from).flatten().unwrap_or_else(|error| {
                let error = mirror_client::in_words(error.as_ref());
                warn!(error, "cannot renew the certificate of the server; the server retries");
                false
            });
            if is_done {
                backoff = BACKOFF;
            }
            sleep(if is_done { STEP.min(look(self.lifetime)) } else { backoff.pause() }).await;
        }
    }

    /// Does one thing. Returns whether nothing is left to do. `seen`: the last caBundle, and since when it is the same.
    async fn step(&self, seen: &mut (String, Instant), now: Duration) -> anyhow::Result<bool> {
        let (namespace, name) = match &self.source {
            Source::Own { namespace, secret } => (namespace, secret),
            Source::Files(dir) => {
                self.leaf.send_replace(Some(read_files(dir)?));
                return Ok(true);
            }
        };
        let services = &self.services;
        let secrets = Api::<Secret>::namespaced(services.clone().into_client(), namespace);
        let service = services.get(&format!("{VERSION}.{GROUP}")).await?;
        // Not before the APIService.
        let mut secret = secrets.get(name).await?;
        let bundle = service.spec.and_then(|spec| spec.ca_bundle).unwrap_or_default();
        let bundle = String::from_utf8_lossy(&bundle.0);
        if bundle != seen.0 {
            *seen = (bundle.into_owned(), Instant::now());
        }
        let data = secret.data.get_or_insert_default();
        let (ca, key) = read(data, now).unzip();
        let leaf = self.leaf.borrow().as_ref().map(|(leaf, _)| leaf.clone());
        let is_settled = seen.1.elapsed() >= look(self.lifetime);
        let todo = decide(ca.as_ref(), &seen.0, is_settled, leaf.as_ref(), self.lifetime, now);
        let written = match (todo, ca, key) {
            (None, ..) => return Ok(true),
            (Some(Do::Issue), Some(ca), Some(key)) => {
                let leaf = Leaf { ca: ca.pem, ends: now + of_leaf(self.lifetime) };
                let certified = issue(key, &self.names, now, self.lifetime)?;
                self.leaf.send_replace(Some((leaf, Arc::new(certified))));
                info!("made a certificate of the server");
                Ok(())
            }
            (Some(Do::Trust(bundle)), ..) => {
                let patch = Patch::Merge(json!({
                    "metadata": { "resourceVersion": service.metadata.resource_version },
                    "spec": { "caBundle": ByteString(bundle.into_bytes()) },
                }));
                let name = service.metadata.name.unwrap_or_default();
                services.patch(&name, &PatchParams::default(), &patch).await.map(drop)
            }
            (Some(_), ..) => {
                let old = data.remove("tls.crt").unwrap_or_default();
                let (pem, key) = make_ca(now, self.lifetime)?;
                let files = [("tls.crt", pem), ("tls.key", key)];
                data.extend(files.map(|(file, text)| (file.to_owned(), ByteString(text.into_bytes()))));
                data.insert("old.crt".to_owned(), old);
                secrets.replace(name, &PostParams::default(), &secret).await.map(drop)
            }
        };
        match written {
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            written => Ok(written.map(|()| false)?),
        }
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.leaf.borrow().as_ref().map(|(_, certified)| Arc::clone(certified))
    }
}

fn now() -> Duration {
    UNIX_EPOCH.elapsed().unwrap_or_default()
}

/// Reads the CA and its key in the Secret.
fn read(data: &BTreeMap<String, ByteString>, now: Duration) -> Option<(Ca, KeyPair)> {
    let text = |file: &str| data.get(file).and_then(|text| String::from_utf8(text.0.clone()).ok());
    let ends = |pem: &String| ends(&CertificateDer::from_pem_slice(pem.as_bytes()).ok()?);
    let (pem, key) = (text("tls.crt")?, KeyPair::from_pem(&text("tls.key")?).ok()?);
    let old = text("old.crt").filter(|old| ends(old).is_some_and(|ends| ends > now));
    Some((Ca { ends: ends(&pem)?, pem, old: old.unwrap_or_default() }, key))
}

fn read_files(dir: &Path) -> anyhow::Result<(Leaf, Arc<CertifiedKey>)> {
    let chain = CertificateDer::pem_file_iter(dir.join("tls.crt")).context("tls.crt")?;
    let chain = chain.collect::<Result<Vec<_>, _>>().context("tls.crt")?;
    let key = PrivateKeyDer::from_pem_file(dir.join("tls.key")).context("tls.key")?;
    // An error while only one of the files is replaced.
    let certified = CertifiedKey::from_der(chain, key, &ring::default_provider())?;
    Ok((Leaf { ca: String::new(), ends: Duration::MAX }, Arc::new(certified)))
}

/// The end of a certificate.
fn ends(der: &[u8]) -> Option<Duration> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    u64::try_from(certificate.validity().not_after.timestamp()).ok().map(Duration::from_secs)
}

fn params(name: &str, names: &[String], now: Duration, life: Duration) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, name);
    let epoch = date_time_ymd(1970, 1, 1);
    (params.not_before, params.not_after) = (epoch + now.saturating_sub(SKEW), epoch + (now + life));
    Ok(params)
}

/// Makes a CA. Returns its certificate and its key, in PEM.
fn make_ca(now: Duration, lifetime: Duration) -> anyhow::Result<(String, String)> {
    let mut params = params(CA, &[], now, lifetime)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

/// Makes a certificate of the server, signed by the CA with this key.
fn issue(ca: KeyPair, names: &[String], now: Duration, lifetime: Duration) -> anyhow::Result<CertifiedKey> {
    // Only the name of the CA is used, the same for all CAs.
    let issuer = Issuer::new(params(CA, &[], now, lifetime)?, ca);
    let mut leaf = params("podmirror-apiserver", names, now, of_leaf(lifetime))?;
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let chain = vec![leaf.signed_by(&key, &issuer)?.into()];
    Ok(CertifiedKey::from_der(chain, key.into(), &ring::default_provider())?)
}

#[cfg(test)]
mod tests;
