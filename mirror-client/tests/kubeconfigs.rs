//! Realistic kubeconfigs, with kubectl as the reference: the client of the agent and the plugin sends the same request
//! as kubectl, by the same route, or refuses if kubectl does.
//!
//! Servers and proxies run in this process.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::{
    env, fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
};

use kube::Client;
use mirror_client::{Environment, Options};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    process::Command,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::WebPkiClientVerifier,
    },
};

const PKI: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pki");

/// A request as received by the server.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Seen {
    path: String,
    authorization: Option<String>,
    impersonated: Vec<String>,
    has_certificate: bool,
    through: Option<&'static str>,
}

/// The log of all servers and proxies.
type Log = Arc<Mutex<(Vec<Seen>, Option<&'static str>)>>;

/// The servers, proxies and files that a test can refer to.
struct Place {
    dir: PathBuf,
    log: Log,
    https: u16,
    own: u16,
    http: u16,
    tunnel: u16,
    encrypted_tunnel: u16,
    socks: u16,
}

/// A kubeconfig and its environment.
#[derive(Default)]
struct Setup {
    files: Vec<(&'static str, String)>,
    variables: Vec<(&'static str, String)>,
    options: Options,
    /// The same options, as arguments of kubectl.
    arguments: Vec<String>,
}

impl Place {
    async fn new(dir: &Path) -> Self {
        let log = Log::default();
        let [server, own] = ["server", "own"].map(|name| Some(acceptor(name)));
        Self {
            dir: dir.to_owned(),
            https: serve(log.clone(), server.clone(), answer).await,
            own: serve(log.clone(), own, answer).await,
            http: serve(log.clone(), None, answer).await,
            tunnel: serve(log.clone(), None, connect_tunnel).await,
            encrypted_tunnel: serve(log.clone(), server, connect_tunnel).await,
            socks: serve(log.clone(), None, socks).await,
            log,
        }
    }

    /// The kubeconfig `config`, with a user and a cluster that these fields complete.
    fn config(&self, cluster: &Value, user: &Value) -> Setup {
        let mut whole = json!({ "server": format!("https://127.0.0.1:{}", self.https), "certificate-authority-data": data("ca.pem") });
        for (field, value) in cluster.as_object().unwrap() {
            whole[field] = value.clone();
        }
        whole.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{ "name": "cluster", "cluster": whole }],
            "users": [{ "name": "user", "user": user }],
            "contexts": [{ "name": "here", "context": { "cluster": "cluster", "user": "user" } }],
        });
        Setup { files: vec![("config", config.to_string())], ..Setup::default() }
    }

    /// The server by a non-loopback address: for a loopback address no proxy is ever used.
    fn elsewhere(&self) -> Value {
        json!({ "server": format!("https://0.0.0.0:{}", self.https) })
    }
}

impl Setup {
    fn file(mut self, name: &'static str, text: impl Into<String>) -> Self {
        self.files.push((name, text.into()));
        self
    }

