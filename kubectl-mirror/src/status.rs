//! `kubectl mirror status`: the Mirrors and ClusterMirrors of the API server, with the status that the controller writes.
//!
//! [`table`] is pure: objects in, text out.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Api, api::ListParams};
use mirror_api::{
    ClusterMirror, Mirror, Uncovered,
    sum::{ACCEPTED, ENDED, READY, STALE, condition_of},
};
use mirror_core::status::{columns, printable};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    cli::StatusArgs,
    cluster::Cluster,
    resource::Resource,
    screen::{Output, Screen, age, object},
};

/// The interval of `--watch`.
const PACE: Duration = Duration::from_secs(2);

/// Prints the objects, once or repeatedly until Ctrl-C.
pub(crate) async fn status(args: StatusArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let shown = async {
        let mut screen = Screen::new(args.watch, args.output.as_ref(), cluster.scope(args.all_namespaces));
        loop {
            screen.show(&look(&args, cluster).await?)?;
            if !args.watch {
                return Ok(());
            }
            sleep(PACE).await;
        }
    };
    tokio::select! {
        outcome = shown => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// The present objects, in the requested format.
async fn look(args: &StatusArgs, cluster: &Cluster) -> anyhow::Result<String> {
    let (mirrors, of_cluster) = match args.all_namespaces {
        true => (listed::<Mirror>(cluster.all()).await?, listed(cluster.all()).await?),
        false => (listed(cluster.own()).await?, Vec::new()),
    };
    let objects: Vec<_> =
        of_cluster.iter().map(Resource::from).chain(mirrors.iter().map(Resource::from)).collect();
    match &args.output {
        None | Some(Output::Wide) => {
            Ok(table(&objects, args.all_namespaces, args.output.is_some(), Timestamp::now()))
        }
        Some(Output::Name) => Ok(objects.iter().map(|object| object.resource() + "\n").collect()),
        Some(output) => object(&list(&of_cluster, &mirrors)?, output),
    }
}

async fn listed<K>(api: Api<K>) -> kube::Result<Vec<K>>
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let mut objects = api.list(&ListParams::default()).await?.items;
    // As kubectl does.
    objects.iter_mut().for_each(|object| object.meta_mut().managed_fields = None);
    Ok(objects)
}

/// The list of objects of several kinds, as kubectl prints it.
fn list(of_cluster: &[ClusterMirror], mirrors: &[Mirror]) -> serde_json::Result<Value> {
    let of_cluster = of_cluster.iter().map(serde_json::to_value);
    let items = of_cluster.chain(mirrors.iter().map(serde_json::to_value)).collect::<Result<Vec<_>, _>>()?;
    Ok(json!({ "apiVersion": "v1", "kind": "List", "metadata": { "resourceVersion": "" }, "items": items }))
}

/// The head of a column, whether it is shown, and the cell of an object.
type Column = (&'static str, bool, fn(&Resource<'_>, Timestamp) -> Option<String>);

/// The time until the mirror ends, or the condition `Ended` if its limits have ended it.
fn expires(of: &Resource<'_>, now: Timestamp) -> Option<String> {
    let status = of.status?;
    if condition_of(status, ENDED).is_some_and(|of| of.status == "True") {
        return Some(ENDED.to_owned());
    }
    let Time(at) = status.expiration_time.as_ref()?;
    Some(age(at.duration_since(now).as_secs().try_into().unwrap_or(0)))
}

/// The age of the last report in a status that is out of date: nobody writes it any more.
fn outdated(of: &Resource<'_>, now: Timestamp) -> Option<String> {
    let Time(at) = of.status?.last_report_time.as_ref()?;
    let since = now.duration_since(*at);
    (since > STALE).then(|| age(since.as_secs().unsigned_abs()))
}

