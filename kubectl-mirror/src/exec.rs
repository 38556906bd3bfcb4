//! Runs a command in a container of an agent's pod, by the API server's exec.
//!
//! This module does not interpret the output of the command. The commands run here print and change nothing.

use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Status};
use kube::api::AttachParams;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    time::timeout,
};

use crate::cluster::Cluster;

pub(crate) const AGENT: &str = "agent";
/// The program in it.
const PROGRAM: &str = "/mirror-agent";
/// Timeout of a command.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum size of a command's output in bytes. The status of a node with 4096 taps has some 20 MiB.
const MOST: u64 = 32 << 20;
/// Bytes that wait between the connection and the reader.
const BUFFER: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) code: u8,
}

impl Ended {
    /// The reason of its failure: its standard error, or else its exit code.
    pub(crate) fn why(&self) -> String {
        match String::from_utf8_lossy(&self.stderr).trim() {
            "" => format!("it exited with {}, without an error message", self.code),
            told => told.to_owned(),
        }
    }
}

/// The right that a command needs, for a sentence.
pub(crate) fn right(agents: &str) -> String {
    format!("`list` on pods, and `get` and `create` on pods/exec, in namespace {agents}")
}

/// Runs `mirror-agent` with these arguments in the pod of an agent, until it ends.
///
/// # Errors
///
/// It could not be run, or did not end in time.
pub(crate) async fn run(cluster: &Cluster, agent: &str, words: &[&str]) -> anyhow::Result<Ended> {
    let params = AttachParams {
        container: Some(AGENT.to_owned()),
        max_stdout_buf_size: Some(BUFFER),
        max_stderr_buf_size: Some(BUFFER),
        ..AttachParams::default()
    };
    let ended = async {
        let process = cluster.of_agents::<Pod>().exec(agent, [&[PROGRAM], words].concat(), &params).await;
        let mut process = process.with_context(|| format!("cannot run a command in the {AGENT} {agent}"))?;
        let (stdout, stderr) = (process.stdout(), process.stderr());
        let status = process.take_status().context("the command has no status")?;
        // The status arrives before the ends of the streams. If the connection breaks, none of them arrives, but the
        // sender of the status is dropped.
        let status = async { status.await.context("the connection ended before the command") };
        let (stdout, stderr, status) = tokio::try_join!(read(stdout), read(stderr), status)?;
        Ok(Ended { stdout, stderr, code: exit_code(&status)? })
    };
    timeout(PATIENCE, ended).await.unwrap_or_else(|_| bail!("no answer within {} s", PATIENCE.as_secs()))
}

async fn read(stream: Option<impl AsyncRead + Unpin>) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(MOST + 1).read_to_end(&mut bytes).await.context("the connection")?;
    }
    if bytes.len() as u64 > MOST {
        bail!("its output exceeds {} MiB", MOST >> 20);
    }
    Ok(bytes)
}

/// Returns the exit code in the status of a command.
///
/// # Errors
///
/// The command could not be run; the error contains the reason.
fn exit_code(status: &Status) -> anyhow::Result<u8> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let mut codes = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = codes.next().and_then(|cause| cause.message.as_ref()?.parse().ok());
    code.with_context(|| {
        status.message.clone().unwrap_or("the command failed without an error message".into())
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{Value, from_value, json};

    use super::*;

    fn code(status: Value) -> anyhow::Result<u8> {
        exit_code(&from_value(status).unwrap())
    }

    #[test]
    fn a_status_tells_the_exit_code_or_why_there_is_none() {
        assert_eq!(code(json!({ "status": "Success" })).unwrap(), 0);
        let failed = json!({
            "status": "Failure", "reason": "NonZeroExitCode",
            "message": "command terminated with non-zero exit code",
            "details": { "causes": [{ "reason": "ExitCode", "message": "2" }] },
        });
        assert_eq!(code(failed).unwrap(), 2);
        let missing = json!({ "status": "Failure", "message": "container not found (\"agent\")" });
        assert_eq!(code(missing).unwrap_err().to_string(), "container not found (\"agent\")");
        code(json!({ "status": "Failure" })).unwrap_err();
    }

    #[tokio::test]
    async fn what_is_too_long_is_refused() {
        let most = usize::try_from(MOST).unwrap();
        assert_eq!(read(Some(&vec![b'x'; most][..])).await.unwrap().len(), most);
        let error = read(Some(&vec![b'x'; most + 1][..])).await.unwrap_err();
        assert_eq!(error.to_string(), "its output exceeds 32 MiB");
    }

    #[test]
    fn a_command_that_tells_nothing_has_its_exit_code() {
        let why = |stderr: &str| Ended { stdout: Vec::new(), stderr: stderr.into(), code: 137 }.why();
        assert_eq!(why("mirror-agent: no memory\n"), "mirror-agent: no memory");
        assert_eq!(why(" \n"), "it exited with 137, without an error message");
    }
}
