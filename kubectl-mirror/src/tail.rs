//! `kubectl mirror tail`: the packets of pods, from all nodes, as one pcapng.
//!
//! ```text
//! request: the words as URIs ──► API of packets ──► blocks ─► combined (interfaces, counters) ─► merge (by time)
//!    ▲                                                │                                               │
//!    └── course: again, after a gap ◄── end, failure ─┘        sink: the file, or standard output ◄───┘
//! ```
//!
//! The server merges the packets of all nodes; pods with names have a request each, which are merged here. This module
//! is the loop around these parts. The memory for waiting packets is bounded: [`MERGE`], [`PENDING`], and [`PARTS`].
//! While the reader of standard output does not read, nothing is read from the server, and so on to the rings in the
//! kernel: they fill up, and the taps count the lost packets.
//!
//! With `--since`, the stream of a node begins with the packets of its recorder, and the agent's message about them.
//! With `--no-follow`, it ends with them; then packets wait for those of all requests ([`PAST`]).

mod course;
mod request;
mod sink;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal as _},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Error, bail};
use k8s_openapi::jiff::Timestamp;
use mirror_capture::{
    blocks::Block,
    combined::Combined,
    merge::{Bounds, Merge, OUT_OF_ORDER, StreamId},
    pcapng::{Names, Section},
};
use mirror_core::{settings::show_kubernetes_duration, status::printable};
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};

use self::{
    request::{END, NEXT, News, SAYS, Source, What},
    sink::Sink,
};
use crate::{cli::TailArgs, cluster::Cluster, stop_signals, tell, tell_failure};

/// How long packets wait for those of other requests, and the size of the waiting ones.
const MERGE: Bounds = Bounds { hold: Duration::from_millis(500), bytes: 16 << 20 };
/// The same for the past alone. A node begins to send when its recorder has collected all packets.
const PAST: Bounds = Bounds { hold: Duration::from_secs(600), bytes: 256 << 20 };
/// Bytes waiting for the file or the reader of standard output, above which no more are read from the server.
const PENDING: usize = 1 << 20;
/// Maximum number of received parts of streams that wait to be taken in.
const PARTS: usize = 8;
/// Timeout for the server to end the streams after their time, with the counters.
const LAST_WORDS: Duration = Duration::from_secs(8);
/// Timeout for the reader of standard output to read the rest at the end.
const LAST_READ: Duration = Duration::from_secs(5);
/// Interval of the progress display on a terminal.
const PROGRESS: Duration = Duration::from_secs(1);
/// The time after which something is written into a pipe: only that shows whether its reader has ended.
const QUIET: Duration = Duration::from_secs(2);
/// The exit code if a part of the packets is missing.
const INCOMPLETE: u8 = 3;
/// The server's reason for the end of a stream of the past alone that has all packets.
const COMPLETE: &str = "complete";
/// The beginning of the server's reason for the end of a stream that no other one follows.
const REVOKED: &str = "a right was revoked: ";
/// Messages of the server that do not say that packets are missing, and the part of those about the messages.
const HARMLESS: [&str; 3] = [": recorded packets of the last ", " addresses have names", OUT_OF_ORDER];
const OF_MESSAGES: &str = "other messages";

