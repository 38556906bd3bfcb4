//! The Mirror that `tail` creates, its key, and its deletion.
//!
//! The key is random, and known only to this process and to the agents that receive it. The Mirror contains its
//! SHA-256. So anyone who can create Mirrors in the namespace can read its packets.

use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use mirror_api::{Mirror, MirrorSpec, Stream};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use crate::{cli::TailArgs, cluster::Cluster, tell, workload::Selection};

/// The label of Mirrors that `tail` creates.
const LABEL: &str = "podmirror.io/tail";
/// How long a Mirror stays after its time limit, before another `tail` treats it as abandoned. The clocks of this
/// machine and of the API server may differ.
const GRACE: Duration = Duration::from_secs(300);
/// Timeout for the API server to create or delete the Mirror.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Request {
    /// Its namespace and name, as in a request to an agent.
    pub(super) mirror: String,
    /// The key for its stream.
    pub(super) key: String,
    name: String,
    uid: Option<String>,
}

impl Request {
    pub(super) async fn make(
        args: &TailArgs,
        selection: &Selection,
        cluster: &Cluster,
    ) -> anyhow::Result<Self> {
        let key = random::<32>()?;
        let name = format!("tail-{}", random::<6>()?);
        let spec = MirrorSpec {
            pod_selector: selection.labels.clone(),
            settings: args.settings()?,
            stream: Some(Stream { key_sha256: sha256(&key), pods: selection.pods.clone() }),
            ..MirrorSpec::default()
        };
        let mut mirror = Mirror::new(&name, spec);
        mirror.metadata.labels = Some([(LABEL.to_owned(), "true".to_owned())].into());
        let (api, namespace) = (cluster.own::<Mirror>(), &cluster.namespace);
        let made = timeout(PATIENCE, api.create(&PostParams::default(), &mirror)).await;
        let made = made.context("the API server does not answer").and_then(|made| Ok(made?));
        let made = made.with_context(|| format!("cannot create a Mirror in namespace {namespace}"))?;
        Ok(Self { mirror: format!("{namespace}/{name}"), key, name, uid: made.metadata.uid })
    }

    pub(super) async fn delete(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let api = cluster.own::<Mirror>();
        let preconditions = Preconditions { uid: self.uid.clone(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let deleted = timeout(PATIENCE, api.delete(&self.name, &params)).await;
        let deleted = match deleted.context("the API server does not answer") {
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
            deleted => deleted.and_then(|deleted| Ok(deleted?)).map(drop),
        };
        deleted.with_context(|| {
            format!("cannot delete the Mirror {}; it copies nothing, and you can delete it", self.mirror)
        })
    }
}

/// Deletes the abandoned Mirrors of `tail` commands that were killed. They copy nothing, so a failure is ignored.
pub(super) async fn sweep(cluster: &Cluster) {
    let api = cluster.own::<Mirror>();
    let Ok(mirrors) = api.list(&ListParams::default().labels(LABEL)).await else { return };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for mirror in mirrors.items.iter().filter(|mirror| is_left(mirror, now)) {
        let name = mirror.metadata.name.as_deref().unwrap_or_default();
        if api.delete(name, &DeleteParams::default()).await.is_ok() {
            tell(&format!("deleted the Mirror {name}, which an earlier tail left behind"));
        }
    }
}

/// Whether the time limit of a Mirror passed long ago. `now` is the time since the epoch.
fn is_left(mirror: &Mirror, now: Duration) -> bool {
    let duration = mirror.spec.settings.read().ok().and_then(|settings| settings.budget.duration);
    let made =
        mirror.metadata.creation_timestamp.as_ref().and_then(|time| u64::try_from(time.0.as_second()).ok());
    match (made, duration) {
        (Some(made), Some(duration)) => Duration::from_secs(made) + duration + GRACE < now,
        _ => false,
    }
}

/// Returns `N` random bytes, in hexadecimal digits.
fn random<const N: usize>() -> anyhow::Result<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).context("cannot get random numbers from the system")?;
    Ok(hex(&bytes))
}

fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
    use mirror_api::{Limits, SettingsSpec};

    use super::*;

    #[test]
    fn a_key_is_random_and_its_hash_is_that_of_sha256sum() {
        let [one, other] = [random::<32>().unwrap(), random::<32>().unwrap()];
        assert!(one != other && one.len() == 64, "{one} {other}");
        assert_eq!(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn only_a_mirror_whose_time_is_long_up_is_left() {
        let mirror = |duration: Option<&str>| {
            let limits = duration.map(|text| Limits { duration: Some(text.into()), ..Limits::default() });
            let settings = SettingsSpec { limits, ..SettingsSpec::default() };
            let mut mirror = Mirror::new("tail-1", MirrorSpec { settings, ..MirrorSpec::default() });
            mirror.metadata.creation_timestamp = Some(Time(Timestamp::from_second(1000).unwrap()));
            mirror
        };
        let at = Duration::from_secs;
        assert!(!is_left(&mirror(Some("15m")), at(1000 + 900 + 300)));
        assert!(is_left(&mirror(Some("15m")), at(1000 + 900 + 301)));
        assert!(!is_left(&mirror(None), at(1 << 40)));
    }
}
