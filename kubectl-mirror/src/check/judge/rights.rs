//! The rights that the plugin's commands need, and the findings about them. Pure, a part of [`judge`](super).

use mirror_api::packets::GROUP;

use super::{Finding, Read, or};

/// A right that commands of the plugin need.
#[derive(Debug)]
pub(in crate::check) struct Right {
    pub(in crate::check) group: &'static str,
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

/// The rights to check, in the namespace of the pods.
pub(in crate::check) fn rights(namespace: &str) -> Vec<Right> {
    let right = |group, resource, verb, namespace: Option<&str>, needed_by, role: &str| {
        let (namespace, role) = (namespace.map(str::to_owned), role.to_owned());
        Right { group, resource, verb, namespace, needed_by, role, is_granted: Ok(true) }
    };
    let (own, group) = (Some(namespace), mirror_api::GROUP);
    let edit = format!("with podmirror installed, the ClusterRole edit in namespace {namespace} grants this");
    let view = format!("the ClusterRole view in namespace {namespace} grants this");
    let packets = format!(
        "the ClusterRole podmirror-packets of the chart grants this: kubectl -n {namespace} create rolebinding NAME \
         --clusterrole podmirror-packets --user USER. Read docs/security.md first"
    );
    let all = "with podmirror installed, a ClusterRoleBinding to the ClusterRole view grants this";
    vec![
        right(group, "mirrors", "create", own, "on", &edit),
        right(group, "mirrors", "delete", own, "off", &edit),
        right(group, "mirrors", "list", own, "status", &view),
        right(GROUP, "packets", "watch", own, "tail", &packets),
        right(GROUP, "podreports", "get", own, "explain", &packets),
        right(GROUP, "podreports", "list", own, "coverage and top", &packets),
        right(group, "mirrornodes", "list", None, "check", all),
    ]
}

/// A finding for each missing right.
pub(super) fn findings(rights: &[Right]) -> Vec<Finding> {
    let finding = |Right { resource, verb, namespace, needed_by, role, is_granted, .. }: &Right| {
        let at = namespace.as_ref().map_or_else(|| "the cluster".to_owned(), |of| format!("namespace {of}"));
        let (found, more, todo) = match is_granted {
            Ok(true) => return None,
            Ok(false) => ("you may not", format!(" (for {needed_by})"), role.as_str()),
            Err(why) => ("cannot check the right to", format!(": {why}"), "fix the cause, and check again"),
        };
        Some(Finding::warn("rights", format!("{found} {verb} {resource} in {at}{more}"), todo))
    };
    let ok = Finding::ok("rights", "you may use all commands of this plugin".to_owned());
    or(rights.iter().filter_map(finding), ok)
}
