//! Facts about a frame at a point of a program, from the tests on every path to it.

use std::{collections::BTreeMap, rc::Rc};

use super::{
    ast::Operator,
    tree::Test,
    value::{Field, Slot, Value},
};

/// A set of facts. More facts fit fewer frames; the empty set fits every frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The possible results of a value under a mask. A value without an entry can have any result.
    values: BTreeMap<(Value, u32), Ranges>,
    /// The number of bytes that the frame certainly has, because a load that ends there has succeeded. The length does
    /// not prove it: a cut frame in a capture has fewer bytes than its length.
    there: u32,
    /// For each start that depends on the frame, the largest offset up to which a load has succeeded.
    behind: BTreeMap<Rc<Value>, u32>,
}

/// Ranges of values, in order, with gaps between them. Both ends are included.
type Ranges = Vec<(u32, u32)>;

impl Facts {
    /// Number of facts.
    pub(super) fn len(&self) -> usize {
        self.values.values().map(Vec::len).sum::<usize>() + self.behind.len()
    }

    /// Whether the frame certainly has this value.
    pub(super) fn in_bounds(&self, value: &Value) -> bool {
        let mut in_bounds = true;
        value.visit(&mut |part| {
            in_bounds &= match part {
                Value::Field(Field { start: None, offset, size }) => {
                    offset.checked_add((*size).into()).is_some_and(|end| self.there >= end)
                }
                Value::Field(Field { start: Some(start), offset, size }) => {
                    let end = offset.checked_add((*size).into());
                    self.behind.get(start).is_some_and(|known| end.is_some_and(|end| *known >= end))
                }
                Value::Ipv4Header(at) => self.there > *at,
                Value::Binary(Operator::Divide | Operator::Remainder, parts) => {
                    matches!(parts.1, Value::Constant(1..))
                }
                _ => true,
            }
        });
        in_bounds
    }

    /// The outcome of the test, if known. It does not imply that the frame has the value.
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

    /// The facts after the test had this outcome. `None`: the outcome is impossible.
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
        facts.values.insert((test.value.clone(), test.mask), left);
        facts.computed(&test.value)?;
        Some(facts)
    }

    /// The facts after a value was stored in a slot. `None`: the frame has no such value.
    pub(super) fn after_set(&self, slot: Slot, value: &Value) -> Option<Self> {
        let mut facts = self.clone();
        facts.computed(value)?;
        facts.values.retain(|(known, _), _| !known.slots().contains(slot));
        facts.behind.retain(|start, _| !start.slots().contains(slot));
        Some(facts)
    }

    /// The facts that hold in both cases.
    pub(super) fn either(&self, other: &Self) -> Self {
        let mut values = BTreeMap::new();
        for (key, ranges) in &self.values {
            if let Some(more) = other.values.get(key) {
                values.insert(key.clone(), union(ranges, more));
            }
        }
        let mut behind = BTreeMap::new();
        for (start, end) in &self.behind {
            if let Some(more) = other.behind.get(start) {
                behind.insert(Rc::clone(start), *end.min(more));
            }
        }
        Self { values, there: self.there.min(other.there), behind }
    }

    /// The values that the test can see.
    fn ranges(&self, test: &Test) -> Ranges {
        match self.values.get(&(test.value.clone(), test.mask)) {
            Some(ranges) => ranges.clone(),
            None => vec![(0, test.value.greatest().min(test.mask))],
        }
    }

    /// Records that the frame has this value. `None`: it was known to be too short.
    fn computed(&mut self, value: &Value) -> Option<()> {
        let there = self.there;
        value.visit(&mut |part| match part {
            Value::Field(Field { start, offset, size }) => {
                let end = offset.saturating_add((*size).into());
                if let Some(start) = start {
                    let known = self.behind.entry(Rc::clone(start)).or_default();
                    *known = end.max(*known);
                }
                // This also holds for a field after a start, because the start can be 0.
                self.there = end.max(self.there);
            }
            Value::Ipv4Header(at) => self.there = at.saturating_add(1).max(self.there),
            _ => {}
        });
        if self.there == there {
            return Some(());
        }
        // A frame is at least as long as the bytes that exist.
        let length = self.values.entry((Value::Length, u32::MAX)).or_insert_with(|| vec![(0, u32::MAX)]);
        *length = clip(length, self.there, u32::MAX);
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
