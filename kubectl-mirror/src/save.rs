//! `kubectl mirror save`: the newest packets of pods, from the recorders of the nodes, as one pcapng.
//!
//! ```text
//! pods: whose packets, from which nodes ─► recorders: the recorder of each node
//!                                               │ exec: `mirror-agent save`, a temporary file for each node
//!                                               ▼
//!                                             whole (by time) ─► output: the file, or standard output
//! ```
//!
//! This module is the way from one to the next. Each file is read to its end before anything is written, so a node that fails
//! is told first, and costs no packet of the others. The packets are on the disk meanwhile, and not in memory: the recorders
//! of all nodes can have more than a laptop.

mod output;
mod pods;
mod recorders;
mod whole;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufWriter, IsTerminal as _, Seek as _},
    path::Path,
    time::SystemTime,
};

use anyhow::{Context as _, bail};
use futures_util::{StreamExt as _, stream};
use kube::api::ListParams;
use mirror_core::status::printable;

use self::{
    output::Output,
    pods::Pods,
    recorders::{CONTAINER, Recorder, Recorders},
    whole::Saved,
};
use crate::{
    agents::{self, AGENTS},
    cli::SaveArgs,
    cluster::{Cluster, lacks_right},
    exec,
    nodes::{AT_A_TIME, with_right},
    stop_signals, tell,
};

/// Most lines about pods.
const MOST_LINES: usize = 40;

