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
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    future::Future,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::StreamExt as _;
use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{
    Api, Client, Resource,
    api::{DynamicObject, Patch, PatchParams},
    core::{DeserializeGuard, Request},
    discovery::ApiResource,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Config, Event},
    },
};
use mirror_api::{ClusterMirror, Mirror, MirrorNode, MirrorTarget, sum::Asked};
use serde::{
    Serialize,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::{
    book::{Book, Key, Summed, Write},
    lease::Lease,
};
use crate::{
    model,
    report::{events::message::Message, metrics::controller::ControllerMetrics},
    sources::kube::{Kind, ResourceObject},
    util::{backoff::Backoff, told::is_news},
};

/// The field manager of server-side apply, and `reportingController` of the Events.
const MANAGER: &str = "podmirror-controller";
const REPORTER: &str = "podmirror.io/controller";
/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pauses after writes that the API server did not answer, or refused.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Interval for updating the metrics.
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
    let holder = identity.holder.clone();
    let mut lease = Lease::new(client.clone(), identity, health);
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
            () = aggregate(&client, &holder, &metrics) => {}
            () = lease.hold() => warn!(holder, "this controller has lost the Lease"),
            () = &mut stop => {
                lease.release().await;
                return;
            }
        }
        metrics.leads(false);
    }
}

/// Watches the objects and writes the statuses, forever. One kind does not delay another that has another book, as when
/// a CRD or a right is missing.
async fn aggregate(client: &Client, holder: &str, metrics: &ControllerMetrics) {
    let mirrors = RefCell::new(Book::<model::Resource>::new());
    let targets = RefCell::new(Book::<model::TargetResource>::new());
    let set_node = |key: Key, node: Option<MirrorNode>| {
        let mut status = node.map(|node| node.status.unwrap_or_default());
        let (now, at) = (Instant::now(), Timestamp::now());
        mirrors.borrow_mut().set_node(&key.name, status.as_mut(), now, at);
        targets.borrow_mut().set_node(&key.name, status.as_mut(), now, at);
    };
    let nodes = |change| match change {
        Change::Set(key, DeserializeGuard(Ok(node))) => set_node(key, Some(node)),
        Change::Set(key, DeserializeGuard(Err(error))) => {
            warn!(node = key.name, %error, "a MirrorNode cannot be read, and is ignored");
            set_node(key, None);
        }
        Change::Removed(key) => set_node(key, None),
        Change::Listed => {
            mirrors.borrow_mut().complete();
            targets.borrow_mut().complete();
        }
    };
    let update_sizes = || {
        let (mirrors, targets) = (mirrors.borrow(), targets.borrow());
        let stale: BTreeSet<_> = mirrors.stale().chain(targets.stale()).collect();
        let (nodes, objects) = mirrors.sizes();
        metrics.knows(nodes, stale.len(), objects);
    };
    let sizes = async {
        loop {
            update_sizes();
            sleep(TICK).await;
        }
    };
    tokio::select! {
        () = follow(client, Config::default(), metrics, nodes) => {}
        () = follow_objects::<Mirror>(client, &mirrors, metrics) => {}
        () = follow_objects::<ClusterMirror>(client, &mirrors, metrics) => {}
        () = follow_objects::<MirrorTarget>(client, &targets, metrics) => {}
        () = write(client, &mirrors, holder, metrics) => {}
        () = write(client, &targets, holder, metrics) => {}
        () = sizes => {}
    }
}

/// A change of the objects of one kind.
enum Change<K> {
    Set(Key, K),
    Removed(Key),
    /// The objects so far are all.
    Listed,
}

/// Follows the objects of one kind, forever.
async fn follow<K>(
    client: &Client,
    config: Config,
    metrics: &ControllerMetrics,
    mut take_in: impl FnMut(Change<K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let (kind, plural) = (K::kind(&()), K::plural(&()));
    metrics.watch_begins(&plural);
    let events = watcher::watcher(Api::<K>::all(client.clone()), config.timeout(WATCH_SECONDS));
    let mut events = pin!(events.default_backoff());
    // The objects, and the number of the list that had them last.
    let (mut known, mut list) = (BTreeMap::new(), 0_u64);
    let mut told = None;
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                metrics.watch_restart(&plural);
                let error = mirror_client::in_words(&error);
                if is_news(&mut told, &error) {
                    warn!(%kind, error, "cannot watch these objects; the controller retries");
                }
                continue;
            }
        };
        // A list that fails begins as well.
        if !matches!(event, Event::Init) {
            told = None;
        }
        match event {
            Event::Init => list += 1,
            Event::InitApply(object) | Event::Apply(object) => {
                let key = Key::of(object.meta());
                known.insert(key.clone(), list);
                take_in(Change::Set(key, object));
            }
            Event::Delete(object) => {
                let key = Key::of(object.meta());
                known.remove(&key);
                take_in(Change::Removed(key));
            }
            Event::InitDone => {
                let unlisted = known.extract_if(.., |_, last| *last < list);
                unlisted.for_each(|(key, _)| take_in(Change::Removed(key)));
                take_in(Change::Listed);
            }
        }
    }
}