/// The status of the condition `Ready` and its reason.
fn ready(of: &Resource<'_>, now: Timestamp) -> Option<(String, String)> {
    if outdated(of, now).is_some() {
        return Some(("Unknown".to_owned(), "Outdated".to_owned()));
    }
    let ready = condition_of(of.status?, READY)?;
    Some((ready.status.clone(), ready.reason.clone()))
}

/// A number that holds only at the time of the last report.
fn present(of: &Resource<'_>, now: Timestamp, number: i64) -> String {
    outdated(of, now).map_or_else(|| number.to_string(), |_| "<unknown>".to_owned())
}

/// Formats the table for people, empty without objects. `is_all`: of all namespaces; `is_wide`: also the direction, the
/// filter, and each pod that is not covered.
fn table(objects: &[Resource<'_>], is_all: bool, is_wide: bool, now: Timestamp) -> String {
    if objects.is_empty() {
        return String::new();
    }
    let all: [Column; 14] = [
        ("KIND", is_all, |of, _| Some(of.kind.to_owned())),
        ("NAMESPACE", is_all, |of, _| of.metadata.namespace.clone()),
        ("NAME", true, |of, _| Some(of.name().to_owned())),
        ("READY", true, |of, now| Some(ready(of, now)?.0)),
        ("REASON", true, |of, now| Some(ready(of, now)?.1)),
        ("TARGET", true, |of, _| Some(of.spec.target_ref.as_ref()?.name.clone())),
        ("PODS", true, |of, _| Some(of.status?.pods.selected.to_string())),
        ("COVERED", true, |of, now| Some(present(of, now, of.status?.pods.covered))),
        ("COPIED", true, |of, _| Some(of.status?.packets.copied.to_string())),
        ("LOST", true, |of, _| Some(of.status?.packets.lost.to_string())),
        ("EXPIRES", true, expires),
        ("NODES", true, |of, now| Some(present(of, now, of.status?.reporting_nodes))),
        ("DIRECTION", is_wide, |of, _| Some(format!("{:?}", of.spec.direction?))),
        ("FILTER", is_wide, |of, _| of.spec.settings.filter.clone()),
    ];
    let shown = || all.iter().filter(|(_, is_shown, _)| *is_shown);
    let mut lines = vec![shown().map(|(head, ..)| (*head).to_owned()).collect::<Vec<_>>()];
    lines.extend(objects.iter().map(|object| {
        shown().map(|(.., cell)| cell(object, now).unwrap_or_else(|| "<none>".to_owned())).collect()
    }));
    let mut text = columns(&lines);
    for object in objects {
        let Some(status) = object.status else { continue };
        let subject = object.full_name();
        if let Some(age) = outdated(object, now) {
            text += &format!("{subject} is out of date: last report {age} ago\n");
        }
        if let Some(of) = condition_of(status, ACCEPTED).filter(|of| of.status == "False") {
            text += &format!("{subject} is refused: {}: {}\n", of.reason, printable(&of.message));
        }
        if !is_wide {
            continue;
        }
        for Uncovered { namespace, pod, nic, reason, message, node } in &status.uncovered {
            let nic = nic.as_ref().map(|nic| format!(" {nic}")).unwrap_or_default();
            let node = node.as_deref().unwrap_or_default();
            let why = format!("{namespace}/{pod}{nic} on {node}: {reason}: {message}");
            text += &format!("{subject} does not cover {}\n", printable(&why));
        }
        if let Some(more) = status.more_uncovered {
            text += &format!("{subject} does not cover {more} more\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::from_value;

    use super::*;

    fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
        json!({
            "type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T11:59:00Z",
        })
    }

    fn status(conditions: &[Value], uncovered: &[Value]) -> Value {
        json!({
            "observedGeneration": 1, "conditions": conditions, "reportingNodes": 2,
            "pods": { "selected": 5, "covered": 4 }, "packets": { "copied": 200, "lost": 2 },
            "expirationTime": "2026-01-01T12:14:00Z", "uncovered": uncovered, "moreUncovered": 1,
        })
    }

    fn mirror(name: &str, spec: Value, status: Value) -> Mirror {
        from_value(json!({
            "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror",
            "metadata": { "namespace": "shop", "name": name }, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    fn mirrors() -> [Mirror; 3] {
        let ids = json!({ "podSelector": {}, "targetRef": { "name": "ids" }, "filter": "udp", "direction": "Ingress" });
        let pod = json!({
            "namespace": "shop", "pod": "web", "node": "b", "reason": "NoNic", "message": "it has\nno NIC",
        });
        let why = "no target \u{1b}";
        let refused = [
            condition("Ready", "False", "NoSuchTarget", why),
            condition("Accepted", "False", "NoSuchTarget", why),
        ];
        let ended =
            [condition("Ready", "False", "LimitReached", ""), condition("Ended", "True", "LimitReached", "")];
        [
            mirror("checkout", ids, status(&refused, &[pod])),
            mirror("new", json!({ "podSelector": {} }), Value::Null),
            mirror("old", json!({ "podSelector": {} }), status(&ended, &[])),
        ]
    }

    fn shown(mirrors: &[Mirror], is_all: bool, is_wide: bool) -> String {
        let objects: Vec<_> = mirrors.iter().map(Resource::from).collect();
        table(&objects, is_all, is_wide, "2026-01-01T11:59:30Z".parse().unwrap())
    }

    /// Nobody writes a status any more after an uninstallation, or while the controller is dead.
    #[test]
    fn a_status_that_nobody_writes_any_more_claims_nothing() {
        let ready = condition("Ready", "True", "AllCovered", "5 of 5 pods are covered");
        let mut mirror = mirror("old", json!({ "podSelector": {} }), status(&[ready], &[]));
        // 15 minutes before the time of the table, and a second more.
        for (reported, row, line) in [
            (
                "2026-01-01T11:44:30Z",
                "old   True   AllCovered  <none>  5     4        200     2     14m      2\n",
                "",
            ),
            (
                "2026-01-01T11:44:29Z",
                "old   Unknown  Outdated  <none>  5     <unknown>  200     2     14m      <unknown>\n",
                "Mirror shop/old is out of date: last report 15m ago\n",
            ),
        ] {
            mirror.status.as_mut().unwrap().last_report_time = from_value(json!(reported)).unwrap();
            let table = shown(std::slice::from_ref(&mirror), false, false);
            assert_eq!(table.split_once('\n').unwrap().1, format!("{row}{line}"), "{table}");
        }
    }

    #[test]
    fn a_table_shows_the_status_of_each_mirror() {
        assert_eq!(
            shown(&mirrors(), false, false),
            "NAME      READY   REASON        TARGET  PODS    COVERED  COPIED  LOST    EXPIRES  NODES\n\
             checkout  False   NoSuchTarget  ids     5       4        200     2       14m      2\n\
             new       <none>  <none>        <none>  <none>  <none>   <none>  <none>  <none>   <none>\n\
             old       False   LimitReached  <none>  5       4        200     2       Ended    2\n\
             Mirror shop/checkout is refused: NoSuchTarget: no target \\u{1b}\n"
        );
        let wide = shown(&mirrors()[..1], true, true);
        let (head, rest) = wide.split_once('\n').unwrap();
        assert!(
            head.starts_with("KIND    NAMESPACE  NAME ") && head.ends_with("  NODES  DIRECTION  FILTER"),
            "{wide}"
        );
        assert!(
            rest.starts_with("Mirror  shop       checkout ") && rest.contains("  2      Ingress    udp\n"),
            "{wide}"
        );
        assert!(
            wide.ends_with(
                "Mirror shop/checkout does not cover shop/web on b: NoNic: it has\\nno NIC\n\
                 Mirror shop/checkout does not cover 1 more\n"
            ),
            "{wide}"
        );
        assert_eq!(shown(&[], true, true), "");
    }
}
