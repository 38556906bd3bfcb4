//! A pod's status as plain text: whether it is mirrored, at whose request, how, what is missing and what can be done.
//!
//! Pure: takes a [`NodeStatus`], which is also available as JSON. The text is for people; programs read `status -o
//! json`. Called by `mirror-agent explain --pod`. [`coverage`] describes the packets that a tap misses, [`mirror`] a
//! mirror at a NIC, [`target`] the target of its copies, and [`verdicts`] what a counter means.

pub(super) mod coverage;
mod mirror;
mod target;
mod verdicts;

use mirror_common::verdict::Direction;

use super::{
    AttachedStatus, Finding, KnownPod, NodeStatus, Notes, PodSideStatus, SessionStatus, TapStatus,
    table::printable,
};
use crate::{model::Origin, select::Why};

/// Returns the text about a pod, given as `NAMESPACE/NAME`.
///
/// # Errors
///
/// The pod is unknown: a message that says where to look.
pub(super) fn explain(status: &NodeStatus, pod: &str) -> Result<String, String> {
    let subject = Subject::of(status, pod);
    if subject.is_unknown() {
        return Err(subject.unknown());
    }
    let mut text = Text::default();
    subject.summary(&mut text);
    subject.reasons(&mut text);
    subject.failures(&mut text);
    for tap in &subject.taps {
        subject.nic(tap, &mut text);
    }
    Ok(text.0)
}

/// Lines of text.
#[derive(Default)]
struct Text(String);

impl Text {
    /// Adds a line, indented by `depth` steps. Parts of it come from the pod, so control characters are escaped.
    fn line(&mut self, depth: usize, line: &str) {
        self.0.push_str(&"  ".repeat(depth));
        self.0.push_str(&printable(line));
        self.0.push('\n');
    }

    fn gap(&mut self) {
        self.0.push('\n');
    }
}

/// Formats a message as a sentence.
fn sentence(message: &str) -> String {
    let mut chars = message.chars();
    let first = chars.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", chars.as_str().trim_end_matches('.'))
}

/// The parts of the status that concern one pod.
pub(super) struct Subject<'a> {
    status: &'a NodeStatus,
    pod: &'a str,
    pub(super) taps: Vec<&'a TapStatus>,
    pub(super) skipped: Vec<&'a Finding>,
    /// The ignored annotations.
    pub(super) bad: Vec<&'a Finding>,
    pub(super) known: Option<&'a KnownPod>,
}

impl<'a> Subject<'a> {
    pub(super) fn of(status: &'a NodeStatus, name: &'a str) -> Self {
        let is_of = |tap: &&TapStatus| {
            let pod = tap.pod.as_ref();
            pod.is_some_and(|pod| name.split_once('/') == Some((pod.namespace.as_str(), pod.name.as_str())))
        };
        let notes = status.notes.as_ref();
        let of_pod = |findings: fn(&Notes) -> &[Finding]| {
            let all = notes.into_iter().flat_map(findings);
            all.filter(|of| of.pod.as_deref() == Some(name)).collect()
        };
        let mut known = notes.and_then(|notes| notes.pods.as_ref()).into_iter().flatten();
        Self {
            status,
            pod: name,
            taps: status.taps.iter().filter(is_of).collect(),
            skipped: of_pod(|notes| &notes.not_mirrored),
            bad: of_pod(|notes| &notes.bad_annotations),
            known: known.find(|known| known.pod == name),
        }
    }

    fn is_unknown(&self) -> bool {
        self.taps.is_empty() && self.skipped.is_empty() && self.bad.is_empty() && self.known.is_none()
    }

    /// Returns the message for an unknown pod: where to look for it.
    fn unknown(&self) -> String {
        let (NodeStatus { agent_running, notes, .. }, pod) = (self.status, self.pod);
        let (namespace, name) = pod.split_once('/').unwrap_or(("", pod));
        let elsewhere =
            format!("`kubectl get pod --namespace {namespace} {name} --output wide` names its node");
        let text = match notes {
            Some(Notes { pods: Some(_), .. }) => format!(
                "the agent of this node has no pod {pod}: check the name, and run the command on the node of the pod; \
                 {elsewhere}. A pod from a file must be in the file. The agent's log lists the pods that it skips"
            ),
            Some(_) => format!(
                "pod {pod} is unknown: the agent of this node has no list of pods yet, and its log says why. \
                 {}",
                sentence(&elsewhere)
            ),
            None if *agent_running => {
                format!(
                    "this node has no tap for pod {pod}, and the running agent does not answer; try again"
                )
            }
            None => format!(
                "this node has no tap for pod {pod}, and no agent is running: start it, or run the command on the node of \
                 the pod; {elsewhere}"
            ),
        };
        printable(text.trim_end_matches('.'))
    }

