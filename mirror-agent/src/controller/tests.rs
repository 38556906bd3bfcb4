//! Tests: what the controller writes as the API server fails, denies, and forgets a watch, with canned responses and
//! paused time.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use serde_json::Value;

use super::*;
use crate::sources::kube::tests::fake::{self, Reply};

/// A server with objects, and the writes so far.
#[derive(Default)]
struct World {
    /// The selected pods in the report of each node.
    nodes: BTreeMap<&'static str, i64>,
    /// Further MirrorNodes.
    others: Vec<Value>,
    /// It cannot list MirrorNodes.
    hides_nodes: bool,
    /// Its watches are of a version that it no longer has, so that all kinds are listed again.
    forgets: bool,
    /// It denies these writes.
    denied: Option<&'static str>,
    /// The statuses that were written, by path.
    statuses: BTreeMap<String, Value>,
    /// The paths and bodies of all writes, also of those that were denied.
    written: Vec<(String, Value)>,
}

fn report(name: &str, selected: i64) -> Value {
    json!({
        "kind": "Mirror", "namespace": "shop", "name": name, "uid": "1", "observedGeneration": 1,
        "pods": { "selected": selected, "covered": selected }, "packets": { "copied": 0, "lost": 0 },
        "nics": selected, "ended": 0,
    })
}

fn mirror_node(name: &str, reported: &str, mirrors: &[Value], targets: &[Value]) -> Value {
    let status = json!({
        "lastReportTime": reported, "mirrorCount": mirrors.len(), "refusedCount": 0,
        "pods": { "selected": 0, "covered": 0 }, "mirrors": mirrors, "targets": targets,
    });
    json!({ "metadata": { "name": name, "uid": name }, "spec": {}, "status": status })
}

impl World {
    fn answer(&mut self, method: &str, (path, query): (&str, &str), body: &Value) -> Reply {
        let kind = path.trim_start_matches("/apis/podmirror.io/v1alpha1/");
        if method == "PATCH" {
            self.written.push((kind.to_owned(), body.clone()));
            if self.denied.is_some_and(|denied| kind.starts_with(denied)) {
                return Reply::Status(403);
            }
            self.statuses.insert(kind.to_owned(), body["status"].clone());
            // The answer has the whole object, which may be in the form of an earlier version.
            return Reply::Object(json!({ "spec": 7 }));
        }
        if method == "POST" {
            self.written.push(("events".into(), body["reason"].clone()));
            return Reply::Object(body.clone());
        }
        let node = |(name, selected): (&&str, &i64)| {
            mirror_node(name, &Timestamp::now().to_string(), &[report("web", *selected)], &[])
        };
        let object = |path: &str| {
            let namespace = path.strip_prefix("namespaces/").and_then(|path| path.split('/').next());
            let name = path.rsplit('/').next();
            let metadata = json!({ "name": name, "namespace": namespace, "uid": "1", "generation": 1 });
            let status = self.statuses.get(&format!("{path}/status"));
            json!({ "metadata": metadata, "spec": { "podSelector": {} }, "status": status })
        };
        let items = match kind {
            "mirrornodes" if self.hides_nodes => return Reply::Status(503),
            "mirrornodes" => self.nodes.iter().map(node).chain(self.others.iter().cloned()).collect(),
            "mirrors" => vec![object("namespaces/shop/mirrors/web")],
            "clustermirrors" => return Reply::Status(404),
            "mirrortargets" => vec![object("mirrortargets/ids"), object("mirrortargets/tap")],
            _ => return Reply::Status(404),
        };
        match query.contains("watch=true") {
            true if self.forgets => {
                let gone =
                    json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
                Reply::Watch(vec![json!({ "type": "ERROR", "object": gone })], Duration::ZERO)
            }
            true => Reply::Watch(Vec::new(), Duration::from_secs(60)),
            false => Reply::Object(json!({ "metadata": { "resourceVersion": "1" }, "items": items })),
        }
    }

    /// The writes of objects with this path since the last call.
    fn written(&mut self, path: &str) -> Vec<Value> {
        let (taken, rest) = self.written.drain(..).partition(|(of, _)| of.starts_with(path));
        self.written = rest;
        let taken: Vec<(String, Value)> = taken;
        taken.into_iter().map(|(_, body)| body).collect()
    }
}

/// A server, its client and the controller's metrics.
struct Server(Arc<Mutex<World>>, Client, ControllerMetrics);

impl Server {
    fn new(world: World) -> Self {
        let world = Arc::new(Mutex::new(world));
        let of_client = Arc::clone(&world);
        let client = fake::client_with_bodies(move |request, body| {
            let (uri, method) = (request.uri(), request.method().as_str());
            let query = uri.query().unwrap_or_default();
            of_client.lock().unwrap().answer(method, (uri.path(), query), body)
        });
        Self(world, client, ControllerMetrics::new().unwrap())
    }

    /// Lets a controller run while `story` changes the world.
    async fn while_running(&self, story: impl Future<Output = ()>) {
        tokio::select! {
            () = aggregate(&self.1, "one", &self.2) => unreachable!("it runs forever"),
            () = story => {}
        }
    }

