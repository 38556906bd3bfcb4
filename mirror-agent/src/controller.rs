//! The controller: sums up the MirrorNodes in the status of each Mirror and ClusterMirror.
//!
//! It watches these three kinds, and writes the statuses and the Events on Mirrors. It runs once in a cluster, touches no
//! node, and decides nothing about packets: without it, everything but the summed status works. It keeps nothing but what
//! it reads, so a controller that starts anew goes on at once. `kube::runtime::watcher` brings the objects; a list from
//! the past does no harm here, because the next change replaces the sums. Of several controllers one works, the holder of
//! the [`lease`]. Called by `cmd::controller`.

mod book;
mod lease;
mod tell;

use std::{
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
    api::{ObjectMeta, Patch, PatchParams},
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event},
    },
};
use mirror_api::{
    ClusterMirror, Mirror, MirrorNode, MirrorSpec, MirrorStatus, Refusal,
    sum::{Asked, ends},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::{
    book::{Book, Key, Write},
    lease::Lease,
};
use crate::{
    events::message::Reporter,
    metrics::controller::ControllerMetrics,
    pods::kube::{Kind, read},
    select,
};

/// The field manager of server-side apply, and `reportingController` of the Events.
const MANAGER: &str = "podmirror-controller";
const REPORTER: &str = "podmirror.io/controller";
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pauses after a write that the server itself has refused or not answered: the first and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How often the book is looked at for reports that have become too old, and for the metrics.
const TICK: Duration = Duration::from_secs(10);
/// How many seconds a watch lasts.
const WATCH_SECONDS: u32 = 290;
/// The controller is unready if the API server has not answered for so long.
const AWAY: Duration = Duration::from_secs(60);

/// Which controller this is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The namespace of the Lease.
    pub namespace: String,
    /// The name of the Lease.
    pub lease: String,
    /// The name by which this controller is known among others.
    pub holder: String,
    /// How long the Lease holds without being renewed.
    pub duration: Duration,
}

/// When the API server has answered last.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<Option<Instant>>>);

impl Health {
    fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Ready if the API server has answered lately, whether this controller works or waits for the Lease. Otherwise the
    /// reason.
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

/// Sums up while it holds the Lease, and waits for it otherwise. Ends at `stop`.
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
    loop {
        info!(holder, "waiting for the Lease");
        tokio::select! {
            () = lease.acquire() => {}
            () = &mut stop => return,
        }
        info!(holder, "this controller holds the Lease and sums up");
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

/// Watches, and writes, for ever.
async fn sum_up(client: &Client, holder: &str, metrics: &ControllerMetrics) -> Infallible {
    let mut nodes = pin!(watch::<MirrorNode>(client));
    let mut mirrors = pin!(watch::<Mirror>(client));
    let mut cluster_mirrors = pin!(watch::<ClusterMirror>(client));
    let (mut of_nodes, mut of_mirrors, mut of_cluster) = (Listed::new(), Listed::new(), Listed::new());
    let mut book = Book::default();
    let (mut pause, mut next_write, mut next_tick) = (PAUSE.0, Instant::now(), Instant::now() + TICK);
    loop {
        let is_listed = of_nodes.is_complete && of_mirrors.is_complete && of_cluster.is_complete;
        let due = book.next().filter(|_| is_listed).map(|due| due.max(next_write));
        tokio::select! {
            // A burst of changes is taken in before anything is written.
            biased;
            Some(event) = nodes.next() => take_in_node(&mut book, &mut of_nodes, event),
            Some(event) = mirrors.next() => take_in(&mut book, &mut of_mirrors, event),
            Some(event) = cluster_mirrors.next() => take_in(&mut book, &mut of_cluster, event),
            () = sleep_until(next_tick) => {
                book.expire(Instant::now(), Timestamp::now());
                metrics.knows(book.nodes().count(), book.stale(), book.mirrors().count());
                next_tick = Instant::now() + TICK;
            }
            () = sleep_until(due.unwrap_or(next_tick)), if due.is_some() => {
                let Some(write) = book.due(Instant::now(), Timestamp::now()) else { continue };
                let outcome = put(client, &write).await;
                book.note(&write, outcome == Outcome::Written, Instant::now());
                metrics.written(outcome == Outcome::Written);
                if outcome == Outcome::Away {
                    next_write = Instant::now() + pause;
                    pause = (pause * 2).min(PAUSE.1);
                } else {
                    pause = PAUSE.0;
                }
                if outcome == Outcome::Written {
                    tell(client, &write, holder).await;
                }
            }
        }
    }
}

/// The objects of one kind, as the API server brings them. An object that cannot be read is left out alone.
fn watch<K>(client: &Client) -> impl Stream<Item = Event<DeserializeGuard<K>>> + use<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let api = Api::<DeserializeGuard<K>>::all(client.clone());
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let mut told = None;
    watcher::watcher(api, config).default_backoff().filter_map(move |event| {
        let event = match event {
            Ok(event) => {
                told = None;
                Some(event)
            }
            Err(error) => {
                let error = error.to_string();
                if told.as_ref() != Some(&error) {
                    warn!(kind = %K::kind(&()), error, "cannot watch these; it is tried again");
                    told = Some(error);
                }
                None
            }
        };
        ready(event)
    })
}

/// What the watch of one kind has listed.
struct Listed<T> {
    /// The names so far, while a list is not complete.
    names: Option<BTreeSet<T>>,
    /// There was a complete list.
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

