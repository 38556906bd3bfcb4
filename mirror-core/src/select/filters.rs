//! [`Filters`]: a cache of compiled filters, by their texts.
//!
//! The same few filters are used by many pods, round after round, and compiling a long filter takes as much time as
//! reading a hundred devices. Pure: the same text gives the same program, so the cache changes only the time. Used by
//! `choice`.
//!
//! The authors of filters are not trusted, and the loop does nothing else while it compiles. So a part of a round
//! compiles at most [`PART`] filters, and between two parts the loop lets other tasks run. The
//! [compiler](crate::filter) bounds the cost of one filter.

use std::collections::HashMap;

use crate::settings::{CaptureFilter, parse_filter};

/// Maximum number of filters that are compiled in one part of a round.
const PART: usize = 4;

/// The filters of the last round.
#[derive(Debug, Default)]
pub struct Filters {
    /// Each with whether it was requested since the last [`Self::forget_unused`].
    known: HashMap<String, (Result<CaptureFilter, String>, bool)>,
    /// The number of filters compiled in this part.
    compiled: usize,
    is_behind: bool,
}

impl Filters {
    /// Whether a filter was left for the next part.
    pub const fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Begins a part.
    pub(super) const fn begin(&mut self) {
        (self.compiled, self.is_behind) = (0, false);
    }

    /// Whether the filter with this text was compiled or rejected before.
    pub(super) fn knows(&self, text: &str) -> bool {
        self.known.contains_key(text)
    }

    /// Returns the filter with this text, or its problem.
    pub(super) fn get(&mut self, text: &str) -> Result<CaptureFilter, String> {
        if let Some((filter, is_used)) = self.known.get_mut(text) {
            *is_used = true;
            return filter.clone();
        }
        if self.compiled == PART {
            self.is_behind = true;
            return Err("the filter is not compiled yet".to_owned());
        }
        self.compiled += 1;
        let filter = parse_filter(text);
        self.known.insert(text.to_owned(), (filter.clone(), true));
        filter
    }

    /// Removes the filters that were not requested since the last call.
    pub(super) fn forget_unused(&mut self) {
        self.known.retain(|_, (_, is_used)| std::mem::take(is_used));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_filter_is_compiled_once_while_somebody_uses_it() {
        let mut filters = Filters::default();
        let first = filters.get("tcp").unwrap();
        assert_eq!(filters.get("tpc"), parse_filter("tpc"));
        filters.forget_unused();
        assert_eq!(filters.get("tcp").unwrap(), first);
        assert_eq!(filters.known.len(), 2);
        filters.forget_unused();
        assert_eq!(filters.known.keys().collect::<Vec<_>>(), ["tcp"]);
        filters.forget_unused();
        assert!(filters.known.is_empty());
        assert_eq!(filters.get("tcp"), Ok(first));
    }
}
