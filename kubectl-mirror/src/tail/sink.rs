//! The output of the packets: a file, or standard output. A separate thread writes, because the reader of a pipe can be
//! slow.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::Path,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

/// Maximum number of parts waiting to be written.
const PARTS: usize = 4;

pub(super) struct Sink {
    parts: mpsc::Sender<Vec<u8>>,
    written: Option<oneshot::Receiver<io::Result<()>>>,
    place: String,
}

impl Sink {
    /// Replaces this file, unless it is open already, or uses standard output. Only the owner may read the file, because
    /// packets are confidential.
    pub(super) fn open(file: Option<&Path>, opened: Option<File>) -> anyhow::Result<Self> {
        let (mut output, place): (Box<dyn Write + Send>, _) = match file {
            Some(path) => {
                let place = path.display().to_string();
                let file = opened.map_or_else(|| create(path), Ok);
                (Box::new(file.with_context(|| format!("cannot create {place}"))?), place)
            }
            None => (Box::new(io::stdout()), "standard output".to_owned()),
        };
        let (parts, mut coming) = mpsc::channel::<Vec<u8>>(PARTS);
        let (done, written) = oneshot::channel();
        let write = move || {
            let mut outcome = Ok(());
            while outcome.is_ok()
                && let Some(part) = coming.blocking_recv()
            {
                outcome = output.write_all(&part).and_then(|()| output.flush());
            }
            // Sent before `coming` is dropped, so that the outcome is known as soon as the channel is closed.
            let _ = done.send(outcome);
            drop(coming);
        };
        thread::Builder::new().name("sink".to_owned()).spawn(write).context("cannot start a thread")?;
        Ok(Self { parts, written: Some(written), place })
    }

    /// Waits for room for the next part; `None`: the output accepts no more. Cancel safe.
    pub(super) async fn room(&self) -> Option<mpsc::OwnedPermit<Vec<u8>>> {
        self.parts.clone().reserve_owned().await.ok()
    }

    /// Returns when the output accepts no more. Cancel safe.
    pub(super) async fn closed(&self) {
        self.parts.closed().await;
    }

    /// Returns why the output accepts no more. A reader that closed the pipe early, as in `| head`, is not a failure.
    pub(super) fn outcome(&mut self) -> anyhow::Result<()> {
        let outcome = self.written.as_mut().and_then(|written| written.try_recv().ok());
        self.written = None;
        self.judge(outcome.unwrap_or(Ok(())))
    }

    /// Writes the last part. `patience` bounds the time for all waiting parts.
    pub(super) async fn finish(&mut self, part: Vec<u8>, patience: Duration) -> anyhow::Result<()> {
        // A failure was reported already.
        let Some(written) = self.written.take() else { return Ok(()) };
        let (closed, _) = mpsc::channel(1);
        let parts = std::mem::replace(&mut self.parts, closed);
        let finished = async move {
            // If it is not accepted, the outcome has the reason.
            let _ = parts.send(part).await;
            drop(parts);
            written.await
        };
        match timeout(patience, finished).await {
            Ok(outcome) => self.judge(outcome.unwrap_or(Ok(()))),
            Err(_) => Err(anyhow!(
                "the reader of {} read nothing for {} s, so the last packets and counters are missing",
                self.place,
                patience.as_secs()
            )),
        }
    }

    fn judge(&self, outcome: io::Result<()>) -> anyhow::Result<()> {
        match outcome {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            outcome => outcome.with_context(|| format!("cannot write to {}", self.place)),
        }
    }
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    let file = options.open(path)?;
    // An existing file has kept its mode. Pipes and devices stay what they are.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        if file.metadata()?.is_file() {
            file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
        }
    }
    Ok(file)
}

#[cfg(all(test, unix))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
    };

    use super::*;

    /// Packets are confidential, even in a file that everybody could read before.
    #[test]
    fn a_file_that_is_replaced_is_for_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.pcapng");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        create(&path).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.len()), (0o600, 0));
        create(Path::new("/dev/null")).unwrap();
        assert_ne!(fs::metadata("/dev/null").unwrap().permissions().mode() & 0o777, 0o600);
    }
}
