//! `mirror-agent explain`: what would be copied of a capture, and why the rest would not.
//!
//! Reads a classic pcap file and evaluates the same program as the tap programs do. Needs no kernel and changes nothing.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use anyhow::{Context as _, anyhow, bail};
use mirror_common::{
    decide::chosen,
    filter::FilterProgram,
    packet::{LEN_OFFSET, header},
    verdict::Verdict,
};

use super::{filter::pointed, print};
use crate::{cli::ExplainArgs, filter::compile, settings::Share, settings::parse_sample};

/// What a packet is held against.
#[derive(Default)]
struct Choice {
    filter: Option<FilterProgram>,
    /// Share of the flows as in the wire format.
    share: u32,
    seed: u32,
}

/// Prints a line a packet, and the totals.
pub fn explain(args: ExplainArgs) -> anyhow::Result<()> {
    let ExplainArgs { pcap, filter, sample, sample_seed } = args;
    let filter = match &filter {
        Some(text) => Some(compile(text).map_err(|error| anyhow!("{}", pointed(text, &error)))?),
        None => None,
    };
    let share = match sample {
        Some(text) => parse_sample(&text).map_err(|why| anyhow!("--sample {text:?}: {why}"))?,
        None => None,
    };
    let choice = Choice { filter, share: share.map_or(0, |Share(share)| share), seed: sample_seed };
    let file = fs::read(&pcap).with_context(|| format!("cannot read {}", pcap.display()))?;
    print(&verdicts(&file, &choice).with_context(|| unusable(&pcap))?)
}

fn unusable(path: &Path) -> String {
    format!("{} is no capture that can be explained", path.display())
}

fn verdicts(file: &[u8], choice: &Choice) -> anyhow::Result<String> {
    let mut text = String::from("NUMBER  VERDICT      BYTES\n");
    let mut totals = BTreeMap::new();
    for (index, packet) in Capture::open(file)?.enumerate() {
        let Packet { bytes, length } = packet.with_context(|| format!("packet {}", index + 1))?;
        let verdict = choice.verdict(bytes, length);
        let (packets, sum) = totals.entry(verdict).or_insert((0_u64, 0_u64));
        *packets += 1;
        *sum += u64::from(length);
        writeln!(text, "{:>6}  {:<11}  {length:>5}", index + 1, verdict.name())?;
    }
    text.push('\n');
    for (verdict, (packets, bytes)) in totals {
        writeln!(text, "{:<11}  {packets} packets, {bytes} bytes", verdict.name())?;
    }
    Ok(text)
}

impl Choice {
    /// A capture may hold less of a packet than there was. Where that is less than a filter can see, the packet counts
    /// as long as what is there: what a filter cannot see must not decide.
    fn verdict(&self, bytes: &[u8], length: u32) -> Verdict {
        let length = if bytes.len() < LEN_OFFSET { length.min(bytes.len() as u32) } else { length };
        match chosen(self.filter.as_ref(), self.share, self.seed, &header(bytes, length)) {
            Ok(()) => Verdict::Copied,
            Err(verdict) => verdict,
        }
    }
}

/// A packet of a capture file.
struct Packet<'a> {
    /// What was captured of it.
    bytes: &'a [u8],
    /// How long it was, in bytes.
    length: u32,
}

/// The packets of a classic pcap file.
struct Capture<'a> {
    rest: &'a [u8],
    number: fn([u8; 4]) -> u32,
}

