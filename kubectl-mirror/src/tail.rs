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
//!
//! With `--since`, the stream of a node begins with the packets of its recorder, and the agent's message about them. With
//! `--no-follow`, it ends with them; then packets wait for those of all nodes ([`PAST`]).

mod agents;
mod past;
mod pods;
mod request;
mod sink;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal as _},
    path::Path,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use mirror_capture::{
    blocks::{Block, Blocks},
    combined::Combined,
    merge::{Bounds, Merge, StreamId},
    pcapng::{NO_PAST, Section},
};
use mirror_core::{settings::show_kubernetes_duration, status::printable};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};

use self::{
    agents::{Link, News, What},
    past::Past,
    pods::{Pods, Seen},
    request::Request,
    sink::Sink,
};
use crate::{
    agents::{missing, of_all},
    cli::TailArgs,
    cluster::Cluster,
    stop_signals, tell,
};

/// How long packets wait for those of other nodes, and the size of the waiting ones.
const MERGE: Bounds = Bounds { hold: Duration::from_millis(500), bytes: 16 << 20 };
/// The same for the past alone. A node begins to send when its recorder has collected all packets.
const PAST: Bounds = Bounds { hold: Duration::from_secs(600), bytes: 256 << 20 };
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

/// Reads the packets until the time limit, Ctrl-C, until the reader of standard output closes it, or until the end of the
/// past alone.
pub(crate) async fn tail(args: TailArgs, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let is_stdout = args.write == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        bail!(
            "packets are not written to a terminal: use --write FILE, or a pipe, as in `... | wireshark -k -i -`"
        );
    }
    // First, so that from here on Ctrl-C leads to an orderly end.
    let mut stop = stop_signals()?;
    let prepared = async {
        // Recorders know deleted pods by name.
        let selection = args.which.resolve(cluster, !args.no_follow).await?;
        let nodes = if args.no_follow { of_all(cluster).await? } else { BTreeMap::new() };
        if args.no_follow && nodes.is_empty() {
            bail!(missing(&cluster.agents));
        }
        let sink = Sink::open((!is_stdout).then_some(args.write.as_path()))?;
        let pods = if args.no_follow { None } else { Some(Pods::watch(&selection, cluster)?) };
        request::sweep(cluster).await;
        anyhow::Ok((selection, sink, pods, nodes))
    };
    let (selection, sink, pods, nodes) = tokio::select! {
        prepared = prepared => prepared?,
        _ = stop.recv() => return Ok(ExitCode::SUCCESS),
    };
    // From here on, the Mirror must be deleted at the end.
    let request = Request::make(&args, &selection, cluster).await?;
    if !args.no_follow {
        let duration = show_kubernetes_duration(args.duration);
        tell(&format!("tail ends after {duration} (--duration), or with Ctrl-C"));
    }
    let mut tail = Tail::new(&args, cluster, &request, sink);
    nodes.into_keys().for_each(|node| tail.connect(node));
    let end = Instant::now() + args.duration;
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
    outcome.and(finished).and(deleted)?;
    tail.past.judge(&args, tail.nodes.len())
}

/// The streams of all nodes, merged into one file.
struct Tail<'c> {
    cluster: &'c Cluster,
    link: Link,
    news: mpsc::Receiver<News>,
    ending: watch::Sender<bool>,
    readers: JoinSet<anyhow::Result<Option<StreamId>>>,
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
    past: Past,
}

/// A connection to an agent.
struct Stream {
    node: String,
    blocks: Blocks,
    /// The agent has sent nothing yet.
    is_empty: bool,
}

impl<'c> Tail<'c> {
    fn new(args: &TailArgs, cluster: &'c Cluster, request: &Request, sink: Sink) -> Self {
        let (sender, news) = mpsc::channel(PARTS);
        let ending = watch::Sender::new(false);
        let link = Link::new(args, cluster, request, sender, ending.subscribe());
        let application = concat!("kubectl-mirror ", env!("CARGO_PKG_VERSION"));
        let (combined, pending) =
            Combined::begin(&Section { application: Some(application), ..Section::default() });
        Self {
            cluster,
            link,
            news,
            ending,
            readers: JoinSet::new(),
            nodes: BTreeSet::new(),
            streams: BTreeMap::new(),
            combined,
            merge: Merge::new(if args.no_follow { PAST } else { MERGE }),
            pending,
            sink,
            began: Instant::now(),
            packets: 0,
            seen: Seen::default(),
            past: Past::default(),
        }
    }

