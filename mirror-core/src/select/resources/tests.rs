//! Tests of Mirrors and ClusterMirrors: examples for each rule, and properties over random pods, annotations and
//! resources.

#![expect(clippy::unwrap_used, reason = "tests panic")]

mod targets;

use std::sync::Arc;

use mirror_common::abi::MAX_SESSIONS_PER_TAP;
use proptest::{collection::vec, option, prelude::*, sample};

use super::*;
use crate::{
    model::{Directions, MirrorId, Name, Operator, Place, Requirement, RingId, Selector},
    select::{Choice, MIRROR, Skipped, Wanted, Wants, choose},
    settings::Settings,
};

fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn with_labels(pairs: &[(&str, &str)]) -> Selector {
    Selector { labels: texts(pairs), requirements: Vec::new() }
}

fn pod(namespace: &str, name: &str, annotations: &[(&str, &str)]) -> Pod {
    Pod {
        id: PodId { uid: format!("{namespace}-{name}"), namespace: namespace.into(), name: name.into() },
        labels: texts(&[("app", name)]),
        annotations: texts(annotations),
        namespace_labels: Arc::new(texts(&[("kubernetes.io/metadata.name", namespace)])),
        ..Pod::default()
    }
}

/// A Mirror of this namespace, or a ClusterMirror without one, that selects as many pods as possible.
fn resource(namespace: Option<&str>, name: &str, settings: &[(&'static str, &str)]) -> Resource {
    let mut request = Request::default();
    for (key, value) in settings {
        match *key {
            FILTER => request.filter = Some((*value).to_owned()),
            key => request.settings.set(key, value).unwrap(),
        }
    }
    Resource {
        id: ResourceId { namespace: namespace.map(str::to_owned), name: name.parse().unwrap() },
        uid: format!("uid-{name}"),
        generation: 1,
        created: 0,
        is_enforced: false,
        namespaces: Selector::default(),
        pods: Selector::default(),
        pod_name: None,
        request: Ok(request),
    }
}

fn enforced(name: &str) -> Resource {
    Resource { is_enforced: true, ..resource(None, name, &[]) }
}

#[test]
fn what_no_node_can_use_is_refused_without_a_node() {
    let with = |settings: &[(&'static str, &str)], target: Option<&str>| {
        let mut resource = resource(Some("shop"), "all", settings);
        resource.request.as_mut().unwrap().target = target.map(str::to_owned);
        refusal(&resource).map(|(reason, _)| reason)
    };
    assert_eq!(with(&[], None), None);
    // Some node can have this target.
    assert_eq!(with(&[("filter", "tcp port 443")], Some("ids")), None);
    assert_eq!(with(&[("filter", "tcp prot 443")], None), Some("InvalidFilter"));
    let bad = Resource { request: Err("spec.sampling.oneIn 0".into()), ..resource(Some("shop"), "all", &[]) };
    assert_eq!(refusal(&bad), Some(("InvalidSpec", "spec.sampling.oneIn 0".to_owned())));
}

#[test]
fn resources_inherit_no_default_of_a_node() {
    let mut policy = Policy { enable_mirror: true, ..Policy::default() };
    for (key, value) in [
        ("filter", "udp"),
        ("sample", "1/7"),
        ("rate", "1pps"),
        ("snaplen", "96"),
        ("duration", "1s"),
        ("packets", "9"),
        ("bytes", "1k"),
    ] {
        policy.settings.set(key, value).unwrap();
    }
    policy.settings.seed = 77;
    let defaults = policy.settings.clone();
    let pods = [pod("shop", "web", &[])];
    let resources = [enforced("all"), resource(Some("shop"), "mine", &[("snaplen", "80")])];
    let choice = chosen(&pods, &resources, &policy);
    let settings: Vec<_> =
        choice.wanted[0].mirrors.values().map(|session| session.settings.clone()).collect();
    let none = Settings { seed: 77, ..Settings::default() };
    let cut = Settings { snaplen: Some(80), ..none.clone() };
    assert_eq!(settings, [none, defaults, cut], "the enforced one, that of the flag, and the Mirror");
}

fn chosen<'a>(pods: &'a [Pod], resources: &[Resource], policy: &Policy) -> Choice<'a> {
    choose(pods, resources, &[], policy, &mut Filters::default())
}

/// A reader of the API with the request of this resource, through the ring of this number.
fn reader(of: &Resource, ring: u32) -> Capture {
    let (namespace, pod_name) = (of.id.namespace.clone(), of.pod_name.clone());
    let of = Resource::of_reader(namespace, pod_name, of.pods.clone(), of.request.clone().unwrap());
    Capture {
        ring: RingId(ring),
        origin: Origin::Reader,
        wants: Wants::Reader(Box::new(of)),
        directions: Directions::Both,
        settings: Settings::default(),
    }
}

/// The mirrors of the wanted pods, written as `web mirror/all both tcp`.
fn mirrors(choice: &Choice<'_>) -> Vec<String> {
    let of = |Wanted { pod, mirrors, .. }: &Wanted<'_>| {
        let name = pod.id.name.clone();
        let filter = |session: &Session| session.settings.filter.as_ref().map(|filter| filter.text.clone());
        let words = mirrors.iter().map(move |(mirror, session)| {
            let filter = filter(session).unwrap_or_else(|| "all".into());
            format!("{name} {mirror} {} {filter}", session.directions.name())
        });
        words.collect::<Vec<_>>()
    };
    choice.wanted.iter().flat_map(of).collect()
}

