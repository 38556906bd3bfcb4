//! Mirrors and ClusterMirrors: from `kubectl apply` to the sessions of the pods, and the node's report on them.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Instant,
};

use mirror_tests::{Api, Capture, Container, Lab, MIRROR, Pinging, PodNs, SOON, Status, check, eventually};
use serde_json::{Value, json};

use crate::Node;

const OPT: &str = "podmirror.io/mirror";

/// The file `path` of the work tree.
pub(crate) fn file(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// Whether the cluster has the CRDs. All stories share the lock, and the story that deletes the CRDs holds it
/// exclusively.
static CRDS: RwLock<bool> = RwLock::new(false);

fn install(api: &Api, are_there: &mut RwLockWriteGuard<'_, bool>) {
    api.kubectl_with("apply -f -", &file("deploy/chart/files/crds.yaml"));
    api.kubectl("wait --for=condition=Established --timeout=30s crd mirrors.podmirror.io clustermirrors.podmirror.io mirrortargets.podmirror.io mirrornodes.podmirror.io");
    **are_there = true;
}

/// Installs the CRDs and holds the lock exclusively, so that no other story uses them.
pub(crate) fn alone_with_crds(api: &Api) -> RwLockWriteGuard<'static, bool> {
    let mut crds = CRDS.write().unwrap_or_else(PoisonError::into_inner);
    if !*crds {
        install(api, &mut crds);
    }
    crds
}

/// A node, with the CRDs in its cluster until it is dropped.
pub(crate) struct Story {
    /// Objects without a namespace, which are deleted on drop.
    pub(crate) of_cluster: Vec<String>,
    pub(crate) node: Node,
    _crds: RwLockReadGuard<'static, bool>,
}

impl Story {
    pub(crate) fn new(name: &str) -> Self {
        let node = Node::new(name);
        loop {
            let crds = CRDS.read().unwrap_or_else(PoisonError::into_inner);
            if *crds {
                let of_cluster = vec![format!("mirrornode {}", node.lab.node().name())];
                return Self { of_cluster, node, _crds: crds };
            }
            drop(crds);
            drop(alone_with_crds(&node.api));
        }
    }

    /// The Mirror `name` for pods with this label `app`.
    pub(crate) fn mirror(&self, name: &str, app: &str, spec: &Value) {
        let selector = json!({ "matchLabels": { "app": app } });
        self.node.api.apply(&resource("Mirror", name, &selector, spec));
    }

    /// The ClusterMirror with the name of the story's namespace, for all pods of the namespace.
    pub(crate) fn cluster_mirror(&mut self, spec: &Value) -> String {
        let namespace = self.node.api.namespace().to_owned();
        let mut object = resource("ClusterMirror", &namespace, &json!({}), spec);
        let labels = json!({ "kubernetes.io/metadata.name": namespace });
        object["spec"]["namespaceSelector"] = json!({ "matchLabels": labels });
        self.of_cluster.push(format!("clustermirror {namespace}"));
        self.node.api.apply(&object);
        namespace
    }

    /// Waits until the MirrorNode's entry for a Mirror satisfies `is_so`.
    #[track_caller]
    pub(crate) fn wait_told(&self, mirror: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let Node { api, lab } = &self.node;
        eventually(2 * SOON, || {
            let words = format!("get mirrornode {} -o json", lab.node().name());
            let node: Value = serde_json::from_str(&api.try_kubectl(&words)?).unwrap();
            let mirrors = node["status"]["mirrors"].as_array().cloned().unwrap_or_default();
            let found = mirrors.into_iter().find(|of| of["name"] == mirror).filter(|of| is_so(of));
            found.ok_or_else(|| format!("{node:#}"))
        })
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        for object in &self.of_cluster {
            if let Err(error) = self.node.api.try_kubectl(&format!("delete --ignore-not-found {object}")) {
                eprintln!("an object of the story stays: {error}");
            }
        }
    }
}

