//! Tests of Kube-OVN's annotations of attachments: examples, and a property for the precedence at each NIC.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, sync::Arc};

use proptest::{option, prelude::*, sample};

use crate::{
    model::{Directions, Origin, Place, Pod},
    networks::{Entry, Networks},
    select::{
        Choice, Filters, MIRROR, NICS, OVN_MIRROR, Policy, Selection, Why, choose, select,
        tests::{mk_node, mk_pod},
    },
};

const FAST: &str = "fast.shop.ovn.kubernetes.io/mirror";

fn policy() -> Policy {
    Policy { kube_ovn_annotations: true, ..Policy::default() }
}

/// A pod with three NICs: the first is in the cluster's network, the others are attachments.
fn pod(annotations: &[(&str, &str)]) -> Pod {
    let entry = |(nic, network)| Entry { network: Some(network), nic: Some(nic) };
    let networks = [("eth0", "kube-ovn"), ("eth1", "shop/fast"), ("eth2", "ops/back.up")].map(entry);
    Pod { networks: Networks::of(networks), ..mk_pod("web", annotations) }
}

/// The mirrored NICs with their directions and networks, and the problems.
fn mirrored(pod: &Pod, policy: &Policy) -> (Vec<String>, Vec<String>) {
    let pods = [pod.clone()];
    let Choice { wanted, refused, bad, .. } = choose(&pods, &[], &[], policy, &mut Filters::default());
    let links = mk_node(&[(pod, 2, 100), (pod, 3, 101), (pod, 4, 102)]);
    let Selection { taps, skipped } = select(&wanted, &[], &links, policy);
    let taps = taps.values().flat_map(|tap| {
        let network = tap.head.owner.network.as_deref().unwrap_or("-");
        tap.sessions
            .values()
            .map(move |session| format!("{} {} in {network}", tap.head.owner.nic, session.directions.name()))
    });
    let problems =
        refused.iter().chain(&skipped).map(|skipped| format!("{}: {}", skipped.why.name(), skipped.why));
    let bad = bad.iter().map(ToString::to_string);
    (taps.collect(), problems.chain(bad).collect())
}

#[test]
fn a_network_without_its_namespace_is_one_of_the_pods_namespace() {
    let entry = Entry { network: Some("fast"), nic: Some("eth1") };
    let in_default = |key| Pod { networks: Networks::of([entry]), ..mk_pod("web", &[(key, "true")]) };
    let (nics, _) = mirrored(&in_default("fast.default.ovn.kubernetes.io/mirror"), &policy());
    assert_eq!(nics, ["eth1 both in fast"]);
    let (nics, problems) = mirrored(&in_default(FAST), &policy());
    assert_eq!((nics.len(), problems.len()), (0, 1), "{problems:?}");
}

#[test]
fn a_network_that_no_nic_is_in_is_told() {
    let key = "slow.shop.ovn.kubernetes.io/mirror";
    let (nics, problems) = mirrored(&pod(&[(FAST, "true"), (key, "true")]), &policy());
    assert_eq!(nics, ["eth1 both in shop/fast"]);
    assert_eq!(
        problems,
        ["NoSuchNetwork: slow.shop.ovn.kubernetes.io/mirror requests the NICs of a network that \
          k8s.v1.cni.cncf.io/network-status lists for no NIC of the pod"]
    );
    // Multus has not written its annotation yet. This is transient, so there is no Event.
    let early = mk_pod("web", &[(key, "true")]);
    let pods = [early];
    let choice = choose(&pods, &[], &[], &policy(), &mut Filters::default());
    assert_eq!((choice.wanted, choice.bad), (vec![], vec![]));
    let why = &choice.refused[0].why;
    assert!(why.is_passing() && why.to_string().contains("no annotation"), "{why}");
    // Multus has written its annotation, and the pod has no other NIC.
    let late = [Pod { networks: Networks::of([]), ..mk_pod("web", &[(key, "true")]) }];
    let choice = choose(&late, &[], &[], &policy(), &mut Filters::default());
    assert!(!choice.refused[0].why.is_passing());
}

#[test]
fn what_makes_no_sense_is_told_and_ignored() {
    let odd = pod(&[(FAST, "yes"), ("fast.ovn.kubernetes.io/mirror", "true")]);
    assert_eq!(
        mirrored(&odd, &policy()),
        (
            vec![],
            vec![
                "annotation fast.ovn.kubernetes.io/mirror: use NAME.NAMESPACE.ovn.kubernetes.io/mirror, with the \
                 name and the namespace of a NetworkAttachmentDefinition; it is ignored"
                    .into(),
                format!("annotation {FAST}: \"yes\" is not true or false; it is ignored"),
            ]
        )
    );
}

#[test]
fn a_problem_of_the_networks_is_told_of_a_pod_that_is_mirrored() {
    let problem = || Networks::unreadable("it is not a JSON".into());
    let web = |annotations| Pod { networks: problem(), ..mk_pod("web", annotations) };
    assert_eq!(mirrored(&web(&[]), &policy()), (vec![], vec![]));
    let (nics, problems) = mirrored(&web(&[(MIRROR, "true")]), &policy());
    assert_eq!(nics.len(), 3);
    assert_eq!(problems, ["annotation k8s.v1.cni.cncf.io/network-status: it is not a JSON; it is ignored"]);
}

