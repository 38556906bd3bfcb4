//! Checks that the agents' pods fit the chart's SecurityContextConstraints for OpenShift.
//!
//! OpenShift refuses pods that need more than the constraints of their ServiceAccount allow, so the DaemonSet would have
//! no pods. The schemas of Kubernetes do not have this kind.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;

use super::prometheus::items;

const KIND: &str = "SecurityContextConstraints";

/// Checks the manifests. Each has the values, or the file, that it was rendered with.
pub(super) fn check(manifests: &BTreeMap<String, String>) -> Result<()> {
    let mut is_checked = false;
    for (values, manifest) in manifests {
        if !manifest.contains(&format!("kind: {KIND}\n")) {
            continue;
        }
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(manifest).map_err(|why| anyhow!("{values}: {why}"))?;
        fits(&objects).with_context(|| values.clone())?;
        is_checked = true;
    }
    ensure!(is_checked, "no values make {KIND}");
    Ok(())
}

/// Checks that the pods of the DaemonSet, and others of its ServiceAccount, fit the constraints, and that these allow
/// nothing else, volumes excepted.
fn fits(objects: &[Value]) -> Result<()> {
    let first = |kind: &str| {
        let found = objects.iter().find(|object| object["kind"] == kind);
        found.with_context(|| format!("there is no {kind}"))
    };
    let (constraints, agents) = (first(KIND)?, first("DaemonSet")?);
    let agent = &agents["spec"]["template"]["spec"];
    let of_user = [&agents["metadata"]["namespace"], &agent["serviceAccountName"]];
    let [namespace, account] = of_user.map(|word| word.as_str().unwrap_or_default());
    let user = format!("system:serviceaccount:{namespace}:{account}");
    let users = &constraints["users"];
    ensure!(texts(users).any(|one| one == user), "the users are {users}, without {user}");

    // The pod of `helm test` has the ServiceAccount, too.
    let others = objects.iter().filter(|object| object["kind"] == "Pod").map(|object| &object["spec"]);
    let others = others.filter(|pod| pod["serviceAccountName"] == account);
    let pods: Vec<&Value> = others.chain([agent]).collect();
    let lists = pods.iter().flat_map(|pod| [&pod["initContainers"], &pod["containers"]]);
    let containers: Vec<&Value> = lists.flat_map(items).collect();
    let contexts: Vec<&Value> = containers.iter().map(|container| &container["securityContext"]).collect();

    let volumes = pods.iter().flat_map(|pod| items(&pod["volumes"])).filter_map(Value::as_object);
    let kinds = volumes.flat_map(|volume| volume.keys()).map(String::as_str).filter(|key| *key != "name");
    // The token of the ServiceAccount is in a projected volume.
    let kinds: BTreeSet<_> = kinds.chain(["projected"]).collect();
    let allowed: BTreeSet<_> = texts(&constraints["volumes"]).collect();
    ensure!(kinds.is_subset(&allowed), "volumes are {allowed:?}, and the pods have {kinds:?}");

    let added = contexts.iter().flat_map(|context| texts(&context["capabilities"]["add"]));
    let added: BTreeSet<_> = added.collect();
    let allowed: BTreeSet<_> = texts(&constraints["allowedCapabilities"]).collect();
    ensure!(allowed == added, "allowedCapabilities are {allowed:?}, and the pods add {added:?}");

    let is_true = |value: &Value| value.as_bool() == Some(true);
    let of_pod = |field: &str| pods.iter().any(|pod| is_true(&pod[field]));
    let of_container = |field: &str| contexts.iter().any(|context| is_true(&context[field]));
    let has_ports = containers.iter().any(|container| items(&container["ports"]).next().is_some());
    let is_read_only = contexts.iter().all(|context| is_true(&context["readOnlyRootFilesystem"]));
    for (field, fitting) in [
        ("allowHostDirVolumePlugin", kinds.contains("hostPath")),
        ("allowHostIPC", of_pod("hostIPC")),
        ("allowHostNetwork", of_pod("hostNetwork")),
        ("allowHostPID", of_pod("hostPID")),
        // On the host network, the API server makes each port of a container one of the host.
        ("allowHostPorts", of_pod("hostNetwork") && has_ports),
        ("allowPrivilegeEscalation", of_container("allowPrivilegeEscalation")),
        ("allowPrivilegedContainer", of_container("privileged")),
        ("readOnlyRootFilesystem", is_read_only),
    ] {
        let value = &constraints[field];
        ensure!(value.as_bool() == Some(fitting), "{field} is {value}, and {fitting} would fit");
    }

    for (field, strategy) in [("runAsUser", "runAsUser"), ("seLinuxOptions", "seLinuxContext")] {
        let is_set = contexts.iter().any(|context| !context[field].is_null());
        let kind = &constraints[strategy]["type"];
        ensure!(!is_set || *kind == "RunAsAny", "{strategy} is {kind}, and the pods set {field}");
    }
    let profiles = &constraints["seccompProfiles"];
    let is_default = contexts.iter().any(|context| context["seccompProfile"]["type"] == "RuntimeDefault");
    let allows_default = texts(profiles).any(|profile| profile == "runtime/default");
    ensure!(!is_default || allows_default, "seccompProfiles are {profiles}, without runtime/default");
    Ok(())
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    items(list).filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::json;

    use super::*;

    /// The constraints, the DaemonSet with a recorder, the pod of `helm test`, and the controller's.
    fn objects() -> Value {
        let container = |capabilities: &[&str]| {
            let context = json!({
                "privileged": false, "readOnlyRootFilesystem": true, "capabilities": { "add": capabilities },
                "runAsUser": 0, "seLinuxOptions": { "type": "spc_t" }, "seccompProfile": { "type": "RuntimeDefault" },
            });
            json!({ "ports": [{ "containerPort": 10706 }], "securityContext": context })
        };
        let pod = json!({
            "serviceAccountName": "agents", "hostNetwork": true, "hostPID": true,
            "volumes": [{ "name": "run", "hostPath": { "path": "/run" } }, { "name": "empty", "emptyDir": {} }],
            "initContainers": [container(&[])],
            "containers": [container(&["NET_ADMIN"]), container(&["BPF"])],
        });
        json!([
            {
                "kind": KIND, "users": ["system:serviceaccount:podmirror:agents"],
                "allowedCapabilities": ["NET_ADMIN", "BPF"],
                "volumes": ["emptyDir", "hostPath", "projected", "secret"],
                "allowHostDirVolumePlugin": true, "allowHostIPC": false, "allowHostNetwork": true,
                "allowHostPID": true, "allowHostPorts": true, "allowPrivilegeEscalation": false,
                "allowPrivilegedContainer": false, "readOnlyRootFilesystem": true,
                "runAsUser": { "type": "RunAsAny" }, "seLinuxContext": { "type": "RunAsAny" },
                "seccompProfiles": ["runtime/default"],
            },
            {
                "kind": "DaemonSet", "metadata": { "namespace": "podmirror" },
                "spec": { "template": { "spec": pod } },
            },
            {
                "kind": "Pod",
                "spec": {
                    "serviceAccountName": "agents", "hostIPC": false,
                    "containers": [{ "securityContext": { "readOnlyRootFilesystem": true } }],
                },
            },
            { "kind": "Pod", "spec": { "serviceAccountName": "controller", "hostIPC": true } },
        ])
    }

    #[test]
    fn constraints_allow_what_the_pods_of_the_agents_need_and_nothing_else() {
        fits(objects().as_array().unwrap()).unwrap();
        for (place, wrong, told) in [
            ("/0/kind", json!("Role"), "there is no SecurityContextConstraints"),
            ("/0/users/0", json!("agents"), "without system:serviceaccount:podmirror:agents"),
            ("/0/allowedCapabilities", json!(["NET_ADMIN"]), "the pods add {\"BPF\", \"NET_ADMIN\"}"),
            ("/0/allowedCapabilities", json!(["BPF", "KILL", "NET_ADMIN"]), "are {\"BPF\", \"KILL\""),
            ("/0/volumes", json!(["emptyDir", "projected"]), "the pods have {\"emptyDir\", \"hostPath\""),
            ("/0/volumes", json!(["emptyDir", "hostPath"]), "\"projected\"}"),
            ("/0/allowHostDirVolumePlugin", json!(false), "allowHostDirVolumePlugin is false"),
            ("/0/allowHostNetwork", json!(false), "allowHostNetwork is false, and true would fit"),
            ("/0/allowHostPID", json!(null), "allowHostPID is null"),
            ("/0/allowHostPorts", json!(false), "allowHostPorts is false"),
            ("/0/allowPrivilegeEscalation", json!(true), "allowPrivilegeEscalation is true"),
            (
                "/1/spec/template/spec/containers/1/securityContext/privileged",
                json!(true),
                "allowPrivilegedContainer is false, and true would fit",
            ),
            (
                "/1/spec/template/spec/initContainers/0/securityContext/privileged",
                json!(true),
                "allowPrivilegedContainer is false, and true would fit",
            ),
            (
                "/1/spec/template/spec/containers/1/securityContext/readOnlyRootFilesystem",
                json!(false),
                "readOnlyRootFilesystem is true, and false would fit",
            ),
            ("/2/spec/hostIPC", json!(true), "allowHostIPC is false, and true would fit"),
            ("/0/runAsUser/type", json!("MustRunAsRange"), "runAsUser is \"MustRunAsRange\""),
            ("/0/seLinuxContext/type", json!("MustRunAs"), "the pods set seLinuxOptions"),
            ("/0/seccompProfiles", json!([]), "without runtime/default"),
        ] {
            let mut objects = objects();
            *objects.pointer_mut(place).unwrap() = wrong;
            let error = format!("{:#}", fits(objects.as_array().unwrap()).unwrap_err());
            assert!(error.contains(told), "{place}: {error}");
        }
    }
}