    fn variable(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// An option of the command line.
    fn option(mut self, name: &'static str, value: impl Into<String>) -> Self {
        let value = value.into();
        self.arguments.push(format!("--{name}={value}"));
        let Options { cluster_fields, user_fields, .. } = &mut self.options;
        match name {
            "kubeconfig" => self.options.kubeconfig = Some(value.into()),
            "context" => self.options.context = Some(value),
            "cluster" => self.options.cluster = Some(value),
            "user" => self.options.user = Some(value),
            "server" => cluster_fields.server = Some(value),
            "certificate-authority" => cluster_fields.certificate_authority = Some(value),
            "insecure-skip-tls-verify" => cluster_fields.insecure_skip_tls_verify = Some(value == "true"),
            "tls-server-name" => cluster_fields.tls_server_name = Some(value),
            "token" => user_fields.token = Some(value.into()),
            "client-certificate" => user_fields.client_certificate = Some(value),
            "client-key" => user_fields.client_key = Some(value),
            "as" => user_fields.impersonate = Some(value),
            "as-uid" => user_fields.impersonate_uid = Some(value),
            "as-group" => user_fields.impersonate_groups.get_or_insert_default().push(value),
            _ => unreachable!("{name}"),
        }
        self
    }
}

/// A file of the test's certificate authority, in base64.
fn data(name: &str) -> String {
    base64(&fs::read(format!("{PKI}/{name}")).unwrap())
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let of_three = |three: &[u8]| {
        let number =
            (0..3).fold(0_u32, |number, at| number << 8 | u32::from(three.get(at).copied().unwrap_or(0)));
        let digit = |at: usize| char::from(DIGITS[(number >> (18 - 6 * at)) as usize & 63]);
        (0..4).map(|at| if at <= three.len() { digit(at) } else { '=' }).collect::<String>()
    };
    bytes.chunks(3).map(of_three).collect()
}

fn acceptor(name: &str) -> TlsAcceptor {
    let certificates =
        CertificateDer::pem_file_iter(format!("{PKI}/{name}.pem")).unwrap().map(Result::unwrap);
    let key = PrivateKeyDer::from_pem_file(format!("{PKI}/{name}.key")).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(format!("{PKI}/ca.pem")).unwrap()).unwrap();
    let clients = WebPkiClientVerifier::builder(roots.into()).allow_unauthenticated().build().unwrap();
    let config = ServerConfig::builder().with_client_cert_verifier(clients);
    TlsAcceptor::from(Arc::new(config.with_single_cert(certificates.collect(), key).unwrap()))
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Serves every connection with `answer`, until the test's runtime ends.
async fn serve<F>(log: Log, tls: Option<TlsAcceptor>, answer: fn(Box<dyn Stream>, bool, Log) -> F) -> u16
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let (log, tls) = (log.clone(), tls.clone());
            tokio::spawn(async move {
                let Some(tls) = tls else { return answer(Box::new(connection), false, log).await };
                let connection = tls.accept(connection).await?;
                let has_certificate = connection.get_ref().1.peer_certificates().is_some();
                answer(Box::new(connection), has_certificate, log).await
            });
        }
    });
    port
}

/// Reads the lines of a request's head.
async fn head(connection: &mut Box<dyn Stream>) -> io::Result<Vec<String>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).lines().map(str::to_owned).collect())
}

