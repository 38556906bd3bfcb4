//! [`Follower`]: the objects of one kind in the Kubernetes API, by `kube::runtime::watcher`.
//!
//! Each list is the newest one and complete, so an old list never removes a tap or starts a mirror that was
//! revoked. After a failure or a long silence, the kind is listed again. The watcher alone would resume the watch,
//! which gives no sign that the server is back. After the server's store was restored from a backup, the watch
//! would wait for a version that never comes.

#[cfg(test)]
mod tests;

use std::{error::Error, iter::successors, pin::pin, sync::Arc, time::Duration};

use futures_util::TryStreamExt as _;
use http::Request;
use kube::{
    Api, Client,
    client::Body,
    runtime::watcher::{self, Config, DefaultBackoff, Event},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::Mutex,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tower::{BoxError, service_fn};
use tower_http::timeout::{TimeoutBody, TimeoutError};
use tracing::{info, warn};

use super::{
    Shared, Watched,
    kept::{Keep, Kept},
};
use crate::util::told::is_news;

/// The timeout for the start of a response: that of API servers for a request.
const ANSWER: Duration = Duration::from_secs(60);
/// The longest silence within a response. API servers send a bookmark once a minute if they know a newer version. After
/// a longer silence, a list shows whether the server responds. (A dead connection ends earlier: see `mirror_client`.)
const SILENCE: Duration = Duration::from_secs(150);
/// The shortest interval between two watches. The watcher does not pause when a server ends each watch at once. The
/// pages of a list do not wait: anyone who can create Mirrors can make it long.
const PACE: Duration = Duration::from_millis(100);
/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause for a kind that the API lacks.
const LACKING_PAUSE: Duration = Duration::from_secs(30);
/// The number of consecutive responses after which a kind that was read before counts as removed, and a new agent
/// accepts that it lacks a permission. An API server that has just started denies every permission for a moment, but it
/// never reports an existing kind as missing.
const DENIALS: u32 = 3;

/// One watch, and the receivers of its objects and its state.
pub(super) struct Follower<K: Keep> {
    watched: Watched,
    api: Api<K>,
    config: Config,
    kept: Kept<K>,
    shared: Arc<Shared>,
    /// There is a complete list.
    is_listed: bool,
    /// The number of consecutive lists that were denied.
    denials: u32,
    /// The last problem that was logged.
    told: Option<String>,
}

impl<K: Keep + DeserializeOwned + Send + Sync> Follower<K> {
    pub(super) fn new(
        client: &Client,
        watched: Watched,
        config: Config,
        kept: Kept<K>,
        shared: Arc<Shared>,
    ) -> Self {
        let api = Api::all(impatient(client.clone()));
        Self { watched, api, config, kept, shared, is_listed: false, denials: 0, told: None }
    }

    /// Lists and watches forever.
    pub(super) async fn run(mut self) {
        let mut backoff = DefaultBackoff::default();
        loop {
            let Err(error) = self.follow().await else { continue };
            let longest = match self.lacking(&error) {
                Some(problem) => {
                    self.lack(problem);
                    LACKING_PAUSE
                }
                None => {
                    self.lose(&error);
                    LONGEST_PAUSE
                }
            };
            sleep(backoff.next().unwrap_or(longest).min(longest)).await;
        }
    }

    /// Lists and watches until a failure, a long silence, or until an object that was emptied may fit.
    async fn follow(&mut self) -> watcher::Result<()> {
        let mut events = pin!(watcher::watcher(self.api.clone(), self.config.clone()));
        let again = Instant::now() + Duration::from_secs(self.config.timeout.unwrap_or_default().into());
        loop {
            let event = tokio::select! {
                event = events.try_next() => match event {
                    Err(error) if is_silence(&error) => None,
                    event => event?,
                },
                () = sleep_until(again), if self.kept.may_fit() => None,
            };
            let Some(event) = event else { return Ok(()) };
            let is_complete = matches!(event, Event::InitDone);
            let changes = self.kept.take_in(event);
            if is_complete {
                self.shared.set(self.watched, true);
                (self.is_listed, self.denials) = (true, 0);
                if self.told.take().is_some() {
                    info!(watched = self.watched.name(), "the Kubernetes API is available again");
                }
            }
            if changes {
                self.shared.changed.notify_one();
            }
        }
    }

    /// Returns the problem if the agent gets no objects of an optional kind.
    fn lacking(&mut self, error: &watcher::Error) -> Option<&'static str> {
        let code = match error {
            watcher::Error::InitialListFailed(kube::Error::Api(status)) if self.watched.is_optional() => {
                status.code
            }
            _ => 0,
        };
        self.denials = if matches!(code, 403 | 404) { self.denials + 1 } else { 0 };
        match code {
            404 if !self.is_listed || self.denials >= DENIALS => Some(
                "the cluster has no CRD of this kind, so its objects are ignored; the chart installs it, and \
                 `mirror-agent crds` prints it",
            ),
            // Objects that were read before stay in force, as pods do.
            403 if !self.is_listed && self.denials >= DENIALS => Some(
                "the agent is not allowed to list and watch these objects, so they are ignored; deploy/chart grants it",
            ),
            _ => None,
        }
    }

    /// Continues without objects of this kind. The agent tries again later.
    fn lack(&mut self, problem: &str) {
        self.shared.set(self.watched, true);
        if !is_news(&mut self.told, problem) {
            return;
        }
        info!(watched = self.watched.name(), "{problem}");
        self.is_listed = false;
        self.kept.take_in(Event::Init);
        self.kept.take_in(Event::InitDone);
        self.shared.changed.notify_one();
    }

    /// Continues with the objects that are known.
    fn lose(&mut self, error: &watcher::Error) {
        self.shared.set(self.watched, false);
        (self.shared.restarted)(self.watched);
        let (watched, error) = (self.watched.name(), mirror_client::in_words(error));
        if is_news(&mut self.told, &error) {
            warn!(
                watched,
                error, "the Kubernetes API is unavailable; existing mirrors continue, and the agent retries"
            );
        }
    }
}

/// Whether the watch ended because the server was silent.
fn is_silence(error: &watcher::Error) -> bool {
    let mut causes = successors(Some(error as &(dyn Error + 'static)), |&error| error.source());
    matches!(error, watcher::Error::WatchFailed(_)) && causes.any(|error| error.is::<TimeoutError>())
}

/// Returns the client with limits for the silence of a server that is alive, and for the number of watches.
fn impatient(client: Client) -> Client {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let pace = Arc::new(Mutex::new(pace));
    let answer = move |request: Request<Body>| {
        let (client, pace) = (client.clone(), Arc::clone(&pace));
        async move {
            if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                pace.lock().await.tick().await;
            }
            let response = timeout(ANSWER, client.send(request)).await;
            let response = response.map_err(|_| format!("no answer within {} s", ANSWER.as_secs()))??;
            Ok::<_, BoxError>(response.map(|body| TimeoutBody::new(SILENCE, body)))
        }
    };
    Client::new(service_fn(answer), "default")
}
