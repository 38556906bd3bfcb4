//! The condition `podmirror.io/Mirrored` of the node's pods: whether what their mirrors ask for is done.
//!
//! This module reads the loop's reports and nothing else. It writes one pod at a time, and the loop does not wait for
//! it. A pod that asks for no mirror has no such condition.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    time::Duration,
};

use k8s_openapi::{
    api::core::v1::{Pod, PodCondition},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mirror_core::{
    coverage::{Doubt, State},
    model::{Hidden, POD_CONDITION},
};
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::{
    model::PodId,
    report::{Mirrored, Report, Reports, Stage},
    select::Why,
};

/// The shortest time between two writes.
const PACE: Duration = Duration::from_millis(100);
/// The shortest time between two writes of one pod, and the first pause after a write that has failed.
const PACE_OF_POD: Duration = Duration::from_secs(5);
/// The longest pause after a write that has failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The field manager of server-side apply.
const MANAGER: &str = "mirror-agent";
/// Most bytes of a message.
const MOST_BYTES: usize = 1024;
/// Bytes of the UID of an object of the API. The UID of a static pod is another.
const UID_BYTES: usize = 36;

/// The reason of a pod whose taps are not all in place.
const NOT_TAPPED: &str = "NotTapped";

/// What a pod is told.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Condition {
    /// `True`, `False` or `Unknown`.
    status: &'static str,
    /// A word.
    reason: &'static str,
    /// A sentence.
    message: String,
}

/// What was written of a pod.
struct Written {
    condition: Option<Condition>,
    /// When the status of the condition has changed.
    since: Timestamp,
}