/// Reads the packets until the time limit, Ctrl-C, until the reader of standard output closes it, or until the end of the
/// past alone.
pub(crate) async fn tail(mut args: TailArgs, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let is_stdout = args.write == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        bail!(
            "packets are not written to a terminal: use --write FILE, or a pipe, as in `... | wireshark -k -i -`"
        );
    }
    // First, so that from here on Ctrl-C leads to an orderly end.
    let mut stop = stop_signals()?;
    let pipe = args.pipe.take();
    let prepared = async {
        // Recorders know deleted pods by name.
        let selection = args.which.resolve(cluster, !args.no_follow && !args.all_namespaces).await?;
        let sources = request::all(&args, &selection)?;
        anyhow::Ok((sources, Sink::open((!is_stdout).then_some(args.write.as_path()), pipe).await?))
    };
    let (sources, sink) = tokio::select! {
        prepared = prepared => prepared?,
        _ = stop.recv() => return Ok(ExitCode::SUCCESS),
    };
    let mut tail = Tail::new(&args, cluster, sources, sink);
    let end = tail.end + LAST_WORDS;
    let outcome = tokio::select! {
        outcome = tail.run() => outcome,
        _ = stop.recv() => Ok(()),
        () = sleep_until(end) => Ok(()),
    };
    // A second Ctrl-C does not wait for the reader of standard output.
    let finished = tokio::select! {
        finished = tail.finish() => finished,
        _ = stop.recv() => Ok(()),
    };
    outcome.and(finished)?;
    tail.judge()
}

/// The streams of all requests, merged into one file.
struct Tail<'c> {
    cluster: &'c Cluster,
    args: &'c TailArgs,
    end: Instant,
    /// The requests that have not ended for good, by the number of their first stream.
    sources: BTreeMap<StreamId, Source>,
    news: mpsc::Receiver<News>,
    sender: mpsc::Sender<News>,
    combined: Combined,
    merge: Merge<Vec<u8>>,
    /// Blocks that the sink has not accepted yet.
    pending: Vec<u8>,
    sink: Sink,
    /// When the sink last accepted a part.
    accepted: Instant,
    began: Instant,
    packets: u64,
    nodes: BTreeSet<String>,
    /// Whether there was a stream.
    has_begun: bool,
    is_missing: bool,
    /// Why the last request has failed, and the text of that.
    failure: Option<(Error, String)>,
}

impl<'c> Tail<'c> {
    fn new(args: &'c TailArgs, cluster: &'c Cluster, sources: Vec<Source>, sink: Sink) -> Self {
        let (sender, news) = mpsc::channel(PARTS);
        let application = concat!("kubectl-mirror ", env!("CARGO_PKG_VERSION"));
        let (combined, pending) =
            Combined::begin(&Section { application: Some(application), ..Section::default() });
        Self {
            cluster,
            args,
            end: Instant::now() + args.duration,
            sources: sources.into_iter().map(|source| (source.id, source)).collect(),
            news,
            sender,
            combined,
            merge: Merge::new(if args.no_follow { PAST } else { MERGE }),
            pending,
            sink,
            accepted: Instant::now(),
            began: Instant::now(),
            packets: 0,
            nodes: BTreeSet::new(),
            has_begun: false,
            is_missing: false,
            failure: None,
        }
    }

    /// The time that is left for a request.
    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Sends a request after a delay.
    fn send(&self, source: &Source, delay: Duration) {
        let scope = self.cluster.scope(self.args.all_namespaces);
        let uri = source.uri(scope, self.left().saturating_sub(delay));
        let (cluster, id, sender) = (self.cluster.clone(), source.id, self.sender.clone());
        tokio::spawn(async move {
            sleep(delay).await;
            request::read(cluster, uri, id, sender).await;
        });
    }

    /// Reads until the sink accepts no more, or until all requests have ended.
    async fn run(&mut self) -> anyhow::Result<()> {
        for source in self.sources.values() {
            self.send(source, Duration::ZERO);
            // The packets of the past wait for those of all requests.
            if self.args.no_follow {
                self.merge.open(source.id);
            }
        }
        let mut progress = interval(PROGRESS);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let is_shown = io::stderr().is_terminal();
        while !self.sources.is_empty() {
            let due = self.merge.due().map(|due| self.began + due);
            let is_full = self.pending.len() >= PENDING;
            tokio::select! {
                Some(news) = self.news.recv(), if !is_full => self.take(news),
                () = sleep_until(due.unwrap_or(self.began)), if due.is_some() && !is_full => {}
                room = self.sink.room(), if !self.pending.is_empty() => match room {
                    Some(room) => {
                        self.accepted = Instant::now();
                        drop(room.send(std::mem::take(&mut self.pending)));
                    }
                    None => return self.sink.outcome(),
                },
                () = self.sink.closed() => return self.sink.outcome(),
                _ = progress.tick() => {
                    if is_shown {
                        self.show();
                    }
                    if self.sink.has_reader && self.accepted.elapsed() >= QUIET && self.pending.is_empty() {
                        Names::default().write(&mut self.pending);
                    }
                }
            }
            self.pour(PENDING);
        }
        Ok(())
    }