fn refusals(choice: &Choice<'_>) -> Vec<String> {
    let words = choice.refused.iter().map(|skipped| {
        let mirror = skipped.mirror.as_ref().map_or("default".to_owned(), ToString::to_string);
        format!("{} {mirror} {}", skipped.pod.as_ref().unwrap().name, skipped.why.name())
    });
    words.collect()
}

#[test]
fn a_reader_knows_deleted_pods_only_where_it_needs_no_labels() {
    let all = resource(Some("shop"), "x", &[]);
    let one = Resource { pod_name: Some("db".into()), ..all.clone() };
    assert_eq!([all.named(), one.named()], ["shop/*", "shop/db"].map(|name| Some(name.to_owned())));
    for of in [all, one] {
        assert_eq!(Resource { pods: with_labels(&[("app", "db")]), ..of }.named(), None);
    }
    assert_eq!(resource(None, "of-all-namespaces", &[]).named(), None);
}

#[test]
fn the_older_reader_has_the_last_place_of_a_pod() {
    let names: Vec<_> = (1..MAX_SESSIONS_PER_TAP).map(|number| format!("{MIRROR}.m{number}")).collect();
    let most: Vec<_> = names.iter().map(|name| (name.as_str(), "true")).collect();
    let pods = [pod("shop", "web", &most)];
    let captures = [10, 9].map(|ring| reader(&resource(Some("shop"), "x", &[]), ring));
    let choice = choose(&pods, &[], &captures, &Policy::default(), &mut Filters::default());
    assert_eq!(refusals(&choice), ["web capture.10 TooManyMirrors"]);
}

#[test]
fn a_resource_that_cannot_be_used_is_refused_whole_and_disturbs_nothing() {
    let pods = [pod("shop", "web", &[(MIRROR, "true")])];
    for (broken, reason, sentence) in [
        (
            resource(Some("shop"), "x", &[("snaplen", "96"), ("filter", "tcp prot 80")]),
            "InvalidFilter",
            "spec.filter \"tcp prot 80\": ",
        ),
        (
            Resource { request: Err("unknown field \"target\"".into()), ..resource(None, "x", &[]) },
            "InvalidSpec",
            "unknown field \"target\"",
        ),
        (
            Resource {
                request: Ok(Request { nics: Some(vec!["a/b".into()]), ..Request::default() }),
                ..enforced("x")
            },
            "InvalidSpec",
            "spec.nics \"a/b\": ",
        ),
        (
            Resource {
                request: Ok(Request { target: Some("ids".into()), ..Request::default() }),
                ..resource(None, "x", &[])
            },
            "NoSuchTarget",
            "this node has no target \"ids\"",
        ),
    ] {
        let good = resource(Some("shop"), "good", &[]);
        let choice = chosen(&pods, &[broken.clone(), good], &Policy::default());
        assert_eq!(mirrors(&choice), ["web default both all", "web mirror/good both all"]);
        let selected = choice.selected.iter().find(|of| of.id == broken.id).unwrap();
        let (word, message) = selected.refused.clone().unwrap();
        assert_eq!(word, reason);
        assert!(message.starts_with(sentence), "{message}");
        assert_eq!(choice.refused.len(), 1);
        let told = choice.refused[0].why.to_string();
        assert!(told.ends_with(&message), "{told}");
    }
}

