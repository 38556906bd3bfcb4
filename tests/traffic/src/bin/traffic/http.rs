//! A small HTTP server for wrk.
//!
//! It answers each request with the same kilobyte and keeps connections open, with one thread per connection, so that
//! nothing in it depends on a mirror.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    thread,
};

use mirror_tests::Netns;

/// The server's port.
pub(crate) const PORT: u16 = 8080;
/// Bytes of an answer's body.
const BODY: usize = 1024;

/// Serves in a network namespace until the process ends, on the caller's CPU.
pub(crate) fn serve(netns: &Netns) {
    let listener = netns.enter(|| TcpListener::bind(("0.0.0.0", PORT))).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            thread::spawn(move || answer(connection));
        }
    });
}

/// Answers the requests of a connection, which have no body, until the client closes it.
fn answer(mut connection: TcpStream) {
    let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n").into_bytes();
    answer.resize(answer.len() + BODY, b'.');
    let Ok(reading) = connection.try_clone() else { return };
    let mut lines = BufReader::new(reading).lines();
    while let Some(Ok(line)) = lines.next() {
        // A request ends with an empty line.
        if line.is_empty() && connection.write_all(&answer).is_err() {
            return;
        }
    }
}
