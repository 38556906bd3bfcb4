//! Reports about pods, by a request to the agent of each node that has one of the pods.
//!
//! A report counts only if the API server has the pod on the node that answers. So an agent reports about pods of its
//! own node alone, and no report is served that was not requested.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use http::{
    HeaderValue, Response,
    header::{CONTENT_TYPE, WARNING},
};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::ListParams,
    core::{ApiResource, Selector},
};
use mirror_api::packets::{GROUP, PodReport, ReportRequest, VERSION};
use mirror_common::abi::MAX_SESSIONS_PER_TAP;
use mirror_core::{
    settings::show_kubernetes_duration,
    status::{DirectionCoverage, NicReport},
};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{
    Body, Server,
    names::{Object, PAGE},
    query::{Refusal, Reports},
};

/// Maximum number of requests that are served at a time.
const TURNS: usize = 4;
/// Maximum number of nodes that a request asks at a time; with rates, for which agents wait, it is more.
const NODES: usize = 16;
const MEASURING_NODES: usize = 128;
/// Maximum number of pods.
const MOST_PODS: usize = 50_000;
/// Maximum length of an answer, and of all answers that clients have not received yet, in bytes.
const MOST_BYTES: usize = 32 << 20;
const MOST_UNSENT: usize = 2 * MOST_BYTES;
/// Maximum number of structures in the reports of a node: an empty one takes more than 50 times its length in memory.
const MOST_STRUCTURES: usize = 128 << 10;
/// Maximum number of NICs and of problems in a report, and maximum lengths of its texts in bytes: more than an agent
/// sends, unless someone else speaks for it.
const MOST_NICS: usize = 32;
const MOST_PROBLEMS: usize = 256;
const MOST_TEXT: usize = 1 << 10;
const MOST_EXPLANATION: usize = 64 << 10;
/// Maximum length of a message in a table in bytes. It joins texts, and is in each row of a pod.
const MOST_MESSAGE: usize = 4 << 10;
/// Maximum number of nodes whose missing answers are explained.
const MOST_WARNINGS: usize = 20;
/// The columns of the table. kubectl shows the first [`NARROW`] of them, and all with `-o wide`. kubectl cannot request rates.
const COLUMNS: &str = "Name NIC Node Mirrors Ingress Egress Copied Lost Device For Message";
const NARROW: usize = 8;
/// The state of a direction that needs no reason.
const COVERED: &str = "Covered";

/// Serves a request, until kube-apiserver waits no longer. `accept`: the forms that the client takes.
///
/// # Errors
///
/// 404: there is no such pod. 413: the answer would be too long. 429: clients are slow to receive earlier answers.
/// Others: no agent answers.
pub async fn serve(
    server: &Server,
    reports: &Reports,
    accept: Option<&str>,
) -> Result<Response<Body>, Refusal> {
    static TURN: Semaphore = Semaphore::const_new(TURNS);
    static ROOM: Semaphore = Semaphore::const_new(MOST_UNSENT);
    let _turn = TURN.acquire().await;
    let [verb, _, namespace, name] = reports.scope.attributes();
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let interval_millis = reports.interval.map(millis);
    let request = ReportRequest { namespace: some(namespace), name: some(name), interval_millis };
    let pods = pods(server.client.clone(), reports).await?;
    let nodes: BTreeSet<_> = pods.values().flatten().cloned().collect();
    let (agents, count) = (server.agents.watch().borrow().clone(), nodes.len());
    let ask = |node: String| {
        let (agent, request) = (agents.get(&node).cloned(), &request);
        async move {
            let reports = match agent {
                Some(agent) => agent.reports(request).await,
                None => Err(Refusal::unavailable("no agent of the node is connected")),
            };
            (node, reports)
        }
    };
    let mut silent = BTreeMap::new();
    let mut answer = Answer {
        pods,
        is_table: accept.is_some_and(|accept| accept.contains("as=Table")),
        bytes: 0,
        parts: BTreeMap::new(),
    };
    let at_a_time = if reports.interval.is_some() { MEASURING_NODES } else { NODES };
    let mut answers = stream::iter(nodes).map(ask).buffer_unordered(at_a_time);
    while let Some((node, reports)) = answers.next().await {
        match reports {
            Ok(reports) => reports.into_iter().try_for_each(|report| answer.add(&node, report))?,
            Err(refusal) => drop(silent.insert(node, refusal)),
        }
    }
    if silent.len() == count
        && let Some((node, refusal)) = silent.pop_first()
    {
        return Err(Refusal { message: format!("node {node}: {}", refusal.message), ..refusal });
    }
    let text = answer.text((verb == "get").then_some(name))?;
    let mut response = Response::new(Full::new(unsent(text, &ROOM)?).boxed());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for warning in warnings(&silent) {
        response.headers_mut().append(WARNING, warning);
    }
    Ok(response)
}