/// It has another UID, so a used-up budget begins again. The same objects, listed again or read by the next agent, are
/// the same requests. Annotations have no UID.
#[test]
fn a_resource_that_was_created_again_is_a_new_request() {
    let pods = [pod("shop", "web", &[(MIRROR, "true"), ("podmirror.io/packets", "40")])];
    let of = |uid: &str| {
        let limits = [("packets", "40")];
        let resources = [
            Resource { uid: uid.to_owned(), ..resource(Some("shop"), "x", &limits) },
            Resource { uid: uid.to_owned(), ..resource(None, "y", &limits) },
        ];
        chosen(&pods, &resources, &Policy::default()).wanted.remove(0).mirrors
    };
    let (first, created_again) = (of("uid-1"), of("uid-2"));
    assert_eq!(first, of("uid-1"));
    assert_eq!((first.len(), created_again.len()), (3, 3));
    let is_same = |mirror: &&MirrorId| first[*mirror].asks_the_same(&created_again[*mirror]);
    assert_eq!(first.keys().filter(is_same).collect::<Vec<_>>(), [&MirrorId::default()], "the annotation");
}

/// A resource that names no target gets the mirror interface, whatever --target says.
#[test]
fn a_resource_without_a_target_gets_the_mirror_interface() {
    let ids = TargetName("ids".parse().unwrap());
    let mut policy = Policy { target: ids.clone(), enable_mirror: true, ..Policy::default() };
    policy.targets.insert(ids.clone(), Destination::Device("ids0".into()));
    let pods = [pod("shop", "web", &[])];
    let choice = chosen(&pods, &[resource(Some("shop"), "x", &[]), enforced("y")], &policy);
    let targets: Vec<_> = choice.wanted[0].mirrors.values().map(|session| session.target.clone()).collect();
    assert_eq!(targets, [TargetName::default(), ids, TargetName::default()]);
}

#[test]
fn an_opt_out_holds_for_all_but_enforced_mirrors() {
    let resources = [resource(Some("shop"), "own", &[]), resource(None, "all", &[]), enforced("ids")];
    let out = [
        (pod("shop", "web", &[(MIRROR, "false")]), "OptedOut"),
        (Pod { inherited: Arc::new(texts(&[(MIRROR, "false")])), ..pod("shop", "web", &[]) }, "OptedOut"),
        (pod("shop", "web", &[("ovn.kubernetes.io/mirror", "false")]), "OptedOut"),
        (Pod { unread: Some("too long".into()), ..pod("shop", "web", &[]) }, "AnnotationsUnread"),
    ];
    for (out, reason) in out {
        let pods = [out];
        let policy = Policy { enable_mirror: true, kube_ovn_annotations: true, ..Policy::default() };
        let choice = chosen(&pods, &resources, &policy);
        assert_eq!(mirrors(&choice), ["web clustermirror/ids both all"], "{pods:?}");
        let mut expected =
            vec![format!("web clustermirror/all {reason}"), format!("web mirror/own {reason}")];
        if reason == "AnnotationsUnread" {
            expected.insert(0, "web default AnnotationsUnread".to_owned());
        }
        assert_eq!(refusals(&choice), expected);
        // If annotations are disabled, none of them can opt a pod out.
        let policy = Policy { annotations: false, ..Policy::default() };
        let without = chosen(&pods, &resources, &policy);
        assert_eq!((mirrors(&without).len(), without.refused.len()), (3, 0));
    }
    // Disabling one mirror by its name does not opt the pod out.
    let pods = [pod("shop", "web", &[("podmirror.io/mirror.ids", "false")])];
    assert_eq!(mirrors(&chosen(&pods, &resources, &Policy::default())).len(), 3);
}

