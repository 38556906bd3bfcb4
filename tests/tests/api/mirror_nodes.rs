//! The rights that the chart grants: an agent reads what it needs, and writes only the MirrorNode of its own node; the
//! controller writes only statuses.

use std::fs;

use mirror_tests::{SOON, check, eventually};
use serde_json::{Value, json};

use crate::{
    Node,
    resources::{Story, file, wait_mirrors},
};

/// An object of the chart, by kind and name.
pub(crate) fn shipped(kind: &str, name: &str) -> Value {
    let objects: Vec<Value> = serde_saphyr::from_multiple(&file("deploy/rendered/podmirror.yaml")).unwrap();
    let found = objects.into_iter().find(|of| of["kind"] == kind && of["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("the chart has no {kind} {name}"))
}

/// As [`shipped`], under another name.
pub(crate) fn renamed(kind: &str, name: &str, new: &str) -> Value {
    let mut object = shipped(kind, name);
    object["metadata"]["name"] = new.into();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("namespace");
    }
    object
}

/// The kubeconfig of a service account of the story that has the rights of the chart's roles with this name.
pub(crate) fn kubeconfig_with_rights(story: &Story, name: &str) -> String {
    let api = &story.node.api;
    let namespace = api.namespace();
    api.apply(&mirror_tests::list(&[
        renamed("ClusterRole", name, namespace),
        renamed("Role", name, namespace),
    ]));
    api.kubectl(&format!("create serviceaccount {name}"));
    let to = format!("--serviceaccount={namespace}:{name}");
    api.kubectl(&format!("create clusterrolebinding {namespace} --clusterrole={namespace} {to}"));
    api.kubectl(&format!("create rolebinding {namespace} --role={namespace} {to}"));
    // The role's rights include the name of the Lease.
    let path = api.kubeconfig_with(&api.kubectl(&format!("create token {name}")));
    path.to_str().unwrap().to_owned()
}

/// The agent has the rights that the chart grants, and the token of a pod of its node.
#[test]
fn an_agent_writes_the_mirror_node_of_its_own_node_alone() {
    let mut story = Story::new("own-node");
    let namespace = story.node.api.namespace().to_owned();
    let [web] = story.node.pods(["web"]);
    for kind in
        ["clusterrole", "clusterrolebinding", "validatingadmissionpolicy", "validatingadmissionpolicybinding"]
    {
        story.of_cluster.push(format!("{kind} {namespace}"));
    }
    let other = format!("{namespace}-other");
    story.of_cluster.push(format!("mirrornode {other}"));
    let Node { api, lab } = &story.node;
    let renamed = |kind: &str, name: &str| renamed(kind, name, &namespace);
    let mut policy = renamed("ValidatingAdmissionPolicy", "podmirror-mirrornodes");
    let condition = &mut policy["spec"]["matchConditions"][0]["expression"];
    *condition =
        condition.as_str().unwrap().replace("podmirror:podmirror", &format!("{namespace}:agent")).into();
    let mut binding = renamed("ValidatingAdmissionPolicyBinding", "podmirror-mirrornodes");
    binding["spec"]["policyName"] = namespace.as_str().into();
    api.apply(&mirror_tests::list(&[policy, binding, renamed("ClusterRole", "podmirror")]));
    api.kubectl("create serviceaccount agent");
    api.kubectl(&format!(
        "create clusterrolebinding {namespace} --clusterrole={namespace} --serviceaccount={namespace}:agent"
    ));
    let mut of_agent = api.object("agent", &[]);
    of_agent["spec"]["serviceAccountName"] = "agent".into();
    api.apply(&of_agent);
    let token = api.kubectl("create token agent --bound-object-kind=Pod --bound-object-name=agent");
    let kubeconfig = api.kubeconfig_with(&token);
    let kubeconfig = kubeconfig.to_str().unwrap();

    let _container = api.run(lab, &web, &[]);
    story.mirror("all", "web", &json!({}));
    let agent = api.agent_as(lab, kubeconfig, &[]);
    wait_mirrors(lab, &web, &["mirror/all"]);
    let told = story.wait_told("all", |of| of["pods"]["covered"] == 1);
    assert_eq!((&told["kind"], &told["namespace"]), (&json!("Mirror"), &json!(namespace)), "{told:#}");
    agent.stop();

    // With the same token, a request for another agent's node.
    let apply = |name: &str, finalizers: &[&str]| {
        let object = json!({
            "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode",
            "metadata": { "name": name, "finalizers": finalizers },
        });
        let path = lab.files().join("node.json");
        fs::write(&path, object.to_string()).unwrap();
        let words = format!("apply --server-side --force-conflicts -f {}", path.display());
        let mut kubectl = api.command(&words);
        let output = kubectl.env("KUBECONFIG", kubeconfig).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    // The server reads a new policy after a moment.
    eventually(2 * SOON, || {
        let told = apply(&other, &[]);
        check(told.contains("only the MirrorNode of its own node"), || told.clone())
    });
    let own = apply(lab.node().name(), &[]);
    assert!(own.contains("serverside-applied"), "{own}");
    let finalized = apply(lab.node().name(), &["example.org/stay"]);
    assert!(finalized.contains("an agent cannot set finalizers on a MirrorNode"), "{finalized}");
}
