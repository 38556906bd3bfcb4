//! [`Kept`]: the objects of one watch, and whether an event of the watch changes anything for the agent.
//!
//! Most changes of an object (its status, its managed fields) do not matter to the agent. Every agent receives them,
//! and must not do further work for them. Uses no clock and no connection; `Follower` passes on the events of a watch.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
};

use kube::{
    Resource,
    runtime::{
        reflector::{Lookup as _, ObjectRef, Store, store, store::Writer},
        watcher::Event,
    },
};
use tracing::warn;

/// The maximum [size](Keep::size) of all objects of one kind in a namespace. Their authors are untrusted, and each agent
/// of the cluster keeps them.
const MOST: usize = 4 << 20;

/// The maximum number of deleted objects that wait for the next round: more than a node has pods.
const MOST_DELETED: usize = 1024;

/// The objects that were deleted since the last call of [`Deleted::take`], in their last state.
#[derive(Debug)]
pub(super) struct Deleted<K: Keep>(Arc<Mutex<HashMap<ObjectRef<K>, Arc<K>>>>);

impl<K: Keep> Deleted<K> {
    /// Takes the objects out.
    pub(super) fn take(&self) -> Vec<Arc<K>> {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *objects).into_values().collect()
    }

    fn note(&self, object: Arc<K>) {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if objects.len() < MOST_DELETED {
            objects.insert(object.to_object_ref(()), object);
        }
    }
}

/// An object of the API that is kept in part.
pub(super) trait Keep: Resource<DynamicType = ()> + Clone + Debug + 'static {
    /// Removes the fields that the agent does not need, including the resource version, which differs after each
    /// change.
    fn trim(&mut self);

    /// The reason why the object cannot be used, if any.
    fn problem(&self) -> Option<String>;

    /// Whether another object, also trimmed, is equal.
    fn is_same(&self, other: &Self) -> bool;

    /// The size that counts against the limit of its namespace.
    fn size(&self) -> usize {
        0
    }

    /// Removes everything but its name, because its namespace exceeds the limit.
    fn empty(&mut self) {}
}

/// A store and its writer.
pub(super) struct Kept<K: Keep> {
    store: Store<K>,
    writer: Writer<K>,
    /// The size of the objects of each namespace.
    taken: BTreeMap<String, usize>,
    /// The largest of these sizes at which an object did not fit, for each namespace with such an object.
    full: BTreeMap<String, usize>,
    /// The deleted objects, if they are to be kept.
    deleted: Option<Deleted<K>>,
}

impl<K: Keep> Kept<K> {
    /// Creates an empty store and its reader.
    pub(super) fn new() -> (Store<K>, Self) {
        let (reader, writer) = store();
        let (taken, full) = (BTreeMap::new(), BTreeMap::new());
        let kept = Self { store: reader.clone(), writer, taken, full, deleted: None };
        (reader, kept)
    }

    /// Starts to keep deleted objects.
    pub(super) fn keep_deleted(&mut self) -> Deleted<K> {
        let objects = Arc::default();
        self.deleted = Some(Deleted(Arc::clone(&objects)));
        Deleted(objects)
    }

    /// Processes an event of a watch. Returns whether it may change the agent's work: a complete list and a deletion
    /// always may, an object only if it has changed.
    pub(super) fn take_in(&mut self, event: Event<K>) -> bool {
        let mut event = event.modify(K::trim);
        let mut changes = false;
        match &mut event {
            Event::Apply(object) | Event::InitApply(object) | Event::Delete(object)
                if object.meta().name.is_none() =>
            {
                warn!(kind = %K::kind(&()), "an object from the Kubernetes API has no name, and is ignored");
                // The store cannot hold it.
                return false;
            }
            Event::Init => {
                self.taken.clear();
                self.full.clear();
            }
            Event::InitApply(object) => {
                self.make_room(object);
                self.is_new(object);
            }
            Event::Apply(object) => {
                self.give_back(object);
                self.make_room(object);
                changes = self.is_new(object);
            }
            Event::Delete(object) => {
                self.give_back(object);
                changes = true;
            }
            Event::InitDone => changes = true,
        }
        let before = match (&self.deleted, &event) {
            (Some(_), Event::InitDone) => self.store.state(),
            _ => Vec::new(),
        };
        self.writer.apply_watcher_event(&event);
        if let Some(deleted) = &self.deleted {
            let is_there = |object: &K| self.store.get(&object.to_object_ref(())).is_some();
            before.into_iter().filter(|object| !is_there(object)).for_each(|object| deleted.note(object));
            if let Event::Delete(object) = event {
                deleted.note(Arc::new(object));
            }
        }
        changes
    }

    /// Whether an object that was emptied since the last list may fit now. A new list shows whether it does.
    pub(super) fn may_fit(&self) -> bool {
        self.full.iter().any(|(namespace, full)| self.taken.get(namespace).is_some_and(|taken| taken < full))
    }

    /// Gives back the room of the stored form of an object.
    fn give_back(&mut self, object: &K) {
        let size = self.store.get(&object.to_object_ref(())).map_or(0, |kept| kept.size());
        if let Some(taken) = object.meta().namespace.as_ref().and_then(|of| self.taken.get_mut(of)) {
            *taken = taken.saturating_sub(size);
        }
    }

    /// Empties the object if it does not fit into the limit of its namespace.
    fn make_room(&mut self, object: &mut K) {
        let Some(namespace) = object.meta().namespace.clone() else { return };
        let taken = self.taken.entry(namespace.clone()).or_default();
        if *taken + object.size() > MOST {
            object.empty();
            let full = self.full.entry(namespace).or_default();
            *full = (*full).max(*taken);
        }
        *taken += object.size();
    }

    /// Whether the object differs from the stored one. Logs an object that differs and cannot be used.
    fn is_new(&self, object: &K) -> bool {
        let is_new = self.store.get(&object.to_object_ref(())).is_none_or(|kept| !kept.is_same(object));
        if is_new && let Some(problem) = object.problem() {
            warn!(problem, "an object from the Kubernetes API cannot be read, and is ignored");
        }
        is_new
    }
}
