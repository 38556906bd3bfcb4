//! [`Follower`]: one watch of the Kubernetes API, listed, followed and listed again, for ever.
//!
//! `kube::runtime::watcher` is not used: it begins at any version that the server has in its memory, also when it
//! begins again. Here [`Seen`] decides which list is asked for and taken. Made by `KubePods`; objects go into [`Kept`],
//! the state to `Shared`.

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{
    Api,
    api::{ListParams, VersionMatch, WatchEvent, WatchParams},
    core::Status,
    runtime::{
        utils::Backoff as _,
        watcher::{DefaultBackoff, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::{
    Shared, Watched,
    kept::{Keep, Kept},
    seen::{Ask, Judgement, Seen},
};

/// How long the server may take over a list, or over beginning a watch.
const LIST_DEADLINE: Duration = Duration::from_secs(30);
/// How long after its end the server may still be silent about a watch.
const MARGIN: Duration = Duration::from_secs(5);
/// The longest pause before the API is asked again.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The shortest time between the beginnings of two watches.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
/// The annotation of the bookmark that ends a streaming list.
const LIST_END: &str = "k8s.io/initial-events-end";

type Changes<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

/// One watch, and the receivers of its objects and its state.
pub(super) struct Follower<K: Keep> {
    pub(super) watched: Watched,
    pub(super) api: Api<K>,
    pub(super) kept: Kept<K>,
    pub(super) shared: Arc<Shared>,
    /// Which objects, by their fields.
    pub(super) fields: Option<String>,
    /// How many seconds a watch lasts.
    pub(super) watch_seconds: u32,
    pub(super) seen: Seen,
}

/// A complete list.
struct Listed<K> {
    version: String,
    objects: Vec<K>,
    /// The changes from then on, if the list is the beginning of a watch.
    changes: Option<Changes<K>>,
}

/// Why a watch must begin again.
enum End {
    /// The watch ended in time, but has shown no version: it may wait for a version that never comes.
    Quiet,
    Failed {
        was_listed: bool,
        failure: Failure,
    },
}

impl<K: Keep + DeserializeOwned + Send + Sync> Follower<K> {
    /// Follows for ever.
    pub(super) async fn run(mut self) {
        let mut backoff = DefaultBackoff::default();
        let mut told = None;
        loop {
            let End::Failed { was_listed, failure } = self.list_and_follow(&mut told).await else { continue };
            self.shared.set(self.watched, false);
            (self.shared.restarted)(self.watched);
            let (watched, error) = (self.watched.name(), failure.to_string());
            if told.as_ref() != Some(&error) {
                warn!(
                    watched,
                    error,
                    "the Kubernetes API is away; what is mirrored stays mirrored, and it is tried again"
                );
                told = Some(error);
            }
            if was_listed {
                backoff.reset();
            }
            sleep(backoff.next().unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE)).await;
        }
    }

    /// Lists, and follows until the watch fails. `told` is the failure that was logged last.
    async fn list_and_follow(&mut self, told: &mut Option<String>) -> End {
        let (mut version, mut begun) = match self.list().await {
            Ok(begun) => begun,
            Err(failure) => return End::Failed { was_listed: false, failure },
        };
        self.shared.set(self.watched, true);
        self.shared.changed.notify_one();
        if told.take().is_some() {
            info!(watched = self.watched.name(), "the Kubernetes API is back");
        }
        // The end of a streaming list is a version that it has shown.
        let mut is_shown = begun.is_some();
        let failed = |failure| End::Failed { was_listed: true, failure };
        loop {
            let at = Instant::now();
            let changes = match begun.take() {
                Some(changes) => changes,
                None => match self.watch(false, &version).await {
                    Ok(changes) => changes,
                    Err(failure) => return failed(failure),
                },
            };
            match self.take_in(changes, &mut version).await {
                Ok(shows) => is_shown |= shows,
                Err(failure) => return failed(failure),
            }
            sleep_until(at + SHORTEST_WATCH).await;
            if !std::mem::take(&mut is_shown) {
                return End::Quiet;
            }
        }
    }

    /// Takes in a list that is not from the past. Returns its version, and the watch that has begun with it.
    async fn list(&mut self) -> Result<(String, Option<Changes<K>>), Failure> {
        let (ask, listed) = match self.stream_list().await {
            (_, Err(failure)) if failure.is_refusal() => {
                debug!(watched = self.watched.name(), %failure, "no streaming list; asking for a plain one");
                self.plain_list().await
            }
            streamed => streamed,
        };
        let listed = listed.inspect_err(|failure| {
            if failure.is_past() {
                self.seen.refused();
            }
        })?;
        let newest = self.seen.newest().to_owned();
        match self.seen.judge(&ask, &listed.version, Instant::now()) {
            Judgement::Take => {}
            Judgement::TakeBack => warn!(
                watched = self.watched.name(),
                seen = newest,
                version = listed.version,
                "the API server's versions have gone back and stay there, as after its store was restored from a \
                 backup; its list counts from now on"
            ),
            Judgement::Past => return Err(Failure::Past { version: listed.version, newest }),
        }
        self.kept.take_in(Event::Init);
        for object in listed.objects {
            self.kept.take_in(Event::InitApply(object));
        }
        self.kept.take_in(Event::InitDone);
        Ok((listed.version, listed.changes))
    }

    /// A list as the beginning of a watch, from the server's memory. Servers before 1.34, or with the feature switched
    /// off, know plain lists only.
    async fn stream_list(&self) -> (Ask, Result<Listed<K>, Failure>) {
        let ask = self.seen.ask(true);
        let version = match &ask {
            Ask::NotOlderThan(version) => version,
            Ask::Any => "0",
            // The server finds out the newest version, and waits until its memory has it.
            Ask::Newest => "",
        };
        let listed = match self.watch(true, version).await {
            Ok(changes) => timeout(LIST_DEADLINE, read_list(changes)).await.unwrap_or(Err(Failure::NoList)),
            Err(failure) => Err(failure),
        };
        (ask, listed)
    }

    /// A plain list; from the server's memory, unless the newest list is asked for. The server reads its memory only if
    /// the list is not cut into pages.
    async fn plain_list(&self) -> (Ask, Result<Listed<K>, Failure>) {
        let ask = self.seen.ask(false);
        let version = match &ask {
            Ask::NotOlderThan(version) => Some(version.clone()),
            Ask::Any => Some("0".to_owned()),
            Ask::Newest => None,
        };
        let parameters = ListParams {
            field_selector: self.fields.clone(),
            version_match: version.is_some().then_some(VersionMatch::NotOlderThan),
            resource_version: version,
            ..ListParams::default()
        };
        let listed = match timeout(LIST_DEADLINE, self.api.list(&parameters)).await {
            Err(_) => Err(Failure::NoAnswer),
            Ok(Err(error)) => Err(Failure::List(error)),
            Ok(Ok(list)) => match list.metadata.resource_version.filter(|version| !version.is_empty()) {
                Some(version) => Ok(Listed { version, objects: list.items, changes: None }),
                None => Err(Failure::NoVersion),
            },
        };
        (ask, listed)
    }

    async fn watch(&self, with_list: bool, version: &str) -> Result<Changes<K>, Failure> {
        let parameters = WatchParams {
            field_selector: self.fields.clone(),
            timeout: Some(self.watch_seconds),
            send_initial_events: with_list,
            ..WatchParams::default()
        };
        match timeout(LIST_DEADLINE, self.api.watch(&parameters, version)).await {
            Ok(changes) => Ok(changes.map_err(Failure::Begin)?.boxed()),
            Err(_) => Err(Failure::NoAnswer),
        }
    }

    /// Takes in the changes, from `version` on, until the server ends the watch. Returns whether the watch has shown
    /// any version.
    async fn take_in(&mut self, mut changes: Changes<K>, version: &mut String) -> Result<bool, Failure> {
        let silence = Duration::from_secs(self.watch_seconds.into()) + MARGIN;
        let mut is_shown = false;
        loop {
            let change = timeout(silence, changes.next()).await.map_err(|_| Failure::Silent)?;
            let Some(change) = change else { return Ok(is_shown) };
            let (shown, event) = match change.map_err(Failure::Watch)? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    (object.meta().resource_version.clone(), Some(Event::Apply(object)))
                }
                WatchEvent::Deleted(object) => {
                    (object.meta().resource_version.clone(), Some(Event::Delete(object)))
                }
                WatchEvent::Bookmark(bookmark) => (Some(bookmark.metadata.resource_version), None),
                WatchEvent::Error(status) => return Err(Failure::Told(status)),
            };
            let shown = shown.filter(|version| !version.is_empty()).ok_or(Failure::NoVersion)?;
            self.seen.saw(&shown);
            *version = shown;
            is_shown = true;
            if event.is_some_and(|event| self.kept.take_in(event)) {
                self.shared.changed.notify_one();
            }
        }
    }
}

