//! A change of the installed state.

use mirror_common::verdict::TapKind;

use super::{
    Device, IfIndex, MirrorId, Owner, PodSide, Program, Session, Tap, Target, TargetName, mirror::pod_side,
};
use crate::settings::Ceilings;

/// A [`Tap`] without its sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapHead {
    /// [`Tap::owner`].
    pub owner: Owner,
    /// [`Tap::kind`].
    pub kind: TapKind,
    /// [`Tap::is_limited`].
    pub is_limited: bool,
    /// [`Tap::exit`].
    pub exit: Option<IfIndex>,
    /// [`Tap::bridge`].
    pub bridge: Option<IfIndex>,
    /// [`Tap::pod_side`].
    pub pod_side: Option<PodSide>,
}

impl TapHead {
    /// [`Tap::pod_side()`].
    pub fn pod_side(&self) -> Option<Device> {
        pod_side(&self.owner, self.pod_side)
    }
}

impl From<&Tap> for TapHead {
    fn from(tap: &Tap) -> Self {
        let Tap { owner, kind, is_limited, exit, bridge, pod_side, sessions: _ } = tap;
        let (owner, kind, is_limited) = (owner.clone(), *kind, *is_limited);
        Self { owner, kind, is_limited, exit: *exit, bridge: *bridge, pod_side: *pod_side }
    }
}

/// A change of the installed state. Each op is idempotent and safe at any moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes a target.
    SetTarget(TargetName, Target),
    /// Removes a target that no session uses.
    RemoveTarget(TargetName),
    /// Writes the limits of the node.
    SetCeilings(Box<Ceilings>),
    /// Writes the owner, the kind, the bridge and the sides of a tap: of a new tap without sessions, or of a tap that
    /// keeps its sessions. Returns an error if the device is tapped for another owner ([`Owner::is_same`]).
    PutTap(Device, Box<TapHead>),
    /// Removes a tap with its sessions and their counters.
    RemoveTap(Device),
    /// Adds a session to a tap, with counters at zero and full budgets.
    AddSession(Device, MirrorId, Box<Session>),
    /// Writes new settings of a session. The session keeps its counters.
    ChangeSession(Device, MirrorId, Box<Session>),
    /// Removes a session of a tap, with its counters.
    RemoveSession(Device, MirrorId),
    /// Attaches a program to its hook, or replaces an earlier agent's program with the current one.
    Attach(Device, Program),
    /// Detaches a program from its hook. Also used after the device was deleted, to remove the remaining pins.
    Detach(Device, Program),
}

impl Op {
    /// All values of [`Self::name`].
    pub const NAMES: [&str; 10] = [
        "set_target",
        "remove_target",
        "set_ceilings",
        "put_tap",
        "remove_tap",
        "add_session",
        "change_session",
        "remove_session",
        "attach",
        "detach",
    ];

    /// Whether the op can end the use of a filter by a session.
    pub const fn leaves_filter(&self) -> bool {
        matches!(self, Self::ChangeSession(..) | Self::RemoveSession(..) | Self::RemoveTap(_))
    }

    /// Whether the op can end the use of a pod's relay device.
    pub fn leaves_exit(&self) -> bool {
        match self {
            Self::Detach(device, _) => !device.is_on_node(),
            Self::PutTap(device, head) => !device.is_on_node() && head.exit.is_none(),
            _ => false,
        }
    }

    /// The name in metrics.
    pub const fn name(&self) -> &'static str {
        let index = match self {
            Self::SetTarget(..) => 0,
            Self::RemoveTarget(_) => 1,
            Self::SetCeilings(_) => 2,
            Self::PutTap(..) => 3,
            Self::RemoveTap(_) => 4,
            Self::AddSession(..) => 5,
            Self::ChangeSession(..) => 6,
            Self::RemoveSession(..) => 7,
            Self::Attach(..) => 8,
            Self::Detach(..) => 9,
        };
        Self::NAMES[index]
    }

    /// The device that the op changes: a tapped device or, for the second stage and the relay hub, a device of the
    /// agent or of a target.
    pub const fn device(&self) -> Option<Device> {
        match self {
            Self::PutTap(device, ..)
            | Self::RemoveTap(device)
            | Self::AddSession(device, ..)
            | Self::ChangeSession(device, ..)
            | Self::RemoveSession(device, _)
            | Self::Attach(device, _)
            | Self::Detach(device, _) => Some(*device),
            Self::SetTarget(..) | Self::RemoveTarget(_) | Self::SetCeilings(_) => None,
        }
    }
}
