//! The settings of a mirror apart from the choice of pods: filter, sample, rate, snap length, budgets.
//!
//! Pure: parses texts into values or an error message, and formats values as the same texts. Each setting is one
//! [`Setting`] of [`SETTINGS`]: its key, its descriptions, its parser and its formatter. Annotations, the flags of the
//! agent and the plugin, `status`, `explain` and the reference are generated from that list. `mirror_common` defines
//! how the kernel uses the values; `select` decides who can set them.

mod descriptor;
mod quantity;
#[cfg(test)]
mod tests;
mod values;

use std::{collections::BTreeMap, fmt, time::Duration};

use mirror_common::limit::Limits;

use crate::filter::ebpf::{self, Insn};

pub use self::{
    descriptor::{FILTER, SETTINGS, Setting, Settings},
    values::{
        DEFAULT_BURST, MAX_BITS_PER_SECOND, MAX_BURST, MAX_PACKETS_PER_SECOND, MAX_SNAPLEN, MIN_BURST,
        MIN_SNAPLEN, parse_burst, parse_bytes, parse_duration, parse_filter, parse_packets, parse_quantity,
        parse_rate, parse_sample, parse_snaplen, show_kubernetes_duration,
    },
};

/// A compiled filter in the language of pcap-filter(7).
///
/// Two filters are equal if both their texts and their programs are. An agent with a corrected compiler generates
/// another program from the same text, and the taps must get that program.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CaptureFilter {
    /// The text as written.
    pub text: String,
    /// The [hash](crate::filter::ebpf::hash) of the program for the kernel.
    pub hash: u64,
}

impl CaptureFilter {
    /// Number of instructions of the program.
    pub const fn length(&self) -> usize {
        ebpf::length(self.hash)
    }

    /// Whether the filter can give a different result for a super-frame than for its segments.
    pub fn differs_on_segments(&self) -> bool {
        crate::filter::differs_on_segments(&self.text)
    }

    /// Generates the program for the kernel. The dataplane needs it only when it loads the program.
    pub fn instructions(&self) -> Result<Vec<Insn>, String> {
        values::instructions(&self.text)
    }
}

impl fmt::Debug for CaptureFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// A share of flows in units of 2^-32. Never 0, and less than all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share(pub u32);

/// A limit on copies. At least one of `packets` and `bits` is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Packets per second, from 1 to [`MAX_PACKETS_PER_SECOND`].
    pub packets: Option<u64>,
    /// Bits per second, of whole frames, from 1 to [`MAX_BITS_PER_SECOND`].
    pub bits: Option<u64>,
    /// The time for which unused rate accumulates, from [`MIN_BURST`] to [`MAX_BURST`], in whole milliseconds.
    pub burst: Duration,
}

/// The bounds that end a mirror. The first bound that is reached ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budget {
    /// Time since the mirror began.
    pub duration: Option<Duration>,
    /// Packets copied.
    pub packets: Option<u64>,
    /// Bytes copied.
    pub bytes: Option<u64>,
}

/// The limits of a node, whatever annotations say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeLimits {
    /// Limit for the copies of all pods and interfaces together.
    pub max_rate: Option<Rate>,
    /// Limit for the copies of each pod.
    pub max_pod_rate: Option<Rate>,
    /// Limit for the copies of all pods of each namespace.
    pub max_namespace_rate: Option<Rate>,
}

/// [`NodeLimits`] in the units of the kernel's meters. Zeros: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ceilings {
    /// Limit for all copies together.
    pub node: Limits,
    /// Limit for the copies of each pod.
    pub pod: Limits,
    /// Limit for the copies of all pods of each namespace.
    pub namespace: Limits,
    /// The share of `node` that each pod gets, whatever the traffic of the others.
    pub share: Limits,
}

/// A value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{key} {value:?}: {reason}")]
pub struct SettingError {
    /// The annotation or flag.
    pub key: &'static str,
    /// The invalid value.
    pub value: String,
    /// The problem, and a valid form.
    pub reason: String,
}

impl Settings {
    /// Sets the setting with this key.
    pub fn set(&mut self, key: &'static str, value: &str) -> Result<(), SettingError> {
        self.set_with(key, value, parse_filter)
    }

    /// As [`Self::set`], but `filter` replaces the filter compiler.
    pub fn set_with(
        &mut self,
        key: &'static str,
        value: &str,
        mut filter: impl FnMut(&str) -> Result<CaptureFilter, String>,
    ) -> Result<(), SettingError> {
        match Setting::named(key) {
            Some(setting) => setting.set(self, value, &mut filter),
            None => {
                let reason = "there is no such setting".into();
                Err(SettingError { key, value: value.to_owned(), reason })
            }
        }
    }

    /// The settings in readable form, such as `filter "tcp port 443"` or `rate 10kpps,50Mbit`, in the order of
    /// [`SETTINGS`].
    pub fn words(&self) -> Vec<String> {
        SETTINGS.iter().filter_map(|setting| Some(setting.word(&setting.show(self)?))).collect()
    }

    /// The values of the settings that are set, by key.
    pub fn texts(&self) -> BTreeMap<String, String> {
        let text = |setting: &Setting| Some((setting.key.to_owned(), setting.show(self)?));
        SETTINGS.iter().filter_map(text).collect()
    }

    /// Whether two sets of settings are the same request. The texts of the filters are compared, not the programs; the
    /// seed is compared only if there is a sample.
    pub fn asks_the_same(&self, other: &Self) -> bool {
        let text = |settings: &Self| settings.filter.as_ref().map(|filter| filter.text.clone());
        let seed = |settings: &Self| settings.sample.map_or(0, |_| settings.seed);
        let without = |settings: &Self| Self { filter: None, seed: seed(settings), ..settings.clone() };
        text(self) == text(other) && without(self) == without(other)
    }

    /// Whether the kernel must keep a meter for the session.
    pub fn is_metered(&self) -> bool {
        self.rate.is_some() || self.budget != Budget::default()
    }
}

impl Rate {
    /// The prices of packets and bytes in the kernel's meters. For a rate within its bounds none of them is 0, and none
    /// overflows.
    pub fn limits(&self) -> Limits {
        let Self { packets, bits, burst } = self;
        // A burst that an older agent left in the maps can be out of bounds.
        Limits::of_rate(packets.unwrap_or(0), bits.unwrap_or(0), (*burst).max(MIN_BURST))
    }
}

impl NodeLimits {
    /// Whether any limit is set.
    pub fn is_limited(&self) -> bool {
        *self != Self::default()
    }

    /// Effective limits for a number of tapped pods and interfaces.
    pub fn ceilings(&self, owners: usize) -> Ceilings {
        let limits = |rate: Option<Rate>| rate.map_or_else(Limits::default, |rate| rate.limits());
        let node = limits(self.max_rate);
        let share = node.share(u32::try_from(owners).unwrap_or(u32::MAX).max(1));
        let (pod, namespace) = (limits(self.max_pod_rate), limits(self.max_namespace_rate));
        Ceilings { node, pod, namespace, share }
    }
}
