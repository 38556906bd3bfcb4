//! [`Bounded`]: the parts of a resource's object that the agent reads, with a limit for their size. Pure.
//!
//! The authors of resources are untrusted, and a server may hold objects that are older than the limits in the CRDs: an
//! object has up to 1.5 MB, and many times that in memory. So parts that exceed the limit are left out while the object
//! is decoded, and are never in memory as a whole.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// The maximum size of the parts of an object, with [`EACH`] bytes added for each value: more than the CRDs allow.
const MOST: usize = 128 << 10;
/// The size of a value in memory in addition to its text.
const EACH: usize = 32;
/// The fields of `metadata` that are kept.
const METADATA: [&str; 6] =
    ["name", "namespace", "uid", "generation", "creationTimestamp", "resourceVersion"];
/// The reason for refusing an object that exceeds the limit.
pub(super) const TOO_LARGE: &str = "spec: it has more than 128 KiB, counting 32 bytes for each value: make it smaller, or use several mirrors";

/// The parts of an object that the agent reads.
#[derive(Debug)]
pub struct Bounded {
    /// Its `metadata`, limited to [`METADATA`], and its `spec`.
    pub(super) object: Value,
    /// The `spec` exceeds the limit, and is left out.
    pub(super) is_too_large: bool,
    /// The approximate size in memory.
    pub(super) size: usize,
}

/// Decodes any JSON.
impl<'de> Deserialize<'de> for Bounded {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::decode(deserializer, None)
    }
}

impl Bounded {
    /// Decodes an object, and its status too if it is given a place. The status has its own limit; null if it exceeds
    /// it.
    pub(super) fn decode<'de, D: Deserializer<'de>>(
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

/// The position of a value in the object.
#[derive(Clone, Copy)]
enum Of {
    Object,
    Metadata,
    Spec,
}

impl Of {
    /// Returns the position of the value with this key, if it is kept.
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

/// Decodes a value until the limit is reached.
struct Part<'b> {
    of: Of,
    left: &'b mut usize,
    /// The place for the `status` of the object, if it is read.
    status: Option<&'b mut Value>,
}

impl Part<'_> {
    /// Reserves room for a value with `text` bytes. Returns whether there is any left.
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
            let (text, mut read) = (object.to_string(), json!(7));
            let mut from = serde_json::Deserializer::from_str(&text);
            let object = Bounded::decode(&mut from, Some(&mut read)).unwrap();
            (read == json!(status), read.is_null(), object.is_too_large)
        };
        assert_eq!(of(10, 10), (true, false, false));
        assert_eq!(of(900, 900), (true, false, false));
        assert_eq!(of(10_000, 900), (false, true, false));
        assert_eq!(of(900, 10_000), (true, false, true));
    }

    proptest! {
        /// A decoded object never exceeds the limit, and is either complete or marked as too large.
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
