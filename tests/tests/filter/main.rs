//! Compares the filter compiler and the evaluation of its programs with libpcap, on the same expressions and frames.
//!
//! The tests load libpcap at run time; it is installed with tcpdump. tcpdump, editcap and mergecap write the captures.
//! `MIRROR_FUZZ_PAIRS` is the number of random pairs, `MIRROR_FUZZ_SEED` repeats a run. The tests need no root.
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
mod oracle;
mod people;
mod random;
mod same;
