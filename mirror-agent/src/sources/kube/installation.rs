//! Finds out whether an agent that has to end is being uninstalled, or is replaced by a new one.
//!
//! Only the API server knows. The agent queries it for the DaemonSet that its pod belongs to. This module decides
//! nothing else and changes nothing; `cli::run` calls it at the end, and then cleans up the node or leaves the mirror
//! in place.

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
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{info, warn};

/// The timeout of one request to the API server.
const PATIENCE: Duration = Duration::from_secs(3);
/// The timeout of all requests at the end. A pod has 30 s to end, and needs some of them to clean up.
const DEADLINE: Duration = Duration::from_secs(15);
/// The pause at the end before a request is repeated after a denial.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The number of consecutive denials of everything that are accepted as a fact. An API server that has just started
/// denies every request until it has read the permissions.
const DENIALS: usize = 6;
/// The maximum number of requests. Permissions are removed one after the other, so the first denials may not be of all
/// of them.
const TRIES: usize = 10;
/// The pauses until the DaemonSet is seen for the first time: after no response, and after a response without it.
const LEARN_AFTER_SILENCE: Duration = Duration::from_secs(10);
const LEARN_AFTER_NO: Duration = Duration::from_secs(60);

/// The DaemonSet of this agent.
pub struct Installation {
    asked: Asked,
    namespace: String,
    namespaces: Store<PartialObjectMeta<Namespace>>,
    /// The API server has returned the DaemonSet once, so the agent has the permission.
    may_ask: Arc<AtomicBool>,
    _asking: JoinSet<()>,
}

/// The requests to the API server.
#[derive(Clone)]
struct Asked {
    api: Api<DaemonSet>,
    namespaces: Api<PartialObjectMeta<Namespace>>,
    name: String,
}

/// The API server's response about the DaemonSet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existence {
    /// The DaemonSet exists.
    Present,
    /// It is being deleted, or does not exist.
    Deleted,
    /// The server denies the request (401, 403), but not all others.
    Withheld,
    /// The server denies the request (401, 403), and also another one.
    Denied,
    /// No conclusive response.
    Unknown,
}

impl Installation {
    /// Follows the DaemonSet `name` in `namespace`. Requests it repeatedly until it has been seen, to know whether the
    /// agent has the permission. Must be called in a tokio runtime.
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

    /// Whether the agent is being uninstalled. Returns within 15 s, usually at once.
    pub async fn is_going(&self) -> bool {
        let answer = timeout(DEADLINE, self.asked.ask_for_good()).await.unwrap_or(Existence::Unknown);
        let namespace = self.namespaces.get(&ObjectRef::new(&self.namespace));
        let namespace_is_going = namespace.is_some_and(|found| found.metadata.deletion_timestamp.is_some());
        let may_ask = self.may_ask.load(Ordering::Relaxed);
        let is_going = is_going(answer, may_ask, namespace_is_going);
        info!(daemonset = self.asked.name, ?answer, is_going, "asked whether the agent is being uninstalled");
        is_going
    }
}

impl Asked {
    async fn ask(&self) -> Existence {
        match timeout(PATIENCE, self.api.get_metadata_opt(&self.name)).await {
            Ok(Ok(Some(found))) if found.metadata.deletion_timestamp.is_none() => Existence::Present,
            Ok(Ok(_)) => Existence::Deleted,
            Ok(Err(error)) if is_denial(&error) && self.is_denied_namespaces().await => Existence::Denied,
            Ok(Err(error)) if is_denial(&error) => Existence::Withheld,
            Ok(Err(_)) | Err(_) => Existence::Unknown,
        }
    }

    /// Repeats the request until the responses allow a conclusion.
    async fn ask_for_good(&self) -> Existence {
        let mut answers = Vec::new();
        loop {
            answers.push(self.ask().await);
            if let Some(answer) = believed(&answers) {
                return answer;
            }
            sleep(ASK_AGAIN_AFTER).await;
        }
    }

    /// Whether the API server denies another permission, which was granted together with that for the DaemonSet. A
    /// missing response proves nothing.
    async fn is_denied_namespaces(&self) -> bool {
        let listed = timeout(PATIENCE, self.namespaces.list(&ListParams::default().limit(1))).await;
        matches!(listed, Ok(Err(error)) if is_denial(&error))
    }
}

fn is_denial(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 401 | 403))
}

/// Returns the conclusion from these responses, the newest last; `None` to ask again.
fn believed(answers: &[Existence]) -> Option<Existence> {
    let newest = *answers.last()?;
    let denials = answers.iter().rev().take_while(|answer| **answer == Existence::Denied).count();
    match newest {
        Existence::Present | Existence::Deleted | Existence::Unknown => Some(newest),
        Existence::Denied if denials >= DENIALS => Some(Existence::Denied),
        Existence::Denied | Existence::Withheld => (answers.len() >= TRIES).then_some(Existence::Unknown),
    }
}

/// Repeats the request until the DaemonSet has been seen: the agent may start before it gets its permissions.
async fn learn(asked: Asked, may_ask: Arc<AtomicBool>) {
    let daemonset = &asked.name;
    let mut is_told = false;
    loop {
        let wait = match asked.ask().await {
            Existence::Present => break,
            Existence::Unknown => LEARN_AFTER_SILENCE,
            answer @ (Existence::Deleted | Existence::Withheld | Existence::Denied) => {
                if !is_told {
                    warn!(
                        daemonset,
                        ?answer,
                        "cannot read the agent's own DaemonSet; until this works, an uninstallation leaves the mirror in place"
                    );
                }
                is_told = true;
                LEARN_AFTER_NO
            }
        };
        sleep(wait).await;
    }
    may_ask.store(true, Ordering::Relaxed);
    if is_told {
        info!(daemonset, "the agent's own DaemonSet can be read: an uninstallation will remove the mirror");
    }
}

