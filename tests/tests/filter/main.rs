//! The filter compiler and its evaluation, held against libpcap on the same expressions and frames.
//!
//! libpcap is loaded at run time: tcpdump brings it. Captures are written by tcpdump, editcap and mergecap. `MIRROR_FUZZ_PAIRS` says how many random pairs are compared,
//! `MIRROR_FUZZ_SEED` repeats a run. Needs no root.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]
#![expect(clippy::print_stdout, reason = "what a long run has compared")]

mod captures;
mod errors;
mod examples;
mod expressions;
mod frames;
mod oracle;
mod random;
mod same;
