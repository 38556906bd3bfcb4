//! Stories that stop the cluster's components, act without the knowledge of its runtime, or install CRDs of others.
//! They run only on a cluster that was built here. `cargo xtask test` refers to this module by its name.

mod certificates;
mod outages;
mod packets;
mod static_pods;
