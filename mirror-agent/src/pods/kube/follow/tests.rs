//! The requests of a follower to the API server, and the responses that it accepts, with canned responses and paused
//! time.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::{Mutex, MutexGuard};

use kube::Client;
use serde_json::{Value, json};

use super::{
    super::fake::{self, Reply},
    *,
};
use crate::pods::{
    PodSource as _, SourceState,
    kube::{KubePods, watch_seconds},
};

/// The duration of a watch of this server.
const WATCH: Duration = Duration::from_secs(60);

/// The state of the server, and its behaviour.
#[derive(Debug, Default)]
struct World {
    version: u64,
    pods: Vec<&'static str>,
    /// It responds 503 to everything.
    is_down: bool,
    /// It streams lists.
    streams: bool,
    /// It responds with its state for any requested version, as a cache in between does.
    is_careless: bool,
    /// It ends every watch at once, and sends nothing.
    is_brief: bool,
    /// It starts watches, and sends nothing.
    is_mute: bool,
    /// The Mirrors; `None` if there is no CRD.
    mirrors: Option<Vec<&'static str>>,
    /// It denies access to Mirrors.
    is_denied: bool,
    /// The queries for pods so far.
    asked: Vec<String>,
}

impl World {
    fn answer(&mut self, path: &str, query: &str) -> Reply {
        let word = |key: &str| {
            let mut words = query.split('&').filter_map(|word| word.split_once('='));
            words.find(|(name, _)| *name == key).map(|(_, value)| value.to_owned())
        };
        if self.is_down {
            return Reply::Status(503);
        }
        let is_pods = path == "/api/v1/pods";
        if is_pods {
            self.asked.push(query.to_owned());
        }
        let object = |name: &str| {
            let version = self.version.to_string();
            json!({"metadata": {"name": name, "namespace": "shop", "uid": name, "resourceVersion": version}, "spec": {"podSelector": {}}})
        };
        let names = match path {
            "/api/v1/pods" => self.pods.clone(),
            "/api/v1/namespaces" => vec!["shop"],
            "/apis/podmirror.io/v1alpha1/mirrors" if self.is_denied => return Reply::Status(403),
            "/apis/podmirror.io/v1alpha1/mirrors" if self.mirrors.is_some() => {
                self.mirrors.clone().unwrap_or_default()
            }
            _ => return Reply::Status(404),
        };
        let objects: Vec<_> = names.into_iter().map(object).collect();
        let asked: u64 = word("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        let is_behind = asked > self.version;
        let bookmark = |annotations| {
            let metadata = json!({"resourceVersion": self.version.to_string(), "annotations": annotations});
            json!({"type": "BOOKMARK", "object": {"kind": "", "apiVersion": "v1", "metadata": metadata}})
        };
        match (word("watch"), word("sendInitialEvents")) {
            (None, _) if is_behind && !self.is_careless => {
                Reply::Error(504, "Timeout: Too large resource version: 50, current: 10")
            }
            (None, _) => Reply::Object(json!({
                "metadata": {"resourceVersion": self.version.to_string()}, "items": objects,
            })),
            (Some(_), Some(_)) if !self.streams => Reply::Status(422),
            (Some(_), Some(_)) => {
                let added = |object| json!({"type": "ADDED", "object": object});
                let mut lines: Vec<_> = objects.into_iter().map(added).collect();
                if !is_behind || self.is_careless {
                    lines.push(bookmark(json!({LIST_END: "true"})));
                }
                Reply::Watch(lines, WATCH)
            }
            (Some(_), None) if self.is_mute => Reply::Watch(Vec::new(), 10 * WATCH),
            (Some(_), None) if self.is_brief => Reply::Watch(Vec::new(), Duration::ZERO),
            // It waits for a newer version, and sends nothing.
            (Some(_), None) if is_behind => Reply::Watch(Vec::new(), WATCH),
            (Some(_), None) => Reply::Watch(vec![bookmark(json!({}))], WATCH),
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Server(Arc<Mutex<World>>);

impl Server {
    fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    fn client(&self) -> Client {
        let world = Arc::clone(&self.0);
        fake::client(move |request| {
            let query = request.uri().query().unwrap_or_default();
            world.lock().unwrap().answer(request.uri().path(), query)
        })
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// Returns the versions of the lists of pods that were requested since the last call.
    fn lists_asked(&self) -> Vec<String> {
        let asked = std::mem::take(&mut self.world().asked);
        let is_list = |query: &&String| !query.contains("watch=true") || query.contains("sendInitialEvents");
        let version = |query: &String| {
            let version = query.split('&').find_map(|word| word.strip_prefix("resourceVersion="));
            version.unwrap_or_default().to_owned()
        };
        asked.iter().filter(is_list).map(version).collect()
    }
}

fn names(pods: &KubePods) -> Vec<String> {
    let pods = pods.snapshot().unwrap_or_default();
    pods.iter().map(|pod| pod.id.name.clone()).collect()
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn where_no_list_is_streamed_a_plain_one_is_taken_from_the_servers_memory() {
    let server = Server::new(World { version: 7, ..World::default() });
    let _pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(2).await;
    let words = |query: &String| {
        let mut words: Vec<_> = query.split('&').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        words.sort();
        words
    };
    let queries: Vec<_> = server.world().asked.iter().map(words).collect();
    let timeout = format!("timeoutSeconds={}", watch_seconds("one"));
    let (node, latest) = ("fieldSelector=spec.nodeName%3Done", "resourceVersionMatch=NotOlderThan");
    let bookmarks = "allowWatchBookmarks=true";
    let streaming =
        [bookmarks, node, "resourceVersion=", latest, "sendInitialEvents=true", &timeout, "watch=true"];
    let plain = [node, "resourceVersion=0", latest];
    let watch = [bookmarks, node, "resourceVersion=7", &timeout, "watch=true"];
    assert_eq!(queries, [&streaming[..], &plain, &watch]);
}

fn mirrors(pods: &KubePods) -> Vec<String> {
    pods.resources().iter().map(|resource| resource.id.to_string()).collect()
}

/// A server that predates the limits of the CRD and does not stream lists, with this number of Mirrors. Also returns
/// the sizes of the pages.
fn crowded(
    mirrors: usize,
    spec: impl Fn(usize) -> Value + Send + Sync + 'static,
) -> (Client, Arc<Mutex<Vec<usize>>>) {
    let pages = Arc::new(Mutex::new(Vec::new()));
    let asked = Arc::clone(&pages);
    let client = fake::client(move |request| {
        let query = request.uri().query().unwrap_or_default();
        let word = |key: &str| query.split('&').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let number = |key: &str| word(key).and_then(|text| text.parse::<usize>().ok());
        let list =
            |metadata: Value, items: Vec<Value>| Reply::Object(json!({"metadata": metadata, "items": items}));
        match request.uri().path() {
            _ if word("sendInitialEvents").is_some() => Reply::Status(422),
            _ if word("watch").is_some() => Reply::Watch(Vec::new(), 10 * WATCH),
            "/api/v1/pods" | "/api/v1/namespaces" => list(json!({"resourceVersion": "7"}), Vec::new()),
            "/apis/podmirror.io/v1alpha1/mirrors" => {
                let from = number("continue").unwrap_or(0);
                let to = (from + number("limit").unwrap_or(mirrors)).min(mirrors);
                asked.lock().unwrap().push(to - from);
                let mirror = |number: usize| {
                    let name = format!("m{number}");
                    json!({"metadata": {"name": name, "namespace": "shop", "uid": name}, "spec": spec(number)})
                };
                let token = if to < mirrors { to.to_string() } else { String::new() };
                list(json!({"resourceVersion": "7", "continue": token}), (from..to).map(mirror).collect())
            }
            _ => Reply::Status(404),
        }
    });
    (client, pages)
}

/// A selector with `values` values of 9 bytes.
fn selector(values: usize) -> Value {
    let values: Vec<_> = (0..values).map(|number| format!("{number:09}")).collect();
    json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": values}]}})
}

/// Mirrors of up to 1.3 MB are read in pages, and the agent keeps only their names and the reason for refusing them.
#[tokio::test(start_paused = true)]
async fn hostile_mirrors_come_in_pages_and_leave_their_names() {
    let spec = |number| match number {
        0 => json!({"podSelector": {}}),
        1 => selector(100_000),
        _ => selector(4000),
    };
    let (client, pages) = crowded(40, spec);
    let pods = KubePods::watch(client, "one", |_| {});
    seconds(20).await;
    let resources = pods.resources();
    assert_eq!((resources.len(), pages.lock().unwrap().iter().max()), (40, Some(&16)));
    let (good, hostile): (Vec<_>, Vec<_>) = resources.iter().partition(|resource| resource.request.is_ok());
    assert_eq!((good.len(), hostile.len()), (1, 39));
    for resource in hostile {
        let why = resource.request.as_ref().unwrap_err();
        assert!(why.starts_with("spec: it has more than 128 KiB"), "{why}");
        assert_eq!(resource.uid, resource.id.name.to_string());
        let kept = format!("{resource:?}").len();
        assert!(kept < 1000, "{kept} bytes are kept");
    }
}

/// The CRD allows each of these Mirrors, but they are very many: the limit for a namespace is 4 MiB.
#[tokio::test(start_paused = true)]
async fn the_mirrors_of_a_namespace_have_a_bound_together() {
    // About 41 bytes for each value.
    let large = selector(2000);
    let (client, _) = crowded(100, move |_| large.clone());
    let pods = KubePods::watch(client, "one", |_| {});
    seconds(20).await;
    let resources = pods.resources();
    let (good, refused): (Vec<_>, Vec<_>) = resources.iter().partition(|resource| resource.request.is_ok());
    assert_eq!((good.len(), refused.len()), (50, 50));
    for resource in refused {
        let why = resource.request.as_ref().unwrap_err();
        assert!(why.starts_with("spec: the Mirrors of this namespace have more than 4 MiB"), "{why}");
        assert!(format!("{resource:?}").len() < 1000);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cluster_without_mirrors_is_followed_all_the_same() {
    let server = Server::new(World { version: 7, pods: vec!["web"], streams: true, ..World::default() });
    let pods = KubePods::watch(server.client(), "one", |_| {});
    let state = || *pods.state().borrow();
    seconds(1).await;
    assert_eq!((names(&pods), mirrors(&pods), state()), (vec!["web".into()], vec![], SourceState::Current));
    // The API becomes unreachable and comes back, still without the CRDs.
    server.world().is_down = true;
    seconds(90).await;
    assert!(matches!(state(), SourceState::Away { .. }));
    server.world().is_down = false;
    seconds(45).await;
    assert_eq!((mirrors(&pods), state()), (vec![], SourceState::Current));
    // The CRDs are installed.
    server.world().mirrors = Some(vec!["ids"]);
    seconds(40).await;
    assert_eq!((mirrors(&pods), state()), (vec!["Mirror shop/ids".into()], SourceState::Current));
    // They are removed. A single response of that kind is not accepted: the server may lag behind.
    server.world().mirrors = None;
    let mut away = 0;
    for _ in 0..120 {
        seconds(1).await;
        if !mirrors(&pods).is_empty() {
            away += u32::from(matches!(state(), SourceState::Away { .. }));
        }
    }
    assert!((2..20).contains(&away), "{away} s");
    assert_eq!((mirrors(&pods), state()), (vec![], SourceState::Current));
}

#[tokio::test(start_paused = true)]
async fn mirrors_that_may_not_be_read_are_none_unless_they_were_read_before() {
    let world = World { version: 7, pods: vec!["web"], mirrors: Some(vec!["ids"]), ..World::default() };
    let server = Server::new(World { is_denied: true, ..world });
    let pods = KubePods::watch(server.client(), "one", |_| {});
    let state = || *pods.state().borrow();
    // A server that has just started denies everything, and a new agent must not end a mirror for that reason.
    seconds(1).await;
    assert_eq!((pods.snapshot(), state()), (None, SourceState::Starting));
    seconds(14).await;
    assert_eq!((names(&pods), mirrors(&pods), state()), (vec!["web".into()], vec![], SourceState::Current));
    server.world().is_denied = false;
    seconds(40).await;
    assert_eq!(mirrors(&pods), ["Mirror shop/ids"]);
    server.world().is_denied = true;
    seconds(600).await;
    assert_eq!(mirrors(&pods), ["Mirror shop/ids"]);
    assert!(matches!(state(), SourceState::Away { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_list_from_the_past_is_not_taken_and_a_newer_one_is() {
    for (streams, is_careless) in [(true, true), (true, false), (false, true), (false, false)] {
        let world = World { version: 50, pods: vec!["web"], streams, is_careless, ..World::default() };
        let server = Server::new(world);
        let pods = KubePods::watch(server.client(), "one", |_| {});
        seconds(2).await;
        assert_eq!((names(&pods), *pods.state().borrow()), (vec!["web".into()], SourceState::Current));
        server.lists_asked();
        // The server is replaced by another one, which lags behind.
        server.world().is_down = true;
        seconds(70).await;
        assert!(matches!(*pods.state().borrow(), SourceState::Away { .. }));
        *server.world() = World { version: 40, pods: vec!["old"], streams, is_careless, ..World::default() };
        for second in 0..120 {
            seconds(1).await;
            assert_eq!(names(&pods), ["web"], "after {second} s, {streams} {is_careless}");
            assert!(matches!(*pods.state().borrow(), SourceState::Away { .. }));
        }
        // The cache is queried first, and the store only if the cache stays behind.
        let asked = server.lists_asked();
        assert!(asked.len() >= 3 && asked[..3].iter().all(|version| version == "50"), "{asked:?}");
        assert!(asked.len() < 40, "{asked:?}");
        // It has caught up.
        *server.world() = World { version: 51, pods: vec!["new"], streams, is_careless, ..World::default() };
        seconds(45).await;
        assert_eq!((names(&pods), *pods.state().borrow()), (vec!["new".into()], SourceState::Current));
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_restored_is_believed_after_a_while() {
    for (streams, is_down) in [(true, true), (true, false), (false, true), (false, false)] {
        let server = Server::new(World { version: 50, pods: vec!["web"], streams, ..World::default() });
        let pods = KubePods::watch(server.client(), "one", |_| {});
        seconds(2).await;
        // The connection breaks; or the server ends its watches regularly, and then waits for a newer version.
        server.world().is_down = is_down;
        seconds(70).await;
        *server.world() = World { version: 10, pods: vec!["restored"], streams, ..World::default() };
        seconds(240).await;
        assert_eq!(names(&pods), ["web"]);
        seconds(420).await;
        assert_eq!(names(&pods), ["restored"], "{streams} {is_down}");
        assert_eq!(*pods.state().borrow(), SourceState::Current);
        // Afterwards the follower treats it like any other server.
        *server.world() =
            World { version: 11, pods: vec!["next"], streams, is_down: true, ..World::default() };
        seconds(70).await;
        server.world().is_down = false;
        seconds(15).await;
        assert_eq!(names(&pods), ["next"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_shows_its_version_goes_on_without_another_list() {
    let server = Server::new(World { version: 50, pods: vec!["web"], streams: true, ..World::default() });
    let _pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(3600).await;
    let asked = server.world().asked.len();
    assert_eq!(server.lists_asked(), [""]);
    assert!((59..=61).contains(&asked), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_is_not_asked_without_a_pause() {
    for streams in [true, false] {
        let server = Server::new(World { version: 50, streams, is_brief: true, ..World::default() });
        let _pods = KubePods::watch(server.client(), "one", |_| {});
        seconds(60).await;
        let asked = server.world().asked.len();
        // Per second at most one refused streaming list, one plain list and one watch.
        assert!(asked <= 3 * 61, "{asked}");
    }
}

/// The server may hang, or send no bookmarks: a list shows which, and only if it fails does the API count as
/// unreachable.
#[tokio::test(start_paused = true)]
async fn a_watch_that_stays_silent_begins_again_with_a_list() {
    let world = World { version: 50, pods: vec!["web"], is_mute: true, ..World::default() };
    let server = Server::new(world);
    let pods = KubePods::watch(server.client(), "one", |_| {});
    let state = pods.state();
    seconds(10).await;
    assert_eq!(server.lists_asked().len(), 2, "a streaming list that is refused, and a plain one");
    server.world().pods = vec!["db"];
    seconds(SILENCE.as_secs() - 20).await;
    assert_eq!((server.lists_asked().len(), names(&pods)), (0, vec!["web".to_owned()]));
    seconds(20).await;
    assert_eq!((server.lists_asked().len(), names(&pods)), (2, vec!["db".to_owned()]));
    assert_eq!(*state.borrow(), SourceState::Current);
    server.world().is_down = true;
    seconds(SILENCE.as_secs()).await;
    assert!(matches!(*state.borrow(), SourceState::Away { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_deletion_while_a_list_is_streamed_counts() {
    let object = |name: &str, version: &str| json!({"metadata": {"name": name, "namespace": "shop", "uid": name, "resourceVersion": version}});
    let client = fake::client(move |request| {
        let line = |kind: &str, object: Value| json!({"type": kind, "object": object});
        let metadata = json!({"resourceVersion": "50", "annotations": {LIST_END: "true"}});
        let end = json!({"kind": "", "apiVersion": "v1", "metadata": metadata});
        let lines = match request.uri().path() {
            "/api/v1/pods" => vec![
                line("ADDED", object("web", "30")),
                line("ADDED", object("db", "31")),
                line("DELETED", object("web", "45")),
                line("BOOKMARK", end),
            ],
            _ => vec![line("ADDED", object("shop", "3")), line("BOOKMARK", end)],
        };
        Reply::Watch(lines, WATCH)
    });
    let pods = KubePods::watch(client, "one", |_| {});
    seconds(2).await;
    assert_eq!(names(&pods), ["db"]);
}
