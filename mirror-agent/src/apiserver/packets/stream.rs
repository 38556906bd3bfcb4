//! [`Stream`]: the streams of several nodes as one pcapng, and the answer to the client. Pure: the caller has the clock.
//!
//! ```text
//! objects (pods, names) ──┐           ┌─► interfaces, counters, comments ─┐
//! blocks of the nodes ────┴─► is own? ┴─► packets ─► merge ───────────────┴─► pending ─► client
//! ```
//!
//! An agent is a program on another machine. So a node answers for its own pods alone ([`Objects::is_own`]), and whatever
//! it can make large has a bound. The file describes each interface of each stream, but has packets and counters only of
//! those that are the node's at that time. Counters are written as they come, if they have changed. A message is the
//! comment of a block without names.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::take,
    time::Duration,
};

use mirror_api::packets::Note;
use mirror_capture::{
    blocks::Block,
    merge::{Bounds, Merge, StreamId},
    pcapng::{Interface, InterfaceId, NO_PAST, Names, Section, Statistics, Writer},
};
use mirror_core::status::printable;

use crate::apiserver::{
    names::{MAX_OBJECTS, Objects, Seen},
    query::{Cause, Packets, Refusal},
};

/// Bounds of the packets that wait for those of other nodes. For the past alone, a node begins to send when its recorder
/// has collected all packets.
const MERGE: Bounds = Bounds { hold: Duration::from_millis(200), bytes: 1 << 20 };
const PAST: Bounds = Bounds { hold: Duration::from_secs(60), ..MERGE };
/// Bytes that wait for the client, above which no more are read from the agents.
const PENDING: usize = 256 << 10;
/// Maximum number of nodes of a request, and of interfaces of a stream.
const MAX_NODES: usize = 256;
const MAX_INTERFACES: usize = 4096;
/// Maximum number of pods and NICs with notes, and of bytes of a text.
const MAX_NOTES: usize = 10_000;
const MAX_TEXT: usize = 1024;
/// Maximum number of causes in a refusal.
const MAX_CAUSES: usize = 20;
/// Reasons that are true of every pod for a moment while it starts.
const PASSING: [&str; 3] = ["NoNetns", "NoNic", "NotYet"];
/// Reasons that only an administrator can change.
const FORBIDDEN: [&str; 2] = ["NamespaceExcluded", "NamespaceNotAllowed"];
/// What a request watches.
const OBJECTS: &str = "pods and Services";
/// The reason why there are no packets of the past.
const NO_RECORD: &str = "NoPast";
const APPLICATION: &str = concat!("podmirror ", env!("PODMIRROR_VERSION"));

/// What the caller does about a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Counts an interface that is not the node's.
    Foreign { node: String },
    /// Says that a pod, by `NAMESPACE/NAME`, is read. Once for each pod.
    Covered { pod: String, uid: String },
}

/// A node with a stream, from the request to its end.
#[derive(Debug)]
struct Node {
    name: String,
    /// Its interfaces: pod, number in the file, whether it was the node's, and the newest counters in the file.
    interfaces: Vec<(String, InterfaceId, bool, [Option<u64>; 4])>,
    /// There is a note about each pod that was selected when the stream began.
    is_ready: bool,
}

/// The streams of a request.
#[derive(Debug)]
pub(super) struct Stream {
    objects: Objects,
    /// The node of the interface that is read.
    node: Option<String>,
    follow: bool,
    has_past: bool,
    nodes: BTreeMap<StreamId, Node>,
    next: StreamId,
    /// The nodes whose agents have accepted the request.
    known: BTreeSet<String>,
    /// Why parts of the packets are missing, by part.
    failures: BTreeMap<String, Refusal>,
    /// The reason and the message for each pod, and NIC after a space, that is not read; `None`: it is read.
    notes: BTreeMap<String, Option<(String, String)>>,
    /// The pods that have been read.
    covered: BTreeSet<String>,
    writer: Writer,
    pub(super) merge: Merge<Vec<u8>>,
    /// Blocks for the client.
    pub(super) pending: Vec<u8>,
    /// The number of packets for the client.
    pub(super) packets: u64,
}

