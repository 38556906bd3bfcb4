//! [`Filters`]: the filters compiled before, by their texts.
//!
//! The same few filters stand on many pods, round after round, and to compile a long filter takes as much time as to
//! read a hundred devices. Pure: the same text gives the same program, so the cache changes only the time. `choice`
//! asks.

use std::collections::HashMap;

use crate::settings::{CaptureFilter, parse_filter};

/// The filters of the last round.
#[derive(Debug, Default)]
pub struct Filters(HashMap<String, Known>);

#[derive(Debug)]
struct Known {
    filter: Result<CaptureFilter, String>,
    is_used: bool,
}

impl Filters {
    /// The filter with this text, or its problem.
    pub(super) fn get(&mut self, text: &str) -> Result<CaptureFilter, String> {
        if let Some(known) = self.0.get_mut(text) {
            known.is_used = true;
            return known.filter.clone();
        }
        let filter = parse_filter(text);
        self.0.insert(text.to_owned(), Known { filter: filter.clone(), is_used: true });
        filter
    }

    /// Forgets the filters that were not requested since the last call.
    pub(super) fn forget_unused(&mut self) {
        self.0.retain(|_, known| std::mem::take(&mut known.is_used));
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
        assert_eq!(filters.0.len(), 2);
        filters.forget_unused();
        assert_eq!(filters.0.keys().collect::<Vec<_>>(), ["tcp"]);
        filters.forget_unused();
        assert!(filters.0.is_empty());
        assert_eq!(filters.get("tcp"), Ok(first));
    }
}
