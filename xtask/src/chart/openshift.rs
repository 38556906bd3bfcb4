//! Checks that the agents' pods fit the chart's SecurityContextConstraints for OpenShift.
//!
//! OpenShift refuses pods that need more than the constraints of their ServiceAccount allow, so the DaemonSet would have
//! no pods. No other test has a server with this kind.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::monitors::items;

/// Checks that the pods of the DaemonSet, and others of its ServiceAccount, fit the constraints, and that these allow
/// nothing else, volumes excepted.
pub(super) fn fits(objects: &[Value]) -> Result<()> {
    let first = |kind: &str| {
        let found = objects.iter().find(|object| object["kind"] == kind);
        found.with_context(|| format!("there is no {kind}"))
    };
    let (constraints, agents) = (first("SecurityContextConstraints")?, first("DaemonSet")?);
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