impl Stream {
    pub(super) fn new(Packets { read, node, .. }: &Packets) -> Result<Self, Refusal> {
        let mut pending = Vec::new();
        let section = Section { application: Some(APPLICATION), ..Section::default() };
        Ok(Self {
            objects: Objects::new(&read.of)?,
            node: node.clone(),
            follow: read.follow,
            has_past: read.since_seconds.is_some(),
            nodes: BTreeMap::new(),
            next: 0,
            known: BTreeSet::new(),
            failures: BTreeMap::new(),
            notes: BTreeMap::new(),
            covered: BTreeSet::new(),
            writer: Writer::begin(&mut pending, &section),
            merge: Merge::new(if read.follow { MERGE } else { PAST }),
            pending,
            packets: 0,
        })
    }

    /// Takes an event of the watch in, or why it has failed. Returns whether to [`Self::join`].
    pub(super) fn see(&mut self, seen: Result<Seen, String>) -> bool {
        let was_full = self.objects.is_full();
        let has_changed = match seen {
            Ok(seen) => self.objects.take(seen),
            Err(why) => {
                self.fail(OBJECTS, Refusal::unavailable(why));
                false
            }
        };
        if self.objects.is_full() && !was_full {
            self.say(&format!("{MAX_OBJECTS} addresses have names, and no more get any"));
        }
        has_changed
    }

    /// Returns the nodes whose streams begin now, and whether each has had none before. For the past alone, these are all
    /// nodes that may have packets of deleted pods.
    pub(super) fn join<A>(&mut self, agents: &BTreeMap<String, A>) -> Vec<(StreamId, String, bool)> {
        let mut joined = Vec::new();
        if !self.objects.is_listed || !self.follow && self.next > 0 {
            return joined;
        }
        let mut wanted = self.node.clone().map_or_else(|| self.objects.nodes(), |node| [node].into());
        if self.node.is_none() && !self.follow && self.objects.are_of_any_labels() {
            wanted.extend(agents.keys().cloned());
        }
        wanted.retain(|name| self.nodes.values().all(|node| node.name != *name));
        for name in wanted {
            if self.nodes.len() >= MAX_NODES {
                let why = format!("a request reads at most {MAX_NODES} nodes");
                self.fail("other nodes", Refusal::new(429, "TooManyRequests", why));
                break;
            } else if !agents.contains_key(&name) {
                self.fail(&name, Refusal::unavailable("its agent is not connected"));
                continue;
            }
            self.merge.open(self.next);
            let (is_first, interfaces) = (!self.known.contains(&name), Vec::new());
            self.nodes.insert(self.next, Node { name: name.clone(), interfaces, is_ready: false });
            joined.push((self.next, name, is_first));
            self.next += 1;
        }
        joined
    }

    /// The agent has accepted the request.
    pub(super) fn opened(&mut self, id: StreamId) {
        let Some(Node { name, .. }) = self.nodes.get(&id) else { return };
        self.known.insert(name.clone());
        if self.failures.remove(name).is_some() {
            let text = format!("{name}: its packets are read");
            self.say(&text);
        }
    }

    /// The stream has ended, or was refused.
    pub(super) fn ended(&mut self, id: StreamId, ended: Result<(), Refusal>) {
        self.merge.close(id);
        if let (Some(node), Err(refusal)) = (self.nodes.remove(&id), ended) {
            self.fail(&node.name, refusal);
        }
    }

    /// Notes why the packets of a node, or another part, are missing.
    fn fail(&mut self, part: &str, refusal: Refusal) {
        let refusal = Refusal { message: clean(&refusal.message), ..refusal };
        if self.failures.get(part) != Some(&refusal) {
            self.say(&format!("{part}: {}", refusal.message));
            self.failures.insert(part.to_owned(), refusal);
        }
    }

