//! The settings of a mirror besides the choice of pods: filter, sample, rate, snap length, budgets.
//!
//! Pure: texts in, values or one clear error out, and the same texts from the values. Each setting is one [`Setting`]
//! of [`SETTINGS`]: its key, its texts for people, how it is read and how it is shown. Annotations, flags, `status` and
//! the reference are all made from that list. `mirror_common` decides how the kernel uses the values; `select` decides
//! who may set which of them.

mod descriptor;
mod quantity;
#[cfg(test)]
mod tests;
mod values;

use std::{fmt, time::Duration};

use mirror_common::limit::Limits;

use crate::filter::ebpf::{self, Insn};

pub use self::{
    descriptor::{FILTER, KEYS, SETTINGS, Setting},
    values::{
        MAX_BITS_PER_SECOND, MAX_BURST, MAX_PACKETS_PER_SECOND, MAX_SNAPLEN, MIN_BURST, MIN_SNAPLEN,
        parse_bytes, parse_duration, parse_filter, parse_packets, parse_rate, parse_sample, parse_snaplen,
    },
};

/// The settings of one mirror, for packets of its directions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Which packets; `None`: all.
    pub filter: Option<CaptureFilter>,
    /// Which flows; `None`: all.
    pub sample: Option<Share>,
    /// Seed of the sample, the same on all nodes.
    pub seed: u32,
    /// How many copies a second; `None`: any number.
    pub rate: Option<Rate>,
    /// Bytes that are kept of a copy; `None`: all.
    pub snaplen: Option<u32>,
    /// When the mirror ends.
    pub budget: Budget,
}

/// A filter in pcap-filter(7)'s language, which compiles.
///
/// Two filters are equal if text and program are. The program counts, because an agent with a corrected compiler makes
/// another program of the same text, and the taps must get the new program.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CaptureFilter {
    /// As it was written.
    pub text: String,
    /// The [hash](crate::filter::ebpf::hash) of its program for the kernel.
    pub hash: u64,
}

impl CaptureFilter {
    /// The number of instructions of the program.
    pub const fn length(&self) -> usize {
        ebpf::length(self.hash)
    }

    /// Whether it can say something else of a super-frame than of its segments.
    pub fn differs_on_segments(&self) -> bool {
        crate::filter::differs_on_segments(&self.text)
    }

    /// The program for the kernel, which the dataplane needs only when it loads the program.
    pub fn instructions(&self) -> Result<Vec<Insn>, String> {
        values::instructions(&self.text)
    }
}

impl fmt::Debug for CaptureFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// A share of flows in units of 2^-32; never 0, and less than all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share(pub u32);

/// A limit on copies. At least one of `packets` and `bits` is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Packets a second, from 1 to [`MAX_PACKETS_PER_SECOND`].
    pub packets: Option<u64>,
    /// Bits a second, of whole frames, from 1 to [`MAX_BITS_PER_SECOND`].
    pub bits: Option<u64>,
    /// How long an unused rate is saved up, from [`MIN_BURST`] to [`MAX_BURST`], in whole milliseconds.
    pub burst: Duration,
}

/// The bounds after which a mirror ends. The first bound that is reached ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budget {
    /// Time since it began.
    pub duration: Option<Duration>,
    /// Packets copied.
    pub packets: Option<u64>,
    /// Bytes copied.
    pub bytes: Option<u64>,
}

/// The limits of a whole node, with any annotations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeLimits {
    /// For the copies of all pods and interfaces together.
    pub max_rate: Option<Rate>,
    /// For the copies of each pod.
    pub max_pod_rate: Option<Rate>,
    /// For the copies of all pods of each namespace.
    pub max_namespace_rate: Option<Rate>,
}

/// [`NodeLimits`] in the kernel's prices; zeros: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ceilings {
    /// For all copies together.
    pub node: Limits,
    /// For the copies of each pod.
    pub pod: Limits,
    /// For the copies of all pods of each namespace.
    pub namespace: Limits,
    /// The share of `node` that each pod gets, with any traffic of the others.
    pub share: Limits,
}

/// A value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{key} {value:?}: {reason}")]
pub struct SettingError {
    /// The annotation or flag.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// The problem, and a valid form.
    pub reason: String,
}

impl Settings {
    /// Sets the setting `key`, one of [`KEYS`].
    pub fn set(&mut self, key: &'static str, value: &str) -> Result<(), SettingError> {
        self.set_with(key, value, parse_filter)
    }

    /// As [`Self::set`], with another way to a filter than to compile it.
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

    /// The settings, as people read them: `filter "tcp port 443"`, `rate 10kpps,50Mbit`; in the order of [`SETTINGS`].
    pub fn words(&self) -> Vec<String> {
        let word = |setting: &Setting| {
            let value = setting.show(self)?;
            let quote = if setting.is_quoted { "\"" } else { "" };
            Some(format!("{} {quote}{value}{quote}", setting.key))
        };
        SETTINGS.iter().filter_map(word).collect()
    }

    /// Whether two sets of settings are the same request: the texts of the filters count, and not the programs; the seed
    /// counts where there is a sample.
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
    /// The prices that the kernel charges. For a rate within its bounds none of them is 0, and none overflows.
    pub fn limits(&self) -> Limits {
        let Self { packets, bits, burst } = self;
        // A burst that an older agent left in the maps may be out of bounds.
        Limits::of_rate(packets.unwrap_or(0), bits.unwrap_or(0), (*burst).max(MIN_BURST))
    }
}

impl NodeLimits {
    /// Whether there is any limit.
    pub fn is_limited(&self) -> bool {
        *self != Self::default()
    }

    /// The limits that the kernel applies while so many pods and interfaces are tapped.
    pub fn ceilings(&self, owners: usize) -> Ceilings {
        let limits = |rate: Option<Rate>| rate.map_or_else(Limits::default, |rate| rate.limits());
        let node = limits(self.max_rate);
        let share = node.share(u32::try_from(owners).unwrap_or(u32::MAX).max(1));
        let (pod, namespace) = (limits(self.max_pod_rate), limits(self.max_namespace_rate));
        Ceilings { node, pod, namespace, share }
    }
}