pub(crate) fn resource(kind: &str, name: &str, pods: &Value, spec: &Value) -> Value {
    let mut spec = spec.clone();
    spec["podSelector"] = pods.clone();
    json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
    })
}

/// The mirrors at the NIC of a pod.
pub(crate) fn mirrors(status: &Status, pod: &PodNs) -> Vec<String> {
    let tap = status.taps.iter().find(|tap| tap.device == pod.veth_host());
    tap.iter().flat_map(|tap| &tap.sessions).map(|session| session.mirror.clone()).collect()
}

#[track_caller]
pub(crate) fn wait_mirrors(lab: &Lab, pod: &PodNs, expected: &[&str]) -> Status {
    lab.wait_status(|status| {
        let mirrors = mirrors(status, pod);
        check(mirrors == expected, || format!("{mirrors:?}, and not {expected:?}"))
    })
}

pub(crate) fn run<const N: usize>(
    node: &Node,
    pods: &[PodNs; N],
    annotations: &[(&str, &str)],
) -> Vec<Container> {
    pods.iter().map(|pod| node.api.run(&node.lab, pod, annotations)).collect()
}

#[test]
fn a_mirror_follows_its_selector_and_the_labels_of_pods() {
    let story = &Story::new("selector");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    lab.wait_get("/readyz", 200);
    let pinging = Pinging::start(db.netns(), web.v4());
    let begun = Instant::now();
    story.mirror("all", "web", &json!({}));
    eventually(SOON, || {
        let told = lab.try_status()?;
        let copied: u64 = told.taps.iter().flat_map(|tap| &tap.sessions).map(|of| of.total("copied")).sum();
        check(copied > 0, || "no packet was copied yet".into())
    });
    eprintln!("from `kubectl apply` to the first copy: {:.2?}", begun.elapsed());
    pinging.stop();
    wait_mirrors(lab, web, &["mirror/all"]);
    node.is_mirrored(web, db);

    story.mirror("all", "db", &json!({ "direction": "Egress", "limits": { "packets": 1000 } }));
    let status = lab.wait_mirrored(&[db]);
    let session = status.tap(db.veth_host()).session("mirror/all");
    assert_eq!((session.direction.as_str(), session.origin.as_str()), ("egress", "mirror"));
    assert_eq!(session.left["packets"], 1000, "{session:#?}");
    api.kubectl("label --overwrite pod web app=db");
    lab.wait_mirrored(&[web, db]);
    api.kubectl("label pod db app-");
    lab.wait_mirrored(&[web]);
    api.kubectl("delete mirror all");
    lab.wait_mirrored(&[]);
    agent.stop();
}

/// Whether this is an Ethernet frame with ICMP over IPv4.
fn is_icmp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 1
}

/// Whether this is an Ethernet frame with UDP over IPv4.
fn is_udp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 17
}

/// A resource without a target copies to the mirror interface, whatever the agent's flag says. The longest name has 63
/// characters.
#[test]
fn two_mirrors_of_a_pod_each_get_their_own_packets() {
    let story = &Story::new("two");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &["--define-target", "ids=ids0", "--target", "ids"]);
    let long = &"p".repeat(63);
    story.mirror(long, "web", &json!({ "filter": "icmp" }));
    story.mirror(
        "datagrams",
        "web",
        &json!({ "filter": "udp", "targetRef": { "name": "ids" }, "snapLength": 96 }),
    );
    let both = ["mirror/datagrams", &format!("mirror/{long}")];
    wait_mirrors(lab, web, &both);
    lab.wait_mirrored(&[web]);
    let (ids, pings) = (Capture::start(lab.node(), "ids0"), Capture::start(lab.node(), MIRROR));
    let inside = Capture::start(web.netns(), "eth0");
    web.ping(db.v4(), 5, 400);
    web.udp_echo(db, db.v4(), &[1, 1000, 1400]);

    eventually(SOON, || pings.frames().same_as(&inside.frames().only(is_icmp)));
    let cut = |frames: &mirror_tests::Frames| {
        let mut counts = BTreeMap::new();
        for (frame, times) in frames.iter() {
            *counts.entry(frame[..frame.len().min(96)].to_vec()).or_insert(0) += times;
        }
        counts
    };
    eventually(SOON, || {
        let (copies, packets) = (cut(&ids.frames()), cut(&inside.frames().only(is_udp)));
        check(copies == packets && !packets.is_empty(), || format!("{copies:?}\n{packets:?}"))
    });
    assert!(ids.stop().iter().all(|(frame, _)| frame.len() <= 96));
    // A target that the node does not have.
    story.mirror("lost", "web", &json!({ "targetRef": { "name": "nowhere" } }));
    let lost = story.wait_told("lost", |of| !of["refused"].is_null());
    assert_eq!(lost["refused"]["reason"], "NoSuchTarget", "{lost:#}");
    wait_mirrors(lab, web, &both);
    agent.stop();
}

