//! The objects of a request: the pods that it selects, with their nodes, and names for addresses.
//!
//! Each request watches its namespace, or all. [`Objects`] is pure.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
    pin::{Pin, pin},
};

use futures_util::{Stream, TryStreamExt as _, stream};
use k8s_openapi::{
    api::core::v1::{Pod, PodIP, Service},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{
    Api, Client, Resource,
    core::{ApiResource, DynamicResourceScope, ObjectMeta, Selector, SelectorExt as _},
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Config, Event, watcher},
    },
};
use mirror_api::packets::ReadOf;
use mirror_capture::pcapng::MAX_NAMES;
use serde::{Deserialize, Deserializer};

use super::{agents::AgentOptions, query::Refusal};

/// Maximum number of selected pods, and of addresses with names.
pub(super) const MAX_OBJECTS: usize = 50_000;
/// Maximum number of objects in an answer to a list. An object has up to 1.5 MB.
pub(super) const PAGE: u32 = 64;

/// The needed part of a pod or a Service. Its author can make the rest large, and `managedFields` take many times their
/// length in memory.
#[derive(Deserialize, Debug, Clone)]
pub(super) struct Object {
    #[serde(deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    pub(super) spec: Spec,
    pub(super) status: Option<Status>,
}

/// Reads the needed metadata.
fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Needed {
        name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        labels: Option<BTreeMap<String, String>>,
    }
    let Needed { name, namespace, uid, resource_version, labels } = Needed::deserialize(deserializer)?;
    Ok(ObjectMeta { name, namespace, uid, resource_version, labels, ..ObjectMeta::default() })
}

impl Resource for Object {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(of: &ApiResource) -> Cow<'_, str> {
        of.kind.as_str().into()
    }

    fn group(of: &ApiResource) -> Cow<'_, str> {
        of.group.as_str().into()
    }

    fn version(of: &ApiResource) -> Cow<'_, str> {
        of.version.as_str().into()
    }

    fn plural(of: &ApiResource) -> Cow<'_, str> {
        of.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// The needed part of the specification of a pod or a Service.
#[derive(Deserialize, Debug, Clone, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    pub(super) node_name: Option<String>,
    host_network: bool,
    #[serde(rename = "clusterIPs")]
    addresses: Vec<String>,
}

/// The needed part of the status of a pod.
#[derive(Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub(super) struct Status {
    phase: Option<String>,
    #[serde(rename = "podIPs")]
    addresses: Vec<PodIP>,
}

/// An event of the watch of pods, or else of Services.
pub(super) type Seen = (bool, Event<Object>);
/// The events of both watches. An error says whether it is from the watch of pods; that watch then tries again.
pub(super) type Watch = Pin<Box<dyn Stream<Item = Result<Seen, (bool, watcher::Error)>> + Send>>;

/// Watches the pods and Services of a namespace, or of all.
pub(super) fn watch(client: &Client, namespace: Option<&str>) -> Watch {
    let events = |kind: &ApiResource, are_pods: bool| {
        let api: Api<Object> = match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, kind),
            None => Api::all_with(client.clone(), kind),
        };
        let events = watcher(api, Config::default().page_size(PAGE)).default_backoff();
        events.map_ok(move |event| (are_pods, event)).map_err(move |error| (are_pods, error))
    };
    let [pods, services] = [ApiResource::erase::<Pod>(&()), ApiResource::erase::<Service>(&())];
    Box::pin(stream::select(events(&pods, true), events(&services, false)))
}

/// The nodes that have a pod of the agents, connected or not; otherwise the reason.
pub(super) async fn nodes_of(agents: &AgentOptions, client: &Client) -> Result<BTreeSet<String>, String> {
    let AgentOptions { namespace, service_account } = agents;
    let kind = ApiResource::erase::<Pod>(&());
    let pods: Api<Object> = Api::namespaced_with(client.clone(), namespace, &kind);
    // Another pod has no recorder: it has not started yet, or it has ended, such as that of `helm test`.
    let fields = format!("spec.serviceAccountName={service_account},status.phase=Running");
    let mut events = pin!(watcher(pods, Config::default().fields(&fields).page_size(PAGE)));
    let mut nodes = BTreeSet::new();
    while let Some(event) = events.try_next().await.map_err(|error| mirror_client::in_words(&error))? {
        match event {
            Event::InitApply(pod) => nodes.extend(pod.spec.node_name),
            Event::InitDone => break,
            _ => {}
        }
    }
    Ok(nodes)
}

/// A pod that the request selects.
#[derive(Debug)]
struct Selected {
    uid: String,
    node: Option<String>,
    has_ended: bool,
    /// The number of the newest list with this pod.
    list: u64,
}

/// The objects of a request.
#[derive(Debug)]
pub(super) struct Objects {
    of: ReadOf,
    labels: Selector,
    /// The selected pods, by `NAMESPACE/NAME`.
    pods: BTreeMap<String, Selected>,
    /// The number of lists of pods that have begun.
    lists: u64,
    /// Whether one of them was complete, or no pods are needed.
    pub(super) is_listed: bool,
    names: BTreeMap<IpAddr, String>,
    /// The names that the file does not have yet.
    new_names: BTreeMap<IpAddr, String>,
    /// Whether a selected pod is left out.
    leaves_out: bool,
    /// The messages about bounds that the file does not have yet.
    pub(super) messages: Vec<String>,
}

