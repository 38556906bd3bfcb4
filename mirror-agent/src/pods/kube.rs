//! [`KubePods`]: the pods of one node and the annotations of their namespaces, from the Kubernetes API.
//!
//! Two watches, each with a store; a snapshot joins the stores. There is no snapshot before both have been listed
//! completely. While the API is away the stores stay unchanged. When it is back, each is listed again as a whole, so
//! that a deletion is believed only if a list shows it. This module selects nothing, and writes nothing to the API:
//! `crate::events` does that.

#[cfg(test)]
pub(crate) mod fake;
mod follow;
pub mod installation;
mod kept;
mod object;
mod seen;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Config,
    core::PartialObjectMeta,
    runtime::reflector::{ObjectRef, Store},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::Instant,
};
use tracing::warn;

use self::{follow::Follower, installation::Installation, kept::Kept, object::PodObject, seen::Seen};
use super::{PodSource, SourceState};
use crate::model::{Pod, PodId};

/// The server ends a watch after these many seconds (the API takes seconds), which differ between agents: otherwise all
/// agents that were cut off at the same moment would begin their watches again at the same moments, for ever. A watch
/// that is silent for longer is dead: so an API server that was cut off without notice is noticed after a minute or a
/// little more.
const WATCH_TIMEOUT: RangeInclusive<u32> = 60..=75;
/// How long a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// How long the server may be silent: longer than the longest watch without news.
const SILENCE: Duration = Duration::from_secs(*WATCH_TIMEOUT.end() as u64 + 15);

/// The watched kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// The pods of the node.
    Pods,
    /// The namespaces, by their metadata only.
    Namespaces,
}

impl Watched {
    /// The word for logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
        }
    }
}

/// A source of pods that follows the Kubernetes API.
pub struct KubePods {
    pods: Store<PodObject>,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    shared: Arc<Shared>,
    /// The pods with the same UID that were logged.
    twins: Mutex<BTreeSet<PodId>>,
    /// They end with this value.
    _watches: JoinSet<()>,
}

/// Connects to the API that the environment names: `KUBECONFIG`, `~/.kube/config`, or the API of the cluster that this
/// process is a pod of. Sends no request yet.
pub async fn connect() -> anyhow::Result<Client> {
    let mut config = Config::infer().await.context(
        "cannot find the Kubernetes API; set KUBECONFIG, run in a pod with a service account, or use --pods-from",
    )?;
    config.connect_timeout = Some(CONNECT_DEADLINE);
    // From the last request on: a connection that lay idle in between is not to blame.
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    Client::try_from(config).context("cannot use the configuration for the Kubernetes API")
}

impl KubePods {
    /// Starts to follow the pods of `node`. `restarted` is called for each watch that begins again after a failure.
    /// Must be called in a tokio runtime.
    pub fn watch(client: Client, node: &str, restarted: impl Fn(Watched) + Send + Sync + 'static) -> Self {
        let (pods, kept_pods) = Kept::new();
        let (namespaces, kept_namespaces) = Kept::new();
        let shared = Arc::new(Shared {
            changed: Notify::new(),
            state: watch::Sender::new(SourceState::Starting),
            each: Mutex::new([SourceState::Starting; 2]),
            restarted: Box::new(restarted),
        });
        let mut watches = JoinSet::new();
        let follow_pods = Follower {
            watched: Watched::Pods,
            api: Api::<PodObject>::all(client.clone()),
            kept: kept_pods,
            shared: Arc::clone(&shared),
            fields: Some(format!("spec.nodeName={node}")),
            watch_seconds: watch_seconds(node),
            seen: Seen::default(),
        };
        watches.spawn(follow_pods.run());
        let follow_namespaces = Follower {
            watched: Watched::Namespaces,
            api: Api::<PartialObjectMeta<Namespace>>::all(client),
            kept: kept_namespaces,
            shared: Arc::clone(&shared),
            fields: None,
            watch_seconds: watch_seconds(node),
            seen: Seen::default(),
        };
        watches.spawn(follow_namespaces.run());
        Self { pods, namespaces, shared, twins: Mutex::default(), _watches: watches }
    }

