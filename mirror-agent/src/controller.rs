//! The controller: aggregates the MirrorNodes into the status of each Mirror, ClusterMirror and MirrorTarget.
//!
//! It watches these four kinds, and writes the statuses and the Events on Mirrors. It runs once in a cluster, touches
//! no node, and decides nothing about packets: without it, everything but the aggregated status works. It stores
//! nothing beyond what it reads, so it can be restarted at any time. `kube::runtime::watcher` delivers the objects; a
//! stale list does no harm here, because the next change replaces the sums. Among several replicas only the holder of
//! the [`lease`] is active.

mod book;
mod kinds;
mod lease;
mod tell;

use std::{
    borrow::Cow,
    collections::BTreeSet,
    convert::Infallible,
    fmt::Debug,
    future::{Future, ready},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{Patch, PatchParams},
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Config, Event},
    },
};
use mirror_api::{ClusterMirror, Mirror, MirrorNode, MirrorTarget};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::{
    book::{Book, Summed, Write},
    kinds::{Mirrors, Object, Targets, Watched, of_node},
    lease::Lease,
};
use crate::{events::message::Reporter, metrics::controller::ControllerMetrics};

/// The field manager of server-side apply, and `reportingController` of the Events.
const MANAGER: &str = "podmirror-controller";
const REPORTER: &str = "podmirror.io/controller";
/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first and the longest pause after a write that the API server itself rejected or did not answer.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Interval for expiring old reports and for updating the metrics.
const TICK: Duration = Duration::from_secs(10);
/// Duration of a watch, in seconds.
const WATCH_SECONDS: u32 = 290;
/// Page size of a list of resources. An object has 1.5 MB at most.
const PAGE: u32 = 16;
/// The controller is unready if the API server has not answered for this long.
const AWAY: Duration = Duration::from_secs(60);

/// The identity of a controller replica.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The namespace of the Lease.
    pub namespace: String,
    /// The name of the Lease.
    pub lease: String,
    /// The name of this replica.
    pub holder: String,
    /// The duration of the Lease without renewal.
    pub duration: Duration,
}

/// Time of the last answer of the API server.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<Option<Instant>>>);

impl Health {
    fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Ready if the API server has answered recently, whether this replica is active or waits for the Lease. Otherwise
    /// returns the reason.
    pub fn ready(&self) -> Result<(), String> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Err("the API server has not answered yet".into()),
            Some(at) if at.elapsed() > AWAY => {
                Err(format!("the API server has not answered for {} s", at.elapsed().as_secs()))
            }
            Some(_) => Ok(()),
        }
    }
}

/// Aggregates while it holds the Lease, and waits for it otherwise. Returns at `stop`.
pub async fn run(
    client: Client,
    identity: Identity,
    health: Health,
    metrics: ControllerMetrics,
    stop: impl Future<Output = ()>,
) {
    let Identity { namespace, lease, holder, duration } = identity;
    let mut lease = Lease::new(client.clone(), (&namespace, lease), holder.clone(), duration, health);
    let mut stop = pin!(stop);
    metrics.writes_begin(&[Mirror::kind(&()), ClusterMirror::kind(&()), MirrorTarget::kind(&())]);
    loop {
        info!(holder, "waiting for the Lease");
        tokio::select! {
            () = lease.acquire() => {}
            () = &mut stop => return,
        }
        info!(holder, "this controller holds the Lease and aggregates the reports");
        metrics.leads(true);
        tokio::select! {
            never = sum_up(&client, &holder, &metrics) => match never {},
            () = lease.hold() => warn!(holder, "this controller has lost the Lease"),
            () = &mut stop => {
                lease.release().await;
                return;
            }
        }
        metrics.leads(false);
    }
}

