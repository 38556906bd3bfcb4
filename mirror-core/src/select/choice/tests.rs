//! Tests of the wanted pods: examples for each rule, and properties for the order of precedence.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

use std::sync::Arc;

use proptest::{option, prelude::*, sample};

use super::*;
use crate::{
    model::TargetName,
    settings::{SettingError, Settings},
};

/// The names and values of annotations.
type Annotations = &'static [(&'static str, &'static str)];

fn texts(annotations: &[(&str, &str)]) -> BTreeMap<String, String> {
    annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn pod(own: &[(&str, &str)], inherited: &[(&str, &str)]) -> Pod {
    Pod {
        id: PodId { uid: "uid".into(), namespace: "shop".into(), name: "web".into() },
        annotations: texts(own),
        inherited: Arc::new(texts(inherited)),
        ..Pod::default()
    }
}

/// The directions in which a pod is mirrored. The choice must have no other result.
fn directions(pod: &Pod, policy: &Policy) -> Option<Directions> {
    let choice = choose(std::slice::from_ref(pod), &[], &[], policy, &mut Filters::default());
    assert_eq!((choice.refused, choice.bad), (vec![], vec![]), "{pod:?}");
    choice.wanted.first().map(of_default)
}

/// The directions of the mirror `default` of a wanted pod.
fn of_default(wanted: &Wanted<'_>) -> Directions {
    wanted.mirrors[&MirrorId::default()].directions
}

fn enabled(enable_mirror: bool) -> Policy {
    Policy { enable_mirror, ..Policy::default() }
}

#[test]
fn kube_ovns_annotations_are_ignored_without_their_flag() {
    for value in ["true", "false", "maybe"] {
        let kube_ovn = [(OVN_MIRROR, value), ("fast.shop.ovn.kubernetes.io/mirror", value)];
        assert_eq!(directions(&pod(&kube_ovn, &[]), &enabled(false)), None);
        assert_eq!(directions(&pod(&kube_ovn, &[]), &enabled(true)), Some(Directions::Both));
    }
}

#[test]
fn settings_are_taken_key_by_key() {
    const SNAPLEN: &str = "podmirror.io/snaplen";
    const PACKETS: &str = "podmirror.io/packets";
    let mut node = Settings::default();
    for (key, value) in [("snaplen", "256"), ("packets", "9"), ("bytes", "5000")] {
        node.set(key, value).unwrap();
    }
    let pods = [pod(&[(MIRROR, "true"), (SNAPLEN, "80")], &[(SNAPLEN, "128"), (PACKETS, "7")])];
    let choice =
        choose(&pods, &[], &[], &Policy { settings: node, ..Policy::default() }, &mut Filters::default());
    let settings = &choice.wanted[0].mirrors[&MirrorId::default()].settings;
    assert_eq!(
        (settings.snaplen, settings.budget.packets, settings.budget.bytes),
        (Some(80), Some(7), Some(5000))
    );
}

#[test]
fn a_setting_that_cannot_be_used_keeps_the_pod_out() {
    const FILTER: &str = "podmirror.io/filter";
    for (own, inherited, place) in [
        (&[(FILTER, "tcp prot 80")] as &[_], &[] as &[_], Place::Pod),
        (&[], &[(FILTER, "tcp prot 80")], Place::Namespace),
    ] {
        let pods = [pod(own, inherited)];
        let choice = choose(&pods, &[], &[], &enabled(true), &mut Filters::default());
        assert_eq!((choice.wanted, choice.bad), (vec![], vec![]));
        let [
            Skipped {
                pod: Some(id),
                nic: None,
                mirror: None,
                why: Why::BadSetting(of, SettingError { key, value, .. }),
            },
        ] = &choice.refused[..]
        else {
            panic!("{:?}", choice.refused)
        };
        assert_eq!((id, *of, *key, value.as_str()), (&pods[0].id, place, "filter", "tcp prot 80"));
    }
    // The pod's annotation takes precedence over its namespace's.
    assert_eq!(
        directions(&pod(&[(FILTER, "tcp")], &[(FILTER, "tcp prot 80")]), &enabled(true)),
        Some(Directions::Both)
    );
}

fn gated(enable_mirror: bool, exclude: &[&str], allow: Option<&[&str]>) -> Policy {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Policy { exclude_namespaces: set(exclude), allow_namespaces: allow.map(set), ..enabled(enable_mirror) }
}

/// The node's default is the administrator's, and so are the settings for its packets.
#[test]
fn annotations_of_a_namespace_that_may_not_ask_change_no_setting() {
    let policy = gated(true, &[], Some(&["bank"]));
    let annotations: Annotations = &[(MIRROR, "egress"), ("podmirror.io/packets", "7")];
    for (own, inherited) in [(annotations, &[] as Annotations), (&[], annotations)] {
        let pods = [pod(own, inherited)];
        let choice = choose(&pods, &[], &[], &policy, &mut Filters::default());
        let session = &choice.wanted[0].mirrors[&MirrorId::default()];
        assert_eq!((session.directions, &session.settings), (Directions::Both, &policy.settings));
        assert_eq!((choice.refused, choice.bad), (vec![], vec![]));
    }
}

fn any_value() -> impl Strategy<Value = Option<&'static str>> {
    option::of(sample::select(vec!["true", "false", "ingress", "egress", "maybe"]))
}

