//! `kubectl mirror status`: the Mirrors and ClusterMirrors, aggregated from the MirrorNodes of all nodes.
//!
//! [`rows`] is pure: objects in, rows out. A report that is too old is ignored, as in the controller ([`is_current`]).
//! The user needs the right to list MirrorNodes, which are cluster-scoped.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Api, ResourceExt as _, api::ListParams, core::NamespaceResourceScope};
use mirror_api::{ClusterMirror, Mirror, MirrorNode, MirrorSpec, MirrorSummary, sum::is_current};
use serde::Serialize;
use tokio::time::sleep;

use crate::{
    cli::{Output, StatusArgs},
    cluster::Cluster,
    print,
    screen::Screen,
};

/// The interval of `--watch`.
const PACE: Duration = Duration::from_secs(2);

/// Prints the rows, once or repeatedly until Ctrl-C.
pub(crate) async fn status(args: StatusArgs, cluster: &Cluster) -> anyhow::Result<()> {
    if !args.watch {
        return print(&look(&args, cluster).await?);
    }
    tokio::select! {
        outcome = watch(&args, cluster) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn watch(args: &StatusArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let mut screen = Screen::new(match args.output {
        Output::Yaml => "---\n",
        Output::Table | Output::Wide | Output::Json => "\n",
    });
    loop {
        screen.show(&look(args, cluster).await?)?;
        sleep(PACE).await;
    }
}

/// Returns the present rows, in the requested format.
async fn look(args: &StatusArgs, cluster: &Cluster) -> anyhow::Result<String> {
    let rows = read(args, cluster).await?;
    Ok(match args.output {
        Output::Table => table(&rows, false),
        Output::Wide => table(&rows, true),
        Output::Json => serde_json::to_string_pretty(&rows).context("cannot write JSON")? + "\n",
        Output::Yaml => serde_saphyr::to_string(&rows).context("cannot write YAML")?,
    })
}

async fn read(args: &StatusArgs, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    let Cluster { client, namespace, .. } = cluster;
    let all = ListParams::default();
    let mirrors: Api<Mirror> = match args.all_namespaces {
        true => Api::all(client.clone()),
        false => namespaced(cluster),
    };
    let mirrors = mirrors.list(&all).await.with_context(|| match args.all_namespaces {
        true => "cannot list the Mirrors of all namespaces".to_owned(),
        false => format!("cannot list the Mirrors of namespace {namespace}"),
    })?;
    let of_cluster = match args.all_namespaces {
        true => {
            Api::<ClusterMirror>::all(client.clone())
                .list(&all)
                .await
                .context("cannot list the ClusterMirrors")?
                .items
        }
        false => Vec::new(),
    };
    let nodes = Api::<MirrorNode>::all(client.clone()).list(&all).await;
    let nodes = nodes.context("cannot list the MirrorNodes, which contain the nodes' reports")?;
    Ok(rows(&mirrors.items, &of_cluster, &nodes.items, Timestamp::now()))
}

fn namespaced<K>(cluster: &Cluster) -> Api<K>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(cluster.client.clone(), &cluster.namespace)
}

/// A Mirror or ClusterMirror, aggregated over the nodes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    name: String,
    /// The target of the copies; `stream` for a Mirror with a stream.
    target: String,
    /// Number of selected pods, on all nodes.
    selected: i64,
    /// Number of selected pods that are mirrored as requested.
    covered: i64,
    /// Copied packets, since the present mirrors began.
    copied: i64,
    /// Packets that should have been copied and were not.
    lost: i64,
    /// NICs on which one of its limits has ended it.
    ended: i64,
    /// The reason for a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// The nodes with selected pods.
    nodes: Vec<String>,
    /// Nodes whose reports are ignored, because they are too old or from the future.
    stale_nodes: Vec<String>,
    /// Selected pods that are not covered, with the node and the reason.
    not_covered: Vec<String>,
    /// The number of further pods that are not covered.
    more_not_covered: i64,
}

impl Row {
    fn new(kind: &'static str, namespace: Option<String>, name: String, spec: &MirrorSpec) -> Self {
        let target = match (&spec.stream, &spec.target_ref) {
            (Some(_), _) => "stream".to_owned(),
            (None, Some(target)) => target.name.clone(),
            (None, None) => String::new(),
        };
        Self { kind, namespace, name, target, ..Self::default() }
    }

