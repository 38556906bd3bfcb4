//! [`KubePods`]: the pods of one node, the annotations and labels of their namespaces, and the Mirrors, ClusterMirrors
//! and MirrorTargets, from the Kubernetes API.
//!
//! There are five watches, each with a store. A snapshot joins the stores, and exists only after all have been listed
//! completely. A cluster can lack the last three kinds: then their stores are empty. While the API is unreachable, the
//! stores stay unchanged. Afterwards each kind is listed again completely, so that an object counts as deleted only if
//! a list shows it. This module selects nothing and writes nothing to the API: `crate::report::events` and
//! `crate::report::mirror_node` do that.

mod bounded;
mod follow;
pub mod installation;
mod kept;
mod object;
mod resource;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
};

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Client,
    core::{ObjectMeta, PartialObjectMeta},
    runtime::{
        reflector::{ObjectRef, Store},
        watcher::Config,
    },
};
use mirror_api::{ClusterMirror, Mirror, MirrorTarget};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::Instant,
};

pub(crate) use self::resource::{ResourceObject, directions, selector};
pub use self::{bounded::Bounded, resource::Kind};
use self::{
    follow::Follower,
    installation::Installation,
    kept::{Deleted, Keep, Kept},
    object::{PodObject, TOO_LONG},
};
use super::{PodSource, SourceState, static_pods::StaticPods};
use crate::model::{Pod, Resource, TargetResource};

/// The duration of a watch in seconds, after which the server ends it (`timeoutSeconds`). It differs between agents:
/// otherwise all agents that were disconnected at the same moment would restart their watches together forever.
const WATCH_TIMEOUT: RangeInclusive<u32> = 420..=540;

/// The watched kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// The pods of the node.
    Pods,
    /// The namespaces, by their metadata only.
    Namespaces,
    /// The Mirrors of all namespaces.
    Mirrors,
    /// The ClusterMirrors.
    ClusterMirrors,
    /// The MirrorTargets.
    MirrorTargets,
}

impl Watched {
    /// The name in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
            Self::Mirrors => "mirrors",
            Self::ClusterMirrors => "clustermirrors",
            Self::MirrorTargets => "mirrortargets",
        }
    }

    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::Pods, Self::Namespaces, Self::Mirrors, Self::ClusterMirrors, Self::MirrorTargets];

    /// The page size of a list. The authors of the objects are untrusted, and an object has up to 1.5 MB.
    const fn page(self) -> u32 {
        match self {
            Self::Namespaces => 128,
            Self::Pods | Self::Mirrors | Self::ClusterMirrors | Self::MirrorTargets => 8,
        }
    }

    /// Whether a cluster can lack objects of this kind, because their CRD is not installed or the agent may not read
    /// them.
    const fn is_optional(self) -> bool {
        matches!(self, Self::Mirrors | Self::ClusterMirrors | Self::MirrorTargets)
    }
}

/// A source of pods that follows the Kubernetes API.
pub struct KubePods {
    pods: Store<PodObject>,
    deleted: Deleted<PodObject>,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    mirrors: Store<ResourceObject<Mirror>>,
    cluster_mirrors: Store<ResourceObject<ClusterMirror>>,
    targets: Store<ResourceObject<MirrorTarget>>,
    shared: Arc<Shared>,
    static_pods: Mutex<StaticPods>,
    /// The tasks of the watches, which end with this value.
    _watches: JoinSet<()>,
}

impl KubePods {
    /// Starts to follow the pods of `node`. `restarted` is called for each watch that is restarted after a failure.
    /// Must be called in a tokio runtime.
    pub fn watch(client: Client, node: &str, restarted: impl Fn(Watched) + Send + Sync + 'static) -> Self {
        let shared = Arc::new(Shared {
            changed: Notify::new(),
            state: watch::Sender::new(SourceState::Starting),
            each: Mutex::new([SourceState::Starting; Watched::ALL.len()]),
            restarted: Box::new(restarted),
        });
        let mut watches = Watches { client, shared, seconds: watch_seconds(node), tasks: JoinSet::new() };
        let (pods, mut kept) = Kept::new();
        let deleted = kept.keep_deleted();
        watches.follow_into(kept, Watched::Pods, Some(format!("spec.nodeName={node}")));
        Self {
            pods,
            deleted,
            namespaces: watches.follow(Watched::Namespaces),
            mirrors: watches.follow(Watched::Mirrors),
            cluster_mirrors: watches.follow(Watched::ClusterMirrors),
            targets: watches.follow(Watched::MirrorTargets),
            shared: watches.shared,
            static_pods: Mutex::default(),
            _watches: watches.tasks,
        }
    }

    /// Follows this agent's DaemonSet, `name` in `namespace`.
    pub fn installation(&self, client: Client, namespace: String, name: String) -> Installation {
        Installation::new(client, self.namespaces.clone(), namespace, name)
    }