#[test]
fn the_node_stands_above_resources() {
    let pods = [pod("shop", "web", &[])];
    let resources = [resource(Some("shop"), "own", &[]), resource(None, "all", &[]), enforced("ids")];
    let only = |name: &str| [name.to_owned()].into();
    let excluded = Policy { exclude_namespaces: only("shop"), ..Policy::default() };
    let choice = chosen(&pods, &resources, &excluded);
    assert_eq!((mirrors(&choice).len(), choice.refused.len()), (0, 3));
    // A namespace that is not allowed to request mirrors cannot do so with a Mirror either.
    let elsewhere = Policy { allow_namespaces: Some(only("bank")), ..Policy::default() };
    let choice = chosen(&pods, &resources, &elsewhere);
    assert_eq!(mirrors(&choice), ["web clustermirror/all both all", "web clustermirror/ids both all"]);
    assert_eq!(refusals(&choice), ["web mirror/own NamespaceNotAllowed"]);
}

/// Returns the choice, and the number of parts it took.
fn whole<'a>(pods: &'a [Pod], resources: &[Resource], filters: &mut Filters) -> (Choice<'a>, u32) {
    let mut parts = 0;
    loop {
        parts += 1;
        let choice = choose(pods, resources, &[], &Policy::default(), filters);
        if !filters.is_behind() {
            return (choice, parts);
        }
        assert!(!choice.refused.is_empty(), "what is missing is not wanted without its filter");
    }
}

/// Of 50 Mirrors with 50 filters, 8 filters are compiled. Where no pod is selected, none is compiled.
#[test]
fn only_filters_of_mirrors_with_a_place_are_compiled() {
    let filters_of = |namespace: &str| -> Vec<Resource> {
        let of = |number: i64| Resource {
            created: number,
            ..resource(Some(namespace), &format!("m{number}"), &[("filter", &format!("port {number}"))])
        };
        (1..=50).map(of).collect()
    };
    let pods = [pod("shop", "web", &[]), pod("shop", "db", &[])];
    let resources = [filters_of("shop"), filters_of("aaa")].concat();
    let mut filters = Filters::default();
    let (choice, _) = whole(&pods, &resources, &mut filters);
    assert_eq!(choice.wanted.iter().map(|wanted| wanted.mirrors.len()).collect::<Vec<_>>(), [8, 8]);
    let compiled = |number: i64| filters.knows(&format!("port {number}"));
    assert_eq!((1..=50).filter(|number| compiled(*number)).collect::<Vec<_>>(), Vec::from_iter(1..=8));
    assert!(choice.refused.iter().all(|skipped| skipped.why == Why::TooManyMirrors));
    assert_eq!((choice.refused.len(), filters.is_behind()), (2 * 42, false));
}

/// The loop compiles a few filters at a time, and the parts together make the choice.
#[test]
fn very_many_new_filters_are_compiled_in_parts() {
    let mut pods: Vec<_> = (0..10).map(|number| pod("shop", &format!("p{number}"), &[])).collect();
    for (number, pod) in pods.iter_mut().enumerate() {
        let keys = |mirror: usize| {
            let filter = format!("port {number}{mirror}");
            [
                (format!("{MIRROR}.m{mirror}"), "true".to_owned()),
                (format!("podmirror.io/filter.m{mirror}"), filter),
            ]
        };
        pod.annotations = (0..8).flat_map(keys).collect();
    }
    let mut filters = Filters::default();
    let (choice, parts) = whole(&pods, &[], &mut filters);
    assert_eq!((parts, choice.refused.len()), (20, 0));
    assert_eq!(choice.wanted.iter().map(|wanted| wanted.mirrors.len()).sum::<usize>(), 80);
}

