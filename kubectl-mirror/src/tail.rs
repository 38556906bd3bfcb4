//! `kubectl mirror tail`: the packets of pods, from all nodes, as one pcapng.
//!
//! ```text
//! request: a Mirror with a stream, and its key ──► API server ──► agents
//! pods: which pods there are, on which nodes ──► agents: a connection to each node's agent
//!                                                   │ bytes
//!                                                   ▼
//!                    blocks ─► combined (interfaces, counters) ─► merge (by time) ─► sink: the file, or standard output
//! ```
//!
//! This module is the loop around these parts. The memory for waiting packets is bounded: [`MERGE`], [`PENDING`], and
//! the connections' buffers (1 MiB each). While the reader of standard output does not read, nothing is read from the
//! agents; then the rings in the kernel fill up, and the agents count the lost packets.

mod agents;
pub(crate) mod blocks;
pub(crate) mod combined;
pub(crate) mod merge;
mod pods;
mod request;
mod sink;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal as _},
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};

use self::{
    agents::{Link, News, What},
    blocks::{Block, Blocks},
    combined::Combined,
    merge::{Bounds, Merge, StreamId},
    pods::{Pods, Seen},
    request::Request,
    sink::Sink,
};
use crate::{cli::TailArgs, cluster::Cluster, stop_signals, tell};

/// How long packets wait for those of other nodes, and the size of the waiting ones.
const MERGE: Bounds = Bounds { hold: Duration::from_millis(500), bytes: 16 << 20 };
/// Bytes waiting for the file or the reader of standard output, above which no more are read from the agents.
const PENDING: usize = 1 << 20;
/// Maximum number of received parts of streams that wait to be parsed.
const PARTS: usize = 16;
/// Timeout for the agents to end their streams, with the counters.
const LAST_WORDS: Duration = Duration::from_secs(8);
/// Timeout for the reader of standard output to read the rest at the end.
const LAST_READ: Duration = Duration::from_secs(5);
/// Interval of the progress display on a terminal.
const PROGRESS: Duration = Duration::from_secs(1);

