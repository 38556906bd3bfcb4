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
    let note = if differs_on_segments(&expression) { SEGMENTS } else { "" };
    print(&format!("{}{note}", described(&program)?))
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
    fn the_caret_stands_under_the_part() {
        let text = "tcp port 80 or\thost ä";
        let error = compile(text).expect_err("the language has no such character");
        let message = pointed(text, &error);
        let lines: Vec<&str> = message.lines().collect();
        assert_eq!(lines[1..], ["  tcp port 80 or host ä", "                      ^"]);
    }
}
