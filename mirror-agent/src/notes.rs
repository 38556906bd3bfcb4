//! [`Notes`]: what the running agent knows and no map has, for `mirror-agent status`: what is not mirrored, and why.
//!
//! Told over the socket by which agents know of each other, to root alone, as JSON that ends with the connection.
//! Nothing can be asked or changed. Served by `cmd::run` and `cmd::attach`, read by `cmd::status`.

use std::{
    io::Read as _,
    os::unix::net::{UnixListener, UnixStream},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt as _, time::timeout};

use crate::report::{Report, Reports};

/// How long to wait for the other side.
const PATIENCE: Duration = Duration::from_secs(2);

/// What there is to know of the last round of the loop.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// What is chosen but not mirrored.
    pub not_mirrored: Vec<NotMirrored>,
    /// Annotations that are ignored.
    pub bad_annotations: Vec<BadAnnotation>,
    /// What failed and will be tried again.
    pub failures: Vec<String>,
}

/// A pod, a NIC or an interface that is chosen but not mirrored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotMirrored {
    /// Namespace and name; `None`: an interface that was named by itself.
    pub pod: Option<String>,
    /// The NIC, where the reason is about one; or the interface.
    pub nic: Option<String>,
    /// The mirror, where the reason is about one that has a name.
    pub mirror: Option<String>,
    /// The reason in one word.
    pub reason: String,
    /// The reason.
    pub message: String,
}

/// An annotation whose value is none that is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadAnnotation {
    /// Namespace and name of the pod that it is for.
    pub pod: String,
    /// What is wrong.
    pub message: String,
}

impl From<&Report> for Notes {
    fn from(report: &Report) -> Self {
        let not_mirrored = report.skipped.iter().map(|skipped| NotMirrored {
            pod: skipped.pod.as_ref().map(ToString::to_string),
            nic: skipped.nic.clone(),
            mirror: skipped.mirror.as_ref().map(ToString::to_string),
            reason: skipped.why.name().to_owned(),
            message: skipped.why.to_string(),
        });
        let bad = report.bad.iter();
        let bad = bad.map(|bad| BadAnnotation { pod: bad.pod.to_string(), message: bad.to_string() });
        Self {
            not_mirrored: not_mirrored.collect(),
            bad_annotations: bad.collect(),
            failures: report.failures.iter().cloned().collect(),
        }
    }
}

/// Tells whoever connects, for ever. Must be called within the runtime.
pub fn serve(listener: UnixListener, reports: Reports) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    tokio::spawn(async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else {
                // Out of descriptors, for example: others need them more.
                tokio::time::sleep(PATIENCE).await;
                continue;
            };
            // An abstract socket has no owner: whoever is in the node's network namespace can connect.
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == 0) {
                let notes = serde_json::to_vec(&Notes::from(&**reports.borrow())).unwrap_or_default();
                tokio::spawn(async move {
                    // Whoever has gone, or does not read, wanted nothing.
                    let _ = timeout(PATIENCE, stream.write_all(&notes)).await;
                });
            }
        }
    });
    Ok(())
}

/// What the agent at the other end tells; `None`: nothing in time, as an agent of an older version, or a `cleanup`.
pub fn read(mut agent: UnixStream) -> Option<Notes> {
    agent.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut text = Vec::new();
    agent.read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use std::sync::Arc;

    use tokio::sync::watch;

    use super::*;
    use crate::{
        model::PodId,
        select::{Skipped, Why},
    };

    #[tokio::test]
    async fn what_the_agent_knows_is_read_as_it_was_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let pod = PodId { uid: "1".into(), namespace: "shop".into(), name: "web".into() };
        let skipped =
            Skipped { pod: Some(pod), nic: None, mirror: None, why: Why::HostNetwork { is_asked: true } };
        let report =
            Report { skipped: [skipped].into(), failures: ["no".to_owned()].into(), ..Report::default() };
        let (_sender, reports) = watch::channel(Arc::new(report));
        serve(UnixListener::bind(&path).unwrap(), reports).unwrap();
        let expected = Notes {
            not_mirrored: vec![NotMirrored {
                pod: Some("shop/web".into()),
                nic: None,
                mirror: None,
                reason: "HostNetwork".into(),
                message: Why::HostNetwork { is_asked: true }.to_string(),
            }],
            bad_annotations: Vec::new(),
            failures: vec!["no".into()],
        };
        for _ in 0..2 {
            let stream = UnixStream::connect(&path).unwrap();
            // Tests run as root, as the agent does.
            assert_eq!(tokio::task::spawn_blocking(|| read(stream)).await.unwrap(), Some(expected.clone()));
        }
    }
}
