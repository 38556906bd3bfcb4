//! Checks the alerts of a PrometheusRule: the names in them, and with promtool their syntax.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{Labels, items, read};
use crate::{
    process::{Run as _, command, is_ci},
    programs, workspace,
};

/// The page that lists the metrics with their labels, and the sources that register them.
const PAGE: &str = "docs/metrics.md";
const SOURCES: [&str; 3] = ["metrics.rs", "metrics/controller.rs", "metrics/maps.rs"];
/// A metric of kube-state-metrics, and its labels.
const FOREIGN: (&str, [&str; 2]) = ("kube_daemonset_status_number_unavailable", ["daemonset", "namespace"]);
/// Words of PromQL before a list of labels.
const GROUPINGS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
/// Other words that are no names. A function is known by its parenthesis.
const WORDS: [&str; 8] = ["and", "or", "unless", "atan2", "bool", "offset", "inf", "nan"];

pub(super) type Metrics = BTreeMap<String, Labels>;

/// The metrics that alerts can name, with their labels. Those whose names the sources compute are left out.
pub(super) fn metrics() -> Result<Metrics> {
    let sources = SOURCES.map(|file| read(&format!("mirror-agent/src/{file}")));
    let sources: String = sources.into_iter().collect::<Result<_>>()?;
    let mut metrics = documented(&read(PAGE)?);
    metrics.retain(|name, _| sources.contains(&format!("\"{name}\"")));
    let (foreign, labels) = FOREIGN;
    metrics.insert(foreign.to_owned(), labels.map(str::to_owned).into());
    Ok(metrics)
}

/// The metrics in the first cells of the page's tables. `{…}` repeats the labels before it.
pub(super) fn documented(page: &str) -> Metrics {
    let mut metrics = Metrics::new();
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

/// Checks the names, and returns the groups of rules as files for Prometheus. `of_target`: the labels of each target.
pub(super) fn check(objects: &[Value], metrics: &Metrics, of_target: &Labels) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for rules in objects.iter().filter(|object| object["kind"] == "PrometheusRule") {
        for alert in items(&rules["spec"]["groups"]).flat_map(|group| items(&group["rules"])) {
            check_names(alert, metrics, of_target).with_context(|| alert["alert"].to_string())?;
        }
        // JSON is YAML too.
        files.push(rules["spec"].to_string());
    }
    Ok(files)
}

/// Checks that the metrics of an alert exist, that they or their targets have its labels, and that its texts contain
/// only labels that the expression names.
pub(super) fn check_names(alert: &Value, metrics: &Metrics, of_target: &Labels) -> Result<()> {
    let expression = alert["expr"].as_str().context("there is no expression")?;
    let [named, labels] = names(expression);
    let mut known = of_target.clone();
    for metric in named {
        let own = metrics.get(metric);
        let own = own.with_context(|| format!("{PAGE} or the agent's sources have no {metric}"))?;
        known.extend(own.iter().cloned());
    }
    for label in &labels {
        ensure!(known.contains(*label), "no metric of the expression has the label {label}");
    }
    let texts = alert["annotations"].as_object().into_iter().flat_map(|texts| texts.values());
    for rest in texts.filter_map(Value::as_str).flat_map(|text| text.split("$labels.").skip(1)) {
        let label = rest.split(|c: char| !is_of_word(c)).next().unwrap_or_default();
        ensure!(labels.contains(&label), "a text has the label {label}, which the expression does not name");
    }
    Ok(())
}

/// Checks files of rules with promtool: the expressions, and the templates of the texts.
pub(super) fn check_syntax(files: &BTreeSet<String>) -> Result<()> {
    ensure!(!files.is_empty(), "no values make a PrometheusRule");
    let promtool = match programs::promtool() {
        Err(why) if !is_ci() => {
            println!("    NOT CHECKED: the syntax of the alerts: {why:#}");
            return Ok(());
        }
        promtool => promtool?,
    };
    let mut check = command(promtool);
    check.args(["check", "rules"]);
    for (number, rules) in files.iter().enumerate() {
        let file = workspace::root().join(format!("target/chart/rules-{number}.yaml"));
        fs::write(&file, rules).with_context(|| file.display().to_string())?;
        check.arg(file);
    }
    check.run().context("Prometheus would refuse the alerts")
}

/// The names of metrics, and those of labels, in a PromQL expression.
fn names(expression: &str) -> [Vec<&str>; 2] {
    let [mut metrics, mut labels] = [Vec::new(), Vec::new()];
    let mut tokens = tokens(expression).into_iter().peekable();
    while let Some(token) = tokens.next() {
        let next = tokens.peek().copied().unwrap_or_default();
        let is_grouping = GROUPINGS.contains(&token);
        if token == "{" || (is_grouping && next == "(") {
            let end = if is_grouping { ")" } else { "}" };
            labels.extend(tokens.by_ref().take_while(|token| *token != end).filter(|token| is_name(token)));
        } else if is_name(token) && !is_grouping && !["(", "by", "without"].contains(&next) {
            metrics.push(token);
        }
    }
    metrics.retain(|name| !WORDS.contains(name));
    [metrics, labels]
}

/// The tokens of an expression. A range, or a string without an escaped quotation mark, is one token.
fn tokens(expression: &str) -> Vec<&str> {
    let (mut tokens, mut rest) = (Vec::new(), expression.trim_start());
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' | '\'' | '`' => rest[1..].find(first).map(|at| at + 2),
            '[' => rest.find(']').map(|at| at + 1),
            _ if is_of_word(first) => rest.find(|c: char| !is_of_word(c)),
            _ => Some(first.len_utf8()),
        };
        let (token, left) = rest.split_at(end.unwrap_or(rest.len()));
        tokens.push(token);
        rest = left.trim_start();
    }
    tokens
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// Whether a name or a number can contain this character.
fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '.')
}
