//! Tests of what the archive has.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;

fn daemon_set(name: &str, instance: &str, variable: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { RELEASE[0]: "mirror", RELEASE[1]: instance, COMPONENT: "agent" } },
        "spec": { "template": { "spec": { "containers": [{ "env": [{ "name": variable }] }] } } },
    })
}

fn uri_of(release: &Release, kind: &str) -> String {
    release.lists().into_iter().find(|(of, _)| *of == kind).unwrap().1
}

#[test]
fn a_release_is_known_by_the_daemon_set_of_its_agents() {
    let sets = [daemon_set("other", "a", "DD_SITE"), daemon_set("west-mirror", "west", "PODMIRROR_BPFFS")];
    let release = Release::of("tools", &json!({ "items": sets }));
    assert_eq!(
        uri_of(&release, PODS),
        "/api/v1/namespaces/tools/pods?labelSelector=app.kubernetes.io/name=mirror,app.kubernetes.io/instance=west"
    );
    assert_eq!(
        uri_of(&release, "deployments"),
        "/apis/apps/v1/namespaces/tools/deployments?limit=500&\
         labelSelector=app.kubernetes.io/name=mirror,app.kubernetes.io/instance=west"
    );
    assert_eq!(uri_of(&release, "mirrors"), "/apis/podmirror.io/v1alpha1/mirrors?limit=500");
    let event = |about: &str, reporter: &str| {
        let about = json!({ "name": about });
        json!({ "involvedObject": about, "reportingComponent": reporter })
    };
    let events = vec![
        event("west-mirror-x7", "kubelet"),
        event("web", "podmirror.io/mirror-agent"),
        event("web", "kubelet"),
    ];
    assert_eq!(release.part("events", events.clone()), (events[..2].to_vec(), 0));

    for list in [json!({ "items": sets[..1] }), Value::Null] {
        let release = Release::of("podmirror", &list);
        let labels = "app.kubernetes.io/name=podmirror,app.kubernetes.io/instance=podmirror";
        assert!(uri_of(&release, PODS).ends_with(labels), "{list}");
    }
}

/// A Secret must not even reach this process.
#[test]
fn no_list_has_secrets_or_packets() {
    for (kind, uri) in Release::of("podmirror", &Value::Null).lists() {
        assert!(uri.parse::<http::Uri>().is_ok(), "{uri}");
        let resource = uri.split('?').next().unwrap().rsplit('/').next().unwrap();
        assert!(!["secrets", "packets", "nodepackets"].contains(&resource), "{kind}: {uri}");
    }
}

#[test]
fn of_a_node_the_system_is_kept() {
    let node = json!({
        "metadata": { "name": "a", "annotations": { "token": "t" } },
        "status": {
            "addresses": [{ "address": "192.0.2.1" }],
            "nodeInfo": {
                "kernelVersion": "6.12.1", "operatingSystem": "linux", "osImage": "Debian", "architecture": "arm64",
                "containerRuntimeVersion": "containerd://2.2.0", "machineID": "m",
            },
        },
    });
    let expected = json!({
        "name": "a", "kernel": "6.12.1", "system": "linux", "image": "Debian", "architecture": "arm64",
        "runtime": "containerd://2.2.0",
    });
    assert_eq!(Release::of("podmirror", &Value::Null).part(NODES, vec![node]), (vec![expected], 0));
}

#[test]
fn a_pod_has_the_logs_of_its_containers_and_metrics() {
    let pod = json!({
        "metadata": { "namespace": "podmirror", "name": "podmirror-x7" },
        "spec": { "containers": [
            { "name": "agent", "ports": [{ "name": "metrics", "containerPort": 10706 }, { "containerPort": 1 }] },
            { "name": "recorder" },
        ] },
        "status": { "containerStatuses": [
            { "name": "recorder", "restartCount": 2 },
            { "name": "agent", "restartCount": 0 },
        ] },
    });
    let base = "/api/v1/namespaces/podmirror/pods/podmirror-x7";
    let log = |container: &str| format!("{base}/log?container={container}&tailLines=10000");
    let expected = [
        ("pods/podmirror-x7/agent.log", log("agent")),
        ("pods/podmirror-x7/agent.metrics", format!("{base}:10706/proxy/metrics")),
        ("pods/podmirror-x7/recorder.previous.log", log("recorder") + "&previous=true"),
        ("pods/podmirror-x7/recorder.log", log("recorder")),
    ];
    assert_eq!(texts(&pod), expected.map(|(path, uri)| (path.to_owned(), uri)));
}

#[test]
fn a_log_of_all_requested_lines_can_be_longer() {
    let lines = |count: usize| "a\n".repeat(count).into_bytes();
    assert!(has_all_lines("pods/a/agent.log", &lines(MOST_LINES)));
    assert!(!has_all_lines("pods/a/agent.log", &lines(MOST_LINES - 1)));
    assert!(!has_all_lines("pods/a/agent.metrics", &lines(MOST_LINES)));
}