    /// The DaemonSet `name` in `namespace` that this agent is a pod of.
    pub fn installation(&self, client: Client, namespace: String, name: String) -> Installation {
        Installation::new(client, self.namespaces.clone(), namespace, name)
    }
}

impl PodSource for KubePods {
    fn snapshot(&self) -> Option<Arc<[Pod]>> {
        if !self.shared.is_listed() {
            return None;
        }
        let mut inherited = BTreeMap::new();
        let with_inherited = |object: Arc<PodObject>| {
            let mut pod = object.pod()?.clone();
            let of_namespace = inherited.entry(pod.id.namespace.clone()).or_insert_with(|| {
                let namespace = self.namespaces.get(&ObjectRef::new(&pod.id.namespace))?;
                namespace.metadata.annotations.clone().map(Arc::new)
            });
            // A namespace that is not known yet, or cannot be read, may say that its pods are not to be mirrored.
            pod.inherited = Arc::clone(of_namespace.as_ref()?);
            Some(pod)
        };
        let pods = self.pods.state().into_iter().filter_map(with_inherited).collect();
        let (pods, twins) = without_twins(pods);
        let mut told = self.twins.lock().unwrap_or_else(PoisonError::into_inner);
        for PodId { uid, namespace, name } in twins.difference(&told) {
            warn!(pod = %format_args!("{namespace}/{name}"), uid, "not mirrored: another pod says that it has the same UID");
        }
        *told = twins;
        Some(pods.into())
    }

    async fn changed(&mut self) {
        self.shared.changed.notified().await;
    }

    fn state(&self) -> watch::Receiver<SourceState> {
        self.shared.state.subscribe()
    }
}

/// The pods in a fixed order, and apart from them the pods that share a UID. The order matters because the store has
/// none, and the first of two claims to a device wins. Of two pods with one UID, one claims falsely to be the picture
/// of a static pod, and the agent cannot tell which.
fn without_twins(mut pods: Vec<Pod>) -> (Vec<Pod>, BTreeSet<PodId>) {
    let mut times = BTreeMap::<_, u32>::new();
    for pod in &pods {
        *times.entry(pod.id.uid.clone()).or_default() += 1;
    }
    let twins = pods.extract_if(.., |pod| times.get(&pod.id.uid) != Some(&1)).map(|pod| pod.id).collect();
    pods.sort_by(|a, b| a.id.cmp(&b.id));
    (pods, twins)
}

/// How many seconds a watch of the agent of `node` lasts.
fn watch_seconds(node: &str) -> u32 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    let spread = hasher.finish() % u64::from(WATCH_TIMEOUT.end() - WATCH_TIMEOUT.start() + 1);
    WATCH_TIMEOUT.start() + u32::try_from(spread).unwrap_or(0)
}

/// The state that the two watches share.
struct Shared {
    changed: Notify,
    state: watch::Sender<SourceState>,
    /// Of each watch.
    each: Mutex<[SourceState; 2]>,
    restarted: Box<dyn Fn(Watched) + Send + Sync>,
}

impl Shared {
    /// Both have been listed completely, now or before the API went away.
    fn is_listed(&self) -> bool {
        !matches!(*self.state.borrow(), SourceState::Starting)
    }

    /// Notes the state of one watch. A watch that has never been listed stays `Starting`.
    fn set(&self, watched: Watched, is_current: bool) {
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut each[watched as usize];
        *state = match (is_current, *state) {
            (true, _) => SourceState::Current,
            (false, SourceState::Current) => SourceState::Away { since: Instant::now() },
            (false, before) => before,
        };
        let joined = join(*each);
        self.state.send_if_modified(|state| std::mem::replace(state, joined) != joined);
    }
}

/// The state of a source from those of its parts.
fn join([a, b]: [SourceState; 2]) -> SourceState {
    use SourceState::{Away, Current, Starting};
    match (a, b) {
        (Starting, _) | (_, Starting) => Starting,
        (Away { since: a }, Away { since: b }) => Away { since: a.min(b) },
        (Away { since }, Current) | (Current, Away { since }) => Away { since },
        (Current, Current) => Current,
    }
}
