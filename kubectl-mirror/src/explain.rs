//! `kubectl mirror explain`: whether and how a pod is mirrored, as the agent of its node reports (`explain --pod`).
//!
//! If the user lacks the right to exec into the agent's pod, or the agent does not answer, the command prints what the
//! API server knows: [`words`] formats that text.

mod words;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::ListParams;
use mirror_api::{ClusterMirror, Mirror, MirrorNode};

use self::words::Facts;
use crate::{
    agents,
    cli::ExplainArgs,
    cluster::{Cluster, lacks_right},
    exec::{self, Ended},
    print, tell,
};

/// Prints the agent's text and returns its exit code, or prints what the API server knows.
pub(crate) async fn explain(args: ExplainArgs, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let name = args.pod()?;
    let pod = cluster.own::<Pod>().get(&name).await?;
    let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else {
        print(&words::words(&facts(pod, cluster).await))?;
        return Ok(ExitCode::SUCCESS);
    };
    let why = match ask(&node, &name, cluster).await {
        Ok(Ended { stdout, stderr, code }) => {
            print(&String::from_utf8_lossy(&stdout))?;
            io::stderr().write_all(&stderr).context("cannot write to standard error")?;
            return Ok(code.into());
        }
        Err(why) => why,
    };
    let text = words::words(&facts(pod, cluster).await);
    if lacks_right(&why) {
        print(&format!("{text}\n{}\n", words::missing_right(&exec::right(&cluster.agents))))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&text)?;
    Err(why.context(format!("node {node}: the agent did not answer; showing data of the API server only")))
}

/// Runs `mirror-agent explain` on the node.
async fn ask(node: &str, pod: &str, cluster: &Cluster) -> anyhow::Result<Ended> {
    let agent = agents::of_node(cluster, node).await?;
    exec::run(cluster, &agent, &["explain", "--pod", &format!("{}/{pod}", cluster.namespace)]).await
}

/// Reads what the API server knows of a pod. What this user has no right to read is reported and left out.
async fn facts(pod: Pod, cluster: &Cluster) -> Facts {
    let all = ListParams::default();
    let mirrors = cluster.own::<Mirror>().list(&all).await;
    let of_cluster = cluster.all::<ClusterMirror>().list(&all).await;
    let own = cluster.all::<Namespace>().get_opt(&cluster.namespace).await;
    let node = match pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
        Some(node) => cluster.all::<MirrorNode>().get_opt(node).await,
        None => Ok(None),
    };
    Facts {
        pod,
        namespace: readable("the namespace, whose annotations and labels count too", own).flatten(),
        mirrors: readable("the Mirrors of the namespace", mirrors).map(|list| list.items).unwrap_or_default(),
        of_cluster: readable("the ClusterMirrors", of_cluster).map(|list| list.items).unwrap_or_default(),
        node: readable("the MirrorNode of its node", node).flatten(),
    }
}

fn readable<T>(what: &str, read: kube::Result<T>) -> Option<T> {
    read.map_err(|error| tell(&format!("cannot read {what}: {}", mirror_client::in_words(&error)))).ok()
}
