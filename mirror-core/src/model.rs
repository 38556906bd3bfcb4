//! The terms of the design as types: pods, links, taps, the wanted state, the installed state.
//!
//! Data only. This module decides nothing (`select` and `plan` do) and does not touch the system (the edges do).

mod installed;
mod links;
mod mirror;
mod name;
mod op;
mod resource;

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use mirror_common::verdict::Direction;
use serde::{Deserialize, Serialize};

pub use self::{
    installed::{Actual, ActualTap, Capacity, Ended, Hidden, HookState, Program},
    links::{
        ALIAS, FIRST_IFINDEX, Link, LinkChange, LinkKind, LinkSnapshot, Offloads, Peer, PodLinks, Route,
    },
    mirror::{
        Desired, DeviceTarget, MacAddress, Origin, Owner, Place, PodSide, Readable, RingId, Session, Tap,
        TapHead, Target,
    },
    name::{MirrorId, Name, TargetName},
    op::Op,
    resource::{Operator, Request, Requirement, Resource, ResourceId, Selector, TargetResource},
};
use crate::networks::Networks;

/// Index of a network device in its network namespace; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfIndex(pub u32);

impl fmt::Display for IfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identity of a network namespace: device and inode of its file under `/proc` or `/run/netns` (namespaces(7)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsId {
    /// Device number of the namespace file system.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
}

impl NetnsId {
    /// The agent's own network namespace, which is the node's.
    pub const NODE: Self = Self { dev: 0, ino: 0 };
}

/// Identity of a network device that can be tapped. An ifindex is unique only within its network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    /// The network namespace of the device; [`NetnsId::NODE`] for the node's.
    pub netns: NetnsId,
    /// Its index there.
    pub ifindex: IfIndex,
}

impl Device {
    /// The device of the node's network namespace with this index.
    pub const fn on_node(ifindex: IfIndex) -> Self {
        Self { netns: NetnsId::NODE, ifindex }
    }

    /// The device inside a pod with this index. The key has only the inode of the namespace, as in the maps: all
    /// network namespaces are on one file system.
    pub const fn in_pod(netns: NetnsId, ifindex: IfIndex) -> Self {
        Self { netns: NetnsId { dev: 0, ino: netns.ino }, ifindex }
    }

    /// Whether the device is in the node's network namespace.
    pub const fn is_on_node(&self) -> bool {
        self.netns.dev == 0 && self.netns.ino == 0
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_on_node() {
            self.ifindex.fmt(f)
        } else {
            write!(f, "{} in namespace {}", self.ifindex, self.netns.ino)
        }
    }
}

/// The identity of a pod, and its names.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodId {
    /// `metadata.uid`: distinguishes a re-created pod from its predecessor.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod, with the fields that its source (the Kubernetes API or a file) provides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its identity.
    pub id: PodId,
    /// `metadata.labels`. The source drops all labels if they are too long.
    pub labels: BTreeMap<String, String>,
    /// `metadata.annotations`, without the annotation that [`Self::networks`] was parsed from.
    pub annotations: BTreeMap<String, String>,
    /// The networks of the pod's NICs, from the annotation of Multus. For display, and for the annotations of Kube-OVN.
    pub networks: Networks,
    /// The annotations of the pod's namespace. They apply where the pod has no annotation of its own.
    pub inherited: Arc<BTreeMap<String, String>>,
    /// The labels of the pod's namespace.
    pub namespace_labels: Arc<BTreeMap<String, String>>,
    /// Why the annotations of the pod or of its namespace are unknown. Both maps are empty then, although one of
    /// the annotations could have been a filter.
    pub unread: Option<String>,
    /// `spec.hostNetwork`: it has no NIC of its own.
    pub host_network: bool,
    /// Path of the pod's network namespace, if the source knows it.
    pub netns: Option<PathBuf>,
}

/// A set of directions, seen from the pod. Without a pod, seen from the tapped interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Directions {
    /// Packets to the pod.
    Ingress,
    /// Packets from the pod.
    Egress,
    /// Both.
    #[default]
    Both,
}

impl Directions {
    /// The bits in [`Session::directions`](mirror_common::abi::Session::directions).
    pub const fn bits(self) -> u32 {
        match self {
            Self::Ingress => Direction::Ingress.bit(),
            Self::Egress => Direction::Egress.bit(),
            Self::Both => Direction::Ingress.bit() | Direction::Egress.bit(),
        }
    }

    /// The inverse of [`Self::bits`]; `None` for any other number.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match bits {
            1 => Some(Self::Ingress),
            2 => Some(Self::Egress),
            3 => Some(Self::Both),
            _ => None,
        }
    }

    /// All values.
    pub const ALL: [Self; 3] = [Self::Ingress, Self::Egress, Self::Both];

    /// The inverse of [`Self::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|directions| directions.name() == name)
    }

    /// The value of the annotation and of `--direction`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Both => "both",
        }
    }
}