    /// The list is complete. Returns its names.
    fn end(&mut self) -> BTreeSet<T> {
        self.is_complete = true;
        self.names.take().unwrap_or_default()
    }
}

fn take_in_node(book: &mut Book, listed: &mut Listed<String>, event: Event<DeserializeGuard<MirrorNode>>) {
    let (now, at) = (Instant::now(), Timestamp::now());
    match event {
        Event::Init => listed.begin(),
        Event::InitApply(DeserializeGuard(node)) | Event::Apply(DeserializeGuard(node)) => match node {
            Ok(node) => {
                let name = node.name_any();
                book.set_node(&name, Some(node.status.unwrap_or_default()), now, at);
                listed.add(name);
            }
            Err(error) => {
                let node = error.metadata.name.clone();
                warn!(node, %error, "a MirrorNode cannot be read, and does not count");
            }
        },
        Event::Delete(node) => book.set_node(&node.name_any(), None, now, at),
        Event::InitDone => {
            let there = listed.end();
            let gone: Vec<_> = book.nodes().filter(|name| !there.contains(*name)).cloned().collect();
            gone.iter().for_each(|name| book.set_node(name, None, now, at));
        }
    }
}

/// A Mirror or ClusterMirror.
trait Summed: Kind<Read = crate::model::Resource> + Serialize {
    const IS_NAMESPACED: bool;

    /// The part of `spec` that both have.
    fn mirror(&self) -> &MirrorSpec;

    fn status(&self) -> Option<&MirrorStatus>;
}

impl Summed for Mirror {
    const IS_NAMESPACED: bool = true;

    fn mirror(&self) -> &MirrorSpec {
        &self.spec
    }

    fn status(&self) -> Option<&MirrorStatus> {
        self.status.as_ref()
    }
}

impl Summed for ClusterMirror {
    const IS_NAMESPACED: bool = false;

    fn mirror(&self) -> &MirrorSpec {
        &self.spec.mirror
    }

    fn status(&self) -> Option<&MirrorStatus> {
        self.status.as_ref()
    }
}

fn take_in<K: Summed>(book: &mut Book, listed: &mut Listed<Key>, event: Event<DeserializeGuard<K>>) {
    match event {
        Event::Init => listed.begin(),
        Event::InitApply(DeserializeGuard(mirror)) | Event::Apply(DeserializeGuard(mirror)) => match mirror {
            Ok(mirror) => {
                let (key, metadata) = (key(&mirror), mirror.meta());
                let (uid, generation) = (mirror.uid().unwrap_or_default(), metadata.generation.unwrap_or(0));
                let asked = || asked(&mirror, generation);
                let now = Instant::now();
                book.set_mirror(key.clone(), &uid, generation, mirror.status().cloned(), asked, now);
                listed.add(key);
            }
            Err(error) => {
                let (kind, name) = (K::kind(&()), error.metadata.name.clone());
                warn!(%kind, name, %error, "an object cannot be read, and gets no status");
            }
        },
        Event::Delete(mirror) => book.remove_mirror(&key(&mirror)),
        Event::InitDone => {
            let there = listed.end();
            let is_gone = |key: &&Key| key.namespace.is_some() == K::IS_NAMESPACED && !there.contains(*key);
            let gone: Vec<_> = book.mirrors().filter(is_gone).cloned().collect();
            gone.iter().for_each(|key| book.remove_mirror(key));
        }
    }
}

fn key(object: &impl Resource) -> Key {
    let ObjectMeta { namespace, name, .. } = object.meta().clone();
    Key { namespace, name: name.unwrap_or_default() }
}

/// What a Mirror asks for, as far as its status depends on it.
fn asked<K: Summed>(mirror: &K, generation: i64) -> Asked {
    let refused = match read(mirror) {
        Ok(resource) => select::refusal(&resource).map(|(reason, message)| (reason.to_owned(), message)),
        Err(problem) => Some(("InvalidSpec".to_owned(), problem)),
    };
    Asked {
        generation,
        ends: ends(mirror.mirror()),
        refused: refused.map(|(reason, message)| Refusal { reason, message }),
        left_out: 0,
    }
}

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Written,
    /// The server does not take this one: it may have gone.
    Refused,
    /// The server takes none now.
    Away,
}

async fn put(client: &Client, write: &Write) -> Outcome {
    let Write { key, .. } = write;
    let written = match &key.namespace {
        Some(namespace) => {
            timeout(PATIENCE, apply(Api::<Mirror>::namespaced(client.clone(), namespace), write)).await
        }
        None => timeout(PATIENCE, apply(Api::<ClusterMirror>::all(client.clone()), write)).await,
    };
    let (outcome, error) = match written {
        Ok(Ok(())) => return Outcome::Written,
        // 404: it has gone. 409: another one has its name. 400, 422: the CRD is of another version.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 400 | 404 | 409 | 422) => {
            (Outcome::Refused, status.message)
        }
        Ok(Err(error)) => (Outcome::Away, error.to_string()),
        Err(_) => (Outcome::Away, "no answer".to_owned()),
    };
    warn!(namespace = key.namespace, name = key.name, error, "cannot write a status; it is tried again");
    outcome
}

/// Writes the status of the object with this UID.
async fn apply<K>(api: Api<K>, Write { key, uid, status, .. }: &Write) -> kube::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let object = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": { "name": key.name, "uid": uid }, "status": status,
    });
    let parameters = PatchParams::apply(MANAGER).force();
    api.patch_status(&key.name, &parameters, &Patch::Apply(object)).await.map(drop)
}

/// Posts the Events that a written status gives reason for. One that is not taken is not posted: the status says the same.
async fn tell(client: &Client, write: &Write, holder: &str) {
    for message in tell::messages(write) {
        let by = Reporter { controller: REPORTER, instance: holder };
        match timeout(PATIENCE, message.post(client, by)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(reason = message.reason, %error, "cannot post an Event"),
            Err(_) => debug!(reason = message.reason, "cannot post an Event: no answer"),
        }
    }
}
