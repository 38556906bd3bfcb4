//! Reads the certificate of a TLS server, as its clients verify it.

use std::{
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};

use crate::{SOON, scaled};

/// The certificate of the server at this address, in DER. An error if none of the authorities has signed it for the
/// name.
#[track_caller]
pub fn served_certificate(
    server: SocketAddr,
    name: &str,
    authorities: Vec<CertificateDer<'static>>,
) -> Result<Vec<u8>, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities);
    let tls = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());
    let mut tls = ClientConnection::new(tls, ServerName::try_from(name.to_owned()).unwrap()).unwrap();
    let mut connection = TcpStream::connect(server).unwrap();
    connection.set_read_timeout(Some(scaled(SOON))).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut connection).map_err(|error| format!("{server}: {error}"))?;
    }
    Ok(tls.peer_certificates().unwrap()[0].to_vec())
}
