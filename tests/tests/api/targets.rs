//! MirrorTargets: which namespaces can send copies there, what an agent without the API keeps of them, and what remains
//! after their deletion.

use std::time::{Duration, Instant};

use mirror_tests::{Capture, Comparison, SOON, Way, check, eventually};
use serde_json::{Value, json};

use crate::resources::{Story, run, wait_mirrors};

impl Story {
    /// The MirrorTarget with the name of the story's namespace.
    pub(crate) fn mirror_target(&mut self, spec: &Value) -> String {
        let name = self.node.api.namespace().to_owned();
        self.of_cluster.push(format!("mirrortarget {name}"));
        self.node.api.apply(&target(&name, spec));
        name
    }
}

pub(crate) fn target(name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorTarget", "metadata": { "name": name }, "spec": spec })
}

/// The namespaces with this name.
pub(crate) fn namespaces(name: &str) -> Value {
    json!({ "from": "Selector", "selector": { "matchLabels": { "kubernetes.io/metadata.name": name } } })
}

/// Waits until the copies are the packets inside the pod, at least this many.
#[track_caller]
fn wait_same(copies: &Capture, inside: &Capture, least: usize) {
    eventually(SOON, || {
        check(inside.frames().len() >= least, || "too few packets".into())?;
        copies.frames().same_as(&inside.frames())
    });
}

#[test]
fn without_allowed_namespaces_only_cluster_mirrors_may_use_a_mirror_target() {
    let mut story = Story::new("closed");
    let closed = story.mirror_target(&json!({ "device": { "name": "closed0" } }));
    let to_closed = json!({ "targetRef": { "name": closed } });
    let of_cluster = format!("clustermirror/{}", story.cluster_mirror(&to_closed));
    let story = &story;
    let (api, lab) = (&story.node.api, &story.node.lab);
    let [web, db] = &story.node.pods(["web", "db"]);
    let own = [("podmirror.io/mirror.own", "true"), ("podmirror.io/target.own", closed.as_str())];
    let _container = api.run(lab, web, &own);
    story.mirror("all", "web", &to_closed);
    let agent = api.agent(lab, &[]);
    let told = story.wait_told("all", |of| !of["refused"].is_null());
    assert_eq!(told["refused"]["reason"], "TargetNotAllowed", "{told:#}");
    lab.wait_status(|status| {
        let told = status.notes.as_ref().map(|notes| &notes["not_mirrored"]);
        let mut told = told.and_then(Value::as_array).into_iter().flatten();
        let is_own = |of: &Value| of["mirror"] == "own" && of["reason"] == "TargetNotAllowed";
        check(told.any(is_own), || format!("{:#?}", status.notes))
    });
    wait_mirrors(lab, web, &[&of_cluster]);
    lab.wait_mirrored(&[web]);
    let (copies, inside) = (Capture::start(lab.node(), "closed0"), Capture::start(web.netns(), "eth0"));
    web.ping(db.v4(), 5, 400);
    wait_same(&copies, &inside, 10);
    agent.stop();
}

