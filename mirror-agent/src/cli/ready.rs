//! `mirror-agent ready`: asks `/readyz` of a running agent or controller. The chart's `helm test` runs it, because the
//! image contains no other program.

use std::{io, net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::print;

/// Timeout for the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of an answer in bytes.
const ANSWER: u64 = 4096;

/// Prints the answer. An error unless the other process is ready.
pub(super) async fn ready(listen: SocketAddr) -> anyhow::Result<()> {
    let answer = timeout(PATIENCE, ask(listen)).await.unwrap_or_else(|elapsed| Err(elapsed.into()));
    let answer = answer.with_context(|| format!("no answer from {listen}"))?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.split(' ').nth(1) == Some("200") => print(body),
        Some((_, body)) => bail!("not ready: {}", body.trim_end()),
        None => bail!("no agent and no controller is at {listen}"),
    }
}

async fn ask(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await?;
    let mut answer = String::new();
    stream.take(ANSWER).read_to_string(&mut answer).await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use tokio::net::TcpListener;

    use super::*;

    /// The outcome if the other process gives this answer.
    async fn outcome(answer: &[u8]) -> Result<(), String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listen = listener.local_addr().unwrap();
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 24];
            stream.read_exact(&mut request).await.unwrap();
            assert_eq!(&request, b"GET /readyz HTTP/1.0\r\n\r\n");
            stream.write_all(answer).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(ready(listen), served);
        outcome.map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn it_succeeds_only_if_the_other_process_is_ready() {
        assert_eq!(outcome(b"HTTP/1.0 200 OK\r\n\r\nok\n").await, Ok(()));
        let unready = outcome(b"HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nno list of pods yet\n").await;
        assert_eq!(unready, Err("not ready: no list of pods yet".into()));
        assert!(
            outcome(b"SSH-2.0-x\r\n").await.unwrap_err().starts_with("no agent and no controller is at ")
        );
        let nobody = ready("127.0.0.1:1".parse().unwrap()).await;
        assert!(nobody.unwrap_err().to_string().starts_with("no answer from 127.0.0.1:1"));
    }
}
