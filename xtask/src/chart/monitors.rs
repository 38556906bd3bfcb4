//! Checks that the monitors for the Prometheus operator reach the port of the metrics.
//!
//! The API server, the operator and Prometheus accept a monitor that selects nothing. Only missing series would show
//! such a mistake.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// The path of the metrics of agent and controller.
pub(super) const METRICS_PATH: &str = "/metrics";

/// Checks that the monitors reach the metrics of each workload, and name its node.
pub(super) fn check(objects: &[Value]) -> Result<()> {
    let of_kind = |kind: &str| objects.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    let monitors = [of_kind("PodMonitor"), of_kind("ServiceMonitor")].concat();
    let workloads: Vec<_> = objects.iter().filter(|object| object["spec"]["template"].is_object()).collect();
    let mut reached = BTreeSet::new();
    for monitor in &monitors {
        let (name, spec) = (title(monitor), &monitor["spec"]);
        for other in [&spec["namespaceSelector"], &spec["selector"]["matchExpressions"]] {
            ensure!(other.is_null(), "{name} also selects by {other}, which this check does not know");
        }
        for endpoint in items(&spec["podMetricsEndpoints"]).chain(items(&spec["endpoints"])) {
            let (port, selector, path) =
                (&endpoint["port"], &spec["selector"]["matchLabels"], &endpoint["path"]);
            ensure!(port.is_string(), "{name} names no port");
            ensure!(path == METRICS_PATH, "{name} scrapes {path}, and not {METRICS_PATH}");
            // The labels namespace and pod are those of the mirrored pod.
            ensure!(endpoint["honorLabels"].as_bool() == Some(true), "{name} does not honor labels");
            let names_node = items(&endpoint["relabelings"]).any(|rule| rule["targetLabel"] == "node");
            ensure!(names_node, "{name} adds no label node, which the alerts have");
            if monitor["kind"] == "PodMonitor" {
                reached.extend(with_port(monitor, selector, port, &workloads)?);
                continue;
            }
            for service in selected(monitor, selector, &of_kind("Service"), "/metadata/labels")? {
                let found = items(&service["spec"]["ports"]).find(|own| own["name"] == *port);
                let found = found.with_context(|| format!("{} has no port {port}", title(service)))?;
                let target = found.get("targetPort").unwrap_or(&found["port"]);
                reached.extend(with_port(service, &service["spec"]["selector"], target, &workloads)?);
            }
        }
    }
    match workloads.iter().map(|workload| title(workload)).find(|name| !reached.contains(name)) {
        Some(missed) if !monitors.is_empty() => bail!("no monitor reaches {missed}"),
        _ => Ok(()),
    }
}

/// The workloads that an object selects. Each must have a port of this name or number.
fn with_port(by: &Value, selector: &Value, port: &Value, workloads: &[&Value]) -> Result<Vec<String>> {
    let selected = selected(by, selector, workloads, "/spec/template/metadata/labels")?;
    for workload in &selected {
        let containers = items(&workload["spec"]["template"]["spec"]["containers"]);
        let mut ports = containers.flat_map(|container| items(&container["ports"]));
        let has_port = ports.any(|own| own["name"] == *port || own["containerPort"] == *port);
        ensure!(has_port, "{} has no port {port}, which {} names", title(workload), title(by));
    }
    Ok(selected.into_iter().map(title).collect())
}

/// The objects with the selected labels, in the same namespace: at least one. `place` is that of the labels.
fn selected<'a>(by: &Value, selector: &Value, among: &[&'a Value], place: &str) -> Result<Vec<&'a Value>> {
    let wanted = selector.as_object().filter(|wanted| !wanted.is_empty());
    let wanted = wanted.with_context(|| format!("{} selects no labels", title(by)))?;
    let is_selected = |object: &&&Value| {
        let labels = object.pointer(place).unwrap_or(&Value::Null);
        let in_namespace = object["metadata"]["namespace"] == by["metadata"]["namespace"];
        in_namespace && wanted.iter().all(|(label, value)| labels[label] == *value)
    };
    let selected: Vec<_> = among.iter().filter(is_selected).copied().collect();
    ensure!(!selected.is_empty(), "{} selects nothing", title(by));
    Ok(selected)
}

/// The kind and the name of an object.
fn title(object: &Value) -> String {
    let words = [&object["kind"], &object["metadata"]["name"]];
    words.map(|word| word.as_str().unwrap_or_default()).join(" ")
}

pub(super) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}
