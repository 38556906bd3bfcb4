//! Parts that several rooms share: accept loops, pauses after failures, rate limits, places for requests, and logging a
//! problem once.
//!
//! No other room is named here, and nothing is about pods or packets.

pub(crate) mod accept;
pub(crate) mod backoff;
pub(crate) mod pace;
pub(crate) mod places;
pub(crate) mod told;
