//! `kubectl mirror status`: the Mirrors and ClusterMirrors, aggregated from the MirrorNodes of all nodes.
//!
//! [`rows`] is pure: objects in, rows out. A report that is too old is ignored, as in the controller ([`is_current`]).
//! The conditions and the expiration time are those of the controller. The user needs the right to list MirrorNodes,
//! which are cluster-scoped.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Api, ResourceExt as _, api::ListParams, core::NamespaceResourceScope};
use mirror_api::{
    ClusterMirror, Mirror, MirrorNode, MirrorSpec, MirrorStatus, MirrorSummary,
    sum::{ENDED, READY, condition_of, is_current},
};
use mirror_core::status::columns;
use serde::Serialize;
use tokio::time::sleep;

use crate::{
    cli::{Output, StatusArgs},
    cluster::Cluster,
    print,
    screen::{Screen, age},
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
    let now = Timestamp::now();
    let rows = read(args, cluster, now).await?;
    Ok(match args.output {
        Output::Table => table(&rows, false, now),
        Output::Wide => table(&rows, true, now),
        Output::Json => serde_json::to_string_pretty(&rows).context("cannot write JSON")? + "\n",
        Output::Yaml => serde_saphyr::to_string(&rows).context("cannot write YAML")?,
    })
}

async fn read(args: &StatusArgs, cluster: &Cluster, now: Timestamp) -> anyhow::Result<Vec<Row>> {
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
    Ok(rows(&mirrors.items, &of_cluster, &nodes.items, now))
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
    /// The status and the reason of the condition `Ready`. `None`: the controller has not written a status.
    #[serde(skip_serializing_if = "Option::is_none")]
    ready: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
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
    /// Whether the condition `Ended` is True.
    #[serde(skip)]
    is_ended: bool,
    /// The time at which its duration ends it on its last NIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration_time: Option<Time>,
    /// The reason for a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// The nodes with selected pods.
    nodes: Vec<String>,
    /// Nodes whose reports are ignored, because they are too old or from the future.
    stale_nodes: Vec<String>,
    /// Selected pods that are not covered, with the node and the reason.
    uncovered: Vec<String>,
    /// The number of further reasons that the nodes do not list.
    more_uncovered: i64,
}

impl Row {
    fn new(
        kind: &'static str,
        namespace: Option<String>,
        name: String,
        spec: &MirrorSpec,
        status: Option<&MirrorStatus>,
    ) -> Self {
        let target = match (&spec.stream, &spec.target_ref) {
            (Some(_), _) => "stream".to_owned(),
            (None, Some(target)) => target.name.clone(),
            (None, None) => String::new(),
        };
        let condition = |type_| condition_of(status?, type_);
        let ready = condition(READY);
        Self {
            kind,
            namespace,
            name,
            ready: ready.map(|of| of.status.clone()),
            reason: ready.map(|of| of.reason.clone()),
            target,
            is_ended: condition(ENDED).is_some_and(|of| of.status == "True"),
            expiration_time: status.and_then(|status| status.expiration_time.clone()),
            ..Self::default()
        }
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
        self.uncovered.extend(of.uncovered.iter().map(|of| {
            let nic = of.nic.as_ref().map_or_else(String::new, |nic| format!(" {nic}"));
            format!("{}/{}{nic} on {node}: {}: {}", of.namespace, of.pod, of.reason, of.message)
        }));
        self.more_uncovered += of.more_uncovered.unwrap_or(0);
    }

    /// The time that is left, or that its limits have ended it.
    fn expires(&self, now: Timestamp) -> String {
        match &self.expiration_time {
            _ if self.is_ended => ENDED.to_owned(),
            Some(Time(at)) => age(at.duration_since(now).as_secs().try_into().unwrap_or(0)),
            None => String::new(),
        }
    }
}

