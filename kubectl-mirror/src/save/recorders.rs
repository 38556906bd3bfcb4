//! Finds the recorders: a container in the agent's pod of each node, if the administrator enabled it. Pure.
//!
//! A recorder does not need a ready agent, and an agent's pod that is being deleted can still have the packets. Called
//! by `save` with the agents' pods, and by `check`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerState, Pod};

/// The container of a recorder.
pub(crate) const CONTAINER: &str = "recorder";
/// The variable of the container with the recorder's target.
const TARGET: &str = "MIRROR_RECORDER_TARGET";

/// A running recorder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorder {
    pub(crate) pod: String,
    /// The target whose copies it records.
    pub(crate) target: String,
}

/// The reason why a node cannot be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Lack {
    /// It has no recorder, so it has no packets.
    NoRecorder(String),
    /// Its recorder does not answer, so its packets are missing.
    Silent(String),
}

/// The recorder of each node with an agent, or the reason why there is none.
pub(crate) type Recorders = BTreeMap<String, Result<Recorder, Lack>>;

/// The recorders in these pods.
pub(crate) fn by_node(pods: &[Pod]) -> Recorders {
    let mut recorders = BTreeMap::<_, (bool, _)>::new();
    for pod in pods {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        let is_going = pod.metadata.deletion_timestamp.is_some();
        let found = of(pod);
        // Order: one that runs and stays, one that runs and is being deleted, then the reason of one that stays.
        let rank = |is_going: bool, found: &Result<_, _>| (found.is_err(), is_going);
        match recorders.get(&node) {
            Some((going, before)) if rank(*going, before) <= rank(is_going, &found) => {}
            _ => drop(recorders.insert(node, (is_going, found))),
        }
    }
    recorders.into_iter().map(|(node, (_, found))| (node, found)).collect()
}

fn of(pod: &Pod) -> Result<Recorder, Lack> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let Some(container) = containers.into_iter().find(|container| container.name == CONTAINER) else {
        return Err(Lack::NoRecorder("no recorder is switched on there".to_owned()));
    };
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let state = statuses.filter(|status| status.name == CONTAINER).find_map(|status| status.state.as_ref());
    match state {
        Some(ContainerState { running: Some(_), .. }) => {}
        state => return Err(Lack::Silent(format!("the recorder does not run there: {}", why(state)))),
    }
    let target = container.env.iter().flatten().find(|variable| variable.name == TARGET);
    let target = target.and_then(|variable| variable.value.clone()).unwrap_or_default();
    Ok(Recorder { pod: pod.metadata.name.clone().unwrap_or_default(), target })
}

/// The reason why a container does not run.
fn why(state: Option<&ContainerState>) -> String {
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let ended = state.and_then(|state| state.terminated.as_ref());
    let (reason, message) = match (waiting, ended) {
        (Some(waiting), _) => (waiting.reason.as_ref(), waiting.message.as_ref()),
        (_, Some(ended)) => (ended.reason.as_ref(), ended.message.as_ref()),
        (None, None) => (None, None),
    };
    let words: Vec<_> = [reason, message].into_iter().flatten().map(String::as_str).collect();
    if words.is_empty() { "it has not started".to_owned() } else { words.join(": ") }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(name: &str, node: Option<&str>, deleted: Option<&str>, state: &Value) -> Pod {
        from_value(json!({
            "metadata": { "name": name, "deletionTimestamp": deleted },
            "spec": {
                "nodeName": node,
                "containers": [
                    { "name": "agent" },
                    { "name": "recorder", "env": [{ "name": "MIRROR_RECORDER_TARGET", "value": "live" }] },
                ],
            },
            "status": { "containerStatuses": [
                { "name": "agent", "state": {}, "ready": false, "restartCount": 0, "image": "", "imageID": "" },
                { "name": "recorder", "state": state, "ready": true, "restartCount": 0, "image": "", "imageID": "" },
            ] },
        }))
        .unwrap()
    }

    #[test]
    fn a_node_has_the_recorder_that_runs_or_a_reason() {
        let gone = Some("2026-01-01T00:00:00Z");
        let running = json!({ "running": {} });
        let starting = json!({ "waiting": { "reason": "ContainerCreating" } });
        let failing = json!({ "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 10s" } });
        let mut without = pod("without", Some("f"), None, &running);
        without.spec.as_mut().unwrap().containers.pop();
        let recorders = by_node(&[
            // The packets are still in the recorder that is being deleted.
            pod("new", Some("a"), None, &starting),
            pod("old", Some("a"), gone, &running),
            pod("old", Some("b"), gone, &running),
            pod("new", Some("b"), None, &running),
            pod("failing", Some("c"), None, &failing),
            pod("going", Some("c"), gone, &json!({ "terminated": { "exitCode": 1, "reason": "Error" } })),
            pod("new", Some("d"), None, &json!({})),
            pod("pending", None, None, &json!({})),
            without,
        ]);
        let runs = |pod: &str| Ok(Recorder { pod: pod.to_owned(), target: "live".to_owned() });
        let fails = |why: &str| Err(Lack::Silent(format!("the recorder does not run there: {why}")));
        let expected = [
            ("a", runs("old")),
            ("b", runs("new")),
            ("c", fails("CrashLoopBackOff: back-off 10s")),
            ("d", fails("it has not started")),
            ("f", Err(Lack::NoRecorder("no recorder is switched on there".to_owned()))),
        ];
        assert_eq!(recorders, expected.map(|(node, found)| (node.to_owned(), found)).into());
    }
}
