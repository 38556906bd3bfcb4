//! [`Policy`]: the configuration of the agent, which applies together with annotations.
//!
//! Data with queries. The commands build it from their flags; `choose`, `select` and the reconcile loop use it.

use std::collections::{BTreeMap, BTreeSet};

use super::Why;
use crate::{
    destination::{Destination, PodNic},
    model::{Directions, Pod, TargetName},
    settings::{NodeLimits, Settings},
    targets::Users,
    tunnel::Tunnel,
};

/// The configuration of the agent.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Pods without an annotation are mirrored.
    pub enable_mirror: bool,
    /// Annotations of pods and namespaces are accepted.
    pub annotations: bool,
    /// Kube-OVN's annotations of pods are accepted too.
    pub kube_ovn_annotations: bool,
    /// Namespaces whose pods are never mirrored.
    pub exclude_namespaces: BTreeSet<String>,
    /// The only namespaces whose annotations and Mirrors are accepted. `None`: all.
    pub allow_namespaces: Option<BTreeSet<String>>,
    /// The targets with their destinations. No two targets have the same destination, except for streams.
    pub targets: BTreeMap<TargetName, Destination>,
    /// The namespaces that can use the targets of MirrorTargets. These targets are included in `targets`.
    pub users: Users,
    /// The MirrorTargets that are not targets of this node, and why.
    pub refused_targets: BTreeMap<TargetName, String>,
    /// The target of mirrors that name none. It is one of the agent's own.
    pub target: TargetName,
    /// Limits that apply to any request of the pods.
    pub limits: NodeLimits,
    /// Interfaces that are mirrored by name, without a pod.
    pub interfaces: Vec<String>,
    /// The directions of these interfaces to copy.
    pub interface_directions: Directions,
    /// The settings of a mirror where the pod does not request others.
    pub settings: Settings,
    /// Whether the agent refuses to start if a pod's device cannot be tapped because of a mirror interface. True if
    /// the user who starts the agent has listed the pods. Otherwise such a pod is skipped, with a reason.
    pub is_strict: bool,
    /// Whether NICs without a veth peer on the node are tapped inside their pods. Otherwise the administrator does not
    /// want podmirror's programs and devices inside pods.
    pub taps_inside: bool,
}

/// Selects no pods. Copies go to `mirror0`.
impl Default for Policy {
    fn default() -> Self {
        Self {
            enable_mirror: false,
            annotations: true,
            kube_ovn_annotations: false,
            exclude_namespaces: BTreeSet::new(),
            allow_namespaces: None,
            targets: [(TargetName::default(), Destination::Device("mirror0".to_owned()))].into(),
            users: Users::new(),
            refused_targets: BTreeMap::new(),
            target: TargetName::default(),
            limits: NodeLimits::default(),
            interfaces: Vec::new(),
            interface_directions: Directions::Both,
            settings: Settings::default(),
            is_strict: false,
            taps_inside: true,
        }
    }
}

impl Policy {
    /// The target of this name, or the default target; or why the node does not have it.
    pub(super) fn target_named(&self, name: Option<&str>) -> Result<TargetName, Why> {
        let none = |name: &str| Why::NoSuchTarget(name.to_owned());
        let target = match name {
            None => self.target.clone(),
            Some(name) => TargetName(name.parse().map_err(|_| none(name))?),
        };
        match self.refused_targets.get(&target) {
            _ if self.targets.contains_key(&target) => Ok(target),
            Some(why) => Err(Why::TargetRefused(target, why.clone())),
            None => Err(none(target.0.as_str())),
        }
    }

    /// Whether a pod's namespace is allowed to use a target.
    pub(super) fn may_use(&self, target: &TargetName, pod: &Pod) -> Result<(), Why> {
        match self.users.get(target) {
            Some(users) if !users.matches(&pod.namespace_labels) => {
                Err(Why::TargetNotAllowed(target.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Names of the mirror interfaces.
    pub fn mirror_ifaces(&self) -> impl Iterator<Item = &str> {
        self.targets.values().filter_map(Destination::device)
    }

    /// Names of all devices that the agent creates for targets if they are missing.
    pub fn own_devices(&self) -> BTreeSet<String> {
        let tunnels = self.tunnels().filter_map(|(_, tunnel)| Some(tunnel.own_device()?.to_string()));
        self.mirror_ifaces().map(str::to_owned).chain(tunnels).collect()
    }

    /// The targets that are tunnels.
    pub fn tunnels(&self) -> impl Iterator<Item = (&TargetName, &Tunnel)> {
        self.targets.iter().filter_map(|(name, destination)| Some((name, destination.tunnel()?)))
    }

    /// Whether Mirrors in this namespace can ask for packets.
    pub fn may_ask(&self, namespace: &str) -> bool {
        self.bars(namespace).is_none()
    }

    /// Why Mirrors in this namespace, and readers of the API, get no packets of its pods.
    pub(super) fn bars(&self, namespace: &str) -> Option<Why> {
        let is_allowed = self.allow_namespaces.as_ref().is_none_or(|allowed| allowed.contains(namespace));
        match self.exclude_namespaces.contains(namespace) {
            true => Some(Why::NamespaceExcluded),
            false => (!is_allowed).then_some(Why::NamespaceNotAllowed),
        }
    }

    /// The targets that are streams.
    pub fn streams(&self) -> impl Iterator<Item = &TargetName> {
        let streams = self.targets.iter().filter(|(_, destination)| **destination == Destination::Stream);
        streams.map(|(name, _)| name)
    }

    /// The targets that are pods.
    pub fn collectors(&self) -> impl Iterator<Item = (&TargetName, &PodNic)> {
        self.targets.iter().filter_map(|(name, destination)| Some((name, destination.pod()?)))
    }
}