/// Follows the objects of one kind for a book, forever. Tenants write them, and the server answers with whole objects,
/// so they are listed in small pages.
async fn follow_objects<K>(client: &Client, book: &RefCell<Book<K::Read>>, metrics: &ControllerMetrics)
where
    K: Kind<Read: Summed<Status: DeserializeOwned>>,
{
    let take_in = |change: Change<ResourceObject<K, Option<_>>>| match change {
        Change::Set(key, ResourceObject { metadata, read, status, .. }) => {
            let generation = metadata.generation.unwrap_or(0);
            let asked = Asked { generation, ..K::Read::asked(read) };
            book.borrow_mut().set(key, metadata.uid.unwrap_or_default(), asked, status, Instant::now());
        }
        Change::Removed(key) => book.borrow_mut().remove(&key),
        Change::Listed => {}
    };
    follow(client, Config::default().page_size(PAGE), metrics, take_in).await;
}

/// Writes the statuses of a book, and posts the Events that follow, forever.
async fn write<S>(client: &Client, book: &RefCell<Book<S>>, holder: &str, metrics: &ControllerMetrics)
where
    S: Summed<Status: Serialize>,
{
    let mut backoff = RETRY;
    loop {
        let began = Instant::now();
        let due = book.borrow_mut().due(began, Timestamp::now());
        let write = match due {
            Ok(write) => write,
            Err(later) => {
                sleep_until(later).await;
                continue;
            }
        };
        let kind = S::kind(&write.key);
        let answer = put(client, &kind, &write).await;
        metrics.written(&kind.kind, answer.is_ok(), began.elapsed());
        book.borrow_mut().note(&write, answer.is_ok(), Instant::now());
        let is_away = match answer {
            Ok(()) => {
                post(client, &kind, &write, holder).await;
                false
            }
            Err(error) => {
                let (kind, key, words) = (&kind.kind, &write.key, mirror_client::in_words(&error));
                warn!(kind, ?key, error = words, "cannot write a status; the controller retries");
                // 404: deleted. 409: another object has its name. 400, 422: the CRD is of another version.
                !matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 404 | 409 | 422))
            }
        };
        if is_away {
            sleep(backoff.pause()).await;
        } else {
            backoff = RETRY;
        }
    }
}

/// Writes the status of the object with this name and UID. The answer is not decoded: it has the whole object.
async fn put<S>(client: &Client, kind: &ApiResource, write: &Write<S>) -> kube::Result<()>
where
    S: Summed<Status: Serialize>,
{
    let Key { namespace, name } = &write.key;
    let object = json!({
        "apiVersion": kind.api_version, "kind": kind.kind,
        "metadata": { "name": name, "uid": write.uid }, "status": write.status,
    });
    let (parameters, object) = (PatchParams::apply(MANAGER).force(), Patch::Apply(object));
    let request = Request::new(DynamicObject::url_path(kind, namespace.as_deref()));
    let request = request.patch_subresource("status", name, &parameters, &object);
    let request = request.map_err(kube::Error::BuildRequest)?;
    match timeout(PATIENCE, client.request::<IgnoredAny>(request)).await {
        Ok(answer) => answer.map(drop),
        Err(_) => Err(kube::Error::Service("no answer".into())),
    }
}

/// Posts the Events that follow from a written status. A rejected Event is not retried: the status has the same
/// information.
async fn post<S: Summed>(client: &Client, kind: &ApiResource, write: &Write<S>, holder: &str) {
    let about = ObjectReference {
        api_version: Some(kind.api_version.clone()),
        kind: Some(kind.kind.clone()),
        namespace: write.key.namespace.clone(),
        name: Some(write.key.name.clone()),
        uid: Some(write.uid.clone()),
        ..ObjectReference::default()
    };
    for (is_warning, reason, note) in S::said(write.before.as_ref(), &write.status) {
        let (about, note) = (about.clone(), note.to_owned());
        let message = Message { about, is_warning, reason: reason.to_owned(), note };
        let error = match timeout(PATIENCE, message.post(client, REPORTER, holder)).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => mirror_client::in_words(&error),
            Err(_) => "no answer".to_owned(),
        };
        debug!(reason, error, "cannot post an Event");
    }
}

#[cfg(test)]
mod tests;