#[test]
fn a_mirror_that_cannot_be_used_is_told_of_with_the_place_of_the_mistake() {
    let story = &Story::new("refused");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    // The API server itself refuses what its schema can check.
    let refused = |name: &str, spec: &Value| {
        let object = resource("Mirror", name, &json!({}), spec).to_string();
        api.try_kubectl_with("apply -f -", &object).unwrap_err()
    };
    for (spec, part) in [
        (json!({ "sampling": { "oneIn": 0 } }), "spec.sampling.oneIn"),
        (json!({ "rateLimit": { "packetsPerSecond": "fast" } }), "spec.rateLimit.packetsPerSecond"),
        (json!({ "rateLimit": { "burst": "100ms" } }), "set packetsPerSecond, bitsPerSecond or both"),
        (json!({ "snapLength": 20 }), "spec.snapLength"),
        (json!({ "direction": "Sideways" }), "spec.direction"),
        (json!({ "limits": { "duration": "1d" } }), "spec.limits.duration"),
        (json!({ "limits": { "bytes": "1Pi" } }), "spec.limits.bytes"),
        (json!({ "limits": { "bytes": "0Gi" } }), "spec.limits.bytes"),
        (json!({ "limits": { "packets": -1 } }), "spec.limits.packets"),
        (json!({ "limits": { "duration": "0s" } }), "duration must be from 1ms to 8760h"),
        (json!({ "limits": { "duration": "99999h" } }), "duration must be from 1ms to 8760h"),
        (json!({ "rateLimit": { "packetsPerSecond": 0 } }), "spec.rateLimit.packetsPerSecond"),
        (json!({ "rateLimit": { "packetsPerSecond": 1, "burst": "1h" } }), "burst must be from 1ms to 10s"),
        (json!({ "nics": ["a/b c"] }), "spec.nics[0]"),
        (json!({ "filtre": "tcp" }), "spec.filtre"),
    ] {
        let told = refused("x", &spec);
        assert!(told.contains(part), "{told}");
    }
    let told = refused(&"x".repeat(64), &json!({}));
    assert!(told.contains("at most 63 characters"), "{told}");
    let agent = api.agent(lab, &[]);
    story.mirror("good", "web", &json!({}));
    story.mirror("broken", "web", &json!({ "filter": "tcp prot 443", "snapLength": 96 }));
    let broken = story.wait_told("broken", |of| !of["refused"].is_null());
    assert_eq!(broken["refused"]["reason"], "InvalidFilter", "{broken:#}");
    let message = broken["refused"]["message"].as_str().unwrap();
    assert!(message.starts_with("spec.filter \"tcp prot 443\": "), "{message}");
    assert_eq!(broken["pods"], json!({ "selected": 1, "covered": 0 }));
    // The author of the pod reads the same sentence.
    eventually(SOON, || {
        let events = api.kubectl("get events.v1.events.k8s.io -o jsonpath={.items[*].note}");
        check(events.contains(message), || events.clone())
    });
    wait_mirrors(lab, web, &["mirror/good"]);
    node.is_mirrored(web, db);

    story.mirror("broken", "web", &json!({ "filter": "tcp port 443", "snapLength": 96 }));
    wait_mirrors(lab, web, &["mirror/broken", "mirror/good"]);
    let told = story.wait_told("broken", |of| of["pods"]["covered"] == 1);
    assert_eq!((&told["refused"], &told["observedGeneration"]), (&Value::Null, &json!(2)), "{told:#}");
    agent.stop();
}

