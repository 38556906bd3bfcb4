//! What the archive has: the lists, the pods, their texts, the paths, and the bounds. Pure.

use std::collections::BTreeMap;

use mirror_api::packets::{GROUP, VERSION};
use serde_json::{Value, json};

/// Maximum number of objects of a list.
const MOST_OBJECTS: usize = 500;
/// Maximum number of pods of a component, such as the agents.
const MOST_PODS: usize = 50;
/// Maximum length of a log, in lines.
const MOST_LINES: usize = 10_000;
/// Maximum length of a text, in bytes.
pub(super) const MOST_BYTES: usize = 1 << 20;
/// The label of the components, and those of a release.
const COMPONENT: &str = "app.kubernetes.io/component";
const RELEASE: [&str; 2] = ["app.kubernetes.io/name", "app.kubernetes.io/instance"];
/// The beginning of `reportingController` of podmirror's Events.
const REPORTER: &str = "podmirror.io/";

/// The lists from which the archive takes a part, by their kinds.
pub(super) const PODS: &str = "pods";
const NODES: &str = "nodes";

/// An installed podmirror.
pub(super) struct Release {
    namespace: String,
    /// The name of the agents' DaemonSet, with which the names of its other objects begin.
    name: String,
    /// The selector of its objects.
    labels: String,
}

impl Release {
    /// The release of the DaemonSet of the agents, or without one a release with the default names. The list can have
    /// DaemonSets of other software.
    pub(super) fn of(namespace: &str, list: &Value) -> Self {
        let is_ours = |set: &&Value| set["spec"]["template"].to_string().contains("\"PODMIRROR_");
        let set = array(&list["items"]).iter().find(is_ours).unwrap_or(&Value::Null);
        let or_default = |value: &Value| value.as_str().unwrap_or("podmirror").to_owned();
        let label = |key: &str| format!("{key}={}", or_default(&set["metadata"]["labels"][key]));
        let labels = RELEASE.map(label).join(",");
        Self { namespace: namespace.to_owned(), name: or_default(&set["metadata"]["name"]), labels }
    }