/// Returns the rows, ordered by kind, namespace and name. Reports on objects that no longer exist are left out.
fn rows(mirrors: &[Mirror], of_cluster: &[ClusterMirror], nodes: &[MirrorNode], now: Timestamp) -> Vec<Row> {
    let mut rows = BTreeMap::new();
    for mirror in of_cluster {
        let (spec, status) = (&mirror.spec.mirror, mirror.status.as_ref());
        let row = Row::new("ClusterMirror", None, mirror.name_any(), spec, status);
        rows.insert((row.kind, None, row.name.clone(), mirror.uid().unwrap_or_default()), row);
    }
    for mirror in mirrors {
        let (spec, status) = (&mirror.spec, mirror.status.as_ref());
        let row = Row::new("Mirror", mirror.namespace(), mirror.name_any(), spec, status);
        rows.insert(
            (row.kind, row.namespace.clone(), row.name.clone(), mirror.uid().unwrap_or_default()),
            row,
        );
    }
    for node in nodes {
        let name = node.name_any();
        let Some(status) = &node.status else { continue };
        let counts = is_current(status.last_report_time.as_ref().map(|Time(at)| *at), now);
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
fn table(rows: &[Row], is_wide: bool, now: Timestamp) -> String {
    if rows.is_empty() {
        return "no Mirrors\n".to_owned();
    }
    let head = [
        "KIND",
        "NAMESPACE",
        "NAME",
        "READY",
        "REASON",
        "TARGET",
        "PODS",
        "COVERED",
        "COPIED",
        "LOST",
        "EXPIRES",
        "NODES",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let nodes = if is_wide { row.nodes.join(",") } else { row.nodes.len().to_string() };
        let line = [
            row.kind.to_owned(),
            row.namespace.clone().unwrap_or_default(),
            row.name.clone(),
            row.ready.clone().unwrap_or_default(),
            row.reason.clone().unwrap_or_default(),
            row.target.clone(),
            row.selected.to_string(),
            row.covered.to_string(),
            row.copied.to_string(),
            row.lost.to_string(),
            row.expires(now),
            nodes,
        ];
        let dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        lines.push(line.map(dash).to_vec());
    }
    let mut text = columns(&lines);
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
            text.extend(row.uncovered.iter().map(|why| format!("{subject} does not cover {why}\n")));
            if row.more_uncovered > 0 {
                text += &format!("{subject} does not cover {} more\n", row.more_uncovered);
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
        let condition = |type_: &str, status: &str, reason: &str| {
            json!({
                "type": type_, "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T11:59:00Z",
            })
        };
        let mirror = |name: &str, spec: serde_json::Value, reason: &str, ended: &str| -> Mirror {
            let metadata = json!({ "namespace": "shop", "name": name, "uid": format!("uid-{name}") });
            let conditions = [condition("Ready", "False", reason), condition("Ended", ended, "Other")];
            let status = json!({
                "observedGeneration": 1, "conditions": conditions, "reportingNodes": 2,
                "pods": { "selected": 5, "covered": 4 }, "packets": { "copied": 200, "lost": 2 },
                "expirationTime": "2026-01-01T12:14:00Z",
            });
            from_value(json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": metadata, "spec": spec,
                "status": status,
            }))
            .unwrap()
        };
        let node = |name: &str, last_report_time: &str, mirrors: serde_json::Value| -> MirrorNode {
            let status = json!({
                "lastReportTime": last_report_time,
                "mirrorCount": 1, "refusedCount": 0, "pods": { "selected": 0, "covered": 0 }, "mirrors": mirrors,
            });
            from_value(json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": name },
                "status": status,
            }))
            .unwrap()
        };
        let of = |name: &str, uid: &str, selected: i64, covered: i64, why: &[&str]| {
            let uncovered: Vec<_> = why
                .iter()
                .map(|pod| json!({ "namespace": "shop", "pod": pod, "reason": "NoNic", "message": "it has no NIC" }))
                .collect();
            json!({
                "kind": "Mirror", "namespace": "shop", "name": name, "uid": uid, "observedGeneration": 1,
                "pods": { "selected": selected, "covered": covered }, "packets": { "copied": 100, "lost": 1 },
                "ended": 0, "uncovered": uncovered,
            })
        };
        let ids = json!({ "podSelector": {}, "targetRef": { "name": "ids" } });
        let stream = json!({ "podSelector": {}, "stream": { "keySha256": "0".repeat(64) } });
        let mirrors = vec![
            mirror("checkout", ids, "NotCovered", "False"),
            mirror("tail-1", stream, "LimitReached", "True"),
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
        let now = NOW.parse().unwrap();
        let rows = rows(&mirrors, &of_cluster, &nodes, now);
        assert_eq!(
            table(&rows, false, now),
            "KIND    NAMESPACE  NAME      READY  REASON        TARGET  PODS  COVERED  COPIED  LOST  EXPIRES  NODES\n\
             Mirror  shop       checkout  False  NotCovered    ids     5     4        200     2     14m      2\n\
             Mirror  shop       tail-1    False  LimitReached  stream  0     0        0       0     Ended    0\n"
        );
        let wide = table(&rows, true, now);
        assert!(
            wide.contains("Mirror shop/checkout does not cover shop/web on b: NoNic: it has no NIC\n"),
            "{wide}"
        );
        assert!(wide.contains("  a,b\n"), "{wide}");
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((&json[0]["covered"], &json[0]["nodes"]), (&json!(4), &json!(["a", "b"])));
        assert_eq!(json[0]["expirationTime"], "2026-01-01T12:14:00Z");
        assert_eq!(table(&[], false, now), "no Mirrors\n");
    }

    /// The node has no agent any more, or podmirror was uninstalled.
    #[test]
    fn a_report_that_is_too_old_does_not_count_and_is_told() {
        let (mut mirrors, of_cluster, nodes) = objects();
        let at = |mirrors: &[Mirror], now: &str| {
            let now = now.parse().unwrap();
            table(&rows(mirrors, &of_cluster, &nodes, now), false, now)
        };
        assert_eq!(
            at(&mirrors[..1], "2026-01-01T12:10:00Z"),
            "KIND    NAMESPACE  NAME      READY  REASON      TARGET  PODS  COVERED  COPIED  LOST  EXPIRES  NODES\n\
             Mirror  shop       checkout  False  NotCovered  ids     2     1        100     1     4m       1\n\
             Mirror shop/checkout: no report that counts from node a (too old, or from the future)\n"
        );
        mirrors[0].status = None;
        assert_eq!(
            at(&mirrors[..1], "2026-01-01T16:30:00Z"),
            "KIND    NAMESPACE  NAME      READY  REASON  TARGET  PODS  COVERED  COPIED  LOST  EXPIRES  NODES\n\
             Mirror  shop       checkout  -      -       ids     0     0        0       0     -        0\n\
             Mirror shop/checkout: no report that counts from 2 nodes, as a (too old, or from the future)\n"
        );
    }
}
