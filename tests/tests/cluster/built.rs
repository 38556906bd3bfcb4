//! Stories that stop the cluster's components, or go behind its runtime's back: only on a cluster that was built here.
//! `cargo xtask test` knows this module by its name.

mod outages;
mod sandboxes;
