//! The output of the packets: a file, or standard output. A separate thread writes, because the reader of a pipe can be
//! slow.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::Path,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
    time::timeout,
};

/// Maximum number of parts waiting to be written.
const PARTS: usize = 4;
/// Maximum number of bytes that are written at a time.
const CHUNK: usize = 4 << 10;

pub(super) struct Sink {
    parts: mpsc::Sender<Vec<u8>>,
    written: Option<oneshot::Receiver<io::Result<()>>>,
    /// The number of chunks written so far.
    chunks: Arc<AtomicU64>,
    place: String,
    /// Whether a program may read the output, and end.
    pub(super) has_reader: bool,
}

impl Sink {
    /// Replaces this file, unless it is open already, or uses standard output. Only the owner may read the file, because
    /// packets are confidential. Cancel safe: to open a named pipe takes until it has a reader.
    pub(super) async fn open(file: Option<&Path>, opened: Option<File>) -> anyhow::Result<Self> {
        let (mut output, place, has_reader): (Box<dyn Write + Send>, _, _) = match file {
            Some(path) => {
                let (place, path) = (path.display().to_string(), path.to_owned());
                let file = spawn_blocking(move || opened.map_or_else(|| create(&path), Ok)).await?;
                let file = file.with_context(|| format!("cannot create {place}"))?;
                let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
                (Box::new(file), place, !is_file)
            }
            None => (Box::new(io::stdout()), "standard output".to_owned(), true),
        };
        let (parts, mut coming) = mpsc::channel::<Vec<u8>>(PARTS);
        let (done, written) = oneshot::channel();
        let chunks = Arc::new(AtomicU64::new(0));
        let progress = Arc::clone(&chunks);
        let write = move || {
            let mut outcome = Ok(());
            while outcome.is_ok()
                && let Some(part) = coming.blocking_recv()
            {
                outcome = part.chunks(CHUNK).try_for_each(|chunk| {
                    output.write_all(chunk)?;
                    progress.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                });
                outcome = outcome.and_then(|()| output.flush());
            }
            // Sent before `coming` is dropped, so that the outcome is known as soon as the channel is closed.
            let _ = done.send(outcome);
            drop(coming);
        };
        thread::Builder::new().name("sink".to_owned()).spawn(write).context("cannot start a thread")?;
        Ok(Self { parts, written: Some(written), chunks, place, has_reader })
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

    /// Writes the last part. `patience` is the longest time in which nothing is written.
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
        let mut finished = pin!(finished);
        loop {
            let before = self.chunks.load(Ordering::Relaxed);
            match timeout(patience, &mut finished).await {
                Ok(outcome) => return self.judge(outcome.unwrap_or(Ok(()))),
                Err(_) if self.chunks.load(Ordering::Relaxed) > before => {}
                Err(_) => {
                    return Err(anyhow!(
                        "the reader of {} read nothing for {} s, so the last packets and counters are missing",
                        self.place,
                        patience.as_secs()
                    ));
                }
            }
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
        io::{PipeReader, Read as _, pipe},
        os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
        process::Command,
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

    const PART: usize = 1 << 20;

    /// Writes two parts into a pipe with this reader. Returns the outcome, and the thread that reads.
    async fn written(
        patience: Duration,
        read: impl FnOnce(PipeReader) -> usize + Send + 'static,
    ) -> (anyhow::Result<()>, thread::JoinHandle<usize>) {
        let (reader, writer) = pipe().unwrap();
        let reader = thread::spawn(move || read(reader));
        let file = File::from(OwnedFd::from(writer));
        let mut sink = Sink::open(Some(Path::new("web.pcapng")), Some(file)).await.unwrap();
        assert!(sink.has_reader);
        sink.room().await.unwrap().send(vec![1; PART]);
        (sink.finish(vec![2; PART], patience).await, reader)
    }

    #[tokio::test]
    async fn a_slow_reader_gets_everything_and_one_that_stops_ends_the_wait() {
        const PATIENCE: Duration = Duration::from_secs(3);
        let (outcome, reader) = written(PATIENCE, |mut reader| {
            let mut bytes = vec![0; 2 * PART];
            for part in bytes.chunks_mut(PART / 20) {
                thread::sleep(PATIENCE / 30);
                reader.read_exact(part).unwrap();
            }
            bytes.len()
        })
        .await;
        outcome.unwrap();
        assert_eq!(reader.join().unwrap(), 2 * PART, "in more than the patience");

        let (ended, has_ended) = std::sync::mpsc::channel();
        let (outcome, reader) = written(Duration::from_secs(1), move |reader| {
            has_ended.recv().unwrap();
            drop(reader);
            0
        })
        .await;
        assert!(outcome.unwrap_err().to_string().contains("read nothing for 1 s"));
        ended.send(()).unwrap();
        reader.join().unwrap();
    }

    /// Ctrl-C ends the command meanwhile.
    #[tokio::test]
    async fn a_named_pipe_without_a_reader_does_not_block_the_command() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        timeout(Duration::from_millis(100), Sink::open(Some(&path), None)).await.err().unwrap();
        // The thread that opens it ends.
        fs::read(&path).unwrap();
    }
}
