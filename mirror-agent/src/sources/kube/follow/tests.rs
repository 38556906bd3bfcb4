//! The requests of a follower to the API server, and the responses that it accepts, with canned responses and paused
//! time.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use kube::Client;
use serde_json::{Value, json};

use super::{
    super::tests::fake::{self, Reply},
    *,
};
use crate::{
    model::Selector,
    sources::{
        PodSource as _, SourceState,
        kube::{KubePods, watch_seconds},
    },
};

/// The duration of a watch of this server.
const WATCH: Duration = Duration::from_secs(60);
/// The longest time from a failure to the next list.
const SOON: u64 = 30;

/// The state of the server, and its behaviour.
#[derive(Debug, Default)]
struct World {
    version: u64,
    pods: Vec<&'static str>,
    /// It responds 503 to everything.
    is_down: bool,
    /// It cannot read its store, so it responds to no list.
    is_cut_off: bool,
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
        if path == "/api/v1/pods" {
            self.asked.push(query.to_owned());
        }
        if self.is_down {
            return Reply::Status(503);
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
        let from: u64 = word("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        match word("watch") {
            None if self.is_cut_off => Reply::Never,
            None => Reply::Object(json!({
                "metadata": {"resourceVersion": self.version.to_string()},
                "items": names.into_iter().map(object).collect::<Vec<_>>(),
            })),
            Some(_) if self.is_brief => Reply::Watch(Vec::new(), Duration::ZERO),
            // It waits for a newer version, and sends nothing.
            Some(_) if self.is_mute || from > self.version => Reply::Watch(Vec::new(), 10 * WATCH),
            Some(_) => Reply::Watch(vec![bookmark(self.version)], WATCH),
        }
    }
}

