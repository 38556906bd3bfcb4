//! [`Lease`]: leader election, so that one of several controllers is active.
//!
//! As in the components of Kubernetes: the holder renews a `Lease` object, and a replica that sees no renewal for the
//! whole duration, by its own clock, takes it over. A holder that cannot renew it stops earlier than that. The resource
//! version of the object ensures that only one of two replicas takes it.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease as Object, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use super::{Health, Identity};
use crate::util::told::is_news;

/// A `Lease` object of the API, for this replica.
pub(super) struct Lease {
    api: Api<Object>,
    identity: Identity,
    health: Health,
    /// The last spec of another holder, and the time since which it is unchanged.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Lease {
    pub(super) fn new(client: Client, identity: Identity, health: Health) -> Self {
        Self { api: Api::namespaced(client, &identity.namespace), identity, health, seen: None }
    }

    /// Interval of the attempts to acquire or renew it.
    fn pace(&self) -> Duration {
        self.identity.duration / 3
    }

    /// Waits until this replica holds the Lease.
    pub(super) async fn acquire(&mut self) {
        let mut told = None;
        loop {
            match self.attempt().await {
                Ok(true) => return,
                Ok(false) => told = None,
                Err(error) => {
                    if is_news(&mut told, &error) {
                        warn!(
                            lease = self.identity.lease,
                            error, "cannot acquire the Lease; the controller retries"
                        );
                    }
                }
            }
            sleep(self.pace()).await;
        }
    }

    /// Renews the Lease. Returns when it is lost.
    pub(super) async fn hold(&mut self) {
        let mut renewed = Instant::now();
        loop {
            sleep(self.pace()).await;
            match self.attempt().await {
                Ok(true) => renewed = Instant::now(),
                Ok(false) => return,
                Err(error) => debug!(lease = self.identity.lease, error, "cannot renew the Lease"),
            }
            // One more attempt would be too late.
            if renewed.elapsed() + self.pace() >= self.identity.duration {
                return;
            }
        }
    }

    /// Releases the Lease, so that another replica need not wait.
    pub(super) async fn release(&mut self) {
        let released = timeout(self.pace(), self.write_with(None)).await;
        if !matches!(released, Ok(Ok(true))) {
            debug!(lease = self.identity.lease, "the Lease was not released");
        }
    }

    /// Acquires or renews the Lease, if it is free or held by this replica. Returns whether this replica holds it then.
    async fn attempt(&mut self) -> Result<bool, String> {
        let holder = Some(self.identity.holder.clone());
        match timeout(self.pace(), self.write_with(holder)).await {
            Ok(Ok(is_held)) => {
                self.health.answered();
                Ok(is_held)
            }
            Ok(Err(error)) => Err(mirror_client::in_words(&error)),
            Err(_) => Err("no answer".to_owned()),
        }
    }

    /// Writes `holder`, if the Lease is free or held by this replica. Returns whether it was written.
    async fn write_with(&mut self, holder: Option<String>) -> kube::Result<bool> {
        let found = self.api.get_opt(&self.identity.lease).await?;
        let before = found.as_ref().and_then(|object| object.spec.clone()).unwrap_or_default();
        if !self.is_free(&before, Instant::now()) {
            return Ok(false);
        }
        let now = MicroTime(Timestamp::now());
        let is_ours = before.holder_identity.as_ref() == Some(&self.identity.holder);
        let transitions = before.lease_transitions.unwrap_or(0);
        let spec = LeaseSpec {
            lease_duration_seconds: i32::try_from(self.identity.duration.as_secs()).ok(),
            acquire_time: before.acquire_time.filter(|_| is_ours).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions.saturating_add(i32::from(!is_ours && found.is_some()))),
            holder_identity: holder,
            ..LeaseSpec::default()
        };
        let written = match found {
            Some(object) => {
                let object = Object { spec: Some(spec), ..object };
                self.api.replace(&self.identity.lease, &PostParams::default(), &object).await
            }
            None => {
                let metadata =
                    ObjectMeta { name: Some(self.identity.lease.clone()), ..ObjectMeta::default() };
                self.api.create(&PostParams::default(), &Object { metadata, spec: Some(spec) }).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether this replica holds it or can take it.
    fn is_free(&mut self, found: &LeaseSpec, now: Instant) -> bool {
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.identity.holder {
            self.seen = None;
            return true;
        }
        // The clocks of two nodes may differ: only the time without a change, as seen here, counts.
        let since = match &self.seen {
            Some((seen, since)) if seen == found => *since,
            _ => now,
        };
        self.seen = Some((found.clone(), since));
        let seconds = found.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(self.identity.duration, Duration::from_secs);
        now.duration_since(since) > duration
    }
}

#[cfg(test)]
mod tests;
