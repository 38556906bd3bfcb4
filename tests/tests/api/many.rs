//! Many pods at a time.

use std::time::Instant;

use mirror_tests::{Comparison, PATIENCE, PodNs, Status, check, eventually, list};
use serde_json::{Value, json};

use crate::{
    Node,
    resources::{Story, resource},
};

#[test]
fn a_node_has_a_thousand_pods() {
    const EACH: usize = 250;
    let Node { api, lab } = &Node::new("thousand");
    let namespace = api.namespace();
    api.kubectl(&format!("annotate namespace {namespace} podmirror.io/mirror=true"));
    let mut objects = Vec::new();
    for number in 0..EACH {
        for mirror in [None, Some("false"), Some("sideways"), Some("egress")] {
            let name = format!("pod{number}-{}", mirror.unwrap_or("inherits"));
            let annotation = mirror.map(|mirror| ("podmirror.io/mirror", mirror));
            objects.push(api.object(&name, annotation.as_slice()));
        }
    }
    api.kubectl_with("create -f -", &list(&objects).to_string());

    let agent = api.agent(lab, &[]);
    lab.wait_get("/readyz", 200);
    let metrics = lab.metrics();
    let told = |name: &str| metrics.get(name).copied().unwrap_or_default();
    assert_eq!(told("podmirror_bad_annotations"), EACH as f64);
    assert_eq!(told("podmirror_pods_not_mirrored{extent=\"whole\",reason=\"NoNetns\"}"), (3 * EACH) as f64);
    assert_eq!(lab.status().taps, []);
    // An invalid value counts as a missing annotation, and each owner gets one Event.
    let events = || {
        let events = api.kubectl("get events --field-selector reason=BadAnnotation -o name");
        events.lines().count()
    };
    eventually(PATIENCE, || check(events() == EACH, || format!("{} Events", events())));
    api.kubectl("delete pods --all --wait=false");
    lab.wait_metrics(|metrics| {
        !metrics.contains_key("podmirror_bad_annotations") || metrics["podmirror_bad_annotations"] == 0.0
    });
    agent.stop();
    assert_eq!(events(), EACH);
}

/// Mirrors that select all pods, with their fields.
const WIDE: [&str; 3] = ["echoes", "datagrams", "sent"];
/// Number of pods, and of Mirrors including the wide ones. Each other Mirror selects one pod.
const HUNDRED: usize = 100;

fn hundred_mirrors(pods: &[PodNs]) -> Vec<Value> {
    let specs = [
        json!({ "filter": "icmp" }),
        json!({ "filter": "udp", "snapLength": 96 }),
        json!({ "direction": "Egress", "filter": "icmp", "targetRef": { "name": "ids" } }),
    ];
    let wide = WIDE.iter().zip(specs).map(|(name, spec)| resource("Mirror", name, &json!({}), &spec));
    // Each of these has a filter of its own.
    let narrow = pods.iter().take(HUNDRED - WIDE.len()).map(|pod| {
        let labels = json!({ "matchLabels": { "app": pod.name() } });
        let filter = format!("icmp and host {}", pod.v4());
        resource("Mirror", pod.name(), &labels, &json!({ "filter": filter }))
    });
    wide.chain(narrow).collect()
}

/// The names of a pod's mirrors, in the order of the kernel's tables.
fn mirrors_of(number: usize, pod: &PodNs) -> Vec<String> {
    let own = (number < HUNDRED - WIDE.len()).then_some(pod.name());
    let mut names: Vec<_> = WIDE.into_iter().chain(own).map(|name| format!("mirror/{name}")).collect();
    names.sort();
    names
}

/// Each Mirror gets exactly its own packets, and reports which pods it covers.
#[test]
fn a_node_has_a_hundred_pods_and_a_hundred_mirrors() {
    let story = &Story::new("hundred");
    let Node { api, lab } = &story.node;
    let pods: Vec<_> = (0..HUNDRED).map(|number| lab.pod(&format!("pod{number}"), "br0")).collect();
    let objects: Vec<_> = pods.iter().map(|pod| api.object(pod.name(), &[])).collect();
    api.kubectl_with("create -f -", &list(&objects).to_string());
    let _containers: Vec<_> = pods.iter().map(|pod| api.start(lab, pod)).collect();
    let agent = api.agent(lab, &["--define-target", "ids=ids0"]);
    lab.wait_get("/readyz", 200);

    let begun = Instant::now();
    api.kubectl_with("create -f -", &list(&hundred_mirrors(&pods)).to_string());
    let created = begun.elapsed();
    let is_whole = |status: &Status| {
        for (number, pod) in pods.iter().enumerate() {
            let tap = status.taps.iter().find(|tap| tap.device == pod.veth_host() && tap.is_attached());
            let sessions = tap.map_or(&[][..], |tap| &tap.sessions);
            let mut names: Vec<_> = sessions.iter().map(|session| session.mirror.clone()).collect();
            names.sort();
            check(names == mirrors_of(number, pod), || format!("{}: {names:?}", pod.name()))?;
        }
        Ok(())
    };
    eventually(PATIENCE, || is_whole(&lab.try_status()?));
    eprintln!(
        "100 Mirrors were created in {created:.1?}, and stood on 100 pods after {:.1?}",
        begun.elapsed()
    );

    let [from, to] = [&pods[5], &pods[HUNDRED - 1]];
    let comparison = Comparison::of(from.netns(), lab);
    from.ping(to.v4(), 5, 56);
    assert_eq!(comparison.is_equal().len(), 10);
    let status = lab.status();
    for pod in &pods {
        let tap = status.tap(pod.veth_host());
        let pings = if [from, to].iter().any(|of| of.name() == pod.name()) { 5 } else { 0 };
        let matched = |mirror: &str, direction: &str| {
            let session = tap.session(&format!("mirror/{mirror}"));
            session.packets(direction, "copied") + session.packets(direction, "duplicate")
        };
        for direction in ["ingress", "egress"] {
            assert_eq!(matched("echoes", direction), pings, "{tap:#?}");
            assert_eq!(matched("datagrams", direction), 0, "{tap:#?}");
        }
        assert_eq!((matched("sent", "egress"), matched("sent", "ingress")), (pings, 0), "{tap:#?}");
    }
    let own = status.tap(from.veth_host()).session("mirror/pod5");
    assert_eq!(own.total("copied") + own.total("duplicate"), 10, "{own:#?}");

    let told: Value = eventually(PATIENCE, || {
        let told = api.try_kubectl(&format!("get mirrornode {} -o json", lab.node().name()))?;
        let told: Value = serde_json::from_str(&told).unwrap();
        let mirrors = told["status"]["mirrors"].as_array().cloned().unwrap_or_default();
        let covered = |of: &Value| {
            let is_wide = WIDE.iter().any(|name| of["name"] == *name);
            let pods = if is_wide { HUNDRED } else { 1 };
            of["pods"]["selected"] == pods && of["pods"]["covered"] == pods
        };
        let count = mirrors.iter().filter(|of| covered(of)).count();
        check(count == HUNDRED, || format!("{count} of {} are covered", mirrors.len())).map(|()| told)
    });
    assert_eq!(told["status"]["pods"], json!({ "selected": HUNDRED, "covered": HUNDRED }));

    let begun = Instant::now();
    api.kubectl("delete mirrors --all");
    eventually(PATIENCE, || {
        let taps = lab.try_status()?.taps.len();
        check(taps == 0, || format!("{taps} taps are left"))
    });
    eprintln!("they were deleted, and no tap was left, after {:.1?}", begun.elapsed());
    agent.stop();
}
