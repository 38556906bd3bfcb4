//! [`SettingsSpec`]: the settings of a mirror, as a resource writes them.
//!
//! Numbers are quantities, times are durations of Kubernetes (GEP-2257). Pure: converts to and from [`Settings`], the
//! same settings from annotations and flags, where also their bounds are.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use std::{borrow::Cow, time::Duration};

use kube::KubeSchema;
use mirror_core::settings::{
    self, Budget, DEFAULT_BURST, MAX_BITS_PER_SECOND, MAX_PACKETS_PER_SECOND, MAX_SNAPLEN, MIN_SNAPLEN, Rate,
    Settings, Share, show_kubernetes_duration,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// SettingsSpec selects packets and limits the copies.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SettingsSpec {
    /// Filter in tcpdump's syntax, for example tcp port 443. Only packets that match it are copied. Defaults
    /// to all packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub filter: Option<String>,
    /// Sampling of flows. Defaults to all flows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling: Option<Sampling>,
    /// Limits the copies per second of each NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit: Option<RateLimit>,
    /// Maximum number of bytes to copy of each packet, from its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MIN_SNAPLEN, max = MAX_SNAPLEN))]
    pub snap_length: Option<i32>,
    /// Limits that end the mirror. They apply to each NIC separately, and count from the start of the mirror
    /// on that NIC. The first limit that is reached ends the mirror of that NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// Sampling selects flows. Both directions of a flow are copied, or none.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Sampling {
    /// One flow in this number is copied.
    #[schemars(range(min = 1))]
    pub one_in: i32,
}

/// RateLimit limits the copies per second. If both numbers are present, both apply.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.packetsPerSecond) || has(self.bitsPerSecond)")
        .message("set packetsPerSecond, bitsPerSecond or both"),
    validation = Rule::new(
        "!has(self.burst) || (duration(self.burst) >= duration('1ms') && duration(self.burst) <= duration('10s'))"
    )
    .message("burst must be from 1ms to 10s")
)]
pub struct RateLimit {
    /// Maximum number of packets per second, for example 10k.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<Quantity>,
    /// Maximum number of bits per second, for example 50M.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<Quantity>,
    /// Time for which an unused rate accumulates, from 1ms to 10s. Defaults to 50ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<String>,
}

/// Limits that end a mirror.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(self.duration) || (duration(self.duration) >= duration('1ms') && duration(self.duration) <= duration('8760h'))"
)
.message("duration must be from 1ms to 8760h"))]
pub struct Limits {
    /// Duration after which the mirror ends, in h, m, s and ms, for example 15m or 1h30m; at most 8760h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<String>,
    /// Number of copies after which the mirror ends, for example 100k.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets: Option<Quantity>,
    /// Number of copied bytes after which the mirror ends, for example 1Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Quantity>,
}

/// A whole number, as a number or as a text with k, M, G or T (powers of 1000) or Ki, Mi, Gi or Ti (powers of
/// 1024).
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(untagged)]
pub enum Quantity {
    /// A number. A negative one is refused by [`SettingsSpec::read`], with its field.
    Number(i64),
    /// A text.
    Text(String),
}

impl Quantity {
    /// The number, if it is from 1 to `most`. `field`: its path below `spec`, for the error.
    fn read(&self, field: &str, most: u64) -> Result<u64, String> {
        let (shown, number) = match self {
            Self::Number(number) => (number.to_string(), settings::parse_quantity(&number.to_string())),
            Self::Text(text) => (format!("{text:?}"), settings::parse_quantity(text)),
        };
        match number {
            Ok(number) if number > most => Err(format!("{field} {shown}: use at most {most}")),
            number => number.map_err(|reason| format!("{field} {shown}: {reason}")),
        }
    }
}

impl From<u64> for Quantity {
    fn from(number: u64) -> Self {
        Self::Number(number.try_into().unwrap_or(i64::MAX))
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "minimum": 1,
            "pattern": "^0*[1-9][0-9]*(k|M|G|T|Ki|Mi|Gi|Ti)?$",
        })
    }
}

