//! The reports about pods of this node, which a server requests.

use std::{future::Future, path::Path, sync::Arc, time::Duration};

use anyhow::ensure;
use mirror_api::packets::ReportRequest;
use mirror_core::status::NodeStatus;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::serve::on_thread;
use crate::report::status::of_node;

/// Maximum time over which rates are measured.
const MAX_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the reports that a server requests, in JSON. `bpffs`: the directory of the agent's `--bpffs`. `places`: those
/// for readings of the status.
pub(super) async fn answer(
    bpffs: &Path,
    request: ReportRequest,
    places: &Arc<Semaphore>,
) -> anyhow::Result<Vec<u8>> {
    let bpffs = bpffs.to_owned();
    let status = move || {
        let bpffs = bpffs.clone();
        async move { of_node(&bpffs).await }
    };
    measure(request, places, status).await
}

/// The same, with a way to read the status. A reading has a thread, because it waits for the agent's loop without leaving
/// the thread to other tasks. Between the two readings for rates, a request has neither a thread nor a place.
pub(super) async fn measure<F>(
    request: ReportRequest,
    places: &Arc<Semaphore>,
    status: impl Fn() -> F + Clone + Send + 'static,
) -> anyhow::Result<Vec<u8>>
where
    F: Future<Output = anyhow::Result<(NodeStatus, Instant)>> + 'static,
{
    let mut earlier = None;
    if let Some(millis) = request.interval_millis {
        let (place, status) = (Arc::clone(places).acquire_owned().await?, status.clone());
        let read = on_thread(move || async move {
            let _place = place;
            status().await
        });
        earlier = Some(read.await??);
        sleep(Duration::from_millis(millis).min(MAX_INTERVAL)).await;
    }
    let place = Arc::clone(places).acquire_owned().await?;
    let reports = on_thread(move || async move {
        let _place = place;
        let (status, at) = status().await?;
        // Rates do not need the reasons, and the pods without a mirror.
        ensure!(earlier.is_some() || status.notes.is_some(), "its reconcile loop does not answer");
        let earlier = earlier.as_ref().map(|(status, then)| (status, at.duration_since(*then)));
        let ReportRequest { namespace, name, .. } = &request;
        Ok(serde_json::to_vec(&status.reports([namespace.as_deref(), name.as_deref()], earlier))?)
    });
    reports.await?
}