fn bookmark(version: u64) -> Value {
    let object =
        json!({"kind": "", "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}});
    json!({"type": "BOOKMARK", "object": object})
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

    /// Returns the number of lists of pods and of watches that were requested since the last call.
    fn asked(&self) -> (usize, usize) {
        let asked = std::mem::take(&mut self.world().asked);
        let watches = asked.iter().filter(|query| query.contains("watch=true")).count();
        (asked.len() - watches, watches)
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
async fn the_newest_list_is_requested_in_pages_and_watched_from_there() {
    let server = Server::new(World { version: 7, ..World::default() });
    let _pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(2).await;
    let words = |query: &String| {
        let mut words: Vec<_> = query.split('&').filter(|word| !word.is_empty()).map(str::to_owned).collect();
        words.sort();
        words
    };
    let queries: Vec<_> = server.world().asked.iter().map(words).collect();
    let (node, timeout) =
        ("fieldSelector=spec.nodeName%3Done", format!("timeoutSeconds={}", watch_seconds("one")));
    let list = [node, "limit=8"];
    let watch = ["allowWatchBookmarks=true", node, "resourceVersion=7", &timeout, "watch=true"];
    assert_eq!(queries, [&list[..], &watch]);
}

/// The second page of the list fails. The pods of the first page could be all that is left of a mirror.
#[tokio::test(start_paused = true)]
async fn a_part_of_a_list_changes_nothing() {
    let has_pages = Arc::new(Mutex::new(true));
    let has = Arc::clone(&has_pages);
    let client = fake::client(move |request| {
        let query = request.uri().query().unwrap_or_default();
        let object = |name: &str| json!({"metadata": {"name": name, "namespace": "shop", "uid": name}});
        let list = |token: &str, items: &[&str]| {
            let items: Vec<_> = items.iter().map(|name| object(name)).collect();
            Reply::Object(json!({"metadata": {"resourceVersion": "7", "continue": token}, "items": items}))
        };
        match request.uri().path() {
            _ if query.contains("watch=true") => Reply::Watch(Vec::new(), WATCH),
            "/api/v1/namespaces" => list("", &["shop"]),
            "/api/v1/pods" if query.contains("continue=") => {
                Reply::Error(410, "The provided continue parameter is too old")
            }
            "/api/v1/pods" if *has.lock().unwrap() => list("next", &["web"]),
            "/api/v1/pods" => list("", &["web", "db"]),
            _ => Reply::Status(404),
        }
    });
    let pods = KubePods::watch(client, "one", |_| {});
    seconds(60).await;
    assert_eq!((pods.snapshot(), *pods.state().borrow()), (None, SourceState::Starting));
    *has_pages.lock().unwrap() = false;
    seconds(SOON).await;
    assert_eq!(
        (names(&pods), *pods.state().borrow()),
        (vec!["db".into(), "web".into()], SourceState::Current)
    );
}

fn mirrors(pods: &KubePods) -> Vec<String> {
    pods.resources().iter().map(|resource| resource.id.to_string()).collect()
}

/// A server that predates the limits of the CRD, with this number of Mirrors. Each watch begins with the first one, as
/// after a change of its status. Also returns the sizes of the pages.
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
        let mirror = |number: usize| {
            let name = format!("m{number}");
            let metadata = json!({"name": name, "namespace": "shop", "uid": name, "resourceVersion": "7"});
            json!({"metadata": metadata, "spec": spec(number)})
        };
        match request.uri().path() {
            "/apis/podmirror.io/v1alpha1/mirrors" if word("watch").is_some() => {
                let first = json!({"type": "MODIFIED", "object": mirror(0)});
                Reply::Watch(vec![first, bookmark(7)], WATCH)
            }
            _ if word("watch").is_some() => Reply::Watch(vec![bookmark(7)], WATCH),
            "/api/v1/pods" | "/api/v1/namespaces" => list(json!({"resourceVersion": "7"}), Vec::new()),
            "/apis/podmirror.io/v1alpha1/mirrors" => {
                let from = number("continue").unwrap_or(0);
                let to = (from + number("limit").unwrap_or(mirrors)).min(mirrors);
                asked.lock().unwrap().push(to - from);
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
    assert_eq!((resources.len(), pages.lock().unwrap().iter().max()), (40, Some(&8)));
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

/// A tenant has made very many Mirrors. The agent begins with them as soon as the server has sent them.
#[tokio::test(start_paused = true)]
async fn the_pages_of_a_long_list_do_not_wait() {
    const MIRRORS: usize = 4000;
    let (client, pages) = crowded(MIRRORS, |_| selector(1));
    let pods = KubePods::watch(client, "one", |_| {});
    seconds(2).await;
    assert_eq!((pods.resources().len(), pages.lock().unwrap().len()), (MIRRORS, MIRRORS / 8));
}

/// The CRD allows each of these Mirrors, but they are very many: the limit for a namespace is 4 MiB, and each counts as
/// 16 KiB or more.
#[tokio::test(start_paused = true)]
async fn the_mirrors_of_a_namespace_have_a_bound_together() {
    // About 41 bytes for each value.
    for (mirrors, values, fit) in [(100, 2000, 50), (300, 1, 256)] {
        let (client, _) = crowded(mirrors, move |_| selector(values));
        let pods = KubePods::watch(client, "one", |_| {});
        seconds(20).await;
        let resources = pods.resources();
        let (good, refused): (Vec<_>, Vec<_>) =
            resources.iter().partition(|resource| resource.request.is_ok());
        assert_eq!((good.len(), refused.len()), (fit, mirrors - fit));
        for resource in refused {
            let why = resource.request.as_ref().unwrap_err();
            assert!(why.starts_with("spec: this namespace has room for 256 Mirrors"), "{why}");
            assert_eq!(resource.pods, Selector::nothing());
            assert!(format!("{resource:?}").len() < 1000);
        }
    }
}

/// A list is as long as the tenants of the cluster make it, and each agent would request it again and again.
#[tokio::test(start_paused = true)]
async fn a_full_namespace_is_listed_again_only_if_it_shrinks() {
    let (large, are_small) = (selector(2000), Arc::new(AtomicBool::new(false)));
    let small = Arc::clone(&are_small);
    let (client, pages) = crowded(96, move |_| match small.load(Ordering::Relaxed) {
        true => selector(1),
        false => large.clone(),
    });
    let pods = KubePods::watch(client, "one", |_| {});
    let told = || {
        let refused = pods.resources().iter().filter(|resource| resource.request.is_err()).count();
        (pages.lock().unwrap().len(), refused)
    };
    seconds(3600).await;
    assert_eq!(told(), (12, 46));
    // The next watch shows that the first one is smaller.
    are_small.store(true, Ordering::Relaxed);
    seconds(WATCH.as_secs() + SOON).await;
    assert_eq!(told(), (24, 0));
    seconds(3600).await;
    assert_eq!(told(), (24, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cluster_without_mirrors_is_followed_all_the_same() {
    let server = Server::new(World { version: 7, pods: vec!["web"], ..World::default() });
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
    assert!((2..45).contains(&away), "{away} s");
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

/// As after a partition, when the connection leads to another server, which lags behind.
#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_read_its_store_changes_nothing() {
    let server = Server::new(World { version: 50, pods: vec!["web"], ..World::default() });
    let pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(2).await;
    assert_eq!((names(&pods), *pods.state().borrow()), (vec!["web".into()], SourceState::Current));
    *server.world() = World { version: 40, pods: vec!["old"], is_cut_off: true, ..World::default() };
    seconds((WATCH + SILENCE + ANSWER).as_secs() + 1).await;
    for second in 0..300 {
        seconds(1).await;
        assert_eq!(names(&pods), ["web"], "after {second} s");
        assert!(matches!(*pods.state().borrow(), SourceState::Away { .. }), "after {second} s");
    }
    // It has caught up.
    *server.world() = World { version: 51, pods: vec!["new"], ..World::default() };
    seconds(ANSWER.as_secs() + SOON).await;
    assert_eq!((names(&pods), *pods.state().borrow()), (vec!["new".into()], SourceState::Current));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_restored_from_a_backup_counts() {
    for is_down in [true, false] {
        let server = Server::new(World { version: 50, pods: vec!["web"], ..World::default() });
        let pods = KubePods::watch(server.client(), "one", |_| {});
        seconds(2).await;
        // The connection breaks; or the server ends its watches regularly, and then waits for a newer version.
        server.world().is_down = is_down;
        seconds(70).await;
        *server.world() = World { version: 10, pods: vec!["restored"], ..World::default() };
        seconds(if is_down { SOON } else { WATCH.as_secs() + SILENCE.as_secs() + SOON }).await;
        assert_eq!((names(&pods), *pods.state().borrow()), (vec!["restored".into()], SourceState::Current));
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_goes_on_without_another_list() {
    let server = Server::new(World { version: 50, pods: vec!["web"], ..World::default() });
    let _pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(3600).await;
    let (lists, watches) = server.asked();
    assert!(lists == 1 && (59..=61).contains(&watches), "{lists} {watches}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_gets_a_bounded_number_of_requests() {
    let server = Server::new(World { version: 50, is_brief: true, ..World::default() });
    let _pods = KubePods::watch(server.client(), "one", |_| {});
    seconds(60).await;
    let (lists, watches) = server.asked();
    assert!(lists == 1 && watches <= 10 * 61, "{lists} {watches}");
}

/// The server may hang, or have no newer version for a bookmark: a list shows which, and only if it fails does the API
/// count as unreachable.
#[tokio::test(start_paused = true)]
async fn after_a_long_silence_the_pods_are_listed_again() {
    let server = Server::new(World { version: 50, pods: vec!["web"], is_mute: true, ..World::default() });
    let failures = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&failures);
    let restarted = move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let pods = KubePods::watch(server.client(), "one", restarted);
    seconds(10).await;
    assert_eq!(server.asked(), (1, 1));
    server.world().pods = vec!["db"];
    seconds(SILENCE.as_secs() - 20).await;
    assert_eq!((server.asked(), names(&pods)), ((0, 0), vec!["web".to_owned()]));
    seconds(20).await;
    assert_eq!((server.asked(), names(&pods)), ((1, 1), vec!["db".to_owned()]));
    assert_eq!((*pods.state().borrow(), failures.load(Ordering::Relaxed)), (SourceState::Current, 0));
    server.world().is_down = true;
    seconds(SILENCE.as_secs()).await;
    assert!(matches!(*pods.state().borrow(), SourceState::Away { .. }));
    assert!(failures.load(Ordering::Relaxed) > 0);
}