    /// Returns the pods of these objects, with the annotations and labels of their namespaces, and the hashes that they
    /// claim.
    fn pods_of(&self, objects: Vec<Arc<PodObject>>) -> Vec<(Pod, Option<String>)> {
        let mut inherited = BTreeMap::new();
        let with_inherited = |object: Arc<PodObject>| {
            let mut pod = object.pod()?.clone();
            let of_namespace = inherited.entry(pod.id.namespace.clone()).or_insert_with(|| {
                let namespace = self.namespaces.get(&ObjectRef::new(&pod.id.namespace))?;
                Some(OfNamespace::new(&namespace))
            });
            // An unknown namespace may have an annotation against mirroring its pods, so the pod is left out.
            let OfNamespace { annotations, labels, unread } = of_namespace.as_ref()?;
            (pod.inherited, pod.namespace_labels) = (Arc::clone(annotations), Arc::clone(labels));
            pod.unread = pod.unread.or_else(|| unread.clone());
            Some((pod, object.hash().cloned()))
        };
        objects.into_iter().filter_map(with_inherited).collect()
    }
}

/// The watches that have been started.
struct Watches {
    client: Client,
    shared: Arc<Shared>,
    /// The duration of a watch in seconds.
    seconds: u32,
    tasks: JoinSet<()>,
}

impl Watches {
    /// Starts to follow the objects of one kind.
    fn follow<K: Keep + DeserializeOwned + Send + Sync>(&mut self, watched: Watched) -> Store<K> {
        let (store, kept) = Kept::new();
        self.follow_into(kept, watched, None);
        store
    }

    /// Starts to follow the objects of one kind, limited by this field selector.
    fn follow_into<K: Keep + DeserializeOwned + Send + Sync>(
        &mut self,
        kept: Kept<K>,
        watched: Watched,
        fields: Option<String>,
    ) {
        let mut config = Config::default().timeout(self.seconds).page_size(watched.page());
        config.field_selector = fields;
        let follower = Follower::new(&self.client, watched, config, kept, Arc::clone(&self.shared));
        self.tasks.spawn(follower.run());
    }
}

/// The data that pods inherit from their namespace.
struct OfNamespace {
    annotations: Arc<BTreeMap<String, String>>,
    labels: Arc<BTreeMap<String, String>>,
    /// The reason why the annotations are unknown.
    unread: Option<String>,
}

impl OfNamespace {
    fn new(namespace: &PartialObjectMeta<Namespace>) -> Self {
        let ObjectMeta { annotations, labels, .. } = &namespace.metadata;
        let unread =
            annotations.is_none().then(|| format!("the annotations of its namespace have {TOO_LONG}"));
        let arc = |texts: &Option<BTreeMap<_, _>>| Arc::new(texts.clone().unwrap_or_default());
        Self { annotations: arc(annotations), labels: arc(labels), unread }
    }
}

impl PodSource for KubePods {
    fn snapshot(&self) -> Option<Arc<[Pod]>> {
        if !self.shared.is_listed() {
            return None;
        }
        let pods = self.pods_of(self.pods.state());
        let mut pods = self.static_pods.lock().unwrap_or_else(PoisonError::into_inner).settle(pods);
        // The store has no order, and the first of two claims to a device wins.
        pods.sort_by(|a, b| a.id.cmp(&b.id));
        Some(pods.into())
    }

    fn deleted(&self) -> Vec<Pod> {
        let pods = self.pods_of(self.deleted.take());
        self.static_pods.lock().unwrap_or_else(PoisonError::into_inner).settle_deleted(pods)
    }

    fn resources(&self) -> Arc<[Resource]> {
        let (mirrors, cluster_mirrors) = (self.mirrors.state(), self.cluster_mirrors.state());
        let mirrors = mirrors.iter().filter_map(|mirror| mirror.read());
        let cluster_mirrors = cluster_mirrors.iter().filter_map(|mirror| mirror.read());
        mirrors.chain(cluster_mirrors).cloned().collect()
    }

    fn targets(&self) -> Arc<[TargetResource]> {
        self.targets.state().iter().filter_map(|target| target.read()).cloned().collect()
    }

    async fn changed(&mut self) {
        self.shared.changed.notified().await;
    }

    fn state(&self) -> watch::Receiver<SourceState> {
        self.shared.state.subscribe()
    }
}

/// Returns the duration of a watch in seconds, for the agent of `node`.
fn watch_seconds(node: &str) -> u32 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    let spread = hasher.finish() % u64::from(WATCH_TIMEOUT.end() - WATCH_TIMEOUT.start() + 1);
    WATCH_TIMEOUT.start() + u32::try_from(spread).unwrap_or(0)
}

/// The state that the watches share.
struct Shared {
    changed: Notify,
    state: watch::Sender<SourceState>,
    /// The state of each watch.
    each: Mutex<[SourceState; Watched::ALL.len()]>,
    restarted: Box<dyn Fn(Watched) + Send + Sync>,
}

impl Shared {
    /// Whether all kinds have been listed completely, even if the API is unreachable now.
    fn is_listed(&self) -> bool {
        !matches!(*self.state.borrow(), SourceState::Starting)
    }

    /// Records the state of one watch. A watch that has never been listed stays `Starting`.
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

/// Combines the states of the parts of a source.
fn join(parts: impl IntoIterator<Item = SourceState>) -> SourceState {
    use SourceState::{Away, Current, Starting};
    parts.into_iter().fold(Current, |a, b| match (a, b) {
        (Starting, _) | (_, Starting) => Starting,
        (Away { since: a }, Away { since: b }) => Away { since: a.min(b) },
        (Away { since }, Current) | (Current, Away { since }) => Away { since },
        (Current, Current) => Current,
    })
}
