//! A change of the installed state.

use super::{Device, MirrorId, Program, Session, TapHead, Target, TargetName};
use crate::settings::Ceilings;

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
    /// keeps its sessions. Returns an error if the device is tapped for another owner
    /// ([`Owner::is_same`](super::Owner::is_same)).
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
