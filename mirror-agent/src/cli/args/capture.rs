//! The flags of `tail` and `capture`.
//!
//! Except for `--bpffs`, these flags have no environment variables: in the agent's container, the variables are set
//! for the agent itself.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::bail;
use clap::{ArgGroup, Args};

use super::{
    StateArgs,
    boolean::{Boolean as _, interface, spaced},
    directions,
    settings::value_of,
    target_name,
};
use crate::{
    capture::recording::Bound,
    kernel::dataplane::rings::MAX_RINGS,
    model::{Directions, TargetName},
    settings::{parse_bytes, parse_duration},
};

/// Room in a ring if the user names none, in bytes.
const RING: u32 = 4 << 20;
/// The greatest ring, in bytes: what an agent has for all of them.
const MAX_RING: u32 = MAX_RINGS;
/// The least ring, in bytes: some super-frames.
const MIN_RING: u32 = 1 << 18;

/// Whose packets are read, and which.
#[derive(Debug, Clone, Args)]
pub struct SubjectArgs {
    /// Interfaces of the node.
    #[arg(value_name = "IFACE", value_parser = interface, required_unless_present_any = ["pods", "target"])]
    pub interfaces: Vec<String>,
    /// Pod of this node, by namespace and name, with all its NICs. Can be repeated. Needs a running agent on the node.
    #[arg(long = "pod", value_name = "NAMESPACE/NAME", value_parser = pod)]
    pub pods: Vec<(String, String)>,
    /// Target of the agent that is a stream (--define-target NAME=stream of `mirror-agent run` and `attach`), whose
    /// copies are read. Its mirrors have their own directions and settings, so --direction, --filter, --sample and
    /// --snaplen cannot be used with it.
    #[arg(long, value_name = "NAME", value_parser = target_name, conflicts_with_all = ["interfaces", "pods"])]
    pub target: Option<TargetName>,
    /// Direction of the packets, as seen from the pod, or from an interface without a pod [default: both].
    #[arg(long, value_parser = directions())]
    pub direction: Option<Directions>,
    /// Filter of the packets, in tcpdump's syntax (pcap-filter(7)).
    #[arg(long, value_name = "EXPR", value_parser = value_of("filter"))]
    pub filter: Option<String>,
    /// Share of the flows, for example 1/100 or 10%.
    #[arg(long, value_name = "SHARE", value_parser = value_of("sample"))]
    pub sample: Option<String>,
    /// Bytes of each packet [default: all].
    #[arg(long, value_name = "N", value_parser = value_of("snaplen"))]
    pub snaplen: Option<String>,
    /// Keep super-frames and unfinished checksums as the kernel has them. Otherwise frames are as on a wire.
    #[arg(long, boolean(false))]
    pub super_frames: bool,
    /// End after this many packets, counted as they are in the file.
    #[arg(long, short = 'c', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub packets: Option<u64>,
    /// End after this time, for example 60s.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// Size of the buffer between the kernel and this command, for example 16MiB; rounded up to a power of two.
    #[arg(long, value_name = "SIZE", value_parser = ring, default_value_t = RING)]
    pub buffer: u32,
    #[command(flatten)]
    #[expect(missing_docs, reason = "what is flattened has its own")]
    pub state: StateArgs,
}

impl SubjectArgs {
    /// The flags for packets that were given, by the keys of a mirror.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let given = [("filter", &self.filter), ("sample", &self.sample), ("snaplen", &self.snaplen)];
        given.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?))).collect()
    }

    /// Checks that a target is not given together with flags for packets.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(target) = &self.target else { return Ok(()) };
        let direction = self.direction.map(|_| "direction".to_owned());
        let given: Vec<_> = direction.into_iter().chain(self.settings().into_keys()).collect();
        if !given.is_empty() {
            bail!(
                "--{} cannot be used with --target {target}: each mirror that copies there has its own settings",
                given.join(", --")
            );
        }
        Ok(())
    }
}

/// `mirror-agent tail`.
#[derive(Debug, Args)]
pub struct TailArgs {
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub subject: SubjectArgs,
    /// The file for the packets, in pcapng; `-` is standard output.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub write: PathBuf,
    /// Begin with the packets of this time, as in 5m, that a recorder of this node (`mirror-agent recorder`) still has. Of the
    /// flags for packets, --filter alone counts for them.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub since: Option<Duration>,
    /// End with the packets of --since. Pods and interfaces need not exist any more.
    #[arg(long, boolean(false), requires = "since")]
    pub no_follow: bool,
}

