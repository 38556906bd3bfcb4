//! The reports about pods, which `coverage`, `top` and `explain` show. The nodes evaluate and measure, not the plugin.

use std::io::{self, Write as _};

use anyhow::Context as _;
use mirror_api::packets::PodReport;
use mirror_core::status::NicReport;
use serde::Deserialize as _;
use serde_json::Value;

use crate::{cluster::Cluster, packets};

/// The table entry of an unknown value.
pub(crate) const UNKNOWN: &str = "<unknown>";

/// An answer of the API.
pub(crate) struct Reports {
    /// The object: a report, or a list.
    pub(crate) object: Value,
    /// The nodes without an answer, each with the reason.
    pub(crate) warnings: Vec<String>,
}

impl Reports {
    /// Requests the reports of a namespace, or of all: `podreports`, or one of them.
    pub(crate) async fn get(
        cluster: &Cluster,
        scope: Option<&str>,
        resource: &str,
        parameters: &[(&str, String)],
    ) -> anyhow::Result<Self> {
        Self::of(cluster, &packets::uri(scope, resource, parameters)).await
    }

    /// The answer to a request, also to another API.
    pub(crate) async fn of(cluster: &Cluster, uri: &str) -> anyhow::Result<Self> {
        let response = packets::get(cluster, uri).await?;
        let warnings = packets::warnings(&response);
        let answer = response.into_body().collect_bytes().await?;
        let object = serde_json::from_slice(&answer).context("cannot read the answer")?;
        Ok(Self { object, warnings })
    }

    /// The reports, in the order of namespaces and pods.
    pub(crate) fn pods(&self) -> anyhow::Result<Vec<PodReport>> {
        let pods = match self.object.get("items") {
            Some(items) => Vec::deserialize(items),
            None => PodReport::deserialize(&self.object).map(|pod| vec![pod]),
        };
        pods.context(
            "cannot read the reports, perhaps because the server has another version than this plugin",
        )
    }

    /// Prints the warnings, as kubectl does.
    pub(crate) fn warn(&self) {
        for warning in &self.warnings {
            // A failure to print cannot be reported.
            let _ = writeln!(io::stderr(), "Warning: {warning}");
        }
    }
}

/// The tapped NICs of the pods.
pub(crate) fn nics(pods: &[PodReport]) -> Vec<(&PodReport, &NicReport)> {
    pods.iter().flat_map(|pod| pod.nics.iter().map(move |nic| (pod, nic))).collect()
}

/// The first cells of the row of a NIC.
pub(crate) fn place((pod, nic): (&PodReport, &NicReport)) -> Vec<String> {
    [&pod.metadata.namespace, &pod.metadata.name, &nic.name, &pod.node].map(Clone::clone).to_vec()
}
