//! Output for people and for programs. [`Screen`] repeats it. On a terminal, each text replaces the previous one,
//! as far as it fits. Elsewhere, a text that has changed is printed after the previous one.

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
use terminal_size::{Height, Width, terminal_size_of};

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
    /// Messages below a text that is redrawn.
    pub(crate) notes: String,
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
            (Some(Output::Name), _) => ("\n", String::new()),
            (Some(Output::Yaml), _) => ("---\n", String::new()),
            (_, Some(namespace)) => ("\n", format!("No resources found in {namespace} namespace.\n")),
            (_, None) => ("\n", "No resources found\n".to_owned()),
        };
        Self { is_redrawn, between, nothing, notes: String::new(), last: None, is_begun: false }
    }

    pub(crate) fn show(&mut self, text: &str) -> anyhow::Result<()> {
        if self.is_redrawn {
            let text = if text.is_empty() { self.nothing.as_str() } else { text };
            return print(&drawn(text, &self.notes, size()));
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

/// The rows and columns of the terminal, which the user can resize between two texts. A terminal without a size is
/// unlimited.
fn size() -> (usize, usize) {
    let size = terminal_size_of(io::stdout());
    size.map_or((usize::MAX, usize::MAX), |(Width(columns), Height(rows))| (rows.into(), columns.into()))
}

/// Draws a text, and the notes below it, over another one, so that no line is blank meanwhile. Counts characters of
/// one column, so a line with wider ones can wrap.
fn drawn(text: &str, notes: &str, (rows, columns): (usize, usize)) -> String {
    // The last row is for the cursor: a line there would move the first one off the terminal.
    let rows = rows.saturating_sub(1);
    let notes = fit(notes, rows / 2, columns);
    let mut lines = String::new();
    for line in fit(text, rows - notes.lines().count(), columns).lines().chain(notes.lines()) {
        // Behind a line of full width, the cursor is still on its last character, which would be cleared.
        let rest = if line.chars().count() < columns { REST_OF_LINE } else { "" };
        lines += &format!("{line}{rest}\n");
    }
    format!("{HOME}{lines}{REST}")
}

/// The first lines of a text, each cut to the columns, and the number of those that do not fit into the rows. If there
/// is only one row, it has the first line, which is the head of a table.
fn fit(text: &str, rows: usize, columns: usize) -> String {
    let count = text.lines().count();
    let shown = if count > rows { rows.saturating_sub(1).max(rows.min(1)) } else { count };
    let more =
        (shown < rows.min(count)).then(|| format!("and {} more lines, shown without --watch", count - shown));
    text.lines().take(shown).chain(more.as_deref()).map(|line| cut(line, columns) + "\n").collect()
}

/// The line, or its first part with a mark: without the mark, a number at the end would look like a smaller one.
fn cut(line: &str, columns: usize) -> String {
    match line.chars().count() > columns {
        true => line.chars().take(columns.saturating_sub(1)).chain(['>']).collect(),
        false => line.to_owned(),
    }
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
    use proptest::prelude::*;

    use super::*;

    const TABLE: &str = "NAME  PODS\na     1\nb     2\nc     100\n";

    #[test]
    fn a_text_is_drawn_over_a_longer_one_without_a_blank_screen() {
        assert_eq!(drawn("A\nb\n", "", (usize::MAX, usize::MAX)), "\x1b[HA\x1b[K\nb\x1b[K\n\x1b[J");
        // The end of a full line is not cleared.
        assert_eq!(drawn("AB\nc\n", "", (3, 2)), "\x1b[HAB\nc\x1b[K\n\x1b[J");
    }

    #[test]
    fn a_table_keeps_its_head_on_a_small_terminal() {
        assert_eq!(fit(TABLE, 4, 10), TABLE);
        assert_eq!(fit(TABLE, 3, 40), "NAME  PODS\na     1\nand 2 more lines, shown without --watch\n");
        assert_eq!(fit(TABLE, 2, 40), "NAME  PODS\nand 3 more lines, shown without --watch\n");
        assert_eq!(fit(TABLE, 1, 40), "NAME  PODS\n");
        assert_eq!(fit(TABLE, 4, 8), "NAME  P>\na     1\nb     2\nc     1>\n");
        // The notes have up to half of the rows.
        let screen = drawn(TABLE, "node a\nnode b\nnode c\n", (6, 80)).replace(REST_OF_LINE, "");
        let table = "NAME  PODS\na     1\nand 2 more lines, shown without --watch\n";
        let notes = "node a\nand 2 more lines, shown without --watch\n";
        assert_eq!(screen, format!("{HOME}{table}{notes}{REST}"));
    }

    proptest! {
        #[test]
        fn a_text_fits_on_each_terminal(
            text in "([^\n\r]{0,60}\n){0,9}", rows in 0..12_usize, columns in 7..70_usize,
        ) {
            let fitted = fit(&text, rows, columns);
            let [lines, shown] = [&text, &fitted].map(|text| text.lines().collect::<Vec<_>>());
            prop_assert_eq!(shown.len(), lines.len().min(rows));
            prop_assert!(shown.iter().all(|line| line.chars().count() <= columns), "{}", fitted);
            let has_number = lines.len() > rows && rows > 1;
            let first = shown.len() - usize::from(has_number);
            for (line, shown) in lines.iter().zip(&shown).take(first) {
                let is_cut = line.chars().count() > columns;
                let kept = shown.strip_suffix('>').filter(|_| is_cut && shown.chars().count() == columns);
                prop_assert!(kept.map_or(line == shown, |kept| line.starts_with(kept)), "{}", fitted);
            }
            if has_number {
                let number = shown.last().and_then(|last| last.split(' ').nth(1)?.parse::<usize>().ok());
                prop_assert_eq!(number, Some(lines.len() - first), "{}", fitted);
            }
            // One row is left for the cursor.
            let screen = drawn(&text, &text, (rows, columns));
            prop_assert!(screen.matches('\n').count() <= rows.saturating_sub(1), "{}", screen);
        }
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