impl<'a> Capture<'a> {
    fn open(file: &'a [u8]) -> anyhow::Result<Self> {
        /// The link type of Ethernet.
        const ETHERNET: u32 = 1;
        let Some((header, rest)) = file.split_first_chunk::<24>() else {
            bail!("it is shorter than its header")
        };
        let [a, b, c, d, ..] = *header;
        let number = match [a, b, c, d] {
            // Microseconds, nanoseconds; written on a machine of either byte order.
            [0xa1, 0xb2, 0xc3, 0xd4] | [0xa1, 0xb2, 0x3c, 0x4d] => u32::from_be_bytes,
            [0xd4, 0xc3, 0xb2, 0xa1] | [0x4d, 0x3c, 0xb2, 0xa1] => u32::from_le_bytes,
            [0x0a, 0x0d, 0x0d, 0x0a] => {
                bail!("it is a pcapng file; `tcpdump -r FILE -w NEW` makes a classic one")
            }
            _ => bail!("it is no pcap file"),
        };
        let [.., e, f, g, h] = *header;
        // The upper bits tell of a frame check sequence.
        let link_type = number([e, f, g, h]) & 0xffff;
        if link_type != ETHERNET {
            bail!("its packets are not Ethernet frames (link type {link_type})");
        }
        Ok(Self { rest, number })
    }
}

impl<'a> Iterator for Capture<'a> {
    type Item = anyhow::Result<Packet<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let parsed = self.rest.split_first_chunk::<16>().and_then(|(header, rest)| {
            let [_, _, _, _, _, _, _, _, captured @ .., a, b, c, d] = *header;
            let captured: [u8; 4] = captured;
            let (bytes, rest) = rest.split_at_checked((self.number)(captured) as usize)?;
            self.rest = rest;
            Some(Packet { bytes, length: (self.number)([a, b, c, d]) })
        });
        if parsed.is_none() {
            self.rest = &[];
        }
        Some(parsed.context("the file ends within it"))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "tests")]

    use super::*;

    /// A capture file with these packets, in either byte order.
    fn capture(packets: &[(&[u8], u32)], big_endian: bool, magic: u32, link_type: u32) -> Vec<u8> {
        let number = |number: u32| if big_endian { number.to_be_bytes() } else { number.to_le_bytes() };
        let mut file: Vec<u8> = [magic, 0x0002_0004, 0, 0, 65535, link_type].map(number).concat();
        for (bytes, length) in packets {
            file.extend([1, 2, bytes.len() as u32, *length].map(number).concat());
            file.extend_from_slice(bytes);
        }
        file
    }

    fn choice(filter: &str) -> Choice {
        Choice { filter: Some(compile(filter).expect("a filter")), ..Choice::default() }
    }

    const ARP: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6];
    const IP: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];

    #[test]
    fn each_packet_has_a_verdict_whatever_wrote_the_file() {
        let arp = choice("arp");
        for (big_endian, magic) in
            [(true, 0xa1b2_c3d4), (false, 0xa1b2_c3d4), (true, 0xa1b2_3c4d), (false, 0xa1b2_3c4d)]
        {
            let file = capture(&[(&ARP, 60), (&IP, 1514)], big_endian, magic, 1);
            assert_eq!(
                verdicts(&file, &arp).expect("a capture"),
                "NUMBER  VERDICT      BYTES\n     1  copied          60\n     2  filtered      1514\n\n\
                 copied       1 packets, 60 bytes\nfiltered     1 packets, 1514 bytes\n"
            );
        }
        let all =
            verdicts(&capture(&[(&ARP, 60)], true, 0xa1b2_c3d4, 1), &Choice::default()).expect("a capture");
        assert!(all.contains("copied       1 packets"), "{all}");
    }

    #[test]
    fn what_was_not_captured_decides_nothing() {
        let file = capture(&[(&IP, 60)], false, 0xa1b2_c3d4, 1);
        let program = choice("ip[8] = 0");
        assert!(verdicts(&file, &program).expect("a capture").contains("filtered     1 packets"));
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let refused =
            |file: &[u8]| format!("{:#}", verdicts(file, &Choice::default()).expect_err("no capture"));
        assert!(refused(&[]).contains("shorter"));
        assert!(refused(&[7; 30]).contains("no pcap file"));
        assert!(refused(&capture(&[], true, 0x0a0d_0d0a, 1)).contains("pcapng"));
        assert!(refused(&capture(&[], true, 0xa1b2_c3d4, 113)).contains("link type 113"));
        let mut cut = capture(&[(&ARP, 60)], true, 0xa1b2_c3d4, 1);
        cut.pop();
        assert_eq!(refused(&cut), "packet 1: the file ends within it");
    }
}
