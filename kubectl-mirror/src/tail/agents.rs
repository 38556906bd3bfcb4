//! The connections to the agents: one for each node, by the API server's port-forward.
//!
//! A connection that ends is opened again until the user stops the command, because an agent can be restarted or
//! upgraded meanwhile. Each problem is printed once. Only a missing right of the user ends the command. For the packets
//! of the past alone there is one connection to each node.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::core::v1::Pod;
use mirror_capture::merge::StreamId;
use mirror_core::settings::show_kubernetes_duration;
use serde_json::json;
use tokio::{
    io::{
        AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, split,
    },
    sync::{mpsc, watch},
    time::{sleep, timeout},
};

use super::request::Request;
use crate::{
    agents,
    cli::TailArgs,
    cluster::{Cluster, lacks_right},
    tell,
};

/// Delay before a failed or closed connection is opened again.
const AGAIN: Duration = Duration::from_secs(1);
/// Timeout for an agent's answer. The agent itself waits up to 5 s for a Mirror that it does not know yet.
const ANSWER: Duration = Duration::from_secs(15);
/// Maximum length of an answer in bytes.
const MOST_ANSWER: u64 = 1024;
/// Maximum length of a part of a stream in bytes.
const PART: usize = 64 << 10;

/// The difference between the numbers of two streams of a node.
const NEXT: StreamId = 1 << 32;

/// An event of a stream. Each connection is a separate stream.
pub(super) type News = (StreamId, What);

/// The kinds of events of a stream.
pub(super) enum What {
    /// The agent of this node begins to send.
    Began(String),
    Bytes(Vec<u8>),
    Ended,
}

/// The data shared by all connections.
#[derive(Clone)]
pub(super) struct Link {
    cluster: Cluster,
    port: u16,
    /// The request line for an agent: of the first connection to a node, and of later ones.
    requests: [Arc<str>; 2],
    pub(super) no_follow: bool,
    news: mpsc::Sender<News>,
    ending: watch::Receiver<bool>,
}

impl Link {
    /// `news` receives the events; the connections end when `ending` becomes true.
    pub(super) fn new(
        args: &TailArgs,
        cluster: &Cluster,
        request: &Request,
        news: mpsc::Sender<News>,
        ending: watch::Receiver<bool>,
    ) -> Self {
        let Request { mirror, key, .. } = request;
        let mut request = json!({ "mirror": mirror, "key": key, "super_frames": args.super_frames });
        let later = format!("{request}\n").into();
        if let Some(since) = args.since {
            request["since"] = show_kubernetes_duration(since).into();
            request["no_follow"] = args.no_follow.into();
        }
        Self {
            cluster: cluster.clone(),
            port: args.stream_port,
            requests: [format!("{request}\n").into(), later],
            no_follow: args.no_follow,
            news,
            ending,
        }
    }

    /// Reads the streams of a node until the user stops the command; the first has the number `id`. For the past alone,
    /// reads this one, and returns its number if that failed.
    ///
    /// # Errors
    ///
    /// The user lacks a required right.
    pub(super) async fn read(mut self, node: String, id: StreamId) -> anyhow::Result<Option<StreamId>> {
        let (mut told, mut stream) = (None, id);
        while !*self.ending.borrow() {
            let why = match self.read_once(&node, stream, &mut told).await {
                Ok(()) if self.no_follow || *self.ending.borrow() => return Ok(None),
                Ok(()) => anyhow!("the agent ended the stream; see its log"),
                Err(why) if lacks_right(&why) => return Err(why),
                Err(why) => why,
            };
            let why = format!("node {node}: {}", mirror_client::in_words(why.as_ref()));
            if self.no_follow {
                tell(&why);
                return Ok(Some(id));
            }
            let why = format!("{why}; retrying");
            if told.as_ref() != Some(&why) {
                tell(&why);
                told = Some(why);
            }
            stream += NEXT;
            tokio::select! {
                () = is_wanted(&mut self.ending) => {}
                () = sleep(AGAIN) => {}
            }
        }
        Ok(None)
    }

