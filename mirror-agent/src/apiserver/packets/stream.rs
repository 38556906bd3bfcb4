//! [`Stream`]: the streams of several nodes as one pcapng. Pure: the caller has the clock.
//!
//! ```text
//! objects (pods, names) ──┐           ┌─► interfaces, counters, comments ─┐
//! blocks of the nodes ────┴─► is own? ┴─► packets ─► merge ───────────────┴─► pending ─► client
//! ```
//!
//! An agent is a program on another machine. So the server accepts packets only of the node's own pods
//! ([`Objects::is_own`]), and bounds everything that an agent can make large. The file describes each interface of
//! each stream. It has packets and counters only of interfaces that belong to the node at that time. Counters are
//! written when they arrive, if they have changed. A message is the comment of a block without names.

mod missing;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::take,
    time::Duration,
};

use kube::runtime::watcher::Event;
use mirror_capture::{
    blocks::Block,
    merge::{Bounds, Merge, OUT_OF_ORDER, StreamId},
    pcapng::{Interface, InterfaceId, NO_PAST, Names, Section, Statistics, Writer},
};
use mirror_core::status::{Finding, printable};

use crate::apiserver::{
    names::{MAX_OBJECTS, Objects, Seen},
    query::{Packets, Refusal},
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
/// Maximum number of pods and NICs with notes, and of bytes of all notes and of a text.
const MAX_NOTES: usize = 10_000;
const MAX_NOTES_BYTES: usize = 1 << 20;
const MAX_TEXT: usize = 1024;
/// Maximum length of `NAMESPACE/NAME` in bytes.
const MAX_POD: usize = 63 + 1 + 253;
/// Maximum number of causes in a refusal.
const MAX_CAUSES: usize = 20;
/// What a request watches.
const PODS: &str = "pods";
const SERVICES: &str = "Services";
/// The nodes that a request has no room for.
const OTHERS: &str = "other nodes";
/// Pods of the past alone that labels cannot select.
const ENDED: &str = "ended pods";
/// The reason why there are no packets of the past.
const NO_RECORD: &str = "NoPast";
const APPLICATION: &str = concat!("podmirror ", env!("PODMIRROR_VERSION"));

/// What the caller does about a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Counts an interface that is not the node's.
    Foreign { node: String },
    /// Says that a pod, by `NAMESPACE/NAME`, is read. Once for each UID.
    Covered { pod: String, uid: String },
}

/// An interface of a node's stream.
#[derive(Debug)]
struct Described {
    pod: String,
    /// Its number in the file.
    number: InterfaceId,
    /// Whether it was the node's.
    was_own: bool,
    /// Whether the UID of its pod is in [`Stream::covered`].
    is_told: bool,
    /// The newest counters in the file.
    counters: [Option<u64>; 4],
}

impl Described {
    /// The effect of a block of the node's own pod. The watch can have the pod later than the node.
    fn covered(&mut self, objects: &Objects, covered: &mut BTreeSet<String>) -> Option<Effect> {
        if self.is_told {
            return None;
        }
        let uid = objects.uid(&self.pod)?;
        self.is_told = true;
        let is_first = covered.len() < MAX_OBJECTS && covered.insert(uid.clone());
        is_first.then(|| Effect::Covered { pod: self.pod.clone(), uid })
    }
}