proptest! {
    #[test]
    fn the_pods_that_are_not_ready_come_first_and_no_component_has_too_many(
        states in prop::collection::vec((0..3_u8, prop::option::of(any::<bool>())), 0..200),
    ) {
        let pod = |(name, (component, ready)): (usize, &(u8, Option<bool>))| json!({
            "metadata": { "name": format!("{name}"), "labels": { COMPONENT: format!("{component}") } },
            "status": { "containerStatuses": ready.map(|ready| json!([{ "ready": true }, { "ready": ready }])) },
        });
        let pods: Vec<_> = states.iter().enumerate().map(pod).collect();
        let (chosen, left_out) = Release::of("podmirror", &Value::Null).part(PODS, pods.clone());
        prop_assert_eq!(chosen.len() + left_out, pods.len());
        let is_ready = |pod: &Value| states[text(&pod["metadata"]["name"]).parse::<usize>().unwrap()].1 == Some(true);
        prop_assert!(chosen.is_sorted_by_key(is_ready));
        for component in 0..3_u8 {
            let of = |pods: &[Value], is: bool| pods.iter().filter(|pod| {
                pod["metadata"]["labels"][COMPONENT] == format!("{component}") && is_ready(pod) == is
            }).count();
            let [unready, ready] = [false, true].map(|is| of(&pods, is));
            prop_assert_eq!(of(&chosen, false), unready.min(MOST_PODS));
            prop_assert_eq!(of(&chosen, true), ready.min(MOST_PODS - unready.min(MOST_PODS)));
        }
    }

    #[test]
    fn a_list_is_bounded_and_has_reports_about_tapped_nics(tapped in prop::collection::vec(any::<bool>(), 400..700)) {
        let report = |tapped: &bool| json!({ "nics": if *tapped { json!([{}]) } else { json!([]) } });
        let (kept, left_out) =
            Release::of("podmirror", &Value::Null).part("podreports", tapped.iter().map(report).collect());
        prop_assert_eq!(kept.len(), tapped.len().min(MOST_OBJECTS));
        prop_assert_eq!(kept.len() + left_out, tapped.len());
        let count = kept.iter().filter(|report| report["nics"] != json!([])).count();
        prop_assert_eq!(count, tapped.iter().filter(|tapped| **tapped).count().min(MOST_OBJECTS));
    }

    #[test]
    fn a_path_stays_below_the_directory_of_pods(pod in ".+", container in ".+") {
        let path = path(&pod, &container);
        let parts: Vec<_> = path.split('/').collect();
        prop_assert!(parts.len() == 3 && parts[0] == "pods", "{}", path);
        let is_safe = |part: &&str| part.chars().all(|char| char.is_ascii_alphanumeric() || "-_".contains(char));
        prop_assert!(parts.iter().all(|part| !part.is_empty() && is_safe(part)), "{}", path);
    }

    #[test]
    fn names_of_kubernetes_have_different_paths(pods in prop::collection::btree_set("[a-z0-9.-]{1,4}", 2)) {
        let paths: std::collections::BTreeSet<_> = pods.iter().map(|pod| path(pod, "agent")).collect();
        prop_assert_eq!(paths.len(), pods.len());
    }

    /// Also if the text comes in parts, and is cut before its end.
    #[test]
    fn the_end_of_a_text_begins_with_a_line(lengths in prop::collection::vec(0..30_usize, 1..12)) {
        const MOST: usize = 20;
        let (mut whole, mut kept, mut is_cut) = (Vec::new(), Vec::new(), false);
        for length in lengths {
            let line = [vec![b'a'; length], b"\n".to_vec()].concat();
            whole.extend_from_slice(&line);
            kept.extend_from_slice(&line);
            is_cut |= keep_end(&mut kept, MOST);
        }
        prop_assert!(whole.ends_with(&kept) && kept.len() <= MOST && !kept.is_empty(), "{:?}", kept);
        prop_assert_eq!(is_cut, whole.len() > MOST);
        let before = &whole[..whole.len() - kept.len()];
        let end_of_line = |text: &[u8]| text.iter().rposition(|byte| *byte == b'\n');
        match end_of_line(before) {
            // The last line is too long itself.
            end if end.is_none_or(|end| end + 1 < before.len()) && is_cut => {
                prop_assert_eq!((kept.len(), end_of_line(&kept[..MOST - 1])), (MOST, None));
            }
            Some(end) => {
                let line = end_of_line(&before[..end]).map_or(0, |at| at + 1);
                prop_assert!(whole.len() - line > MOST, "one more line fits: {:?}", kept);
            }
            None => {}
        }
    }
}
