//! Mirrors and ClusterMirrors: their requests, and the pods that they select.
//!
//! Pure. A resource with an invalid part is refused as a whole. `choose` calls this module for the resources of each pod.

use std::collections::{BTreeMap, BTreeSet};

use super::{Capture, Filters, Nics, Policy, Why};
use crate::{
    destination::Destination,
    model::{MirrorId, Name, Origin, Place, Pod, PodId, Request, Resource, ResourceId, Session, TargetName},
    settings::{FILTER, SETTINGS, SettingError, Settings},
};

/// The sort key by which the mirrors of a pod get session slots: the rank of the origin, the time of the request if it
/// is known, the name.
pub(super) type InQueue = (u32, i64, MirrorId);

/// Enforced mirrors come first, then those of the administrator, then resources, then annotations.
pub(super) const fn rank(origin: Origin) -> u32 {
    match origin {
        Origin::Enforced => 0,
        Origin::Policy | Origin::Interface => 1,
        Origin::ClusterMirror | Origin::Mirror => 2,
        Origin::Annotation(Place::Namespace) => 3,
        Origin::Annotation(Place::Pod) => 4,
        Origin::Capture | Origin::Reader => 5,
    }
}

/// The reason for a filter that cannot be used.
const INVALID_FILTER: &str = "InvalidFilter";
/// The reason for any other field that cannot be used.
const INVALID_SPEC: &str = "InvalidSpec";

/// A resource, or the request of a reader, that selects pods of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Kind, namespace and name.
    pub id: ResourceId,
    /// `metadata.uid`.
    pub uid: String,
    /// The generation that was read.
    pub generation: i64,
    /// The resource's mirror on each pod.
    pub mirror: MirrorId,
    /// Why the resource has no effect on any pod: the reason in one word, and an explanation.
    pub refused: Option<(&'static str, String)>,
    /// The target of its copies; `default` if it is refused.
    pub target: TargetName,
    /// The NICs that it requests.
    pub nics: Nics,
    /// The pods that it selects.
    pub pods: BTreeSet<PodId>,
}

/// All resources of a round.
pub(super) struct Resources<'r> {
    read: Vec<Read<'r>>,
    /// Indexes into `read`: of the Mirrors by their namespace, and of the ClusterMirrors under `None`.
    by_namespace: BTreeMap<Option<&'r str>, Vec<usize>>,
    /// The pods that each resource selects, by its index in `read`.
    pods: BTreeMap<usize, BTreeSet<PodId>>,
    /// The Mirrors whose namespace is not allowed to use their target, by the index in `read`.
    not_allowed: BTreeMap<usize, Why>,
}

/// A parsed resource.
pub(super) struct Read<'r> {
    resource: &'r Resource,
    /// The reader of the API whose request it is.
    reader: Option<&'r Capture>,
    /// The resource's mirror on each pod.
    mirror: MirrorId,
    /// The request, which is the same on each pod.
    asks: Result<Draft<'r>, Why>,
}

/// A mirror of a pod, with its filter not compiled yet: filters are compiled only for mirrors that get a slot.
#[derive(Clone)]
pub(super) struct Draft<'t> {
    /// The session, without its author's filter.
    pub(super) session: Session,
    /// The NICs that it requests.
    pub(super) nics: Nics,
    /// The filter as written, and its author.
    pub(super) filter: Option<(&'t str, Author<'t>)>,
}

/// The author of a filter.
#[derive(Clone, Copy)]
pub(super) enum Author<'t> {
    /// The author of an annotation.
    Annotation(Place),
    /// The author of a resource.
    Resource(&'t ResourceId),
}

impl Draft<'_> {
    /// Compiles the filter. Returns the complete session.
    pub(super) fn compiled(mut self, filters: &mut Filters) -> Result<(Session, Nics), Why> {
        if let Some((text, author)) = self.filter {
            let set = self.session.settings.set_with(FILTER, text, |text| filters.get(text));
            set.map_err(|error| match author {
                Author::Annotation(place) => Why::BadSetting(place, error),
                Author::Resource(id) => Why::Refused {
                    resource: id.clone(),
                    reason: INVALID_FILTER,
                    message: format!("spec.{error}"),
                },
            })?;
        }
        Ok((self.session, self.nics))
    }
}

