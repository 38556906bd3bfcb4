//! [`Policy`]: the choices of the agent's user, which stand beside the annotations.
//!
//! Data, and questions about it. The commands make it from their flags, `choose`, `select` and the reconcile loop use it.

use std::collections::{BTreeMap, BTreeSet};

use super::Why;
use crate::{
    destination::{Destination, PodNic},
    model::{Directions, Pod, TargetName},
    settings::{NodeLimits, Settings},
    targets::Users,
    tunnel::Tunnel,
};

/// The choices of the agent's user.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Pods without an annotation are mirrored.
    pub enable_mirror: bool,
    /// Annotations of pods and namespaces count.
    pub annotations: bool,
    /// Namespaces whose pods are never mirrored.
    pub exclude_namespaces: BTreeSet<String>,
    /// The only namespaces whose annotations and Mirrors count; `None`: all.
    pub allow_namespaces: Option<BTreeSet<String>>,
    /// The targets: where the copies of each go. No two targets have the same destination, but for streams.
    pub targets: BTreeMap<TargetName, Destination>,
    /// Who may use the targets of MirrorTargets, which are among these.
    pub users: Users,
    /// The MirrorTargets that are no targets of this node, and why.
    pub refused_targets: BTreeMap<TargetName, String>,
    /// The target of the mirrors that name none; one of the agent's own.
    pub target: TargetName,
    /// The limits that hold for any request of the pods.
    pub limits: NodeLimits,
    /// Interfaces that are mirrored by name, without a pod.
    pub interfaces: Vec<String>,
    /// Which packets of those.
    pub interface_directions: Directions,
    /// The settings of a mirror, where a pod does not ask for others.
    pub settings: Settings,
    /// If true, a pod whose device is entangled with a mirror interface ends the agent at its start: for pods that the
    /// user who starts the agent has listed. Otherwise such a pod is left out, with a reason.
    pub is_strict: bool,
    /// Whether a NIC without an end on the node is tapped inside its pod.
    pub taps_inside: TapsInside,
}

/// Whether NICs are tapped inside pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TapsInside {
    /// Yes.
    #[default]
    On,
    /// No: the administrator does not want programs and devices of ours inside pods.
    Off,
}

/// No pods are chosen; copies go to `mirror0`.
impl Default for Policy {
    fn default() -> Self {
        Self {
            enable_mirror: false,
            annotations: true,
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
            taps_inside: TapsInside::On,
        }
    }
}

impl Policy {
    /// The target of this name, or that of mirrors that name none; or why the node does not have it.
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

    /// Whether the namespace of a pod may use a target.
    pub(super) fn may_use(&self, target: &TargetName, pod: &Pod) -> Result<(), Why> {
        match self.users.get(target) {
            Some(users) if !users.matches(&pod.namespace_labels) => {
                Err(Why::TargetNotAllowed(target.clone()))
            }
            _ => Ok(()),
        }
    }

    /// The names of the mirror interfaces.
    pub fn mirror_ifaces(&self) -> impl Iterator<Item = &str> {
        self.targets.values().filter_map(Destination::device)
    }

    /// The names of all devices that the agent makes for targets if they are missing.
    pub fn own_devices(&self) -> BTreeSet<String> {
        let tunnels = self.tunnels().filter_map(|(_, tunnel)| Some(tunnel.own_device()?.to_string()));
        self.mirror_ifaces().map(str::to_owned).chain(tunnels).collect()
    }

    /// The targets that are tunnels.
    pub fn tunnels(&self) -> impl Iterator<Item = (&TargetName, &Tunnel)> {
        self.targets.iter().filter_map(|(name, destination)| Some((name, destination.tunnel()?)))
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
