//! Whether an agent that is told to end is being uninstalled, or only makes room for the next one.
//!
//! The API server alone knows: it is asked for the DaemonSet that the agent is a pod of. It decides nothing else and
//! changes nothing; `cmd::run` asks at the end, and cleans up the node or leaves the mirror in place.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
use kube::{
    Api, Client,
    api::ListParams,
    core::PartialObjectMeta,
    runtime::reflector::{ObjectRef, Store},
};
use tokio::{task::JoinSet, time::timeout};
use tracing::{info, warn};

/// How long to wait for the API server's answer. A pod has 30 s to end, and needs some of them to clean up.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait before asking again, until there is a first answer.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// How often, a second apart, an agent asks that is denied the answer but has other rights.
const TRIES: u32 = 5;

/// The DaemonSet of this agent.
pub struct Installation {
    asked: Asked,
    namespace: String,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    /// The API server has answered once, as it should.
    may_ask: Arc<AtomicBool>,
    _asking: JoinSet<()>,
}

/// What is asked of the API server.
#[derive(Clone)]
struct Asked {
    api: Api<DaemonSet>,
    namespaces: Api<PartialObjectMeta<Namespace>>,
    name: String,
}

/// What the API server says of the DaemonSet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// It stands.
    Stands,
    /// It is being deleted, or there is none.
    Gone,
    /// It is not told to this agent (401, 403), which has no other rights either.
    Denied,
    /// No answer that says anything.
    None,
}

impl Installation {
    /// The DaemonSet `name` in `namespace`. Asks for it at once, to know whether it may. Must be called in a tokio
    /// runtime.
    pub(super) fn new(
        client: Client,
        namespaces: Store<PartialObjectMeta<Namespace>>,
        namespace: String,
        name: String,
    ) -> Self {
        let asked =
            Asked { api: Api::namespaced(client.clone(), &namespace), namespaces: Api::all(client), name };
        let may_ask = Arc::new(AtomicBool::new(false));
        let mut asking = JoinSet::new();
        asking.spawn(learn(asked.clone(), Arc::clone(&may_ask)));
        Self { asked, namespace, namespaces, may_ask, _asking: asking }
    }

    /// Whether the agent is being uninstalled. Within a few seconds.
    pub async fn is_going(&self) -> bool {
        let answer = self.asked.ask_for_good().await;
        let namespace = self.namespaces.get(&ObjectRef::new(&self.namespace));
        let namespace_is_going = namespace.is_some_and(|found| found.metadata.deletion_timestamp.is_some());
        let may_ask = self.may_ask.load(Ordering::Relaxed);
        let is_going = is_going(answer, may_ask, namespace_is_going);
        info!(daemonset = self.asked.name, ?answer, is_going, "asked whether the agent is being uninstalled");
        is_going
    }
}

impl Asked {
    async fn ask(&self) -> Answer {
        match timeout(PATIENCE, self.api.get_metadata_opt(&self.name)).await {
            Ok(Ok(Some(found))) if found.metadata.deletion_timestamp.is_none() => Answer::Stands,
            Ok(Ok(_)) => Answer::Gone,
            Ok(Err(error)) if is_denial(&error) => Answer::Denied,
            Ok(Err(_)) | Err(_) => Answer::None,
        }
    }

    /// Rights are removed one after the other: so who is denied this one, and not all of them, asks again.
    async fn ask_for_good(&self) -> Answer {
        for _ in 0..TRIES {
            match self.ask().await {
                Answer::Denied if !self.is_denied_namespaces().await => {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                answer => return answer,
            }
        }
        Answer::None
    }

    /// Whether the API server says that a right is gone that was given together with the one to ask. No answer says
    /// nothing.
    async fn is_denied_namespaces(&self) -> bool {
        let listed = timeout(PATIENCE, self.namespaces.list(&ListParams::default().limit(1))).await;
        matches!(listed, Ok(Err(error)) if is_denial(&error))
    }
}

fn is_denial(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 401 | 403))
}

/// Asks until there is an answer.
async fn learn(asked: Asked, may_ask: Arc<AtomicBool>) {
    loop {
        match asked.ask().await {
            Answer::Stands => return may_ask.store(true, Ordering::Relaxed),
            Answer::None => tokio::time::sleep(ASK_AGAIN_AFTER).await,
            answer @ (Answer::Gone | Answer::Denied) => {
                let daemonset = asked.name;
                warn!(
                    daemonset,
                    ?answer,
                    "cannot see the agent's own DaemonSet: an uninstallation will leave the mirror in place"
                );
                return;
            }
        }
    }
}

/// Whether an agent that gets this answer at its end is being uninstalled.
///
/// What installs an agent also removes its rights, at the same moment as the DaemonSet: so to lose all rights, having
/// had them, is an answer too. Where it is a wrong one (a pod that is deleted by force loses them), the next agent
/// mirrors anew. A namespace that is deleted loses its pods before its DaemonSets.
const fn is_going(answer: Answer, may_ask: bool, namespace_is_going: bool) -> bool {
    match answer {
        Answer::Stands | Answer::None => namespace_is_going,
        Answer::Gone | Answer::Denied => may_ask || namespace_is_going,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_is_removed_only_if_its_agent_is_known_to_go() {
        use Answer::{Denied, Gone, None, Stands};
        for (answer, may_ask, namespace_is_going, expected) in [
            (Stands, true, false, false),
            (Stands, true, true, true),
            (None, true, false, false),
            (None, true, true, true),
            (Gone, true, false, true),
            (Denied, true, false, true),
            // It never could: the DaemonSet has another name, or there is no right to ask.
            (Gone, false, false, false),
            (Denied, false, false, false),
            (Denied, false, true, true),
        ] {
            let outcome = is_going(answer, may_ask, namespace_is_going);
            assert_eq!(outcome, expected, "{answer:?} {may_ask} {namespace_is_going}");
        }
    }
}
