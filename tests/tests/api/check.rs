//! `kubectl mirror check` with a real API server: the server's data on the CRDs, the nodes and the user's rights.

use std::{env, fs, path::Path, process::Command};

use serde_json::{Value, json};

use mirror_tests::Api;

use crate::{mirror_nodes::shipped, resources::Story};

/// The exit code and the printed report.
fn check(namespace: &str, kubeconfig: Option<&Path>) -> (i32, Value) {
    let mut plugin = Command::new(env::var_os("MIRROR_PLUGIN").unwrap());
    plugin.args(["check", "-o", "json", "-n", namespace, "--agents", namespace]);
    if let Some(kubeconfig) = kubeconfig {
        plugin.env("KUBECONFIG", kubeconfig);
    }
    let output = plugin.output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code().unwrap(), report.unwrap_or_else(|error| panic!("{error}: {output:?}")))
}

/// Results and findings of one check.
fn found<'r>(report: &'r Value, check: &str) -> Vec<(&'r str, &'r str)> {
    let findings = report["findings"].as_array().unwrap().iter().filter(|of| of["check"] == check);
    findings.map(|of| (of["result"].as_str().unwrap(), of["found"].as_str().unwrap())).collect()
}

/// Writes an object and its status. No kubelet or controller runs here to write the status.
pub(crate) fn apply(api: &Api, mut object: Value, status: Value) {
    object["metadata"]["namespace"] = api.namespace().into();
    api.kubectl_with("apply --server-side -f -", &object.to_string());
    let metadata = json!({ "name": object["metadata"]["name"] });
    let object = json!({
        "apiVersion": object["apiVersion"], "kind": object["kind"], "metadata": metadata, "status": status,
    });
    api.kubectl_with("apply --server-side --subresource=status -f -", &object.to_string());
}

/// The plugin must find the objects of the chart, by what the chart writes into them.
#[test]
fn check_finds_what_the_chart_has_installed() {
    let story = Story::new("check-chart");
    let (api, node) = (&story.node.api, story.node.lab.node().name());
    let name = api.namespace();
    let agents = shipped("DaemonSet", "podmirror");
    let mut pod = api.object("agent", &[]);
    pod["metadata"]["labels"] = agents["spec"]["template"]["metadata"]["labels"].clone();
    let agent = &agents["spec"]["template"]["spec"]["containers"][0];
    for key in ["name", "image"] {
        pod["spec"]["containers"][0][key] = agent[key].clone();
    }
    let numbers = |ready: i32| {
        json!({
            "desiredNumberScheduled": 1, "currentNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": ready,
        })
    };
    let is_ready = |ready: bool| {
        let container = json!({
            "name": agent["name"], "ready": ready, "restartCount": 0, "image": agent["image"], "imageID": "",
        });
        json!({ "containerStatuses": [container] })
    };
    apply(api, agents.clone(), numbers(0));
    apply(api, pod.clone(), is_ready(false));
    let (code, report) = check(name, None);
    assert_eq!((code, &report["result"]), (1, &json!("FAIL")), "{report:#}");
    assert_eq!(found(&report, "agents")[0], ("FAIL", format!("no agent of 1 is ready: {node}").as_str()));
    let controller = found(&report, "controller");
    assert!(matches!(controller[..], [("WARN", found)] if found.contains("no controller")), "{controller:?}");

    apply(api, agents.clone(), numbers(1));
    apply(api, pod, is_ready(true));
    apply(
        api,
        shipped("Deployment", "podmirror-controller"),
        json!({ "replicas": 1, "readyReplicas": 1, "availableReplicas": 1 }),
    );
    let (_, report) = check(name, None);
    assert_eq!(found(&report, "agents")[0], ("OK", "1 agent ready on 1 node"), "{report:#}");
    let version = format!("all agents have {0}, this plugin has {0}", env!("CARGO_PKG_VERSION"));
    assert_eq!(found(&report, "versions"), [("OK", version.as_str())]);
    // The second finding can be stale reports of other stories' nodes.
    assert_eq!(found(&report, "reports")[0], ("WARN", format!("no MirrorNode of {node}").as_str()));
    assert_eq!(found(&report, "controller"), [("OK", "1 available")]);
    // Another story may have the API of packets.
    assert_eq!(found(&report, "packets").len(), 1, "{report:#}");
}

#[test]
fn check_knows_the_crds_of_its_version_and_the_rights_of_its_user() {
    let mut story = Story::new("check");
    let name = story.node.api.namespace().to_owned();
    story.of_cluster.push(format!("node {name}"));
    let api = &story.node.api;
    let mut node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    api.kubectl_with("apply --server-side -f -", &node.to_string());
    node["status"]["nodeInfo"] = json!({
        "operatingSystem": "linux", "architecture": "amd64", "kernelVersion": "5.15.0-91-generic", "bootID": "",
        "containerRuntimeVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "osImage": "",
        "systemUUID": "",
    });
    api.kubectl_with("apply --server-side --subresource=status -f -", &node.to_string());

    let (code, report) = check(&name, None);
    assert_eq!((code, &report["result"]), (0, &json!("WARN")), "{report:#}");
    let version = found(&report, "server");
    assert!(matches!(version[..], [("OK", version)] if version.starts_with("Kubernetes v1.")), "{version:?}");
    assert_eq!(found(&report, "resources"), [("OK", "4 CRDs of this version")]);
    assert_eq!(found(&report, "rights"), [("OK", "you may use all commands of this plugin")]);
    let kernel = found(&report, "kernel");
    let is_old =
        |(result, found): &(&str, &str)| *result == "WARN" && found.contains(&format!("{name} (5.15.0"));
    assert!(kernel.iter().any(is_old), "{kernel:?}");
    let agents = format!("podmirror is not installed in namespace {name}");
    assert_eq!(found(&report, "agents"), [("WARN", agents.as_str())], "the CRDs are installed");

    // A user without any right.
    api.kubectl("create serviceaccount nobody");
    let nobody = api.kubeconfig_with(&api.kubectl("create token nobody"));
    let (code, report) = check(&name, Some(&nobody));
    assert_eq!(code, 0, "{report:#}");
    let rights = found(&report, "rights");
    assert_eq!(rights.len(), 7, "{rights:?}");
    let lacks = format!("you may not create mirrors in namespace {name} (for on)");
    assert_eq!(rights[0], ("WARN", lacks.as_str()));
    for check in ["nodes", "network", "resources", "agents"] {
        let found = found(&report, check);
        assert!(matches!(found[..], [("WARN", why)] if why.contains("forbidden")), "{check}: {found:?}");
    }

    // No API server.
    let nowhere = story.node.lab.files().join("nowhere");
    let mut config: Value = serde_json::from_slice(&fs::read(&nobody).unwrap()).unwrap();
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1".into();
    fs::write(&nowhere, config.to_string()).unwrap();
    let (code, report) = check(&name, Some(&nowhere));
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (1, 1), "{report:#}");
    assert_eq!(found(&report, "server")[0].0, "FAIL");
}
