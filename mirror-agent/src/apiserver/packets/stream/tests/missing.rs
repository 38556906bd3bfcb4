//! Who learns what is read, and what is missing.

use super::*;

/// A pod is known by its UID. The watch can have it later than its node.
#[test]
fn each_pod_that_is_read_counts_once() {
    let web = |node: &str, uid: &str| {
        let Ok((are_pods, Event::Apply(mut pod))) = pod("web", node) else { unreachable!() };
        pod.metadata.uid = Some(uid.to_owned());
        Ok((are_pods, Event::Apply(pod)))
    };
    let covered = |uid: &str| Some(Effect::Covered { pod: "shop/web".to_owned(), uid: uid.to_owned() });
    let mut stream = with(stream(""), &[("db", "a"), ("cart", "b")]);
    join(&mut stream, &["a", "b"]);
    assert_eq!(described(&mut stream, 0, "shop/web eth0"), None, "the watch does not have it yet");
    assert_eq!(answer(&stream, false), Some(Ok(())), "it is read");
    stream.see(web("a", "1"));
    assert_eq!([1, 2].map(|byte| sent(&mut stream, 0, 0, byte)), [covered("1"), None]);
    // Its StatefulSet makes it again.
    stream.see(web("a", "2"));
    let nics = ["shop/web eth0", "shop/web net1"].map(|nic| described(&mut stream, 0, nic));
    assert_eq!(nics, [covered("2"), None]);
    // On another node, which is earlier than the watch.
    assert_eq!(described(&mut stream, 1, "shop/web eth0"), Some(Effect::Foreign { node: "b".to_owned() }));
    stream.see(web("b", "3"));
    assert_eq!([3, 4].map(|byte| sent(&mut stream, 1, 0, byte)), [covered("3"), None]);
}

#[test]
fn the_past_alone_is_complete_only_if_all_its_nodes_were_read() {
    let end = |agents: &[&str]| {
        let mut past = with(stream("&since=1h&follow=false"), &[("web", "a"), ("db", "b")]);
        join(&mut past, agents).into_iter().for_each(|(id, ..)| past.ended(id, Ok(())));
        assert!(past.is_idle());
        past.outcome()
    };
    assert_eq!([end(&["a"]), end(&["a", "b"])], ["incomplete", "complete"]);
}

/// A node whose agent is not connected can have packets of deleted pods.
#[test]
fn the_past_of_all_nodes_is_complete_only_if_all_agents_are_connected() {
    let end = |agents: &[&str]| {
        let mut past = with(stream("&since=1h&follow=false"), &[("web", "a")]);
        past.with_agents = ["a", "b"].map(str::to_owned).into();
        let joined = join(&mut past, agents);
        joined.iter().for_each(|(id, ..)| past.ended(*id, Ok(())));
        (joined.len(), past.outcome(), said(&mut past))
    };
    let missing = "podmirror: b: its agent is not connected".to_owned();
    assert_eq!(end(&["a"]), (1, "incomplete", vec![missing]));
    assert_eq!(end(&["a", "b"]), (2, "complete", vec![]));
    // All other packets are of pods that exist, or of one node.
    assert!(stream("&since=1h&follow=false").is_of_all_nodes());
    for query in ["", "&since=1h", "&since=1h&follow=false&labelSelector=app=web"] {
        assert!(!stream(query).is_of_all_nodes(), "{query}");
    }
    let interface = of("nodepackets", "&fieldSelector=metadata.name%3Da&interface=eth0");
    assert!(!interface.is_of_all_nodes());
}