impl Objects {
    pub(super) fn new(of: &ReadOf) -> Result<Self, Refusal> {
        let (labels, is_listed) = match of {
            ReadOf::Pods { labels, .. } => (labels.clone(), false),
            ReadOf::Interface(_) => (LabelSelector::default(), true),
        };
        let labels = Selector::try_from(labels);
        let labels =
            labels.map_err(|why| Refusal::new(400, "BadRequest", format!("labelSelector: {why}")))?;
        let (pods, names, new_names, messages) = Default::default();
        let (of, lists, leaves_out) = (of.clone(), 0, false);
        Ok(Self { of, labels, pods, lists, is_listed, names, new_names, leaves_out, messages })
    }

    /// Takes an event in. Returns whether the selected pods can have changed.
    pub(super) fn take(&mut self, (are_pods, event): Seen) -> bool {
        match event {
            Event::Init if are_pods => self.lists += 1,
            Event::InitDone if are_pods => {
                self.pods.retain(|_, pod| pod.list == self.lists);
                self.is_listed = true;
            }
            Event::Delete(pod) if are_pods => drop(self.pods.remove(&key(&pod.metadata))),
            Event::Apply(pod) | Event::InitApply(pod) if are_pods => return self.select(pod),
            Event::Apply(Object { metadata, spec, .. }) | Event::InitApply(Object { metadata, spec, .. }) => {
                let name = format!("{}.svc", name(&metadata));
                spec.addresses.iter().for_each(|address| self.name(address, &name));
            }
            _ => {}
        }
        are_pods
    }

    fn select(&mut self, Object { metadata, spec, status }: Object) -> bool {
        let (key, status) = (key(&metadata), status.unwrap_or_default());
        let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if !has_ended && !spec.host_network {
            let name = name(&metadata);
            status.addresses.iter().for_each(|address| self.name(&address.ip, &name));
        }
        let is_selected = self.may_have(&key) && self.labels.matches(&metadata.labels.unwrap_or_default());
        if !is_selected {
            return self.pods.remove(&key).is_some();
        }
        if self.pods.len() >= MAX_OBJECTS && !self.pods.contains_key(&key) {
            if !mem::replace(&mut self.leaves_out, true) {
                let text = format!("a request reads at most {MAX_OBJECTS} pods, and others are left out");
                self.messages.push(text);
            }
            return false;
        }
        let (uid, node, list) = (metadata.uid.unwrap_or_default(), spec.node_name, self.lists);
        let before = self.pods.insert(key, Selected { uid, node: node.clone(), has_ended, list });
        before.is_none_or(|before| (before.node, before.has_ended) != (node, has_ended))
    }

    /// Names an address. It keeps the name of a deleted object until another object has it: packets of the past need the
    /// name too.
    fn name(&mut self, address: &str, name: &str) {
        let Ok(address) = address.parse() else { return };
        let known = self.names.get(&address);
        let (is_new, is_other) = (known.is_none(), known.is_none_or(|known| known != name));
        let is_left_out = is_new && self.is_full();
        if is_other && !is_left_out {
            self.names.insert(address, name.to_owned());
            self.new_names.insert(address, name.to_owned());
            if is_new && self.is_full() {
                self.messages.push(format!("{MAX_OBJECTS} addresses have names, and no more get any"));
            }
        }
    }

    /// Whether no more addresses get names.
    fn is_full(&self) -> bool {
        self.names.len() >= MAX_OBJECTS
    }

    /// Returns names that the file does not have yet, for one block.
    pub(super) fn new_names(&mut self) -> Vec<(IpAddr, String)> {
        std::iter::from_fn(|| self.new_names.pop_first()).take(MAX_NAMES).collect()
    }

    /// Whether the labels of pods do not matter.
    pub(super) fn are_of_any_labels(&self) -> bool {
        self.labels.selects_all()
    }

    /// The pod that the request names, if there is none.
    pub(super) fn missing(&self) -> Option<&str> {
        let ReadOf::Pods { name, .. } = &self.of else { return None };
        name.as_deref().filter(|_| self.is_listed && self.pods.is_empty())
    }

    /// The nodes of the selected pods.
    pub(super) fn nodes(&self) -> BTreeSet<String> {
        let pods = self.pods.values().filter(|pod| !pod.has_ended);
        pods.filter_map(|pod| pod.node.clone()).collect()
    }

    /// The number of selected pods that have ended.
    pub(super) fn ended(&self) -> usize {
        self.pods.values().filter(|pod| pod.has_ended).count()
    }

    /// The UID of a selected pod.
    pub(super) fn uid(&self, pod: &str) -> Option<String> {
        self.pods.get(pod).map(|pod| pod.uid.clone())
    }

    /// Whether a node answers for a pod, by `NAMESPACE/NAME`: it has the pod now, or there is no such pod now, and the
    /// request covers the name or the node `had` the pod.
    pub(super) fn is_own(&self, node: &str, pod: &str, had: bool) -> bool {
        match (self.pods.get(pod), &self.of) {
            (_, ReadOf::Interface(_)) => true,
            (Some(pod), _) => pod.node.as_deref() == Some(node),
            (None, _) => had || self.are_of_any_labels() && self.may_have(pod),
        }
    }

    /// Whether the request selects a pod of this name if it has the labels.
    fn may_have(&self, pod: &str) -> bool {
        let (ReadOf::Pods { namespace, name, .. }, Some((of, pod))) = (&self.of, pod.split_once('/')) else {
            return false;
        };
        namespace.as_ref().is_none_or(|namespace| namespace == of)
            && name.as_ref().is_none_or(|name| name == pod)
    }
}

/// `NAMESPACE/NAME`.
fn key(of: &ObjectMeta) -> String {
    format!("{}/{}", of.namespace.as_deref().unwrap_or_default(), of.name.as_deref().unwrap_or_default())
}

/// `NAME.NAMESPACE`.
fn name(of: &ObjectMeta) -> String {
    format!("{}.{}", of.name.as_deref().unwrap_or_default(), of.namespace.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests;