    /// Returns every session of the pod, with its tap.
    fn sessions(&self) -> impl Iterator<Item = (&'a TapStatus, &'a SessionStatus)> {
        let taps = self.taps.iter().copied();
        taps.flat_map(|tap| tap.sessions.iter().map(move |session| (tap, session)))
    }

    /// Writes whether the pod is mirrored, and how certain this is.
    fn summary(&self, text: &mut Text) {
        let of_captures = [Origin::Capture, Origin::Reader].map(Origin::name);
        let (captures, mirrors): (Vec<_>, Vec<_>) =
            self.sessions().partition(|(_, session)| of_captures.contains(&session.origin.as_str()));
        let copying = mirrors.iter().filter(|(tap, session)| self.copies(tap, session)).count();
        let pod = self.pod;
        text.line(
            0,
            &match copying {
                0 if mirrors.is_empty() && captures.is_empty() => format!("{pod} is not mirrored."),
                0 if mirrors.is_empty() => format!("{pod} is not mirrored, but a capture reads its packets."),
                0 => format!("{pod} has a mirror, but nothing is copied now. See the reasons below."),
                some if some < mirrors.len() || !self.skipped.is_empty() || !self.bad.is_empty() => {
                    format!("{pod} is mirrored, but not everything as requested. See the reasons below.")
                }
                _ => format!("{pod} is mirrored."),
            },
        );
        match (&self.status.notes, self.status.agent_running) {
            (None, false) => text.line(
                0,
                "No agent is running on this node. Installed mirrors continue; changes take effect when an agent runs \
                 again.",
            ),
            (None, true) => {
                text.line(0, "The agent of this node does not answer, so reasons may be missing here.");
            }
            (Some(Notes { pods: None, .. }), _) => text.line(
                0,
                "The agent of this node has no list of pods yet. Mirrors that an earlier agent installed continue.",
            ),
            (Some(_), _) => {}
        }
    }

    /// Whether a session copies packets now, as far as the status shows it.
    fn copies(&self, tap: &TapStatus, session: &SessionStatus) -> bool {
        let wants = |direction: Direction| ["both", direction.name()].contains(&session.direction.as_str());
        let is_seen =
            Direction::ALL.into_iter().any(|direction| wants(direction) && is_attached(tap, direction));
        let is_up = self.status.targets.iter().any(|target| target.name == session.target && target.up);
        session.ended.is_none() && is_seen && is_up
    }

    /// Writes why the pod is not mirrored, or not fully.
    fn reasons(&self, text: &mut Text) {
        if let Some(KnownPod { not_asked: Some(Finding { reason, message, remedy, .. }), .. }) = self.known {
            text.line(0, &format!("{} ({reason})", sentence(message)));
            text.line(0, remedy);
        } else if self.known.is_some() && self.taps.is_empty() && self.skipped.is_empty() {
            text.line(0, "A mirror of it is requested, but not installed yet. The agent retries.");
        } else if let (None, Some(Notes { pods: Some(_), .. })) = (self.known, &self.status.notes) {
            text.line(0, "The agent's list of pods no longer contains this pod.");
        }
        if !self.skipped.is_empty() || !self.bad.is_empty() {
            text.gap();
            text.line(0, "Not as requested:");
        }
        for Finding { nic, mirror, reason, message, remedy, .. } in self.skipped.iter().chain(&self.bad) {
            let nic = nic.as_ref().map(|nic| format!(", NIC {nic}")).unwrap_or_default();
            let mirror = mirror.as_ref().map(|mirror| format!(", mirror {mirror}")).unwrap_or_default();
            text.line(1, &format!("{reason}{nic}{mirror}: {message}"));
            if !remedy.is_empty() {
                text.line(2, remedy);
            }
        }
    }

