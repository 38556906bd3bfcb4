//! Output for people and for programs. [`Screen`] repeats it: on a terminal, each text is drawn over the one before;
//! otherwise those that have changed follow one another.

use std::{
    ffi::OsStr,
    io::{self, IsTerminal as _, Write as _},
};

use anyhow::Context as _;
use clap::{
    Arg, Command,
    builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser},
};
use serde::Serialize;

use crate::{jsonpath::Template, print};

/// Output formats of kubectl. Each command has some of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Output {
    Json,
    Yaml,
    /// The resource and the name of each object.
    Name,
    /// A table with more columns, and every pod that is not covered.
    Wide,
    Jsonpath(Template),
}

/// The format that is followed by a template.
pub(crate) const JSONPATH: &str = "jsonpath=";

#[derive(Debug, Clone)]
pub(crate) struct Formats(pub(crate) &'static [&'static str]);

impl TypedValueParser for Formats {
    type Value = Output;

    fn parse_ref(&self, of: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Output, clap::Error> {
        if value.to_string_lossy().starts_with(JSONPATH) {
            let template = |text: String| Template::parse(text.strip_prefix(JSONPATH).unwrap_or_default());
            return StringValueParser::new()
                .try_map(template)
                .map(Output::Jsonpath)
                .parse_ref(of, arg, value);
        }
        let format = |name: String| match name.as_str() {
            "json" => Output::Json,
            "yaml" => Output::Yaml,
            "name" => Output::Name,
            _ => Output::Wide,
        };
        PossibleValuesParser::new(self.0).map(format).parse_ref(of, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

/// Escape sequences of a terminal: go to the upper left corner, clear the rest of the line, and all below.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

#[derive(Debug)]
pub(crate) struct Screen {
    /// Each text replaces the one before.
    pub(crate) is_redrawn: bool,
    /// The separator between two texts that follow one another.
    between: &'static str,
    /// The message instead of an empty text.
    nothing: String,
    last: Option<String>,
    is_begun: bool,
}

impl Screen {
    /// A screen for a list in a namespace, or in all.
    pub(crate) fn new(is_repeated: bool, output: Option<&Output>, scope: Option<&str>) -> Self {
        // A Windows console may print the escape sequences as text.
        let is_redrawn = cfg!(unix) && is_repeated && io::stdout().is_terminal();
        let (between, nothing) = match (output, scope) {
            (Some(Output::Jsonpath(_)), _) => ("", String::new()),
            (Some(Output::Yaml), _) => ("---\n", String::new()),
            (_, Some(namespace)) => ("\n", format!("No resources found in {namespace} namespace.\n")),
            (_, None) => ("\n", "No resources found\n".to_owned()),
        };
        Self { is_redrawn, between, nothing, last: None, is_begun: false }
    }

    pub(crate) fn show(&mut self, text: &str) -> anyhow::Result<()> {
        if self.is_redrawn {
            return print(&drawn(if text.is_empty() { &self.nothing } else { text }));
        }
        if self.last.as_deref() == Some(text) {
            return Ok(());
        }
        self.last = Some(text.to_owned());
        if text.is_empty() {
            // A failure to print cannot be reported.
            let _ = io::stderr().write_all(self.nothing.as_bytes());
            return Ok(());
        }
        let between = if std::mem::replace(&mut self.is_begun, true) { self.between } else { "" };
        print(&format!("{between}{text}"))
    }
}

/// Draws a text over another one, so that no line is blank meanwhile.
fn drawn(text: &str) -> String {
    let lines: String = text.lines().map(|line| format!("{line}{REST_OF_LINE}\n")).collect();
    format!("{HOME}{lines}{REST}")
}

/// An object in JSON, by a template, or else in YAML.
pub(crate) fn object(object: &impl Serialize, output: &Output) -> anyhow::Result<String> {
    match output {
        Output::Json => Ok(serde_json::to_string_pretty(object).context("cannot write JSON")? + "\n"),
        Output::Jsonpath(template) => {
            Ok(template.text(&serde_json::to_value(object).context("cannot write JSON")?))
        }
        _ => serde_saphyr::to_string(object).context("cannot write YAML"),
    }
}

/// The first `most` names, and the number of the remaining ones.
pub(crate) fn named(names: impl IntoIterator<Item = impl AsRef<str>>, most: usize) -> String {
    let mut names = names.into_iter();
    let first: Vec<_> = names.by_ref().take(most).collect();
    let first = first.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    match names.count() {
        0 => first,
        more => format!("{first} and {more} more"),
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