/// An API server with one fixed answer.
async fn answer(mut connection: Box<dyn Stream>, has_certificate: bool, log: Log) -> io::Result<()> {
    let lines = head(&mut connection).await?;
    let path = lines[0].split([' ', '?']).nth(1).unwrap().to_owned();
    let mut seen = Seen { path, has_certificate, ..Seen::default() };
    for (name, value) in lines.iter().filter_map(|line| line.split_once(": ")) {
        match name.to_lowercase().as_str() {
            "authorization" => seen.authorization = Some(value.to_owned()),
            name if name.starts_with("impersonate-") => seen.impersonated.push(format!("{name}={value}")),
            _ => {}
        }
    }
    seen.impersonated.sort();
    {
        let mut log = log.lock().unwrap();
        seen.through = log.1;
        log.0.push(seen);
    }
    let body = json!({ "major": "1", "minor": "32", "gitVersion": "v1.32.4" }).to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length";
    connection.write_all(format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    connection.shutdown().await
}

/// Connects to a port of this machine, whatever the requested host.
async fn lead(mut connection: Box<dyn Stream>, port: u16, kind: &'static str, log: Log) -> io::Result<()> {
    log.lock().unwrap().1 = Some(kind);
    let mut server = TcpStream::connect(("127.0.0.1", port)).await?;
    tokio::io::copy_bidirectional(&mut connection, &mut server).await.map(|_| ())
}

/// An HTTP proxy that requires the password in its URL.
async fn connect_tunnel(mut connection: Box<dyn Stream>, _: bool, log: Log) -> io::Result<()> {
    let lines = head(&mut connection).await?;
    let password = format!("Proxy-Authorization: Basic {}", base64(b"me:pass@word")).to_lowercase();
    if !lines.iter().any(|line| line.to_lowercase() == password) {
        return connection.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n").await;
    }
    let port = lines[0].split(' ').nth(1).unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    connection.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    lead(connection, port, "tunnel", log).await
}

/// A SOCKS5 proxy without passwords.
async fn socks(mut connection: Box<dyn Stream>, _: bool, log: Log) -> io::Result<()> {
    let mut hello = [0; 2];
    connection.read_exact(&mut hello).await?;
    connection.read_exact(&mut vec![0; hello[1].into()]).await?;
    connection.write_all(&[5, 0]).await?;
    let mut request = [0; 4];
    connection.read_exact(&mut request).await?;
    let length = match request[3] {
        1 => 4,
        3 => connection.read_u8().await?.into(),
        _ => 16,
    };
    connection.read_exact(&mut vec![0; length]).await?;
    let port = connection.read_u16().await?;
    connection.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
    lead(connection, port, "socks", log).await
}

/// The outcome of a client: the requests that reached the server, and its error.
type Outcome = Result<Seen, String>;

impl Place {
    fn outcome(&self, failed: Option<String>) -> Outcome {
        let (mut requests, _) = std::mem::take(&mut *self.log.lock().unwrap());
        // Some builds of kubectl request the version first.
        requests.dedup();
        match failed {
            Some(error) => {
                assert_eq!(requests, [], "{error}");
                Err(error)
            }
            None => {
                assert_eq!(requests.len(), 1, "{requests:?}");
                Ok(requests.remove(0))
            }
        }
    }

    async fn ours(&self, setup: &Setup) -> Outcome {
        let variables =
            setup.variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let environment = Environment { variables, home: Some(self.dir.clone()) };
        let client = mirror_client::connect(&setup.options, &environment).await;
        let answer = match client {
            Ok(client) => version(client).await.map_err(anyhow::Error::from),
            Err(error) => Err(error),
        };
        self.outcome(answer.err().map(|error| format!("{error:#}")))
    }

    async fn kubectl(&self, program: &Path, setup: &Setup) -> Outcome {
        let mut kubectl = Command::new(program);
        kubectl.env_clear().env("PATH", env::var_os("PATH").unwrap()).env("HOME", &self.dir);
        kubectl.envs(setup.variables.iter().map(|(name, value)| (name, value)));
        kubectl.args(["version", "--request-timeout", "10s"]).args(&setup.arguments);
        let output = kubectl.stdin(Stdio::null()).output().await.unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        self.outcome((!output.status.success()).then_some(error))
    }
}

async fn version(client: Client) -> kube::Result<String> {
    client.request_text(http::Request::get("/version").body(Vec::new()).unwrap()).await
}

fn with_token(token: &str) -> Seen {
    Seen { path: "/version".into(), authorization: Some(format!("Bearer {token}")), ..Seen::default() }
}

fn through(kind: &'static str) -> Seen {
    Seen { through: Some(kind), ..with_token("secret") }
}

/// A credential helper that prints this status.
fn helper(status: &Value) -> String {
    let credential = json!({ "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status });
    format!("#!/bin/sh\necho '{credential}'\n")
}

/// A credential helper that prints the client's certificate with its key, and this status.
fn certificate_helper(mut status: Value) -> String {
    for (field, file) in [("clientCertificateData", "client.pem"), ("clientKeyData", "client.key")] {
        status[field] = fs::read_to_string(format!("{PKI}/{file}")).unwrap().into();
    }
    helper(&status).replace("\\n", "\\\\n")
}

fn exec(command: &str) -> Value {
    let version = "client.authentication.k8s.io/v1";
    json!({ "exec": { "apiVersion": version, "command": command, "interactiveMode": "Never", "installHint": "Ask Ada for it." } })
}

type Row = (&'static str, fn(&Place) -> Setup, Result<Seen, &'static str>);

fn rows() -> Vec<Row> {
    vec![
        (
            "an authority and a token",
            |at| at.config(&json!({}), &json!({ "token": "secret" })),
            Ok(with_token("secret")),
        ),
        (
            "files, relative to the kubeconfig",
            |at| {
                let [certificate, key, ca] = ["client.pem", "client.key", "ca.pem"]
                    .map(|name| fs::read_to_string(format!("{PKI}/{name}")).unwrap());
                at.config(
                    &json!({ "certificate-authority-data": null, "certificate-authority": "ca.pem" }),
                    &json!({ "client-certificate": "client.pem", "client-key": "client.key" }),
                )
                .file("client.pem", certificate)
                .file("client.key", key)
                .file("ca.pem", ca)
            },
            Ok(Seen { authorization: None, has_certificate: true, ..with_token("") }),
        ),
        (
            "a client's certificate",
            |at| {
                at.config(&json!({}), &json!({ "client-certificate-data": data("client.pem"), "client-key-data": data("client.key") }))
            },
            Ok(Seen { authorization: None, has_certificate: true, ..with_token("") }),
        ),
        (
            "a name and a password",
            |at| at.config(&json!({}), &json!({ "username": "me", "password": "word" })),
            Ok(Seen { authorization: Some(format!("Basic {}", base64(b"me:word"))), ..with_token("") }),
        ),
        (
            "another user",
            |at| at.config(&json!({}), &json!({ "token": "secret", "as": "ada", "as-groups": ["a"] })),
            Ok(Seen {
                impersonated: vec!["impersonate-group=a".into(), "impersonate-user=ada".into()],
                ..with_token("secret")
            }),
        ),
        (
            "no verification",
            |at| {
                at.config(
                    &json!({ "certificate-authority-data": null, "insecure-skip-tls-verify": true }),
                    &json!({ "token": "secret" }),
                )
            },
            Ok(with_token("secret")),
        ),
        (
            "no verification by an authority",
            |at| at.config(&json!({ "insecure-skip-tls-verify": true }), &json!({ "token": "secret" })),
            Err("exclude each other"),
        ),
        (
            "another authority",
            |at| {
                at.config(
                    &json!({ "certificate-authority-data": data("other.pem") }),
                    &json!({ "token": "secret" }),
                )
            },
            Err("UnknownIssuer"),
        ),
        (
            "a certificate that is its own authority",
            |at| {
                at.config(&json!({ "server": format!("https://127.0.0.1:{}", at.own), "certificate-authority-data": data("own.pem") }), &json!({ "token": "secret" }))
            },
            Ok(with_token("secret")),
        ),
        (
            "such a certificate under another name",
            |at| {
                let cluster = json!({ "server": format!("https://127.0.0.1:{}", at.own), "certificate-authority-data": data("own.pem"), "tls-server-name": "other.test" });
                at.config(&cluster, &json!({ "token": "secret" }))
            },
            Err("certificate not valid for name"),
        ),
        (
            "such a certificate that nobody trusts",
            |at| {
                at.config(
                    &json!({ "server": format!("https://127.0.0.1:{}", at.own) }),
                    &json!({ "token": "secret" }),
                )
            },
            Err("UnknownIssuer"),
        ),
        (
            "the name in the certificate",
            |at| at.config(&json!({ "tls-server-name": "api.test" }), &json!({ "token": "secret" })),
            Ok(with_token("secret")),
        ),
        (
            "another name than in the certificate",
            |at| at.config(&json!({ "tls-server-name": "other.test" }), &json!({ "token": "secret" })),
            Err("certificate not valid for name"),
        ),
        (
            "a server with a path",
            |at| {
                at.config(
                    &json!({ "server": format!("https://127.0.0.1:{}/k8s/c-1/", at.https) }),
                    &json!({ "token": "secret" }),
                )
            },
            Ok(Seen { path: "/k8s/c-1/version".into(), ..with_token("secret") }),
        ),
        (
            "a server without a scheme, which is one without TLS",
            |at| {
                at.config(
                    &json!({ "server": format!("127.0.0.1:{}", at.http) }),
                    &json!({ "token": "secret" }),
                )
            },
            Ok(Seen { authorization: None, ..with_token("") }),
        ),
        (
            "a server without TLS, which gets no token",
            |at| {
                at.config(
                    &json!({ "server": format!("http://127.0.0.1:{}", at.http) }),
                    &json!({ "token": "secret", "as": "ada" }),
                )
            },
            Ok(Seen {
                authorization: None,
                impersonated: vec!["impersonate-user=ada".into()],
                ..with_token("")
            }),
        ),
        (
            "a server that is a path",
            |at| at.config(&json!({ "server": "some/where" }), &json!({ "token": "secret" })),
            Err("server \"some/where\" is neither a URL nor a host and a port"),
        ),
        (
            "no server",
            |at| at.config(&json!({ "server": null }), &json!({ "token": "secret" })),
            Err("has no server"),
        ),
        (
            "empty values",
            |at| {
                let cluster = json!({ "certificate-authority": "", "tls-server-name": "", "proxy-url": "" });
                at.config(&cluster, &json!({ "token": "secret", "tokenFile": "", "username": "", "password": "", "client-key-data": "" }))
            },
            Ok(with_token("secret")),
        ),
        (
            "a file with a token and a newline",
            |at| at.config(&json!({}), &json!({ "tokenFile": "token" })).file("token", "from-file\n"),
            Ok(with_token("from-file")),
        ),
        (
            "a file with a token, and another token",
            |at| {
                at.config(&json!({}), &json!({ "tokenFile": "token", "token": "old" }))
                    .file("token", "from-file\n")
            },
            Ok(with_token("from-file")),
        ),
        (
            "a file with a token that is not there",
            |at| at.config(&json!({}), &json!({ "tokenFile": "token" })),
            Err("/token"),
        ),
        (
            "a token that no header may have",
            |at| at.config(&json!({}), &json!({ "token": "sec\nret" })),
            Err("the token is no text for a header"),
        ),
        (
            "a token with a newline at its end",
            |at| at.config(&json!({}), &json!({ "token": "secret\n" })),
            Err("the token is no text for a header"),
        ),
        (
            "a helper with a newline in its token",
            |at| {
                at.config(&json!({}), &exec("./helper"))
                    .file("helper", helper(&json!({ "token": "helped\n" })).replace("\\n", "\\\\n"))
            },
            Err("/helper\" of the kubeconfig cannot be used: the token is no text for a header"),
        ),
        (
            "a helper with a token that ends",
            |at| {
                let ends = json!({ "token": "helped", "expirationTimestamp": "2999-01-01T00:00:00Z" });
                at.config(&json!({}), &exec("./helper")).file("helper", helper(&ends))
            },
            Ok(with_token("helped")),
        ),
        (
            "a helper with nothing",
            |at| at.config(&json!({}), &exec("./helper")).file("helper", helper(&json!({}))),
            Err("cannot be used: it returned neither a token nor a certificate"),
        ),
        (
            "a helper with a token",
            |at| {
                at.config(&json!({}), &exec("./helper")).file("helper", helper(&json!({ "token": "helped" })))
            },
            Ok(with_token("helped")),
        ),
        (
            "a helper with a certificate",
            |at| at.config(&json!({}), &exec("./helper")).file("helper", certificate_helper(json!({}))),
            Ok(Seen { authorization: None, has_certificate: true, ..with_token("") }),
        ),
        (
            "a helper with a token and a certificate",
            |at| {
                let both = certificate_helper(json!({ "token": "helped" }));
                at.config(&json!({}), &exec("./helper")).file("helper", both)
            },
            Ok(Seen { has_certificate: true, ..with_token("helped") }),
        ),
        (
            "a helper with a token, and a certificate without its key",
            |at| {
                let status = json!({ "token": "helped", "clientCertificateData": "none" });
                at.config(&json!({}), &exec("./helper")).file("helper", helper(&status))
            },
            Err("cannot be used: it returned a certificate or a key, but not both"),
        ),
        (
            "a client's certificate, with which a helper is not run",
            |at| {
                let mut user = exec("./missing");
                user["client-certificate-data"] = data("client.pem").into();
                user["client-key-data"] = data("client.key").into();
                at.config(&json!({}), &user)
            },
            Ok(Seen { authorization: None, has_certificate: true, ..with_token("") }),
        ),
        (
            "a name without a password, with which a helper is not run",
            |at| {
                let mut user = exec("./missing");
                user["username"] = "me".into();
                at.config(&json!({}), &user)
            },
            Ok(Seen { authorization: Some(format!("Basic {}", base64(b"me:"))), ..with_token("") }),
        ),
        (
            "a file with a token, with which a helper is not run",
            |at| {
                let mut user = exec("./missing");
                user["tokenFile"] = "token".into();
                at.config(&json!({}), &user).file("token", "from-file\n")
            },
            Ok(with_token("from-file")),
        ),
        (
            "a helper that is not there",
            |at| at.config(&json!({}), &exec("cloud-login")),
            Err(
                "the credential helper \"cloud-login\" of the kubeconfig cannot be run: No such file or directory (os error 2)\n\nAsk Ada for it.",
            ),
        ),
        (
            "a helper that fails",
            |at| {
                at.config(&json!({}), &exec("./helper"))
                    .file("helper", "#!/bin/sh\necho log in first >&2\nexit 3\n")
            },
            Err("failed (exit status: 3): log in first"),
        ),
        (
            "a proxy",
            |at| {
                let mut cluster = at.elsewhere();
                cluster["proxy-url"] = format!("http://me:pass%40word@127.0.0.1:{}", at.tunnel).into();
                at.config(&cluster, &json!({ "token": "secret" })).variable("NO_PROXY", "0.0.0.0")
            },
            Ok(through("tunnel")),
        ),
        (
            "a proxy with TLS",
            |at| {
                let mut cluster = at.elsewhere();
                cluster["proxy-url"] =
                    format!("https://me:pass%40word@127.0.0.1:{}", at.encrypted_tunnel).into();
                at.config(&cluster, &json!({ "token": "secret" }))
            },
            Ok(through("tunnel")),
        ),
        (
            "a SOCKS proxy",
            |at| {
                let cluster = json!({ "server": format!("https://api.test:{}", at.https), "proxy-url": format!("socks5://127.0.0.1:{}", at.socks) });
                at.config(&cluster, &json!({ "token": "secret" }))
            },
            Ok(through("socks")),
        ),
        (
            "a proxy of no known kind",
            |at| at.config(&json!({ "proxy-url": "ftp://127.0.0.1:1" }), &json!({ "token": "secret" })),
            Err("\"ftp://127.0.0.1:1\" is not a URL of a proxy"),
        ),
        (
            "HTTPS_PROXY",
            |at| {
                let proxy = format!("http://me:pass%40word@127.0.0.1:{}", at.tunnel);
                at.config(&at.elsewhere(), &json!({ "token": "secret" }))
                    .variable("HTTPS_PROXY", proxy)
                    .variable("NO_PROXY", "10.0.0.0/8,127.0.0.1")
            },
            Ok(through("tunnel")),
        ),
        (
            "HTTPS_PROXY, and NO_PROXY for the server",
            |at| {
                at.config(&at.elsewhere(), &json!({ "token": "secret" }))
                    .variable("HTTPS_PROXY", "http://127.0.0.1:1")
                    .variable("NO_PROXY", "0.0.0.0/8,")
            },
            Ok(with_token("secret")),
        ),
        (
            "HTTPS_PROXY, and a server on this machine",
            |at| {
                at.config(&json!({}), &json!({ "token": "secret" }))
                    .variable("HTTPS_PROXY", "http://127.0.0.1:1")
            },
            Ok(with_token("secret")),
        ),
        (
            "HTTP_PROXY, which is for servers without TLS",
            |at| {
                at.config(&at.elsewhere(), &json!({ "token": "secret" }))
                    .variable("HTTP_PROXY", "http://127.0.0.1:1")
            },
            Ok(with_token("secret")),
        ),
        (
            "KUBECONFIG with a file that is not there",
            |at| {
                let files = format!("{0}/missing:{0}/config", at.dir.display());
                at.config(&json!({}), &json!({ "token": "secret" })).variable("KUBECONFIG", files)
            },
            Ok(with_token("secret")),
        ),
        (
            "KUBECONFIG with two files",
            |at| {
                let files = format!("{0}/first:{0}/config", at.dir.display());
                let first = json!({ "users": [{ "name": "user", "user": { "token": "first" } }] });
                at.config(&json!({}), &json!({ "token": "secret" }))
                    .file("first", first.to_string())
                    .variable("KUBECONFIG", files)
            },
            Ok(with_token("first")),
        ),
        (
            "KUBECONFIG with a broken file",
            |at| {
                let files = format!("{0}/config:{0}/broken", at.dir.display());
                at.config(&json!({}), &json!({ "token": "secret" }))
                    .file("broken", "contexts: [")
                    .variable("KUBECONFIG", files)
            },
            Err("/broken: failed to parse kubeconfig YAML"),
        ),
        (
            "--kubeconfig that is not there",
            |at| {
                let missing = at.dir.join("missing").display().to_string();
                at.config(&json!({}), &json!({ "token": "secret" })).option("kubeconfig", missing)
            },
            Err("/missing: No such file or directory"),
        ),
        (
            "a context that is not there",
            |at| at.config(&json!({}), &json!({ "token": "secret" })).option("context", "there"),
            Err("the kubeconfig has no context \"there\""),
        ),
        (
            "--token and --as, --as-group, --as-uid",
            |at| {
                let user = json!({ "token": "secret", "as": "bob", "as-groups": ["b"] });
                let setup = at.config(&json!({}), &user).option("token", "other").option("as", "ada");
                setup.option("as-uid", "7").option("as-group", "a").option("as-group", "c")
            },
            Ok(Seen {
                impersonated: ["group=a", "group=c", "uid=7", "user=ada"]
                    .map(|header| format!("impersonate-{header}"))
                    .into(),
                ..with_token("other")
            }),
        ),
        (
            "--client-certificate and --client-key, which replace those of the user",
            |at| {
                let user = json!({ "client-certificate": "/none", "client-key": "/none" });
                at.config(&json!({}), &user)
                    .option("client-certificate", format!("{PKI}/client.pem"))
                    .option("client-key", format!("{PKI}/client.key"))
            },
            Ok(Seen { authorization: None, has_certificate: true, ..with_token("") }),
        ),
        (
            "--client-certificate, and the data of another one in the kubeconfig",
            |at| {
                let user = json!({ "client-certificate-data": base64(b"none") });
                at.config(&json!({}), &user).option("client-certificate", format!("{PKI}/client.pem"))
            },
            Err("client-certificate and client-certificate-data are both given"),
        ),
        (
            "--token, and a helper of the kubeconfig",
            |at| at.config(&json!({}), &exec("./missing")).option("token", "other"),
            Ok(with_token("other")),
        ),
        (
            "--token, and a context without a user",
            |at| {
                let file = at.dir.join("config").display().to_string();
                let mut setup = at.config(&json!({}), &json!({}));
                setup.files[0].1 = setup.files[0].1.replace(",\"user\":\"user\"", "");
                setup.option("kubeconfig", file).option("token", "other")
            },
            Ok(with_token("other")),
        ),
        (
            "--server and --certificate-authority, which replace those of the cluster",
            |at| {
                let cluster = json!({
                    "server": "https://127.0.0.1:1", "certificate-authority-data": data("other.pem"),
                    "tls-server-name": "other.test",
                });
                at.config(&cluster, &json!({ "token": "secret" }))
                    .option("server", format!("https://127.0.0.1:{}", at.https))
                    .option("certificate-authority", format!("{PKI}/ca.pem"))
            },
            Ok(with_token("secret")),
        ),
        (
            "--server, --token and no kubeconfig",
            |at| {
                Setup::default()
                    .option("server", format!("https://127.0.0.1:{}", at.https))
                    .option("insecure-skip-tls-verify", "true")
                    .option("token", "other")
            },
            Ok(with_token("other")),
        ),
        (
            "--token for a server without TLS, which does not get it",
            |at| Setup::default().option("server", format!("127.0.0.1:{}", at.http)).option("token", "other"),
            Ok(Seen { authorization: None, ..with_token("") }),
        ),
        (
            "--insecure-skip-tls-verify, and another authority of the kubeconfig",
            |at| {
                let cluster = json!({ "certificate-authority-data": data("other.pem") });
                at.config(&cluster, &json!({ "token": "secret" })).option("insecure-skip-tls-verify", "true")
            },
            Ok(with_token("secret")),
        ),
        (
            "--tls-server-name",
            |at| {
                let cluster = json!({ "tls-server-name": "other.test" });
                at.config(&cluster, &json!({ "token": "secret" })).option("tls-server-name", "api.test")
            },
            Ok(with_token("secret")),
        ),
        (
            "--cluster and --user, without a context",
            |at| {
                let mut setup = at.config(&json!({}), &json!({ "token": "secret" }));
                setup.files[0].1 = setup.files[0].1.replace("\"current-context\":\"here\",", "");
                setup.option("cluster", "cluster").option("user", "user")
            },
            Ok(with_token("secret")),
        ),
        (
            "--cluster that is not there",
            |at| at.config(&json!({}), &json!({ "token": "secret" })).option("cluster", "there"),
            Err("the kubeconfig has no cluster \"there\""),
        ),
        (
            "--user that is not there",
            |at| at.config(&json!({}), &json!({ "token": "secret" })).option("user", "there"),
            Err("the kubeconfig has no user \"there\""),
        ),
        (
            "a server that does not answer",
            |at| at.config(&json!({ "server": "https://127.0.0.1:1/k8s" }), &json!({ "token": "secret" })),
            Err("the API server https://127.0.0.1:1: client error (Connect)"),
        ),
        (
            "no kubeconfig",
            |_| Setup::default(),
            Err("cannot find the Kubernetes API: no current context in "),
        ),
    ]
}

/// Compares the client's outcome for each kubeconfig with the table, and with kubectl if a program is given.
async fn compare(kubectl: Option<&Path>) {
    let mut wrong = Vec::new();
    for (name, setup, expected) in rows() {
        let dir = tempfile::tempdir().unwrap();
        let at = Place::new(dir.path()).await;
        let mut setup = setup(&at);
        if !setup.variables.iter().any(|(name, _)| *name == "KUBECONFIG") {
            setup = setup.variable("KUBECONFIG", dir.path().join("config").to_str().unwrap());
        }
        for (file, text) in &setup.files {
            let file = dir.path().join(file);
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
        }
        let ours = at.ours(&setup).await;
        let is_right = match (&ours, &expected) {
            (Ok(seen), Ok(expected)) => seen == expected,
            (Err(error), Err(expected)) => error.contains(expected),
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{name}: {ours:?} instead of {expected:?}"));
        }
        let Some(program) = kubectl else { continue };
        let kubectl = at.kubectl(program, &setup).await;
        let is_same = match (&ours, &kubectl) {
            (Ok(ours), Ok(kubectl)) => ours == kubectl,
            (Err(_), Err(_)) => true,
            _ => false,
        };
        if !is_same {
            wrong.push(format!("{name}: {ours:?}, and kubectl: {kubectl:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn each_kubeconfig_leads_where_the_table_says() {
    compare(None).await;
}

#[tokio::test]
#[ignore = "needs kubectl, as the level api has it: cargo xtask test --level api -- kubeconfig"]
async fn each_kubeconfig_leads_where_kubectl_goes() {
    let kubectl = env::var_os("MIRROR_KUBECTL").expect("`cargo xtask test --level api` sets MIRROR_KUBECTL");
    compare(Some(kubectl.as_ref())).await;
}
