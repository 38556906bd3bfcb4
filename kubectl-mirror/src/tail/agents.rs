//! The connections to the agents: one to the agent of each node, by the API server's port-forward.
//!
//! A connection that ends is made again, until the user wants the end: an agent can be restarted or upgraded meanwhile.
//! What is wrong is told once. Only a right that the user lacks is an end of all.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::json;
use tokio::{
    io::{
        AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, split,
    },
    sync::{mpsc, watch},
    time::{sleep, timeout},
};

use super::{merge::StreamId, request::Request};
use crate::{
    agents,
    cli::TailArgs,
    cluster::{Cluster, lacks_right},
    tell,
};

/// The wait until a connection that could not be made, or has ended, is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long an agent may take to answer. It waits 5 s for a Mirror that it does not know yet.
const ANSWER: Duration = Duration::from_secs(15);
/// Most bytes of an answer.
const MOST_ANSWER: u64 = 1024;
/// Most bytes of a part of a stream.
const PART: usize = 64 << 10;

/// What has happened to a stream.
pub(super) struct News {
    /// The stream. Each connection is a stream of its own.
    pub(super) stream: StreamId,
    /// What.
    pub(super) what: What,
}

/// What can happen to a stream.
pub(super) enum What {
    /// The agent of a node sends.
    Began {
        /// The node.
        node: String,
    },
    /// Bytes of it have come.
    Bytes(Vec<u8>),
    /// No more come.
    Ended,
}

/// What all connections need.
#[derive(Clone)]
pub(super) struct Link {
    client: Client,
    agents: String,
    port: u16,
    /// The line that an agent is sent.
    request: Arc<str>,
    news: mpsc::Sender<News>,
    ending: watch::Receiver<bool>,
    streams: Arc<AtomicU64>,
}

/// Why a connection cannot be had.
enum Failure {
    /// It is tried again.
    Passing(anyhow::Error),
    /// It would be the same again.
    Final(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        match lacks_right(&error) {
            true => Self::Final(error),
            false => Self::Passing(error),
        }
    }
}

impl Link {
    /// `news` gets what comes; the connections end when `ending` becomes true.
    pub(super) fn new(
        args: &TailArgs,
        cluster: &Cluster,
        request: &Request,
        news: mpsc::Sender<News>,
        ending: watch::Receiver<bool>,
    ) -> Self {
        let Request { mirror, key, .. } = request;
        let request = json!({ "mirror": mirror, "key": key, "super_frames": args.super_frames });
        Self {
            client: cluster.client.clone(),
            agents: cluster.agents.clone(),
            port: args.stream_port,
            request: format!("{request}\n").into(),
            news,
            ending,
            streams: Arc::default(),
        }
    }

    /// Reads the stream of a node, until the user wants the end.
    ///
    /// # Errors
    ///
    /// The user lacks a right that this needs.
    pub(super) async fn read(mut self, node: String) -> anyhow::Result<()> {
        let mut told = None;
        while !*self.ending.borrow() {
            let why = match self.read_once(&node, &mut told).await {
                Ok(()) if *self.ending.borrow() => return Ok(()),
                Ok(()) => anyhow!("the agent has ended the stream, and its log says why"),
                Err(Failure::Passing(why)) => why,
                Err(Failure::Final(why)) => return Err(why),
            };
            let why = format!("node {node}: {}; it is tried again", mirror_client::in_words(why.as_ref()));
            if told.as_ref() != Some(&why) {
                tell(&why);
                told = Some(why);
            }
            tokio::select! {
                () = is_wanted(&mut self.ending) => {}
                () = sleep(AGAIN) => {}
            }
        }
        Ok(())
    }

    /// One connection. `told` is what the user was told last.
    async fn read_once(&mut self, node: &str, told: &mut Option<String>) -> Result<(), Failure> {
        let connected = async {
            let api = Api::<Pod>::namespaced(self.client.clone(), &self.agents);
            let agent = agents::of_node(&api, node, &self.agents).await?;
            let forwarded = api.portforward(&agent, &[self.port]).await;
            let mut forwarded = forwarded.with_context(|| {
                format!("cannot reach the agent {}/{agent} by a port-forward", self.agents)
            })?;
            let error = forwarded.take_error(self.port);
            let stream = forwarded.take_stream(self.port).context("the port-forward has no stream")?;
            match self.ask(stream).await {
                Ok(connected) => Ok((forwarded, connected)),
                // The API server tells why, where no program listens.
                Err(why) => match timeout(AGAIN, async { error?.await }).await {
                    Ok(Some(error)) => Err(anyhow!(
                        "no agent gives streams at port {} ({}); the agent may be older, or have --stream-listen ''",
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
        let stream = self.streams.fetch_add(1, Ordering::Relaxed);
        self.send(stream, What::Began { node: node.to_owned() }).await?;
        let outcome = self.pass_on(stream, &mut from, &mut to).await;
        self.send(stream, What::Ended).await?;
        drop((from, to));
        forwarded.abort();
        Ok(outcome?)
    }

    /// Sends the key, and reads the answer.
    async fn ask<S: AsyncRead + AsyncWrite>(
        &self,
        stream: S,
    ) -> anyhow::Result<(impl AsyncRead + Unpin + use<S>, impl AsyncWrite + Unpin + use<S>)> {
        let (from, mut to) = split(stream);
        let mut from = BufReader::with_capacity(PART, from);
        let asked = async {
            to.write_all(self.request.as_bytes()).await?;
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

    /// Hands on what comes, until the end of the stream. Asks for that end when the user wants it.
    async fn pass_on(
        &self,
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
                    _ => self.send(stream, What::Bytes(part)).await?,
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
        self.news.send(News { stream, what }).await.map_err(|_| anyhow!("nobody reads any more"))
    }
}

/// Returns when the user wants the end. Cancel safe.
async fn is_wanted(ending: &mut watch::Receiver<bool>) {
    // Without a sender, the whole command has ended.
    let _ = ending.wait_for(|ending| *ending).await;
}
