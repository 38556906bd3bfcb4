//! A request for packets: the streams of its nodes, merged into one pcapng.
//!
//! ```text
//! watch ─► objects ─┐
//! agents ───────────┴─► join: a task for each node ─► blocks ─► Stream (pure) ─► body of the answer
//! ```
//!
//! This module is the loop around [`stream`]. While the client does not read, or while its rate is used up, the
//! loop takes no blocks. Then the windows of the agents' streams fill up, then the pipes, then the rings of the
//! nodes, and the taps count the lost packets. Nothing is lost here.

mod end;
mod stream;

use std::{
    collections::BTreeMap, future::pending, mem::take, ops::ControlFlow, pin::Pin, sync::Arc, time::Duration,
};

use futures_util::{StreamExt as _, stream::poll_fn};
use http_body_util::{BodyExt as _, StreamBody, combinators::BoxBody};
use hyper::{
    Response,
    body::{Bytes, Frame},
    header::{CONTENT_TYPE, HeaderValue},
};
use mirror_api::{Limits, RateLimit, packets::ReadRequest};
use mirror_capture::{
    blocks::{Block, Blocks},
    merge::StreamId,
};
use mirror_core::settings::show_kubernetes_duration;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, Interval, MissedTickBehavior, interval, sleep_until, timeout},
};

use self::{
    end::end,
    stream::{Effect, Stream},
};
use super::{
    Body, Server,
    agents::{Agent, Reading},
    front_proxy::User,
    limits::Bucket,
    names::{self, Watch},
    query::{Packets, Refusal},
    told::Told,
};
use crate::util::places::Place;

/// Timeout for the answer: longer than that of an agent, so that its reason still arrives.
const ANSWER: Duration = Duration::from_secs(12);
/// Interval at which missing nodes are requested again.
const AGAIN: Duration = Duration::from_secs(5);
/// Minimum time between two looks for missing nodes, of up to 15 ms each, while pods or agents change.
const CHANGES: Duration = Duration::from_millis(50);
/// The time after which a client that takes nothing is given up.
const STALL: Duration = Duration::from_secs(60);
/// Timeouts at the end: for the rest of the agents' streams, and for the client to take the last part.
const LAST_WORDS: Duration = Duration::from_secs(3);
const LAST_READ: Duration = Duration::from_millis(1500);
/// The additional time after which the kernel ends the copies, even if this server does not.
const MARGIN: Duration = Duration::from_secs(60);
/// Maximum number of received parts of streams that wait to be taken in.
const PARTS: usize = 4;

/// An event of the stream of a node.
enum What {
    /// The agent has accepted the request.
    Opened,
    Blocks(Vec<Block>),
    Ended(Result<(), Refusal>),
}

