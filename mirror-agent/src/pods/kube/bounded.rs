//! [`Bounded`]: the parts of an object of the Kubernetes API that a resource is read from. Pure.
//!
//! Authors of resources are strangers, and a server may hold objects that are older than the bounds of the CRDs: an object
//! has 1.5 MB at most, and many times as much in memory. What exceeds the bound is left out while it is decoded, so that it
//! is never there as a whole.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// Most bytes of the parts of an object, with [`EACH`] for each value: more than an object can have that the CRDs allow.
const MOST: usize = 128 << 10;
/// What a value takes in memory besides its text.
const EACH: usize = 32;
/// The fields of `metadata` that are kept.
const METADATA: [&str; 6] =
    ["name", "namespace", "uid", "generation", "creationTimestamp", "resourceVersion"];
/// Why an object that exceeds the bound is refused.
pub(super) const TOO_LARGE: &str = "spec: it has more than 128 KiB, counting 32 bytes for each value: make it smaller, or use several mirrors";

/// The parts of an object.
#[derive(Debug)]
pub(crate) struct Bounded {
    /// Its `metadata`, as far as it is needed, and its `spec`.
    pub(crate) object: Value,
    /// The `spec` exceeds the bound, and is left out.
    pub(super) is_too_large: bool,
    /// What it takes in memory, about.
    pub(super) size: usize,
}

/// Any JSON can be decoded.
impl<'de> Deserialize<'de> for Bounded {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::decode(deserializer, None)
    }
}

impl Bounded {
    fn decode<'de, D: Deserializer<'de>>(
        deserializer: D,
        status: Option<&mut Value>,
    ) -> Result<Self, D::Error> {
        let mut left = MOST;
        let mut object = Part { of: Of::Object, left: &mut left, status }.deserialize(deserializer)?;
        let is_too_large = left == 0;
        if let (true, Some(fields)) = (is_too_large, object.as_object_mut()) {
            fields.remove("spec");
        }
        Ok(Self { object, is_too_large, size: if is_too_large { 0 } else { MOST - left } })
    }
}

/// The same parts, and the `status`, which has a bound of its own.
#[derive(Debug)]
pub(crate) struct WithStatus {
    pub(crate) object: Bounded,
    /// Null if it exceeds the bound.
    pub(crate) status: Value,
}

/// Any JSON can be decoded.
impl<'de> Deserialize<'de> for WithStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut status = Value::Null;
        let object = Bounded::decode(deserializer, Some(&mut status))?;
        Ok(Self { object, status })
    }
}

/// Where a value is.
#[derive(Clone, Copy)]
enum Of {
    Object,
    Metadata,
    Spec,
}

impl Of {
    /// Where the value of this key is, if it is kept.
    fn inside(self, key: &str) -> Option<Self> {
        match (self, key) {
            (Self::Object, "metadata") => Some(Self::Metadata),
            (Self::Object, "spec") => Some(Self::Spec),
            (Self::Object, _) => None,
            (Self::Metadata, key) => METADATA.contains(&key).then_some(Self::Spec),
            (Self::Spec, _) => Some(Self::Spec),
        }
    }
}

/// Decodes a value, as long as there is something left of the bound.
struct Part<'b> {
    of: Of,
    left: &'b mut usize,
    /// Where the `status` of the object is put, if it is asked for.
    status: Option<&'b mut Value>,
}

impl Part<'_> {
    /// Takes room for a value with so many bytes of text.
    fn take(&mut self, text: usize) -> bool {
        *self.left = self.left.saturating_sub(EACH + text);
        *self.left > 0
    }

    fn plain<E>(mut self, value: impl Into<Value>) -> Result<Value, E> {
        self.take(0);
        Ok(value.into())
    }
}

