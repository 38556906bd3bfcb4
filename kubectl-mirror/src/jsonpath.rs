//! Templates of `-o jsonpath=TEMPLATE`, as kubectl has them. Pure.
//!
//! The text around the paths, quoted strings and `{range PATH} … {end}` are read here. A path is rewritten to RFC 9535,
//! and `jsonpath_rust` evaluates it. In a range, `$` is the current object, as in kubectl.

use std::{iter::Peekable, mem, str::Chars};

use jsonpath_rust::{
    parser::{model::JpQuery, parse_json_path},
    query::js_path_process,
};
use serde_json::Value;

/// The characters that end the name of a field.
const ENDS: &str = " \t.,[]()$@{}=!<>&|'\"";

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq)]
enum Part {
    Text(String),
    Values(JpQuery),
    Range(JpQuery, Template),
}

impl Template {
    /// Parses a template. The error is a message for the user, with the place of the mistake.
    pub(crate) fn parse(template: &str) -> Result<Self, String> {
        let (mut parts, mut ranges, mut rest) = (Vec::new(), Vec::new(), template);
        while let Some((text, from)) = rest.split_once('{') {
            parts.push(Part::Text(text.to_owned()));
            let wrong = |what: &str| {
                format!("{what} at character {}", template.chars().count() - from.chars().count())
            };
            let (action, after) = action(from).ok_or_else(|| wrong("no closing brace for the one"))?;
            let parsed = |path| query(path).ok_or_else(|| wrong(&format!("invalid path in {{{action}}}")));
            match action.trim() {
                "end" => {
                    let (_, query, before) = ranges.pop().ok_or_else(|| wrong("no range to end"))?;
                    let body = Self(mem::replace(&mut parts, before));
                    parts.push(Part::Range(query, body));
                }
                range if range.starts_with("range ") => {
                    let query = parsed(&range["range ".len()..])?;
                    ranges.push((wrong("no {end} for the range"), query, mem::take(&mut parts)));
                }
                quoted if quoted.starts_with(['"', '\'']) => {
                    parts.push(Part::Text(unquoted(quoted).ok_or_else(|| wrong("invalid string"))?));
                }
                path => parts.push(Part::Values(parsed(path)?)),
            }
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        match ranges.pop() {
            Some((wrong, ..)) => Err(wrong),
            None => Ok(Self(parts)),
        }
    }

    /// The text for an object.
    pub(crate) fn text(&self, object: &Value) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Values(query) => {
                let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                values(query, object).map(shown).collect::<Vec<_>>().join(" ")
            }
            Part::Range(query, body) => values(query, object).map(|object| body.text(object)).collect(),
        };
        self.0.iter().map(part).collect()
    }
}

fn values<'v>(query: &JpQuery, object: &'v Value) -> impl Iterator<Item = &'v Value> + use<'v> {
    // All values are parts of the object, so there is no failure.
    js_path_process(query, object).unwrap_or_default().into_iter().map(|found| found.val)
}

/// Splits at the closing brace, which is in no string.
fn action(text: &str) -> Option<(&str, &str)> {
    let (mut quote, mut is_escaped) = (None, false);
    let end = text.find(|c| {
        match (c, quote) {
            _ if is_escaped => is_escaped = false,
            ('\\', _) => is_escaped = true,
            ('}', None) => return true,
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            _ => {}
        }
        false
    })?;
    Some((&text[..end], &text[end + 1..]))
}

fn unquoted(text: &str) -> Option<String> {
    let inner = text.strip_prefix('\'').and_then(|text| text.strip_suffix('\''));
    let double = inner.map(|inner| format!("\"{}\"", inner.replace("\\'", "'").replace('"', "\\\"")));
    serde_json::from_str(double.as_deref().unwrap_or(text)).ok()
}

/// Parses a path of kubectl. Its names have any characters, and a backslash before a dot; `['a.b']` is `.a.b`.
fn query(path: &str) -> Option<JpQuery> {
    let path = path.trim().replace("['", ".").replace("']", "");
    let mut chars = path.trim_start_matches(['$', '@']).chars().peekable();
    let (mut rfc, mut filter, mut quote) = ("$".to_owned(), 0, None);
    while let Some(c) = chars.next() {
        match c {
            _ if quote == Some(c) => quote = None,
            _ if quote.is_some() => {}
            '"' | '\'' => quote = Some(c),
            '(' => filter = rfc.len() + 1,
            // kubectl selects only what has the field.
            '!' if filter > 0 => rfc = format!("{rfc} && {}", &rfc[filter..]),
            '.' if !rfc.ends_with(|last: char| last.is_ascii_digit()) => {
                let dots = chars.next_if_eq(&'.').map_or("", |_| "..");
                match name(&mut chars).as_str() {
                    "" if dots.is_empty() => return None,
                    "" => rfc += dots,
                    "*" => rfc += &format!("{dots}[*]"),
                    name => rfc += &format!("{dots}[{}]", Value::from(name)),
                }
                continue;
            }
            _ => {}
        }
        rfc.push(c);
    }
    parse_json_path(&rfc).ok()
}

fn name(chars: &mut Peekable<Chars<'_>>) -> String {
    let mut name = String::new();
    while let Some(c) = chars.next_if(|c| !ENDS.contains(*c)) {
        name.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    name
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_mistake_has_its_place() {
        for (template, why) in [
            ("a{.b", "no closing brace for the one at character 2"),
            ("{\"\\n}", "no closing brace for the one at character 1"),
            ("é{.a[}", "invalid path in {.a[} at character 2"),
            ("{.a}{kind}", "invalid path in {kind} at character 5"),
            ("{['a','b']}", "invalid path in {['a','b']} at character 1"),
            ("{'\\x'}", "invalid string at character 1"),
            ("{.a}{end}", "no range to end at character 5"),
            ("{range .a[*]}{.b}", "no {end} for the range at character 1"),
        ] {
            assert_eq!(Template::parse(template).unwrap_err(), why, "{template}");
        }
    }
}
