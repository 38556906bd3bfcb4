//! Parts that several rooms share: accept loops, pauses after failures, rate limits, places for requests, and logging a
//! problem once.
//!
//! This room names no other room, and knows neither pods nor packets.

pub(crate) mod accept;
pub(crate) mod backoff;
pub(crate) mod pace;
pub(crate) mod places;
pub(crate) mod told;