impl SettingsSpec {
    /// Reads the settings but the filter, which is compiled only for a mirror that gets a slot.
    ///
    /// # Errors
    ///
    /// A message for the author, which begins with the path of the field below `spec`.
    pub fn read(&self) -> Result<Settings, String> {
        let Self { filter: _, sampling, rate_limit, snap_length, limits } = self;
        let sample = match sampling {
            None => None,
            Some(Sampling { one_in }) => match u32::try_from(*one_in) {
                Ok(one_in @ 1..) => Share::one_in(one_in),
                _ => return Err(format!("sampling.oneIn {one_in}: use a number from 1")),
            },
        };
        let snaplen = snap_length.map(|bytes| {
            let text = bytes.to_string();
            settings::parse_snaplen(&text).map_err(|reason| format!("snapLength {text}: {reason}"))
        });
        Ok(Settings {
            sample,
            rate: rate_limit.as_ref().map(RateLimit::read).transpose()?,
            snaplen: snaplen.transpose()?,
            budget: limits.as_ref().map(Limits::read).transpose()?.unwrap_or_default(),
            ..Settings::default()
        })
    }

    /// The settings as a resource writes them, with the text of the filter.
    ///
    /// # Errors
    ///
    /// A message, if the sample is not one flow in a whole number of flows.
    pub fn of(settings: &Settings) -> Result<Self, String> {
        let Settings { filter, sample, seed: _, rate, snaplen, budget } = settings;
        let one_in = |share: &Share| {
            let one_in = share.as_one_in().and_then(|n| i32::try_from(n).ok());
            one_in.ok_or_else(|| "use one flow in a whole number of flows, as in 1/100 or 10%".to_owned())
        };
        Ok(Self {
            filter: filter.as_ref().map(|filter| filter.text.clone()),
            sampling: sample.as_ref().map(one_in).transpose()?.map(|one_in| Sampling { one_in }),
            rate_limit: rate.as_ref().map(RateLimit::of),
            snap_length: snaplen.map(u32::cast_signed),
            limits: (*budget != Budget::default()).then(|| Limits::of(budget)),
        })
    }
}

impl RateLimit {
    /// Reads the rate.
    ///
    /// # Errors
    ///
    /// A message for the author, which begins with the path of the field below `spec`.
    pub fn read(&self) -> Result<Rate, String> {
        let Self { packets_per_second, bits_per_second, burst } = self;
        let packets = packets_per_second.as_ref();
        let packets = packets.map(|of| of.read("rateLimit.packetsPerSecond", MAX_PACKETS_PER_SECOND));
        let bits = bits_per_second.as_ref();
        let bits = bits.map(|of| of.read("rateLimit.bitsPerSecond", MAX_BITS_PER_SECOND));
        let burst = burst.as_ref().map(|text| {
            settings::parse_burst(text).map_err(|reason| format!("rateLimit.burst {text:?}: {reason}"))
        });
        let (packets, bits) = (packets.transpose()?, bits.transpose()?);
        if packets.is_none() && bits.is_none() {
            return Err("rateLimit: set packetsPerSecond, bitsPerSecond or both".to_owned());
        }
        Ok(Rate { packets, bits, burst: burst.transpose()?.unwrap_or(DEFAULT_BURST) })
    }

    fn of(Rate { packets, bits, burst }: &Rate) -> Self {
        Self {
            packets_per_second: packets.map(Quantity::from),
            bits_per_second: bits.map(Quantity::from),
            burst: (*burst != DEFAULT_BURST).then(|| show_kubernetes_duration(*burst)),
        }
    }
}

impl Limits {
    fn read(&self) -> Result<Budget, String> {
        let Self { duration, packets, bytes } = self;
        let time = |text: &String| -> Result<Duration, String> {
            settings::parse_duration(text).map_err(|reason| format!("limits.duration {text:?}: {reason}"))
        };
        Ok(Budget {
            duration: duration.as_ref().map(time).transpose()?,
            packets: packets.as_ref().map(|of| of.read("limits.packets", u64::MAX)).transpose()?,
            bytes: bytes.as_ref().map(|of| of.read("limits.bytes", u64::MAX)).transpose()?,
        })
    }