    /// Writes the agent's failures, if they can be the reason for something that is missing.
    fn failures(&self, text: &mut Text) {
        let mut failures = self.status.notes.iter().flat_map(|notes| &notes.failures).peekable();
        let is_asked = self.known.is_some_and(|known| known.not_asked.is_none());
        let is_missing = match &self.taps[..] {
            [] => is_asked && self.skipped.is_empty(),
            taps => taps.iter().any(|tap| !Direction::ALL.into_iter().all(|it| is_attached(tap, it))),
        };
        if is_missing && failures.peek().is_some() {
            text.gap();
            text.line(0, "This failed in the agent's last round, and the agent retries it:");
            failures.for_each(|failure| text.line(1, failure));
        }
    }

    /// Writes about a NIC and its mirrors.
    fn nic(&self, tap: &TapStatus, text: &mut Text) {
        let TapStatus { ifindex, device, inside, pod_side, nic, network, sessions, .. } = tap;
        text.gap();
        let network = network.as_ref().map(|network| format!(", network {network}")).unwrap_or_default();
        text.line(0, &format!("NIC {nic}{network}"));
        let place = match inside {
            true => format!("It is tapped inside the pod, where it has ifindex {ifindex}."),
            false => format!("It is tapped at the node side of its veth, {device} (ifindex {ifindex})."),
        };
        text.line(1, &place);
        if let Some(PodSideStatus { ifindex, .. }) = pod_side {
            text.line(
                1,
                &format!(
                    "Packets to the pod are tapped inside the pod, where the NIC has ifindex {ifindex}."
                ),
            );
            if let Some(why) = coverage::of(self.status, tap).and_then(|nic| nic.why_inside.as_ref()) {
                text.line(2, &sentence(why));
            }
        }
        let hooks: Vec<_> = Direction::ALL
            .into_iter()
            .filter(|direction| is_attached(tap, *direction))
            .map(|direction| {
                let (hook, way) = hook(tap, direction);
                format!("{hook} ({way}) for what {}", verb(direction))
            })
            .collect();
        if !hooks.is_empty() {
            text.line(1, &format!("Podmirror's programs run at its hooks: {}.", hooks.join(", ")));
            text.line(1, self.position(nic));
        }
        for direction in Direction::ALL.into_iter().filter(|direction| !is_attached(tap, *direction)) {
            let (hook, _) = hook(tap, direction);
            let line = format!(
                "No podmirror program runs at its hook {hook}, so what {} is not seen.",
                verb(direction)
            );
            text.line(1, &line);
            text.line(1, "A running agent attaches it again. If it cannot, its log says why.");
        }
        coverage::write(self.status, tap, text);
        for session in sessions {
            text.gap();
            self.mirror(tap, session, text);
        }
    }

    /// Returns whether other programs run ahead of podmirror's at the hooks of a NIC.
    fn position(&self, nic: &str) -> &'static str {
        let mut of_nic = self.skipped.iter().filter(|skipped| skipped.nic.as_deref() == Some(nic));
        match of_nic.any(|skipped| skipped.reason == Why::HIDDEN) {
            true => "Another program or filter runs before them: see Hidden above.",
            false if self.status.notes.is_some() => "The agent sees no other program before them.",
            false => "Without an answer of the agent, it is unknown whether other programs run before them.",
        }
    }
}

/// The hook that sees a direction of a pod's tap, and how the program is attached there. The node side of a veth
/// receives what leaves the pod; a NIC inside the pod sends it.
fn hook(tap: &TapStatus, direction: Direction) -> (&'static str, &str) {
    let AttachedStatus { ingress, egress } = &tap.attached;
    match (direction, tap.inside, &tap.pod_side) {
        (Direction::Ingress, _, Some(side)) => ("ingress inside the pod", &side.attached),
        (Direction::Ingress, true, _) | (Direction::Egress, false, _) => ("ingress", ingress),
        (Direction::Egress, true, _) | (Direction::Ingress, false, _) => ("egress", egress),
    }
}

fn is_attached(tap: &TapStatus, direction: Direction) -> bool {
    !matches!(hook(tap, direction).1, AttachedStatus::NONE | AttachedStatus::UNKNOWN)
}

/// The direction as a verb phrase for "what … the pod".
const fn verb(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "reaches the pod",
        Direction::Egress => "leaves the pod",
    }
}

#[cfg(test)]
mod tests;
