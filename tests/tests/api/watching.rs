//! Pods that are created, changed and deleted at the API server.

use mirror_tests::{Comparison, SOON, check, eventually};

use crate::Node;

const MIRROR: [(&str, &str); 1] = [("podmirror.io/mirror", "true")];

#[test]
fn of_many_changes_the_last_one_counts() {
    let node = &Node::new("changes");
    let Node { api, lab } = node;
    let [web, db] = &node.pods(["web", "db"]);
    let _containers = [api.run(lab, web, &[]), api.run(lab, db, &MIRROR)];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[db]);
    for turn in 0..20 {
        let word = if turn % 2 == 0 { "true" } else { "false" };
        api.kubectl(&format!("annotate --overwrite pod web podmirror.io/mirror={word}"));
    }
    lab.wait_mirrored(&[db]);
    api.kubectl("annotate --overwrite pod web podmirror.io/mirror=ingress");
    let status = lab.wait_mirrored(&[web, db]);
    assert_eq!(status.tap(web.veth_host()).direction, "ingress");
    // No other change of a pod has an effect.
    let before = agent.log_with(&["irroring"]).len();
    api.kubectl("label pod web color=green");
    api.kubectl("annotate pod db color=green");
    api.kubectl("annotate --overwrite pod web podmirror.io/mirror=both");
    eventually(SOON, || {
        let direction = lab.status().tap(web.veth_host()).direction.clone();
        check(direction == "both", || direction)
    });
    let told = &agent.log_with(&["irroring"])[before..];
    assert!(told.iter().all(|line| line.contains("/web\"")), "{told:#?}");
    agent.stop();
}

#[test]
fn a_pod_is_mirrored_until_it_has_ended_or_is_gone() {
    let node = &Node::new("ends");
    let Node { api, lab } = node;
    let [job, stuck, web] = &node.pods(["job", "stuck", "web"]);
    let mut object = api.object("stuck", &MIRROR);
    object["metadata"]["finalizers"] = serde_json::json!(["example.com/held"]);
    api.apply(&object);
    let _job = api.run(lab, job, &MIRROR);
    let containers = [api.start(lab, stuck), api.run(lab, web, &MIRROR)];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[job, stuck, web]);

    // The pod's processes and its veth still exist.
    api.kubectl("patch pod job --subresource=status --patch {\"status\":{\"phase\":\"Succeeded\"}}");
    lab.wait_mirrored(&[stuck, web]);
    // A pod that is being deleted can still send.
    api.kubectl("delete pod stuck --wait=false");
    assert_ne!(api.kubectl("get pod stuck -o jsonpath={.metadata.deletionTimestamp}"), "");
    let [of_stuck, of_web] = containers;
    drop(of_web);
    api.kubectl("delete pod web");
    lab.wait_mirrored(&[stuck]);
    node.is_mirrored(stuck, web);
    drop(of_stuck);
    api.kubectl("patch pod stuck --patch {\"metadata\":{\"finalizers\":null}}");
    lab.wait_mirrored(&[]);
    agent.stop();
}

/// As after `kubectl delete --force`: the object is deleted at once, and the kubelet ends the processes when it can.
#[test]
fn a_pod_is_mirrored_while_it_runs_without_an_object() {
    let node = &Node::new("forced");
    let Node { api, lab } = node;
    let [web, shy, db] = &node.pods(["web", "shy", "db"]);
    let [of_web, of_shy] = [api.run(lab, web, &MIRROR), api.run(lab, shy, &MIRROR)];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[web, shy]);
    let comparison = Comparison::of(web.netns(), lab);
    api.kubectl("annotate --overwrite pod shy podmirror.io/mirror=false");
    api.kubectl("delete pod shy web --force --grace-period=0");
    // When the agent knows the later change, it has seen the deletion.
    let _of_db = api.run(lab, db, &[("podmirror.io/mirror", "ingress")]);
    lab.wait_mirrored(&[web, db]);
    db.ping(web.v4(), 5, 56);
    assert_eq!(comparison.is_equal().len(), 10);
    assert_eq!(agent.log_with(&["no longer mirroring", "/web\""]), Vec::<String>::new());

    drop((of_web, of_shy));
    lab.wait_mirrored(&[db]);
    assert_eq!(agent.log_with(&["not mirrored", "/web\""]), Vec::<String>::new());
    agent.stop();
}

#[test]
fn a_pod_that_comes_back_under_its_name_is_another_one() {
    let node = &Node::new("name");
    let Node { api, lab } = node;
    let [web, next] = &node.pods(["web", "next"]);
    let _former = api.run(lab, web, &MIRROR);
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[web]);
    // The former pod's processes and veth stay for a while, as with a slow runtime.
    api.kubectl("delete pod web");
    api.apply(&api.object("web", &MIRROR));
    agent.wait_for_log(&["not mirrored", "/web\"", "\"NoNetns\""]);
    lab.wait_mirrored(&[]);
    let uid = api.kubectl("get pod web -o jsonpath={.metadata.uid}");
    let _container = lab.container(next.netns(), &format!("kubepods/pod{uid}/1"));
    let status = lab.wait_mirrored(&[next]);
    assert_eq!(status.tap(next.veth_host()).pod.as_ref().unwrap().uid, uid);
    node.is_mirrored(next, web);
    agent.stop();
}
