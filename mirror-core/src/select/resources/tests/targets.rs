//! Tests of the namespaces that can send copies to a target.

use super::*;
use crate::{destination::Destination, model::TargetName};

fn target(name: &str) -> TargetName {
    TargetName(name.parse().unwrap())
}

/// A policy with the MirrorTargets `ids`, for the namespace `shop`, and `broken`, which is refused.
fn policy() -> Policy {
    let mut policy = Policy { enable_mirror: true, ..Policy::default() };
    policy.targets.insert(target("ids"), Destination::Device("ids0".into()));
    policy.users.insert(target("ids"), with_labels(&[("kubernetes.io/metadata.name", "shop")]));
    policy.refused_targets.insert(target("broken"), "it has no address".into());
    policy
}

fn to(name: &str, resource: Resource) -> Resource {
    let request = resource.request.map(|request| Request { target: Some(name.into()), ..request });
    Resource { request, ..resource }
}

#[test]
fn a_target_is_for_the_namespaces_that_may_name_it() {
    let annotated = [("podmirror.io/mirror.a", "true"), ("podmirror.io/target.a", "ids")];
    let pods = [pod("bank", "web", &annotated), pod("shop", "web", &annotated)];
    let resources = [
        to("ids", resource(Some("bank"), "theirs", &[])),
        to("ids", resource(Some("shop"), "ours", &[])),
        to("ids", resource(None, "all", &[])),
    ];
    let choice = chosen(&pods, &resources, &policy());
    let wanted = |pod: &Pod| {
        let wanted = choice.wanted.iter().find(|wanted| wanted.pod.id == pod.id).unwrap();
        wanted.mirrors.keys().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(wanted(&pods[0]), ["clustermirror/all", "default"]);
    assert_eq!(wanted(&pods[1]), ["a", "clustermirror/all", "default", "mirror/ours"]);
    let refused: Vec<_> = choice
        .refused
        .iter()
        .map(|skipped| {
            (
                skipped.pod.clone().unwrap().namespace,
                skipped.mirror.clone().unwrap().to_string(),
                skipped.why.name(),
            )
        })
        .collect();
    let of_bank = |mirror: &str| ("bank".to_owned(), mirror.to_owned(), "TargetNotAllowed");
    assert_eq!(refused, [of_bank("mirror/theirs"), of_bank("a")]);
    // The refusal is in the status of that Mirror only.
    let told: Vec<_> = choice.selected.iter().map(|of| (of.id.to_string(), of.refused.clone())).collect();
    let why = "the MirrorTarget ids does not allow this namespace (spec.allowedNamespaces)".to_owned();
    assert_eq!(
        told,
        [
            ("ClusterMirror all".to_owned(), None),
            ("Mirror bank/theirs".to_owned(), Some(("TargetNotAllowed", why))),
            ("Mirror shop/ours".to_owned(), None),
        ]
    );
}

#[test]
fn a_mirror_target_that_is_refused_says_why() {
    let pods = [pod("shop", "web", &[])];
    let resources = [to("broken", resource(Some("shop"), "ours", &[]))];
    let choice = chosen(&pods, &resources, &policy());
    assert_eq!(mirrors(&choice), ["web default both all"]);
    let why = "the MirrorTarget broken is refused: it has no address".to_owned();
    assert_eq!(choice.selected[0].refused, Some(("TargetRefused", why)));
}
