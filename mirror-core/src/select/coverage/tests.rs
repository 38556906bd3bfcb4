//! Tests of the state that is reported for resources.

use super::*;
use crate::{
    model::{Hidden, Name, ResourceId},
    select::{Nics, Why},
};
use mirror_common::verdict::Direction;

fn pod(name: &str) -> PodId {
    PodId { uid: name.into(), namespace: "shop".into(), name: name.into() }
}

fn selected(name: &str, nics: Nics, pods: &[&str]) -> Selected {
    let id = ResourceId { namespace: Some("shop".into()), name: name.parse().unwrap_or_default() };
    Selected {
        mirror: id.mirror(),
        id,
        uid: String::new(),
        generation: 1,
        refused: None,
        target: TargetName::default(),
        nics,
        pods: pods.iter().map(|name| pod(name)).collect(),
    }
}

/// If only captures want a pod, a reason that concerns the pod has the name of the first one.
#[test]
fn a_reason_that_concerns_a_pod_is_that_of_each_of_its_readers() {
    let capture = |number| MirrorId(Name::of_capture(number));
    let other = selected("other", Nics::default(), &[]).id.mirror();
    let reasons = |why: Why| {
        [capture(1), capture(2), other.clone()].map(|mirror| {
            let of = Selected { mirror, ..selected("x", Nics::default(), &["a"]) };
            let skipped =
                Skipped { pod: Some(pod("a")), nic: None, mirror: Some(capture(1)), why: why.clone() };
            of_installed(&of, &Installed::new(), &[skipped])[0].1.clone()
        })
    };
    assert_eq!(reasons(Why::NoNic), ["NoNic", "NoNic", "NotYet"]);
    assert_eq!(reasons(Why::TooManyMirrors), ["TooManyMirrors", "NotYet", "NotYet"]);
}

/// The reasons for each pod, or `covered`.
fn told(of: &Selected, installed: &[&str], skipped: &[Skipped]) -> Vec<(String, String)> {
    let installed = installed.iter().map(|name| (pod(name), [(of.id.mirror(), None)].into())).collect();
    of_installed(of, &installed, skipped)
}

fn of_installed(of: &Selected, installed: &Installed, skipped: &[Skipped]) -> Vec<(String, String)> {
    let skipped = skipped.iter().cloned().collect();
    words(&coverage(vec![of.clone()], installed, &skipped, &BTreeMap::new()))
}

fn words(all: &[Coverage]) -> Vec<(String, String)> {
    let mut told = Vec::new();
    for Coverage { covered, not_covered, .. } in all {
        told.extend(covered.iter().map(|pod| (pod.name.clone(), "covered".to_owned())));
        told.extend(not_covered.iter().map(|of| (of.pod.name.clone(), of.reason.to_owned())));
    }
    told.sort();
    told
}

#[test]
fn a_mirror_that_a_limit_has_ended_covers_its_pod_no_more() {
    let of = selected("x", Nics::default(), &["a", "b"]);
    let installed = [("a", Some(Ended::Packets)), ("b", None)];
    let installed = installed.map(|(name, ended)| (pod(name), [(of.id.mirror(), ended)].into())).into();
    let expected = [("a", "Ended"), ("b", "covered")].map(|(pod, told)| (pod.to_owned(), told.to_owned()));
    assert_eq!(of_installed(&of, &installed, &[]), expected);
}

#[test]
fn a_pod_is_not_covered_while_the_target_of_its_mirror_is_down() {
    let of = selected("x", Nics::default(), &["a", "b", "c", "d"]);
    let installed = [("a", None), ("b", Some(Ended::Packets)), ("c", None)];
    let installed = installed.map(|(name, ended)| (pod(name), [(of.id.mirror(), ended)].into())).into();
    let skipped = [Skipped { pod: Some(pod("c")), nic: None, mirror: None, why: Why::NoNic }].into();
    let down = [(TargetName::default(), "the device ids0 is down".to_owned())].into();
    let all = coverage(vec![of.clone()], &installed, &skipped, &down);
    let expected = [("a", "TargetDown"), ("b", "Ended"), ("c", "NoNic"), ("d", "NotYet")];
    assert_eq!(words(&all), expected.map(|(pod, told)| (pod.to_owned(), told.to_owned())));
    let messages: Vec<_> = all[0].not_covered.iter().map(|of| of.message.as_str()).collect();
    assert_eq!(messages[0], "nothing is copied to the target default now: the device ids0 is down");
    // Another target is down.
    let of = Selected { target: TargetName("other".parse().unwrap_or_default()), ..of };
    assert_eq!(words(&coverage(vec![of], &installed, &skipped, &down))[0].1, "covered");
}

#[test]
fn a_pod_is_covered_if_its_mirror_stands_and_nothing_speaks_against_it() {
    let of = selected("x", Nics::default(), &["a", "b"]);
    let skip = |nic: Option<&str>, mirror: Option<MirrorId>, why| Skipped {
        pod: Some(pod("a")),
        nic: nic.map(str::to_owned),
        mirror,
        why,
    };
    let own = Some(of.id.mirror());
    let other = Some(selected("y", Nics::default(), &[]).id.mirror());
    let a = |reason: &str| vec![("a".to_owned(), reason.to_owned()), ("b".to_owned(), "covered".to_owned())];
    let hidden = Why::Hidden(Direction::Ingress, Hidden::NoHook);
    for (skipped, expected) in [
        (vec![], "covered"),
        (vec![skip(None, None, Why::NoNic)], "NoNic"),
        (vec![skip(Some("eth0"), None, hidden)], "Hidden"),
        (vec![skip(None, own, Why::TooManyMirrors)], "TooManyMirrors"),
        // These concern other mirrors of the pod.
        (vec![skip(None, other, Why::TooManyMirrors)], "covered"),
        (vec![skip(None, None, Why::TooManyMirrors)], "covered"),
        (vec![skip(None, None, Why::AnnotationsUnread(String::new()))], "covered"),
    ] {
        assert_eq!(told(&of, &["a", "b"], &skipped), a(expected), "{skipped:?}");
    }
    assert_eq!(told(&of, &["b"], &[]), a("NotYet"));
    // A NIC that the mirror does not request.
    let eth1 = Nics::parse("eth1").unwrap_or_default();
    let of = selected("x", eth1, &["a", "b"]);
    let none = skip(Some("eth0"), None, Why::NoHostInterface("ipvlan".into()));
    assert_eq!(told(&of, &["a", "b"], &[none]), a("covered"));
}
