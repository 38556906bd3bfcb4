//! `mirror-agent explain`: whether and how a pod is mirrored (`--pod`); or what would be copied of a capture, and why
//! the rest would not (`--pcap`).
//!
//! Changes nothing. About a pod, `mirror_core::status` makes the words of what `status` reads.
//!
//! About a capture, it evaluates the program that the kernel's is made from, and the sample, on each packet of a file
//! ([`capture`] reads it), and writes one line for each packet while it reads. Needs no kernel. A packet that was cut in
//! the capture is judged as in tcpdump: its length is the length on the wire, and bytes that were not captured decide
//! nothing.

mod capture;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Read, Write},
    path::Path,
};

use anyhow::{Context as _, anyhow, bail};
use mirror_common::{
    packet::{LEN_OFFSET, header},
    sample::{flow_hash, in_sample},
    verdict::Verdict,
};
use serde::Serialize;

use self::capture::Packet;
use super::{filter::pointed, print, status};
use crate::{
    cli::{ExplainArgs, OutputFormat},
    filter::{Program, compile},
    settings::{Share, parse_sample},
};

/// The link type of Ethernet.
const ETHERNET: i32 = 1;

/// The settings that a packet is judged by.
#[derive(Debug, Default)]
pub struct Criteria {
    /// Which packets; `None`: all.
    pub filter: Option<Program>,
    /// Share of the flows as in the wire format; 0: all.
    pub share: u32,
    /// Seed of the sample.
    pub seed: u32,
}

/// Prints the words about a pod, or a line for each packet of a capture.
pub async fn explain(args: ExplainArgs) -> anyhow::Result<()> {
    match (&args.pod, &args.pcap) {
        (Some(_), _) if args.output == OutputFormat::Json => {
            bail!("explain --pod has no output in JSON; `mirror-agent status -o json` has the same facts")
        }
        (Some((namespace, name)), _) => {
            let status = status::of_node(&args.state).await?;
            let text = status.explain(&format!("{namespace}/{name}"));
            print(&text.map_err(anyhow::Error::msg)?)
        }
        (None, Some(pcap)) => explain_capture(pcap, &args),
        (None, None) => bail!("name a pod (--pod NAMESPACE/NAME) or a capture (--pcap FILE)"),
    }
}