fn any_selector(key: &'static str, values: [&'static str; 2]) -> impl Strategy<Value = Selector> {
    let labels = option::of(sample::select(values.to_vec()));
    let operators = vec![Operator::In, Operator::NotIn, Operator::Exists, Operator::DoesNotExist];
    let requirement = (sample::select(operators), sample::subsequence(values.to_vec(), 0..=2));
    (labels, option::weighted(0.3, requirement)).prop_map(move |(label, requirement)| Selector {
        labels: label.into_iter().map(|value| (key.to_owned(), value.to_owned())).collect(),
        requirements: requirement
            .into_iter()
            .map(|(operator, values)| Requirement {
                key: key.into(),
                operator,
                values: values.into_iter().map(str::to_owned).collect(),
            })
            .collect(),
    })
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let word = || option::weighted(0.4, sample::select(vec!["true", "false", "egress", "maybe"]));
    let named = vec(sample::select(vec!["a", "b", "c", "d", "e", "f", "g", "h", "i"]), 0..9);
    let namespace = sample::select(vec!["shop", "bank"]);
    let names = sample::select(vec!["web", "db"]);
    (namespace, names, word(), word(), named, prop::bool::weighted(0.1)).prop_map(
        |(namespace, name, own, inherited, named, is_unread)| {
            let of = |word: Option<&'static str>| word.map(|word| (MIRROR, word));
            let mut pod = pod(namespace, name, of(own).as_slice());
            pod.annotations.extend(named.iter().map(|name| (format!("{MIRROR}.{name}"), "true".to_owned())));
            pod.inherited = Arc::new(texts(of(inherited).as_slice()));
            if is_unread {
                pod.annotations.clear();
                pod.unread = Some("too long".to_owned());
            }
            pod
        },
    )
}

fn any_resource() -> impl Strategy<Value = Resource> {
    let kind = sample::select(vec![Some("shop"), Some("bank"), None]);
    let setting =
        sample::select(vec![None, Some(("filter", "tcp")), Some(("filter", "tpc")), Some(("snaplen", "96"))]);
    (
        kind,
        any_selector("kubernetes.io/metadata.name", ["shop", "bank"]),
        any_selector("app", ["web", "db"]),
        any::<bool>(),
        0..4_i64,
        setting,
    )
        .prop_map(|(namespace, namespaces, pods, is_enforced, created, setting)| Resource {
            namespaces,
            pods,
            is_enforced: is_enforced && namespace.is_none(),
            created,
            ..resource(namespace, "x", setting.as_slice())
        })
}

