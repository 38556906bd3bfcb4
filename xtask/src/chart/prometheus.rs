//! Checks the objects for the Prometheus operator and Grafana: monitors reach the port of the metrics, alerts and the
//! dashboard name metrics that exist, and alerts have a runbook.
//!
//! The API server, the operator and Prometheus accept a monitor that selects nothing, and an alert on an unknown
//! metric. Only missing series and alerts would show such mistakes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::{
    process::{Run as _, command, is_ci},
    programs, workspace,
};

/// The page with the metrics and their labels. The level api compares it with those of agent, controller and server.
pub(super) const PAGE: &str = "docs/metrics.md";
/// The path of the metrics of agent and controller.
pub(super) const METRICS_PATH: &str = "/metrics";
/// The labels that the operator gives to the targets of both kinds of monitors.
const OF_TARGET: [&str; 6] = ["container", "endpoint", "instance", "job", "namespace", "pod"];
/// Metrics of kube-state-metrics and of every process, and their labels.
const FOREIGN: [(&str, &[&str]); 3] = [
    ("kube_daemonset_status_number_unavailable", &["daemonset", "namespace"]),
    ("process_cpu_seconds_total", &[]),
    ("process_resident_memory_bytes", &[]),
];
/// The words of PromQL in the alerts and the dashboard.
const PROMQL: [&str; 13] =
    ["and", "by", "count", "group_left", "max", "min", "on", "or", "rate", "sum", "time", "topk", "unless"];
/// The key of the dashboard in its ConfigMap.
const DASHBOARD: &str = "podmirror.json";
/// The page with a section for each alert.
const RUNBOOKS: &str = "docs/runbooks.md";
/// The tests of the alerts for promtool.
const TESTS: &str = "xtask/chart/alerts.yaml";

type Labels = BTreeSet<String>;
type Metrics = BTreeMap<String, Labels>;

/// Checks monitors, alerts and the dashboard, and returns the groups of rules as files for Prometheus.
pub(super) fn check(objects: &[Value]) -> Result<Vec<String>> {
    let read = |page: &str| fs::read_to_string(workspace::root().join(page)).context(page.to_owned());
    let (metrics, labels, runbooks) = (documented(&read(PAGE)?), monitors(objects)?, read(RUNBOOKS)?);
    let mut files = Vec::new();
    for rules in objects.iter().filter(|object| object["kind"] == "PrometheusRule") {
        for alert in items(&rules["spec"]["groups"]).flat_map(|group| items(&group["rules"])) {
            let checked =
                check_names(alert, &metrics, &labels).and_then(|()| check_runbook(alert, &runbooks));
            checked.with_context(|| alert["alert"].to_string())?;
        }
        // JSON is YAML too.
        files.push(rules["spec"].to_string());
    }
    for dashboard in objects.iter().filter_map(|object| object["data"][DASHBOARD].as_str()) {
        let dashboard: Value = serde_json::from_str(dashboard).context(DASHBOARD)?;
        for query in items(&dashboard["panels"]).flat_map(|panel| items(&panel["targets"])) {
            check_names(query, &metrics, &labels).with_context(|| query["expr"].to_string())?;
        }
    }
    Ok(files)
}

/// Checks that an alert links to its section of the page.
fn check_runbook(alert: &Value, page: &str) -> Result<()> {
    let name = alert["alert"].as_str().unwrap_or_default();
    let link = alert["annotations"]["runbook_url"].as_str().unwrap_or_default();
    let section = format!("{RUNBOOKS}#{}", name.to_lowercase());
    ensure!(link.ends_with(&section), "runbook_url is {link:?}, and not {section}");
    let has_section = page.lines().any(|line| line.strip_prefix("## ") == Some(name));
    ensure!(has_section, "{RUNBOOKS} has no section {name}");
    Ok(())
}

/// Checks that the monitors reach the metrics of each workload, and returns the labels of their targets.
pub(super) fn monitors(objects: &[Value]) -> Result<Labels> {
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
            let (port, selector, path) =
                (&endpoint["port"], &spec["selector"]["matchLabels"], &endpoint["path"]);
            ensure!(port.is_string(), "{name} names no port");
            ensure!(path == METRICS_PATH, "{name} scrapes {path}, and not {METRICS_PATH}");
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

/// The metrics in the first cells of the page's tables, with their labels. `{…}` repeats the labels before it.
pub(super) fn documented(page: &str) -> Metrics {
    let owned = |labels: &[&str]| labels.iter().map(|label| (*label).to_owned()).collect::<Labels>();
    let mut metrics = Metrics::from(FOREIGN.map(|(name, labels)| (name.to_owned(), owned(labels))));
    let mut labels = Labels::new();
    let rows = page.lines().filter(|line| line.starts_with("| `podmirror_"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    for metric in cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)) {
        let (name, list) = metric.trim_end_matches('}').split_once('{').unwrap_or((metric, ""));
        if list != "…" {
            labels = list.split(',').filter(|label| !label.is_empty()).map(str::to_owned).collect();
        }
        metrics.insert(name.to_owned(), labels.clone());
    }
    metrics
}

/// Checks that the expression of an alert or a query has metrics and PromQL, and in lists of labels those of these
/// metrics or of their targets, and that the alert's texts contain only labels that the expression names.
pub(super) fn check_names(alert: &Value, metrics: &Metrics, of_target: &Labels) -> Result<()> {
    let expression = alert["expr"].as_str().context("there is no expression")?;
    let (mut known, mut labels, mut is_list) = (of_target.clone(), BTreeSet::new(), false);
    // Values of labels are between quotation marks.
    let text: String = expression.split('"').step_by(2).collect();
    for part in text.split_inclusive(['{', '}', '(', ')']) {
        for word in words(part) {
            match metrics.get(word) {
                _ if is_list => labels.extend([word]),
                Some(own) => known.extend(own.iter().cloned()),
                None if PROMQL.contains(&word) => {}
                None => bail!("{word} is no metric of {PAGE}"),
            }
        }
        is_list =
            part.ends_with('{') || part.ends_with('(') && matches!(words(part).last(), Some("by" | "on"));
    }
    if let Some(label) = labels.iter().find(|label| !known.contains(**label)) {
        bail!("{label} is no label of the metrics in the expression");
    }
    let texts = alert["annotations"].as_object().into_iter().flat_map(|texts| texts.values());
    for rest in texts.filter_map(Value::as_str).flat_map(|text| text.split("$labels.").skip(1)) {
        let label = words(rest).next().unwrap_or_default();
        ensure!(labels.contains(label), "a text has the label {label}, which the expression does not name");
    }
    Ok(())
}

/// The names in a text, which begin with a letter.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// Checks files of rules with promtool: the expressions, and the templates of the texts. Runs the tests of the alerts.
pub(super) fn check_syntax(files: &BTreeSet<String>) -> Result<()> {
    ensure!(!files.is_empty(), "no values make a PrometheusRule");
    let promtool = match programs::promtool() {
        Err(why) if !is_ci() => {
            println!("    NOT CHECKED: the syntax of the alerts: {why:#}");
            return Ok(());
        }
        promtool => promtool?,
    };
    let mut check = command(&promtool);
    check.args(["check", "rules"]);
    for (number, rules) in files.iter().enumerate() {
        let file = workspace::root().join(format!("target/chart/rules-{number}.yaml"));
        fs::write(&file, rules).with_context(|| file.display().to_string())?;
        check.arg(file);
    }
    check.run().context("Prometheus would refuse the alerts")?;
    command(&promtool).args(["test", "rules", TESTS]).current_dir(workspace::root()).run()
}
