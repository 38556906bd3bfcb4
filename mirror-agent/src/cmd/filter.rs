//! `mirror-agent filter check`: compiles a filter and prints its steps, or the place of its error.
//!
//! Needs no kernel and changes nothing.

use anyhow::anyhow;
use mirror_common::filter::MAX_FILTER_STEPS;

use super::print;
use crate::{
    cli::{FilterArgs, FilterCommand},
    filter::{FilterError, compile, explain},
};

/// Runs the command that was typed.
pub fn filter(args: FilterArgs) -> anyhow::Result<()> {
    let FilterCommand::Check { expression } = args.command;
    let program = compile(&expression).map_err(|error| anyhow!("{}", pointed(&expression, &error)))?;
    print(&format!("{} of {MAX_FILTER_STEPS} steps\n{}", program.len, explain(&program)))
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
