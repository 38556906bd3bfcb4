//! `mirror-agent filter check`: compiles a filter and prints its program, or the place of its error.
//!
//! Needs no kernel and changes nothing.

use anyhow::anyhow;

use super::print;
use crate::{
    cli::{FilterArgs, FilterCommand},
    filter::{
        FilterError, Program, compile, differs_on_segments,
        ebpf::{Access, translate},
        fields_over_ipv4,
    },
};

/// Stands behind the program of a filter that can say something else of a super-frame than of its segments.
const SEGMENTS: &str = "note: this looks at what the segments of a super-frame do not share, such as a length. Where copies go to a \
                        device or a tunnel, it is asked for super-frames of up to 64 KiB. Streams and captures ask it for \
                        each segment that they write\n";

/// Runs the command that was typed.
pub fn filter(args: FilterArgs) -> anyhow::Result<()> {
    let FilterCommand::Check { expression } = args.command;
    let program = compile(&expression).map_err(|error| anyhow!("{}", pointed(&expression, &error)))?;
    let segments = if differs_on_segments(&expression) { SEGMENTS } else { "" };
    print(&format!("{}{}{segments}", described(&program)?, notes(&expression)))
}

/// What the filter does not match, perhaps against what its author thinks.
fn notes(expression: &str) -> String {
    let note = |(name, number)| {
        format!(
            "note: {name}[...] is a field of packets over IPv4 alone, as in tcpdump, so no packet over IPv6 matches it; \
             there write ip6[6] = {number} and ip6[40+...]\n"
        )
    };
    fields_over_ipv4(expression).into_iter().map(note).collect()
}

/// The program for people: what the kernel gets, and the classic BPF that it is made from.
fn described(program: &Program) -> anyhow::Result<String> {
    // `compile` refuses a program that is too long for the kernel.
    let insns = translate(program, Access::Direct).ok_or_else(|| anyhow!("the filter is too large"))?;
    let (classic, kernel) = (program.instructions().len(), insns.len());
    Ok(format!(
        "{classic} instructions of classic BPF, {kernel} of eBPF for the kernel\n{}",
        program.explain()
    ))
}

/// The error, and the expression with a caret under the place.
pub fn pointed(expression: &str, error: &FilterError) -> String {
    // One line, so that the caret can stand below the place. Columns are characters, not bytes.
    let line = expression.replace(['\n', '\r', '\t'], " ");
    let before = expression.get(..error.position).unwrap_or(expression).chars().count();
    let length = error.part.chars().count().max(1);
    format!("{error}\n  {line}\n  {:before$}{}", "", "^".repeat(length))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_field_that_only_ipv4_has_gets_a_note() {
        let note = notes("tcp[tcpflags] & tcp-syn != 0 or not (tcp[2:2] = ip[udp[0]] and len > 60)");
        assert_eq!(note.lines().count(), 2, "{note}");
        assert!(note.starts_with("note: tcp[...] is a field of packets over IPv4 alone"), "{note}");
        assert!(note.contains("ip6[6] = 6 and ip6[40+...]") && note.contains("ip6[6] = 17 "), "{note}");
        for text in ["tcp port 80", "ip[0] = 0x45", "ip6[53] & 2 != 0", "icmp[icmptype] = icmp-echo"] {
            assert_eq!(notes(text), "", "{text}");
        }
    }

    #[test]
    fn the_caret_stands_under_the_part() {
        let text = "tcp port 80 or\thost ä";
        let error = compile(text).expect_err("the language has no such character");
        let message = pointed(text, &error);
        let lines: Vec<&str> = message.lines().collect();
        assert_eq!(lines[1..], ["  tcp port 80 or host ä", "                      ^"]);
    }
}
