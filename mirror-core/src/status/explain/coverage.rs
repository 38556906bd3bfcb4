//! The coverage of a tap as text, for each direction.
//!
//! Pure, a part of [`explain`](super).

use mirror_common::verdict::Direction;

use super::{Text, sentence, verb};
use crate::status::{DirectionCoverage, NicCoverage, NodeStatus, TapStatus};

/// Returns the coverage of a tap, if the agent knows it.
pub(in crate::status) fn of<'a>(status: &'a NodeStatus, tap: &TapStatus) -> Option<&'a NicCoverage> {
    let name = tap.pod.as_ref()?.to_string();
    let mut nics = status.notes.iter().flat_map(|notes| &notes.coverage);
    nics.find(|nic| nic.pod == name && nic.nic == tap.nic && nic.device == tap.device)
}

/// Writes a line for each direction.
pub(super) fn write(status: &NodeStatus, tap: &TapStatus, text: &mut Text) {
    let Some(nic) = of(status, tap) else { return };
    for (direction, of) in [(Direction::Ingress, &nic.ingress), (Direction::Egress, &nic.egress)] {
        let DirectionCoverage { state, message, seconds, seen, carried } = of;
        let verb = verb(direction);
        text.line(
            1,
            &format!("Coverage of what {verb}: {state}, for {}. {}", time(*seconds), sentence(message)),
        );
        let line = format!(
            "Since the agent began to compare, the NIC has carried {carried} of these packets, and the tap has seen \
             {seen}."
        );
        text.line(2, &line);
    }
}

/// Formats a time in seconds.
fn time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} minutes", seconds / 60),
        _ => format!("{} hours", seconds / 3600),
    }
}