#[test]
fn an_enforced_mirror_heeds_nobody() {
    let mut story = Story::new("enforced");
    let [out, loud] = story.node.pods(["out", "loud"]);
    let ids = story.cluster_mirror(&json!({}));
    let mirror = format!("clustermirror/{ids}");
    let Node { api, lab } = &story.node;
    // One pod opts out, and the other requests mirrors for all slots.
    let names: Vec<_> = (0..8).map(|number| format!("{OPT}.m{number}")).collect();
    let all: Vec<_> = names.iter().map(|name| (name.as_str(), "true")).collect();
    let _containers = [api.run(lab, &out, &[(OPT, "false")]), api.run(lab, &loud, &all)];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[&loud]);
    let told = story.wait_told(&ids, |of| of["pods"]["selected"] == 2);
    assert_eq!(told["uncovered"][0]["reason"], "OptedOut", "{told:#}");
    let enforce = |enforced: bool| {
        api.kubectl(&format!(
            "patch clustermirror {ids} --type=merge -p {{\"spec\":{{\"enforced\":{enforced}}}}}"
        ));
    };
    enforce(true);
    wait_mirrors(lab, &out, &[&mirror]);
    let status = lab.status();
    assert_eq!(mirrors(&status, &loud).len(), 8);
    let session = status.tap(loud.veth_host()).session(&mirror);
    assert_eq!(session.origin, "enforced-cluster-mirror");
    story.wait_told(&ids, |of| of["pods"] == json!({ "selected": 2, "covered": 2 }));
    enforce(false);
    lab.wait_mirrored(&[&loud]);
    agent.stop();

    // With this flag the agent ignores annotations.
    let agent = api.agent(lab, &["--annotations=false"]);
    wait_mirrors(lab, &out, &[&mirror]);
    wait_mirrors(lab, &loud, &[&mirror]);
    agent.stop();
}

/// The only story that deletes the CRDs, so it runs while no other story needs them.
#[test]
fn mirrors_count_as_soon_as_the_cluster_has_them() {
    let node = &Node::new("later");
    let Node { api, lab } = node;
    let mut crds = CRDS.write().unwrap_or_else(PoisonError::into_inner);
    api.kubectl("delete --ignore-not-found crd mirrors.podmirror.io clustermirrors.podmirror.io mirrortargets.podmirror.io mirrornodes.podmirror.io");
    *crds = false;
    let pods = node.pods(["web", "db"]);
    let [web, db] = &pods;
    let _containers = [api.run(lab, web, &[]), api.run(lab, db, &[(OPT, "true")])];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[db]);
    agent.wait_for_log(&["no CRD", "clustermirrors"]);
    assert_eq!(agent.log_with(&["no CRD", "\"watched\":\"mirrors\""]).len(), 1, "{:#?}", agent.log());
    install(api, &mut crds);
    api.apply(&resource("Mirror", "all", &json!({ "matchLabels": { "app": "web" } }), &json!({})));
    eventually(4 * SOON, || {
        let status = lab.status();
        check(mirrors(&status, web) == ["mirror/all"], || format!("{status:#?}"))
    });
    assert_eq!(lab.get("/readyz").status, 200);
    agent.stop();
    api.kubectl(&format!("delete --ignore-not-found mirrornode {}", lab.node().name()));
}