/// An answer, whose length is taken from the room for all of them until no part of it is left to be sent.
struct Unsent {
    text: String,
    _room: SemaphorePermit<'static>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

fn unsent(text: String, room: &'static Semaphore) -> Result<Bytes, Refusal> {
    let full = |_| {
        let message = "too much of earlier answers with reports is not sent yet, because clients are slow";
        Refusal::for_now(429, "TooManyRequests", message)
    };
    let room = room.try_acquire_many(u32::try_from(text.len()).unwrap_or(u32::MAX)).map_err(full)?;
    Ok(Bytes::from_owner(Unsent { text, _room: room }))
}

fn too_large() -> Refusal {
    let message = "the answer would be too long: select fewer pods, by a namespace or by labels";
    Refusal::new(413, "RequestEntityTooLarge", message)
}

/// The nodes of the requested pods, by namespace and name.
type Pods = BTreeMap<(String, String), Option<String>>;

/// Lists the pods that a request selects.
async fn pods(client: Client, reports: &Reports) -> Result<Pods, Refusal> {
    let [_, _, namespace, name] = reports.scope.attributes();
    let resource = ApiResource::erase::<Pod>(&());
    let api: Api<Object> = match namespace {
        "" => Api::all_with(client, &resource),
        namespace => Api::namespaced_with(client, namespace, &resource),
    };
    let labels = Selector::try_from(reports.labels.clone());
    let labels = labels.map_err(|error| Refusal::new(400, "BadRequest", error.to_string()))?;
    let mut list = ListParams::default().labels_from(&labels).limit(PAGE);
    if !name.is_empty() {
        list = list.fields(&format!("metadata.name={name}"));
    }
    let mut pods = Pods::new();
    loop {
        let failed = |error: kube::Error| Refusal::unavailable(mirror_client::in_words(&error));
        let page = api.list(&list).await.map_err(failed)?;
        pods.extend(page.items.into_iter().map(|Object { metadata, spec, .. }| {
            let [namespace, name] = [metadata.namespace, metadata.name].map(Option::unwrap_or_default);
            ((namespace, name), spec.node_name)
        }));
        if pods.len() > MOST_PODS {
            return Err(too_large());
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => list = list.continue_token(&token),
            None => return Ok(pods),
        }
    }
}

/// An answer, as it grows.
struct Answer {
    pods: Pods,
    is_table: bool,
    /// The length of the parts.
    bytes: usize,
    /// The report about each pod, as JSON: the object, or the rows of the table.
    parts: BTreeMap<(String, String), String>,
}

impl Answer {
    /// Adds the report of a node, if the node has the pod and it is the first about it.
    fn add(&mut self, node: &str, mut report: PodReport) -> Result<(), Refusal> {
        let key = (report.metadata.namespace.clone(), report.metadata.name.clone());
        let is_own = self.pods.get(&key).is_some_and(|of| of.as_deref() == Some(node));
        if !is_own || self.parts.contains_key(&key) {
            return Ok(());
        }
        bound(&mut report);
        node.clone_into(&mut report.node);
        let part = if self.is_table { rows(&report) } else { object(&report).to_string() };
        self.bytes += part.len();
        if self.bytes > MOST_BYTES {
            return Err(too_large());
        }
        self.parts.insert(key, part);
        Ok(())
    }

