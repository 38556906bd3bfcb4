//! `mirror-agent status`: the status of this node, as a table or in JSON. `mirror-agent explain` prints the same for
//! one pod, in sentences.

use super::print;
use crate::{
    cli::args::{OutputFormat, StateArgs},
    report::status::of_node,
};

/// Prints the status.
pub async fn status(output: OutputFormat, state: &StateArgs) -> anyhow::Result<()> {
    let (status, _) = of_node(&state.bpffs).await?;
    let text = match output {
        OutputFormat::Json => serde_json::to_string_pretty(&status)? + "\n",
        OutputFormat::Table => status.table(),
    };
    print(&text)
}

/// Prints whether and how a pod is mirrored.
pub async fn explain((namespace, name): (String, String), state: &StateArgs) -> anyhow::Result<()> {
    let (status, _) = of_node(&state.bpffs).await?;
    print(&status.explain(&format!("{namespace}/{name}")).map_err(anyhow::Error::msg)?)
}