proptest! {
    /// The pod's annotation takes precedence over its namespace's, which takes precedence over the node's default. No
    /// annotation permits what the policy forbids.
    #[test]
    fn precedence(own in any_value(), inherited in any_value(), enable_mirror: bool, gate in 0..4) {
        let annotation = |value: Option<&'static str>| value.map(|value| (MIRROR, value));
        let pods = [pod(annotation(own).as_slice(), annotation(inherited).as_slice())];
        let (exclude, allow): (&[&str], Option<&[&str]>) = match gate {
            0 => (&[], None),
            1 => (&["shop"], None),
            2 => (&[], Some(&["bank"])),
            _ => (&[], Some(&["shop"])),
        };
        let choice = choose(&pods, &[], &[], &gated(enable_mirror, exclude, allow), &mut Filters::default());
        let known = |value: Option<&str>| value.and_then(parse);
        let asked = known(own).or(known(inherited));
        let is_wanted = match gate {
            1 => false,
            2 => enable_mirror && asked != Some(None),
            _ => asked.unwrap_or(enable_mirror.then_some(Directions::Both)).is_some(),
        };
        prop_assert_eq!(!choice.wanted.is_empty(), is_wanted);
        let is_in_vain = matches!(asked, Some(Some(_))) && !is_wanted;
        prop_assert_eq!(!choice.refused.is_empty(), is_in_vain);
        for wanted in &choice.wanted {
            prop_assert_eq!(wanted.is_asked, gate != 2 && matches!(asked, Some(Some(_))));
        }
        let bad = [own, inherited].into_iter().filter(|value| *value == Some("maybe")).count();
        prop_assert_eq!(choice.bad.len(), bad);
        // A pod without a mirror has a reason: a refusal, or why no mirror is requested.
        let opted_out = match (known(own), known(inherited)) {
            (Some(None), _) => Some(Place::Pod),
            (None, Some(None)) => Some(Place::Namespace),
            _ => None,
        };
        let unasked = match (gate, opted_out) {
            _ if is_wanted || is_in_vain => None,
            (1, _) => Some(Why::NamespaceExcluded),
            (_, Some(place)) => Some(Why::OptedOut(place)),
            (2, None) => Some(Why::NamespaceNotAllowed),
            _ => Some(Why::NoRequest),
        };
        prop_assert_eq!(choice.unasked.get(&pods[0].id), unasked.as_ref());
        prop_assert_eq!(choice.unasked.len(), usize::from(unasked.is_some()));
    }
}

/// The mirrors of one pod: names with filter text and target, and the problems.
fn mirrors_of(pod: &Pod, policy: &Policy) -> (Vec<String>, Vec<String>) {
    let choice = choose(std::slice::from_ref(pod), &[], &[], policy, &mut Filters::default());
    let mirrors = choice.wanted.iter().flat_map(|wanted| &wanted.mirrors);
    let mirrors = mirrors.map(|(name, session)| {
        let filter = session.settings.filter.as_ref().map_or("all", |filter| &filter.text);
        format!("{name} {} {filter} -> {}", session.directions.name(), session.target)
    });
    let refused = choice.refused.iter().map(|skipped| {
        let name = skipped.mirror.as_ref().map_or("default".to_owned(), ToString::to_string);
        format!("{name} {}", skipped.why.name())
    });
    let bad = choice.bad.iter().map(|bad| bad.key.clone());
    (mirrors.collect(), refused.chain(bad).collect())
}

fn with_targets(policy: Policy) -> Policy {
    let target = |name: &str| (TargetName(name.parse().unwrap()), format!("{name}0").parse().unwrap());
    Policy { targets: ["default", "ids", "lab"].map(target).into(), ..policy }
}

#[test]
fn each_mirror_of_a_pod_has_its_own_words() {
    let policy = with_targets(enabled(true));
    let engineer = pod(
        &[
            ("podmirror.io/mirror.debug", "egress"),
            ("podmirror.io/filter.debug", "udp"),
            ("podmirror.io/mirror.broken", "true"),
            ("podmirror.io/filter.broken", "tpc"),
            ("podmirror.io/mirror.lost", "true"),
            ("podmirror.io/target.lost", "nowhere"),
            ("podmirror.io/filter.dbug", "udp"),
            ("podmirror.io/fliter", "udp"),
            ("podmirror.io/mirror.default", "false"),
            ("podmirror.io/mirror.No", "true"),
            ("podmirror.io/netns", "/run/netns/x"),
        ],
        &[
            ("podmirror.io/mirror.ids", "true"),
            ("podmirror.io/filter.ids", "tcp"),
            ("podmirror.io/target.ids", "ids"),
            ("podmirror.io/filter.other", "tcp"),
        ],
    );
    let (mirrors, wrong) = mirrors_of(&engineer, &policy);
    assert_eq!(
        mirrors,
        ["debug egress udp -> default", "default both all -> default", "ids both tcp -> ids"],
        "what the engineer says changes neither the node's mirror nor the namespace's"
    );
    assert_eq!(
        wrong,
        [
            "broken BadSetting",
            "lost NoSuchTarget",
            "podmirror.io/fliter",
            "podmirror.io/mirror.No",
            "podmirror.io/mirror.default",
            "podmirror.io/filter.dbug",
        ]
    );
}

