//! The chart with the values of each platform: the API server takes its objects.

use std::{fs, path::Path};

use mirror_tests::list;
use serde_json::Value;

use crate::resources::Story;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
/// Kinds of operators and platforms, which the server does not have.
const OTHERS: [&str; 6] =
    ["Certificate", "Issuer", "PodMonitor", "PrometheusRule", "SecurityContextConstraints", "ServiceMonitor"];

/// The server refuses unknown fields, as with `kubectl apply`.
#[test]
fn the_api_server_takes_the_chart_with_the_values_of_each_platform() {
    let story = &Story::new("chart");
    let api = &story.node.api;
    let version: Value = serde_json::from_str(&api.kubectl("version -o json")).unwrap();
    let version = version["serverVersion"]["gitVersion"].as_str().unwrap();
    let namespace = api.namespace();
    for entry in fs::read_dir(Path::new(CHART).join("ci")).unwrap() {
        let values = entry.unwrap().path();
        let values = values.display();
        let rendered = api.helm(&format!(
            "template podmirror {CHART} --namespace {namespace} --kube-version {version} --skip-tests --values {values}"
        ));
        let mut objects: Vec<Value> = serde_saphyr::from_multiple(&rendered).unwrap();
        objects.retain(|object| !OTHERS.contains(&object["kind"].as_str().unwrap()));
        // In one request for each object: other stories create and delete some of the same names.
        let words = "apply --server-side --force-conflicts --dry-run=server -f -";
        let told = api.kubectl_with(words, &list(&objects).to_string());
        assert_eq!(told.matches(" (server dry run)").count(), objects.len(), "{values}: {told}");
    }
}