    /// Connects to the agent of a node, unless that is done.
    fn connect(&mut self, node: String) {
        let id = self.nodes.len() as StreamId;
        if self.nodes.insert(node.clone()) {
            self.readers.spawn(self.link.clone().read(node, id));
        }
    }

    /// Reads until the sink accepts no more, or until a permanent failure. Without `pods`, all connections are there, and
    /// it reads until they end.
    async fn run(&mut self, mut pods: Option<Pods>) -> anyhow::Result<()> {
        if pods.is_none() {
            (0..self.nodes.len() as StreamId).for_each(|id| self.merge.open(id));
        }
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
                ended = self.readers.join_next(), if !self.readers.is_empty() => {
                    if let Some(failed) = ended.transpose().context("a connection to an agent")?.transpose()?.flatten() {
                        self.past.missing += 1;
                        self.end(failed, None);
                    }
                }
                seen = async { Some(pods.as_mut()?.next().await) }, if pods.is_some() => {
                    seen.transpose()?.into_iter().for_each(|seen| self.meet(seen));
                }
                _ = progress.tick(), if is_shown => self.show(),
            }
            self.pour(PENDING);
            if pods.is_none() && self.readers.is_empty() {
                return Ok(());
            }
        }
    }

    /// Updates the pods: connects to the agents of their nodes.
    fn meet(&mut self, seen: Seen) {
        seen.news_since(&self.seen).iter().for_each(|line| tell(line));
        seen.nodes().into_iter().for_each(|node| self.connect(node));
        self.seen = seen;
    }

    /// Processes an event of an agent's stream.
    fn take(&mut self, (id, what): News) {
        match what {
            What::Began(node) => {
                self.merge.open(id);
                self.streams.insert(id, Stream { node, blocks: Blocks::default(), is_empty: true });
            }
            What::Bytes(bytes) => {
                let Some(stream) = self.streams.get_mut(&id) else { return };
                stream.blocks.push(&bytes);
                stream.is_empty = false;
                if let Err(why) = self.take_blocks(id) {
                    self.end(id, Some(why));
                }
            }
            What::Ended => {
                let stream = self.streams.get(&id);
                let is_cut = stream.is_some_and(|stream| stream.blocks.is_within_a_block());
                let is_empty = self.link.no_follow && stream.is_some_and(|stream| stream.is_empty);
                self.past.missing += usize::from(is_empty);
                let why = is_cut.then_some("it ended within a block");
                self.end(id, why.or(is_empty.then_some("the agent sent nothing; see its log")));
            }
        }
    }

    fn take_blocks(&mut self, id: StreamId) -> Result<(), &'static str> {
        let Some(Stream { node, blocks, .. }) = self.streams.get_mut(&id) else { return Ok(()) };
        while let Some(block) = blocks.pop()? {
            match block {
                Block::Section(message) => {
                    tell(&format!("node {node}: {}", printable(&message)));
                    match message.starts_with(NO_PAST) {
                        true => self.past.missing += 1,
                        false => self.past.is_there = true,
                    }
                }
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
                // Agents send neither.
                Block::Names(_) | Block::Note(_) => {}
            }
        }
        Ok(())
    }

    fn end(&mut self, id: StreamId, why: Option<&str>) {
        self.merge.close(id);
        if let Some((Stream { node, .. }, why)) = self.streams.remove(&id).zip(why) {
            tell(&format!("cannot read more of the stream of node {node}: {why}"));
        }
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
        let (nodes, packets) = (self.streams.len(), self.packets);
        // A failure to print cannot be reported.
        let _ = write!(io::stderr(), "\r{packets} packets of {nodes} nodes \r");
    }

    /// Ends the streams, writes the rest, and prints the summary.
    async fn finish(&mut self) -> anyhow::Result<()> {
        let is_stopped = self.link.no_follow && !self.readers.is_empty();
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
        // Those of the past alone are there before they begin.
        for id in std::mem::take(&mut self.streams).into_keys().chain(0..self.nodes.len() as StreamId) {
            self.merge.close(id);
        }
        self.pour(usize::MAX);
        let now_ns = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let now_ns = u64::try_from(now_ns).unwrap_or(u64::MAX);
        let (lines, is_whole) = self.combined.end(now_ns, self.packets, self.nodes.len(), &mut self.pending);
        let written = self.sink.finish(std::mem::take(&mut self.pending), LAST_READ).await;
        self.past.is_cut = is_stopped || !is_whole;
        if is_late {
            tell("not all agents ended their streams in time, so the file lacks their last counters");
        }
        lines.iter().for_each(|line| tell(line));
        if self.nodes.is_empty() {
            tell(&format!("no such pod was on any node in namespace {}", self.cluster.namespace));
        }
        written
    }
}