    async fn pass(&self, seconds: u64) {
        sleep(Duration::from_secs(seconds)).await;
    }

    fn world(&self) -> std::sync::MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    fn metric(&self, series: &str) -> String {
        let text = self.2.text().unwrap();
        let of = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        of.unwrap_or_default().to_owned()
    }
}

fn selected(written: &[Value]) -> Vec<i64> {
    written.iter().map(|body| body["status"]["pods"]["selected"].as_i64().unwrap()).collect()
}

/// Sums of a part of the nodes would be wrong. A CRD that is missing does not matter.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_all_nodes_are_listed() {
    let nodes = BTreeMap::from([("one", 2), ("two", 3)]);
    let server = Server::new(World { nodes, hides_nodes: true, ..World::default() });
    let restarts = "podmirror_controller_watch_restarts_total{watch=\"mirrornodes\"}";
    let story = async {
        server.pass(60).await;
        assert!(server.metric(restarts).parse::<u32>().unwrap() > 1);
        {
            let mut world = server.world();
            assert!(world.written.is_empty(), "{:?}", world.written);
            world.hides_nodes = false;
        }
        server.pass(40).await;
        let mut world = server.world();
        let written = world.written("namespaces/shop/mirrors/web/status");
        assert_eq!(selected(&written), [5]);
        assert_eq!((&written[0]["kind"], &written[0]["metadata"]["uid"]), (&json!("Mirror"), &json!("1")));
        assert_eq!(world.written("events"), ["Started"]);
        let targets =
            world.written("mirrortargets/").into_iter().map(|body| body["metadata"]["name"].to_string());
        assert_eq!(targets.collect::<Vec<_>>(), ["\"ids\"", "\"tap\""]);
        assert!(world.written.is_empty(), "{:?}", world.written);
        assert_eq!(server.metric("podmirror_controller_nodes"), "2");
        assert_eq!(server.metric("podmirror_controller_mirrors"), "1");
        assert_eq!(server.metric("podmirror_controller_writes_total{kind=\"MirrorTarget\"}"), "2");
    };
    server.while_running(story).await;
}

/// A node was deleted while the controller had no watch.
#[tokio::test(start_paused = true)]
async fn what_a_new_list_lacks_does_not_count_any_more() {
    let nodes = BTreeMap::from([("one", 2), ("two", 3)]);
    let server = Server::new(World { nodes, ..World::default() });
    let story = async {
        server.pass(30).await;
        {
            let mut world = server.world();
            assert_eq!(selected(&world.written("namespaces/")), [5]);
            world.nodes.remove("two");
            world.forgets = true;
        }
        server.pass(90).await;
        let mut world = server.world();
        world.forgets = false;
        assert_eq!(selected(&world.written("namespaces/")), [2]);
    };
    server.while_running(story).await;
}

/// An agent without Mirrors and MirrorTargets writes its report once.
#[tokio::test(start_paused = true)]
async fn only_a_report_that_an_agent_repeats_becomes_stale() {
    let (web, ids) = ([report("web", 1)], [json!({ "name": "ids", "uid": "1", "observedGeneration": 1 })]);
    let old = |name: &str, mirrors: &[Value], targets: &[Value]| {
        mirror_node(name, "2020-01-01T00:00:00Z", mirrors, targets)
    };
    let others = vec![
        old("both", &web, &ids),
        old("mirror", &web, &[]),
        old("target", &[], &ids),
        old("idle", &[], &[]),
    ];
    let server = Server::new(World { nodes: [("one", 2)].into(), others, ..World::default() });
    let story = async {
        server.pass(30).await;
        assert_eq!(server.metric("podmirror_controller_nodes"), "5");
        assert_eq!(server.metric("podmirror_controller_stale_nodes"), "3");
    };
    server.while_running(story).await;
}

/// A server that denies one kind is not asked all the time, and the other kinds are written as soon as without that.
#[tokio::test(start_paused = true)]
async fn a_denied_kind_waits_and_delays_no_other() {
    let nodes = BTreeMap::from([("one", 2)]);
    let server = Server::new(World { nodes, denied: Some("mirrortargets/"), ..World::default() });
    let story = async {
        server.pass(5).await;
        {
            let mut world = server.world();
            assert_eq!(selected(&world.written("namespaces/")), [2]);
            world.written.clear();
        }
        server.pass(600).await;
        server.world().nodes.insert("two", 7);
        // Both targets wait for the longest pause of kube's back-off, which is 30 s and a jitter.
        let denied = server.world().written("mirrortargets/");
        assert!((10..=25).contains(&denied.len()), "{}", denied.len());
        let names: BTreeSet<_> = denied.iter().map(|body| body["metadata"]["name"].to_string()).collect();
        assert_eq!(names.len(), 2, "each one has its turn");
        server.world().forgets = true;
        server.pass(65).await;
        assert_eq!(selected(&server.world().written("namespaces/")), [9]);
    };
    server.while_running(story).await;
    let failures = server.metric("podmirror_controller_write_failures_total{kind=\"MirrorTarget\"}");
    assert!(failures.parse::<u32>().unwrap() > 10, "{failures}");
}
