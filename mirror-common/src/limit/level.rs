//! The levels of limits, and where the maps have their limits and meters.

use crate::abi::{MAX_SESSIONS, MAX_TAPS, SETTINGS_PLACES, TARGET_PLACES};

/// A level of limits, in the order in which a copy is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A session: its rate and budgets.
    Session,
    /// The sessions of a target: its ceiling.
    Target,
    /// A pod: its ceiling (`--max-pod-rate`).
    Pod,
    /// A pod: its share of the node's rate, whatever the traffic of the others. It refuses no copy.
    Share,
    /// The pods of a namespace: their ceiling (`--max-namespace-rate`).
    Namespace,
    /// The node: its rate (`--max-rate`).
    Node,
}

impl Level {
    /// Every level.
    pub const ALL: [Self; 6] =
        [Self::Session, Self::Target, Self::Pod, Self::Share, Self::Namespace, Self::Node];

    /// Returns the index of limits in `LIMITS`. `place` is their place within the level: for a session the place of
    /// its settings, for a target its index in `TARGETS`. The other levels have one element, at 0, for all owners.
    #[inline(always)]
    pub const fn limits(self, place: u32) -> u32 {
        const PODS: u32 = SETTINGS_PLACES + TARGET_PLACES;
        place
            + match self {
                Self::Session => 0,
                Self::Target => SETTINGS_PLACES,
                Self::Pod => PODS,
                Self::Share => PODS + 1,
                Self::Namespace => PODS + 2,
                Self::Node => PODS + 3,
            }
    }

    /// Returns the index of a meter in `METERS`, by the place of its owner within the level.
    #[inline(always)]
    pub const fn meter(self, place: u32) -> u32 {
        const PODS: u32 = MAX_SESSIONS + TARGET_PLACES;
        place
            + match self {
                Self::Session => 0,
                Self::Target => MAX_SESSIONS,
                Self::Pod => PODS,
                Self::Share => PODS + MAX_TAPS,
                Self::Namespace => PODS + 2 * MAX_TAPS,
                Self::Node => PODS + 3 * MAX_TAPS,
            }
    }
}

/// Elements of `LIMITS`.
pub const LIMITS_LEN: usize = Level::Node.limits(1) as usize;
/// Elements of `METERS`.
pub const METERS_LEN: usize = Level::Node.meter(1) as usize;
