//! [`Authorities`]: verifies the server's certificate as Go does. webpki refuses a certificate that is its own
//! authority ("CaUsedAsEndEntity"), as in many small clusters and proxies.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    server::ParsedCertificate,
};

/// The authorities of a kubeconfig, or of a pod's CA file. That file is read again for each connection: the kubelet
/// replaces it, and connections are few.
struct Authorities {
    file: Option<PathBuf>,
    last: Mutex<Trust>,
}

/// The certificates, and the verifier that uses them.
#[derive(Clone)]
struct Trust {
    certificates: Arc<[CertificateDer<'static>]>,
    verifier: Arc<WebPkiServerVerifier>,
}

/// Makes a TLS configuration trust these certificates.
pub(crate) fn trust(
    config: &mut ClientConfig,
    certificates: &[Vec<u8>],
    file: Option<PathBuf>,
) -> anyhow::Result<()> {
    let certificates =
        certificates.iter().map(|certificate| CertificateDer::from(certificate.clone())).collect();
    let authorities = Authorities { file, last: Mutex::new(Trust::in_certificates(certificates)?) };
    config.dangerous().set_certificate_verifier(Arc::new(authorities));
    Ok(())
}

impl Trust {
    fn in_certificates(certificates: Vec<CertificateDer<'static>>) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            roots.add(certificate.clone())?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        Ok(Self { certificates: certificates.into(), verifier })
    }
}

impl Authorities {
    /// The present authorities. While the file cannot be read, the last ones are used.
    fn trust(&self) -> Trust {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.file.as_ref().and_then(|file| {
            let certificates =
                CertificateDer::pem_file_iter(file).ok()?.collect::<Result<Vec<_>, _>>().ok()?;
            (*certificates != *last.certificates).then(|| Trust::in_certificates(certificates).ok())?
        });
        if let Some(read) = read {
            *last = read;
        }
        last.clone()
    }
}

impl fmt::Debug for Authorities {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Authorities").field("file", &self.file).finish_non_exhaustive()
    }
}

impl ServerCertVerifier for Authorities {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Trust { certificates, verifier } = self.trust();
        match verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // webpki returns this error after it has checked the dates. What remains is the name, and that it is
            // trusted.
            Err(Error::InvalidCertificate(CertificateError::Other(refused)))
                if refused.to_string() == "CaUsedAsEndEntity" =>
            {
                if !certificates.contains(end_entity) {
                    return Err(CertificateError::UnknownIssuer.into());
                }
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trust().verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trust().verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust().verifier.supported_verify_schemes()
    }
}
