//! [`Notes`] over the agent's socket: the agent's state that is in no map, for `mirror-agent status`.
//!
//! Only root can read them (`kernel::dataplane::lock` has the socket). The format is JSON, up to the end of the
//! connection. A client cannot send a request or change anything. Served by `cli::run` and `cli::attach`, read by
//! `report::status`.

use std::{
    fmt::Display,
    io::{ErrorKind, Read as _},
    os::unix::net::{UnixListener, UnixStream},
    time::{Duration, Instant},
};

use mirror_core::status::{DirectionCoverage, Finding, KnownPod, NicCoverage, Notes};
use tokio::{io::AsyncWriteExt as _, sync::watch, time::timeout};

use crate::{
    model::PodId,
    report::{Judged, Report, Reports},
    select::{BadAnnotation, Skipped, Why},
    util::accept,
};

/// Timeout for the other side.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of bytes read: many times the size of the notes on the fullest node.
const MOST_BYTES: usize = 16 << 20;

impl From<&Report> for Notes {
    fn from(report: &Report) -> Self {
        let finding = |reason: &str, message: &dyn Display, remedy: &str| Finding {
            reason: reason.to_owned(),
            message: message.to_string(),
            remedy: remedy.to_owned(),
            ..Finding::default()
        };
        let not_mirrored = report.skipped.iter().map(|Skipped { pod, nic, mirror, why }| Finding {
            pod: pod.as_ref().map(ToString::to_string),
            nic: nic.clone(),
            mirror: mirror.as_ref().map(ToString::to_string),
            ..finding(why.name(), why, why.remedy())
        });
        let known = |(pod, why): (&PodId, &Option<Why>)| KnownPod {
            pod: pod.to_string(),
            not_asked: why.as_ref().map(|why| finding(why.name(), why, &why.remedy_unasked(pod))),
        };
        let pods = report.pods.as_ref().map(|pods| pods.iter().map(known).collect());
        let bad = report.bad.iter().map(|bad| Finding {
            pod: Some(bad.pod.to_string()),
            ..finding(BadAnnotation::REASON, bad, BadAnnotation::REMEDY)
        });
        let unreached = report.unreached.iter().map(|(target, why)| Finding {
            target: Some(target.to_string()),
            ..finding("TargetDown", why, "")
        });
        let coverage = report.coverage.values().map(|of| {
            let [ingress, egress] = of.directions.each_ref().map(DirectionCoverage::from);
            let (pod, nic, device) = (of.pod.to_string(), of.nic.clone(), of.device.clone());
            let why_inside = of.inside.map(|reason| reason.to_string());
            NicCoverage { pod, nic, device, why_inside, ingress, egress }
        });
        Self {
            unreached_targets: unreached.collect(),
            not_mirrored: not_mirrored.collect(),
            bad_annotations: bad.collect(),
            failures: report.failures.iter().cloned().collect(),
            pods,
            coverage: coverage.collect(),
        }
    }
}

impl From<&Judged> for DirectionCoverage {
    fn from(judged: &Judged) -> Self {
        let Judged { state, since, seen, carried } = judged;
        Self {
            state: state.name().to_owned(),
            message: state.to_string(),
            seconds: since.elapsed().as_secs(),
            seen: *seen,
            carried: *carried,
        }
    }
}

/// Spawns the server, which runs forever: it writes the notes, from the newest report and the other problems, to each
/// client that connects. Must be called within the runtime.
pub fn serve(
    listener: UnixListener,
    reports: Reports,
    trouble: watch::Receiver<Option<String>>,
) -> anyhow::Result<()> {
    tokio::spawn(accept::of_root(listener, move |mut stream| {
        let mut notes = Notes::from(&**reports.borrow());
        notes.failures.extend(trouble.borrow().clone());
        async move {
            let notes = serde_json::to_vec(&notes).unwrap_or_default();
            // A client that has disconnected or does not read gets no notes.
            let _ = timeout(PATIENCE, stream.write_all(&notes)).await;
        }
    })?);
    Ok(())
}

/// Reads the notes of the agent; `None`: no valid notes arrived in time and within [`MOST_BYTES`], for example from a
/// `cleanup`.
pub fn read(agent: UnixStream) -> Option<Notes> {
    read_within(agent, PATIENCE, MOST_BYTES)
}

