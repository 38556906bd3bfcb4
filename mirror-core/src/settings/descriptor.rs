//! The settings and the list of them. Pure. Each setting has one entry with its parser, formatter and documentation, so
//! they cannot be mixed up.
//!
//! The list is independent of flags and annotation prefixes: `cli` and `select` add those to the keys.

use super::{
    Budget, CaptureFilter, Rate, SettingError, Share,
    values::{
        parse_bytes, parse_duration, parse_packets, parse_rate, parse_sample, parse_snaplen, show_bytes,
        show_duration, show_packets, show_rate, show_sample,
    },
};

/// Compiles a filter: the compiler itself, or a cache in front of it.
pub(super) type Compile<'a> = &'a mut dyn FnMut(&str) -> Result<CaptureFilter, String>;

/// The settings of one mirror, for the packets of its directions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// The packets to copy. `None`: all.
    pub filter: Option<CaptureFilter>,
    /// The flows to copy. `None`: all.
    pub sample: Option<Share>,
    /// Seed of the sample. It is the same on all nodes.
    pub seed: u32,
    /// Maximum rate of copies. `None`: no limit.
    pub rate: Option<Rate>,
    /// Maximum bytes of a copy. `None`: no limit.
    pub snaplen: Option<u32>,
    /// The bounds that end the mirror.
    pub budget: Budget,
}

/// The full description of a setting.
#[derive(Debug)]
pub struct Setting {
    /// Key of the setting: an annotation with the prefix `podmirror.io/`, a flag with `--`.
    pub key: &'static str,
    /// The environment variable of the flag.
    pub env: &'static str,
    /// The placeholder for the value in a usage line.
    pub value_name: &'static str,
    /// The effect, a comma, and the accepted values.
    pub help: &'static str,
    /// A typical value.
    pub example: &'static str,
    /// Whether the value is a text of several words, which is printed in quotation marks.
    is_quoted: bool,
    parse: fn(&mut Settings, &str, Compile<'_>) -> Result<(), String>,
    show: fn(&Settings) -> Option<String>,
}

/// The key of the setting whose value is compiled.
pub const FILTER: &str = "filter";

/// All settings, in output order.
pub static SETTINGS: [Setting; 7] = [
    Setting {
        key: FILTER,
        env: "PODMIRROR_FILTER",
        value_name: "EXPR",
        help: "Filter of the packets to copy, in tcpdump's syntax (pcap-filter(7))",
        example: "tcp port 443 and not net 10.0.0.0/8",
        is_quoted: true,
        parse: |settings, text, compile| compile(text).map(|filter| settings.filter = Some(filter)),
        show: |settings| settings.filter.as_ref().map(|filter| filter.text.clone()),
    },
    Setting {
        key: "sample",
        env: "PODMIRROR_SAMPLE",
        value_name: "SHARE",
        help: "Share of the flows to copy, as a fraction (1/100) or a percentage (10%)",
        example: "1/100",
        is_quoted: false,
        parse: |settings, text, _| parse_sample(text).map(|share| settings.sample = share),
        show: |settings| settings.sample.map(show_sample),
    },
    Setting {
        key: "rate",
        env: "PODMIRROR_RATE",
        value_name: "RATE",
        help: "Maximum copies per second of each NIC, in packets (10kpps), in bits (50Mbit) or both (10kpps,50Mbit); \
               optionally with the time for which an unused rate accumulates (,burst=100ms), from 1ms to 10s",
        example: "10kpps,50Mbit,burst=100ms",
        is_quoted: false,
        parse: |settings, text, _| parse_rate(text).map(|rate| settings.rate = Some(rate)),
        show: |settings| settings.rate.as_ref().map(show_rate),
    },
    Setting {
        key: "snaplen",
        env: "PODMIRROR_SNAPLEN",
        value_name: "BYTES",
        help: "Bytes to copy of each packet, from 76 to 15616",
        example: "96",
        is_quoted: false,
        parse: |settings, text, _| parse_snaplen(text).map(|bytes| settings.snaplen = Some(bytes)),
        show: |settings| settings.snaplen.map(|bytes| bytes.to_string()),
    },
    Setting {
        key: "duration",
        env: "PODMIRROR_DURATION",
        value_name: "TIME",
        help: "End after this time, in ms, s, m, h and d (90s, 1h30m), at most 365d",
        example: "15m",
        is_quoted: false,
        parse: |settings, text, _| parse_duration(text).map(|time| settings.budget.duration = Some(time)),
        show: |settings| settings.budget.duration.map(show_duration),
    },
    Setting {
        key: "packets",
        env: "PODMIRROR_PACKETS",
        value_name: "N",
        help: "End after this many copies of each NIC, a number with an optional k, M or G",
        example: "100k",
        is_quoted: false,
        parse: |settings, text, _| parse_packets(text).map(|count| settings.budget.packets = Some(count)),
        show: |settings| settings.budget.packets.map(show_packets),
    },
    Setting {
        key: "bytes",
        env: "PODMIRROR_BYTES",
        value_name: "BYTES",
        help: "End after this many copied bytes of each NIC, a number with an optional k, M, G, T (decimal) or Ki, Mi, Gi, \
               Ti (binary), and an optional B",
        example: "1Gi",
        is_quoted: false,
        parse: |settings, text, _| parse_bytes(text).map(|bytes| settings.budget.bytes = Some(bytes)),
        show: |settings| settings.budget.bytes.map(show_bytes),
    },
];

impl Setting {
    /// The setting with this key.
    pub fn named(key: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.key == key)
    }

    /// Parses `value` into `settings`; `compile` compiles a filter. After an error `settings` is unchanged.
    pub fn set(
        &self,
        settings: &mut Settings,
        value: &str,
        compile: Compile<'_>,
    ) -> Result<(), SettingError> {
        (self.parse)(settings, value, compile).map_err(|reason| SettingError {
            key: self.key,
            value: value.to_owned(),
            reason,
        })
    }

    /// Formats the value, so that [`Self::set`] parses it to the same value. `None`: not set.
    pub fn show(&self, settings: &Settings) -> Option<String> {
        (self.show)(settings)
    }

    /// The key and the value, such as `filter "tcp port 443"`.
    pub(crate) fn word(&self, value: &str) -> String {
        format!("{} {}", self.key, self.quoted(value))
    }

    /// The effect and the value, such as `Bytes to copy of each packet: 96`.
    pub(crate) fn sentence(&self, value: &str) -> String {
        let effect = self.help.split(", ").next().unwrap_or(self.help);
        format!("{effect}: {}", self.quoted(value))
    }

    fn quoted(&self, value: &str) -> String {
        if self.is_quoted { format!("\"{value}\"") } else { value.to_owned() }
    }
}
