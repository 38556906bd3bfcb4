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
/// The table of kubeconfigs.
const ROWS: &str = include_str!("kubeconfigs.yaml");
/// The keys of a row.
const KEYS: [&str; 11] =
    ["name", "cluster", "user", "exec", "helper", "config", "files", "env", "options", "seen", "error"];

/// A request as received by the server.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Seen {
    path: String,
    authorization: Option<String>,
    impersonated: Vec<String>,
    has_certificate: bool,
    through: Option<String>,
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
    files: Vec<(String, String)>,
    variables: Vec<(String, String)>,
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

    /// A value of the table, with the ports, directories and files in its texts.
    fn filled(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => {
                let mut parts = text.split("${");
                let mut filled = parts.next().unwrap().to_owned();
                for (word, rest) in parts.map(|part| part.split_once('}').unwrap()) {
                    filled += &self.word(word);
                    filled += rest;
                }
                filled.into()
            }
            Value::Array(items) => items.iter().map(|item| self.filled(item)).collect(),
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| (name.clone(), self.filled(value))).collect()
            }
            other => other.clone(),
        }
    }

    fn word(&self, word: &str) -> String {
        match word.split_once(' ') {
            Some(("base64", file)) => return data(file),
            Some(("pem", file)) => return fs::read_to_string(format!("{PKI}/{file}")).unwrap(),
            _ => {}
        }
        let port = match word {
            "dir" => return self.dir.display().to_string(),
            "pki" => return PKI.to_owned(),
            "https" => self.https,
            "own" => self.own,
            "http" => self.http,
            "tunnel" => self.tunnel,
            "encrypted_tunnel" => self.encrypted_tunnel,
            "socks" => self.socks,
            _ => unreachable!("{word}"),
        };
        port.to_string()
    }

    /// The kubeconfig of a row.
    fn config(&self, row: &Value) -> Value {
        let server = format!("https://127.0.0.1:{}", self.https);
        let cluster = json!({ "server": server, "certificate-authority-data": data("ca.pem") });
        let user = match &row["exec"] {
            Value::String(command) => exec(command),
            _ if row["user"].is_object() => json!({}),
            _ => json!({ "token": "secret" }),
        };
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{ "name": "cluster", "cluster": merged(cluster, &row["cluster"]) }],
            "users": [{ "name": "user", "user": merged(user, &row["user"]) }],
            "contexts": [{ "name": "here", "context": { "cluster": "cluster", "user": "user" } }],
        });
        merged(config, &row["config"])
    }

    fn setup(&self, row: &Value) -> Setup {
        let texts = |key: &str| -> Vec<_> {
            let fields = row[key].as_object().into_iter().flatten();
            fields.map(|(name, text)| (name.clone(), text.as_str().unwrap().to_owned())).collect()
        };
        let mut setup = Setup { files: texts("files"), variables: texts("env"), ..Setup::default() };
        if row["config"] != "none" {
            setup.files.push(("config".to_owned(), self.config(row).to_string()));
        }
        if row["helper"].is_object() {
            setup.files.push(("helper".to_owned(), helper(&row["helper"])));
        }
        if row["env"]["KUBECONFIG"].is_null() {
            let config = self.dir.join("config").display().to_string();
            setup.variables.push(("KUBECONFIG".to_owned(), config));
        }
        for option in row["options"].as_array().into_iter().flatten() {
            let (name, value) = option.as_str().unwrap().split_once('=').unwrap();
            setup.option(name, value.to_owned());
        }
        setup
    }
}

/// Fields over those of an object. Null removes a field.
fn merged(mut object: Value, over: &Value) -> Value {
    for (field, value) in over.as_object().into_iter().flatten() {
        object[field] = value.clone();
    }
    object.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    object
}

impl Setup {
    /// An option of the command line.
    fn option(&mut self, name: &str, value: String) {
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
        seen.through = log.1.map(str::to_owned);
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
        let variables = setup.variables.iter().cloned().collect();
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
        kubectl.envs(setup.variables.iter().cloned());
        kubectl.args(["version", "--request-timeout", "10s"]).args(&setup.arguments);
        let output = kubectl.stdin(Stdio::null()).output().await.unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        self.outcome((!output.status.success()).then_some(error))
    }
}

async fn version(client: Client) -> kube::Result<String> {
    client.request_text(http::Request::get("/version").body(Vec::new()).unwrap()).await
}

/// A credential helper that prints this status.
fn helper(status: &Value) -> String {
    let credential = json!({ "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status });
    format!("#!/bin/sh\nprintf %s '{credential}'\n")
}

fn exec(command: &str) -> Value {
    let version = "client.authentication.k8s.io/v1";
    json!({ "exec": { "apiVersion": version, "command": command, "interactiveMode": "Never", "installHint": "Ask Ada for it." } })
}

/// The outcome that the table expects.
fn expected(row: &Value) -> Result<Seen, &str> {
    if let Some(error) = row["error"].as_str() {
        return Err(error);
    }
    let seen = &row["seen"];
    assert!(seen.is_object(), "{row}");
    let text = |key: &str| seen[key].as_str().map(str::to_owned);
    let impersonated = seen["impersonated"].as_array().into_iter().flatten().filter_map(Value::as_str);
    Ok(Seen {
        path: text("path").unwrap_or_else(|| "/version".to_owned()),
        authorization: text("token").map(|token| format!("Bearer {token}")).or_else(|| text("authorization")),
        impersonated: impersonated.map(|header| format!("impersonate-{header}")).collect(),
        has_certificate: seen["certificate"] == true,
        through: text("through"),
    })
}

/// Compares the client's outcome for each kubeconfig with the table, and with kubectl if a program is given.
async fn compare(kubectl: Option<&Path>) {
    let mut wrong = Vec::new();
    let rows: Vec<Value> = serde_saphyr::from_str(ROWS).unwrap();
    for row in &rows {
        let dir = tempfile::tempdir().unwrap();
        let at = Place::new(dir.path()).await;
        let row = at.filled(row);
        assert!(row.as_object().unwrap().keys().all(|key| KEYS.contains(&key.as_str())), "{row}");
        let (name, setup, expected) = (row["name"].as_str().unwrap(), at.setup(&row), expected(&row));
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
