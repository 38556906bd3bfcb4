//! The reports about pods of this node, which a server requests.

use std::{path::Path, time::Duration};

use mirror_api::packets::{PodReport, ReportRequest};
use tokio::time::{Instant, sleep};

use crate::{cli::StateArgs, cmd::status::of_node};

/// Maximum time over which rates are measured.
const MAX_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the reports that a server requests. `bpffs`: the directory of the agent's `--bpffs`.
///
/// It waits for the agent's loop without leaving the thread to other tasks.
pub(super) async fn answer(bpffs: &Path, request: &ReportRequest) -> anyhow::Result<Vec<PodReport>> {
    let ReportRequest { namespace, name, interval_millis } = request;
    let state = StateArgs { bpffs: bpffs.to_owned() };
    let mut earlier = None;
    if let Some(millis) = interval_millis {
        earlier = Some((Instant::now(), of_node(&state).await?));
        sleep(Duration::from_millis(*millis).min(MAX_INTERVAL)).await;
    }
    let (at, status) = (Instant::now(), of_node(&state).await?);
    let earlier = earlier.as_ref().map(|(then, status)| (status, at.duration_since(*then)));
    Ok(status.reports([namespace.as_deref(), name.as_deref()], earlier))
}