    /// The answer as JSON. `get`: the name of the only pod, if the request is for an object and not for a list.
    fn text(self, get: Option<&str>) -> Result<String, Refusal> {
        if let (Some(name), true) = (get, self.parts.is_empty()) {
            let why = if self.pods.is_empty() { "no such pod" } else { "it is not assigned to a node yet" };
            let message = format!("podreports.{GROUP} {name:?} not found: {why}");
            return Err(Refusal::new(404, "NotFound", message));
        }
        let (columns, version) = (columns(), format!("{GROUP}/{VERSION}"));
        let parts = self.parts.into_values().collect::<Vec<_>>().join(",");
        Ok(match (self.is_table, get) {
            (true, _) => format!(
                r#"{{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":{columns},"rows":[{parts}]}}"#
            ),
            (false, Some(_)) => parts,
            (false, None) => {
                format!(
                    r#"{{"kind":"PodReportList","apiVersion":"{version}","metadata":{{}},"items":[{parts}]}}"#
                )
            }
        })
    }
}

/// Decodes the reports of a node.
pub(super) fn decode(json: &[u8]) -> Result<Vec<PodReport>, Refusal> {
    // A structure can also be an array. The texts are those of authors of pods, and can have brackets.
    let (mut structures, mut is_text, mut is_escaped) = (0, false, false);
    for &byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_text,
            b'"' => is_text = !is_text,
            b'{' | b'[' if !is_text => structures += 1,
            _ => {}
        }
    }
    if structures > MOST_STRUCTURES {
        return Err(Refusal::unavailable(format!("its reports have more than {MOST_STRUCTURES} structures")));
    }
    serde_json::from_slice(json).map_err(|error| Refusal::unavailable(error.to_string()))
}

/// Bounds a report: the table repeats parts of it in each row.
fn bound(report: &mut PodReport) {
    report.explanation.iter_mut().for_each(|text| cut(text, MOST_EXPLANATION));
    report.nics.truncate(MOST_NICS);
    for nic in &mut report.nics {
        nic.mirrors.truncate(MAX_SESSIONS_PER_TAP);
        let directions = nic.ingress.iter_mut().chain(&mut nic.egress);
        let directions = directions.flat_map(|of| [&mut of.state, &mut of.message]);
        let mirrors = nic.mirrors.iter_mut().flat_map(|of| [&mut of.name, &mut of.target]);
        let others =
            nic.network.iter_mut().chain(&mut nic.why_inside).chain([&mut nic.name, &mut nic.device]);
        directions.chain(mirrors).chain(others).for_each(|text| cut(text, MOST_TEXT));
    }
    report.not_mirrored.truncate(MOST_PROBLEMS);
    for of in &mut report.not_mirrored {
        let texts = [&mut of.reason, &mut of.message, &mut of.remedy];
        let texts = texts.into_iter().chain(&mut of.pod).chain(&mut of.nic).chain(&mut of.mirror);
        texts.for_each(|text| cut(text, MOST_TEXT));
    }
}

/// Cuts a text that is too long, visibly.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push('…');
    }
}

fn object(report: &PodReport) -> Value {
    fn remove_nulls(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|_, value| !value.is_null());
                fields.values_mut().for_each(remove_nulls);
            }
            Value::Array(items) => items.iter_mut().for_each(remove_nulls),
            _ => {}
        }
    }
    let mut object = json!(report);
    object["apiVersion"] = json!(format!("{GROUP}/{VERSION}"));
    object["kind"] = json!("PodReport");
    remove_nulls(&mut object);
    object
}