/// Reads the list that a watch begins with. While the server waits for the requested version, it sends changes too,
/// deletions among them.
async fn read_list<K: Keep>(mut changes: Changes<K>) -> Result<Listed<K>, Failure> {
    let mut objects = BTreeMap::new();
    let key = |object: &K| (object.meta().namespace.clone(), object.meta().name.clone());
    loop {
        match changes.next().await.ok_or(Failure::Ended)?.map_err(Failure::Watch)? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                objects.insert(key(&object), object);
            }
            WatchEvent::Deleted(object) => drop(objects.remove(&key(&object))),
            WatchEvent::Bookmark(bookmark) if bookmark.metadata.annotations.contains_key(LIST_END) => {
                let version = bookmark.metadata.resource_version;
                return Ok(Listed {
                    version,
                    objects: objects.into_values().collect(),
                    changes: Some(changes),
                });
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) => return Err(Failure::Told(status)),
        }
    }
}

/// Why a watch failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot list: {0}")]
    List(kube::Error),
    #[error("cannot begin to watch: {0}")]
    Begin(kube::Error),
    #[error("the watch failed: {0}")]
    Watch(kube::Error),
    #[error("the watch was ended by an error: {}", .0.message)]
    Told(Box<Status>),
    #[error("no complete list within {} s", LIST_DEADLINE.as_secs())]
    NoList,
    #[error("no answer within {} s", LIST_DEADLINE.as_secs())]
    NoAnswer,
    #[error("the server has fallen silent")]
    Silent,
    #[error("the list ended before it was complete")]
    Ended,
    #[error("an answer without a resource version")]
    NoVersion,
    #[error("a list from the past: of version {version}, and {newest} was seen already")]
    Past { version: String, newest: String },
}

impl Failure {
    /// The server does not support the request. It may also answer without an end, as still older servers do.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Begin(kube::Error::Api(status)) => matches!(status.code, 400 | 422),
            Self::NoList => true,
            _ => false,
        }
    }

    /// The server's data are older than the request demands.
    fn is_past(&self) -> bool {
        let status = match self {
            Self::List(kube::Error::Api(status)) | Self::Begin(kube::Error::Api(status)) => status,
            Self::Told(status) => status,
            _ => return false,
        };
        let mut causes = status.details.iter().flat_map(|details| &details.causes);
        // Some servers name no cause.
        causes.any(|cause| cause.reason == "ResourceVersionTooLarge")
            || status.message.contains("Too large resource version")
    }
}
