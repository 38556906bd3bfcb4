//! The metrics of an agent, which docs/metrics.md lists.

use std::collections::BTreeSet;

use mirror_tests::{SOON, Tail, check, eventually, lint_metrics};

use crate::{
    Node,
    resources::{Story, file, run},
};

/// Prefixes of the metrics of other commands.
const OTHERS: [&str; 2] = ["podmirror_apiserver_", "podmirror_controller_"];
/// Metrics of copies that are shorter or longer than requested, because of a tunnel's MTU or of long headers. Streams
/// have none.
const OF_MISFITS: [&str; 4] = [
    "podmirror_cut_packets_total",
    "podmirror_cut_bytes_total",
    "podmirror_long_packets_total",
    "podmirror_long_bytes_total",
];

/// Checks that a scrape and docs/metrics.md have the same metrics among those that `is_one` selects.
pub(crate) fn has_documented(scrape: &str, is_one: impl Fn(&str) -> bool) -> Result<(), String> {
    let document = file("docs/metrics.md");
    let is_one = |name: &&str| name.starts_with("podmirror_") && is_one(name);
    let words = document.split(|of: char| !of.is_ascii_alphanumeric() && of != '_');
    let documented: BTreeSet<_> = words.filter(is_one).collect();
    let types = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let scraped: BTreeSet<_> = types.filter(is_one).collect();
    let only_one_has: Vec<_> = scraped.symmetric_difference(&documented).collect();
    check(only_one_has.is_empty(), || format!("only in the scrape or the document: {only_one_has:?}"))
}

/// An agent with a pod that is not mirrored yet, and pods whose copies a recorder keeps, has all metrics but
/// [`OF_MISFITS`].
#[test]
fn an_agent_has_the_metrics_of_the_document() {
    let story = &Story::new("metrics");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let network = ("k8s.v1.cni.cncf.io/network-status", r#"[{"name":"kube-ovn","interface":"eth0"}]"#);
    let annotations = [("podmirror.io/mirror", "true"), ("podmirror.io/target", "live"), network];
    let _containers = run(node, &pods, &annotations);
    // A pod without a network namespace yet.
    api.apply(&api.object("starting", &annotations));
    let [web, db] = &pods;
    let agent = api.agent(lab, &["--define-target", "live=stream"]);
    lab.wait_mirrored(&[web, db]);
    let recorder = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    lab.wait_status(|status| check(status.target("live").up, || "nobody records".into()));
    web.ping(db.v4(), 5, 56);
    let scrape = eventually(SOON, || {
        let scrape = lab.get("/metrics").body;
        let is_of_agent = |name: &str| !OTHERS.iter().any(|prefix| name.starts_with(prefix));
        has_documented(&scrape, |name| is_of_agent(name) && !OF_MISFITS.contains(&name)).map(|()| scrape)
    });
    lint_metrics(&scrape);
    recorder.kill();
    agent.stop();
}
