//! Converts Mirrors, ClusterMirrors and MirrorTargets of the Kubernetes API to the agent's types. Pure; [`kube`](super)
//! stores them.
//!
//! A resource is accepted as a whole, or refused as a whole: a field that this version of the agent does not know could
//! narrow the mirror.

mod target;

use std::{borrow::Cow, fmt::Debug};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use kube::core::ObjectMeta;
use mirror_api::{ClusterMirror, ClusterMirrorSpec, Direction, Mirror, MirrorSpec};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    bounded::{Bounded, TOO_LARGE},
    kept::Keep,
};
use crate::model::{Directions, Name, Request, Resource, ResourceId, Selector};

/// The reason for refusing a Mirror that exceeds the limit of its namespace.
const NO_ROOM: &str = "spec: this namespace has room for 256 Mirrors of 16 KiB, or for fewer larger ones, counting 32 bytes for each value: delete some of them";

/// The smallest size that counts: the agent has reasons and reports for each pair of a pod and a Mirror, however small
/// that is.
const LEAST: usize = 16 << 10;

/// A kind of resource.
pub trait Kind: kube::Resource<DynamicType = ()> + Clone + Debug + 'static {
    /// The agent's type for this kind.
    type Read: Clone + Debug + PartialEq + Send + Sync;

    /// Reads an object. An error gives the reason why its name is invalid.
    fn read(object: &Bounded) -> Result<Self::Read, String>;

    /// The part of a valid object that cannot be used, for the log.
    fn problem(read: &Self::Read) -> Option<String>;

    /// Removes everything but its name, because its namespace exceeds the limit.
    fn empty(_: &mut Self::Read) {}
}

/// A kind of resource that requests mirrors.
trait Asks: Kind {
    /// Its `spec`.
    type Spec: DeserializeOwned + Serialize;

    /// The part of the `spec` that all these kinds have.
    fn mirror(spec: Self::Spec) -> MirrorSpec;
}

impl Asks for Mirror {
    type Spec = MirrorSpec;

    fn mirror(spec: MirrorSpec) -> MirrorSpec {
        spec
    }
}

impl Asks for ClusterMirror {
    type Spec = ClusterMirrorSpec;

    fn mirror(spec: ClusterMirrorSpec) -> MirrorSpec {
        spec.mirror
    }
}

impl Kind for Mirror {
    type Read = Resource;

    fn read(object: &Bounded) -> Result<Resource, String> {
        resource::<Self>(object)
    }

    fn problem(read: &Resource) -> Option<String> {
        problem(read)
    }

    fn empty(read: &mut Resource) {
        read.pods = Selector::nothing();
        read.request = Err(NO_ROOM.to_owned());
    }
}

impl Kind for ClusterMirror {
    type Read = Resource;

    fn read(object: &Bounded) -> Result<Resource, String> {
        resource::<Self>(object)
    }

    fn problem(read: &Resource) -> Option<String> {
        problem(read)
    }
}

fn problem(resource: &Resource) -> Option<String> {
    let problem = resource.request.as_ref().err()?;
    Some(format!("{}: {problem}", resource.id))
}

/// A resource: the name under which it is stored, and the data that the agent needs, or the reason why these cannot be
/// read.
///
/// Any JSON can be decoded to this type, so that one invalid object does not block all others.
#[derive(Debug, Clone)]
pub(crate) struct ResourceObject<K: Kind, S = ()> {
    pub(crate) metadata: ObjectMeta,
    pub(crate) read: Result<K::Read, String>,
    /// The approximate size in memory, at least [`LEAST`].
    size: usize,
    /// For the controller: the `status`, or `None` if it has another form.
    pub(crate) status: S,
}

impl<K: Kind, S> ResourceObject<K, S> {
    fn new(bounded: &Bounded, status: S) -> Self {
        Self { read: K::read(bounded), metadata: metadata(bounded), size: bounded.size.max(LEAST), status }
    }

    /// The resource as the agent's type, if its name is valid.
    pub(super) fn read(&self) -> Option<&K::Read> {
        self.read.as_ref().ok()
    }
}

impl<K: Kind> Keep for ResourceObject<K> {
    fn trim(&mut self) {
        self.metadata.resource_version = None;
    }

    fn problem(&self) -> Option<String> {
        match &self.read {
            Ok(read) => K::problem(read),
            Err(problem) => Some(format!("{}: {problem}", K::kind(&()))),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        self.read == other.read
    }

    fn size(&self) -> usize {
        self.size
    }

    fn empty(&mut self) {
        self.size = 0;
        if let Ok(read) = &mut self.read {
            K::empty(read);
        }
    }
}

impl<'de, K: Kind> Deserialize<'de> for ResourceObject<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::new(&Bounded::deserialize(deserializer)?, ()))
    }
}