    /// Processes an event of a stream.
    fn take(&mut self, (id, what): News) {
        let Some(source) = self.sources.get_mut(&(id % NEXT)) else { return };
        match what {
            What::Began => {
                self.merge.open(id);
                let gap = source.course.begin(Timestamp::now());
                let gap = gap.map(|gap| source.words(&gap.to_string()));
                gap.iter().for_each(|gap| self.report(gap));
                if !std::mem::replace(&mut self.has_begun, true) && !self.args.no_follow {
                    let duration = show_kubernetes_duration(self.args.duration);
                    tell(&format!("tail ends after {duration} (--duration), or with Ctrl-C"));
                }
            }
            What::Blocks(blocks) => {
                source.course.read(&blocks, Timestamp::now());
                blocks.into_iter().for_each(|block| self.take_block(id, block));
            }
            What::Ended(ended) => self.ended(id, ended),
        }
    }

    fn take_block(&mut self, id: StreamId, block: Block) {
        match block {
            Block::Interface(of) => {
                let node = of.hardware.clone().unwrap_or_default();
                tell(&printable(&format!("reading {} on node {node}", of.name)));
                self.combined.interface(id, of, &mut self.pending);
                self.nodes.insert(node);
            }
            Block::Packet(packet) => {
                let time_ns = packet.time_ns;
                // The server describes an interface before its packets.
                let Some(block) = self.combined.packet(id, packet) else { return };
                self.merge.push(id, time_ns, block.len(), block, self.began.elapsed());
                self.packets += 1;
            }
            Block::Statistics(statistics) => self.combined.statistics(id, statistics),
            Block::Names(names) => {
                let text = names.comment.as_deref().and_then(|comment| comment.strip_prefix(SAYS));
                if let Some(text) = text.filter(|text| !text.starts_with(END)) {
                    tell(&printable(text));
                    self.is_missing |= self.says_missing(text);
                }
                names.write(&mut self.pending);
            }
            // The server sends neither.
            Block::Section(_) | Block::Note(_) => {}
        }
    }

    /// Whether a message of the server says that packets are missing: those of a node, or of another part. A pod that
    /// is not read, `NAMESPACE/NAME`, is missing only from the past.
    fn says_missing(&self, text: &str) -> bool {
        if HARMLESS.iter().any(|harmless| text.contains(harmless)) {
            return false;
        }
        let part = text.split(": ").next().unwrap_or_default();
        let is_of_part = !part.contains('/') && part != OF_MESSAGES;
        is_of_part || self.args.no_follow
    }

    /// The stream has ended, or there was none: sends the request again, or ends it for good.
    fn ended(&mut self, id: StreamId, ended: anyhow::Result<String>) {
        self.merge.close(id);
        let (left, first) = (self.left(), id % NEXT);
        let Some(mut source) = self.sources.remove(&first) else { return };
        let is_complete = match (&ended, self.args.no_follow) {
            (Ok(why), true) => why == COMPLETE,
            (Err(_), true) => false,
            (_, false) => left.is_zero() && source.course.has_begun(),
        };
        if is_complete {
            return;
        }
        let (why, code) = match &ended {
            Ok(why) => (format!("the stream has ended: {why}"), None),
            Err(error) => (mirror_client::in_words(error.as_ref()), refusal_code(error)),
        };
        let delay = source.course.fail(&why, code, Timestamp::now());
        let is_final = self.args.no_follow || matches!(&ended, Ok(why) if why.starts_with(REVOKED));
        let delay = delay.filter(|delay| *delay < left && !is_final);
        let again = if delay.is_some() { "; trying again" } else { "" };
        let text = source.words(&why) + again;
        // A refusal before any stream is the outcome of the command.
        let is_outcome = delay.is_none() && !self.has_begun && self.sources.is_empty();
        if !is_outcome && self.failure.as_ref().is_none_or(|(_, told)| *told != text) {
            tell_failure(&text);
        }
        self.failure = ended.err().map(|error| (error, text));
        match delay {
            Some(delay) => {
                source.id = id + NEXT;
                self.send(&source, delay);
                self.sources.insert(first, source);
            }
            None => self.is_missing = true,
        }
    }

