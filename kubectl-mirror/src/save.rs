//! `kubectl mirror save`: the newest packets of pods, from the recorders of the nodes, as one pcapng.
//!
//! ```text
//! pods: whose packets, from which nodes ─► recorders: the recorder of each node
//!                                               │ ask: `mirror-agent save` by exec, a temporary file for each node (kept)
//!                                               ▼
//!                                             whole (by time) ─► output: the file, or standard output
//! ```
//!
//! This module connects these steps. Each file is read to its end before anything is written, so a failed node is
//! reported first, and the packets of the other nodes are not lost. Meanwhile the packets are in temporary files, not
//! in memory: the recorders of all nodes can hold more than the memory of a laptop.

mod ask;
mod kept;
mod output;
mod pods;
pub(crate) mod recorders;
mod whole;

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufWriter, IsTerminal as _},
    path::Path,
    process::ExitCode,
    time::SystemTime,
};

use anyhow::{Context as _, bail};
use kube::api::ListParams;
use mirror_core::status::printable;

use self::{
    kept::Place,
    output::{Output, Whole},
    pods::Pods,
    recorders::Recorders,
    whole::Saved,
};
use crate::{agents::AGENTS, cli::SaveArgs, cluster::Cluster, nodes::with_right, stop_signals, tell};

/// Maximum number of lines about pods.
const MOST_LINES: usize = 40;
/// The message if nothing is recorded of a pod on its present node.
const ELSEWHERE: &str = "it can have been on another node before: --all-nodes asks them too";
/// The exit code if packets of a node are missing in the file. 1 means that there is no file, and 2 wrong usage.
const INCOMPLETE: u8 = 3;

