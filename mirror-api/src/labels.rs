//! Parses label selectors in kubectl's syntax (`-l`) into selectors of the API. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use mirror_core::destination::{is_key, is_qualified};

/// Parses `app=web`, `app==web`, `app!=web`, `app in (web, api)`, `app notin (web)`, `app` and `!app`, separated by
/// commas. An empty text selects all pods.
///
/// It refuses everything that the API server cannot read, because the API server authorises another request then
/// (`apiserver/query.rs` of the agent).
///
/// # Errors
///
/// A message for the user.
pub fn parse(text: &str) -> Result<LabelSelector, String> {
    let (mut labels, mut expressions) = (BTreeMap::new(), Vec::new());
    for part in parts(text).into_iter().map(trim).filter(|_| !text.is_empty()) {
        let bad = || {
            format!("{part:?} is not a selector: use app=web, app!=web, 'app in (web, api)', app or '!app'")
        };
        let set = |values: &str| {
            let values = trim(values).strip_prefix('(').and_then(|values| values.strip_suffix(')'));
            Ok::<_, String>(values.ok_or_else(bad)?.split(',').map(|value| trim(value).to_owned()).collect())
        };
        let one = |value: &str| vec![trim(value).to_owned()];
        let (key, operator, values) = if let Some(key) = part.strip_prefix('!') {
            (key, "DoesNotExist", None)
        } else if let Some((key, value)) = part.split_once("!=") {
            (key, "NotIn", Some(one(value)))
        } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
            (key, "=", Some(one(value)))
        } else if let Some((key, values)) = part.split_once(" notin ") {
            (key, "NotIn", Some(set(values)?))
        } else if let Some((key, values)) = part.split_once(" in ") {
            (key, "In", Some(set(values)?))
        } else {
            (part, "Exists", None)
        };
        let is_value = |value: &String| value.is_empty() || is_qualified(value);
        let key = trim(key).to_owned();
        if !is_key(&key) || !values.iter().flatten().all(is_value) {
            return Err(bad());
        }
        if operator != "=" {
            expressions.push(LabelSelectorRequirement { key, operator: operator.to_owned(), values });
            continue;
        }
        let value = values.unwrap_or_default().concat();
        if labels.insert(key.clone(), value.clone()).is_some_and(|old| old != value) {
            return Err(format!("{text:?}: the label {key} has two values"));
        }
    }
    Ok(LabelSelector {
        match_labels: (!labels.is_empty()).then_some(labels),
        match_expressions: (!expressions.is_empty()).then_some(expressions),
    })
}

/// Removes the white space that the API server skips.
fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t', '\r', '\n'])
}

/// Splits at the commas outside of parentheses.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.extend(text.get(start..at));
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.extend(text.get(start..));
    parts
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use kube::core::Selector;

    use super::*;

    #[test]
    fn what_kubectl_takes_is_taken() {
        for (text, selector) in [
            ("", ""),
            ("app=web", "app=web"),
            ("app == web , tier=", "app=web,tier="),
            ("app!=web", "app notin (web)"),
            ("a.io/app in (web, api),tier", "a.io/app in (api,web),tier"),
            ("app notin (web),!test", "app notin (web),!test"),
        ] {
            let labels = Selector::try_from(parse(text).unwrap()).unwrap();
            assert_eq!(labels.to_string(), selector, "{text}");
        }
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for text in [
            " ",
            "app=web,",
            "app=web,app=api",
            "app in web",
            "a b",
            "=web",
            "!",
            "app=(web)",
            "app in (a,b",
            "app=we$b",
            "app=-web",
            "app=web\u{a0}",
            "a.io/b/app",
            "A.io/app",
            "/app",
        ] {
            parse(text).unwrap_err();
        }
    }
}
