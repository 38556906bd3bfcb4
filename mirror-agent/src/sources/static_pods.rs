//! [`StaticPods`]: finds the API copies (mirror pods) of this node's static pods.
//!
//! The cgroups of a static pod have a hash in their name, and two annotations of its API copy have the hash. Anybody
//! who can create pods can write these annotations, in any namespace, so they prove nothing. The kubelet creates a
//! directory for the logs of each pod that it runs, named after the namespace, the name and the UID of the pod, and
//! only root on the node can create another one. Without this proof, a pod keeps its UID in the API, with which no
//! process is found. Both sources of pods use this rule.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use tokio::time::Instant;
use tracing::warn;

use crate::model::{Pod, PodId};

/// The directory of the kubelet for the logs of pods.
const LOGS: &str = "/var/log/pods";
/// The annotations of a static pod's API copy. Both have the same value: the UID that the kubelet uses for the pod and
/// its cgroups.
const STATIC_UID: [&str; 2] = ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"];
/// The kubelet creates the API copy of a static pod shortly before the directory.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns the UID that a pod claims as a static pod, a hash with 32 digits. It must not look like the UID of a pod of
/// the API.
pub(super) fn claimed_uid(pod: &Pod) -> Option<String> {
    let [hash, mirror] = STATIC_UID.map(|key| pod.annotations.get(key));
    let is_hash = |uid: &&String| uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit());
    hash.filter(|hash| mirror == Some(hash)).filter(is_hash).cloned()
}

/// The pods that claim to be static pods.
pub(super) struct StaticPods {
    logs: PathBuf,
    claims: BTreeMap<PodId, Claim>,
}

/// The claim of a pod, which is stored by its id with the hash as the UID.
#[derive(Clone)]
struct Claim {
    is_proven: bool,
    since: Instant,
    is_told: bool,
}

impl Default for StaticPods {
    fn default() -> Self {
        Self { logs: LOGS.into(), claims: BTreeMap::new() }
    }
}

impl StaticPods {
    #[cfg(test)]
    pub(super) fn with_logs(logs: PathBuf) -> Self {
        Self { logs, ..Self::default() }
    }

    /// Replaces the UID of each pod by the hash that it claims, if the hash is proven to be its own. A claim stays
    /// proven for as long as the pod exists.
    pub(super) fn settle(&mut self, pods: Vec<(Pod, Option<String>)>) -> Vec<Pod> {
        let (mut before, now) = (std::mem::take(&mut self.claims), Instant::now());
        let settled = pods.into_iter().map(|(mut pod, hash)| {
            let Some(uid) = hash else { return pod };
            let id = PodId { uid, ..pod.id.clone() };
            let mut claim =
                before.remove(&id).unwrap_or(Claim { is_proven: false, since: now, is_told: false });
            claim.is_proven |= self.has_logs(&id);
            if claim.is_proven {
                pod.id = id.clone();
            } else if !claim.is_told && now.saturating_duration_since(claim.since) >= PATIENCE {
                claim.is_told = true;
                let PodId { namespace, name, uid } = &id;
                warn!(
                    pod = %format_args!("{namespace}/{name}"), uid,
                    "not mirrored: it claims to be a static pod, but the kubelet has no logs of it in {LOGS}"
                );
            }
            self.claims.insert(id, claim);
            pod
        });
        settled.collect()
    }

    /// Does the same for pods whose objects were deleted. The claims of the others do not change.
    pub(super) fn settle_deleted(&mut self, pods: Vec<(Pod, Option<String>)>) -> Vec<Pod> {
        let claims = self.claims.clone();
        let settled = self.settle(pods);
        self.claims = claims;
        settled
    }

    fn has_logs(&self, PodId { namespace, name, uid }: &PodId) -> bool {
        self.logs.join(format!("{namespace}_{name}_{uid}")).is_dir()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use std::fs;

    use super::*;

    const HASH: &str = "f1d2d2f924e986ac86fdf7b36c94bcdf";

    fn pod(namespace: &str, name: &str, uid: &str) -> Pod {
        let id = PodId { uid: uid.into(), namespace: namespace.into(), name: name.into() };
        Pod { id, ..Pod::default() }
    }

    /// A tenant writes the annotations of a static pod on its own pod, before, while and after the API copy of the
    /// static pod exists. The static pod keeps its identity, and the tenant's pod never gets it.
    #[test]
    fn a_static_pod_is_who_the_kubelet_says() {
        let directory = tempfile::tempdir().unwrap();
        let of_etcd = directory.path().join(format!("kube-system_etcd-one_{HASH}"));
        fs::create_dir(&of_etcd).unwrap();
        let mut of = StaticPods::with_logs(directory.path().to_owned());
        let hash = || Some(HASH.to_owned());
        let real = || (pod("kube-system", "etcd-one", "api-1"), hash());
        let settled = |of: &mut StaticPods, pods| {
            of.settle(pods).into_iter().map(|pod| (pod.id.namespace, pod.id.uid)).collect::<Vec<_>>()
        };
        let system = ("kube-system".to_owned(), HASH.to_owned());
        for name in ["etcd-one", "mine"] {
            let of_tenant = || (pod("shop", name, "api-2"), hash());
            let tenant = ("shop".to_owned(), "api-2".to_owned());
            assert_eq!(settled(&mut of, vec![of_tenant()]), std::slice::from_ref(&tenant));
            assert_eq!(settled(&mut of, vec![of_tenant(), real()]), [tenant.clone(), system.clone()]);
            assert_eq!(settled(&mut of, vec![real(), of_tenant()]), [system.clone(), tenant]);
        }
        // A normal pod makes no claim.
        let web = (pod("shop", "web", "api-3"), None);
        assert_eq!(settled(&mut of, vec![web, real()]), [("shop".into(), "api-3".into()), system.clone()]);
        // The API copy is deleted, and the static pod still runs.
        let deleted = of.settle_deleted(vec![real()]).remove(0).id;
        assert_eq!((deleted.namespace, deleted.uid), system.clone());
        // The logs are deleted while the pod exists.
        fs::remove_dir(&of_etcd).unwrap();
        assert_eq!(settled(&mut of, vec![real()]), [system]);
        assert_eq!(settled(&mut of, vec![]), []);
        assert_eq!(settled(&mut of, vec![real()]), [("kube-system".into(), "api-1".into())]);
    }

    /// The API copy exists before the directory, so nothing is logged at once.
    #[tokio::test(start_paused = true)]
    async fn what_is_not_proven_is_told_once_and_not_at_once() {
        let mut of = StaticPods::with_logs("/nowhere".into());
        let mut told = Vec::new();
        for _ in 0..4 {
            of.settle(vec![(pod("shop", "mine", "api-2"), Some(HASH.to_owned()))]);
            told.extend(of.claims.values().map(|claim| claim.is_told));
            tokio::time::sleep(PATIENCE / 2).await;
        }
        assert_eq!(told, [false, false, true, true]);
    }
}
