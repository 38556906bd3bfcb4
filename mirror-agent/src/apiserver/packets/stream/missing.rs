//! Which packets are missing, and why: messages in the file, the answer to the client, the end of a request for
//! past packets only.

use mirror_capture::{merge::StreamId, pcapng::Names};
use mirror_core::status::Finding;

use super::{MAX_CAUSES, MAX_NOTES, MAX_NOTES_BYTES, NO_RECORD, PODS, SERVICES, Stream, clean};
use crate::apiserver::query::{Cause, Refusal};

/// Reasons that are true of every pod for a moment while it starts.
const PASSING: [&str; 3] = ["NoNetns", "NoNic", "NotYet"];
/// Reasons that only an administrator can change.
const FORBIDDEN: [&str; 2] = ["NamespaceExcluded", "NamespaceNotAllowed"];

impl Stream {
    /// Notes why the packets of a node, or another part, are missing.
    pub(super) fn fail(&mut self, part: &str, refusal: Refusal) {
        let refusal = Refusal { message: clean(&refusal.message), ..refusal };
        if self.failures.get(part) != Some(&refusal) {
            self.say(&format!("{part}: {}", refusal.message));
            self.failures.insert(part.to_owned(), refusal);
        }
    }

    /// Notes that packets of a pod are missing, because it has moved from the node that has recorded them.
    pub(super) fn leave_out(&mut self, pod_on_node: &str) {
        let why = "its recorded packets are left out: the pod is not on this node now";
        self.fail(pod_on_node, Refusal::new(409, "Conflict", why));
    }

    /// Notes that a part is not missing any more.
    pub(super) fn mended(&mut self, part: &str, how: &str) {
        if self.failures.remove(part).is_some() {
            self.say(&format!("{part}: {how}"));
        }
    }

    /// Takes a message of an agent in.
    pub(super) fn note(&mut self, id: StreamId, note: Finding) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let reason = Some(note.reason).filter(|reason| !reason.is_empty());
        let [pod, nic, reason] = [note.pod, note.nic, reason].map(|text| text.as_deref().map(clean));
        let mut part = match pod {
            None if nic.is_none() && reason.is_none() => {
                node.is_ready = true;
                return;
            }
            Some(pod) if !self.objects.is_own(&node.name, &pod, false) => return,
            pod => pod.unwrap_or_else(|| node.name.clone()),
        };
        if let Some(nic) = nic {
            part = format!("{part} {nic}");
        }
        let message = clean(&note.message);
        let text = [Some(&part), reason.as_ref(), Some(&message)];
        let text = text.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(": ");
        let note = reason.map(|reason| (reason, message));
        let bytes = |note: &Option<(String, String)>| {
            part.len() + note.as_ref().map_or(0, |(reason, message)| reason.len() + message.len())
        };
        let before = self.notes.get(&part);
        let is_full = before.is_none() && self.notes.len() >= MAX_NOTES;
        let note_bytes = self.note_bytes - before.map_or(0, bytes) + bytes(&note);
        if is_full || note_bytes > MAX_NOTES_BYTES {
            let why = format!("more than {MAX_NOTES}, or {} MiB, are left out", MAX_NOTES_BYTES >> 20);
            self.fail("other messages", Refusal::unavailable(why));
            return;
        }
        self.note_bytes = note_bytes;
        let before = self.notes.insert(part, note.clone());
        // A pod that is read from the beginning needs no message: its interface says so.
        if before.as_ref().unwrap_or(&None) != &note {
            self.say(&text);
        }
    }

    /// Writes a message for the user.
    pub(super) fn say(&mut self, text: &str) {
        let comment = Some(format!("podmirror: {text}"));
        Names { addresses: Vec::new(), comment }.write(&mut self.pending);
    }

    /// Returns the answer to the client, when it is known. `is_late`: it cannot wait any more.
    pub(in crate::apiserver::packets) fn answer(&self, is_late: bool) -> Option<Result<(), Refusal>> {
        // Messages that fill the room are an answer too: there is no room for anything else before the client has them.
        if self.is_read || !self.has_room() || self.notes.values().any(Option::is_none) {
            return Some(Ok(()));
        }
        if let Some(name) = self.objects.missing().filter(|_| self.follow || !self.has_past) {
            return Some(Err(Refusal::new(404, "NotFound", format!("there is no pod {name:?}"))));
        }
        let is_waiting = !self.objects.is_listed || self.nodes.values().any(|node| !node.is_ready);
        (is_late || !is_waiting).then(|| self.refusal().map_or(Ok(()), Err))
    }

    /// Why nothing can be read. `None`: packets can still come.
    fn refusal(&self) -> Option<Refusal> {
        let notes = self.notes.iter().filter_map(|(part, note)| note.as_ref().map(|note| (part, note)));
        let notes: Vec<_> = notes.filter(|(_, (reason, _))| !self.follow || reason != NO_RECORD).collect();
        let has = |reasons: &[&str], (_, (reason, _)): &(_, &(String, _))| reasons.contains(&reason.as_str());
        if notes.iter().any(|note| has(&PASSING, note)) {
            return None;
        }
        if let [(part, (reason, message)), rest @ ..] = &notes[..] {
            let rest = if rest.is_empty() { String::new() } else { format!("; and {} more", rest.len()) };
            let message = format!("no packets can be read: {part}: {reason}: {message}{rest}");
            let is_forbidden = notes.iter().all(|note| has(&FORBIDDEN, note));
            let (code, reason) = if is_forbidden { (403, "Forbidden") } else { (409, "Conflict") };
            let causes = notes.iter().take(MAX_CAUSES).map(|(part, (reason, message))| Cause {
                reason: reason.clone().into(),
                field: (*part).clone(),
                message: message.clone(),
            });
            return Some(Refusal { causes: causes.collect(), ..Refusal::new(code, reason, message) });
        }
        if !self.nodes.is_empty() {
            return None;
        }
        // Services have only names. Pods that have been listed are known.
        let is_why = |part: &str| part != SERVICES && (part != PODS || !self.objects.is_listed);
        if let Some((part, refusal)) = self.failures.iter().find(|(part, _)| is_why(part)) {
            return Some(Refusal { message: format!("{part}: {}", refusal.message), ..refusal.clone() });
        }
        let why = match (self.objects.is_listed, self.next) {
            (false, _) => "the API server has not listed the pods in time",
            // Without labels, the past alone is that of all nodes.
            (true, 0) if !self.follow && self.objects.are_of_any_labels() => "no agent is connected",
            (true, _) => return None,
        };
        Some(Refusal::unavailable(why))
    }

    /// The reason for the end of a stream of the past alone.
    pub(in crate::apiserver::packets) fn outcome(&self) -> &'static str {
        let is_whole = self.failures.is_empty() && self.notes.values().all(Option::is_none);
        if is_whole { "complete" } else { "incomplete" }
    }
}
