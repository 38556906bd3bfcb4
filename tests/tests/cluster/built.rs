//! Stories that stop the cluster's components, or act without the knowledge of its runtime. They run only on a cluster
//! that was built here. `cargo xtask test` refers to this module by its name.

mod outages;
mod packets;
mod sandboxes;
mod static_pods;
