//! The runbooks of the chart's alerts: a page in Markdown, made of the texts of reasons and results.
//!
//! A test compares `docs/runbooks.md` with it, or writes the file, as `cargo xtask gen` does. The alerts are in
//! `deploy/chart/files/alerts.yaml`.

use std::{collections::BTreeSet, env, fmt::Write as _, fs};

use mirror_common::verdict::{Direction, Verdict};

use super::super::{sentence, verdicts::words};
use crate::{
    coverage::{State, Way},
    model::{Hidden, Name, Place, PodId, ResourceId, TargetName},
    select::Why,
    settings::SettingError,
    status::LOSSES,
};

/// The page, with the places of its tables.
const PAGE: &str = "\
# Runbooks

<!-- Generated from the code by `cargo xtask gen`: do not edit. -->

What to do about each [alert of the chart](metrics.md#alerts-and-dashboard). `kubectl mirror check` looks for the causes
that affect whole nodes.

## PodmirrorNotMirrored

`mirror-agent status` on the node lists the pods. So does `kubectl get events -A --field-selector reason=REASON`, for most
reasons. `kubectl mirror explain POD` describes one pod.

REASONS
## PodmirrorCoverageLost

`kubectl mirror coverage` lists the NICs with their [states](operations.md#coverage).

STATES
## PodmirrorTargetDown

`status.notReady` of a MirrorTarget has the reason of each node, and `mirror-agent status` on the node that of each target.
A device must exist and be up, a [collector](targets.md#a-pod-as-the-target) must run on the node, and a
[tunnel](targets.md#a-tunnel-as-the-target) needs a route.

## PodmirrorCopyLoss

`kubectl mirror top` shows which NICs lose copies.

RESULTS
## PodmirrorAgentNotReady

`kubectl mirror check` names the nodes. The agent's log has the reason, and `/mirror-agent ready` in its pod prints it.
Installed mirrors [continue](operations.md#what-runs-without-the-agent) without the agent.

## PodmirrorAgentNotConnected

The [packets API](packets-api.md) has no packets and reports of some nodes: `kubectl mirror coverage -A` warns of them. The
logs of their agents have the reason, such as another [version](support.md#different-versions) of the protocol, or no way
to port 10709 of the server's pods.

## PodmirrorReportStale

`kubectl get mirrornodes` shows the age of each report. Look at the agent's pod and log on these nodes, and at
[nodes without an agent](resources.md#a-node-that-is-away).

## PodmirrorCapacityNear

When a [table](choosing.md#numbers) is full, further pods are not mirrored:

NO_ROOM";

const ALERTS: &str = include_str!("../../../../../deploy/chart/files/alerts.yaml");

/// Returns the whole page.
fn runbooks() -> String {
    let row = |why: &Why| (why.name(), format!("{} {}", sentence(&why.to_string()), why.remedy()));
    let rows: Vec<_> = reasons().iter().map(row).collect();
    let only =
        |names: &[&str]| rows.iter().filter(|(name, _)| names.contains(name)).cloned().collect::<Vec<_>>();
    let mut states = only(&State::NAMES);
    states.push(("NoHook", sentence(&State::NoHook.to_string()) + " The agent's log has the reason."));
    let losses =
        LOSSES.iter().filter(|verdict| **verdict != Verdict::TargetDown).map(|verdict| verdict.name());
    let results: Vec<_> = losses.map(|name| (name, words(name).to_owned())).collect();
    PAGE.replace("REASONS", &table("reason", &rows))
        .replace("STATES", &table("state", &states))
        .replace("RESULTS", &table("result", &results))
        .replace("NO_ROOM", &table("reason", &only(&["NoRoom"])))
}

/// A table of names, each with its meaning and its remedy.
fn table(label: &str, rows: &[(&str, String)]) -> String {
    let mut table = format!("| {label} | meaning and remedy |\n| --- | --- |\n");
    for (name, words) in rows {
        writeln!(table, "| `{name}` | {} |", words.replace('|', "\\|")).unwrap();
    }
    table
}

/// The reasons of a pod that an alert can have, each once for each remedy. `…` stands for a part that differs.
fn reasons() -> Vec<Why> {
    let some = || "…".to_owned();
    let target = || TargetName("ids".parse().unwrap());
    let resource = ResourceId { namespace: Some(some()), name: Name::default() };
    vec![
        Why::NoNetns,
        Why::NetnsUnreadable(some()),
        Why::NoNic,
        Why::NoSuchNic,
        Why::Loopback,
        Why::NoSuchNetwork { key: some(), is_told: true },
        Why::NoHostInterface(some()),
        Why::TapsInsideOff,
        Why::TooManyNics,
        Why::NoRelayDevice(some()),
        Why::TappedFor(PodId { uid: some(), namespace: some(), name: some() }),
        Why::MirrorInterface(some()),
        Why::NotEthernet,
        Why::TunnelInTunnel(some()),
        Why::BadSetting(Place::Pod, SettingError { key: "…", value: some(), reason: some() }),
        Why::Refused { resource, reason: "", message: some() },
        Why::AnnotationsUnread(some()),
        Why::NoSuchTarget(some()),
        Why::TargetRefused(target(), some()),
        Why::TargetNotAllowed(target()),
        Why::Hidden(Direction::Egress, Hidden::NoHook),
        Why::Hidden(Direction::Egress, Hidden::AtExit(some())),
        Why::Hidden(Direction::Egress, Hidden::Program(some())),
        Why::Bypassed(Direction::Ingress, Way::Peer),
        Why::Bypassed(Direction::Ingress, Way::L3s),
        Why::Bypassed(Direction::Ingress, Way::Unseen),
        Why::Removed(Direction::Egress),
        Why::Uncut(target(), Hidden::Program(some())),
        Why::TooManyMirrors,
        Why::NoRoom(some()),
        Why::FilterRefused(some()),
    ]
}

/// The names in the first list of the alerts after `start`.
fn listed(start: &str) -> BTreeSet<&'static str> {
    let (_, list) = ALERTS.split_once(start).unwrap();
    list.split('"').next().unwrap().split('|').collect()
}

#[test]
fn the_page_is_up_to_date() {
    const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/runbooks.md");
    let page = runbooks();
    if env::var_os("PODMIRROR_WRITE_GENERATED").is_some() {
        fs::write(FILE, &page).unwrap();
    }
    assert!(fs::read_to_string(FILE).unwrap() == page, "{FILE}: `cargo xtask gen` writes it");
}

#[test]
fn every_alert_has_the_remedies_of_its_reasons_states_or_results() {
    let page = runbooks();
    let rows = |alert: &str| -> BTreeSet<&str> {
        let (_, section) = page.split_once(&format!("\n## {alert}\n")).unwrap();
        let lines = section.lines().take_while(|line| !line.starts_with("## "));
        lines.filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
    };
    assert_eq!(rows("PodmirrorCopyLoss"), listed("result=~\""));
    assert_eq!(rows("PodmirrorCoverageLost"), listed("state=~\""));
    // All names in `Why::name`, without those that the alert leaves out, of captures, and of pods that nobody requests.
    let source = include_str!("../../../select/why.rs");
    let names = source.split_once("pub const fn name(").unwrap().1.split_once("impl fmt").unwrap().0;
    let mut names: BTreeSet<_> = names.split('"').skip(1).step_by(2).chain([Why::HIDDEN]).collect();
    for other in listed("reason!~\"").into_iter().chain(["NoSuchInterface", "NoSuchPod", "NoRequest"]) {
        assert!(names.remove(other), "{other}");
    }
    assert_eq!(rows("PodmirrorNotMirrored"), names);
    for alert in ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(page.contains(&format!("\n## {alert}\n")), "no {alert}");
    }
}
