//! A change of the installed state.

use mirror_common::verdict::TapKind;

use super::{
    Device, IfIndex, MirrorId, Owner, PodSide, Program, Session, Tap, Target, TargetName, mirror::pod_side,
};
use crate::settings::Ceilings;

/// A tap without its sessions.
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
        let Tap { owner, kind, is_limited, exit, pod_side, sessions: _ } = tap;
        Self { owner: owner.clone(), kind: *kind, is_limited: *is_limited, exit: *exit, pod_side: *pod_side }
    }
}

/// A change of the installed state. Each is idempotent, and safe at any moment on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes a target.
    SetTarget(TargetName, Target),
    /// Forgets a target to which no session copies.
    RemoveTarget(TargetName),
    /// Writes the limits of the node.
    SetCeilings(Box<Ceilings>),
    /// Writes the owner, the kind and the sides of a tap: a new tap without sessions, or a tap that keeps its sessions. An
    /// error where the device is tapped for another owner ([`Owner::is_same`]).
    PutTap(Device, Box<TapHead>),
    /// Removes a tap with all its sessions and their counters.
    RemoveTap(Device),
    /// Adds a session to a tap, with counters at zero and full budgets.
    AddSession(Device, MirrorId, Box<Session>),
    /// Writes the new settings of a session of a tap; the session keeps its counters.
    ChangeSession(Device, MirrorId, Box<Session>),
    /// Removes a session of a tap, and its counters.
    RemoveSession(Device, MirrorId),
    /// Attaches the program at a hook, or replaces an earlier agent's program by the current one.
    Attach(Device, Program),
    /// Removes our program from a hook; also after the device has gone, to remove the remaining pins.
    Detach(Device, Program),
}

impl Op {
    /// Every [`Self::name`].
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

    /// Whether a session may not use its filter any more after this.
    pub const fn leaves_filter(&self) -> bool {
        matches!(self, Self::ChangeSession(..) | Self::RemoveSession(..) | Self::RemoveTap(_))
    }

    /// Whether the exit of a pod may be needed no more after this.
    pub fn leaves_exit(&self) -> bool {
        match self {
            Self::Detach(device, _) => !device.is_on_node(),
            Self::PutTap(device, head) => !device.is_on_node() && head.exit.is_none(),
            _ => false,
        }
    }

    /// The word for metrics.
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

    /// The device of the op: a tapped device or, for the second stage and the hub, a device of ours or of a target.
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