    /// The kinds of objects, with the URIs of their lists.
    pub(super) fn lists(&self) -> [(&'static str, String); 15] {
        let ours = format!("/apis/{}/v1alpha1", mirror_api::GROUP);
        let [core, apps] =
            ["/api/v1", "/apis/apps/v1"].map(|api| format!("{api}/namespaces/{}", self.namespace));
        let (selected, limit) = (format!("labelSelector={}", self.labels), format!("limit={MOST_OBJECTS}"));
        let service = format!("fieldSelector=metadata.name={VERSION}.{GROUP}");
        let events = format!("/api/v1/events?{limit}&fieldSelector=reportingComponent={REPORTER}");
        [
            (NODES, format!("/api/v1/nodes?{limit}")),
            ("mirrors", format!("{ours}/mirrors?{limit}")),
            ("clustermirrors", format!("{ours}/clustermirrors?{limit}")),
            ("mirrortargets", format!("{ours}/mirrortargets?{limit}")),
            ("mirrornodes", format!("{ours}/mirrornodes?{limit}")),
            ("daemonsets", format!("{apps}/daemonsets?{limit}&{selected}")),
            ("deployments", format!("{apps}/deployments?{limit}&{selected}")),
            ("configmaps", format!("{core}/configmaps?{limit}&{selected}")),
            ("apiservices", format!("/apis/apiregistration.k8s.io/v1/apiservices?{service}")),
            ("podreports", format!("/apis/{GROUP}/{VERSION}/podreports?{limit}")),
            ("events", format!("{core}/events?{limit}")),
            ("events-of-agents", format!("{events}mirror-agent")),
            ("events-of-controller", format!("{events}controller")),
            ("events-of-apiserver", format!("{events}apiserver")),
            // Without a limit, because agents that are not ready can be anywhere in the list.
            (PODS, format!("{core}/pods?{selected}")),
        ]
    }

    /// The objects of a list that the archive has, and the number of those that it leaves out.
    pub(super) fn part(&self, kind: &str, mut objects: Vec<Value>) -> (Vec<Value>, usize) {
        // Of Events those about the release, or from it.
        objects.retain(|object| {
            let about = object["involvedObject"]["name"].as_str();
            let is_from_us = text(&object["reportingComponent"]).starts_with(REPORTER);
            is_from_us || about.is_none_or(|name| name.starts_with(&self.name))
        });
        let all = objects.len();
        // First pods that are not ready, and reports about tapped NICs.
        objects.sort_by_key(|object| {
            let containers = array(&object["status"]["containerStatuses"]);
            let is_ready = !containers.is_empty() && containers.iter().all(|of| of["ready"] == true);
            is_ready || object["nics"] == json!([])
        });
        let mut counts = BTreeMap::<String, usize>::new();
        objects.retain(|object| {
            let component = text(&object["metadata"]["labels"][COMPONENT]);
            let count = counts.entry(component.to_owned()).or_default();
            *count += 1;
            *count <= if kind == PODS { MOST_PODS } else { MOST_OBJECTS }
        });
        let left_out = all - objects.len();
        if kind == NODES {
            objects = objects.iter().map(node).collect();
        }
        (objects, left_out)
    }
}

fn node(node: &Value) -> Value {
    let info = &node["status"]["nodeInfo"];
    json!({
        "name": node["metadata"]["name"], "kernel": info["kernelVersion"], "system": info["operatingSystem"],
        "image": info["osImage"], "architecture": info["architecture"], "runtime": info["containerRuntimeVersion"],
    })
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The paths and URIs of the texts of a pod: the logs, those before the last restart too, and the metrics.
pub(super) fn texts(pod: &Value) -> Vec<(String, String)> {
    let [namespace, name] = ["namespace", "name"].map(|key| text(&pod["metadata"][key]));
    let base = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let mut texts = Vec::new();
    for container in array(&pod["spec"]["containers"]) {
        let path = path(name, text(&container["name"]));
        let log = format!("{base}/log?container={}&tailLines={MOST_LINES}", text(&container["name"]));
        let mut statuses = array(&pod["status"]["containerStatuses"]).iter();
        let status = statuses.find(|status| status["name"] == container["name"]);
        if status.is_some_and(|status| status["restartCount"].as_u64() > Some(0)) {
            texts.push((format!("{path}.previous.log"), format!("{log}&previous=true")));
        }
        texts.push((format!("{path}.log"), log));
        for port in array(&container["ports"]).iter().filter(|port| port["name"] == "metrics") {
            let uri = format!("{base}:{}/proxy/metrics", port["containerPort"]);
            texts.push((format!("{path}.metrics"), uri));
        }
    }
    texts
}

/// The path of the files of a container in the archive, without their extension. It is below the directory of pods,
/// whatever the names are. A dot is replaced, too: names in Kubernetes have no underscores, so different pods have
/// different paths.
fn path(pod: &str, container: &str) -> String {
    let safe = |name: &str| name.replace(|char: char| !char.is_ascii_alphanumeric() && char != '-', "_");
    format!("pods/{}/{}", safe(pod), safe(container))
}

/// Cuts a text to its last bytes, from the beginning of a line. Returns whether it was too long.
pub(super) fn keep_end(text: &mut Vec<u8>, most: usize) -> bool {
    let Some(start) = text.len().checked_sub(most).filter(|start| *start > 0) else { return false };
    let end_of_line = text[start - 1..].iter().position(|byte| *byte == b'\n');
    // The last line can be too long itself.
    let line = end_of_line.map(|at| start + at).filter(|line| *line < text.len());
    text.drain(..line.unwrap_or(start));
    true
}

/// Whether a text is a log with as many lines as are requested, so that older ones can be missing.
pub(super) fn has_all_lines(path: &str, text: &[u8]) -> bool {
    path.ends_with(".log") && text.split(|byte| *byte == b'\n').count() > MOST_LINES
}

#[cfg(test)]
mod tests;
