//! Many pods at a time.

use mirror_tests::{PATIENCE, check, eventually, list};

use crate::Node;

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
    assert_eq!(told("podmirror_skipped_pods{reason=\"NoNetns\"}"), (3 * EACH) as f64);
    assert_eq!(lab.status().taps, []);
    // A value that is none counts as if it did not stand there, and each owner is told, once.
    let events = || {
        let events = api.kubectl("get events --field-selector reason=BadAnnotation -o name");
        events.lines().count()
    };
    eventually(PATIENCE, || check(events() == EACH, || format!("{} are told", events())));
    api.kubectl("delete pods --all --wait=false");
    lab.wait_metrics(|metrics| {
        !metrics.contains_key("podmirror_bad_annotations") || metrics["podmirror_bad_annotations"] == 0.0
    });
    agent.stop();
    assert_eq!(events(), EACH);
}