/// Asks the recorders, and writes what they have.
pub(crate) async fn save(args: SaveArgs, cluster: &Cluster) -> anyhow::Result<()> {
    if args.write == Path::new("-") && io::stdout().is_terminal() {
        bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | tcpdump -nr -`");
    }
    // Then a file that is not whole goes, too.
    let mut stop = stop_signals()?;
    tokio::select! {
        outcome = ask_and_write(&args, cluster) => outcome,
        _ = stop.recv() => bail!("stopped, and no file was written"),
    }
}

async fn ask_and_write(args: &SaveArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let (output, whole) = output::at(&args.write)?;
    let pods = Pods::find(args, cluster).await?;
    let recorders = find(cluster).await.map_err(|error| with_right(error, cluster))?;
    let asked = pods.by_node(recorders.keys());
    if asked.is_empty() {
        bail!("none of these pods is on a node");
    }
    let (files, targets) = ask(&asked, &recorders, cluster).await?;
    if files.is_empty() {
        bail!(
            "nothing is recorded of {}; a recorder has what mirrors copy to its target ({}), as long as it has room for it",
            what(&pods, cluster),
            Vec::from_iter(targets).join(", ")
        );
    }
    let nodes = files.len();
    let Some(saved) = write(files, output).await? else { return Ok(()) };
    whole.put()?;
    for line in lines(&saved, &pods, nodes, cluster) {
        tell(&printable(&line));
    }
    Ok(())
}

/// The recorders of the cluster.
async fn find(cluster: &Cluster) -> anyhow::Result<Recorders> {
    let namespace = &cluster.agents;
    let pods = cluster.agent_pods().list(&ListParams::default().labels(AGENTS)).await;
    let pods = pods.with_context(|| format!("cannot list the agents in namespace {namespace}"))?.items;
    if pods.is_empty() {
        bail!("there is no agent of podmirror in namespace {namespace}; --agents names another one");
    }
    Ok(recorders::by_node(&pods))
}

/// The file of each node that has packets; and what the recorders record.
type Answered = (Vec<(String, File)>, BTreeSet<String>);

/// Asks the nodes, and tells which of them have nothing to say.
///
/// # Errors
///
/// No node has answered, or the user lacks the right to ask.
async fn ask(
    asked: &BTreeMap<String, BTreeSet<&str>>,
    recorders: &Recorders,
    cluster: &Cluster,
) -> anyhow::Result<Answered> {
    let mut silent = BTreeMap::<_, Vec<_>>::new();
    let mut there = Vec::new();
    for (node, pods) in asked {
        match recorders.get(node) {
            Some(Ok(recorder)) => there.push((node, recorder, pods)),
            Some(Err(why)) => silent.entry(why.clone()).or_default().push(node),
            None => silent.entry(agents::missing(&cluster.agents)).or_default().push(node),
        }
    }
    let targets = there.iter().map(|(_, recorder, _)| recorder.target.clone()).collect();
    let answers = stream::iter(there)
        .map(|(node, recorder, pods)| async move { (node, ask_one(node, recorder, pods, cluster).await) });
    let answers: Vec<_> = answers.buffered(AT_A_TIME).collect().await;
    let (mut files, mut has_answered) = (Vec::new(), false);
    for (node, answer) in answers {
        match answer {
            Ok(file) => {
                has_answered = true;
                files.extend(file.map(|file| (node.clone(), file)));
            }
            Err(error) if lacks_right(&error) => return Err(with_right(error, cluster)),
            Err(error) => silent.entry(format!("{error:#}")).or_default().push(node),
        }
    }
    for (why, nodes) in silent {
        let nodes = few(nodes.into_iter().cloned().collect());
        tell(&format!("nothing of node {}: {}", nodes.join(", "), printable(&why)));
    }
    if !has_answered {
        bail!(
            "no recorder has answered; where there is none, recorder.enabled of the chart switches it on, for the packets \
             from then on"
        );
    }
    Ok((files, targets))
}

/// The packets of one node, in a temporary file that has no name. `None`: it has none.
async fn ask_one(
    node: &str,
    recorder: &Recorder,
    pods: &BTreeSet<&str>,
    cluster: &Cluster,
) -> anyhow::Result<Option<File>> {
    let mut file = tempfile::tempfile().context("cannot make a temporary file")?;
    let pods: Vec<_> = pods.iter().map(|pod| format!("--pod={}/{pod}", cluster.namespace)).collect();
    let words =
        ["--log-format=text", "--log=warn", "save"].into_iter().chain(pods.iter().map(String::as_str));
    let words: Vec<_> = words.collect();
    let place = (recorder.pod.as_str(), CONTAINER);
    let ended = exec::pass_on(&cluster.agent_pods(), place, &words, &mut file).await?;
    if ended.code != 0 {
        bail!("{}", String::from_utf8_lossy(&ended.stderr).trim());
    }
    file.rewind()?;
    let packets = whole::count(node, &file)?;
    file.rewind()?;
    Ok((packets > 0).then_some(file))
}

/// Writes the file. In a thread of its own, because the reader of a pipe can take its time. `None`: that reader has seen
/// enough, as in `| head`.
async fn write(files: Vec<(String, File)>, output: Output) -> anyhow::Result<Option<Saved>> {
    let now_ns = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let now_ns = u64::try_from(now_ns).unwrap_or(u64::MAX);
    let merge = move || whole::merge(files, now_ns, &mut BufWriter::new(output.open()?));
    match tokio::task::spawn_blocking(merge).await.context("the thread that writes")? {
        Err(error) if is_broken_pipe(&error) => Ok(None),
        merged => merged.map(Some).context("cannot write the packets"),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// The summary.
fn lines(saved: &Saved, pods: &Pods, nodes: usize, cluster: &Cluster) -> Vec<String> {
    let Saved { pods: saved, counted } = saved;
    let packets = saved.values().sum();
    let names: BTreeSet<_> = saved.keys().map(|(pod, _)| pod.as_str()).collect();
    let missing = pods.names().map(|pod| format!("{}/{pod}", cluster.namespace));
    let missing = missing.filter(|pod| !names.contains(pod.as_str()));
    let missing = missing.map(|pod| format!("{pod}: nothing is recorded")).collect();
    let saved = saved.iter().map(|((pod, node), packets)| format!("{pod} on node {node}: {packets} packets"));
    [few(saved.collect()), few(missing), counted.lines(packets, nodes)].concat()
}

/// What was asked for, for a sentence.
fn what(pods: &Pods, cluster: &Cluster) -> String {
    let names = few(pods.names().map(|pod| format!("{}/{pod}", cluster.namespace)).collect());
    match names.is_empty() {
        true => format!("namespace {}", cluster.namespace),
        false => names.join(", "),
    }
}

/// The first ones of many lines.
fn few(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(MOST_LINES);
    lines.truncate(MOST_LINES);
    lines.extend((more > 0).then(|| format!("and {more} more")));
    lines
}