impl<'r> Read<'r> {
    /// Whether the pod's namespace is allowed to use the target. ClusterMirrors can use all targets.
    fn may_use_target(&self, pod: &Pod, policy: &Policy) -> Result<(), Why> {
        match &self.asks {
            Ok(Draft { session, .. }) if session.origin == Origin::Mirror => {
                policy.may_use(&session.target, pod)
            }
            _ => Ok(()),
        }
    }

    /// The sort key among the mirrors of a pod.
    pub(super) fn place(&self) -> InQueue {
        // Readers come last, in the order in which they began: the kernel's ids of rings grow.
        let (origin, created) = match self.reader {
            Some(reader) => (reader.origin, reader.ring.0.into()),
            None => (self.resource.origin(), self.resource.created),
        };
        (rank(origin), created, self.mirror.clone())
    }

    /// The resource's mirror on the pod. `narrowed`: why annotations exclude the pod.
    pub(super) fn draft(&self, pod: &Pod, policy: &Policy, narrowed: Option<&Why>) -> Result<Draft<'r>, Why> {
        let origin = self.resource.origin();
        let is_bound = origin == Origin::Mirror || self.reader.is_some();
        let barred = policy.bars(&pod.id.namespace);
        let barred = barred.filter(|why| is_bound || *why == Why::NamespaceExcluded);
        match barred.as_ref().or(narrowed.filter(|_| origin != Origin::Enforced)) {
            Some(why) => Err(why.clone()),
            None => self.asks.clone().and_then(|asked| self.may_use_target(pod, policy).map(|()| asked)),
        }
    }
}

impl<'r> Resources<'r> {
    /// Parses the resources, and the requests of readers, except for their filters.
    pub(super) fn read(resources: &'r [Resource], captures: &'r [Capture], policy: &Policy) -> Self {
        let of_readers = captures.iter().filter_map(|capture| Some((capture.resource()?, Some(capture))));
        let read = |(resource, reader): (&'r Resource, Option<&'r Capture>)| {
            let mirror = reader.map_or_else(|| resource.id.mirror(), Capture::mirror);
            Read { resource, reader, mirror, asks: asks(resource, reader, policy) }
        };
        let resources = resources.iter().map(|resource| (resource, None));
        let read: Vec<_> = resources.chain(of_readers).map(read).collect();
        let mut by_namespace = BTreeMap::<_, Vec<_>>::new();
        for (place, Read { resource, .. }) in read.iter().enumerate() {
            by_namespace.entry(resource.id.namespace.as_deref()).or_default().push(place);
        }
        Self { read, by_namespace, pods: BTreeMap::new(), not_allowed: BTreeMap::new() }
    }

