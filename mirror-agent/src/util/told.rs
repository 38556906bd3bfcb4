//! [`is_news`]: a problem that lasts is logged once, until it changes or ends.

/// Whether a problem differs from `told`, the one that was logged last. Replaces that one.
pub(crate) fn is_news(told: &mut Option<String>, problem: &str) -> bool {
    told.replace(problem.to_owned()).as_deref() != Some(problem)
}