/// Both bounds apply to the whole answer: a sender of single bytes with pauses is too slow as well.
fn read_within(mut agent: UnixStream, patience: Duration, most_bytes: usize) -> Option<Notes> {
    let end = Instant::now() + patience;
    let mut text = Vec::new();
    let mut part = vec![0; 64 << 10];
    loop {
        let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        agent.set_read_timeout(Some(left)).ok()?;
        match agent.read(&mut part) {
            Ok(0) => return serde_json::from_slice(&text).ok(),
            Ok(length) if text.len() + length <= most_bytes => text.extend_from_slice(part.get(..length)?),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use std::{io::Write as _, sync::Arc};

    use super::*;

    #[test]
    fn what_is_read_is_bounded_in_time_and_length() {
        let [patience, long] = [Duration::from_millis(200), Duration::from_secs(60)];
        let read_from = |patience, most_bytes, write: fn(UnixStream)| {
            let (agent, reader) = UnixStream::pair().unwrap();
            let writer = std::thread::spawn(move || write(agent));
            let began = Instant::now();
            let notes = read_within(reader, patience, most_bytes);
            writer.join().unwrap();
            (notes, began.elapsed())
        };
        let all = |mut agent: UnixStream| {
            agent.write_all(&serde_json::to_vec(&Notes::default()).unwrap()).unwrap();
        };
        let length = serde_json::to_vec(&Notes::default()).unwrap().len();
        assert_eq!(read_from(long, length, all).0, Some(Notes::default()));
        assert_eq!(read_from(long, length - 1, all).0, None, "too long");
        // Sends forever, until the reader has disconnected.
        assert_eq!(
            read_from(long, 1 << 20, |mut agent| while agent.write_all(&[b' '; 4096]).is_ok() {}).0,
            None
        );
        let (notes, took) = read_from(patience, 1 << 20, |mut agent| {
            while agent.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert_eq!(notes, None, "too slow");
        assert!(took >= patience, "{took:?}");
    }

    #[tokio::test]
    async fn what_the_agent_knows_is_read_as_it_was_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let pod = PodId { uid: "1".into(), namespace: "shop".into(), name: "web".into() };
        let skipped = Skipped {
            pod: Some(pod.clone()),
            nic: None,
            mirror: None,
            why: Why::HostNetwork { is_asked: true },
        };
        let db = PodId { name: "db".into(), ..pod.clone() };
        let pods = Some([(pod, None), (db.clone(), Some(Why::NoRequest))].into());
        let report = Report {
            skipped: [skipped].into(),
            failures: ["no".to_owned()].into(),
            pods,
            ..Report::default()
        };
        let (_sender, reports) = watch::channel(Arc::new(report));
        let trouble = watch::Sender::new(Some("no port".to_owned()));
        serve(UnixListener::bind(&path).unwrap(), reports, trouble.subscribe()).unwrap();
        let expected = Notes {
            unreached_targets: Vec::new(),
            not_mirrored: vec![Finding {
                pod: Some("shop/web".into()),
                reason: "HostNetwork".into(),
                message: Why::HostNetwork { is_asked: true }.to_string(),
                remedy: Why::HostNetwork { is_asked: true }.remedy().into(),
                ..Finding::default()
            }],
            pods: Some(vec![
                KnownPod {
                    pod: "shop/db".into(),
                    not_asked: Some(Finding {
                        reason: "NoRequest".into(),
                        message: Why::NoRequest.to_string(),
                        remedy: Why::NoRequest.remedy_unasked(&db),
                        ..Finding::default()
                    }),
                },
                KnownPod { pod: "shop/web".into(), not_asked: None },
            ]),
            bad_annotations: Vec::new(),
            failures: vec!["no".into(), "no port".into()],
            coverage: Vec::new(),
        };
        for _ in 0..2 {
            let stream = UnixStream::connect(&path).unwrap();
            // Tests run as root, as the agent does.
            assert_eq!(tokio::task::spawn_blocking(|| read(stream)).await.unwrap(), Some(expected.clone()));
        }
    }
}