    /// Opens and reads one connection. `told` is the last message that was printed.
    async fn read_once(
        &mut self,
        node: &str,
        stream: StreamId,
        told: &mut Option<String>,
    ) -> anyhow::Result<()> {
        let connected = async {
            let agent = agents::of_node(&self.cluster, node).await?;
            let forwarded = self.cluster.of_agents::<Pod>().portforward(&agent, &[self.port]).await;
            let mut forwarded = forwarded.with_context(|| {
                format!("cannot reach the agent {}/{agent} through a port-forward", self.cluster.agents)
            })?;
            let error = forwarded.take_error(self.port);
            let stream = forwarded.take_stream(self.port).context("the port-forward has no stream")?;
            match self.ask(stream).await {
                Ok(connected) => Ok((forwarded, connected)),
                // The API server reports the reason if no program listens at the port.
                Err(why) => match timeout(AGAIN, async { error?.await }).await {
                    Ok(Some(error)) => Err(anyhow!(
                        "the agent serves no streams at port {} ({}); check its --stream-listen",
                        self.port,
                        error.trim()
                    )),
                    _ => Err(why),
                },
            }
        };
        let mut ending = self.ending.clone();
        let (forwarded, (mut from, mut to)) = tokio::select! {
            connected = connected => connected?,
            () = is_wanted(&mut ending) => return Ok(()),
        };
        *told = None;
        self.send(stream, What::Began(node.to_owned())).await?;
        let outcome = self.pass_on(stream, &mut from, &mut to).await;
        self.send(stream, What::Ended).await?;
        drop((from, to));
        forwarded.abort();
        outcome
    }

    /// Sends the request with the key, and reads the answer.
    async fn ask<S: AsyncRead + AsyncWrite>(
        &self,
        stream: S,
    ) -> anyhow::Result<(impl AsyncRead + Unpin + use<S>, impl AsyncWrite + Unpin + use<S>)> {
        let (from, mut to) = split(stream);
        let mut from = BufReader::with_capacity(PART, from);
        let asked = async {
            to.write_all(self.requests[0].as_bytes()).await?;
            to.flush().await?;
            let mut line = String::new();
            (&mut from).take(MOST_ANSWER).read_line(&mut line).await?;
            anyhow::Ok(line)
        };
        let answer = timeout(ANSWER, asked).await.context("the agent does not answer")??;
        match answer.trim_end() {
            "ok" => Ok((from, to)),
            "" => bail!("the agent does not know the Mirror of this command yet, or it was deleted"),
            refusal => bail!("{refusal}"),
        }
    }

    /// Forwards the bytes until the end of the stream. Requests that end when the user stops the command.
    async fn pass_on(
        &mut self,
        stream: StreamId,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> anyhow::Result<()> {
        let (mut is_asked, mut ending) = (false, self.ending.clone());
        loop {
            let mut part = Vec::with_capacity(PART);
            tokio::select! {
                read = from.read_buf(&mut part) => match read.context("the connection")? {
                    0 => return Ok(()),
                    _ => {
                        // The past has begun, and later connections go on after it.
                        self.requests[0] = Arc::clone(&self.requests[1]);
                        self.send(stream, What::Bytes(part)).await?;
                    }
                },
                () = is_wanted(&mut ending), if !is_asked => {
                    is_asked = true;
                    to.write_all(b".").await.context("the connection")?;
                    to.flush().await.context("the connection")?;
                }
            }
        }
    }

    async fn send(&self, stream: StreamId, what: What) -> anyhow::Result<()> {
        self.news.send((stream, what)).await.map_err(|_| anyhow!("nobody reads any more"))
    }
}

/// Returns when the user stops the command. Cancel safe.
async fn is_wanted(ending: &mut watch::Receiver<bool>) {
    // If the sender was dropped, the whole command has ended.
    let _ = ending.wait_for(|ending| *ending).await;
}