/// Watches the objects and writes the statuses, forever.
async fn sum_up(client: &Client, holder: &str, metrics: &ControllerMetrics) -> Infallible {
    let mut nodes = pin!(watch::<DeserializeGuard<MirrorNode>>(client, Config::default(), metrics));
    let mut mirrors = pin!(watch::<Object<Mirror>>(client, of_strangers(), metrics));
    let mut cluster_mirrors = pin!(watch::<Object<ClusterMirror>>(client, of_strangers(), metrics));
    let mut mirror_targets = pin!(watch::<Object<MirrorTarget>>(client, of_strangers(), metrics));
    let (mut of_nodes, mut of_mirrors, mut of_cluster) = (Listed::new(), Listed::new(), Listed::new());
    let mut of_targets = Listed::new();
    let mut books = Books { mirrors: Book::new(), targets: Book::new() };
    let (mut pause_mirrors, mut pause_targets) = (Pause::new(), Pause::new());
    let mut next_tick = Instant::now() + TICK;
    loop {
        // A missing right or CRD for one book does not delay the other.
        let are_mirrors = of_nodes.is_complete && of_mirrors.is_complete && of_cluster.is_complete;
        let are_targets = of_nodes.is_complete && of_targets.is_complete;
        let due_mirror = books.mirrors.next().filter(|_| are_mirrors).map(|due| due.max(pause_mirrors.end));
        let due_target = books.targets.next().filter(|_| are_targets).map(|due| due.max(pause_targets.end));
        let due = due_mirror.into_iter().chain(due_target).min();
        tokio::select! {
            // A burst of changes is read before anything is written.
            biased;
            Some(event) = nodes.next() => take_in_node(&mut books, &mut of_nodes, event),
            Some(event) = mirrors.next() => take_in(&mut books.mirrors, &mut of_mirrors, event),
            Some(event) = cluster_mirrors.next() => take_in(&mut books.mirrors, &mut of_cluster, event),
            Some(event) = mirror_targets.next() => take_in(&mut books.targets, &mut of_targets, event),
            () = sleep_until(next_tick) => {
                let (now, at) = (Instant::now(), Timestamp::now());
                books.mirrors.expire(now, at);
                books.targets.expire(now, at);
                let book = &books.mirrors;
                metrics.knows(book.nodes().count(), book.stale(), book.objects().count());
                next_tick = Instant::now() + TICK;
            }
            () = sleep_until(due.unwrap_or(next_tick)), if due.is_some() => {
                let is_target = due_target.is_some_and(|target| due_mirror.is_none_or(|mirror| target < mirror));
                let began = Instant::now();
                let (written, pause) = if is_target {
                    (write_target(client, &mut books.targets).await, &mut pause_targets)
                } else {
                    (write_mirror(client, &mut books.mirrors, holder).await, &mut pause_mirrors)
                };
                if let Some((kind, outcome)) = written {
                    metrics.written(&kind, outcome == Outcome::Written, began.elapsed());
                    pause.note(outcome);
                }
            }
        }
    }
}

/// Objects that tenants write are listed in small pages, because the server answers with whole objects.
fn of_strangers() -> Config {
    Config::default().page_size(PAGE)
}

/// The back-off between writes of a book.
struct Pause {
    end: Instant,
    /// The next pause.
    length: Duration,
}

impl Pause {
    fn new() -> Self {
        Self { end: Instant::now(), length: PAUSE.0 }
    }

    fn note(&mut self, outcome: Outcome) {
        if outcome == Outcome::Away {
            self.end = Instant::now() + self.length;
            self.length = (self.length * 2).min(PAUSE.1);
        } else {
            self.length = PAUSE.0;
        }
    }
}

/// The state of the controller. Both books know all nodes.
struct Books {
    mirrors: Book<Mirrors>,
    targets: Book<Targets>,
}

/// The stream of the objects of one kind.
fn watch<'m, K>(
    client: &Client,
    config: Config,
    metrics: &'m ControllerMetrics,
) -> impl Stream<Item = Event<K>> + use<'m, K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let api = Api::<K>::all(client.clone());
    let config = config.timeout(WATCH_SECONDS);
    metrics.watch_begins(&K::plural(&()));
    let mut told = None;
    watcher::watcher(api, config).default_backoff().filter_map(move |event| {
        let event = match event {
            Ok(event) => {
                told = None;
                Some(event)
            }
            Err(error) => {
                metrics.watch_restart(&K::plural(&()));
                let error = mirror_client::in_words(&error);
                if told.as_ref() != Some(&error) {
                    warn!(kind = %K::kind(&()), error, "cannot watch these objects; the controller retries");
                    told = Some(error);
                }
                None
            }
        };
        ready(event)
    })
}

/// The progress of the list of one kind.
struct Listed<T> {
    /// The names so far, while a list is incomplete.
    names: Option<BTreeSet<T>>,
    /// A list was completed at least once.
    is_complete: bool,
}

impl<T: Ord> Listed<T> {
    const fn new() -> Self {
        Self { names: None, is_complete: false }
    }

    fn begin(&mut self) {
        self.names = Some(BTreeSet::new());
    }

    fn add(&mut self, name: T) {
        if let Some(names) = &mut self.names {
            names.insert(name);
        }
    }

    /// Marks the list as complete and returns its names.
    fn end(&mut self) -> BTreeSet<T> {
        self.is_complete = true;
        self.names.take().unwrap_or_default()
    }
}

