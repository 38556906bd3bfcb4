//! [`Follower`]: lists and watches one kind of object in the Kubernetes API, and starts over forever.
//!
//! `kube::runtime::watcher` is not used: it starts from any version that the server has in its cache, also when it
//! restarts. Here [`Seen`] decides which list to request and whether to accept it. `KubePods` creates the follower;
//! objects go into [`Kept`], the state into `Shared`.

mod failure;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{
    Api,
    api::{ListParams, VersionMatch, WatchEvent, WatchParams},
    runtime::{
        utils::Backoff as _,
        watcher::{DefaultBackoff, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::failure::Failure;
use super::{
    Shared, Watched,
    kept::{Keep, Kept},
    seen::{Ask, Judgement, Seen},
};

/// The timeout for a list, and for the start of a watch.
const LIST_DEADLINE: Duration = Duration::from_secs(30);
/// The page size of a plain list of resources. Their authors are untrusted, and an object has up to 1.5 MB.
const PAGE: u32 = 8;
/// The longest silence of a watch. API servers send a bookmark once a minute or a little later. After the time of two
/// bookmarks the watch is given up, and a list shows whether the server responds. (A dead connection ends earlier: see
/// `connection`.)
const SILENCE: Duration = Duration::from_secs(150);
/// The longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The shortest interval between the starts of two watches.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
/// The longest pause between attempts for a kind that the API lacks.
const LACKING_PAUSE: Duration = Duration::from_secs(30);
/// The number of consecutive responses after which a kind that was read before counts as removed, and a new agent
/// accepts that it lacks a permission. An API server that has just started denies every permission for a moment, but it
/// never reports an existing kind as missing.
const DENIALS: u32 = 3;
/// The annotation of the bookmark that ends a streaming list.
const LIST_END: &str = "k8s.io/initial-events-end";

type Changes<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

/// One watch, and the receivers of its objects and its state.
pub(super) struct Follower<K: Keep> {
    pub(super) watched: Watched,
    pub(super) api: Api<K>,
    pub(super) kept: Kept<K>,
    pub(super) shared: Arc<Shared>,
    /// The field selector of the objects.
    pub(super) fields: Option<String>,
    /// The duration of a watch in seconds.
    pub(super) watch_seconds: u32,
    pub(super) seen: Seen,
    /// The reason why the agent gets no objects of this kind, if known.
    pub(super) lacking: Option<Lacking>,
}

/// The reason why the agent gets no objects of an optional kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lacking {
    /// The server does not know the kind: its CRD is not installed.
    Crd,
    /// The agent may not read the kind.
    Right,
}

/// A complete list.
struct Listed<K> {
    version: String,
    objects: Vec<K>,
    /// The changes after the list, if the list is the start of a watch.
    changes: Option<Changes<K>>,
}

/// The way in which the changes of a watch ended.
enum Taken {
    /// The server has ended the watch. `shows`: the watch has shown a version.
    ToTheEnd { shows: bool },
    /// The server was silent for [`SILENCE`].
    UntilSilence,
}

/// The reason why a new list is necessary.
enum End {
    /// The watch has shown no version before its end, or nothing for a long time: it may wait for a version that never
    /// comes, or for a server that hangs. Or an object was emptied, which may fit now.
    Quiet,
    Failed {
        was_listed: bool,
        failure: Failure,
    },
}

impl<K: Keep + DeserializeOwned + Send + Sync> Follower<K> {
    /// Lists and watches forever.
    pub(super) async fn run(mut self) {
        let mut backoff = DefaultBackoff::default();
        let (mut told, mut denials) = (None, 0);
        loop {
            let End::Failed { was_listed, failure } = self.list_and_follow(&mut told).await else { continue };
            let lacking = failure.lacking().filter(|_| self.watched.is_optional());
            denials = if lacking.is_some() && !was_listed { denials + 1 } else { 0 };
            if let Some(lacking) = lacking.filter(|lacking| self.believes(*lacking, denials)) {
                self.lack(lacking);
                told = None;
                sleep(backoff.next().unwrap_or(LACKING_PAUSE).min(LACKING_PAUSE)).await;
                continue;
            }
            self.shared.set(self.watched, false);
            (self.shared.restarted)(self.watched);
            let (watched, error) = (self.watched.name(), failure.to_string());
            if told.as_ref() != Some(&error) {
                warn!(
                    watched,
                    error,
                    "the Kubernetes API is unavailable; existing mirrors continue, and the agent retries"
                );
                told = Some(error);
            }
            if was_listed {
                backoff.reset();
            }
            sleep(backoff.next().unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE)).await;
        }
    }

    /// Whether to accept that the cluster lacks this kind, after `denials` such responses in a row.
    fn believes(&self, lacking: Lacking, denials: u32) -> bool {
        let is_known = !self.seen.newest().is_empty();
        match lacking {
            Lacking::Crd => !is_known || denials >= DENIALS,
            // Objects that were read before stay in force, as pods do.
            Lacking::Right => !is_known && denials >= DENIALS,
        }
    }

    /// Continues without objects of this kind. The agent tries again later.
    fn lack(&mut self, lacking: Lacking) {
        self.shared.set(self.watched, true);
        if self.lacking.replace(lacking) == Some(lacking) {
            return;
        }
        let watched = self.watched.name();
        match lacking {
            Lacking::Crd => info!(
                watched,
                "the cluster has no CRD of this kind, so its objects are ignored; the chart installs it, and \
                 `mirror-agent crds` prints it"
            ),
            Lacking::Right => warn!(
                watched,
                "the agent is not allowed to list and watch these objects, so they are ignored; the chart in deploy/chart grants it"
            ),
        }
        self.seen = Seen::default();
        self.kept.take_in(Event::Init);
        self.kept.take_in(Event::InitDone);
        self.shared.changed.notify_one();
    }

    /// Lists, and watches until the watch fails. `told` is the failure that was logged last.
    async fn list_and_follow(&mut self, told: &mut Option<String>) -> End {
        let (mut version, mut begun) = match self.list().await {
            Ok(begun) => begun,
            Err(failure) => return End::Failed { was_listed: false, failure },
        };
        self.shared.set(self.watched, true);
        self.shared.changed.notify_one();
        if told.take().is_some() {
            info!(watched = self.watched.name(), "the Kubernetes API is available again");
        }
        if self.lacking.take().is_some() {
            info!(watched = self.watched.name(), "the Kubernetes API has objects of this kind now");
        }
        // The end of a streaming list shows a version.
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
                Ok(Taken::ToTheEnd { shows }) => is_shown |= shows,
                Ok(Taken::UntilSilence) => return End::Quiet,
                Err(failure) => return failed(failure),
            }
            sleep_until(at + SHORTEST_WATCH).await;
            if !std::mem::take(&mut is_shown) || self.kept.has_emptied() {
                return End::Quiet;
            }
        }
    }

    /// Requests a list, and accepts it if it is not too old. Returns its version, and the watch that has started with
    /// it.
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
                "the API server's resource versions have decreased permanently, as after its store was restored from a \
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

    /// Requests a list as the start of a watch, from the server's cache. Servers before 1.34, or with the feature
    /// disabled, support plain lists only.
    async fn stream_list(&self) -> (Ask, Result<Listed<K>, Failure>) {
        let ask = self.seen.ask(true);
        let version = match &ask {
            Ask::NotOlderThan(version) => version,
            Ask::Any => "0",
            // The server determines the newest version, and waits until its cache has it.
            Ask::Newest => "",
        };
        let listed = match self.watch(true, version).await {
            Ok(changes) => timeout(LIST_DEADLINE, read_list(changes)).await.unwrap_or(Err(Failure::NoList)),
            Err(failure) => Err(failure),
        };
        (ask, listed)
    }

    /// Requests a plain list: from the server's cache, unless the newest list is requested. The server uses its cache
    /// only if the list has no pages. Lists of resources have pages, so that a page fits into the agent's memory; so
    /// they are always the newest ones.
    async fn plain_list(&self) -> (Ask, Result<Listed<K>, Failure>) {
        let has_pages = self.watched.is_optional();
        let ask = if has_pages { Ask::Newest } else { self.seen.ask(false) };
        let version = match &ask {
            Ask::NotOlderThan(version) => Some(version.clone()),
            Ask::Any => Some("0".to_owned()),
            Ask::Newest => None,
        };
        let mut parameters = ListParams {
            field_selector: self.fields.clone(),
            version_match: version.is_some().then_some(VersionMatch::NotOlderThan),
            resource_version: version,
            limit: has_pages.then_some(PAGE),
            ..ListParams::default()
        };
        let mut objects = Vec::new();
        let listed = loop {
            let mut list = match timeout(LIST_DEADLINE, self.api.list(&parameters)).await {
                Err(_) => break Err(Failure::NoAnswer),
                Ok(Err(error)) => break Err(Failure::List(error)),
                Ok(Ok(list)) => list,
            };
            objects.append(&mut list.items);
            parameters.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                let version = list.metadata.resource_version.filter(|version| !version.is_empty());
                break version
                    .map(|version| Listed { version, objects, changes: None })
                    .ok_or(Failure::NoVersion);
            }
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

    /// Processes the changes, from `version` on, until the server ends the watch or is silent for [`SILENCE`].
    async fn take_in(&mut self, mut changes: Changes<K>, version: &mut String) -> Result<Taken, Failure> {
        let mut shows = false;
        loop {
            let Ok(change) = timeout(SILENCE, changes.next()).await else { return Ok(Taken::UntilSilence) };
            let Some(change) = change else { return Ok(Taken::ToTheEnd { shows }) };
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
            shows = true;
            if event.is_some_and(|event| self.kept.take_in(event)) {
                self.shared.changed.notify_one();
            }
        }
    }
}

/// Reads the list at the start of a watch. While the server waits for the requested version, it also sends changes,
/// including deletions.
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
