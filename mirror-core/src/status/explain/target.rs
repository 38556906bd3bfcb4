//! The target of a mirror as text: what it is, whether it accepts copies now, and what can be done.
//!
//! Pure, a part of [`explain`](super).

use super::{Text, sentence};
use crate::{
    model::Name,
    status::{Finding, NodeStatus, TargetStatus},
};

/// Writes about the target of this name.
pub(super) fn write(status: &NodeStatus, name: &str, depth: usize, text: &mut Text) {
    let Some(target) = status.targets.iter().find(|target| target.name == name) else {
        let line = format!(
            "This node has no target {name}, so nothing is copied. A running agent creates its targets."
        );
        return text.line(depth, &line);
    };
    let TargetStatus { destination, device, ifindex, up, stream, dropped, when_read, .. } = target;
    if *stream {
        let is_capture = Name::of_written(name).is_some_and(|name| name.is_capture());
        return text.line(
            depth,
            &match (is_capture, *up) {
                (true, true) => "A command reads its packets now.".to_owned(),
                (true, false) => "The command has ended, so nothing is copied. A running agent removes this.".to_owned(),
                (false, true) => format!("The target {name} is a stream. A program reads it now."),
                (false, false) => format!(
                    "The target {name} is a stream that no program reads, so nothing is copied. `mirror-agent tail \
                     --target {name}` reads it."
                ),
            },
        );
    }
    let at = ifindex.map(|ifindex| format!(" (ifindex {ifindex})")).unwrap_or_default();
    let is_device = !destination.contains(':');
    let what = match (is_device, device.as_str()) {
        (true, device) => format!("the mirror interface {device}{at}"),
        (false, "") => destination.clone(),
        (false, device) => format!("{destination}, at the device {device}{at}"),
    };
    let state = match ifindex {
        Some(_) if *up => "It accepts copies now.",
        Some(_) if is_device => "It is down, so nothing is copied.",
        None if is_device => "The device does not exist, so nothing is copied.",
        _ => "It accepts no copies now.",
    };
    text.line(depth, &format!("The target {name} is {what}. {state}"));
    if *when_read {
        text.line(depth, "Packets are copied only while a program such as tcpdump reads it (--when-read).");
    }
    if let Some(dropped @ 1..) = dropped {
        text.line(
            depth,
            &format!(
                "The device has dropped {dropped} frames since it was created. docs/mirror-interface.md says what \
                 that means."
            ),
        );
    }
    let unreached = status.notes.iter().flat_map(|notes| &notes.unreached_targets);
    let mut is_told = false;
    for Finding { message, .. } in unreached.filter(|of| of.target.as_deref() == Some(name)) {
        text.line(depth, &format!("{} docs/targets.md lists the conditions.", sentence(message)));
        is_told = true;
    }
    if *up || is_told {
        return;
    }
    let remedy = match (is_device, ifindex) {
        (true, Some(_)) => format!("Bring it up on the node: ip link set {device} up."),
        (true, None) if status.agent_running => {
            "The agent creates its own device again. Create a device of other software again yourself."
                .to_owned()
        }
        (true, None) => "Start the agent, which creates the device, or create it yourself.".to_owned(),
        (false, _) => "Only a running agent reports why. docs/targets.md lists the conditions.".to_owned(),
    };
    text.line(depth, &remedy);
}