fn take_in_node(books: &mut Books, listed: &mut Listed<String>, event: Event<DeserializeGuard<MirrorNode>>) {
    let (now, at) = (Instant::now(), Timestamp::now());
    let remove = |books: &mut Books, name: &str| {
        books.mirrors.set_node(name, None, now, at);
        books.targets.set_node(name, None, now, at);
    };
    match event {
        Event::Init => listed.begin(),
        Event::InitApply(DeserializeGuard(node)) | Event::Apply(DeserializeGuard(node)) => match node {
            Ok(node) => {
                let name = node.name_any();
                let (of_mirrors, of_targets) = of_node(node.status.unwrap_or_default());
                books.mirrors.set_node(&name, Some(of_mirrors), now, at);
                books.targets.set_node(&name, Some(of_targets), now, at);
                listed.add(name);
            }
            Err(error) => {
                let node = error.metadata.name.clone();
                warn!(node, %error, "a MirrorNode cannot be read, and is ignored");
            }
        },
        Event::Delete(node) => remove(books, &node.name_any()),
        Event::InitDone => {
            let there = listed.end();
            let gone: Vec<_> = books.mirrors.nodes().filter(|name| !there.contains(*name)).cloned().collect();
            gone.iter().for_each(|name| remove(books, name));
        }
    }
}

type Key<K> = <<K as Watched>::Book as Summed>::Key;

fn take_in<K: Watched>(book: &mut Book<K::Book>, listed: &mut Listed<Key<K>>, event: Event<Object<K>>) {
    match event {
        Event::Init => listed.begin(),
        Event::InitApply(object) | Event::Apply(object) => {
            let (key, uid) = (K::key(object.meta()), object.uid().unwrap_or_default());
            let generation = object.meta().generation.unwrap_or(0);
            let Object { asked, status, .. } = object;
            book.set(key.clone(), &uid, generation, status, || asked, Instant::now());
            listed.add(key);
        }
        Event::Delete(object) => book.remove(&K::key(object.meta())),
        Event::InitDone => {
            let there = listed.end();
            let is_gone = |key: &&Key<K>| K::is_of(key) && !there.contains(*key);
            let gone: Vec<_> = book.objects().filter(is_gone).cloned().collect();
            gone.iter().for_each(|key| book.remove(key));
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Written,
    /// The server rejects this write: the object may no longer exist.
    Refused,
    /// The server accepts no writes now.
    Away,
}

/// The kind of an object, and the outcome of the write of its status.
type Written = (Cow<'static, str>, Outcome);

/// Writes the next status of a Mirror or ClusterMirror, if one is due.
async fn write_mirror(client: &Client, book: &mut Book<Mirrors>, holder: &str) -> Option<Written> {
    let write = book.due(Instant::now(), Timestamp::now())?;
    let Write { key: kinds::Key { namespace, name }, .. } = &write;
    let (kind, outcome) = match namespace {
        Some(namespace) => put(Api::<Mirror>::namespaced(client.clone(), namespace), name, &write).await,
        None => put(Api::<ClusterMirror>::all(client.clone()), name, &write).await,
    };
    book.note(&write, outcome == Outcome::Written, Instant::now());
    if outcome == Outcome::Written {
        tell(client, &write, holder).await;
    }
    Some((kind, outcome))
}

/// Writes the next status of a MirrorTarget, if one is due.
async fn write_target(client: &Client, book: &mut Book<Targets>) -> Option<Written> {
    let write = book.due(Instant::now(), Timestamp::now())?;
    let (kind, outcome) = put(Api::<MirrorTarget>::all(client.clone()), &write.key, &write).await;
    book.note(&write, outcome == Outcome::Written, Instant::now());
    Some((kind, outcome))
}

/// Writes the status of the object with this name and UID.
async fn put<K>(api: Api<K>, name: &str, write: &Write<K::Book>) -> Written
where
    K: Watched + DeserializeOwned,
    <K::Book as Summed>::Status: Serialize,
{
    let object = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": { "name": name, "uid": write.uid }, "status": write.status,
    });
    let (parameters, object) = (PatchParams::apply(MANAGER).force(), Patch::Apply(object));
    let (outcome, error) = match timeout(PATIENCE, api.patch_status(name, &parameters, &object)).await {
        Ok(Ok(_)) => return (K::kind(&()), Outcome::Written),
        // 404: deleted. 409: another object has its name. 400, 422: the CRD is of another version.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 404 | 409 | 422) => {
            (Outcome::Refused, status.message)
        }
        Ok(Err(error)) => (Outcome::Away, mirror_client::in_words(&error)),
        Err(_) => (Outcome::Away, "no answer".to_owned()),
    };
    let (kind, key) = (K::kind(&()), &write.key);
    warn!(%kind, ?key, error, "cannot write a status; the controller retries");
    (kind, outcome)
}

/// Posts the Events that follow from a written status. A rejected Event is not retried: the status has the same
/// information.
async fn tell(client: &Client, write: &Write<Mirrors>, holder: &str) {
    for message in tell::messages(write) {
        let by = Reporter { controller: REPORTER, instance: holder };
        match timeout(PATIENCE, message.post(client, by)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let error = mirror_client::in_words(&error);
                debug!(reason = message.reason, error, "cannot post an Event");
            }
            Err(_) => debug!(reason = message.reason, "cannot post an Event: no answer"),
        }
    }
}
