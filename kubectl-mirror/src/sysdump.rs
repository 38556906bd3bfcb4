//! `kubectl mirror sysdump`: an archive for a bug report.
//!
//! This module reads, with the rights of its user, and requests no packets and no Secrets. [`choice`] has the lists
//! and the bounds, and [`redact`] removes the values that can be secret; both are pure. [`archive`] writes the
//! file. The archive's `errors.txt` has a line for each thing that cannot be read or is left out; the command
//! continues.

mod archive;
mod choice;
mod redact;

use std::{path::PathBuf, time::Duration};

use anyhow::{Error, bail};
use http_body_util::BodyExt as _;
use k8s_openapi::jiff::Timestamp;
use mirror_core::status::printable;
use serde_json::{Value, json};

use self::{
    archive::Archive,
    choice::{MOST_BYTES, PODS, Release},
    redact::redact,
};
use crate::{
    check,
    cluster::{Cluster, within},
    packets, print,
    reports::Reports,
    stop_signals, tell,
};

/// Timeout for the beginning of a text.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for a whole answer.
const LONGEST: Duration = Duration::from_secs(60);
/// Maximum number of texts that are read at a time.
const AT_A_TIME: usize = 8;
/// Maximum number of lines of `errors.txt` on standard error.
const MOST_TOLD: usize = 20;

/// Writes the archive, and prints its path.
pub(crate) async fn sysdump(output: Option<PathBuf>, cluster: &Cluster) -> anyhow::Result<()> {
    // From here on, Ctrl-C removes the unfinished file.
    let mut stop = stop_signals()?;
    let archive = Archive::create(output, Timestamp::now())?;
    let dump = Dump { cluster, archive, errors: Vec::new() };
    let path = tokio::select! {
        path = dump.write() => path?,
        _ = stop.recv() => bail!("interrupted, so there is no archive"),
    };
    print(&format!("{}\n", path.display()))
}

/// The archive, as far as it is written.
struct Dump<'c> {
    cluster: &'c Cluster,
    archive: Archive,
    /// The lines of `errors.txt`.
    errors: Vec<String>,
}

impl Dump<'_> {
    async fn write(mut self) -> anyhow::Result<PathBuf> {
        let cluster = self.cluster;
        let server = within(PATIENCE, cluster.client.apiserver_version()).await.map_err(Error::msg)?;
        let versions = json!({ "plugin": env!("CARGO_PKG_VERSION"), "server": server });
        self.archive.add("versions.json", &serde_json::to_vec_pretty(&versions)?)?;
        self.archive.add("check.txt", check::table(cluster).await.as_bytes())?;
        // The list of those of the release fails for the same reason.
        let sets = format!("/apis/apps/v1/namespaces/{}/daemonsets", cluster.agents);
        let sets = within(LONGEST, Reports::of(cluster, &sets)).await;
        let release = Release::of(&cluster.agents, &sets.map(|list| list.object).unwrap_or_default());
        let mut texts = Vec::new();
        for (kind, uri) in release.lists() {
            let (objects, left_out) = release.part(kind, self.objects(kind, &uri).await);
            if left_out > 0 {
                self.error(kind, &format!("{left_out} are left out"));
            }
            if kind == PODS {
                texts = objects.iter().flat_map(choice::texts).collect();
            }
            self.archive.add(&format!("{kind}.json"), &serde_json::to_vec_pretty(&objects)?)?;
        }
        self.texts(&texts).await?;
        self.archive.add("errors.txt", self.errors.concat().as_bytes())?;
        let path = self.archive.finish()?;
        self.errors.iter().take(MOST_TOLD).for_each(|line| tell(line.trim_end()));
        if let Some(more @ 1..) = self.errors.len().checked_sub(MOST_TOLD) {
            tell(&format!("{more} more lines are in errors.txt in the archive"));
        }
        Ok(path)
    }

    fn error(&mut self, what: &str, why: &str) {
        self.errors.push(printable(&format!("{what}: {why}")) + "\n");
    }

    /// The objects that answer a request, redacted.
    async fn objects(&mut self, kind: &str, uri: &str) -> Vec<Value> {
        let Reports { mut object, warnings } = match within(LONGEST, Reports::of(self.cluster, uri)).await {
            Ok(answer) => answer,
            Err(why) => {
                self.error(kind, &why);
                return Vec::new();
            }
        };
        if !warnings.is_empty() {
            self.error(kind, &warnings.join("; "));
        }
        if object["metadata"]["continue"].as_str().is_some_and(|more| !more.is_empty()) {
            self.error(kind, "there are more, which are left out");
        }
        redact(&mut object);
        match object.get_mut("items").map(Value::take) {
            Some(Value::Array(objects)) => objects,
            _ => Vec::new(),
        }
    }

    /// Adds texts, by their paths and URIs.
    async fn texts(&mut self, texts: &[(String, String)]) -> anyhow::Result<()> {
        let cluster = self.cluster;
        let read =
            |(_, uri): &(String, String)| tokio::spawn(within(LONGEST, end_of(cluster.clone(), uri.clone())));
        for some in texts.chunks(AT_A_TIME) {
            let reads: Vec<_> = some.iter().map(read).collect();
            for ((path, _), read) in some.iter().zip(reads) {
                match read.await.unwrap_or_else(|gone| Err(gone.to_string())) {
                    Ok((text, is_cut)) => {
                        if is_cut || choice::has_all_lines(path, &text) {
                            self.error(path, "the text is long, and its beginning is left out");
                        }
                        self.archive.add(path, &text)?;
                    }
                    Err(why) => self.error(path, &why),
                }
            }
        }
        Ok(())
    }
}

/// The end of the text that answers a request, and whether the text is longer. The limit of the API of logs would keep
/// its beginning.
async fn end_of(cluster: Cluster, uri: String) -> anyhow::Result<(Vec<u8>, bool)> {
    let answer = within(PATIENCE, packets::get(&cluster, &uri)).await.map_err(Error::msg)?;
    let (mut body, mut text, mut is_cut) = (answer.into_body(), Vec::new(), false);
    while let Some(part) = body.frame().await {
        text.extend_from_slice(&part?.into_data().unwrap_or_default());
        // Not at each part, because the rest is moved.
        is_cut |= text.len() > 2 * MOST_BYTES && choice::keep_end(&mut text, MOST_BYTES);
    }
    is_cut |= choice::keep_end(&mut text, MOST_BYTES);
    Ok((text, is_cut))
}

#[cfg(test)]
mod tests;
