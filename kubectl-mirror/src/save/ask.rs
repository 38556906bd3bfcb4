//! Requests packets from the recorders of the nodes, by `mirror-agent save` in their containers, some nodes at a time.
//!
//! A node that does not answer is reported, and the packets of the others are kept. But if this machine cannot store
//! the packets, the command fails: the next node's would fail, too, and the ones received are incomplete.

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

/// The beginning of the message of `mirror-agent save` if there is no recorder's socket.
const NO_SOCKET: &str = "mirror-agent: no recorder of target ";

/// The answers of the nodes.
#[derive(Debug)]
pub(super) struct Answers<F = File> {
    /// The file of each node with packets.
    pub(super) files: Vec<(String, F)>,
    /// The number of nodes that answered, with packets or without.
    answered: usize,
    /// The nodes that did not answer, by the reason.
    silent: BTreeMap<String, Vec<String>>,
    /// The number of these nodes with a recorder, so that their packets are missing.
    missing: usize,
}

impl<F> Default for Answers<F> {
    fn default() -> Self {
        Self { files: Vec::new(), answered: 0, silent: BTreeMap::new(), missing: 0 }
    }
}

/// Requests the packets, and prints the reasons of the nodes that do not answer. Also returns the recorders' targets.
///
/// # Errors
///
/// No node has answered, the user lacks a right, or this machine cannot store the packets.
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
    /// Notes that a node cannot be asked.
    fn lacks(&mut self, node: &str, lack: &Lack) {
        let (Lack::NoRecorder(why) | Lack::Silent(why)) = lack;
        self.missing += usize::from(matches!(lack, Lack::Silent(_)));
        self.silent.entry(why.clone()).or_default().push(node.to_owned());
    }

    /// Collects the answers. After a failure, the remaining nodes are not asked.
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

    /// Returns an error if no node has answered.
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

/// Requests the packets of one node, as a temporary file. `None`: it has none.
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
    // The file can be long; the other nodes continue meanwhile.
    let (node, beside) = (node.to_owned(), place.clone());
    let counted = tokio::task::spawn_blocking(move || {
        let packets = whole::count(&node, &mut file, &beside)?;
        file.rewind().map_err(|error| beside.failed(error))?;
        Ok((packets > 0).then_some(file))
    });
    counted.await.context("the thread that reads")?
}

/// Explains a timeout: a recorder serves one client at a time.
fn if_another_reads(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(Stopped::Silent) => anyhow!("{error:#}; another `save` may be reading from it: try again"),
        _ => error,
    }
}

/// The reason why the command failed in the container of a running recorder.
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
