//! The API server without TLS and authentication, for benches: one kubectl process per request would take longer than
//! what is measured.

use std::{
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream},
    process::{Child, Stdio},
};

use crate::{Answer, Api};

/// `kubectl proxy`, stopped on drop.
#[derive(Debug)]
pub struct Proxy {
    process: Child,
    address: SocketAddr,
}

impl Proxy {
    /// Starts a proxy for the API server of a story.
    pub fn start(api: &Api) -> Self {
        let mut process = api.command("proxy --port=0").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        // "Starting to serve on 127.0.0.1:40123"
        let address = line.trim().rsplit(' ').next().unwrap().parse().unwrap();
        Self { process, address }
    }

    /// Sends a request, which must succeed.
    pub fn ask(&self, method: &str, path: &str, kind: &str, body: &str) -> String {
        let length = body.len();
        let kind = format!("Content-Type: {kind}\r\nContent-Length: {length}");
        let head = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\n{kind}");
        let connection = TcpStream::connect(self.address).unwrap();
        let answer = Answer::to(&format!("{head}\r\n\r\n{body}"), connection).unwrap();
        assert!(matches!(answer.status, 200 | 201), "{method} {path}: {answer:?}");
        answer.body
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Both fail only if the proxy has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
