//! The pure parts of `cargo xtask bench traffic`: what is measured and in which order, what the tools' output means,
//! the figures, and the report.
//!
//! ```text
//! plan ─► the binary `traffic` runs each turn ─► results ─► figures ─► report, plots
//!         (namespaces, contestants, tools)   ▲                         ▲
//!         output of iperf3, sockperf, … ─► tools                       published
//! ```
//!
//! Nothing here starts a program, reads a file or asks a clock: the binary in `bin/traffic` does, and calls this.

pub mod figures;
pub mod plan;
pub mod plots;
pub mod published;
pub mod report;
pub mod results;
pub mod tools;
