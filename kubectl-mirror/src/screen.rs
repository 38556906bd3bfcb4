//! Output for people and for programs. [`Screen`] repeats it: on a terminal, each text is drawn over the one before;
//! otherwise those that have changed follow one another.

use std::io::{self, IsTerminal as _, Write as _};

use anyhow::Context as _;
use serde::Serialize;

use crate::{cli::Output, print};

/// Escape sequences of a terminal: go to the upper left corner, clear the rest of the line, and all below.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

/// The state of the output.
#[derive(Debug)]
pub(crate) struct Screen {
    /// Each text replaces the one before.
    pub(crate) is_redrawn: bool,
    /// The separator between two texts that follow one another.
    between: &'static str,
    last: Option<String>,
    is_begun: bool,
}

impl Screen {
    /// `between` separates two texts, if they are repeated.
    pub(crate) fn new(between: &'static str, is_repeated: bool) -> Self {
        // A Windows console may print the escape sequences as text.
        let is_redrawn = cfg!(unix) && is_repeated && io::stdout().is_terminal();
        Self { is_redrawn, between, last: None, is_begun: false }
    }

    /// Prints a text. An empty table of this namespace, or of all, is a message.
    pub(crate) fn show(&mut self, text: &str, scope: Option<&str>) -> anyhow::Result<()> {
        if self.is_redrawn {
            let nothing = nothing(scope);
            let text = if text.is_empty() { nothing.as_str() } else { text };
            return print(&drawn(text));
        }
        if self.last.as_deref() == Some(text) {
            return Ok(());
        }
        self.last = Some(text.to_owned());
        if text.is_empty() {
            // A failure to print cannot be reported.
            let _ = io::stderr().write_all(nothing(scope).as_bytes());
            return Ok(());
        }
        let between = if std::mem::replace(&mut self.is_begun, true) { self.between } else { "" };
        print(&format!("{between}{text}"))
    }
}

/// kubectl's message about a list without objects.
fn nothing(scope: Option<&str>) -> String {
    match scope {
        Some(namespace) => format!("No resources found in {namespace} namespace.\n"),
        None => "No resources found\n".to_owned(),
    }
}

/// Draws a text over another one, so that no line is blank meanwhile.
fn drawn(text: &str) -> String {
    let lines: String = text.lines().map(|line| format!("{line}{REST_OF_LINE}\n")).collect();
    format!("{HOME}{lines}{REST}")
}

/// An object in JSON, or else in YAML.
pub(crate) fn object(object: &impl Serialize, output: Output) -> anyhow::Result<String> {
    match output {
        Output::Json => Ok(serde_json::to_string_pretty(object).context("cannot write JSON")? + "\n"),
        _ => serde_saphyr::to_string(object).context("cannot write YAML"),
    }
}

/// Formats a duration as kubectl formats ages, for example `90s`, `9m30s` or `3d12h`.
pub(crate) fn age(seconds: u64) -> String {
    let ((unit, name), part) = match seconds {
        0..120 => ((1, "s"), None),
        120..600 => ((60, "m"), Some((1, "s"))),
        600..10_800 => ((60, "m"), None),
        10_800..28_800 => ((3600, "h"), Some((60, "m"))),
        28_800..172_800 => ((3600, "h"), None),
        172_800..691_200 => ((86_400, "d"), Some((3600, "h"))),
        691_200.. => ((86_400, "d"), None),
    };
    let part = part.map(|(part, name)| (seconds % unit / part, name)).filter(|(count, _)| *count > 0);
    let part = part.map_or_else(String::new, |(count, name)| format!("{count}{name}"));
    format!("{}{name}{part}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_drawn_over_a_longer_one_without_a_blank_screen() {
        assert_eq!(drawn("A\nb\n"), "\x1b[HA\x1b[K\nb\x1b[K\n\x1b[J");
    }

    #[test]
    fn an_age_is_short() {
        for (seconds, shown) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (10_799, "179m"),
            (10_800, "3h"),
            (28_799, "7h59m"),
            (172_799, "47h"),
            (172_800, "2d"),
            (691_199, "7d23h"),
            (u64::MAX, "213503982334601d"),
        ] {
            assert_eq!(age(seconds), shown);
        }
    }
}