proptest! {
    /// A reader of the API gets the packets that Mirrors with its request would get, one in each of its namespaces, and
    /// the same reasons where there are none.
    #[test]
    fn what_binds_a_mirror_binds_a_reader(
        pods in vec(any_pod(), 1..6), of in any_resource(), name in option::of(sample::select(vec!["web", "db"])),
        is_excluded: bool, is_gated: bool, enable_mirror: bool, annotations in prop::bool::weighted(0.8),
    ) {
        let numbered = |(number, mut pod): (usize, Pod)| {
            pod.id.uid = format!("uid-{number}");
            // No other mirror than `default`, which never takes the last place.
            pod.annotations.retain(|key, _| key == MIRROR);
            pod
        };
        let pods: Vec<_> = pods.into_iter().enumerate().map(numbered).collect();
        let of = Resource {
            is_enforced: false,
            pod_name: name.map(str::to_owned),
            request: of.request.map(|request| Request { filter: None, ..request }),
            ..of
        };
        let spaces = ["shop", "bank"].map(str::to_owned);
        let within = spaces.iter().filter(|space| of.id.namespace.as_ref().is_none_or(|namespace| namespace == *space));
        let mirrors: Vec<_> = within.map(|namespace| {
            let id = ResourceId { namespace: Some(namespace.clone()), name: of.id.name.clone() };
            Resource { id, ..of.clone() }
        }).collect();
        let policy = Policy {
            enable_mirror,
            annotations,
            exclude_namespaces: is_excluded.then(|| "bank".to_owned()).into_iter().collect(),
            allow_namespaces: is_gated.then(|| ["shop".to_owned()].into()),
            ..Policy::default()
        };
        let captures = [reader(&of, 4)];
        let read = choose(&pods, &[], &captures, &policy, &mut Filters::default());
        let mirrored = chosen(&pods, &mirrors, &policy);
        let outcome = |choice: &Choice<'_>, pod: &Pod, mirror: &MirrorId| {
            let wanted = choice.wanted.iter().find(|wanted| wanted.pod.id == pod.id);
            let session = wanted.and_then(|wanted| wanted.mirrors.get(mirror));
            let is_refused =
                |skipped: &&Skipped| skipped.pod.as_ref() == Some(&pod.id) && skipped.mirror.as_ref() == Some(mirror);
            let why = choice.refused.iter().find(is_refused).map(|skipped| skipped.why.clone());
            (session.map(|session| (session.directions, session.settings.clone())), why)
        };
        for pod in &pods {
            let expected = outcome(&mirrored, pod, &mirrors[0].id.mirror());
            let found = outcome(&read, pod, &captures[0].mirror());
            // What bars a reader from the pod bars it from the pod's interfaces.
            let barred = read.barred.iter().find(|(of, _)| of.id == pod.id).map(|(_, why)| why.clone());
            prop_assert!(found == (None, None) || found.1 == barred, "{:?}, {:?}", found, barred);
            prop_assert_eq!(found, expected);
        }
        let sessions = read.wanted.iter().flat_map(|wanted| wanted.mirrors.values());
        let of_reader: BTreeSet<_> =
            sessions.filter(|session| session.target == captures[0].target()).map(|session| session.origin).collect();
        prop_assert!(of_reader.is_subset(&[Origin::Reader].into()));
        let selected: BTreeSet<_> = mirrored.selected.iter().flat_map(|of| of.pods.clone()).collect();
        let of_reader: BTreeSet<_> = read.selected.iter().flat_map(|of| of.pods.clone()).collect();
        prop_assert_eq!(of_reader, selected);
    }

    /// Every pair of a resource and a pod that it selects has a session or a reason. Enforced resources always win, and
    /// no namespace affects another.
    #[test]
    fn resources_and_annotations_are_joined(
        pods in vec(any_pod(), 1..5),
        resources in vec(any_resource(), 0..12),
        enable_mirror: bool,
        annotations in prop::bool::weighted(0.8),
    ) {
        let numbered = |(number, mut pod): (usize, Pod)| {
            pod.id.uid = format!("uid-{number}");
            pod
        };
        let pods: Vec<_> = pods.into_iter().enumerate().map(numbered).collect();
        let named = |(number, mut resource): (usize, Resource)| {
            resource.id.name = format!("r{number}").parse::<Name>().unwrap();
            resource
        };
        let resources: Vec<_> = resources.into_iter().enumerate().map(named).collect();
        let policy = Policy { enable_mirror, annotations, ..Policy::default() };
        let choice = chosen(&pods, &resources, &policy);
        let alone = chosen(&pods, &[], &policy);
        let none = BTreeMap::new();
        for pod in &pods {
            let of = |choice: &Choice<'_>| -> BTreeMap<MirrorId, Session> {
                let wanted = choice.wanted.iter().find(|wanted| wanted.pod.id == pod.id);
                wanted.map_or(&none, |wanted| &wanted.mirrors).clone()
            };
            let reason = |mirror: &MirrorId| {
                let mut reasons = choice.refused.iter().filter(|skipped| {
                    skipped.pod.as_ref() == Some(&pod.id) && skipped.mirror.as_ref() == Some(mirror)
                });
                reasons.next().map(|skipped| skipped.why.clone())
            };
            let (mirrors, before) = (of(&choice), of(&alone));
            prop_assert!(mirrors.len() <= MAX_SESSIONS_PER_TAP);
            let selecting: Vec<_> = resources.iter().filter(|resource| resource.selects(pod)).collect();
            let is_good = |resource: &Resource| {
                resource.request.as_ref().is_ok_and(|request| request.filter.as_deref() != Some("tpc"))
            };
            let is_out = annotations && (pod.unread.is_some() || {
                let word = |annotations: &BTreeMap<String, String>| {
                    annotations.get(MIRROR).filter(|word| *word != "maybe").cloned()
                };
                word(&pod.annotations).or(word(&pod.inherited)).as_deref() == Some("false")
            });
            for resource in &selecting {
                let mirror = resource.id.mirror();
                prop_assert_ne!(mirrors.contains_key(&mirror), reason(&mirror).is_some(), "{:?}", resource);
                if let Some(namespace) = &resource.id.namespace {
                    prop_assert_eq!(namespace, &pod.id.namespace);
                }
                if is_out && !resource.is_enforced {
                    let why = reason(&mirror).unwrap();
                    prop_assert!(matches!(why, Why::OptedOut(Place::Pod | Place::Namespace) | Why::AnnotationsUnread(_)));
                }
            }
            // No other source adds mirrors of these names.
            let ours: BTreeSet<_> = selecting.iter().map(|resource| resource.id.mirror()).collect();
            for (mirror, session) in &mirrors {
                match session.origin {
                    Origin::Annotation(_) | Origin::Policy => {
                        prop_assert_eq!(before.get(mirror), Some(session), "as without resources");
                    }
                    _ => prop_assert!(ours.contains(mirror)),
                }
            }
            // Enforced resources come first, then the node's policy, and within each kind the oldest. Annotations come
            // last.
            let of_kind = |is_enforced: bool| {
                let of_kind = selecting.iter().filter(|resource| resource.is_enforced == is_enforced);
                let mut of_kind: Vec<_> = of_kind.filter(|_| is_enforced || !is_out).copied().collect();
                of_kind.sort_by_key(|resource| (resource.created, resource.id.mirror()));
                of_kind
            };
            let (first, others) = (of_kind(true), of_kind(false));
            let of_policy = before.values().filter(|session| session.origin == Origin::Policy).count();
            let of_annotations = before.len() - of_policy;
            let resources = first.iter().copied().map(Some).chain((0..of_policy).map(|_| None));
            let in_queue: Vec<_> = resources.chain(others.into_iter().map(Some)).collect();
            let mut bad = 0;
            for (place, resource) in in_queue.iter().enumerate() {
                let Some(resource) = resource else { continue };
                let has_place = place < MAX_SESSIONS_PER_TAP;
                prop_assert_eq!(mirrors.contains_key(&resource.id.mirror()), has_place && is_good(resource));
                if !has_place {
                    prop_assert_eq!(reason(&resource.id.mirror()), Some(Why::TooManyMirrors));
                }
                // An invalid filter is found when the slots are allocated, and the mirror keeps its slot.
                bad += usize::from(has_place && !is_good(resource));
            }
            let wants = in_queue.len() + of_annotations;
            prop_assert_eq!(mirrors.len(), wants.min(MAX_SESSIONS_PER_TAP) - bad);
            if choice.unasked.contains_key(&pod.id) {
                prop_assert!(mirrors.is_empty());
                prop_assert_eq!(alone.unasked.get(&pod.id), choice.unasked.get(&pod.id));
            }
        }
        for selected in &choice.selected {
            let resource = resources.iter().find(|resource| resource.id == selected.id).unwrap();
            let expected: BTreeSet<_> =
                pods.iter().filter(|pod| resource.selects(pod)).map(|pod| pod.id.clone()).collect();
            prop_assert_eq!(&selected.pods, &expected);
        }
        let selecting = resources.iter().filter(|resource| pods.iter().any(|pod| resource.selects(pod)));
        prop_assert_eq!(choice.selected.len(), selecting.count());
    }
}