    /// Returns the resources that select a pod, and notes them.
    pub(super) fn selecting(&mut self, pod: &Pod, policy: &Policy) -> Vec<&Read<'r>> {
        let of = |namespace| self.by_namespace.get(&namespace).into_iter().flatten().copied();
        let candidates = of(None).chain(of(Some(pod.id.namespace.as_str())));
        let selects = |place: &usize| self.read.get(*place).is_some_and(|read| read.resource.selects(pod));
        let places: Vec<_> = candidates.filter(selects).collect();
        for place in &places {
            self.pods.entry(*place).or_default().insert(pod.id.clone());
            let why = self.read.get(*place).and_then(|read| read.may_use_target(pod, policy).err());
            self.not_allowed.extend(why.map(|why| (*place, why)));
        }
        places.into_iter().filter_map(|place| self.read.get(place)).collect()
    }

    /// Returns the resources that have selected a pod. `filters` has compiled the filters of mirrors with a slot.
    pub(super) fn into_selected(self, filters: &mut Filters) -> Vec<Selected> {
        let Self { read, mut pods, not_allowed, .. } = self;
        let selected = |(place, read): (usize, Read<'_>)| {
            let Resource { id, uid, generation, .. } = read.resource;
            let asks = read.asks.and_then(|draft| match draft.filter {
                // None of the resource's mirrors has a slot.
                Some((text, _)) if !filters.knows(text) => Ok((draft.session, draft.nics)),
                _ => draft.compiled(filters),
            });
            let (target, nics, refused) = match asks {
                Ok((session, nics)) => (session.target, nics, not_allowed.get(&place).map(Why::told)),
                Err(why) => (TargetName::default(), Nics::default(), Some(why.told())),
            };
            Some(Selected {
                id: id.clone(),
                uid: uid.clone(),
                generation: *generation,
                mirror: read.mirror,
                refused,
                target,
                nics,
                pods: pods.remove(&place)?,
            })
        };
        let mut selected: Vec<_> = read.into_iter().enumerate().filter_map(selected).collect();
        selected.sort_by(|a, b| a.id.cmp(&b.id));
        selected
    }
}

impl Why {
    /// The reason in one word, and an explanation for the author of a resource.
    fn told(&self) -> (&'static str, String) {
        match self {
            Self::Refused { reason, message, .. } => (reason, message.clone()),
            why => (why.name(), why.to_string()),
        }
    }
}

/// Why no node can use a resource, whatever its targets: the reason in one word, and an explanation.
pub fn refusal(resource: &Resource) -> Option<(&'static str, String)> {
    let mut policy = Policy::default();
    let target = resource.request.as_ref().ok().and_then(|request| request.target.as_deref()?.parse().ok());
    policy.targets.extend(target.map(|name| (TargetName(name), Destination::Stream)));
    let asks = asks(resource, None, &policy).and_then(|draft| draft.compiled(&mut Filters::default()));
    asks.err().map(|why| why.told())
}

/// Parses the request of a resource, or of a reader of the API.
fn asks<'r>(resource: &'r Resource, reader: Option<&Capture>, policy: &Policy) -> Result<Draft<'r>, Why> {
    let refuse = |message| Why::Refused { resource: resource.id.clone(), reason: INVALID_SPEC, message };
    let Request { nics, directions, settings, filter, target } =
        resource.request.as_ref().map_err(|problem| refuse(problem.clone()))?;
    // The node's defaults do not apply: no spec could express "no limit", and flags of a node would change an enforced
    // mirror. The seed of samples is the same on all nodes.
    let settings = Settings { seed: policy.settings.seed, ..settings.clone() };
    let written: Vec<_> = SETTINGS.iter().filter_map(|of| Some((of.key, of.show(&settings)?))).collect();
    // A resource that was deleted and created again is a new request, so a used-up budget begins again.
    let uid = Some(resource.uid.as_str());
    let texts = [("uid", uid), (FILTER, filter.as_deref()), ("target", target.as_deref())];
    let texts = texts.into_iter().filter_map(|(key, text)| Some((key, text?)));
    let written = written.iter().map(|(key, text)| (*key, text.as_str()));
    let asked = Session::asked(*directions, written.chain(texts));
    let filter = filter.as_deref().map(|text| (text, Author::Resource(&resource.id)));
    let nics = match nics {
        None => Nics::default(),
        Some(names) => Nics::parse(&names.join(",")).map_err(|reason| {
            let error = SettingError { key: "nics", value: names.join(","), reason };
            refuse(format!("spec.{error}"))
        })?,
    };
    let (target, origin) = match reader {
        Some(reader) => (reader.target(), reader.origin),
        None => (policy.target_named(Some(target.as_deref().unwrap_or(Name::DEFAULT)))?, resource.origin()),
    };
    let session = Session { directions: *directions, settings, target, origin, asked, key: None };
    Ok(Draft { session, nics, filter })
}

#[cfg(test)]
mod tests;
