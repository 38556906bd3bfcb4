use proptest::prelude::*;

use super::*;

/// Returns a pod by its number. Two pods have the same name each.
fn pod(number: usize) -> Pod {
    let (uid, name) = (format!("uid-{number}"), format!("web-{}", number / 2));
    Pod { id: PodId { uid, namespace: "shop".into(), name }, ..Pod::default() }
}

const PODS: usize = 4;

/// A round: the pods that have an object, that run, and that are tapped at its end; those whose object was deleted; and
/// the minutes since the round before.
#[derive(Debug, Clone)]
struct Round {
    listed: [bool; PODS],
    running: [bool; PODS],
    tapped: [bool; PODS],
    deleted: [bool; PODS],
    minutes: u64,
}

fn round() -> impl Strategy<Value = Round> {
    let mostly = || prop::array::uniform4(prop::bool::weighted(0.8));
    let seldom = || prop::array::uniform4(prop::bool::weighted(0.2));
    (seldom(), mostly(), mostly(), seldom(), 1..25_u64).prop_map(
        |(mut listed, running, tapped, deleted, minutes)| {
            // No two objects have the same name.
            (0..PODS).step_by(2).for_each(|number| listed[number + 1] &= !listed[number]);
            Round { listed, running, tapped, deleted, minutes }
        },
    )
}

proptest! {
    /// A pod without an object counts exactly while all of this has been true since the deletion: it was tapped before,
    /// it runs, it is tapped, no other pod has its name, and less than an hour has passed.
    #[test]
    fn a_deleted_pod_counts_while_it_runs(rounds in prop::collection::vec(round(), 1..20)) {
        let (mut pods, mut now) = (DeletedPods::default(), Instant::now());
        // The model: the time since which each pod has been without an object.
        let (mut since, mut before) = ([None; PODS], [false; PODS]);
        for Round { listed, running, tapped, deleted, minutes } in rounds {
            now += Duration::from_secs(minutes * 60);
            let those = |of: [bool; PODS]| (0..PODS).filter(move |number| of[*number]);
            pods.add(those(deleted).map(pod).collect(), now);
            let list: Arc<[Pod]> = those(listed).map(pod).collect();
            let run = those(running).map(|number| pod(number).id.uid).collect();
            let joined = pods.join(&list, &run, now);

            let mut expected = list.to_vec();
            for number in 0..PODS {
                if deleted[number] && before[number] {
                    since[number] = Some(now);
                }
                let other = listed[number ^ 1];
                let is_new = since[number] == Some(now);
                since[number] = since[number].filter(|at| {
                    running[number] && !other && now - *at < LONGEST && (!listed[number] || is_new)
                });
                if since[number].is_some() && !listed[number] {
                    expected.push(pod(number));
                }
                since[number] = since[number].filter(|_| tapped[number]);
            }
            prop_assert_eq!(&joined[..], &expected[..]);
            pods.note(those(tapped).map(|number| pod(number).id).collect::<Vec<_>>().iter());
            prop_assert_eq!(pods.wait().is_some(), since.iter().any(Option::is_some));
            before = tapped;
        }
    }
}

/// A source that names the namespace of a pod knows when the pod is no longer to be mirrored.
#[test]
fn only_a_pod_that_is_found_by_its_processes_counts_on() {
    let (mut pods, now) = (DeletedPods::default(), Instant::now());
    let named = Pod { netns: Some("/run/netns/x".into()), ..pod(0) };
    pods.note([named.id.clone()].iter());
    pods.add(vec![named], now);
    assert_eq!(pods.uids(), BTreeSet::new());
}
