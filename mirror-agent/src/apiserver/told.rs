//! [`Told`]: the log lines and Events about a request for packets. The log has a line for its start, for each pod
//! and for its end, with the ID of the request in the audit log of kube-apiserver. With `pod_events`, each pod gets
//! an Event.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::{sync::mpsc, time::timeout};
use tracing::{debug, info};

use super::{Server, front_proxy::User, query::Scope};
use crate::report::events::message::Message;

/// `reportingController` of the Events.
const REPORTER: &str = "podmirror.io/apiserver";
/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of Events that wait to be posted. Further pods get none.
const WAITING: usize = 256;
/// Maximum number of bytes of an Event's message, which can have a long filter.
const MAX_NOTE: usize = 1024;

/// A request for packets, and who reads them.
pub(super) struct Told {
    user: String,
    audit_id: String,
    scope: Scope,
    began: Instant,
    /// The pods for Events, by `NAMESPACE/NAME`, with their UIDs.
    pods: Option<mpsc::Sender<(String, String)>>,
}

impl Told {
    pub(super) fn new(server: &Server, user: &User, scope: &Scope, filter: Option<&str>) -> Self {
        let (user, audit_id) = (user.name.clone(), user.audit_id.clone().unwrap_or_default());
        let pods = server.options.pod_events.then(|| {
            let (sender, pods) = mpsc::channel(WAITING);
            let filter = filter.map(|filter| format!(", filter {filter:?}")).unwrap_or_default();
            let mut note = format!("User {user} reads the packets of this pod (audit ID {audit_id}{filter})");
            note.truncate(note.floor_char_boundary(MAX_NOTE));
            tokio::spawn(post(server.client.clone(), server.options.service.clone(), note, pods));
            sender
        });
        Self { user, audit_id, scope: scope.clone(), began: Instant::now(), pods }
    }

    /// The client gets packets from now on.
    pub(super) fn begin(&self) {
        let [_, resource, namespace, name] = self.scope.attributes();
        let Self { user, audit_id, .. } = self;
        info!(user, audit_id, resource, namespace, name, "a user reads packets");
    }

    /// A pod is read for the first time. The audit log has no pods that labels select.
    pub(super) fn covered(&self, pod: String, uid: String) {
        let Self { user, audit_id, .. } = self;
        info!(user, audit_id, pod, uid, "a user reads the packets of a pod");
        // A lost Event is not worth a delay.
        let _ = self.pods.as_ref().map(|pods| pods.try_send((pod, uid)));
    }

    /// The client gets no more.
    pub(super) fn end(&self, why: &str, packets: u64) {
        let [_, resource, namespace, name] = self.scope.attributes();
        let (Self { user, audit_id, .. }, seconds) = (self, self.began.elapsed().as_secs());
        info!(user, audit_id, resource, namespace, name, packets, seconds, why, "a user has read packets");
    }
}

/// Posts an Event on each pod.
async fn post(client: Client, instance: String, note: String, mut pods: mpsc::Receiver<(String, String)>) {
    while let Some((pod, uid)) = pods.recv().await {
        let Some((namespace, name)) = pod.split_once('/') else { continue };
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid),
            ..ObjectReference::default()
        };
        let (reason, note) = ("PacketsRead".to_owned(), note.clone());
        let message = Message { about, is_warning: false, reason, note };
        let error = match timeout(PATIENCE, message.post(&client, REPORTER, &instance)).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => mirror_client::in_words(&error),
            Err(_) => "no answer".to_owned(),
        };
        debug!(pod, error, "cannot post an Event");
    }
}