/// Answers a request whose user is authorised, when the first pod is read, or none is selected yet.
///
/// # Errors
///
/// A refusal, if nothing can be read.
pub async fn serve(server: Arc<Server>, packets: Packets, user: User) -> Result<Response<Body>, Refusal> {
    let (out, mut parts) = mpsc::channel::<Bytes>(1);
    let mut request = Request::new(server, packets, user, out)?;
    if request.stream.is_of_all_nodes() {
        let Server { client, options, .. } = &*request.server;
        let nodes = timeout(ANSWER, names::nodes_of(&options.agents, client)).await;
        let nodes = nodes.unwrap_or_else(|_| Err("no answer".to_owned()));
        let failed = |why: String| Refusal::unavailable(format!("the agents cannot be listed: {why}"));
        request.stream.with_agents = nodes.map_err(failed)?;
    }
    // Pods are listed first; a node is known.
    request.join();
    loop {
        match request.stream.answer(request.began.elapsed() >= ANSWER) {
            Some(answer) => break answer?,
            // Before the answer, there is no end.
            None => _ = request.turn().await,
        }
    }
    request.told.begin();
    request.has_begun = true;
    tokio::spawn(async move {
        while request.turn().await.is_continue() {}
        request.finish().await;
    });
    let parts =
        poll_fn(move |context| parts.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part)))));
    let mut response = Response::new(BoxBody::new(StreamBody::new(parts)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-pcapng"));
    Ok(response)
}

struct Request {
    server: Arc<Server>,
    read: ReadRequest,
    stream: Stream,
    watch: Option<Watch>,
    agents: watch::Receiver<BTreeMap<String, Agent>>,
    again: Interval,
    /// The last look for missing nodes, and the next one after a change.
    joined: Instant,
    join_at: Option<Instant>,
    news: mpsc::Receiver<(StreamId, What)>,
    sender: mpsc::Sender<(StreamId, What)>,
    /// Whether the agents are to end their streams.
    ending: watch::Sender<bool>,
    /// Becomes the reason for the end. It starts with the answer.
    end: Pin<Box<dyn Future<Output = String> + Send>>,
    lasts: Duration,
    /// The latest time of the end, and its reason, once there is one.
    closing: Option<(Instant, String)>,
    out: mpsc::Sender<Bytes>,
    bucket: Bucket,
    began: Instant,
    has_begun: bool,
    /// When the client has last taken something, or nothing was there for it.
    taken: Instant,
    told: Told,
    _place: Place,
}

impl Request {
    fn new(
        server: Arc<Server>,
        packets: Packets,
        user: User,
        out: mpsc::Sender<Bytes>,
    ) -> Result<Self, Refusal> {
        let stream = Stream::new(&packets)?;
        let Packets { scope, mut read, node, lasts } = packets;
        let [_, _, namespace, _] = scope.attributes();
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        let place = server.limits.enter(&user.name, namespace)?;
        let max_rate = server.options.max_rate;
        read.reader.clone_from(&user.name);
        read.settings.rate_limit =
            Some(RateLimit { bits_per_second: Some(max_rate.into()), ..RateLimit::default() });
        let (sender, news) = mpsc::channel(PARTS);
        let mut again = interval(AGAIN);
        again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (most, began) = (server.options.max_duration, Instant::now());
        Ok(Self {
            stream,
            watch: node.is_none().then(|| names::watch(&server.client, namespace)),
            agents: server.agents.watch(),
            again,
            joined: Instant::now(),
            join_at: None,
            news,
            sender,
            ending: watch::Sender::new(false),
            lasts: lasts.unwrap_or(most).min(most),
            closing: None,
            out,
            bucket: Bucket::new(max_rate),
            began,
            has_begun: false,
            taken: Instant::now(),
            told: Told::new(&server, &user, &scope, read.settings.filter.as_deref()),
            end: Box::pin(end(Arc::clone(&server), user, scope, lasts, began)),
            read,
            server,
            _place: place,
        })
    }

    /// Waits for an event and takes it in, until the end of the request.
    async fn turn(&mut self) -> ControlFlow<()> {
        let now = self.began.elapsed();
        if self.stream.is_idle() && (self.closing.is_some() || self.has_begun && !self.read.follow) {
            return ControlFlow::Break(());
        }
        self.stream.pour(now, self.has_begun);
        let is_pending = self.has_begun && !self.stream.pending.is_empty();
        if !is_pending {
            self.taken = Instant::now();
        }
        let ready_at = self.bucket.ready_at();
        let has_room = self.stream.has_room() && ready_at <= now;
        let wake = if has_room { self.stream.merge.due() } else { Some(ready_at).filter(|at| *at > now) };
        let wake = wake.map(|at| self.began + at);
        let deadline = match &self.closing {
            Some((at, _)) => *at,
            None if self.has_begun => self.taken + STALL,
            None => self.began + ANSWER,
        };
        tokio::select! {
            biased;
            () = self.out.closed() => return ControlFlow::Break(()),
            () = sleep_until(deadline) => match self.closing {
                Some(_) => {
                    self.stream.cut_off();
                    return ControlFlow::Break(());
                }
                None if is_pending => {
                    self.stop(format!("nothing was taken for {} s", STALL.as_secs()));
                }
                None => {}
            },
            why = &mut self.end, if self.has_begun && self.closing.is_none() => self.stop(why),
            room = self.out.clone().reserve_owned(), if is_pending => {
                let Ok(room) = room else { return ControlFlow::Break(()) };
                let part = Bytes::from(take(&mut self.stream.pending));
                self.bucket.take(part.len(), self.began.elapsed());
                self.taken = Instant::now();
                drop(room.send(part));
            }
            () = sleep_until(self.join_at.unwrap_or(self.began)), if self.join_at.is_some() => self.join(),
            Some(seen) = async { self.watch.as_mut()?.next().await }, if self.watch.is_some() => {
                let seen = seen.map_err(|(are_pods, error)| (are_pods, mirror_client::in_words(&error)));
                if self.stream.see(seen) {
                    self.join_soon();
                }
            }
            Ok(()) = self.agents.changed() => self.join_soon(),
            _ = self.again.tick() => self.join(),
            Some((id, what)) = self.news.recv(), if has_room => self.take(id, what),
            () = sleep_until(wake.unwrap_or(self.began)), if wake.is_some() => {}
        }
        ControlFlow::Continue(())
    }

    /// Opens the streams of the nodes that are missing after a change: before the answer, which depends on them, at once.
    fn join_soon(&mut self) {
        let at = self.joined + CHANGES;
        if self.has_begun && Instant::now() < at {
            self.join_at = Some(at);
        } else {
            self.join();
        }
    }

    /// Opens the streams of the nodes that are missing.
    fn join(&mut self) {
        (self.joined, self.join_at) = (Instant::now(), None);
        if self.closing.is_some() {
            return;
        }
        let agents = self.agents.borrow_and_update();
        let left = (self.lasts + MARGIN).saturating_sub(self.began.elapsed());
        let duration = Some(show_kubernetes_duration(Duration::from_secs(left.as_secs())));
        let limits = Some(Limits { duration, ..Limits::default() });
        for (id, node, is_first) in self.stream.join(&agents) {
            let mut read = self.read.clone();
            read.settings.limits.clone_from(&limits);
            // Later streams go on after the first one.
            read.since_seconds = read.since_seconds.filter(|_| is_first);
            match (agents.get(&node), self.server.limits.stream()) {
                (Some(agent), Ok(place)) => {
                    let (sender, ending) = (self.sender.clone(), self.ending.subscribe());
                    tokio::spawn(read_node(agent.clone(), read, id, sender, ending, place));
                }
                (_, Err(refusal)) => self.stream.ended(id, Err(refusal)),
                (None, _) => self.stream.ended(id, Ok(())),
            }
        }
    }

    fn take(&mut self, id: StreamId, what: What) {
        let blocks = match what {
            What::Opened => return self.stream.opened(id),
            What::Ended(ended) => return self.stream.ended(id, ended),
            What::Blocks(blocks) => blocks,
        };
        let now = self.began.elapsed();
        for block in blocks {
            match self.stream.block(id, block, now) {
                Some(Effect::Foreign { node }) => self.server.metrics.foreign(&node),
                Some(Effect::Covered { pod, uid }) => self.told.covered(pod, uid),
                None => {}
            }
        }
    }

    /// Has the agents end their streams.
    fn stop(&mut self, why: String) {
        self.closing = Some((Instant::now() + LAST_WORDS, why));
        self.ending.send_replace(true);
    }

    async fn finish(mut self) {
        let why = match self.closing.take() {
            Some((_, why)) => why,
            None if self.out.is_closed() => "the client has closed the connection".to_owned(),
            None => self.stream.outcome().to_owned(),
        };
        self.stream.finish(&why, self.began.elapsed());
        if let Ok(Ok(room)) = timeout(LAST_READ, self.out.reserve()).await {
            room.send(take(&mut self.stream.pending).into());
        }
        self.told.end(&why, self.stream.packets);
    }
}

/// Reads the stream of a node until its end, or until the request is dropped.
async fn read_node(
    agent: Agent,
    read: ReadRequest,
    id: StreamId,
    sender: mpsc::Sender<(StreamId, What)>,
    ending: watch::Receiver<bool>,
    _place: Place,
) {
    let ended = tokio::select! {
        ended = pass_on(&agent, &read, id, &sender, ending) => ended,
        () = sender.closed() => return,
    };
    // The request may have been dropped.
    let _ = sender.send((id, What::Ended(ended))).await;
}

/// Passes the blocks of a node on until its stream ends. Without an end of the request, that is an error.
async fn pass_on(
    agent: &Agent,
    read: &ReadRequest,
    id: StreamId,
    sender: &mpsc::Sender<(StreamId, What)>,
    mut ending: watch::Receiver<bool>,
) -> Result<(), Refusal> {
    let Reading { let_go, mut body } = tokio::select! {
        reading = agent.read(read) => reading?,
        () = is_true(&mut ending) => return Ok(()),
    };
    let mut let_go = Some(let_go);
    // Without a receiver, this future is dropped.
    let _ = sender.send((id, What::Opened)).await;
    let mut blocks = Blocks::default();
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = is_true(&mut ending), if let_go.is_some() => {
                let_go = None;
                continue;
            }
        };
        let Some(frame) = frame else {
            let is_expected = (let_go.is_none() || !read.follow) && !blocks.is_within_a_block();
            let why = "the agent has ended the stream";
            return is_expected.then_some(()).ok_or_else(|| Refusal::unavailable(why));
        };
        let frame = frame.map_err(|error| Refusal::unavailable(mirror_client::in_words(&error)))?;
        blocks.push(&frame.into_data().unwrap_or_default());
        let mut complete = Vec::new();
        while let Some(block) = blocks.pop().map_err(Refusal::unavailable)? {
            complete.push(block);
        }
        if !complete.is_empty() {
            let _ = sender.send((id, What::Blocks(complete))).await;
        }
    }
}

/// Waits until the request ends, or is dropped.
async fn is_true(ending: &mut watch::Receiver<bool>) {
    if ending.wait_for(|ending| *ending).await.is_err() {
        pending::<()>().await;
    }
}