#[test]
fn a_mirror_target_gets_copies_of_the_namespaces_that_may_use_it_and_leaves_nothing() {
    let mut story = Story::new("mtarget");
    let spec = json!({ "device": { "name": "west0" }, "allowedNamespaces": namespaces("elsewhere") });
    let west = story.mirror_target(&spec);
    let story = &story;
    let node = &story.node;
    let (api, lab) = (&node.api, &node.lab);
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    story.mirror("all", "web", &json!({ "targetRef": { "name": west } }));
    let told = story.wait_told("all", |of| !of["refused"].is_null());
    assert_eq!(told["refused"]["reason"], "TargetNotAllowed", "{told:#}");
    assert_eq!(told["pods"], json!({ "selected": 1, "covered": 0 }));

    // The administrator admits the namespace.
    api.apply(&target(
        &west,
        &json!({ "device": { "name": "west0" }, "allowedNamespaces": namespaces(api.namespace()) }),
    ));
    wait_mirrors(lab, web, &["mirror/all"]);
    lab.wait_mirrored(&[web]);
    let (copies, inside) = (Capture::start(lab.node(), "west0"), Capture::start(web.netns(), "eth0"));
    web.ping(db.v4(), 5, 400);
    wait_same(&copies, &inside, 10);
    let before = lab.status();
    assert_eq!(before.target(&west).device, "west0");
    agent.stop();

    // A new agent that cannot reach the API knows the target from the installed state.
    api.set_way(Way::Refused);
    let agent = api.agent(lab, &[]);
    agent.wait_for_log(&["west0", "the mirror interface is up"]);
    web.ping(db.v4(), 5, 400);
    wait_same(&copies, &inside, 20);
    assert_eq!(lab.status().target(&west), before.target(&west));
    api.set_way(Way::Open);
    lab.wait_get("/readyz", 200);
    web.ping(db.v4(), 5, 400);
    wait_same(&copies, &inside, 30);
    for capture in [copies, inside] {
        capture.stop();
    }

    // The target of the same name gets another device.
    api.apply(&target(
        &west,
        &json!({ "device": { "name": "west1" }, "allowedNamespaces": { "from": "All" } }),
    ));
    lab.wait_status(|status| {
        let target = status.target(&west);
        check(target.device == "west1" && target.up, || format!("{target:#?}"))
    });
    let (copies, inside) = (Capture::start(lab.node(), "west1"), Capture::start(web.netns(), "eth0"));
    web.ping(db.v4(), 5, 400);
    wait_same(&copies, &inside, 10);
    for capture in [copies, inside] {
        capture.stop();
    }
    eventually(SOON, || {
        let devices = lab.devices();
        check(!devices.contains(&"west0".to_owned()), || format!("{devices:?}"))
    });

    // The MirrorTarget is deleted.
    api.kubectl(&format!("delete mirrortarget {west}"));
    let told = story.wait_told("all", |of| of["refused"]["reason"] == "NoSuchTarget");
    assert_eq!(told["pods"]["covered"], 0, "{told:#}");
    lab.wait_mirrored(&[]);
    eventually(SOON, || {
        let devices = lab.devices();
        let is_gone = !devices.contains(&"west1".to_owned()) && lab.status().target(&west).device.is_empty();
        check(is_gone, || format!("{devices:?}"))
    });
    // Other mirrors continue.
    story.mirror("all", "web", &json!({}));
    lab.wait_mirrored(&[web]);
    let comparison = Comparison::of(web.netns(), lab);
    web.ping(db.v4(), 5, 400);
    assert_eq!(comparison.is_equal().len(), 10);
    agent.stop();
}

#[test]
fn a_mirror_target_that_cannot_be_is_refused_by_the_server_or_told_of() {
    let mut story = Story::new("badtarget");
    // The server accepts the object. Only a node knows that the address belongs to the node itself.
    let bad = story.mirror_target(&json!({
        "vxlan": { "remoteIP": "127.0.0.1", "destinationPort": 14789, "vniRange": { "min": 1, "max": 9 } },
        "allowedNamespaces": { "from": "All" },
    }));
    let story = &story;
    let node = &story.node;
    let (api, lab) = (&node.api, &node.lab);
    let refused = |name: &str, spec: &Value| {
        api.try_kubectl_with("create --dry-run=server -f -", &target(name, spec).to_string()).unwrap_err()
    };
    let device = json!({ "name": "ids0" });
    let unknown = json!({ "matchExpressions": [{ "key": "team", "operator": "Foo" }] });
    let unknown = json!({ "from": "Selector", "selector": unknown });
    let vxlan = |more: Value| {
        let mut vxlan = json!({ "remoteIP": "10.9.0.5", "destinationPort": 14789 });
        vxlan.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "vxlan": vxlan })
    };
    for (name, spec, part) in [
        ("x", json!({}), "exactly one of device"),
        (
            "x",
            json!({ "device": device, "gre": { "remoteIP": "10.9.0.5", "key": 7 } }),
            "exactly one of device",
        ),
        ("x", json!({ "device": device, "oversize": "Segment" }), "only for a tunnel"),
        ("x", json!({ "pod": { "namespace": "security" } }), "exactly one of name and podSelector"),
        ("x", vxlan(json!({ "destinationPort": 70000, "vni": 7 })), "spec.vxlan.destinationPort"),
        ("x", vxlan(json!({ "vni": 1 << 24 })), "spec.vxlan.vni"),
        ("x", vxlan(json!({})), "exactly one of vni and vniRange"),
        ("x", vxlan(json!({ "vniRange": { "min": 9, "max": 1 } })), "min must be less than max"),
        ("x", json!({ "device": device, "allowedNamespaces": { "from": "Selector" } }), "use selector"),
        ("x", json!({ "device": { "name": "a/b" } }), "spec.device.name"),
        ("x", vxlan(json!({ "vni": 7, "remoteIP": "" })), "spec.vxlan.remoteIP"),
        ("x", vxlan(json!({ "vni": 7, "remoteIP": "ids.example" })), "spec.vxlan.remoteIP"),
        ("x", vxlan(json!({ "vni": 7, "device": "a/b" })), "spec.vxlan.device"),
        ("x", json!({ "device": device, "allowedNamespaces": unknown }), "matchExpressions[0].operator"),
        ("x", json!({ "pod": { "namespace": "A B", "name": "ids" } }), "spec.pod.namespace"),
        ("x", json!({ "pod": { "namespace": "a", "name": "ids_0" } }), "spec.pod.name"),
        ("x", json!({ "pod": { "namespace": "a", "name": "ids", "nic": "a/b c" } }), "spec.pod.nic"),
        ("default", json!({ "device": device }), "use another name"),
        ("x.y", json!({ "device": device }), "no dot"),
    ] {
        let told = refused(name, &spec);
        assert!(told.contains(part), "{spec}: {told}");
    }
    let explained = api.kubectl("explain mirrortarget.spec");
    let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(explained.contains("exactly one of device, pod, vxlan, geneve, gre and erspan"), "{explained}");

    let pods = node.pods(["web"]);
    let _containers = run(node, &pods, &[]);
    let agent = api.agent(lab, &[]);
    story.mirror("lost", "web", &json!({ "targetRef": { "name": bad } }));
    let told = story.wait_told("lost", |of| !of["refused"].is_null());
    assert_eq!(told["refused"]["reason"], "TargetRefused", "{told:#}");
    let message = told["refused"]["message"].as_str().unwrap();
    assert!(message.ends_with("\"127.0.0.1:14789\" is not an address of another node"), "{message}");
    agent.wait_for_log(&["the MirrorTarget is refused", &bad]);
    agent.stop();
}

