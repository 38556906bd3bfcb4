//! Sends HTTP requests from a node to the agent, and reads the answers.

use std::{
    collections::BTreeMap,
    env,
    io::{Read, Seek as _, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
};

use crate::{Lab, SOON, check, eventually, scaled};

/// The agent's default address.
pub const LISTEN: &str = "127.0.0.1:10706";

/// An answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Status line and header lines, unparsed.
    pub head: String,
    /// Body.
    pub body: String,
}

impl Answer {
    /// Sends a request, and reads the answer to the end of the connection. An error if there is no answer.
    pub fn to(request: &str, mut connection: TcpStream) -> Result<Self, String> {
        let mut text = String::new();
        connection
            .write_all(request.as_bytes())
            .and_then(|()| connection.read_to_string(&mut text))
            .map_err(|error| format!("{request:?}: {error}"))?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| format!("no head in {text:?}"))?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| format!("no status in {head:?}"))?;
        Ok(Self { status, head: head.to_owned(), body: body.to_owned() })
    }
}

/// Checks that Prometheus' linter has no remark on the text of a scrape.
#[track_caller]
pub fn lint_metrics(scrape: &str) {
    let program = env::var_os("MIRROR_PROMTOOL").expect("cargo xtask sets MIRROR_PROMTOOL");
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(scrape.as_bytes()).and_then(|()| file.rewind()).unwrap();
    let linted = Command::new(program).args(["check", "metrics"]).stdin(file).output().unwrap();
    let [remarks, errors] =
        [linted.stdout, linted.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(linted.status.success() && remarks.is_empty() && errors.is_empty(), "{remarks}{errors}");
}

/// The values of a scrape, by name and labels as in the text.
pub type Metrics = BTreeMap<String, f64>;

impl Lab {
    /// Connects to the agent. An error if no process listens there.
    pub fn connect(&self) -> Result<TcpStream, String> {
        let address: SocketAddr = LISTEN.parse().unwrap();
        let stream = self
            .node()
            .enter(|| TcpStream::connect_timeout(&address, scaled(SOON)))
            .map_err(|error| format!("cannot connect to {address}: {error}"))?;
        stream.set_read_timeout(Some(scaled(SOON))).unwrap();
        Ok(stream)
    }

    /// Sends a request and returns its answer. An error if no process listens there.
    pub fn request(&self, method: &str, path: &str) -> Result<Answer, String> {
        Answer::to(&format!("{method} {path} HTTP/1.1\r\nHost: agent\r\n\r\n"), self.connect()?)
    }

    /// Sends `GET` and returns the answer. Panics without an answer.
    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits until `GET` is answered with this status, and returns the body.
    #[track_caller]
    pub fn wait_get(&self, path: &str, status: u16) -> String {
        eventually(SOON, || {
            let answer = self.request("GET", path)?;
            check(answer.status == status, || format!("{path} is not {status}: {answer:?}"))?;
            Ok(answer.body)
        })
    }

    /// Scrapes the metrics. Every metric must have a help text, and no series may occur twice.
    #[track_caller]
    pub fn metrics(&self) -> Metrics {
        self.try_metrics().unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Lab::metrics`]. An error if no process listens there.
    fn try_metrics(&self) -> Result<Metrics, String> {
        let answer = self.request("GET", "/metrics")?;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.head.contains("text/plain; version=0.0.4"), "{answer:?}");
        let mut metrics = Metrics::new();
        for line in answer.body.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
            let name = series.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let is_told = |name: &str| answer.body.contains(&format!("# HELP {name} "));
            assert!(is_told(name) || base.is_some_and(is_told), "no HELP for {line}");
            let before = metrics.insert(series.to_owned(), value.parse().unwrap());
            assert_eq!(before, None, "twice: {line}");
        }
        Ok(metrics)
    }

    /// Waits until `condition` accepts the metrics, and returns the metrics.
    #[track_caller]
    pub fn wait_metrics(&self, condition: impl Fn(&Metrics) -> bool) -> Metrics {
        eventually(SOON, || {
            let metrics = self.try_metrics()?;
            check(condition(&metrics), || format!("{metrics:#?}"))?;
            Ok(metrics)
        })
    }
}