    /// Says that packets are missing, also in the file.
    fn report(&mut self, gap: &str) {
        self.say(gap);
        self.is_missing = true;
    }

    /// Writes a message for the user, also into the file.
    fn say(&mut self, text: &str) {
        tell(text);
        let comment = Some(format!("{SAYS}{text}"));
        Names { addresses: Vec::new(), comment }.write(&mut self.pending);
    }

    /// Passes packets that need not wait any more to the sink, while fewer than `most` bytes wait there.
    fn pour(&mut self, most: usize) {
        let now = self.began.elapsed();
        while self.pending.len() < most
            && let Some(block) = self.merge.pop(now)
        {
            self.pending.extend_from_slice(&block);
        }
    }

    fn show(&self) {
        use io::Write as _;
        let (nodes, packets) = (self.nodes.len(), self.packets);
        // A failure to print cannot be reported.
        let _ = write!(io::stderr(), "\r{packets} packets of {nodes} nodes \r");
    }

    /// Drops the requests that are left, writes the rest, and prints the summary.
    async fn finish(&mut self) -> anyhow::Result<()> {
        self.news.close();
        while let Ok((id, what)) = self.news.try_recv() {
            // A request is not sent any more.
            if !matches!(what, What::Ended(_)) {
                self.take((id, what));
            }
        }
        let (is_past, is_late) = (self.args.no_follow, self.left().is_zero());
        let is_unread = |source: &Source| is_past || is_late && !source.course.has_begun();
        self.is_missing |= self.sources.values().any(is_unread);
        for mut source in std::mem::take(&mut self.sources).into_values() {
            self.merge.close(source.id);
            let gap = source.course.end(Timestamp::now()).map(|gap| source.words(&gap.to_string()));
            gap.iter().for_each(|gap| self.report(gap));
        }
        self.pour(usize::MAX);
        if self.args.since.is_some() && self.merge.is_out_of_order {
            self.say(OUT_OF_ORDER);
        }
        let now_ns = u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(u64::MAX);
        let (lines, is_whole) = self.combined.end(now_ns, self.packets, self.nodes.len(), &mut self.pending);
        self.is_missing |= self.args.no_follow && !is_whole;
        let written = self.sink.finish(std::mem::take(&mut self.pending), LAST_READ).await;
        if self.has_begun {
            lines.iter().for_each(|line| tell(&printable(line)));
        }
        written
    }

    /// Returns the exit code.
    fn judge(self) -> anyhow::Result<ExitCode> {
        let is_late = self.left().is_zero();
        match self.failure {
            Some((error, _)) if !self.has_begun => return Err(error),
            None if !self.has_begun && is_late => bail!("the API server has not answered in time"),
            _ if self.args.no_follow && self.packets == 0 => bail!(
                "nothing is recorded of these pods: a recorder keeps what mirrors copy to its target, as long as it has room"
            ),
            _ => {}
        }
        Ok(if self.is_missing { ExitCode::from(INCOMPLETE) } else { ExitCode::SUCCESS })
    }
}

/// The code of a refusal.
fn refusal_code(error: &Error) -> Option<u16> {
    match error.downcast_ref() {
        Some(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
