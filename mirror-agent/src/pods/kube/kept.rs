//! [`Kept`]: the objects of one watch, and whether what a watch tells changes anything for the agent.
//!
//! Most of what happens to an object does not: its status, its labels. Every agent hears of it, and none must do more
//! than that. No clock and no connection; `Follower` hands it what a watch tells.

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
    /// Takes away what nobody needs, the resource version too: it is another one with each change.
    fn trim(&mut self);

    /// Why the object cannot be used, if it cannot.
    fn problem(&self) -> Option<String>;

    /// Whether the other one, trimmed as well, is the same.
    fn is_same(&self, other: &Self) -> bool;
}

/// A store and who writes it.
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

    /// Takes in what a watch tells. Whether that may change what the agent does: a list that is complete and a deletion
    /// always may, an object only if it is not as it was.
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

    /// Whether the object is not as it is in the store. Tells of one that cannot be used, if so.
    fn is_new(&self, object: &K) -> bool {
        let is_new = self.store.get(&object.to_object_ref(())).is_none_or(|kept| !kept.is_same(object));
        if is_new && let Some(problem) = object.problem() {
            warn!(problem, "an object from the Kubernetes API cannot be read, and is left out");
        }
        is_new
    }
}
