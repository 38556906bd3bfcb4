//! Asks the recorders of the nodes, by `mirror-agent save` in their containers, some of them at a time.
//!
//! A node that does not answer is told, and costs no packet of the others. But if this machine cannot keep what comes, that is
//! the end: the next node would fare no better, and what has come already is not all there is.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Seek as _,
};

use anyhow::{Context as _, anyhow};
use futures_util::{Stream, StreamExt as _, stream};
use mirror_core::status::printable;

use super::{
    few,
    kept::{Failure, Place},
    recorders::{CONTAINER, Lack, Recorder, Recorders},
    whole,
};
use crate::{
    agents,
    cluster::{Cluster, lacks_right},
    exec::{self, Ended, Stopped},
    nodes::{AT_A_TIME, with_right},
    tell,
};

/// How the message of `mirror-agent save` begins where no recorder has a socket.
const NO_SOCKET: &str = "mirror-agent: no recorder of target ";

/// What the nodes have answered.
#[derive(Debug)]
pub(super) struct Answers<F = File> {
    /// The file of each node that has packets.
    pub(super) files: Vec<(String, F)>,
    /// How many nodes have answered, with packets or without.
    answered: usize,
    /// Those that have not, by the reason.
    silent: BTreeMap<String, Vec<String>>,
    /// How many of these have a recorder, so packets of them are missing.
    missing: usize,
}

impl<F> Default for Answers<F> {
    fn default() -> Self {
        Self { files: Vec::new(), answered: 0, silent: BTreeMap::new(), missing: 0 }
    }
}

/// Asks the nodes, and tells which of them have nothing to say. Also says what the recorders record.
///
/// # Errors
///
/// No node has answered, the user lacks the right to ask, or this machine cannot keep the packets.
pub(super) async fn ask(
    asked: &BTreeMap<String, BTreeSet<&str>>,
    recorders: &Recorders,
    place: &Place,
    cluster: &Cluster,
) -> anyhow::Result<(Answers, BTreeSet<String>)> {
    let (mut answers, mut there) = (Answers::default(), Vec::new());
    for (node, pods) in asked {
        match recorders.get(node) {
            Some(Ok(recorder)) => there.push((node.clone(), recorder, pods)),
            Some(Err(lack)) => answers.lacks(node, lack),
            None => answers.lacks(node, &Lack::NoRecorder(agents::missing(&cluster.agents))),
        }
    }
    let targets = there.iter().map(|(_, recorder, _)| recorder.target.clone()).collect();
    let asking = stream::iter(there).map(|(node, recorder, pods)| async move {
        let answer = ask_one(&node, recorder, pods, place, cluster).await;
        (node, answer)
    });
    let all = answers.take_all(asking.buffered(AT_A_TIME)).await;
    all.map_err(|error| with_right(error, cluster))?;
    for (why, nodes) in &answers.silent {
        tell(&format!("nothing of node {}: {}", few(nodes.clone()).join(", "), printable(why)));
    }
    answers.are_some().map(|()| (answers, targets))
}

impl<F> Answers<F> {
    /// A node cannot be asked.
    fn lacks(&mut self, node: &str, lack: &Lack) {
        let (Lack::NoRecorder(why) | Lack::Silent(why)) = lack;
        self.missing += usize::from(matches!(lack, Lack::Silent(_)));
        self.silent.entry(why.clone()).or_default().push(node.to_owned());
    }

    /// Takes the answers as they come. If this fails, the other nodes are asked no more.
    async fn take_all(
        &mut self,
        answers: impl Stream<Item = (String, Result<Option<F>, Failure>)>,
    ) -> anyhow::Result<()> {
        tokio::pin!(answers);
        while let Some((node, answer)) = answers.next().await {
            match answer {
                Ok(file) => {
                    self.answered += 1;
                    self.files.extend(file.map(|file| (node, file)));
                }
                Err(Failure::Here(error)) => return Err(error),
                Err(Failure::There(error)) if lacks_right(&error) => return Err(error),
                Err(Failure::There(error)) => {
                    self.lacks(&node, &Lack::Silent(mirror_client::in_words(error.as_ref())))
                }
            }
        }
        Ok(())
    }

    /// An error if no node has answered.
    fn are_some(&self) -> anyhow::Result<()> {
        let silent: usize = self.silent.values().map(Vec::len).sum();
        match (self.answered, silent > self.missing) {
            (1.., _) => Ok(()),
            (0, false) => Err(anyhow!("no recorder has answered")),
            (0, true) => Err(anyhow!(
                "no recorder has answered; where there is none, recorder.enabled of the chart switches it on, for the \
                 packets from then on"
            )),
        }
    }

    /// A sentence, if the packets of nodes with a recorder are missing.
    pub(super) fn missing(&self) -> Option<String> {
        let Self { missing, answered, .. } = self;
        (*missing > 0).then(|| format!("{missing} of {} nodes are missing", missing + answered))
    }
}

/// The packets of one node, in a temporary file. `None`: it has none.
async fn ask_one(
    node: &str,
    recorder: &Recorder,
    pods: &BTreeSet<&str>,
    place: &Place,
    cluster: &Cluster,
) -> Result<Option<File>, Failure> {
    let mut file = place.file()?;
    let pods: Vec<_> = pods.iter().map(|pod| format!("--pod={}/{pod}", cluster.namespace)).collect();
    let words =
        ["--log-format=text", "--log=warn", "save"].into_iter().chain(pods.iter().map(String::as_str));
    let words: Vec<_> = words.collect();
    let container = (recorder.pod.as_str(), CONTAINER);
    let ended = exec::pass_on(&cluster.agent_pods(), container, &words, &mut file).await;
    let ended = ended.map_err(|error| place.unkept(if_another_reads(error)))?;
    if ended.code != 0 {
        return Err(Failure::There(anyhow!(failed(&ended, &recorder.pod, &cluster.agents))));
    }
    // It can be long, and the other nodes go on meanwhile.
    let (node, beside) = (node.to_owned(), place.clone());
    let counted = tokio::task::spawn_blocking(move || {
        let packets = whole::count(&node, &mut file, &beside)?;
        file.rewind().map_err(|error| beside.failed(error))?;
        Ok((packets > 0).then_some(file))
    });
    counted.await.context("the thread that reads")?
}

/// A recorder answers one after the other.
fn if_another_reads(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(Stopped::Silent) => anyhow!("{error:#}; another `save` may be reading from it: try again"),
        _ => error,
    }
}

/// Why the command has failed in the container of a recorder, which runs.
fn failed(ended: &Ended, pod: &str, namespace: &str) -> String {
    let why = ended.why();
    let log = format!("kubectl -n {namespace} logs {pod} -c {CONTAINER}");
    match why.starts_with(NO_SOCKET) {
        true => format!("the recorder waits for its agent: `{log}`"),
        false => format!("{why} (`{log}`)"),
    }
}

#[cfg(test)]
mod tests;