/// `--target` applies only to mirrors that name no target.
#[test]
fn a_mirror_without_a_target_has_the_nodes() {
    let policy = Policy { target: TargetName("lab".parse().unwrap()), ..with_targets(enabled(true)) };
    let web = pod(
        &[
            ("podmirror.io/mirror.a", "true"),
            ("podmirror.io/mirror.b", "true"),
            ("podmirror.io/target.b", "default"),
            ("podmirror.io/mirror.c", "true"),
        ],
        &[("podmirror.io/target.c", "ids")],
    );
    let expected =
        ["a both all -> lab", "b both all -> default", "c both all -> ids", "default both all -> lab"];
    assert_eq!(mirrors_of(&web, &policy), (expected.map(str::to_owned).to_vec(), vec![]));
}

#[test]
fn every_problem_of_an_annotation_is_told_in_words() {
    let problem = |key: &str, value: &str| {
        let pods = [pod(&[(key, value)], &[])];
        let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
        choice.bad.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    for (key, value, expected) in [
        ("podmirror.io/mirror", "yes", "\"yes\" is not true, false, both, ingress or egress"),
        ("podmirror.io/fliter", "tcp", "there is no such annotation"),
        ("podmirror.io/filter.ids", "tcp", "podmirror.io/mirror.ids is missing"),
        ("podmirror.io/mirror.IDS", "true", "\"IDS\" is not a name"),
        ("podmirror.io/mirror.default", "true", "keys without a name, as in podmirror.io/mirror"),
    ] {
        let told = problem(key, value);
        assert!(told.contains(expected) && told.contains(key) && told.ends_with("it is ignored"), "{told}");
    }
}

proptest! {
    /// Each mirror is wanted, refused or not requested independently of the annotations of the others. If not all fit,
    /// the mirrors of the node and the namespace keep their slots.
    #[test]
    fn a_mirror_is_decided_by_itself(
        own in prop::collection::btree_map("[a-f]{1,2}", any_value(), 0..14),
        inherited in prop::collection::btree_map("[a-f]{1,2}", any_value(), 0..6),
        enable_mirror: bool,
    ) {
        let key = |name: &String| format!("{MIRROR}.{name}");
        let said = |values: &BTreeMap<String, Option<&'static str>>| -> BTreeMap<String, String> {
            values.iter().filter_map(|(name, value)| Some((key(name), (*value)?.to_owned()))).collect()
        };
        let whole = Pod { annotations: said(&own), inherited: Arc::new(said(&inherited)), ..pod(&[], &[]) };
        let policy = enabled(enable_mirror);
        let (together, wrong) = mirrors_of(&whole, &policy);
        let mut alone = if enable_mirror { vec!["default both all -> default".to_owned()] } else { vec![] };
        let names: BTreeSet<_> = own.keys().chain(inherited.keys()).collect();
        for name in &names {
            let only = |values: &BTreeMap<String, String>| -> BTreeMap<String, String> {
                values.iter().filter(|(at, _)| **at == key(name)).map(|(at, value)| (at.clone(), value.clone())).collect()
            };
            let pod = Pod { annotations: only(&whole.annotations), inherited: Arc::new(only(&whole.inherited)), ..whole.clone() };
            alone.extend(mirrors_of(&pod, &Policy::default()).0);
        }
        alone.sort();
        let too_many = wrong.iter().filter(|wrong| wrong.ends_with("TooManyMirrors")).count();
        prop_assert_eq!(together.len() + too_many, alone.len());
        prop_assert!(together.iter().all(|mirror| alone.contains(mirror)));
        prop_assert_eq!(too_many, alone.len().saturating_sub(MAX_SESSIONS_PER_TAP));
        if enable_mirror {
            prop_assert!(together.iter().any(|mirror| mirror.starts_with("default ")));
        }
        // Mirrors that only the namespace requests come before the pod's own.
        let choice = choose(std::slice::from_ref(&whole), &[], &[], &policy, &mut Filters::default());
        let kept: Vec<_> = choice.wanted.iter().flat_map(|wanted| wanted.mirrors.values()).map(|session| session.origin).collect();
        if too_many > 0 && kept.contains(&Origin::Annotation(Place::Pod)) {
            let inherited_alone = |name: &String| {
                let known = |value: Option<&Option<&'static str>>| value.copied().flatten().and_then(parse);
                known(own.get(name)).is_none() && known(inherited.get(name)).is_some_and(|asked| asked.is_some())
            };
            let from_namespace = kept.iter().filter(|origin| **origin == Origin::Annotation(Place::Namespace)).count();
            prop_assert_eq!(from_namespace, names.iter().filter(|name| inherited_alone(name)).count());
        }
    }
}