/// A node with a stream, from the request to its end.
#[derive(Debug)]
struct Node {
    name: String,
    interfaces: Vec<Described>,
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
    /// The nodes that have an agent, if [`Stream::is_of_all_nodes`]. A server that has just started does not have all
    /// their connections yet.
    pub(super) with_agents: BTreeSet<String>,
    nodes: BTreeMap<StreamId, Node>,
    next: StreamId,
    /// The nodes whose agents have accepted the request.
    known: BTreeSet<String>,
    /// Why parts of the packets are missing, by part.
    failures: BTreeMap<String, Refusal>,
    /// The reason and the message for each pod, and NIC after a space, that is not read; `None`: it is read.
    notes: BTreeMap<String, Option<(String, String)>>,
    /// The size of the notes in bytes.
    note_bytes: usize,
    /// The UIDs of the pods that have been read.
    covered: BTreeSet<String>,
    /// Whether there was an interface of a node's own pod.
    is_read: bool,
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
            with_agents: BTreeSet::new(),
            nodes: BTreeMap::new(),
            next: 0,
            known: BTreeSet::new(),
            failures: BTreeMap::new(),
            notes: BTreeMap::new(),
            note_bytes: 0,
            covered: BTreeSet::new(),
            is_read: false,
            writer: Writer::begin(&mut pending, &section),
            merge: Merge::new(if read.follow { MERGE } else { PAST }),
            pending,
            packets: 0,
        })
    }

    /// Takes an event in, or why the watch of pods, or else of Services, has failed. Returns whether to [`Self::join`].
    pub(super) fn see(&mut self, seen: Result<Seen, (bool, String)>) -> bool {
        let watched = |are_pods| if are_pods { PODS } else { SERVICES };
        let has_changed = match seen {
            Ok(seen) => {
                // A list begins before kube-apiserver has answered.
                if !matches!(seen.1, Event::Init) {
                    self.mended(watched(seen.0), "they are watched again");
                }
                self.objects.take(seen)
            }
            Err((are_pods, why)) => {
                self.fail(watched(are_pods), Refusal::unavailable(why));
                false
            }
        };
        take(&mut self.objects.messages).iter().for_each(|text| self.say(text));
        has_changed
    }

    /// Whether each node can have packets: the past of pods that may be deleted.
    pub(super) fn is_of_all_nodes(&self) -> bool {
        self.node.is_none() && !self.follow && self.objects.are_of_any_labels()
    }

    /// Returns the nodes whose streams begin now, and whether each has had none before. For the past alone, these are
    /// first the nodes of the pods, then all others, which may have packets of deleted pods.
    pub(super) fn join<A>(&mut self, agents: &BTreeMap<String, A>) -> Vec<(StreamId, String, bool)> {
        let mut joined = Vec::new();
        if !self.objects.is_listed || !self.follow && self.next > 0 {
            return joined;
        }
        let own = self.node.clone().map_or_else(|| self.objects.nodes(), |node| [node].into());
        let has_others = self.is_of_all_nodes();
        let ended = self.objects.ended();
        if ended > 0 && !self.follow && !self.objects.are_of_any_labels() {
            let why = format!("the recorded packets of {ended} are left out: request each pod by name");
            self.fail(ENDED, Refusal::new(409, "Conflict", why));
        }
        let others: BTreeSet<_> = agents.keys().chain(&self.with_agents).collect();
        let others = others.into_iter().filter(|name| has_others && !own.contains(*name));
        let mut wanted: Vec<_> = own.iter().chain(others).cloned().collect();
        wanted.retain(|name| self.nodes.values().all(|node| node.name != *name));
        let mut is_full = false;
        for name in wanted {
            is_full = self.nodes.len() >= MAX_NODES;
            if is_full {
                let why = format!("a request reads at most {MAX_NODES} nodes");
                self.fail(OTHERS, Refusal::new(429, "TooManyRequests", why));
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
        if !is_full {
            self.mended(OTHERS, "none is left out any more");
        }
        joined
    }

    /// The agent has accepted the request.
    pub(super) fn opened(&mut self, id: StreamId) {
        let Some(name) = self.nodes.get(&id).map(|node| node.name.clone()) else { return };
        self.mended(&name, "its packets are read");
        self.known.insert(name);
    }

    /// The stream has ended, or was refused.
    pub(super) fn ended(&mut self, id: StreamId, ended: Result<(), Refusal>) {
        self.merge.close(id);
        if let (Some(node), Err(refusal)) = (self.nodes.remove(&id), ended) {
            self.fail(&node.name, refusal);
        }
    }

    /// Ends the streams that have not ended in time.
    pub(super) fn cut_off(&mut self) {
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            let why = "its last packets are missing: its stream has not ended in time";
            self.ended(id, Err(Refusal::unavailable(why)));
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
            Block::Statistics(counters) => counters.interface.number(),
            Block::Interface(of) => return self.describe(id, of.clone()),
            Block::Note(json) => {
                self.note(id, serde_json::from_str(json).ok()?);
                return None;
            }
            // What there is of the past. If nothing else is wanted, there are no notes.
            Block::Section(text) => {
                *is_ready |= !self.follow;
                if text.starts_with(NO_PAST) {
                    let (reason, message) = (NO_RECORD.to_owned(), text.clone());
                    self.note(id, Finding { reason, message, ..Finding::default() });
                } else {
                    let text = format!("{node}: {}", clean(text));
                    self.say(&text);
                }
                return None;
            }
            // Agents send no names: they would be those of other nodes, too.
            Block::Names(_) => return None,
        };
        let described = interfaces.get_mut(number as usize)?;
        if !self.objects.is_own(node, &described.pod, described.was_own) {
            let has_moved = described.was_own && !self.follow && matches!(block, Block::Packet(_));
            if let Some(part) = has_moved.then(|| format!("{} on {node}", described.pod)) {
                self.leave_out(&part);
            }
            return None;
        }
        described.was_own = true;
        self.is_read = true;
        let effect = described.covered(&self.objects, &mut self.covered);
        let (interface, counters) = (described.number, &mut described.counters);
        if let Block::Packet(packet) = block {
            let (time_ns, block) = (packet.time_ns, packet.with_interface(interface.number()));
            self.merge.push(id, time_ns, block.len(), block, now);
        } else if let Block::Statistics(of) = block
            && *counters != [of.received, of.dropped, of.limited, of.end_ns]
        {
            *counters = [of.received, of.dropped, of.limited, of.end_ns];
            let mut of = Statistics { interface, ..of };
            of.comment.iter_mut().for_each(shorten);
            of.write(&mut self.pending);
        }
        effect
    }

    /// Takes the description of an interface in.
    fn describe(&mut self, id: StreamId, mut of: Interface) -> Option<Effect> {
        let Node { name: node, interfaces, .. } = self.nodes.get_mut(&id)?;
        if interfaces.len() >= MAX_INTERFACES {
            let part = format!("{node} interfaces");
            let why = format!("it has more than {MAX_INTERFACES} interfaces, and later ones are not read");
            self.fail(&part, Refusal::unavailable(why));
            return None;
        }
        of.hardware = Some(node.clone());
        let texts = [Some(&mut of.name), of.description.as_mut(), of.filter.as_mut(), of.comment.as_mut()];
        texts.into_iter().flatten().for_each(shorten);
        let number = self.writer.interface(&mut self.pending, &of);
        let pod = of.name.split(' ').next().unwrap_or_default();
        let pod = pod[..pod.floor_char_boundary(MAX_POD)].to_owned();
        let was_own = self.objects.is_own(node, &pod, false);
        let mut described = Described { pod, number, was_own, is_told: false, counters: [None; 4] };
        let effect = if was_own {
            self.is_read = true;
            described.covered(&self.objects, &mut self.covered)
        } else {
            Some(Effect::Foreign { node: node.clone() })
        };
        // The recorder of a node keeps the packets of pods that have moved: that is no mistake.
        let has_moved = !was_own && !self.follow && self.objects.uid(&described.pod).is_some();
        let moved = has_moved.then(|| format!("{} on {node}", described.pod));
        interfaces.push(described);
        let Some(part) = moved else { return effect };
        self.leave_out(&part);
        None
    }

    /// Whether blocks of the agents can be taken in.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() < PENDING
    }

    /// Fills the room with names, and with packets that need not wait any more. Before the answer, it leaves the room to
    /// what the answer depends on.
    pub(super) fn pour(&mut self, now: Duration, has_begun: bool) {
        while self.has_room() {
            let addresses = if has_begun { self.objects.new_names() } else { Vec::new() };
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
        if self.has_past && self.merge.is_out_of_order {
            self.say(OUT_OF_ORDER);
        }
        self.say(&format!("end: {why}"));
    }
}

/// Truncates a text of an agent to [`MAX_TEXT`] bytes.
fn shorten(text: &mut String) {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
}

/// The beginning of a text in printable characters; one character can become several.
fn clean(text: &str) -> String {
    let mut text = printable(&text[..text.floor_char_boundary(MAX_TEXT)]);
    shorten(&mut text);
    text
}

#[cfg(test)]
mod tests;
