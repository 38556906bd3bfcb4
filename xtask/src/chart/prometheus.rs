//! Checks the objects for the Prometheus operator: monitors reach the port of the metrics, and alerts (`alerts`) name
//! metrics that exist.
//!
//! The API server, the operator and Prometheus accept a monitor that selects nothing, and an alert on an unknown
//! metric. Only missing series and alerts would show such mistakes.

mod alerts;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;

use crate::workspace;

/// The labels that the operator gives to the targets of both kinds of monitors.
const OF_TARGET: [&str; 6] = ["container", "endpoint", "instance", "job", "namespace", "pod"];

type Labels = BTreeSet<String>;

/// Checks the manifests. Each has the values, or the file, that it was rendered with.
pub(super) fn check(manifests: &BTreeMap<String, String>) -> Result<()> {
    let path = metrics_path()?;
    let metrics = alerts::metrics()?;
    let mut rules = BTreeSet::new();
    for (values, manifest) in manifests {
        // Most manifests have no object for the operator.
        if !manifest.contains("apiVersion: monitoring.coreos.com/") {
            continue;
        }
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(manifest).map_err(|why| anyhow!("{values}: {why}"))?;
        let checked = monitors(&objects, &path).and_then(|labels| alerts::check(&objects, &metrics, &labels));
        rules.extend(checked.with_context(|| values.clone())?);
    }
    alerts::check_syntax(&rules)
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(workspace::root().join(file)).with_context(|| file.to_owned())
}

/// The path of the metrics in the HTTP server of agent and controller.
fn metrics_path() -> Result<String> {
    let server = read("mirror-agent/src/admin.rs")?;
    let path = server.split_once("\" => Self::metrics").and_then(|(before, _)| before.rsplit_once('"'));
    let (_, path) = path.context("mirror-agent/src/admin.rs has no path with the metrics")?;
    Ok(path.to_owned())
}

/// Checks that the monitors reach the metrics of each workload, and returns the labels of their targets.
fn monitors(objects: &[Value], path: &str) -> Result<Labels> {
    let of_kind = |kind: &str| objects.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    let monitors = [of_kind("PodMonitor"), of_kind("ServiceMonitor")].concat();
    let workloads: Vec<_> = objects.iter().filter(|object| object["spec"]["template"].is_object()).collect();
    let mut labels: Labels = OF_TARGET.map(str::to_owned).into();
    let mut reached = BTreeSet::new();
    for monitor in &monitors {
        let (name, spec) = (title(monitor), &monitor["spec"]);
        for other in [&spec["namespaceSelector"], &spec["selector"]["matchExpressions"]] {
            ensure!(other.is_null(), "{name} also selects by {other}, which this check does not know");
        }
        for endpoint in items(&spec["podMetricsEndpoints"]).chain(items(&spec["endpoints"])) {
            let (port, selector) = (&endpoint["port"], &spec["selector"]["matchLabels"]);
            ensure!(port.is_string(), "{name} names no port");
            ensure!(endpoint["path"] == path, "{name} scrapes {}, and not {path}", endpoint["path"]);
            // The labels namespace and pod are those of the mirrored pod.
            ensure!(endpoint["honorLabels"].as_bool() == Some(true), "{name} does not honor labels");
            let added = items(&endpoint["relabelings"]).filter_map(|rule| rule["targetLabel"].as_str());
            labels.extend(added.map(str::to_owned));
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
        _ => Ok(labels),
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