    /// Whether no stream is left.
    pub(super) fn is_idle(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Takes a block of a stream in.
    pub(super) fn block(&mut self, id: StreamId, block: Block, now: Duration) -> Option<Effect> {
        let Node { name: node, interfaces, is_ready } = self.nodes.get_mut(&id)?;
        let number = match &block {
            Block::Packet(packet) => packet.interface,
            Block::Statistics(counters) => counters.interface,
            Block::Interface(of) if interfaces.len() < MAX_INTERFACES => {
                let name = Some(&*of.name);
                let (description, filter) = (of.description.as_deref(), of.filter.as_deref());
                let (comment, hardware) = (of.comment.as_deref(), Some(&**node));
                let interface = Interface { snaplen: 0, name, description, filter, hardware, comment };
                let number = self.writer.interface(&mut self.pending, &interface);
                let pod = of.name.split(' ').next().map(start).unwrap_or_default();
                let is_own = self.objects.is_own(node, pod, false);
                interfaces.push((pod.to_owned(), number, is_own, [None; 4]));
                if !is_own {
                    return Some(Effect::Foreign { node: node.clone() });
                }
                let is_first = self.covered.insert(pod.to_owned());
                let uid = self.objects.uid(pod).filter(|_| is_first)?;
                return Some(Effect::Covered { pod: pod.to_owned(), uid });
            }
            Block::Note(json) => {
                self.note(id, serde_json::from_str(json).ok()?);
                return None;
            }
            // What there is of the past. If nothing else is wanted, there are no notes.
            Block::Section(text) => {
                *is_ready |= !self.follow;
                if text.starts_with(NO_PAST) {
                    let reason = Some(NO_RECORD.to_owned());
                    self.note(id, Note { pod: None, nic: None, reason, message: text.clone() });
                } else {
                    let text = format!("{node}: {}", clean(text));
                    self.say(&text);
                }
                return None;
            }
            // Agents send no names: they would be those of other nodes, too.
            Block::Interface(_) | Block::Names(_) => return None,
        };
        let (pod, interface, was_own, counters) = interfaces.get_mut(number as usize)?;
        if !self.objects.is_own(node, pod, *was_own) {
            return None;
        }
        *was_own = true;
        let interface = *interface;
        if let Block::Packet(packet) = block {
            let (time_ns, block) = (packet.time_ns, packet.with_interface(interface.number()));
            self.merge.push(id, time_ns, block.len(), block, now);
        } else if let Block::Statistics(of) = block
            && *counters != [of.received, of.lost, of.limited, of.end_ns]
        {
            *counters = [of.received, of.lost, of.limited, of.end_ns];
            let (received, dropped, accepted, comment) = (of.received, of.lost, None, of.comment.as_deref());
            let (time_ns, start_ns, end_ns, limited) = (of.time_ns, of.start_ns, of.end_ns, of.limited);
            Statistics {
                interface,
                time_ns,
                start_ns,
                end_ns,
                received,
                dropped,
                accepted,
                limited,
                comment,
            }
            .write(&mut self.pending);
        }
        None
    }

    fn note(&mut self, id: StreamId, note: Note) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let [pod, nic, reason] = [note.pod, note.nic, note.reason].map(|text| text.as_deref().map(clean));
        let mut part = match pod {
            None if reason.is_none() => {
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
    fn say(&mut self, text: &str) {
        let comment = Some(format!("podmirror: {text}"));
        Names { addresses: Vec::new(), comment }.write(&mut self.pending);
    }

    /// Returns the answer to the client, when it is known. `is_late`: it cannot wait any more.
    pub(super) fn answer(&self, is_late: bool) -> Option<Result<(), Refusal>> {
        if !self.covered.is_empty() || self.notes.values().any(Option::is_none) {
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

    /// Whether blocks of the agents can be taken in.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() < PENDING
    }

    /// Fills the room with names, and with packets that need not wait any more.
    pub(super) fn pour(&mut self, now: Duration) {
        while self.has_room() {
            let addresses = self.objects.new_names();
            if !addresses.is_empty() {
                Names { addresses, comment: None }.write(&mut self.pending);
            } else if !self.pop(now) {
                return;
            }
        }
    }

    fn pop(&mut self, now: Duration) -> bool {
        let Some(block) = self.merge.pop(now) else { return false };
        self.pending.extend_from_slice(&block);
        self.packets += 1;
        true
    }

    /// Ends the file with all packets that are left, and with the reason of the end.
    pub(super) fn finish(&mut self, why: &str, now: Duration) {
        take(&mut self.nodes).into_keys().for_each(|id| self.merge.close(id));
        while self.pop(now) {}
        self.say(&format!("end: {why}"));
    }
}

/// The beginning of a text of an agent.
fn start(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

/// The same, for a terminal.
fn clean(text: &str) -> String {
    printable(start(text))
}

#[cfg(test)]
mod tests;
