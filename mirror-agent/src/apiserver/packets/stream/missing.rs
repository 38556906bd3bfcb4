//! Which packets are missing, and why: the messages in the file, the answer to the client, and the end of the past alone.

use mirror_api::packets::Note;
use mirror_capture::{merge::StreamId, pcapng::Names};

use super::{MAX_CAUSES, MAX_NOTES, NO_RECORD, OBJECTS, Stream, clean};
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

    /// Notes that a part is not missing any more.
    pub(super) fn mended(&mut self, part: &str, how: &str) {
        if self.failures.remove(part).is_some() {
            self.say(&format!("{part}: {how}"));
        }
    }

    /// Takes a message of an agent in.
    pub(super) fn note(&mut self, id: StreamId, note: Note) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let [pod, nic, reason] = [note.pod, note.nic, note.reason].map(|text| text.as_deref().map(clean));
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
        if self.notes.len() >= MAX_NOTES && !self.notes.contains_key(&part) {
            let why = format!("{MAX_NOTES} pods and NICs have messages, and those of others are left out");
            self.fail("other messages", Refusal::unavailable(why));
            return;
        }
        let message = clean(&note.message);
        let text = [Some(&part), reason.as_ref(), Some(&message)];
        let text = text.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(": ");
        let note = reason.map(|reason| (reason, message));
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
        if self.is_read || self.notes.values().any(Option::is_none) {
            return Some(Ok(()));
        }
        if let Some(name) = self.objects.missing().filter(|_| !self.has_past) {
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
        let mut failures =
            self.failures.iter().filter(|(part, _)| !self.objects.is_listed || *part != OBJECTS);
        if let Some((part, refusal)) = failures.next() {
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
        if self.failures.is_empty() { "complete" } else { "incomplete" }
    }
}
