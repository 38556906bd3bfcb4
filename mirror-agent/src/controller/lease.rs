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

use super::Health;

/// A `Lease` object of the API, for this replica.
pub(super) struct Lease {
    api: Api<Object>,
    name: String,
    /// The identity of this replica.
    holder: String,
    duration: Duration,
    health: Health,
    /// The last spec of another holder, and the time since which it is unchanged.
    seen: Option<(LeaseSpec, Instant)>,
}

/// The next step for the object.
#[derive(Debug, PartialEq)]
enum Step {
    /// Write it: this replica holds it, or it is free.
    Write,
    /// Another replica holds it.
    Wait,
}

impl Lease {
    pub(super) fn new(
        client: Client,
        (namespace, name): (&str, String),
        holder: String,
        duration: Duration,
        health: Health,
    ) -> Self {
        Self { api: Api::namespaced(client, namespace), name, holder, duration, health, seen: None }
    }

    /// Interval of the attempts to acquire or renew it.
    fn pace(&self) -> Duration {
        self.duration / 3
    }

    /// Waits until this replica holds the Lease.
    pub(super) async fn acquire(&mut self) {
        let mut told = None;
        loop {
            match self.attempt().await {
                Ok(true) => return,
                Ok(false) => told = None,
                Err(error) => {
                    if told.as_ref() != Some(&error) {
                        warn!(lease = self.name, error, "cannot acquire the Lease; the controller retries");
                        told = Some(error);
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
                Err(error) => debug!(lease = self.name, error, "cannot renew the Lease"),
            }
            // One more attempt would be too late.
            if renewed.elapsed() + self.pace() >= self.duration {
                return;
            }
        }
    }

    /// Releases the Lease, so that another replica need not wait.
    pub(super) async fn release(&mut self) {
        let released = timeout(self.pace(), self.write_with(None)).await;
        if !matches!(released, Ok(Ok(true))) {
            debug!(lease = self.name, "the Lease was not released");
        }
    }

    /// Acquires or renews the Lease, if it is free or held by this replica. Returns whether this replica holds it then.
    async fn attempt(&mut self) -> Result<bool, String> {
        let holder = Some(self.holder.clone());
        match timeout(self.pace(), self.write_with(holder)).await {
            Ok(Ok(is_held)) => {
                self.health.answered();
                Ok(is_held)
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        }
    }

    /// Writes `holder`, if the Lease is free or held by this replica. Returns whether it was written.
    async fn write_with(&mut self, holder: Option<String>) -> kube::Result<bool> {
        let found = self.api.get_opt(&self.name).await?;
        let before = found.as_ref().and_then(|object| object.spec.clone()).unwrap_or_default();
        if self.judge(&before, Instant::now()) == Step::Wait {
            return Ok(false);
        }
        let now = MicroTime(Timestamp::now());
        let is_ours = before.holder_identity.as_ref() == Some(&self.holder);
        let transitions = before.lease_transitions.unwrap_or(0);
        let spec = LeaseSpec {
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
            acquire_time: before.acquire_time.filter(|_| is_ours).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions.saturating_add(i32::from(!is_ours && found.is_some()))),
            holder_identity: holder,
            ..LeaseSpec::default()
        };
        let written = match found {
            Some(object) => {
                let object = Object { spec: Some(spec), ..object };
                self.api.replace(&self.name, &PostParams::default(), &object).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
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

    fn judge(&mut self, found: &LeaseSpec, now: Instant) -> Step {
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.holder {
            self.seen = None;
            return Step::Write;
        }
        // The clocks of two nodes may differ: only the time without a change, as seen here, counts.
        let since = match &self.seen {
            Some((seen, since)) if seen == found => *since,
            _ => now,
        };
        self.seen = Some((found.clone(), since));
        let seconds = found.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = seconds.map_or(self.duration, Duration::from_secs);
        if now.duration_since(since) > duration { Step::Write } else { Step::Wait }
    }
}

#[cfg(test)]
mod tests;