/// Whether an agent that gets this response at its end is being uninstalled.
///
/// An uninstallation removes the agent's permissions together with the DaemonSet. So an agent that had permissions and
/// has none any more is being uninstalled. If that is wrong (a pod that is deleted by force loses its permissions), the
/// next agent mirrors again. In a deleted namespace, the pods are deleted before the DaemonSets.
const fn is_going(answer: Existence, may_ask: bool, namespace_is_going: bool) -> bool {
    match answer {
        Existence::Present | Existence::Withheld | Existence::Unknown => namespace_is_going,
        Existence::Deleted | Existence::Denied => may_ask || namespace_is_going,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use serde_json::json;
    use tokio::time::Instant;

    use super::{
        super::tests::fake::{self, Reply},
        *,
    };

    #[test]
    fn a_mirror_is_removed_only_if_its_agent_is_known_to_go() {
        use Existence::{Deleted, Denied, Present, Unknown, Withheld};
        for (answer, may_ask, namespace_is_going, expected) in [
            (Present, true, false, false),
            (Present, true, true, true),
            (Withheld, true, false, false),
            (Unknown, true, false, false),
            (Unknown, true, true, true),
            (Deleted, true, false, true),
            (Denied, true, false, true),
            // The agent could never see it: the DaemonSet has another name, or the agent lacks the permission.
            (Deleted, false, false, false),
            (Denied, false, false, false),
            (Denied, false, true, true),
        ] {
            let outcome = is_going(answer, may_ask, namespace_is_going);
            assert_eq!(outcome, expected, "{answer:?} {may_ask} {namespace_is_going}");
        }
    }

    #[test]
    fn what_is_said_is_believed_at_once_and_a_denial_if_it_lasts() {
        use Existence::{Deleted, Denied, Present, Unknown, Withheld};
        for answer in [Present, Deleted, Unknown] {
            assert_eq!(believed(&[answer]), Some(answer));
            assert_eq!(believed(&[Denied, Withheld, Denied, answer]), Some(answer));
        }
        let after = |first: &[Existence], denials| believed(&[first, &vec![Denied; denials]].concat());
        assert_eq!((after(&[], DENIALS - 1), after(&[], DENIALS)), (None, Some(Denied)));
        // Permissions that are removed one after the other.
        let withheld = [Denied, Withheld, Withheld];
        assert_eq!((after(&withheld, DENIALS - 1), after(&withheld, DENIALS)), (None, Some(Denied)));
        assert_eq!(believed(&[Withheld; TRIES - 1]), None);
        assert_eq!(believed(&[Withheld; TRIES]), Some(Unknown));
        assert_eq!(believed(&[[Denied, Withheld]; TRIES / 2].concat()), Some(Unknown));
    }

    /// The responses of an API server about the DaemonSet and about everything else, at each request of the DaemonSet.
    fn asked(says: impl Fn(usize) -> [Reply; 2] + Clone + Send + Sync + 'static) -> Asked {
        let times = Arc::new(AtomicUsize::new(0));
        let client = fake::client(move |request| {
            if request.uri().path().ends_with("/daemonsets/agent") {
                let [of_daemonset, _] = says(times.fetch_add(1, Ordering::Relaxed));
                of_daemonset
            } else {
                let [_, of_namespaces] = says(times.load(Ordering::Relaxed) - 1);
                of_namespaces
            }
        });
        Asked {
            api: Api::namespaced(client.clone(), "ours"),
            namespaces: Api::all(client),
            name: "agent".into(),
        }
    }

    fn stands() -> Reply {
        let metadata = json!({"name": "agent", "namespace": "ours"});
        Reply::Object(
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata}),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_denies_all_for_a_moment_is_not_believed() {
        let asked = asked(|time| match time {
            0..3 => [Reply::Status(403), Reply::Status(403)],
            _ => [stands(), Reply::Status(403)],
        });
        assert_eq!(asked.ask_for_good().await, Existence::Present);
    }

    #[tokio::test(start_paused = true)]
    async fn whose_rights_are_all_gone_for_good_believes_it_in_time() {
        let start = Instant::now();
        // At the first request, one of the two permissions still exists.
        let asked = asked(|time| match time {
            0 => [Reply::Status(403), stands()],
            _ => [Reply::Status(401), Reply::Status(403)],
        });
        assert_eq!(asked.ask_for_good().await, Existence::Denied);
        assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_server_and_a_missing_daemonset_are_asked_once() {
        let start = Instant::now();
        assert_eq!(asked(|_| [Reply::Never, Reply::Never]).ask_for_good().await, Existence::Unknown);
        assert_eq!(start.elapsed().as_secs(), PATIENCE.as_secs());
        assert_eq!(asked(|_| [Reply::Status(404), Reply::Never]).ask_for_good().await, Existence::Deleted);
        assert_eq!(start.elapsed().as_secs(), PATIENCE.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_comes_before_its_rights_learns_of_them() {
        let asked = asked(|time| match time {
            0 => [Reply::Never, Reply::Never],
            1 => [Reply::Status(403), Reply::Status(403)],
            2 => [Reply::Status(404), Reply::Never],
            _ => [stands(), Reply::Never],
        });
        let start = Instant::now();
        let may_ask = Arc::new(AtomicBool::new(false));
        learn(asked, Arc::clone(&may_ask)).await;
        assert!(may_ask.load(Ordering::Relaxed));
        assert_eq!(
            start.elapsed().as_secs(),
            (PATIENCE + LEARN_AFTER_SILENCE + 2 * LEARN_AFTER_NO).as_secs()
        );
    }
}
