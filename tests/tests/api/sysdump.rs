//! `kubectl mirror sysdump` with a real API server: what the archive has, that no secret is in it, and what it says about
//! the rest.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use mirror_tests::{SOON, check, eventually};
use serde_json::{Value, json};

use crate::{
    check::apply,
    mirror_nodes::shipped,
    plugin::plugin,
    resources::{Story, resource},
};

const SECRET: &str = "correct-horse-battery-staple";

/// The standard output of a program.
#[track_caller]
fn output(program: &str, arguments: &[&str], file: &Path) -> Vec<u8> {
    let output = Command::new(program).args(arguments).arg(file).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The directory of an archive, unpacked beside it.
#[track_caller]
fn unpacked(file: &Path) -> PathBuf {
    let directory = file.with_extension("unpacked");
    fs::create_dir(&directory).unwrap();
    output("tar", &["-C", directory.to_str().unwrap(), "-xzf"], file);
    let mut entries = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let root = entries.next().unwrap();
    assert_eq!(entries.next(), None, "all files are in one directory");
    root
}

fn json(root: &Path, name: &str) -> Value {
    let text = fs::read(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn an_archive_has_what_a_bug_report_needs_and_no_secret() {
    let mut story = Story::new("sysdump");
    let namespace = story.node.api.namespace().to_owned();
    story.of_cluster.push(format!("node {namespace}"));
    let (api, lab) = (&story.node.api, &story.node.lab);
    let info = json!({
        "operatingSystem": "linux", "architecture": "arm64", "kernelVersion": "6.12.1", "osImage": "Debian",
        "containerRuntimeVersion": "containerd://2.2.0", "bootID": "", "kubeProxyVersion": "", "kubeletVersion": "",
        "machineID": "", "systemUUID": "",
    });
    let metadata = json!({ "name": namespace });
    api.apply(&json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata }));
    let status = json!({ "nodeInfo": info });
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status });
    api.kubectl_with("apply --server-side --subresource=status -f -", &node.to_string());

    api.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "db" }, "stringData": { "password": SECRET },
    }));
    let encoded = api.kubectl("get secret db -o jsonpath={.data.password}");
    let secret = json!({ "name": "PASSWORD", "value": SECRET });
    let reference = json!({ "name": "db", "key": "password" });
    let reference = json!({ "name": "DB", "valueFrom": { "secretKeyRef": reference } });
    let mut agents = shipped("DaemonSet", "podmirror");
    agents["metadata"]["namespace"] = namespace.as_str().into();
    let template = &mut agents["spec"]["template"];
    template["spec"]["containers"][0]["env"].as_array_mut().unwrap().push(secret.clone());
    api.apply(&agents);
    let mut pod = api.object("agent", &[("kapp.k14s.io/original", SECRET)]);
    pod["metadata"]["labels"] = agents["spec"]["template"]["metadata"]["labels"].clone();
    pod["spec"]["containers"][0]["name"] = "agent".into();
    pod["spec"]["containers"][0]["ports"] = json!([{ "name": "metrics", "containerPort": 10706 }]);
    pod["spec"]["containers"][0]["env"] = json!([secret, reference]);
    api.apply(&pod);
    // kubectl has written one more copy of the object into an annotation.
    let kept = api.kubectl("get pod agent --show-managed-fields -o json");
    assert!(kept.matches(SECRET).count() >= 3 && kept.contains("managedFields"), "{kept}");
    apply(
        api,
        shipped("Deployment", "podmirror-controller"),
        json!({ "replicas": 1, "readyReplicas": 1, "availableReplicas": 1 }),
    );
    api.apply(&resource("Mirror", "mine", &json!({}), &json!({ "filter": "udp" })));
    // The agent of the node posts an Event.
    api.apply(&api.object("web", &[("podmirror.io/mirror", "sideways")]));
    let agent = api.agent(lab, &[]);
    eventually(SOON, || {
        let events = api.try_kubectl("get events")?;
        check(events.contains("sideways"), || events)
    });
    agent.stop();

    let file = lab.files().join("bug.tar.gz");
    let words = format!("sysdump --agents {namespace} --output {}", file.display());
    let (code, stdout, stderr) = plugin(api, &words);
    assert_eq!((code, stdout), (Some(0), format!("{}\n", file.display())), "{stderr}");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let bytes = [output("gzip", &["-dc"], &file), stderr.clone().into_bytes()].concat();
    for secret in [SECRET, &encoded] {
        let is_there = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
        assert!(!is_there, "{secret} is in the archive");
    }

    let root = unpacked(&file);
    let versions = json(&root, "versions.json");
    let server: Value = serde_json::from_str(&api.kubectl("version -o json")).unwrap();
    assert_eq!(versions["plugin"], env!("CARGO_PKG_VERSION"));
    assert_eq!(versions["server"]["gitVersion"], server["serverVersion"]["gitVersion"]);
    assert!(fs::read_to_string(root.join("check.txt")).unwrap().contains("no agent of "));
    let named = |list: &str, name: &str| {
        let list = json(&root, list);
        let is_it = |of: &&Value| {
            of["name"] == name || of["metadata"]["name"] == name && of["metadata"]["namespace"] == namespace
        };
        list.as_array()
            .unwrap()
            .iter()
            .find(is_it)
            .cloned()
            .unwrap_or_else(|| panic!("no {name} in {list:#}"))
    };
    let expected = json!({
        "name": namespace, "kernel": "6.12.1", "system": "linux", "image": "Debian", "architecture": "arm64",
        "runtime": "containerd://2.2.0",
    });
    assert_eq!(named("nodes.json", &namespace), expected);
    assert_eq!(named("mirrors.json", "mine")["spec"]["filter"], "udp");
    named("deployments.json", "podmirror-controller");
    let redacted = json!({ "name": "PASSWORD", "value": "<redacted>" });
    let set = named("daemonsets.json", "podmirror");
    let env = set["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
    assert_eq!(env.last(), Some(&redacted));
    assert!(env.iter().any(|of| of["name"] == "PODMIRROR_BPFFS" && of["value"] == "<redacted>"), "{env:?}");
    let pod = named("pods.json", "agent");
    assert_eq!(pod["spec"]["containers"][0]["env"], json!([redacted, reference]));
    assert_eq!(pod["metadata"]["managedFields"], Value::Null);
    assert_eq!(json(&root, "pods.json").as_array().unwrap().len(), 1, "web is not a pod of podmirror");
    let events = |name: &str| json(&root, name).as_array().unwrap().clone();
    let is_told = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains("sideways"));
    assert!(events("events.json").iter().any(is_told), "{:#?}", events("events.json"));
    // Those of the agents of all stories can be too many for the archive to have this one.
    assert!(!events("events-of-agents.json").is_empty());
    // There is no kubelet.
    let errors = fs::read_to_string(root.join("errors.txt")).unwrap();
    for path in ["pods/agent/agent.log", "pods/agent/agent.metrics"] {
        let line = errors.lines().find(|line| line.starts_with(&format!("{path}: ")));
        let line = line.unwrap_or_else(|| panic!("no {path} in {errors}"));
        assert!(stderr.contains(&format!("kubectl-mirror: {line}\n")), "{stderr}");
        assert!(!root.join(path).exists());
    }

    // A second archive does not replace the first one.
    let before = fs::read(&file).unwrap();
    let (code, _, why) = plugin(api, &words);
    assert!(code == Some(1) && why.contains("exists already"), "{why}");
    assert!(fs::read(&file).unwrap() == before);
    let mut names = fs::read_dir(lab.files()).unwrap().map(|of| of.unwrap().file_name());
    assert!(!names.any(|name| name.to_string_lossy().starts_with(".podmirror")), "a temporary file is left");
}