/// `mirror-agent capture`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("keep").required(true).args(["ring", "first", "rotate"]))]
pub struct CaptureArgs {
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub subject: SubjectArgs,
    /// The file for the packets, in pcapng. It is written at the end; a rotation writes its files as it goes.
    #[arg(long, short, value_name = "FILE")]
    pub write: PathBuf,
    /// Keep the newest packets in memory: up to a size, for example 64MB, or for a duration, for example 30s.
    #[arg(long, value_name = "SIZE|TIME", value_parser = bound)]
    pub ring: Option<Bound>,
    /// Keep the first packets in memory, and end when they reach this size.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub first: Option<u64>,
    /// Write files of this size, for example 100MB, one after another.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub rotate: Option<u64>,
    /// Number of files of a rotation to keep.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "rotate", value_parser = clap::value_parser!(u32).range(1..))]
    pub files: u32,
}

/// `mirror-agent recorder`.
#[derive(Debug, Args)]
#[command(mut_args = spaced)]
pub struct RecorderArgs {
    /// Target of the agent that is a stream (--define-target NAME=stream of `mirror-agent run`), whose copies are kept.
    #[arg(long, env = "PODMIRROR_TARGET", value_name = "NAME", value_parser = target_name)]
    pub target: TargetName,
    /// Keep this many bytes, for example 64MB, or the packets of this time, for example 30s.
    #[arg(long, value_name = "SIZE|TIME", value_parser = bound)]
    pub ring: Bound,
    /// Keep super-frames and unfinished checksums as the kernel has them. Otherwise frames are as on a wire.
    #[arg(long, boolean(false))]
    pub super_frames: bool,
    /// Room for packets on their way from the kernel to this command, as in 16MiB; rounded up to a power of two.
    #[arg(long, value_name = "SIZE", value_parser = ring, default_value_t = RING)]
    pub buffer: u32,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub state: StateArgs,
}

/// A pod, as in `shop/web`.
pub(super) fn pod(text: &str) -> Result<(String, String), String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok((namespace.into(), name.into()))
        }
        _ => Err("use the pod's namespace and name, as in shop/web".into()),
    }
}

/// The size of a ring: a power of two, which the kernel demands.
fn ring(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    let ring = u32::try_from(bytes).ok().and_then(u32::checked_next_power_of_two);
    match ring.map(|ring| ring.max(MIN_RING)) {
        Some(ring) if ring <= MAX_RING => Ok(ring),
        _ => Err(format!("at most {} MiB", MAX_RING >> 20)),
    }
}

fn bound(text: &str) -> Result<Bound, String> {
    match (parse_bytes(text), parse_duration(text)) {
        (Ok(bytes), _) => Ok(Bound::Bytes(bytes)),
        (_, Ok(time)) => Ok(Bound::Time(time)),
        _ => Err("use a size, as in 64MB, or a time, as in 30s".into()),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use clap::Parser as _;

    use super::*;
    use crate::cli::args::{Cli, Command};

    /// What `tail` says to these flags.
    fn tail(flags: &[&str]) -> Result<(), String> {
        let words = [&["mirror-agent", "tail"], flags].concat();
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        let Command::Tail(TailArgs { subject, .. }) = cli.command else {
            return Err("another command".into());
        };
        subject.check().map_err(|error| error.to_string())
    }

    #[test]
    fn packets_are_those_of_a_target_or_those_that_the_flags_choose() {
        let target = ["--target", "live"];
        let with = |flags: &[&str]| tail(&[&target, flags].concat());
        assert_eq!(tail(&["eth0", "--pod", "shop/web", "--filter", "tcp"]), Ok(()));
        assert_eq!(
            with(&["--super-frames", "-c", "9", "--duration", "9s", "--buffer", "1MiB", "-w", "x"]),
            Ok(())
        );
        for flags in [&["eth0"][..], &["--pod", "shop/web"]] {
            assert!(with(flags).unwrap_err().contains("cannot be used with"), "{flags:?}");
        }
        for (flags, told) in [
            (&["--filter", "tcp"][..], "--filter cannot be used with --target live: each mirror"),
            (
                &["--direction", "both", "--snaplen", "96", "--sample", "1/2"],
                "--direction, --sample, --snaplen cannot",
            ),
        ] {
            let error = with(flags).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
        assert!(tail(&[]).unwrap_err().contains("required"));
    }

    #[test]
    fn a_pod_has_a_namespace_and_a_name() {
        assert_eq!(pod("shop/web"), Ok(("shop".into(), "web".into())));
        for text in ["web", "/web", "shop/", "shop/web/eth0", ""] {
            assert!(pod(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_ring_is_a_power_of_two() {
        assert_eq!(
            [ring("1"), ring("4MiB"), ring("4194305"), ring("64MiB")].map(Result::ok),
            [Some(MIN_RING), Some(4 << 20), Some(8 << 20), Some(64 << 20)]
        );
        assert!(ring("65MiB").is_err() && ring("many").is_err());
    }

    #[test]
    fn the_newest_packets_are_bounded_by_a_size_or_a_time() {
        assert_eq!(bound("64MB"), Ok(Bound::Bytes(64_000_000)));
        assert_eq!(bound("30s"), Ok(Bound::Time(Duration::from_secs(30))));
        assert!(bound("30 parrots").is_err());
    }
}