/// Reads the packets until the time limit, Ctrl-C, or until the reader of standard output closes it.
pub(crate) async fn tail(args: TailArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let is_stdout = args.write == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | wireshark -k -i -`");
    }
    // First, so that from here on Ctrl-C leads to an orderly end.
    let mut stop = stop_signals()?;
    let prepared = async {
        let selection = args.which.resolve(cluster).await?;
        let sink = Sink::open((!is_stdout).then_some(args.write.as_path()))?;
        let pods = Pods::watch(&selection, cluster)?;
        request::sweep(cluster).await;
        anyhow::Ok((selection, sink, pods))
    };
    let (selection, sink, pods) = tokio::select! {
        prepared = prepared => prepared?,
        _ = stop.recv() => return Ok(()),
    };
    // From here on, the Mirror must be deleted at the end.
    let request = Request::make(&args, &selection, cluster).await?;
    let mut tail = Tail::new(&args, cluster, &request, sink);
    let end = Instant::now() + args.duration.time;
    let outcome = tokio::select! {
        outcome = tail.run(pods) => outcome,
        _ = stop.recv() => Ok(()),
        () = sleep_until(end) => Ok(()),
    };
    // A second Ctrl-C does not wait for the agents.
    let finished = tokio::select! {
        finished = tail.finish() => finished,
        _ = stop.recv() => Ok(()),
    };
    let deleted = request.delete(cluster).await;
    outcome.and(finished).and(deleted)
}

/// The streams of all nodes, merged into one file.
struct Tail<'c> {
    cluster: &'c Cluster,
    link: Link,
    news: mpsc::Receiver<News>,
    ending: watch::Sender<bool>,
    readers: JoinSet<anyhow::Result<()>>,
    nodes: BTreeSet<String>,
    streams: BTreeMap<StreamId, Stream>,
    combined: Combined,
    merge: Merge<Vec<u8>>,
    /// Blocks that the sink has not accepted yet.
    pending: Vec<u8>,
    sink: Sink,
    began: Instant,
    packets: u64,
    seen: Seen,
}

/// A connection to an agent.
struct Stream {
    node: String,
    blocks: Blocks,
}

impl<'c> Tail<'c> {
    fn new(args: &TailArgs, cluster: &'c Cluster, request: &Request, sink: Sink) -> Self {
        let (sender, news) = mpsc::channel(PARTS);
        let ending = watch::Sender::new(false);
        let link = Link::new(args, cluster, request, sender, ending.subscribe());
        let application = concat!("kubectl-mirror ", env!("CARGO_PKG_VERSION"));
        let (combined, pending) = Combined::begin(application);
        Self {
            cluster,
            link,
            news,
            ending,
            readers: JoinSet::new(),
            nodes: BTreeSet::new(),
            streams: BTreeMap::new(),
            combined,
            merge: Merge::new(MERGE),
            pending,
            sink,
            began: Instant::now(),
            packets: 0,
            seen: Seen::default(),
        }
    }

    /// Reads until the sink accepts no more, or until a permanent failure.
    async fn run(&mut self, mut pods: Pods) -> anyhow::Result<()> {
        let mut progress = interval(PROGRESS);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let is_shown = io::stderr().is_terminal();
        loop {
            let due = self.merge.due().map(|due| self.began + due);
            let is_full = self.pending.len() >= PENDING;
            tokio::select! {
                Some(news) = self.news.recv(), if !is_full => self.take(news),
                () = sleep_until(due.unwrap_or(self.began)), if due.is_some() && !is_full => {}
                room = self.sink.room(), if !self.pending.is_empty() => match room {
                    Some(room) => drop(room.send(std::mem::take(&mut self.pending))),
                    None => return self.sink.outcome(),
                },
                () = self.sink.closed() => return self.sink.outcome(),
                Some(ended) = self.readers.join_next() => ended.context("a connection to an agent")??,
                seen = pods.next() => self.meet(seen?),
                _ = progress.tick(), if is_shown => self.show(),
            }
            self.pour();
        }
    }

    /// Updates the pods: connects to the agents of their nodes.
    fn meet(&mut self, seen: Seen) {
        for line in seen.news_since(&self.seen) {
            tell(&line);
        }
        for node in seen.nodes() {
            if self.nodes.insert(node.clone()) {
                self.readers.spawn(self.link.clone().read(node));
            }
        }
        self.seen = seen;
    }

    /// Processes an event of an agent's stream.
    fn take(&mut self, News { stream: id, what }: News) {
        match what {
            What::Began { node } => {
                self.merge.open(id);
                self.streams.insert(id, Stream { node, blocks: Blocks::default() });
            }
            What::Bytes(bytes) => {
                let Some(stream) = self.streams.get_mut(&id) else { return };
                stream.blocks.push(&bytes);
                if let Err(why) = self.take_blocks(id) {
                    self.end(id, Some(why));
                }
            }
            What::Ended => {
                let is_cut = self.streams.get(&id).is_some_and(|stream| stream.blocks.is_within_a_block());
                self.end(id, is_cut.then_some("it ended within a block"));
            }
        }
    }

    fn take_blocks(&mut self, id: StreamId) -> Result<(), &'static str> {
        let Some(Stream { node, blocks }) = self.streams.get_mut(&id) else { return Ok(()) };
        while let Some(block) = blocks.next().map_err(|blocks::Malformed(why)| why)? {
            match block {
                Block::Interface(description) => {
                    self.combined.interface(id, node, &description, &mut self.pending);
                }
                Block::Packet(packet) => {
                    let time_ns = packet.time_ns;
                    let block = self.combined.packet(id, packet).ok_or("a packet of no interface")?;
                    self.merge.push(id, time_ns, block.len(), block, self.began.elapsed());
                    self.packets += 1;
                }
                Block::Statistics(statistics) => self.combined.statistics(id, statistics),
            }
        }
        Ok(())
    }

    fn end(&mut self, id: StreamId, why: Option<&str>) {
        self.merge.close(id);
        if let Some((Stream { node, .. }, why)) = self.streams.remove(&id).zip(why) {
            tell(&format!("the stream of node {node} cannot be read on: {why}"));
        }
    }

    /// Passes the packets that need not wait any more to the sink.
    fn pour(&mut self) {
        let now = self.began.elapsed();
        while self.pending.len() < PENDING
            && let Some(block) = self.merge.pop(now)
        {
            self.pending.extend_from_slice(&block);
        }
    }

    fn show(&self) {
        use io::Write as _;
        let (nodes, packets) = (self.streams.len(), self.packets);
        // A failure to print cannot be reported.
        let _ = write!(io::stderr(), "\r{packets} packets of {nodes} nodes \r");
    }

    /// Ends the streams, writes the rest, and prints the summary.
    async fn finish(&mut self) -> anyhow::Result<()> {
        self.ending.send_replace(true);
        let rest = async {
            // The last sender is in the link.
            while !self.readers.is_empty() {
                tokio::select! {
                    biased;
                    Some(news) = self.news.recv() => self.take(news),
                    Some(_) = self.readers.join_next() => {}
                }
            }
            while let Ok(news) = self.news.try_recv() {
                self.take(news);
            }
        };
        let is_late = timeout(LAST_WORDS, rest).await.is_err();
        self.readers.abort_all();
        for id in std::mem::take(&mut self.streams).into_keys() {
            self.merge.close(id);
        }
        let now = self.began.elapsed();
        while let Some(block) = self.merge.pop(now) {
            self.pending.extend_from_slice(&block);
        }
        let now_ns = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let counted = self.combined.end(u64::try_from(now_ns).unwrap_or(u64::MAX), &mut self.pending);
        let written = self.sink.finish(std::mem::take(&mut self.pending), LAST_READ).await;
        if is_late {
            tell(
                "not all agents have ended their streams in time: what they counted last is not in the file",
            );
        }
        for line in counted.lines(self.packets, self.nodes.len()) {
            tell(&line);
        }
        if self.nodes.is_empty() {
            tell(&format!("there was no such pod on any node in namespace {}", self.cluster.namespace));
        }
        written
    }
}