/// Requests the packets of the recorders, and writes them.
pub(crate) async fn save(args: SaveArgs, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    if args.write == Path::new("-") && io::stdout().is_terminal() {
        bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | tcpdump -nr -`");
    }
    // On a signal, an incomplete file is removed, too.
    let mut stop = stop_signals()?;
    let to = output::at(&args.write)?;
    let left = match to.0.is_whole_or_nothing() {
        true => "no file was written",
        false => "what was written until now is not whole",
    };
    tokio::select! {
        outcome = ask_and_write(&args, to, cluster) => outcome,
        _ = stop.recv() => bail!("stopped, and {left}"),
    }
}

async fn ask_and_write(
    args: &SaveArgs,
    (output, whole, place): (Output, Whole, Place),
    cluster: &Cluster,
) -> anyhow::Result<ExitCode> {
    let pods = Pods::find(args, cluster).await?;
    let recorders = find(cluster).await.map_err(|error| with_right(error, cluster))?;
    let asked = pods.by_node(recorders.keys());
    if asked.is_empty() {
        bail!("none of these pods is on a node");
    }
    let (answers, targets) = ask::ask(&asked, &recorders, &place, cluster).await?;
    let missing = answers.missing();
    if answers.files.is_empty() {
        bail!(nothing(&pods, &cluster.namespace, &targets, missing.as_deref()));
    }
    let nodes = answers.files.len();
    let mut told = Vec::new();
    if let Some(saved) = write(answers.files, output).await? {
        whole.put()?;
        told = lines(&saved, &pods, nodes, &cluster.namespace);
    }
    for line in told.into_iter().chain(missing.clone()) {
        tell(&printable(&line));
    }
    Ok(missing.map_or(ExitCode::SUCCESS, |_| ExitCode::from(INCOMPLETE)))
}

/// Finds the recorders of the cluster.
async fn find(cluster: &Cluster) -> anyhow::Result<Recorders> {
    let namespace = &cluster.agents;
    let pods = cluster.agent_pods().list(&ListParams::default().labels(AGENTS)).await;
    let pods = pods.with_context(|| format!("cannot list the agents in namespace {namespace}"))?.items;
    if pods.is_empty() {
        bail!("there is no agent of podmirror in namespace {namespace}; --agents names another one");
    }
    Ok(recorders::by_node(&pods))
}

/// Writes the file. Runs in its own thread, because the reader of a pipe can be slow. `None`: that reader closed the
/// pipe early, as in `| head`.
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

/// The message if there is no file although nodes have answered. `missing` is about the nodes that have not.
fn nothing(pods: &Pods, namespace: &str, targets: &BTreeSet<String>, missing: Option<&str>) -> String {
    let names = few(pods.names().map(|pod| format!("{namespace}/{pod}")).collect());
    let names = if names.is_empty() { format!("namespace {namespace}") } else { names.join(", ") };
    let targets = Vec::from_iter(targets.iter().map(String::as_str)).join(", ");
    let elsewhere = pods.names().find_map(|pod| pods.only_node(pod)).map(|_| ELSEWHERE);
    let rules =
        format!("a recorder has what mirrors copy to its target ({targets}), as long as it has room for it");
    let sentences = [Some(rules.as_str()), elsewhere, missing].into_iter().flatten();
    format!("nothing is recorded of {names}; {}", Vec::from_iter(sentences).join("; "))
}

fn lines(saved: &Saved, pods: &Pods, nodes: usize, namespace: &str) -> Vec<String> {
    let Saved { pods: saved, counted } = saved;
    let packets = saved.values().sum();
    let names: BTreeSet<_> = saved.keys().map(|(pod, _)| pod.as_str()).collect();
    let missing = pods.names().map(|pod| (format!("{namespace}/{pod}"), pods.only_node(pod)));
    let missing = missing.filter(|(pod, _)| !names.contains(pod.as_str()));
    let missing = missing.map(|(pod, node)| match node {
        Some(node) => format!("{pod}: nothing is recorded on node {node}; {ELSEWHERE}"),
        None => format!("{pod}: nothing is recorded"),
    });
    let saved = saved.iter().map(|((pod, node), packets)| format!("{pod} on node {node}: {packets} packets"));
    [few(saved.collect()), few(missing.collect()), counted.lines(packets, nodes)].concat()
}

/// The first lines, and the number of the remaining ones.
fn few(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(MOST_LINES);
    lines.truncate(MOST_LINES);
    lines.extend((more > 0).then(|| format!("and {more} more")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(of: &[(&str, Option<&str>)]) -> Pods {
        let mut pods = Pods::default();
        of.iter().for_each(|(pod, node)| pods.add((*pod).to_owned(), node.map(str::to_owned), true));
        pods
    }

    #[test]
    fn a_pod_that_can_have_moved_is_told_of_the_other_nodes() {
        let targets = ["recorder".to_owned()].into();
        let gone = nothing(&pods(&[("web", None)]), "shop", &targets, None);
        assert!(gone.starts_with("nothing is recorded of shop/web; a recorder has what"), "{gone}");
        assert!(gone.ends_with("(recorder), as long as it has room for it"), "{gone}");
        let moved =
            nothing(&pods(&[("db-0", Some("a"))]), "shop", &targets, Some("1 of 2 nodes are missing"));
        assert!(moved.ends_with(&format!("; {ELSEWHERE}; 1 of 2 nodes are missing")), "{moved}");
        let all = nothing(&pods(&[]), "shop", &targets, None);
        assert!(
            all.starts_with("nothing is recorded of namespace shop; ") && !all.contains(ELSEWHERE),
            "{all}"
        );

        let saved = Saved { pods: [(("shop/web".to_owned(), "b".to_owned()), 7)].into(), ..Saved::default() };
        let told = lines(&saved, &pods(&[("web", None), ("db-0", Some("a")), ("old", None)]), 1, "shop");
        let expected = [
            "shop/web on node b: 7 packets".to_owned(),
            format!("shop/db-0: nothing is recorded on node a; {ELSEWHERE}"),
            "shop/old: nothing is recorded".to_owned(),
        ];
        assert_eq!(told[..3], expected);
    }
}