/// Writes the condition of each pod that a mirror is asked for, when it has changed, and removes it when none is. Ends with
/// the loop.
pub async fn write(client: Client, mut reports: Reports) {
    let mut writer = Writer {
        client,
        written: BTreeMap::new(),
        tried: BTreeMap::new(),
        rest: Instant::now(),
        failures: 0,
        is_denied: false,
    };
    loop {
        let next = writer.next(&reports.borrow_and_update());
        let wait = async {
            match &next {
                Some((.., due)) => sleep_until(*due).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = wait => {}
            changed = reports.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
        }
        if let Some((pod, condition, _)) = next {
            writer.write(pod, condition).await;
        }
    }
}

struct Writer {
    client: Client,
    written: BTreeMap<PodId, Written>,
    /// When a write was tried last.
    tried: BTreeMap<PodId, Instant>,
    /// Not to write before.
    rest: Instant,
    /// How many writes have failed since the last one that has not.
    failures: u32,
    /// That there is no right to write was told.
    is_denied: bool,
}

impl Writer {
    /// The pod to write next, what it is to be told, and when.
    fn next(&mut self, report: &Report) -> Option<(PodId, Option<Condition>, Instant)> {
        let wanted = conditions(report)?;
        self.written.retain(|pod, _| wanted.contains_key(pod));
        self.tried.retain(|pod, _| wanted.contains_key(pod));
        let is_new = |(pod, condition): &(PodId, Option<Condition>)| match self.written.get(pod) {
            Some(last) => last.condition != *condition,
            None => condition.is_some() || report.told.contains(pod),
        };
        let due = |pod: &PodId| self.tried.get(pod).map_or(self.rest, |at| self.rest.max(*at + PACE_OF_POD));
        // One that fails all the time comes after the others.
        let wanted = wanted.into_iter().filter(is_new);
        let next = wanted.min_by_key(|(pod, _)| (due(pod), self.tried.get(pod).copied()));
        next.map(|(pod, condition)| {
            let due = due(&pod);
            (pod, condition, due)
        })
    }

    async fn write(&mut self, pod: PodId, condition: Option<Condition>) {
        let last = self.written.get(&pod);
        let answer = timeout(PATIENCE, put(&self.client, &pod, condition.as_ref(), last)).await;
        let now = Instant::now();
        self.tried.insert(pod.clone(), now);
        let (error, code) = match answer {
            Ok(Ok(since)) => {
                self.done(pod, condition, since);
                return;
            }
            // It has gone, or another pod has its name.
            Ok(Err(kube::Error::Api(error))) if matches!(error.code, 404 | 409) => {
                self.done(pod, condition, Timestamp::now());
                return;
            }
            Ok(Err(kube::Error::Api(error))) => (error.message.clone(), error.code),
            Ok(Err(error)) => (error.to_string(), 0),
            Err(_) => ("no answer".to_owned(), 0),
        };
        if code == 403 && !self.is_denied {
            self.is_denied = true;
            warn!(
                error,
                "the agent has no right to write the condition of pods: give it `patch` of `pods/status`, or start it \
                 without --pod-condition"
            );
        }
        debug!(%pod, error, "cannot write the condition of a pod");
        self.rest = now + LONGEST_PAUSE.min(PACE_OF_POD * 2_u32.pow(self.failures.min(10)));
        self.failures += 1;
    }

    fn done(&mut self, pod: PodId, condition: Option<Condition>, since: Timestamp) {
        self.written.insert(pod, Written { condition, since });
        (self.rest, self.failures) = (Instant::now() + PACE, 0);
    }
}

/// What each pod of the node is to be told, `None`: nothing. `None` for all: the pods are not known.
fn conditions(report: &Report) -> Option<BTreeMap<PodId, Option<Condition>>> {
    let pods = report.pods.as_ref()?;
    let mut states = BTreeMap::<&PodId, BTreeSet<&State>>::new();
    for nic in report.coverage.values() {
        states.entry(&nic.pod).or_default().extend(nic.directions.iter().map(|judged| &judged.state));
    }
    let mut problems = BTreeMap::<&PodId, Vec<Condition>>::new();
    for skipped in report.skipped.iter().filter(|skipped| !skipped.is_of_capture()) {
        // Who opts out of a mirror knows it.
        let Some(pod) = skipped.pod.as_ref().filter(|_| !matches!(skipped.why, Why::OptedOut(_))) else {
            continue;
        };
        let nic = skipped.nic.as_ref().map_or_else(String::new, |nic| format!(" on {nic}"));
        let by = skipped.mirror.as_ref().map_or_else(String::new, |mirror| format!(" by {mirror}"));
        let why = &skipped.why;
        let message = cut(&format!("{}{by}{nic}: {why}", why.effect()));
        let is_open =
            why.is_passing() || matches!(why, Why::Hidden(_, Hidden::Program(_) | Hidden::AtExit(_)));
        let status = if is_open { "Unknown" } else { "False" };
        problems.entry(pod).or_default().push(Condition { status, reason: why.name(), message });
    }
    let mut condition = |pod| match problems.remove(pod) {
        Some(problems) => together(problems),
        None => not_copying(report, pod).unwrap_or_else(|| states.get(pod).map_or_else(not_tapped, judged)),
    };
    Some(pods.iter().map(|(pod, unasked)| (pod.clone(), unasked.is_none().then(|| condition(pod)))).collect())
}

/// One condition for several problems of a pod.
fn together(problems: Vec<Condition>) -> Condition {
    let more = problems.len() - 1;
    let worst = problems.into_iter().min_by_key(|problem| problem.status).unwrap_or_else(not_tapped);
    match more {
        0 => worst,
        more => Condition { message: format!("{} (and {more} more)", worst.message), ..worst },
    }
}

fn not_tapped() -> Condition {
    let message = "no NIC of the pod is tapped yet".to_owned();
    Condition { status: "Unknown", reason: NOT_TAPPED, message }
}

/// What keeps the mirrors of a pod from copying that is no problem of the pod: the target of one takes nothing, one is not
/// in place yet, or all have ended.
fn not_copying(report: &Report, pod: &PodId) -> Option<Condition> {
    let mirrors = report.mirrors.get(pod)?;
    let is_over = |mirrored: &Mirrored| matches!(mirrored.stage, Stage::Ended(_));
    let runs = || mirrors.iter().filter(|(_, mirrored)| !is_over(mirrored));
    let down = runs().find_map(|(mirror, Mirrored { target, .. })| {
        let why = report.down.get(target)?;
        let message = cut(&format!("not mirrored by {mirror}: the target {target} takes no copies: {why}"));
        Some(Condition { status: "False", reason: "TargetDown", message })
    });
    let coming = || {
        let (mirror, _) = runs().find(|(_, mirrored)| mirrored.stage == Stage::Coming)?;
        let message = format!(
            "{mirror} is not in place on all NICs of the pod yet; if this stays, the agent's log and `status` on the node \
             have the error"
        );
        Some(Condition { status: "Unknown", reason: NOT_TAPPED, message })
    };
    let over = || {
        let is_none_left = runs().next().is_none();
        let (mirror, limit) =
            mirrors.iter().filter(|_| is_none_left).find_map(|(mirror, of)| match of.stage {
                Stage::Ended(limit) => Some((mirror, limit.name())),
                Stage::Coming | Stage::Stands => None,
            })?;
        let message = format!("no mirror of the pod goes on: its limit of {limit} has ended {mirror}");
        Some(Condition { status: "False", reason: "Ended", message })
    };
    down.or_else(coming).or_else(over)
}

/// A pod whose NICs are tapped. A state that is a problem is told as such.
fn judged(states: &BTreeSet<&State>) -> Condition {
    let doubt = states.iter().find_map(|state| match state {
        State::Unknown(doubt @ (Doubt::Differs | Doubt::L3s | Doubt::Unread)) => Some(doubt),
        _ => None,
    });
    if let Some(doubt) = doubt {
        return Condition { status: "Unknown", reason: "NotProved", message: doubt.to_string() };
    }
    if states.contains(&State::NoHook) {
        return Condition { status: "Unknown", reason: NOT_TAPPED, message: State::NoHook.to_string() };
    }
    if states.iter().all(|state| **state == State::Covered) {
        let message = "the mirrors meet all packets of the pod".to_owned();
        return Condition { status: "True", reason: "Covered", message };
    }
    let message = "the NICs of the pod are tapped; too few packets have passed, or this kernel counts too few, to prove \
                   that the mirrors meet all of them";
    Condition { status: "True", reason: "Tapped", message: message.to_owned() }
}

/// Writes the condition, or removes it. Returns when its status has changed.
async fn put(
    client: &Client,
    pod: &PodId,
    condition: Option<&Condition>,
    last: Option<&Written>,
) -> kube::Result<Timestamp> {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
    let mut metadata = json!({ "name": pod.name });
    if pod.uid.len() == UID_BYTES {
        // Not for a pod that has the name of this one.
        metadata["uid"] = pod.uid.clone().into();
    }
    let mut since = Timestamp::now();
    let mut status = json!({});
    if let Some(Condition { status: is_so, reason, message }) = condition {
        let before = match last {
            Some(Written { condition, since, .. }) => {
                condition.as_ref().map(|last| (last.status.to_owned(), *since))
            }
            None => stands(&api, pod).await?,
        };
        if let Some((before, at)) = before
            && before == *is_so
        {
            since = at;
        }
        status["conditions"] = json!([{
            "type": POD_CONDITION, "status": is_so, "reason": reason, "message": message,
            "lastTransitionTime": Time(since),
        }]);
    }
    let object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status });
    api.patch_status(&pod.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(object)).await?;
    Ok(since)
}

/// What an earlier agent has written. An empty patch changes nothing, and answers with the pod as it stands: so the agent
/// needs no right to read pods one by one.
async fn stands(api: &Api<Pod>, pod: &PodId) -> kube::Result<Option<(String, Timestamp)>> {
    let found = api.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(json!({}))).await?;
    let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
    let ours = conditions.into_iter().find(|condition| condition.type_ == POD_CONDITION);
    let since = |condition: PodCondition| Some((condition.status, condition.last_transition_time?.0));
    Ok(ours.and_then(since))
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MOST_BYTES)].to_owned()
}

#[cfg(test)]
mod tests;
