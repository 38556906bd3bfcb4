//! The pure parts of `cargo xtask bench traffic`: the plan of the measurements, the parsers of the tools' output, the
//! figures, and the report.
//!
//! ```text
//! plan ─► the binary `traffic` runs each turn ─► results ─► figures ─► report, plots
//!         (namespaces, contestants, tools)   ▲                         ▲
//!         output of iperf3, sockperf, … ─► tools                       published
//! ```
//!
//! Nothing here starts a program, or reads a file or a clock: the binary in `bin/traffic` does, and calls this crate.

pub mod figures;
pub mod plan;
pub mod plots;
pub mod published;
pub mod report;
pub mod results;
pub mod tools;