/// The limit applies to the target on each node: its Mirrors share it. An agent that cannot reach the API keeps it, and
/// removes it when the MirrorTarget has none.
#[test]
fn the_limit_of_a_mirror_target_holds_for_all_of_its_mirrors_together() {
    let mut story = Story::new("ratelimit");
    let free = json!({ "device": { "name": "slow0" }, "allowedNamespaces": { "from": "All" } });
    let mut limited = free.clone();
    limited["rateLimit"] = json!({ "packetsPerSecond": 1 });
    let slow = story.mirror_target(&limited);
    let story = &story;
    let node = &story.node;
    let (api, lab) = (&node.api, &node.lab);
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    story.mirror("web", "web", &json!({ "targetRef": { "name": slow }, "direction": "Egress" }));
    story.mirror("db", "db", &json!({ "targetRef": { "name": slow }, "direction": "Egress" }));
    lab.wait_mirrored(&[web, db]);
    let total = |verdict: &str| {
        let status = lab.status();
        let sessions = status.taps.iter().flat_map(|tap| &tap.sessions);
        sessions.map(|session| session.total(verdict)).sum::<u64>()
    };
    // Each ping leaves a packet at both pods. The rate allows one copy per second, and 50 pings take half a second or
    // more.
    let flood = || {
        let (began, before) = (Instant::now(), [total("copied"), total("limited")]);
        let copies = Capture::start(lab.node(), "slow0");
        web.ping_every(Duration::from_millis(10), db.v4(), 50, 56);
        let [copied, limited] = [total("copied") - before[0], total("limited") - before[1]];
        eventually(SOON, || {
            let frames = copies.frames().len();
            check(frames as u64 == copied, || format!("{frames} frames of {copied}"))
        });
        copies.stop();
        let granted = began.elapsed().as_secs() + 2;
        assert!(copied <= granted && limited >= 100 - granted, "{copied} copied, {limited} limited");
    };
    flood();
    agent.stop();

    api.set_way(Way::Refused);
    let agent = api.agent(lab, &[]);
    agent.wait_for_log(&["slow0", "the mirror interface is up"]);
    flood();
    api.set_way(Way::Open);
    lab.wait_get("/readyz", 200);
    flood();

    let unlimited = total("limited");
    api.apply(&target(&slow, &free));
    eventually(SOON, || {
        let (copied, limited) = (total("copied"), total("limited"));
        web.ping(db.v4(), 5, 56);
        check(total("copied") - copied >= 10 && total("limited") == limited, || "it is limited still".into())
    });
    assert!(unlimited > 0);
    agent.stop();
}
