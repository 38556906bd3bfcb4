//! Tests: the Events that are posted as mirrors begin, change and end, and after restarts of the agent.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::Arc;

use proptest::{collection::btree_map, prelude::*, sample::select};

use super::*;
use crate::{
    model::{Ended, Place, ResourceId},
    report::Mirrors,
};

const INSTALLED: Stage = Stage::Installed;
const OVER: Stage = Stage::Ended(Ended::Packets);

fn pod(name: &str) -> PodId {
    PodId { uid: format!("uid-{name}"), namespace: "shop".into(), name: name.into() }
}

fn id(name: &str) -> MirrorId {
    let of = |name: &str| ResourceId { namespace: Some("shop".into()), name: name.parse().unwrap() };
    name.strip_prefix("mirror/").map_or_else(|| MirrorId(name.parse().unwrap()), |name| of(name).mirror())
}

fn mirrored(target: &str, stage: Stage) -> Mirrored {
    Mirrored { target: TargetName(target.parse().unwrap()), is_asked: true, stage }
}

/// The mirrors of the pod `web`, each with its name, target and stage.
fn of_web(mirrors: &[(&str, &str, Stage)]) -> Mirrors {
    let of_pod = mirrors.iter().map(|(name, target, stage)| (id(name), mirrored(target, *stage)));
    [(pod("web"), of_pod.collect())].into()
}

fn report(pods: &[&str], mirrors: Mirrors, found: &Mirrors) -> Report {
    let pods = pods.iter().map(|name| (pod(name), None)).collect();
    Report { pods: Some(pods), mirrors, found: Arc::new(found.clone()), ..Report::default() }
}

/// An agent, and the mirrors that it found at its start.
struct Agent {
    news: News,
    found: Mirrors,
    now: Instant,
}

impl Agent {
    fn finding(found: Mirrors) -> Self {
        Self { news: News::default(), found, now: Instant::now() }
    }

    /// The Events that follow from a report about `web`, after the delay.
    fn told(&mut self, mirrors: &[(&str, &str, Stage)]) -> Vec<String> {
        self.told_by(&report(&["web"], of_web(mirrors), &self.found))
    }

    fn told_by(&mut self, report: &Report) -> Vec<String> {
        self.news.set(report, self.now);
        if let Some(next) = self.news.next() {
            assert_eq!(self.news.settled(self.now), [], "it waits for more");
            self.now = self.now.max(next);
        }
        let facts = self.news.settled(self.now);
        facts.iter().for_each(|fact| self.news.note(fact));
        assert_eq!((self.news.next(), self.news.settled(self.now)), (None, vec![]));
        facts.into_iter().map(|fact| format!("{}: {}", fact.reason, fact.note)).collect()
    }
}

#[test]
fn the_beginning_and_the_end_of_mirrors_are_told_together() {
    let agent = &mut Agent::finding(Mirrors::new());
    let [all, own] = [("mirror/all", "ids", INSTALLED), ("default", "default", INSTALLED)];
    assert_eq!(agent.told(&[("mirror/all", "ids", Stage::Pending)]), [""; 0]);
    assert_eq!(
        agent.told(&[all, own]),
        ["MirrorStarted: Mirrored by default (target default), mirror/all (target ids)"]
    );
    assert_eq!(agent.told(&[all, own]), [""; 0]);
    // Its NIC is absent for a while.
    assert_eq!(agent.told(&[("mirror/all", "ids", Stage::Pending), own]), [""; 0]);
    assert_eq!(agent.told(&[all, own]), [""; 0]);
    assert_eq!(
        agent.told(&[("mirror/all", "west", INSTALLED), own]),
        ["MirrorStarted: Mirrored by mirror/all (target west)"]
    );
    let over = ("mirror/all", "west", OVER);
    assert_eq!(
        agent.told(&[over, own]),
        ["MirrorEnded: No longer mirrored by mirror/all: its limit of packets is reached"]
    );
    assert_eq!(agent.told(&[own]), [""; 0], "it has ended already");
    assert_eq!(agent.told(&[]), ["MirrorEnded: No longer mirrored by default: no longer requested"]);
    // A mirror that ends before an Event said that it began.
    assert_eq!(
        agent.told(&[over]),
        ["MirrorEnded: No longer mirrored by mirror/all: its limit of packets is reached"]
    );
    // Its limits begin again.
    assert_eq!(agent.told(&[all]), ["MirrorStarted: Mirrored by mirror/all (target ids)"]);
    // The pod is deleted, and another pod with its name is created.
    assert_eq!(agent.told_by(&report(&[], Mirrors::new(), &Mirrors::new())), [""; 0]);
    assert_eq!(agent.told(&[all]), ["MirrorStarted: Mirrored by mirror/all (target ids)"]);
}

/// The same mirror continues, although no annotation or Mirror asks for it any more.
#[test]
fn a_mirror_that_every_pod_has_is_no_news() {
    let agent = &mut Agent::finding(Mirrors::new());
    let own = |is_asked| {
        let mirrored = Mirrored { is_asked, ..mirrored("default", INSTALLED) };
        report(&["web"], [(pod("web"), [(id("default"), mirrored)].into())].into(), &Mirrors::new())
    };
    assert_eq!(agent.told_by(&own(false)), [""; 0]);
    assert_eq!(agent.told_by(&own(true)), ["MirrorStarted: Mirrored by default (target default)"]);
    assert_eq!(agent.told_by(&own(false)), [""; 0]);
    assert_eq!(agent.told(&[]), ["MirrorEnded: No longer mirrored by default: no longer requested"]);
}