#[test]
fn our_annotation_of_nics_wins() {
    let nics = |own: &[(&str, &str)], inherited: &[(&str, &str)]| {
        let texts = inherited.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        let pod = Pod { inherited: Arc::new(texts.collect()), ..pod(own) };
        let (nics, problems) = mirrored(&pod, &policy());
        assert_eq!(problems, Vec::<String>::new());
        nics.iter().map(|nic| nic[..4].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(nics(&[(FAST, "true"), (NICS, "eth2")], &[]), ["eth2"]);
    assert_eq!(nics(&[(FAST, "true")], &[(NICS, "eth2")]), ["eth1"], "the pod's own annotation");
    let narrowed = [(MIRROR, "true"), (NICS, "eth0,eth1")];
    assert_eq!(nics(&[], &narrowed), ["eth0", "eth1"]);
    assert_eq!(nics(&[(FAST, "false")], &narrowed), ["eth0"]);
    assert_eq!(nics(&[(FAST, "false"), (NICS, "eth1")], &narrowed), ["eth1"]);
}

fn word() -> impl Strategy<Value = Option<&'static str>> {
    option::of(sample::select(vec!["true", "false", "maybe"]))
}

proptest! {
    /// The precedence for a NIC: podmirror's annotation on the pod, the annotation of its attachment, Kube-OVN's on the
    /// pod, podmirror's on the namespace, the flag. Kube-OVN's count only with their own flag. Where annotations are
    /// not accepted, they can only exclude a NIC. The directions come from the request for the whole pod.
    #[test]
    fn the_most_specific_annotation_decides_about_a_nic(
        ours in word(), of_nics: [Option<bool>; 2], ovn in word(), theirs in word(), enable_mirror: bool,
        kube_ovn_annotations: bool, gate in 0..3,
    ) {
        let keys = [FAST, "back.up.ops.ovn.kubernetes.io/mirror"];
        let said = |value: bool| if value { "true" } else { "false" };
        let mut annotations = vec![];
        annotations.extend(ours.map(|value| (MIRROR, value)));
        annotations.extend(ovn.map(|value| (OVN_MIRROR, value)));
        annotations.extend(keys.iter().zip(of_nics).filter_map(|(key, value)| Some((*key, said(value?)))));
        let egress = |value: &str| if value == "true" { "egress".to_owned() } else { value.to_owned() };
        let inherited: BTreeMap<_, _> = theirs.map(|value| (MIRROR.to_owned(), egress(value))).into_iter().collect();
        let pods = [Pod { inherited: Arc::new(inherited), ..pod(&annotations) }];
        let set = |name: &str| [name.to_owned()].into();
        let policy = Policy {
            enable_mirror,
            kube_ovn_annotations,
            exclude_namespaces: if gate == 1 { set("default") } else { set("other") },
            allow_namespaces: (gate == 2).then(|| set("other")),
            ..Policy::default()
        };
        let choice = choose(&pods, &[], &[], &policy, &mut Filters::default());
        let links = mk_node(&[(&pods[0], 2, 100), (&pods[0], 3, 101), (&pods[0], 4, 102)]);
        let selection = select(&choice.wanted, &[], &links, &policy);

        let known = |value: Option<&str>| value.filter(|value| *value != "maybe").map(|value| value == "true");
        let (ours, ovn, theirs) = (known(ours), known(ovn), known(theirs));
        let (ovn, of_nics) = if kube_ovn_annotations { (ovn, of_nics) } else { (None, [None; 2]) };
        let whole = ours.or(ovn).or(theirs);
        for (number, of_nic) in [None, of_nics[0], of_nics[1]].into_iter().enumerate() {
            let asked = ours.or(of_nic).or(ovn).or(theirs);
            let is_mirrored = match gate {
                1 => false,
                2 => enable_mirror && whole != Some(false) && (ours.is_some() || of_nic != Some(false)),
                _ => asked.unwrap_or(enable_mirror),
            };
            let tap = selection.taps.values().find(|tap| tap.head.owner.nic == format!("eth{number}"));
            prop_assert_eq!(tap.is_some(), is_mirrored, "eth{}", number);
            let Some(tap) = tap else { continue };
            let session = tap.sessions.values().next().unwrap();
            let pods_own = (Directions::Both, Origin::Annotation(Place::Pod));
            let expected = match (ours.or(ovn), theirs) {
                _ if gate == 2 => (Directions::Both, Origin::Policy),
                (Some(_), _) => pods_own,
                (None, Some(true)) => (Directions::Egress, Origin::Annotation(Place::Namespace)),
                (None, None) if enable_mirror => (Directions::Both, Origin::Policy),
                (None, _) => pods_own,
            };
            prop_assert_eq!((session.directions, session.origin), expected);
        }
        // A request by an annotation that the policy refuses is reported. For a request by the flag alone there is no
        // report.
        let of_attachment = ours.is_none() && of_nics.contains(&Some(true));
        let is_asked = match whole {
            Some(whole) => whole || of_attachment && gate == 1,
            None => of_attachment && !enable_mirror,
        };
        let is_refused = gate == 1 || gate == 2 && !enable_mirror;
        let refused: Vec<_> = choice.refused.iter().map(|refused| &refused.why).collect();
        let expected = if gate == 1 { Why::NamespaceExcluded } else { Why::NamespaceNotAllowed };
        prop_assert_eq!(refused, if is_asked && is_refused { vec![&expected] } else { vec![] });
        prop_assert_eq!(selection.skipped, vec![]);
    }
}
