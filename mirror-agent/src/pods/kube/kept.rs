//! [`Kept`]: the objects of one watch, and whether an event of the watch changes anything for the agent.
//!
//! Most changes of an object change nothing for the agent: its status, its managed fields. Every agent receives them, and none
//! must do further work for them. No clock and no connection; `Follower` hands over the events of a watch.

use std::fmt::Debug;

use kube::{
    Resource,
    runtime::{
        reflector::{Lookup as _, Store, store, store::Writer},
        watcher::Event,
    },
};
use tracing::warn;

/// An object of the API of which a part is kept.
pub(super) trait Keep: Resource<DynamicType = ()> + Clone + Debug + 'static {
    /// Removes the fields that the agent does not need, the resource version too: it differs after each change.
    fn trim(&mut self);

    /// Why the object cannot be used, if it cannot.
    fn problem(&self) -> Option<String>;

    /// Whether the other one, trimmed as well, is the same.
    fn is_same(&self, other: &Self) -> bool;
}

/// A store and its writer.
pub(super) struct Kept<K: Keep> {
    store: Store<K>,
    writer: Writer<K>,
}

impl<K: Keep> Kept<K> {
    /// Without objects, with its reader.
    pub(super) fn new() -> (Store<K>, Self) {
        let (reader, writer) = store();
        (reader.clone(), Self { store: reader, writer })
    }

    /// Takes in an event of a watch. Returns whether it may change the agent's work: a complete list and a deletion
    /// always may, an object only if it has changed.
    pub(super) fn take_in(&mut self, event: Event<K>) -> bool {
        let event = event.modify(K::trim);
        let changes = match &event {
            Event::Apply(object) | Event::InitApply(object) | Event::Delete(object)
                if object.meta().name.is_none() =>
            {
                warn!(kind = %K::kind(&()), "an object from the Kubernetes API has no name, and is left out");
                // The store cannot take it.
                return false;
            }
            Event::Apply(object) => self.is_new(object),
            Event::InitApply(object) => {
                self.is_new(object);
                false
            }
            Event::Delete(_) | Event::InitDone => true,
            Event::Init => false,
        };
        self.writer.apply_watcher_event(&event);
        changes
    }

    /// Whether the object differs from the stored one. Logs an object that differs and cannot be used.
    fn is_new(&self, object: &K) -> bool {
        let is_new = self.store.get(&object.to_object_ref(())).is_none_or(|kept| !kept.is_same(object));
        if is_new && let Some(problem) = object.problem() {
            warn!(problem, "an object from the Kubernetes API cannot be read, and is left out");
        }
        is_new
    }
}