/// The definitions of the columns of a table (`meta.k8s.io/v1`).
fn columns() -> Value {
    let column = |(at, name): (usize, &str)| {
        // 6 and 7: the packets that were copied, and those that were lost.
        let of = if matches!(at, 6 | 7) { "number" } else { "string" };
        json!({ "name": name, "type": of, "format": "", "description": "", "priority": u8::from(at >= NARROW) })
    };
    COLUMNS.split_whitespace().enumerate().map(column).collect()
}

/// The rows of a pod: one for each NIC. A pod without a tapped NIC has one, with the reason.
fn rows(report: &PodReport) -> String {
    let object = json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": report.metadata,
    });
    let none = NicReport::default();
    let nics = if report.nics.is_empty() { slice::from_ref(&none) } else { report.nics.as_slice() };
    let row = |nic: &NicReport| json!({ "cells": cells(report, nic), "object": object }).to_string();
    nics.iter().map(row).collect::<Vec<_>>().join(",")
}

fn cells(report: &PodReport, nic: &NicReport) -> Vec<Value> {
    let text = |text: &str| json!(if text.is_empty() { "<none>" } else { text });
    let state =
        |of: &Option<DirectionCoverage>| json!(of.as_ref().map_or("<unknown>", |of| of.state.as_str()));
    let mirrors: Vec<_> = nic.mirrors.iter().map(|mirror| mirror.name.as_str()).collect();
    let [copied, lost] = nic.mirrors.iter().fold([0_u64; 2], |[copied, lost], mirror| {
        [copied.saturating_add(mirror.copied), lost.saturating_add(mirror.lost)]
    });
    // Both directions have had their states for this time.
    let since = nic.ingress.iter().chain(&nic.egress).map(|of| Duration::from_secs(of.seconds.max(1))).min();
    vec![
        text(&report.metadata.name),
        text(&nic.name),
        text(&report.node),
        text(&mirrors.join(",")),
        state(&nic.ingress),
        state(&nic.egress),
        json!(copied),
        json!(lost),
        text(&nic.device),
        text(&since.map_or_else(String::new, show_kubernetes_duration)),
        text(&message(report, nic)),
    ]
}

/// The reasons why a NIC is not covered, or not mirrored as requested. Those of NICs without a row are with the others.
fn message(report: &PodReport, nic: &NicReport) -> String {
    let uncovered = [("ingress", &nic.ingress), ("egress", &nic.egress)];
    let uncovered = uncovered.into_iter().filter_map(|(direction, of)| Some((direction, of.as_ref()?)));
    let uncovered = uncovered.filter(|(_, of)| of.state != COVERED);
    let uncovered = uncovered.map(|(direction, of)| format!("{direction} {}: {}", of.state, of.message));
    let is_of_another = |name: &String| *name != nic.name && report.nics.iter().any(|nic| nic.name == *name);
    let problems = report.not_mirrored.iter().filter(|of| !of.nic.as_ref().is_some_and(is_of_another));
    let problems = problems.map(|of| format!("{}: {}", of.reason, of.message));
    let mut message = uncovered.chain(problems).collect::<Vec<_>>().join("; ");
    cut(&mut message, MOST_MESSAGE);
    message
}

/// The nodes whose reports are missing, as kubectl shows warnings.
fn warnings(silent: &BTreeMap<String, Refusal>) -> Vec<HeaderValue> {
    let named = silent.iter().take(MOST_WARNINGS).map(|(node, of)| format!("node {node}: {}", of.message));
    let more = silent.len().saturating_sub(MOST_WARNINGS);
    let more = (more > 0).then(|| format!("{more} more nodes have not answered"));
    let warning = |text: String| format!("299 - \"{}\"", text.escape_default());
    named.chain(more).filter_map(|text| HeaderValue::try_from(warning(text)).ok()).collect()
}

#[cfg(test)]
mod tests;