    /// Adds a node's report.
    fn add(&mut self, node: &str, of: &MirrorSummary) {
        self.selected += of.pods.selected;
        self.covered += of.pods.covered;
        self.copied += of.packets.copied;
        self.lost += of.packets.lost;
        self.ended += of.ended;
        self.nodes.push(node.to_owned());
        if let Some(refused) = &of.refused {
            self.refused = Some(format!("{}: {}", refused.reason, refused.message));
        }
        self.not_covered.extend(of.not_covered.iter().map(|of| {
            let nic = of.nic.as_ref().map_or_else(String::new, |nic| format!(" {nic}"));
            format!("{}/{}{nic} on {node}: {}: {}", of.namespace, of.pod, of.reason, of.message)
        }));
        self.more_not_covered += of.more_not_covered.unwrap_or(0);
    }
}

/// Returns the rows, ordered by kind, namespace and name. Reports on objects that no longer exist are left out.
fn rows(mirrors: &[Mirror], of_cluster: &[ClusterMirror], nodes: &[MirrorNode], now: Timestamp) -> Vec<Row> {
    let mut rows = BTreeMap::new();
    for mirror in of_cluster {
        let row = Row::new("ClusterMirror", None, mirror.name_any(), &mirror.spec.mirror);
        rows.insert((row.kind, None, row.name.clone(), mirror.uid().unwrap_or_default()), row);
    }
    for mirror in mirrors {
        let row = Row::new("Mirror", mirror.namespace(), mirror.name_any(), &mirror.spec);
        rows.insert(
            (row.kind, row.namespace.clone(), row.name.clone(), mirror.uid().unwrap_or_default()),
            row,
        );
    }
    for node in nodes {
        let name = node.name_any();
        let Some(status) = &node.status else { continue };
        let counts = is_current(status.reported.as_ref().map(|Time(at)| *at), now);
        for of in &status.mirrors {
            let kind = if of.namespace.is_some() { "Mirror" } else { "ClusterMirror" };
            match rows.get_mut(&(kind, of.namespace.clone(), of.name.clone(), of.uid.clone())) {
                Some(row) if counts => row.add(&name, of),
                Some(row) => row.stale_nodes.push(name.clone()),
                None => {}
            }
        }
    }
    rows.into_values().collect()
}

