//! The rights that the plugin's commands need, and the findings about them. Pure, a part of [`judge`](super).

use super::{Finding, Read, or_ok};

/// A right that commands of the plugin need.
#[derive(Debug)]
pub(in crate::check) struct Right {
    pub(in crate::check) group: &'static str,
    /// The resource, with its subresource as in `pods/exec`.
    pub(in crate::check) resource: &'static str,
    pub(in crate::check) verb: &'static str,
    /// `None`: the right is cluster-wide.
    pub(in crate::check) namespace: Option<String>,
    /// The commands that need it.
    needed_by: &'static str,
    /// The role that grants it.
    role: String,
    pub(in crate::check) is_granted: Read<bool>,
}

/// The rights to check. `namespace` is that of the pods, `agents` that of the agents.
pub(in crate::check) fn rights(namespace: &str, agents: &str) -> Vec<Right> {
    let right = |group, resource, verb, namespace: Option<&str>, needed_by, role: &str| {
        let (namespace, role) = (namespace.map(str::to_owned), role.to_owned());
        Right { group, resource, verb, namespace, needed_by, role, is_granted: Ok(true) }
    };
    let (own, of_agents, group) = (Some(namespace), Some(agents), mirror_api::GROUP);
    let edit = format!("with podmirror installed, the ClusterRole edit in namespace {namespace} grants this");
    let view = format!("the ClusterRole view in namespace {namespace} grants this");
    let tail = format!(
        "the Role podmirror-tail of the chart grants this: kubectl -n {agents} create rolebinding NAME --role \
         podmirror-tail --user USER. Read docs/security.md first"
    );
    let exec = "only administrators should have this permission, and no role of podmirror grants it: see docs/security.md";
    let all = "with podmirror installed, a ClusterRoleBinding to the ClusterRole view grants this";
    let answers = "explain, coverage, top and the check of the agents' failures";
    vec![
        right(group, "mirrors", "create", own, "tail and on", &edit),
        right(group, "mirrors", "delete", own, "tail and off", &edit),
        right(group, "mirrors", "list", own, "status", &view),
        right("", "pods", "watch", own, "tail and explain", &view),
        right("", "pods", "list", of_agents, "tail, explain, coverage and top", &tail),
        // Servers before Kubernetes 1.35 check `get` for a WebSocket.
        right("", "pods/portforward", "get", of_agents, "tail", &tail),
        right("", "pods/portforward", "create", of_agents, "tail", &tail),
        right("", "pods/exec", "get", of_agents, answers, exec),
        right("", "pods/exec", "create", of_agents, answers, exec),
        right(group, "mirrornodes", "list", None, "explain and check", all),
    ]
}

/// A finding for each missing right.
pub(super) fn findings(rights: &[Right]) -> Vec<Finding> {
    let finding = |Right { resource, verb, namespace, needed_by, role, is_granted, .. }: &Right| {
        let within = match namespace {
            Some(namespace) => format!("in namespace {namespace}"),
            None => "in the cluster".to_owned(),
        };
        match is_granted {
            Ok(true) => None,
            Ok(false) => {
                let found = format!("you may not {verb} {resource} {within}: {needed_by} need it");
                Some(Finding::warn("rights", found, role.clone()))
            }
            Err(why) => {
                let found = format!("cannot check the right to {verb} {resource} {within}: {why}");
                Some(Finding::warn("rights", found, "fix the cause, and check again"))
            }
        }
    };
    or_ok(rights.iter().filter_map(finding), "rights", "you may use all commands of this plugin".to_owned())
}