/// Prints a line for each packet, and the totals.
fn explain_capture(pcap: &Path, args: &ExplainArgs) -> anyhow::Result<()> {
    let ExplainArgs { filter, sample, sample_seed, output, .. } = args;
    let filter = match filter {
        Some(text) => Some(compile(text).map_err(|error| anyhow!("{}", pointed(text, &error)))?),
        None => None,
    };
    let share = match sample {
        Some(text) => parse_sample(text).map_err(|why| anyhow!("--sample {text:?}: {why}"))?,
        None => None,
    };
    let criteria = Criteria { filter, share: share.map_or(0, |Share(share)| share), seed: *sample_seed };
    let file = File::open(pcap).with_context(|| format!("cannot read {}", pcap.display()))?;
    let explained = write_verdicts(file, &criteria, *output, &mut BufWriter::new(io::stdout().lock()));
    match explained {
        // The reader has closed the pipe, as in `explain | head`.
        Err(error) if is_broken_pipe(&error) => Ok(()),
        explained => {
            explained.with_context(|| format!("{} is no capture that can be explained", pcap.display()))
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Reads a capture and writes the verdict of each packet as it comes, and the totals. If the file is broken or ends in
/// the middle, the verdicts of the packets before that place are written, and an error is returned.
pub fn write_verdicts(
    file: impl Read + Send,
    criteria: &Criteria,
    output: OutputFormat,
    to: &mut impl Write,
) -> anyhow::Result<()> {
    let mut totals = Totals::default();
    let mut number = 0;
    let read = capture::each(file, |packet| {
        number += 1;
        let Packet { bytes, length, link_type } = packet;
        if link_type != ETHERNET {
            totals.skipped.entry(link_type).or_default().add(length);
            return Ok(());
        }
        let verdict = criteria.verdict(bytes, length);
        let is_first = totals.verdicts.is_empty();
        totals.verdicts.entry(verdict).or_default().add(length);
        totals.uncertain += u64::from(criteria.is_uncertain(verdict, bytes, length));
        let line = Line { number, verdict: verdict.name(), bytes: length, captured: bytes.len() };
        line.write(is_first, output, to).map_err(Into::into)
    });
    let read = read.and_then(|()| match totals.skipped.first_key_value() {
        Some((link_type, _)) if totals.verdicts.is_empty() => {
            bail!("its packets are not Ethernet frames (link type {link_type})")
        }
        _ => Ok(()),
    });
    // One error is enough: if the output fails, that error is returned.
    if !matches!(&read, Err(error) if error.is::<io::Error>()) {
        totals.write(read.as_ref().err(), output, to)?;
        to.flush()?;
    }
    read
}

impl Criteria {
    fn verdict(&self, bytes: &[u8], length: u32) -> Verdict {
        // A filter never loads the bytes of a longer packet that it cannot see.
        if self.filter.as_ref().is_some_and(|filter| !filter.matches(bytes, length)) {
            Verdict::Filtered
        } else if !in_sample(&header(bytes, length), self.seed, self.share) {
            Verdict::SampledOut
        } else {
            Verdict::Copied
        }
    }

    /// Whether the sample would depend on bytes that were not captured: with other bytes there the packet is of another
    /// flow.
    fn is_uncertain(&self, verdict: Verdict, bytes: &[u8], length: u32) -> bool {
        if self.share == 0 || verdict == Verdict::Filtered {
            return false;
        }
        let hash = |filler: u8| {
            let mut whole = bytes.get(..LEN_OFFSET).unwrap_or(bytes).to_vec();
            whole.resize(whole.len().max(LEN_OFFSET.min(length as usize)), filler);
            flow_hash(&header(&whole, length), self.seed)
        };
        hash(0) != hash(0xff)
    }
}

/// One packet of the output.
#[derive(Serialize)]
struct Line {
    /// Its number in the file, from 1, with the packets that are skipped.
    number: u64,
    verdict: &'static str,
    /// Its length on the wire.
    bytes: u32,
    /// How many of them the file holds.
    captured: usize,
}

impl Line {
    fn write(&self, is_first: bool, output: OutputFormat, to: &mut impl Write) -> io::Result<()> {
        match output {
            OutputFormat::Table => {
                if is_first {
                    writeln!(to, "NUMBER  VERDICT      BYTES")?;
                }
                let Self { number, verdict, bytes, .. } = self;
                writeln!(to, "{number:>6}  {verdict:<11}  {bytes:>5}")
            }
            OutputFormat::Json => {
                to.write_all(if is_first { b"{\"packets\":[\n" } else { b",\n" })?;
                serde_json::to_writer(to, self).map_err(Into::into)
            }
        }
    }
}

/// Packets and their bytes on the wire.
#[derive(Default, Clone, Copy)]
struct Sum {
    packets: u64,
    bytes: u64,
}

impl Sum {
    fn add(&mut self, length: u32) {
        self.packets += 1;
        self.bytes += u64::from(length);
    }
}

#[derive(Default)]
struct Totals {
    verdicts: BTreeMap<Verdict, Sum>,
    /// Packets that are no Ethernet frames, by their link type.
    skipped: BTreeMap<i32, Sum>,
    /// Packets whose sample would depend on bytes that were not captured.
    uncertain: u64,
}

/// The end of the JSON document, behind the packets.
#[derive(Serialize)]
struct End {
    totals: Vec<Total>,
    skipped: Vec<Skipped>,
    uncertain: u64,
    error: Option<String>,
}

#[derive(Serialize)]
struct Total {
    verdict: &'static str,
    packets: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Skipped {
    link_type: i32,
    packets: u64,
    bytes: u64,
}

impl Totals {
    fn write(
        &self,
        error: Option<&anyhow::Error>,
        output: OutputFormat,
        to: &mut impl Write,
    ) -> io::Result<()> {
        let Self { verdicts, skipped, uncertain } = self;
        if output == OutputFormat::Json {
            let total = |(verdict, sum): (&Verdict, &Sum)| Total {
                verdict: verdict.name(),
                packets: sum.packets,
                bytes: sum.bytes,
            };
            let skip = |(link_type, sum): (&i32, &Sum)| Skipped {
                link_type: *link_type,
                packets: sum.packets,
                bytes: sum.bytes,
            };
            let end = End {
                totals: verdicts.iter().map(total).collect(),
                skipped: skipped.iter().map(skip).collect(),
                uncertain: *uncertain,
                error: error.map(|error| format!("{error:#}")),
            };
            let end = serde_json::to_string(&end)?;
            let begin = if verdicts.is_empty() { "{\"packets\":[" } else { "\n" };
            // The object without its first brace continues the object that the packets began.
            return writeln!(to, "{begin}],{}", end.trim_start_matches('{'));
        }
        if !verdicts.is_empty() {
            writeln!(to)?;
        }
        for (verdict, Sum { packets, bytes }) in verdicts {
            writeln!(to, "{:<11}  {packets} packets, {bytes} bytes", verdict.name())?;
        }
        for (link_type, Sum { packets, bytes }) in skipped {
            writeln!(
                to,
                "{:<11}  {packets} packets, {bytes} bytes: no Ethernet frames (link type {link_type})",
                "skipped"
            )?;
        }
        if *uncertain > 0 {
            writeln!(
                to,
                "{:<11}  {uncertain} packets: the capture does not hold the addresses and ports that a sample goes by",
                "uncertain"
            )?;
        }
        Ok(())
    }
}
