//! The mirrors of a pod whose object was deleted before this agent started, as far as only its taps show them
//! ([`Pod::installed`]): those that annotations or the policy have requested.
//!
//! Pure. `choose` calls this module. `resources` has the other mirrors, because their requests still exist.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Nics, Policy, Why,
    resources::{Draft, InQueue, rank},
};
use crate::model::{MirrorId, Origin, Pod, Session};

/// Returns the mirrors that the policy still allows, each for the NICs where it is installed.
pub(super) fn drafts(pod: &Pod, policy: &Policy) -> Vec<(InQueue, Result<Draft<'static>, Why>)> {
    let namespace = &pod.id.namespace;
    let is_allowed = |session: &Session| match session.origin {
        Origin::Policy => policy.enable_mirror && !policy.exclude_namespaces.contains(namespace),
        Origin::Annotation(_) => policy.annotations && policy.may_ask(namespace),
        // A program that reads packets ends with its agent.
        _ => false,
    };
    let mut found = BTreeMap::<_, (&Session, BTreeSet<String>)>::new();
    for tap in &pod.installed {
        for (mirror, session) in tap.sessions.iter().filter(|(_, session)| is_allowed(session)) {
            let (_, nics) = found.entry(mirror).or_insert_with(|| (session, BTreeSet::new()));
            nics.insert(tap.owner.nic.clone());
        }
    }
    let draft = |(mirror, (session, nics)): (&MirrorId, (&Session, BTreeSet<String>))| {
        let target = policy.target_named(Some(session.target.0.as_str()));
        let is_usable = target.and_then(|target| policy.may_use(&target, pod));
        let nics = Nics::only(nics);
        let draft = is_usable.map(|()| Draft { session: session.clone(), nics, filter: None });
        ((rank(session.origin), 0, mirror.clone()), draft)
    };
    found.into_iter().map(draft).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_common::verdict::TapKind;

    use super::*;
    use crate::{
        model::{Directions, Owner, Place, PodId, Request, Resource, ResourceId, Selector, Tap, TargetName},
        select::{Filters, choose},
        settings::Settings,
    };

    fn tap(nic: &str, mirrors: &[(&MirrorId, Origin)]) -> Tap {
        let session = |origin| Session {
            directions: Directions::Egress,
            settings: Settings::default(),
            target: TargetName::default(),
            origin,
            asked: 7,
            key: None,
        };
        let sessions = mirrors.iter().map(|(mirror, origin)| (MirrorId::clone(mirror), session(*origin)));
        Tap {
            owner: Owner { nic: nic.into(), ..Owner::default() },
            kind: TapKind::HostVeth,
            is_limited: false,
            exit: None,
            bridge: None,
            pod_side: None,
            sessions: sessions.collect(),
        }
    }

    fn pod(installed: Vec<Tap>) -> Pod {
        let id = PodId { uid: "1".into(), namespace: "shop".into(), name: "web".into() };
        Pod { id, installed, ..Pod::default() }
    }

    /// The mirrors of a pod, written as `ids egress eth0,net1`.
    fn chosen(pod: &Pod, resources: &[Resource], policy: &Policy) -> Vec<String> {
        let pods = std::slice::from_ref(pod);
        let choice = choose(pods, resources, &[], policy, &mut Filters::default());
        let mut words = Vec::new();
        for wanted in &choice.wanted {
            for (mirror, session) in &wanted.mirrors {
                let nics = wanted.nics.get(mirror).map_or(vec!["all"], |nics| nics.named().collect());
                words.push(format!("{mirror} {} {}", session.directions.name(), nics.join(",")));
            }
        }
        words.extend(choice.refused.iter().map(|skipped| skipped.why.name().to_owned()));
        words
    }

    #[test]
    fn a_mirror_stays_on_its_nics_while_the_policy_allows_it() {
        let named = |name: &str| MirrorId(name.parse().unwrap());
        let (all, ids, own, other) = (MirrorId::default(), named("ids"), named("own"), named("other"));
        let of_pod = (&all, Origin::Annotation(Place::Pod));
        let pod = pod(vec![
            tap("eth0", &[of_pod, (&own, Origin::Policy), (&other, Origin::Capture)]),
            tap("net1", &[of_pod, (&ids, Origin::Annotation(Place::Namespace))]),
        ]);
        let asked = ["default egress eth0,net1", "ids egress net1"];
        let on = || Policy { enable_mirror: true, ..Policy::default() };
        let excluded = || ["shop".to_owned()].into();
        let allowed = || Some(["bank".to_owned()].into());
        let table: &[(Policy, &[&str])] = &[
            (Policy::default(), &asked),
            (on(), &[asked[0], asked[1], "own egress eth0"]),
            (Policy { annotations: false, ..on() }, &["own egress eth0"]),
            (Policy { allow_namespaces: allowed(), ..on() }, &["own egress eth0"]),
            (Policy { exclude_namespaces: excluded(), ..on() }, &[]),
            (Policy { targets: BTreeMap::new(), ..Policy::default() }, &["NoSuchTarget", "NoSuchTarget"]),
        ];
        for (policy, expected) in table {
            assert_eq!(chosen(&pod, &[], policy), *expected, "{policy:?}");
        }
    }

    /// The Mirror selects pods by their labels, which are unknown.
    #[test]
    fn a_mirror_of_a_resource_is_as_the_resource_is_now() {
        let resource = |name: &str, pods| Resource {
            id: ResourceId { namespace: Some("shop".into()), name: name.parse().unwrap() },
            uid: name.into(),
            generation: 1,
            created: 0,
            is_enforced: false,
            namespaces: Selector::default(),
            pods,
            request: Ok(Request { directions: Directions::Ingress, ..Request::default() }),
        };
        let web = Selector { labels: [("app".to_owned(), "web".to_owned())].into(), ..Selector::default() };
        let (known, other) = (resource("known", web), resource("other", Selector::default()));
        let pod = pod(vec![tap("eth0", &[(&known.id.mirror(), Origin::Mirror)])]);
        let policy = Policy::default();
        assert_eq!(chosen(&pod, &[known, other.clone()], &policy), ["mirror/known ingress all"]);
        assert_eq!(chosen(&pod, &[other], &policy), Vec::<String>::new());
    }
}