#[test]
fn the_recorded_packets_of_a_pod_that_has_moved_are_left_out() {
    let mut past = with(stream("&since=1h&follow=false"), &[("web", "b")]);
    let nodes = join(&mut past, &["a", "b"]).into_iter().map(|(id, node, _)| (node, id));
    let nodes: BTreeMap<_, _> = nodes.collect();
    for _ in 0..2 {
        assert_eq!(described(&mut past, nodes["a"], "shop/web eth0"), None, "the node is right to have them");
    }
    assert_eq!(sent(&mut past, nodes["a"], 0, 1), None);
    nodes.values().for_each(|id| past.ended(*id, Ok(())));
    let why = "shop/web on a: its recorded packets are left out: the pod is not on this node now";
    assert_eq!(said(&mut past), [format!("podmirror: {why}")]);
    assert_eq!((answer(&past, false), past.packets), (Some(Err((409, why.to_owned()))), 0));
    assert_eq!(past.outcome(), "incomplete");
}

/// Its packets before that are in the file.
#[test]
fn the_recorded_packets_of_a_pod_that_moves_later_are_left_out() {
    let mut past = with(stream("&since=1h&follow=false"), &[("web", "a")]);
    join(&mut past, &["a", "b"]);
    assert!(matches!(described(&mut past, 0, "shop/web eth0"), Some(Effect::Covered { .. })));
    sent(&mut past, 0, 0, 1);
    past.see(pod("web", "b"));
    assert_eq!([2, 3].map(|byte| sent(&mut past, 0, 0, byte)), [None, None]);
    [0, 1].into_iter().for_each(|id| past.ended(id, Ok(())));
    let why = "shop/web on a: its recorded packets are left out: the pod is not on this node now";
    assert_eq!(said(&mut past), [format!("podmirror: {why}")]);
    assert_eq!((past.packets, past.outcome()), (1, "incomplete"));
}

/// Agents select pods by the labels of those that run.
#[test]
fn the_past_by_labels_lacks_pods_that_have_ended() {
    let ended = |query: &str| {
        let mut past = stream(query);
        let Ok((are_pods, Event::Apply(mut pod))) = pod("web", "a") else { unreachable!() };
        pod.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
        pod.status = Some(from_value(json!({ "phase": "Succeeded" })).unwrap());
        past.see(Ok((are_pods, Event::Apply(pod))));
        with(past, &[])
    };
    let mut labelled = ended("&since=1h&follow=false&labelSelector=app=web");
    assert_eq!(join(&mut labelled, &["a"]), []);
    let why = "ended pods: the recorded packets of 1 are left out: request each pod by name";
    assert_eq!(answer(&labelled, false), Some(Err((409, why.to_owned()))));
    assert_eq!(said(&mut labelled), [format!("podmirror: {why}")]);
    assert_eq!(labelled.outcome(), "incomplete");

    let mut all = ended("&since=1h&follow=false");
    assert_eq!((join(&mut all, &["a"]).len(), all.outcome()), (1, "complete"));
}

/// A node with many pods that are not read must not deny the packets of others.
#[test]
fn messages_that_fill_the_room_are_an_answer() {
    let mut stream = with(stream(""), &[("web", "a"), ("db", "b")]);
    join(&mut stream, &["a", "b"]);
    for number in 0..MAX_NOTES {
        noted(&mut stream, 0, "shop/web", Some(&format!("Reason{number}")));
    }
    assert!(!stream.has_room());
    assert_eq!(answer(&stream, false), Some(Ok(())));
    stream.pending.clear();
    let (pod, uid) = ("shop/db".to_owned(), "uid-db".to_owned());
    assert_eq!(described(&mut stream, 1, "shop/db eth0"), Some(Effect::Covered { pod, uid }));
}

#[test]
fn each_failure_of_the_watch_and_its_end_is_said() {
    let mut stream = with(stream(""), &[]);
    let failed = || Err((true, "no connection".to_owned()));
    // It tries again, in vain. Then it succeeds.
    for seen in [failed(), Ok((true, Event::Init)), failed(), pod("web", "a"), failed()] {
        stream.see(seen);
    }
    let failed = "podmirror: pods: no connection";
    assert_eq!(said(&mut stream), [failed, "podmirror: pods: they are watched again", failed]);
}