/// Formats the rows as a table for people; `is_wide`: with the nodes, and each pod that is not covered.
fn table(rows: &[Row], is_wide: bool) -> String {
    if rows.is_empty() {
        return "no Mirrors\n".to_owned();
    }
    let head = ["KIND", "NAMESPACE", "NAME", "TARGET", "PODS", "COVERED", "COPIED", "LOST", "ENDED", "NODES"];
    let mut lines = vec![head.map(str::to_owned)];
    for row in rows {
        let dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        let nodes = if is_wide { row.nodes.join(",") } else { row.nodes.len().to_string() };
        lines.push([
            row.kind.to_owned(),
            dash(row.namespace.as_deref().unwrap_or_default()),
            row.name.clone(),
            dash(&row.target),
            row.selected.to_string(),
            row.covered.to_string(),
            row.copied.to_string(),
            row.lost.to_string(),
            row.ended.to_string(),
            dash(&nodes),
        ]);
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths = std::array::from_fn::<_, 10, _>(width);
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += cells.join("  ").trim_end();
        text += "\n";
    }
    for row in rows {
        let subject = match &row.namespace {
            Some(namespace) => format!("{} {namespace}/{}", row.kind, row.name),
            None => format!("{} {}", row.kind, row.name),
        };
        text.extend(row.refused.iter().map(|why| format!("{subject} is refused: {why}\n")));
        if let Some(first) = row.stale_nodes.first() {
            let nodes = match row.stale_nodes.len() {
                1 => format!("node {first}"),
                _ if is_wide => format!("the nodes {}", row.stale_nodes.join(", ")),
                count => format!("{count} nodes, as {first}"),
            };
            text += &format!("{subject}: no report that counts from {nodes} (too old, or from the future)\n");
        }
        if is_wide {
            text.extend(row.not_covered.iter().map(|why| format!("{subject} does not cover {why}\n")));
            if row.more_not_covered > 0 {
                text += &format!("{subject} does not cover {} more\n", row.more_not_covered);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{from_value, json};

    use super::*;

    fn objects() -> (Vec<Mirror>, Vec<ClusterMirror>, Vec<MirrorNode>) {
        let mirror = |name: &str, spec: serde_json::Value| -> Mirror {
            let metadata = json!({ "namespace": "shop", "name": name, "uid": format!("uid-{name}") });
            from_value(json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": metadata, "spec": spec,
            }))
            .unwrap()
        };
        let node = |name: &str, reported: &str, mirrors: serde_json::Value| -> MirrorNode {
            let status = json!({
                "reported": reported,
                "mirrorCount": 1, "refusedCount": 0, "pods": { "selected": 0, "covered": 0 }, "mirrors": mirrors,
            });
            from_value(json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": name },
                "status": status,
            }))
            .unwrap()
        };
        let of = |name: &str, uid: &str, selected: i64, covered: i64, why: &[&str]| {
            let not_covered: Vec<_> = why
                .iter()
                .map(|pod| json!({ "namespace": "shop", "pod": pod, "reason": "NoNic", "message": "it has no NIC" }))
                .collect();
            json!({
                "kind": "Mirror", "namespace": "shop", "name": name, "uid": uid, "observedGeneration": 1,
                "pods": { "selected": selected, "covered": covered }, "packets": { "copied": 100, "lost": 1 },
                "ended": 0, "notCovered": not_covered,
            })
        };
        let mirrors = vec![
            mirror("checkout", json!({ "podSelector": {}, "targetRef": { "name": "ids" } })),
            mirror("tail-1", json!({ "podSelector": {}, "stream": { "keySha256": "0".repeat(64) } })),
        ];
        let nodes = vec![
            node("a", "2026-01-01T11:50:00Z", json!([of("checkout", "uid-checkout", 3, 3, &[])])),
            node(
                "b",
                "2026-01-01T11:59:00Z",
                json!([
                    of("checkout", "uid-checkout", 2, 1, &["web"]),
                    of("checkout", "an-earlier-one", 9, 9, &[])
                ]),
            ),
        ];
        (mirrors, Vec::new(), nodes)
    }

    const NOW: &str = "2026-01-01T11:59:30Z";

    #[test]
    fn a_row_sums_up_what_all_nodes_say_about_the_present_object() {
        let (mirrors, of_cluster, nodes) = objects();
        let rows = rows(&mirrors, &of_cluster, &nodes, NOW.parse().unwrap());
        assert_eq!(
            table(&rows, false),
            "KIND    NAMESPACE  NAME      TARGET  PODS  COVERED  COPIED  LOST  ENDED  NODES\n\
             Mirror  shop       checkout  ids     5     4        200     2     0      2\n\
             Mirror  shop       tail-1    stream  0     0        0       0     0      0\n"
        );
        let wide = table(&rows, true);
        assert!(
            wide.contains("Mirror shop/checkout does not cover shop/web on b: NoNic: it has no NIC\n"),
            "{wide}"
        );
        assert!(wide.contains("  a,b\n"), "{wide}");
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((&json[0]["covered"], &json[0]["nodes"]), (&json!(4), &json!(["a", "b"])));
        assert_eq!(table(&[], false), "no Mirrors\n");
    }

    /// The node has no agent any more, or podmirror was uninstalled.
    #[test]
    fn a_report_that_is_too_old_does_not_count_and_is_told() {
        let (mirrors, of_cluster, nodes) = objects();
        let at = |now: &str| table(&rows(&mirrors[..1], &of_cluster, &nodes, now.parse().unwrap()), false);
        assert_eq!(
            at("2026-01-01T12:10:00Z"),
            "KIND    NAMESPACE  NAME      TARGET  PODS  COVERED  COPIED  LOST  ENDED  NODES\n\
             Mirror  shop       checkout  ids     2     1        100     1     0      1\n\
             Mirror shop/checkout: no report that counts from node a (too old, or from the future)\n"
        );
        assert_eq!(
            at("2026-01-01T16:30:00Z"),
            "KIND    NAMESPACE  NAME      TARGET  PODS  COVERED  COPIED  LOST  ENDED  NODES\n\
             Mirror  shop       checkout  ids     0     0        0       0     0      0\n\
             Mirror shop/checkout: no report that counts from 2 nodes, as a (too old, or from the future)\n"
        );
    }
}
