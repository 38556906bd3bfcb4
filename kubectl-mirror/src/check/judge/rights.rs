//! The rights that the plugin's commands need, and the findings about them. Pure, a part of [`judge`](super).

use super::{Finding, Read};

/// A right, and those of its verbs that the user lacks.
#[derive(Debug)]
pub(in crate::check) struct Right {
    pub(in crate::check) asked: Asked,
    pub(in crate::check) missing: Read<Vec<&'static str>>,
}

/// A right that commands of the plugin need.
#[derive(Debug, Clone)]
pub(in crate::check) struct Asked {
    pub(in crate::check) group: &'static str,
    pub(in crate::check) resource: &'static str,
    pub(in crate::check) subresource: Option<&'static str>,
    pub(in crate::check) verbs: &'static [&'static str],
    /// `None`: the right is cluster-wide.
    pub(in crate::check) namespace: Option<String>,
    /// The commands that need it.
    needed_by: &'static str,
    /// The role that grants it.
    role: String,
}

/// The rights to check. `namespace` is that of the pods, `agents` that of the agents.
pub(in crate::check) fn asked(namespace: &str, agents: &str) -> Vec<Asked> {
    let right = |group,
                 resource,
                 subresource,
                 verbs: &'static [_],
                 namespace: Option<&str>,
                 needed_by,
                 role: &str| Asked {
        group,
        resource,
        subresource,
        verbs,
        namespace: namespace.map(str::to_owned),
        needed_by,
        role: role.to_owned(),
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
    let (change, open) = (&["get", "list", "create", "patch", "delete"], &["get", "create"]);
    let answers = "explain, coverage, top and the check of the agents' failures";
    vec![
        right(group, "mirrors", None, change, own, "tail, on, off and status", &edit),
        right("", "pods", None, &["get", "list", "watch"], own, "tail and explain", &view),
        right("", "pods", None, &["list"], of_agents, "tail, explain, coverage and top", &tail),
        right("", "pods", Some("portforward"), open, of_agents, "tail", &tail),
        right("", "pods", Some("exec"), open, of_agents, answers, exec),
        right(group, "mirrornodes", None, &["get", "list"], None, "explain and check", all),
    ]
}

/// A finding for each missing right.
pub(super) fn findings(rights: &[Right]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for Right { asked, missing } in rights {
        let Asked { resource, subresource, namespace, needed_by, role, .. } = asked;
        let of = subresource.map(|sub| format!("/{sub}")).unwrap_or_default();
        let within = match namespace {
            Some(namespace) => format!("in namespace {namespace}"),
            None => "in the cluster".to_owned(),
        };
        match missing {
            Ok(missing) if missing.is_empty() => {}
            Ok(missing) => {
                let verbs = missing.join(", ");
                let found = format!("you may not {verbs} {resource}{of} {within}: {needed_by} need it");
                findings.push(Finding::warn("rights", found, role.clone()));
            }
            Err(unread) => {
                let what = format!("right to {resource}{of} {within}");
                findings.push(Finding::unread("rights", &what, unread));
            }
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok("rights", "you may use all commands of this plugin".to_owned()));
    }
    findings
}