    fn of(Budget { duration, packets, bytes }: &Budget) -> Self {
        Self {
            duration: duration.map(show_kubernetes_duration),
            packets: packets.map(Quantity::from),
            bytes: bytes.map(Quantity::from),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_core::settings::SETTINGS;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(spec: Value) -> Result<Settings, String> {
        serde_json::from_value::<SettingsSpec>(spec).map_err(|error| error.to_string())?.read()
    }

    /// The same settings as an annotation gives them.
    fn annotated(settings: &[(&'static str, &str)]) -> Settings {
        let mut all = Settings::default();
        settings.iter().for_each(|(key, value)| all.set(key, value).unwrap());
        all
    }

    #[test]
    fn a_resource_and_an_annotation_set_the_same() {
        for (spec, settings) in [
            (json!({ "sampling": { "oneIn": 100 } }), [("sample", "1/100")].as_slice()),
            (json!({ "sampling": { "oneIn": 1 } }), &[("sample", "100%")]),
            (
                json!({ "rateLimit": { "packetsPerSecond": "10k", "bitsPerSecond": 50_000_000 } }),
                &[("rate", "10kpps,50Mbit")],
            ),
            (
                json!({ "rateLimit": { "bitsPerSecond": "10G", "burst": "1s500ms" } }),
                &[("rate", "10Gbit,burst=1500ms")],
            ),
            (json!({ "snapLength": 96 }), &[("snaplen", "96")]),
            (
                json!({ "limits": { "duration": "1h30m", "packets": "100k", "bytes": "1Gi" } }),
                &[("duration", "90m"), ("packets", "100000"), ("bytes", "1GiB")],
            ),
            (json!({}), &[]),
        ] {
            assert_eq!(read(spec.clone()), Ok(annotated(settings)), "{spec}");
        }
    }

    #[test]
    fn a_value_that_cannot_be_used_is_named_with_its_field() {
        for (spec, error) in [
            (json!({ "sampling": { "oneIn": 0 } }), "sampling.oneIn 0: use a number from 1"),
            (json!({ "rateLimit": {} }), "rateLimit: set packetsPerSecond"),
            (
                json!({ "rateLimit": { "packetsPerSecond": "10kpps" } }),
                "rateLimit.packetsPerSecond \"10kpps\": use a whole number",
            ),
            (
                json!({ "rateLimit": { "packetsPerSecond": "2G" } }),
                "rateLimit.packetsPerSecond \"2G\": use at most 1000000000",
            ),
            (json!({ "rateLimit": { "bitsPerSecond": 0 } }), "rateLimit.bitsPerSecond 0: use a whole number"),
            (
                json!({ "rateLimit": { "bitsPerSecond": 1, "burst": "105h" } }),
                "rateLimit.burst \"105h\": a burst is from 1ms to 10s",
            ),
            (
                json!({ "rateLimit": { "packetsPerSecond": -5 } }),
                "rateLimit.packetsPerSecond -5: use a whole number",
            ),
            (
                json!({ "limits": { "packets": i64::MAX } }),
                "limits.packets 9223372036854775807: use a whole number",
            ),
            (json!({ "snapLength": 20000 }), "snapLength 20000: use a number of bytes from 76 to 15616"),
            (json!({ "limits": { "duration": "soon" } }), "limits.duration \"soon\": use a time"),
            (json!({ "limits": { "bytes": "1KB" } }), "limits.bytes \"1KB\": use a whole number"),
        ] {
            let told = read(spec.clone()).unwrap_err();
            assert!(told.starts_with(error), "{spec}: {told}");
        }
        let third = SettingsSpec::of(&annotated(&[("sample", "30%")])).unwrap_err();
        assert!(third.contains("1/100"), "{third}");
    }

    #[test]
    fn each_setting_has_a_field() {
        for setting in &SETTINGS {
            let settings = annotated(&[(setting.key, setting.example)]);
            let spec = SettingsSpec::of(&settings).unwrap();
            assert_ne!(spec, SettingsSpec::default(), "{}", setting.key);
            let filter = spec.filter.as_deref().map(|text| settings::parse_filter(text).unwrap());
            assert_eq!(spec.read().map(|read| Settings { filter, ..read }), Ok(settings));
        }
    }

    proptest! {
        #[test]
        fn settings_can_be_written_and_read(
            one_in in prop::option::of(2..1000_u32), packets in 1..MAX_PACKETS_PER_SECOND, bits in prop::option::of(1..MAX_BITS_PER_SECOND),
            burst in 1..10_000_u64, milliseconds in prop::option::of(1..365 * 86_400_000_u64), bytes in prop::option::of(1..1_u64 << 40),
        ) {
            let settings = Settings {
                sample: one_in.and_then(Share::one_in),
                rate: Some(Rate { packets: Some(packets), bits, burst: Duration::from_millis(burst) }),
                budget: Budget { duration: milliseconds.map(Duration::from_millis), packets: None, bytes },
                ..Settings::default()
            };
            let spec = SettingsSpec::of(&settings).unwrap();
            prop_assert_eq!(spec.read(), Ok(settings));
        }
    }
}