impl<'de> DeserializeSeed<'de> for Part<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        self.plain(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        self.plain(value)
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        self.plain(value)
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        self.plain(value)
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        self.plain(value)
    }

    fn visit_str<E>(mut self, value: &str) -> Result<Value, E> {
        Ok(if self.take(value.len()) { value.into() } else { Value::Null })
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut values: A) -> Result<Value, A::Error> {
        let mut kept = Vec::new();
        self.take(0);
        while *self.left > 0 {
            let part = Part { of: self.of, left: &mut *self.left, status: None };
            let Some(value) = values.next_element_seed(part)? else { return Ok(kept.into()) };
            kept.push(value);
        }
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Null)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut fields: A) -> Result<Value, A::Error> {
        let mut kept = Map::new();
        self.take(0);
        while let Some(key) = fields.next_key::<String>()? {
            if let (Of::Object, "status", Some(status)) = (self.of, key.as_str(), &mut self.status) {
                let mut left = MOST;
                let value = fields.next_value_seed(Part { of: Of::Spec, left: &mut left, status: None })?;
                **status = if left > 0 { value } else { Value::Null };
                continue;
            }
            match self.of.inside(&key) {
                Some(of) if self.take(key.len()) => {
                    let value = fields.next_value_seed(Part { of, left: &mut *self.left, status: None })?;
                    kept.insert(key, value);
                }
                _ => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        Ok(kept.into())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_a_resource_is_read_from_is_decoded_and_counted() {
        let much = vec!["x".repeat(100); 20_000];
        let (metadata, spec) = (
            json!({"name": "a", "uid": "1", "generation": 3}),
            json!({"podSelector": {}, "snaplen": -1, "limits": {"bytes": 1.5, "packets": null}, "nics": ["eth0", true]}),
        );
        let mut object = json!({"metadata": metadata, "spec": spec, "status": much, "kind": "Mirror"});
        object["metadata"]["managedFields"] = json!(much);
        let Bounded { object, is_too_large, .. } = serde_json::from_str(&object.to_string()).unwrap();
        assert_eq!((object, is_too_large), (json!({"metadata": metadata, "spec": spec}), false));
        for text in ["7", "[1, [2]]", "\"x\"", "null", "{\"metadata\": 7, \"spec\": [[]]}"] {
            assert!(!serde_json::from_str::<Bounded>(text).unwrap().is_too_large, "{text}");
        }
    }

    #[test]
    fn a_status_has_a_bound_of_its_own() {
        let of = |values: usize, spec: usize| {
            let (spec, status) = (vec!["x".repeat(100); spec], vec!["x".repeat(100); values]);
            let object = json!({"metadata": {"name": "a"}, "status": status, "spec": {"nics": spec}});
            let read: WithStatus = serde_json::from_str(&object.to_string()).unwrap();
            (read.status == json!(status), read.status.is_null(), read.object.is_too_large)
        };
        assert_eq!(of(10, 10), (true, false, false));
        assert_eq!(of(900, 900), (true, false, false));
        assert_eq!(of(10_000, 900), (false, true, false));
        assert_eq!(of(900, 10_000), (true, false, true));
    }

    proptest! {
        /// What is decoded is never more than the bound, and a part is never taken for the whole.
        #[test]
        fn what_exceeds_the_bound_is_left_out(texts in prop::collection::vec((0..40_usize, 0..3000_usize), 0..6)) {
            let lists: Vec<_> = texts.iter().map(|(bytes, count)| vec!["x".repeat(*bytes); *count]).collect();
            let text = json!({"metadata": {"name": "a"}, "spec": {"podSelector": lists}}).to_string();
            let Bounded { object, is_too_large, size } = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&object["metadata"]["name"], "a");
            let bytes: usize = texts.iter().map(|(bytes, count)| (EACH + bytes) * count).sum();
            if is_too_large {
                prop_assert!(object.get("spec").is_none() && bytes > MOST / 3);
            } else {
                prop_assert_eq!(&object["spec"]["podSelector"], &json!(lists));
                prop_assert!(bytes < MOST && size >= bytes && size < bytes + 1000);
            }
        }
    }
}
