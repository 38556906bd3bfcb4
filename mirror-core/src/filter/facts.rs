//! The facts about a frame at a place of a program, from the tests on every way that leads there.

use std::collections::BTreeMap;

use super::tree::{Load, Test};

/// Facts. More facts fit fewer frames; without any, every frame fits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The possible values of a masked load. A load without an entry can have any value.
    values: BTreeMap<(Load, u32), Ranges>,
    /// The number of bytes of the frame that exist for sure, because a load that ends there has succeeded. The length
    /// does not prove it: a frame in a cut capture has fewer bytes than its length.
    there: u32,
    /// How far behind each IPv4 header (by its offset) a load has succeeded.
    behind_ipv4: BTreeMap<u8, u32>,
}

/// Ranges of values, in order, with gaps between them; both ends belong to a range.
type Ranges = Vec<(u32, u32)>;

impl Facts {
    /// Whether the load succeeds for sure.
    pub(super) fn in_bounds(&self, load: Load) -> bool {
        let end = u32::from(load.offset) + u32::from(load.size);
        match load {
            Load { size: 0, .. } => true,
            Load { ip_header: 0, .. } => self.there >= end,
            Load { ip_header, .. } => self.behind_ipv4.get(&ip_header).is_some_and(|known| *known >= end),
        }
    }

    /// The outcome of the test, if it is known. It says nothing on whether the load succeeds.
    pub(super) fn outcome(&self, test: &Test) -> Option<bool> {
        let ranges = self.ranges(test);
        let passing = clip(&ranges, test.low, test.high);
        if passing.is_empty() {
            Some(false)
        } else if passing == ranges {
            Some(true)
        } else {
            None
        }
    }

    /// The facts after the test has ended so; `None`: it cannot.
    pub(super) fn after(&self, test: &Test, passed: bool) -> Option<Self> {
        let ranges = self.ranges(test);
        let left = if passed {
            clip(&ranges, test.low, test.high)
        } else {
            let below = test.low.checked_sub(1).map(|high| clip(&ranges, 0, high));
            let above = test.high.checked_add(1).map(|low| clip(&ranges, low, u32::MAX));
            [below, above].into_iter().flatten().flatten().collect()
        };
        if left.is_empty() {
            return None;
        }
        let mut facts = self.clone();
        facts.values.insert((test.load, test.mask), left);
        facts.loaded(test.load)?;
        Some(facts)
    }

    /// The facts that hold in either case.
    pub(super) fn either(&self, other: &Self) -> Self {
        let mut values = BTreeMap::new();
        for (key, ranges) in &self.values {
            if let Some(more) = other.values.get(key) {
                values.insert(*key, union(ranges, more));
            }
        }
        let mut behind_ipv4 = BTreeMap::new();
        for (header, end) in &self.behind_ipv4 {
            if let Some(more) = other.behind_ipv4.get(header) {
                behind_ipv4.insert(*header, *end.min(more));
            }
        }
        Self { values, there: self.there.min(other.there), behind_ipv4 }
    }

    /// The values that the test may see.
    fn ranges(&self, test: &Test) -> Ranges {
        match self.values.get(&(test.load, test.mask)) {
            Some(ranges) => ranges.clone(),
            None => vec![(0, test.load.greatest() & test.mask)],
        }
    }

    /// The load has succeeded; `None`: the frame was known to be too short.
    fn loaded(&mut self, load: Load) -> Option<()> {
        if load.size == 0 {
            return Some(());
        }
        let end = u32::from(load.offset) + u32::from(load.size);
        if load.ip_header != 0 {
            let known = self.behind_ipv4.entry(load.ip_header).or_default();
            *known = end.max(*known);
        }
        // Also for a load behind an IPv4 header, whose length may be 0. A frame is at least as long as its bytes that
        // exist.
        self.there = end.max(self.there);
        let length = self.values.entry((Load::LENGTH, u32::MAX)).or_insert_with(|| vec![(0, u32::MAX)]);
        *length = clip(length, end, u32::MAX);
        (!length.is_empty()).then_some(())
    }
}

/// The part of the ranges in `low..=high`.
fn clip(ranges: &[(u32, u32)], low: u32, high: u32) -> Ranges {
    let clipped = ranges.iter().map(|(from, to)| (*from.max(&low), *to.min(&high)));
    clipped.filter(|(from, to)| from <= to).collect()
}

fn union(one: &[(u32, u32)], other: &[(u32, u32)]) -> Ranges {
    let mut all = [one, other].concat();
    all.sort_unstable();
    let mut ranges = Ranges::new();
    for (from, to) in all {
        match ranges.last_mut() {
            Some((_, end)) if from <= end.saturating_add(1) => *end = to.max(*end),
            _ => ranges.push((from, to)),
        }
    }
    ranges
}
