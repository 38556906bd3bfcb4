//! `mirror-agent filter check`: compiles a filter and prints its program, or the position of its error. With a capture
//! file, it also prints the number of matching packets.
//!
//! Needs no kernel and changes nothing.

mod capture;
#[cfg(test)]
mod tests;

use std::{fs::File, io::Read};

use anyhow::{Context as _, anyhow, bail};

use self::capture::Packet;
use super::print;
use crate::{
    cli::args::FilterCommand,
    filter::{FilterError, Program, compile, differs_on_segments, ebpf::translate, fields_over_ipv4},
};

/// Printed after the program of a filter that may give another answer for a super-frame than for its segments.
const SEGMENTS: &str = "note: this looks at what the segments of a super-frame do not share, such as a length. Where copies go to a \
                        device or a tunnel, it is asked for super-frames of up to 64 KiB. Streams and captures ask it for \
                        each segment that they write\n";

/// The link type of Ethernet.
const ETHERNET: i32 = 1;

/// Runs the command that was typed.
pub fn filter(command: FilterCommand) -> anyhow::Result<()> {
    let FilterCommand::Check { expression, pcap } = command;
    let program = compile(&expression).map_err(|error| anyhow!("{}", pointed(&expression, &error)))?;
    print(&format!("{}{}", described(&program)?, notes(&expression)))?;
    if let Some(path) = pcap {
        let name = path.display();
        let file = File::open(&path).with_context(|| format!("cannot read {name}"))?;
        let mut matched = 0_u64;
        let packets =
            matches(file, &program, |_| matched += 1).with_context(|| format!("cannot read {name}"))?;
        print(&format!("{name}: {matched} of {packets} packets match\n"))?;
    }
    Ok(())
}

/// Calls `visit` with the number, from 1, of each matching Ethernet frame of a capture file. Returns the number of
/// packets. `len` is the length on the wire, and bytes that are not in the file match nothing, as in tcpdump.
///
/// # Errors
///
/// The file cannot be read, or has packets of another link type.
pub fn matches(file: impl Read + Send, filter: &Program, mut visit: impl FnMut(u64)) -> anyhow::Result<u64> {
    let mut number = 0;
    capture::each(capture::BUFFER, file, |Packet { bytes, length, link_type }| {
        number += 1;
        if link_type != ETHERNET {
            bail!("packet {number} is not an Ethernet frame (link type {link_type})");
        }
        if filter.matches(bytes, length) {
            visit(number);
        }
        Ok(())
    })?;
    Ok(number)
}

/// Notes on packets that the filter does not match, perhaps contrary to its author's intention.
fn notes(expression: &str) -> String {
    let note = |(name, number)| {
        format!(
            "note: {name}[...] is a field of packets over IPv4 alone, as in tcpdump, so no packet over IPv6 matches it; \
             there write ip6[6] = {number} and ip6[40+...]\n"
        )
    };
    let segments = differs_on_segments(expression).then(|| SEGMENTS.to_owned());
    fields_over_ipv4(expression).into_iter().map(note).chain(segments).collect()
}

/// Formats the program for people: the kernel's instructions, and the classic BPF that they are translated from.
fn described(program: &Program) -> anyhow::Result<String> {
    // `compile` refuses a program that is too long for the kernel.
    let insns = translate(program).ok_or_else(|| anyhow!("the filter is too large"))?;
    let (classic, kernel) = (program.instructions().len(), insns.len());
    Ok(format!(
        "{classic} instructions of classic BPF, {kernel} of eBPF for the kernel\n{}",
        program.explain()
    ))
}

/// The error, and the expression with a caret at its position.
pub fn pointed(expression: &str, error: &FilterError) -> String {
    // On one line, so that the caret is below the position. Columns are characters, not bytes.
    let line = expression.replace(['\n', '\r', '\t'], " ");
    let before = expression.get(..error.position).unwrap_or(expression).chars().count();
    let length = error.part.chars().count().max(1);
    format!("{error}\n  {line}\n  {:before$}{}", "", "^".repeat(length))
}
