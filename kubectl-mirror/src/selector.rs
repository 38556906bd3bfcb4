//! Parses label selectors in kubectl's syntax (`-l`) into selectors of the API. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// A parsed selector. A type of its own, because clap keeps it as one value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Labels(pub(crate) LabelSelector);

/// Parses `app=web`, `app==web`, `app!=web`, `app in (web, api)`, `app notin (web)`, `app` and `!app`, separated by
/// commas. An empty text selects all pods.
///
/// # Errors
///
/// A message for the user.
pub(crate) fn parse(text: &str) -> Result<Labels, String> {
    let (mut labels, mut expressions) = (BTreeMap::new(), Vec::new());
    for part in parts(text).into_iter().filter(|_| !text.is_empty()) {
        let part = part.trim();
        let bad = || {
            format!("{part:?} is not a selector: use app=web, app!=web, 'app in (web, api)', app or '!app'")
        };
        let mut require = |key: &str, operator: &str, values: Option<Vec<String>>| {
            let is_plain = |word: &str| !word.is_empty() && !word.contains(|c: char| " \t()=!,".contains(c));
            if !is_plain(key) || values.iter().flatten().any(|value| !value.is_empty() && !is_plain(value)) {
                return Err(bad());
            }
            expressions.push(LabelSelectorRequirement {
                key: key.to_owned(),
                operator: operator.to_owned(),
                values,
            });
            Ok(())
        };
        let set = |values: &str| {
            let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
            Some(values.split(',').map(|value| value.trim().to_owned()).collect::<Vec<_>>())
        };
        if let Some(key) = part.strip_prefix('!') {
            require(key.trim(), "DoesNotExist", None)?;
        } else if let Some((key, value)) = part.split_once("!=") {
            require(key.trim(), "NotIn", Some(vec![value.trim().to_owned()]))?;
        } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
            // It is validated like the others.
            require(key.trim(), "In", Some(vec![value.trim().to_owned()]))?;
            expressions.pop();
            if labels
                .insert(key.trim().to_owned(), value.trim().to_owned())
                .is_some_and(|old| old != value.trim())
            {
                return Err(format!("{text:?}: the label {} has two values", key.trim()));
            }
        } else if let Some((key, values)) = part.split_once(" notin ") {
            require(key.trim(), "NotIn", Some(set(values).ok_or_else(bad)?))?;
        } else if let Some((key, values)) = part.split_once(" in ") {
            require(key.trim(), "In", Some(set(values).ok_or_else(bad)?))?;
        } else {
            require(part, "Exists", None)?;
        }
    }
    Ok(Labels(LabelSelector {
        match_labels: (!labels.is_empty()).then_some(labels),
        match_expressions: (!expressions.is_empty()).then_some(expressions),
    }))
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
            let Labels(labels) = parse(text).unwrap();
            assert_eq!(Selector::try_from(labels).unwrap().to_string(), selector, "{text}");
        }
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for text in
            [" ", "app=web,", "app=web,app=api", "app in web", "a b", "=web", "!", "app=(web)", "app in (a,b"]
        {
            parse(text).unwrap_err();
        }
    }
}