#[test]
fn the_end_of_a_mirror_has_its_reason() {
    let begun =
        of_web(&[("mirror/all", "ids", INSTALLED), ("default", "ids", INSTALLED), ("b", "ids", INSTALLED)]);
    let why =
        |mirror: Option<&str>, why| Skipped { pod: Some(pod("web")), nic: None, mirror: mirror.map(id), why };
    let told = |skipped: &[Skipped], unasked: Option<Why>| {
        let quiet = report(&["web"], Mirrors::new(), &begun);
        let pods = Some([(pod("web"), unasked)].into());
        Agent::finding(Mirrors::new()).told_by(&Report {
            skipped: skipped.iter().cloned().collect(),
            pods,
            ..quiet
        })
    };
    let out = Why::OptedOut(Place::Pod);
    assert_eq!(
        told(&[why(Some("mirror/all"), out.clone())], Some(out)),
        [
            "MirrorEnded: No longer mirrored by b, default, mirror/all: the pod opts out: an annotation on it is \"false\""
        ]
    );
    // Reasons for one NIC, or for another mirror, do not count.
    let reasons = [
        why(Some("mirror/all"), Why::TooManyMirrors),
        why(None, Why::NamespaceExcluded),
        why(None, Why::NoNic),
    ];
    assert_eq!(
        told(&reasons, None),
        [format!(
            "MirrorEnded: No longer mirrored by mirror/all: {}; by default: {}; by b: no longer requested",
            Why::TooManyMirrors,
            Why::NamespaceExcluded
        )]
    );
}

/// The state according to the posted Events: the mirrors that copy, with their targets.
type Said = BTreeMap<(PodId, MirrorId), TargetName>;

/// Applies an Event that is posted now, and checks that it says something new.
fn post(news: &mut News, said: &mut Said, fact: &Fact) {
    for (mirror, change) in &news.untold[&fact.pod].changes {
        let key = (fact.pod.clone(), mirror.clone());
        match change {
            _ if change.reason() != fact.reason => {}
            Change::Started(target) => {
                assert_ne!(said.insert(key, target.clone()).as_ref(), Some(target), "{fact:?}");
            }
            Change::Ended { is_wanted, .. } => {
                assert!(said.remove(&key).is_some() || *is_wanted, "{fact:?}");
            }
        }
    }
    news.note(fact);
}

fn mirrors() -> impl Strategy<Value = Option<Mirrors>> {
    let stage = select(vec![Stage::Pending, INSTALLED, INSTALLED, OVER]);
    let mirror = (select(vec!["a", "b"]), stage, prop::bool::weighted(0.8))
        .prop_map(|(target, stage, is_asked)| Mirrored { is_asked, ..mirrored(target, stage) });
    let of_pod = btree_map(select(vec!["x", "y", "z"]).prop_map(id), mirror, 0..3);
    let of_pods = btree_map(select(vec!["web", "db"]).prop_map(pod), of_pod, 0..3);
    prop::option::weighted(0.9, of_pods)
}

#[derive(Debug, Clone)]
enum Step {
    Report(Option<Mirrors>, u64),
    Post(usize),
    Restart,
}

proptest! {
    /// For any history, with posts that are late or never succeed, and with agents that end at any time: each Event
    /// says something new, a pod has at most two pending Events, and the last Events match the actual state.
    #[test]
    fn each_event_is_new_and_the_last_ones_are_true(
        steps in prop::collection::vec(
            prop_oneof![
                4 => (mirrors(), 0..4_u64).prop_map(|(mirrors, seconds)| Step::Report(mirrors, seconds)),
                3 => (0..4_usize).prop_map(Step::Post),
                1 => Just(Step::Restart),
            ],
            1..60,
        ),
    ) {
        let mut now = Instant::now();
        let (mut news, mut said) = (News::default(), Said::new());
        let (mut last, mut found) = (Mirrors::new(), Mirrors::new());
        for step in steps {
            match step {
                Step::Report(mirrors, seconds) => {
                    now += Duration::from_secs(seconds);
                    let mut report = report(&["web", "db"], mirrors.clone().unwrap_or_default(), &found);
                    match mirrors {
                        Some(mirrors) => last = mirrors,
                        // Before the first list, or while the list cannot be read.
                        None => report.pods = None,
                    }
                    news.set(&report, now);
                }
                Step::Post(which) => {
                    let facts = news.settled(now);
                    prop_assert!(facts.len() <= 4);
                    if let Some(fact) = facts.get(which) {
                        post(&mut news, &mut said, fact);
                    }
                }
                Step::Restart => {
                    // The state that the next agent finds and takes as posted.
                    found = last.clone();
                    news = News::default();
                    let running = found.iter().flat_map(|(pod, mirrors)| {
                        let of_pod = mirrors.iter().filter(|(_, of)| of.is_asked && of.stage <= INSTALLED);
                        of_pod.map(|(mirror, mirrored)| ((pod.clone(), mirror.clone()), mirrored.target.clone()))
                    });
                    said = running.collect();
                }
            }
        }
        now += SETTLE;
        news.set(&report(&["web", "db"], last.clone(), &found), now);
        for fact in news.settled(now + SETTLE) {
            post(&mut news, &mut said, &fact);
        }
        prop_assert!(news.untold.is_empty());
        for (pod, mirrors) in &last {
            for (mirror, Mirrored { target, is_asked, stage }) in mirrors {
                let said = said.remove(&(pod.clone(), mirror.clone()));
                match stage {
                    // The last Event may name another target.
                    Stage::Pending => {}
                    // The mirror may have been requested earlier.
                    _ if !is_asked => {}
                    Stage::Installed => prop_assert_eq!(said.as_ref(), Some(target)),
                    Stage::Ended(_) => prop_assert_eq!(said, None),
                }
            }
        }
        prop_assert_eq!(said, Said::new(), "mirrors that nobody wants");
    }
}
