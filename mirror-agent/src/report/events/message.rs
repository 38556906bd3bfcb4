//! [`Message`]: an Event of the Kubernetes API.
//!
//! The name of an Event is a hash of its text. So a repeated post finds the existing Event, and continues it as a
//! series.

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// Maximum length of a note in bytes, as limited by the API.
const NOTE_MAX: usize = 1024;
/// The namespace of Events on objects without a namespace.
const NAMESPACE_OF_CLUSTER: &str = "default";

/// The contents of an Event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    /// The object of the Event: with its kind, name, UID and, if it has one, its namespace.
    pub(crate) about: ObjectReference,
    /// `Warning`, or else `Normal`.
    pub(crate) is_warning: bool,
    /// One word.
    pub(crate) reason: String,
    /// Sentences.
    pub(crate) note: String,
}

/// A digest that is stable across versions of this program and of its compiler.
pub(super) fn digest(texts: [&str; 5]) -> u64 {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update(text.len().to_be_bytes());
        hasher.update(text);
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

impl Message {
    /// The name of its Event.
    pub(super) fn name(&self) -> String {
        let Self { about: ObjectReference { uid, namespace, name, .. }, reason, note, .. } = self;
        let [uid, namespace, name] = [uid, namespace, name].map(|text| text.as_deref().unwrap_or_default());
        format!("podmirror-{:016x}", digest([uid, namespace, name, reason, note]))
    }

    /// The namespace of its Event.
    fn namespace(&self) -> &str {
        self.about.namespace.as_deref().unwrap_or(NAMESPACE_OF_CLUSTER)
    }

    /// Its Event, reported by an `instance` of a `controller`.
    pub(super) fn event(&self, controller: &str, instance: &str) -> Event {
        let Self { about, is_warning, reason, note } = self;
        Event {
            metadata: ObjectMeta {
                name: Some(self.name()),
                namespace: Some(self.namespace().to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            type_: Some(if *is_warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(reason.clone()),
            action: Some("Mirror".into()),
            note: Some(note[..note.floor_char_boundary(NOTE_MAX)].to_owned()),
            regarding: Some(about.clone()),
            reporting_controller: Some(controller.to_owned()),
            reporting_instance: Some(instance.to_owned()),
            ..Event::default()
        }
    }

    /// Posts it once, as a new Event or as one more of its series.
    pub(crate) async fn post(&self, client: &Client, controller: &str, instance: &str) -> kube::Result<()> {
        let api = Api::<Event>::namespaced(client.clone(), self.namespace());
        match api.create(&PostParams::default(), &self.event(controller, instance)).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {
                refresh(&api, &self.name(), None).await.map(drop)
            }
            answer => answer.map(drop),
        }
    }
}

/// Raises the count in the series of an existing Event, which makes the server keep the Event. Returns the new count.
/// `count` is the one so far, if it is known.
pub(super) async fn refresh(api: &Api<Event>, name: &str, count: Option<i32>) -> kube::Result<i32> {
    let patch = async |change| api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await;
    let before = match count {
        Some(count) => count,
        // An earlier agent has posted it. An empty patch changes nothing, and returns the present Event: so the agent
        // needs no right to read Events.
        None => patch(json!({})).await?.series.map_or(1, |series| series.count),
    };
    let count = before.saturating_add(1).max(2);
    let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
    patch(json!({ "series": series })).await.map(|_| count)
}