impl<'de, K: Kind, S: DeserializeOwned> Deserialize<'de> for ResourceObject<K, Option<S>> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut status = Value::Null;
        let object = Bounded::decode(deserializer, Some(&mut status))?;
        Ok(Self::new(&object, Option::deserialize(status).ok().flatten()))
    }
}

/// The metadata of an object that the agent needs.
fn metadata(Bounded { object, .. }: &Bounded) -> ObjectMeta {
    let text = |field: &str| object["metadata"][field].as_str().map(str::to_owned);
    ObjectMeta {
        name: text("name"),
        namespace: text("namespace"),
        resource_version: text("resourceVersion"),
        uid: text("uid"),
        generation: object["metadata"]["generation"].as_i64(),
        ..ObjectMeta::default()
    }
}

fn resource<K: Asks>(Bounded { object, is_too_large, .. }: &Bounded) -> Result<Resource, String> {
    let (metadata, spec) = (&object["metadata"], &object["spec"]);
    let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
    let namespace = metadata["namespace"].as_str().map(str::to_owned);
    let name = text("name").parse::<Name>()?;
    let created = Time::deserialize(&metadata["creationTimestamp"]);
    let mut request = match is_too_large {
        true => Err(TOO_LARGE.to_owned()),
        false => understood::<K::Spec>(spec).and_then(|spec| request(K::mirror(spec))),
    };
    let mut select = |field: &str| {
        if *is_too_large {
            return Selector::nothing();
        }
        let selector = LabelSelector::deserialize(&spec[field]).map_err(|error| error.to_string());
        selector.and_then(self::selector).unwrap_or_else(|problem| {
            request = Err(format!("spec.{field}: {problem}"));
            Selector::nothing()
        })
    };
    // A Mirror selects its own namespace.
    let namespaces = if namespace.is_some() { Selector::default() } else { select("namespaceSelector") };
    Ok(Resource {
        pods: select("podSelector"),
        pod_name: None,
        namespaces,
        id: ResourceId { namespace, name },
        uid: text("uid"),
        generation: metadata["generation"].as_i64().unwrap_or(0),
        created: created.map_or(0, |Time(time)| time.as_second()),
        is_enforced: spec["enforced"].as_bool().unwrap_or(false),
        request,
    })
}

/// Decodes a value. Fails if the type does not have all parts of it.
fn understood<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T, String> {
    let decoded = T::deserialize(value).map_err(|error| format!("spec: {error}"))?;
    let again = serde_json::to_value(&decoded).map_err(|error| format!("spec: {error}"))?;
    match lost(value, &again, "spec") {
        Some(path) => Err(format!("{path}: this version of the agent does not know this field")),
        None => Ok(decoded),
    }
}

/// Returns the path of a part of `value` that is not in `again`.
fn lost(value: &Value, again: &Value, path: &str) -> Option<String> {
    match (value, again) {
        (Value::Object(fields), Value::Object(known)) => {
            fields.iter().find_map(|(name, field)| match known.get(name) {
                Some(known) => lost(field, known, &format!("{path}.{name}")),
                None => Some(format!("{path}.{name}")),
            })
        }
        (Value::Array(values), Value::Array(known)) => {
            values.iter().zip(known).find_map(|(value, known)| lost(value, known, path))
        }
        _ => None,
    }
}

fn request(spec: MirrorSpec) -> Result<Request, String> {
    let MirrorSpec { pod_selector: _, nics, direction, settings, target_ref } = spec;
    Ok(Request {
        nics,
        directions: directions(direction),
        settings: settings.read().map_err(|problem| format!("spec.{problem}"))?,
        filter: settings.filter,
        target: target_ref.map(|target| target.name),
    })
}

/// The directions as the agent's type.
pub(crate) const fn directions(direction: Option<Direction>) -> Directions {
    match direction {
        None | Some(Direction::Both) => Directions::Both,
        Some(Direction::Ingress) => Directions::Ingress,
        Some(Direction::Egress) => Directions::Egress,
    }
}

/// The selector as the agent's type, or the reason why it cannot be used.
pub(crate) fn selector(selector: LabelSelector) -> Result<Selector, String> {
    let selector = serde_json::to_value(selector).and_then(Selector::deserialize);
    selector.map_err(|error| error.to_string())
}

impl<K: Kind, S> kube::Resource for ResourceObject<K, S> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(_: &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group(_: &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version(_: &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural(_: &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests;
