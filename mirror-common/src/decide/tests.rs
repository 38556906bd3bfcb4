extern crate std;

use std::{collections::BTreeMap, vec, vec::Vec};

use proptest::{collection::vec as any_vec, prelude::*, sample::select};

use super::*;
use crate::{
    abi::{FORM_BITS, MAX_FORMS},
    packet::header,
    verdict::TapKind,
};

const TARGETS: u32 = 3;
const READY: u32 = TARGET_UP | TARGET_CUTS;
/// Bytes that a copy of each kind lacks.
const CLONE_LACKS: u32 = 904;
const RECORD_LACKS: u32 = 40;
/// The devices of two pods.
const A: u32 = 11;
const B: u32 = 12;
/// A NIC in a pod's namespace.
const INSIDE: u32 = 13;

/// A node: its targets, its meters, and the outcome of each clone.
#[derive(Debug, Clone, Default)]
struct Node {
    targets: Vec<Reach>,
    /// The packet's identity, and where a packet with this identity was copied last.
    identity: u32,
    noted: BTreeMap<u32, (u32, Hook)>,
    /// Sessions whose filter does not match, sessions that `charge` refuses, and the outcome of the clones to each
    /// target.
    filtered: Vec<u32>,
    /// The answer of the other filters; `None`: they match.
    answer: Option<u32>,
    is_super_frame: bool,
    /// The facts about the packet.
    facts: Facts,
    limited: Vec<u32>,
    answers: BTreeMap<u32, Cloned>,
    /// The packet's present mark.
    tc_index: Option<u16>,
    clones: Vec<(u32, u16, u32)>,
    records: Vec<(u32, Direction)>,
    is_ring_full: bool,
    /// The targets that must not get the packet.
    refused: Vec<u32>,
    /// The targets without a reader.
    unread: Vec<u32>,
    charged: Vec<u32>,
    counted: Vec<(u32, Direction, Verdict)>,
    /// The bytes that each session's copy lacks.
    removed: Vec<u32>,
}

impl Kernel for Node {
    fn filter(&mut self, session: &Session) -> u32 {
        let differs = self.filtered.contains(&session.id);
        if differs { FILTER_DIFFERS } else { self.answer.unwrap_or(FILTER_MATCHES) }
    }

    fn answer(&mut self, question: Question, _: Packet, _: &Tap, session: &Session) -> bool {
        match question {
            Question::SuperFrame => self.is_super_frame,
            Question::Refused => self.refused.contains(&session.target),
            Question::Unread => self.unread.contains(&session.target),
        }
    }

    fn facts(&mut self, _: &Session) -> Facts {
        self.facts
    }

    fn target(&mut self, _: &Tap, index: u32) -> Option<Reach> {
        self.targets.get(index as usize).copied()
    }

    fn charge(&mut self, _: &Tap, session: &Session, _: Reach) -> (Paid, Result<(), Verdict>) {
        let is_limited = self.limited.contains(&session.id);
        // The first level refuses some sessions, a later one the others.
        if is_limited && session.id.is_multiple_of(2) {
            return (Paid::NOTHING, Err(Verdict::Limited));
        }
        self.charged.push(session.id);
        (Paid::from_bits(Paid::ALL), if is_limited { Err(Verdict::Limited) } else { Ok(()) })
    }

    fn give_back(&mut self, _: &Tap, session: &Session, paid: Paid) {
        assert_eq!(paid.to_bits(), Paid::ALL);
        assert_eq!(self.charged.pop(), Some(session.id));
    }

    fn clone_to(&mut self, session: &Session, _: Direction, target: Reach, tc_index: u16) -> Cloned {
        self.clones.push((target.ifindex, tc_index, session.snaplen));
        self.answers.get(&target.ifindex).copied().unwrap_or(Cloned { code: 0, is_uncut: false, removed: 0 })
    }

    fn record(&mut self, session: &Session, direction: Direction) -> Result<u32, Verdict> {
        if self.is_ring_full {
            return Err(Verdict::Lost);
        }
        self.records.push((session.serial, direction));
        Ok(RECORD_LACKS)
    }

    fn set_tc_index(&mut self, tc_index: u16) {
        self.tc_index = Some(tc_index);
    }

    fn is_still_copied(&mut self, packet: Packet) -> bool {
        self.noted.get(&self.identity).is_some_and(|place| *place != (packet.ifindex, packet.hook))
    }

    fn note_copy(&mut self, packet: Packet) {
        self.noted.insert(self.identity, (packet.ifindex, packet.hook));
    }

    fn count(&mut self, session: &Session, direction: Direction, verdict: Verdict, removed: u32) {
        self.counted.push((session.id, direction, verdict));
        self.removed.push(removed);
    }
}

impl Node {
    /// Runs the packet through the tap. Returns the verdict of each session, and the packet afterwards.
    fn see(&mut self, packet: Packet, tap: &Tap) -> (Vec<Verdict>, Packet) {
        (self.tc_index, self.counted, self.removed) = (None, Vec::new(), Vec::new());
        mirror(self, packet, tap);
        let verdicts = self.counted.iter().map(|&(_, _, verdict)| verdict).collect();
        (verdicts, Packet { tc_index: self.tc_index.unwrap_or(packet.tc_index), ..packet })
    }
}

/// A tap with these sessions, with their marks and `alike` as the agent writes them.
fn tap(kind: TapKind, sessions: &[Session]) -> Tap {
    let mut tap = Tap { kind: kind.wire(), session_count: sessions.len() as u32, ..Tap::default() };
    for (place, session) in sessions.iter().enumerate() {
        let form = |session: &Session| (session.target, session.snaplen);
        let mut session = *session;
        session.alike = (0..place)
            .filter(|&ahead| form(&sessions[ahead]) == form(&session))
            .map(|ahead| 1 << ahead)
            .sum();
        // A form has its own bit, and most of these forms have none.
        session.mark = match form(&session) {
            (target, 0) if target < 3 => 0x100 << target,
            (0, 96) => 0x800,
            _ => 0,
        };
        tap.sessions[place] = session;
    }
    tap
}

fn session(id: u32, target: u32, snaplen: u32) -> Session {
    Session { id, target, snaplen, directions: 3, ..Session::default() }
}

fn node(targets: u32) -> Node {
    let target = |index| Reach { ifindex: 101 + index, flags: READY };
    Node { targets: (0..targets).map(target).collect(), ..Node::default() }
}

fn any_packet() -> impl Strategy<Value = Packet> {
    let marked = (0..0x1000u16).prop_map(|bits| 0xb000 | bits);
    let tc_index = prop_oneof![Just(0), any::<u16>(), marked];
    (select(&Hook::ALL[..]), select(vec![A, B, 101]), tc_index).prop_map(|(hook, ifindex, tc_index)| Packet {
        hook,
        ifindex,
        tc_index,
    })
}

fn any_tap() -> impl Strategy<Value = Tap> {
    let session =
        (0..=TARGETS, select(vec![0, 0, 96, 64]), 0..4u32, any::<bool>(), any::<bool>(), any::<bool>());
    let kind = select(vec![TapKind::HostVeth, TapKind::Interface, TapKind::PodNic]);
    (kind, any_vec(session, 0..=MAX_SESSIONS_PER_TAP)).prop_map(|(kind, sessions)| {
        let made = sessions.into_iter().zip(0..).map(
            |((target, snaplen, directions, filtered, metered, pod_metered), id)| {
                let flag = |is_set, flag| if is_set { flag } else { 0 };
                let flags = flag(filtered, SESSION_FILTERED)
                    | flag(metered, SESSION_METERED)
                    | flag(pod_metered, SESSION_POD_METERED);
                Session { directions, flags, ..self::session(id, target, snaplen) }
            },
        );
        tap(kind, &made.collect::<Vec<_>>())
    })
}

fn any_node() -> impl Strategy<Value = Node> {
    let answer = (select(vec![0, 0, 0, 1, 2, -12, -22, -100]), prop::bool::weighted(0.1))
        .prop_map(|(code, is_uncut)| Cloned { code, is_uncut, removed: CLONE_LACKS });
    let target = (
        select(vec![0, 101, 102, 103]),
        0..8u32,
        select(vec![0, TARGET_METERED]),
        select(vec![0, TARGET_WHEN_READ]),
    )
        .prop_map(|(ifindex, flags, metered, when_read)| Reach {
            ifindex,
            flags: flags | metered | when_read,
        });
    let some = || any_vec(0..8u32, 0..4);
    let noted = prop::option::of((select(vec![A, B]), select(&Hook::ALL[..])));
    (any_vec(target, TARGETS as usize), any_vec(answer, 3), [some(), some(), some()], noted).prop_map(
        |(targets, answers, [filtered, limited, unread], noted)| Node {
            targets,
            filtered,
            limited,
            unread,
            answers: (101..).zip(answers).collect(),
            noted: noted.map(|place| (0, place)).into_iter().collect(),
            ..Node::default()
        },
    )
}

proptest! {
    /// Each session counts one verdict, in the packet's direction. Each `Copied` verdict has exactly one copy, and only
    /// copies are charged.
    #[test]
    fn every_session_is_counted_once_and_charged_for_its_copy(
        packet in any_packet(), tap in any_tap(), mut node in any_node(),
    ) {
        let leaves_pod = tap.kind().leaves_pod(packet.hook);
        let standing = marks::forms(marks::standing(&mut node, packet, leaves_pod).tc_index);
        let (verdicts, after) = node.see(packet, &tap);
        let ids: Vec<u32> = node.counted.iter().map(|&(id, ..)| id).collect();
        prop_assert_eq!(ids, (0..tap.session_count).collect::<Vec<_>>());
        let direction = tap.kind().direction(packet.hook);
        prop_assert!(node.counted.iter().all(|&(_, counted, _)| counted == direction));
        for ((session, verdict), removed) in tap.sessions.iter().zip(&verdicts).zip(&node.removed) {
            let is_stream =
                || node.targets[session.target as usize].flags & TARGET_STREAM != 0;
            let expected = match verdict {
                Verdict::Copied if is_stream() => RECORD_LACKS,
                Verdict::Copied => CLONE_LACKS,
                _ => 0,
            };
            prop_assert_eq!(*removed, expected, "{:?}", verdict);
        }

        let copied = || tap.sessions.iter().zip(&verdicts).filter(|(_, verdict)| **verdict == Verdict::Copied);
        let has_limits = |session: &Session| {
            session.flags & (SESSION_METERED | SESSION_POD_METERED) != 0
                || node.targets[session.target as usize].flags & TARGET_METERED != 0
        };
        let metered = copied().filter(|(session, _)| has_limits(session));
        prop_assert_eq!(&node.charged, &metered.map(|(session, _)| session.id).collect::<Vec<_>>());
        for (session, _) in copied() {
            let target = node.targets[session.target as usize];
            prop_assert!(target.flags & TARGET_UP != 0 && ![0, packet.ifindex].contains(&target.ifindex));
            prop_assert!(session.directions & direction.bit() != 0);
            prop_assert!(session.snaplen == 0 || target.flags & TARGET_CUTS != 0, "whole where it was to be cut");
            prop_assert!(session.flags & SESSION_FILTERED == 0 || !node.filtered.contains(&session.id));
            prop_assert!(target.flags & TARGET_WHEN_READ == 0 || !node.unread.contains(&session.target));
        }
        // The packet leaves with the marks of its copies, and with foreign bits in the lower byte unchanged.
        let forms = copied().fold(standing, |forms, (session, _)| forms | session.mark);
        prop_assert_eq!(marks::forms(after.tc_index), forms);
        prop_assert_eq!(marks::is_copy(after.tc_index), marks::is_copy(packet.tc_index) && !leaves_pod);
        prop_assert_eq!(after.tc_index & 0xff, packet.tc_index & 0xff);
        prop_assert!(node.clones.iter().all(|&(_, tc_index, _)| marks::is_copy(tc_index)));
    }

    /// A reader gets each form once, whatever the sessions.
    #[test]
    fn no_form_is_copied_twice(packet in any_packet(), tap in any_tap(), mut node in any_node()) {
        let (verdicts, _) = node.see(packet, &tap);
        let copied = tap.sessions.iter().zip(&verdicts).filter(|(_, verdict)| **verdict == Verdict::Copied);
        let mut forms: Vec<_> = copied.map(|(session, _)| (session.target, session.snaplen)).collect();
        let count = forms.len();
        forms.sort_unstable();
        forms.dedup();
        prop_assert_eq!(forms.len(), count);
    }

    /// A tap with captures only is invisible to every other tap: it leaves the packet's marks unchanged, and notes no
    /// copy.
    #[test]
    fn a_tap_with_captures_only_leaves_the_packet_alone(
        packet in any_packet(), tap in any_tap(), mut node in any_node(),
    ) {
        let mut tap = Tap { flags: TAP_CAPTURES_ONLY, ..tap };
        for session in &mut tap.sessions {
            session.mark = 0;
        }
        let noted = node.noted.clone();
        let (_, after) = node.see(packet, &tap);
        prop_assert_eq!((after.tc_index, node.noted), (packet.tc_index, noted));
    }

    /// The node side of a tap that sees ingress inside the pod copies and counts none of these packets, and leaves
    /// their marks.
    #[test]
    fn what_is_seen_inside_is_left_to_the_nic(packet in any_packet(), tap in any_tap(), node in any_node()) {
        let tap = Tap { kind: TapKind::HostVeth.wire(), ..tap };
        let inside = Tap { flags: TAP_SEEN_INSIDE, ..tap };
        let packet = Packet { hook: Hook::Egress, ..packet };
        let mut at_nic = node.clone();
        let (verdicts, after) = at_nic.see(packet, &inside);
        prop_assert!(verdicts.is_empty() && at_nic.clones.len() == node.clones.len());
        prop_assert_eq!(after.tc_index, packet.tc_index);
        // Egress is still seen on the node side.
        let leaving = Packet { hook: Hook::Ingress, ..packet };
        let [as_inside, as_ever] = [inside, tap].map(|tap| node.clone().see(leaving, &tap));
        prop_assert_eq!((as_inside.0, as_inside.1.tc_index), (as_ever.0, as_ever.1.tc_index));
    }

    /// While a tap changes its side, a packet passes both programs, with the same sessions. Each form that has a bit is
    /// copied once.
    #[test]
    fn a_packet_that_both_sides_see_is_copied_once(packet in any_packet(), tap in any_tap(), mut node in any_node()) {
        let [at_node, inside] = [TapKind::HostVeth, TapKind::PodNic].map(|kind| Tap { kind: kind.wire(), ..tap });
        let (first, passed) = node.see(Packet { hook: Hook::Egress, ..packet }, &at_node);
        let (second, _) = node.see(Packet { hook: Hook::Ingress, ifindex: INSIDE, ..passed }, &inside);
        for (session, verdicts) in tap.sessions.iter().zip(first.into_iter().zip(second)) {
            let copies = [verdicts.0, verdicts.1].into_iter().filter(|verdict| *verdict == Verdict::Copied).count();
            prop_assert!(copies <= 1 || session.mark == 0, "{verdicts:?}");
        }
    }

    /// A session that makes no copy does not affect the others: they behave as if it did not exist.
    #[test]
    fn a_session_that_fails_touches_no_other(
        packet in any_packet(), tap in any_tap(), node in any_node(), which: prop::sample::Index,
    ) {
        prop_assume!(tap.session_count > 0);
        let (verdicts, after) = node.clone().see(packet, &tap);
        let failed = which.index(verdicts.len());
        prop_assume!(verdicts[failed] != Verdict::Copied);
        let mut sessions = tap.sessions[..verdicts.len()].to_vec();
        sessions.remove(failed);
        let (mut others, after_others) = node.clone().see(packet, &self::tap(tap.kind(), &sessions));
        others.insert(failed, verdicts[failed]);
        prop_assert_eq!(others, verdicts);
        prop_assert_eq!(after_others.tc_index, after.tc_index);
    }

    #[test]
    fn a_copy_is_not_copied_unless_a_pod_sends_it(packet in any_packet(), tap in any_tap(), mut node in any_node()) {
        let copy = Packet { tc_index: marks::of_copy(packet.tc_index), ..packet };
        let (verdicts, after) = node.see(copy, &tap);
        if !tap.kind().leaves_pod(packet.hook) {
            prop_assert!(node.clones.is_empty());
            prop_assert!(verdicts.iter().all(|verdict| [Verdict::Loop, Verdict::OtherDirection].contains(verdict)));
            prop_assert_eq!(after.tc_index, copy.tc_index);
        }
    }

    #[test]
    fn what_leaves_a_pod_is_a_duplicate_only_of_what_this_tap_has_copied(
        packet in any_packet(), tap in any_tap(), mut node in any_node(),
    ) {
        let tap = Tap { kind: TapKind::HostVeth.wire(), ..tap };
        let (verdicts, _) = node.see(Packet { hook: Hook::Ingress, ..packet }, &tap);
        let mut copied = 0;
        for (place, verdict) in verdicts.iter().enumerate() {
            match verdict {
                Verdict::Copied => copied |= 1 << place,
                Verdict::Duplicate => prop_assert!(
                    tap.sessions[place].alike & copied != 0,
                    "a session ahead of it has copied the same form"
                ),
                _ => {}
            }
        }
    }

    #[test]
    fn only_zero_means_copied(code: i64, flags in 0..8u32) {
        prop_assert_eq!(outcome(Cloned { code, is_uncut: false, removed: 0 }, flags).is_ok(), code == 0);
        prop_assert_eq!(outcome(Cloned { code, is_uncut: true, removed: 0 }, flags), Err(Verdict::Uncut));
    }
}

/// A packet as it leaves the pod behind `A`.
const FROM_A: Packet = Packet { hook: Hook::Ingress, ifindex: A, tc_index: 0 };

/// The packet as it enters the pod behind `device`.
fn at(device: u32, packet: Packet) -> Packet {
    Packet { hook: Hook::Egress, ifindex: device, ..packet }
}

/// The verdict of the second tap, where the packet enters a pod, with one session to the first target at either tap.
#[track_caller]
fn sent(snaplens: [u32; 2], device: u32, is_translated: bool) -> Verdict {
    let mut node = node(1);
    let [sender, receiver] = snaplens.map(|snaplen| tap(TapKind::HostVeth, &[session(0, 0, snaplen)]));
    let (verdicts, packet) = node.see(FROM_A, &sender);
    assert_eq!(verdicts, [Verdict::Copied]);
    node.identity = is_translated.into();
    node.see(at(device, packet), &receiver).0[0]
}

#[test]
fn the_receivers_tap_skips_what_the_senders_has_copied_in_the_same_form() {
    assert_eq!(sent([0, 0], B, false), Verdict::Duplicate);
    assert_eq!(sent([96, 96], B, false), Verdict::Duplicate);
}

#[test]
fn a_form_does_not_hide_another_one() {
    assert_eq!(sent([96, 0], B, false), Verdict::Copied, "the sender's mirror cuts, the receiver's does not");
    assert_eq!(sent([0, 96], B, false), Verdict::Copied);
    assert_eq!(
        sent([64, 64], B, false),
        Verdict::Copied,
        "a form without a bit is never a duplicate of another tap's"
    );
}

#[test]
fn a_translated_packet_is_copied_again() {
    assert_eq!(sent([0, 0], B, true), Verdict::Copied, "a service");
    assert_eq!(sent([0, 0], A, true), Verdict::Copied, "answered in place, or a service whose endpoint is A");
}

#[test]
fn what_comes_back_unchanged_is_copied_once() {
    assert_eq!(sent([0, 0], A, false), Verdict::Duplicate);
}

/// Packets of a flow wait in a queue between two taps. The notes of each tap's view of the flow, before and after NAT,
/// are kept separately.
#[test]
fn a_translated_flow_is_copied_whole_at_both_taps() {
    let mut node = node(1);
    let pod = tap(TapKind::HostVeth, &[session(0, 0, 0)]);
    let mut copied = Vec::new();
    for sent in 0..20 {
        node.identity = 0;
        let (verdicts, packet) = node.see(FROM_A, &pod);
        copied.push((verdicts, packet));
        if let Some((_, packet)) = copied.iter().rev().nth(3).filter(|_| sent >= 3) {
            node.identity = 1;
            let verdicts = node.see(at(B, *packet), &pod).0;
            assert_eq!(verdicts, [Verdict::Copied]);
        }
    }
    assert!(copied.iter().all(|(verdicts, _)| *verdicts == [Verdict::Copied]));
}

/// The receiver's tap copies in a form that the sender's tap does not have. The note stays the sender's, so that the
/// next packet of the flow, which is queued behind it, is still recognised.
#[test]
fn a_further_form_leaves_the_note_of_the_first() {
    let mut node = node(2);
    let sender = tap(TapKind::HostVeth, &[session(0, 0, 0)]);
    let receiver = tap(TapKind::HostVeth, &[session(0, 0, 0), session(1, 1, 0)]);
    let packets = [(); 2].map(|()| node.see(FROM_A, &sender).1);
    for packet in packets {
        assert_eq!(node.see(at(B, packet), &receiver).0, [Verdict::Duplicate, Verdict::Copied]);
    }
}

#[test]
fn a_filter_speaks_before_a_mark() {
    let (mut node, copied) = (node(1), Packet { tc_index: 0xb100, ..at(B, FROM_A) });
    node.noted.insert(0, (A, Hook::Ingress));
    let pod = tap(TapKind::HostVeth, &[Session { flags: SESSION_FILTERED, ..session(0, 0, 0) }]);
    assert_eq!(node.see(copied, &pod).0, [Verdict::Duplicate]);
    node.filtered = vec![0];
    assert_eq!(node.see(copied, &pod).0, [Verdict::Filtered], "the session does not ask for it at all");
}

/// A missing program, a program with another return value, an unreadable header.
#[test]
fn a_filter_or_sample_without_an_answer_lets_nothing_pass() {
    let filtered = tap(TapKind::HostVeth, &[Session { flags: SESSION_FILTERED, ..session(0, 0, 0) }]);
    for answer in [0, 1, 2, FILTER_MATCHES - 1, FILTER_DIFFERS + 1, u32::MAX] {
        let mut node = Node { answer: Some(answer), ..node(1) };
        assert_eq!(node.see(FROM_A, &filtered).0, [Verdict::Failed], "{answer}");
        assert!(node.clones.is_empty());
    }
    let sampled = tap(TapKind::HostVeth, &[Session { sample: 1, ..session(0, 0, 0) }]);
    // A flow in all flows, and not in the smallest sample.
    let [all, smallest] = [0, 1].map(|sample| Facts::of(&header(&[], 0), sample, 0));
    for (facts, verdict) in
        [(Facts::UNREAD, Verdict::Failed), (smallest, Verdict::SampledOut), (all, Verdict::Copied)]
    {
        let mut node = Node { facts, ..node(1) };
        assert_eq!(node.see(FROM_A, &sampled).0, [verdict]);
        assert_eq!(node.clones.len(), usize::from(verdict == Verdict::Copied));
    }
}

#[test]
fn every_form_has_its_bit() {
    assert_eq!(u32::from(FORM_BITS).count_ones() as usize, MAX_FORMS);
}

#[test]
fn a_device_without_a_queue_is_down_where_another_is_congested() {
    let outcome = |code, flags| outcome(Cloned { code, is_uncut: false, removed: 0 }, flags);
    assert_eq!(outcome(2, TARGET_UP), Err(Verdict::Congested));
    assert_eq!(outcome(2, TARGET_UP | TARGET_QUEUELESS), Err(Verdict::TargetDown));
    assert_eq!(outcome(1, TARGET_UP | TARGET_QUEUELESS), Err(Verdict::Congested), "too long for it");
    for gone in [-EINVAL, -ENETDOWN] {
        assert_eq!(outcome(gone, TARGET_UP), Err(Verdict::TargetDown));
    }
    assert_eq!(outcome(-12, TARGET_UP), Err(Verdict::Failed));
}

/// A guarded target gets no copies of packets that would loop, from any tap; every other target does. They are not
/// charged.
#[test]
fn a_guarded_target_refuses_packets() {
    let packet = FROM_A;
    let metered = Session { flags: SESSION_METERED, ..session(1, 1, 0) };
    let tap = tap(TapKind::HostVeth, &[session(0, 0, 0), metered]);
    let mut node = node(2);
    node.targets[1].flags |= TARGET_GUARDED;
    assert_eq!(node.see(packet, &tap).0, [Verdict::Copied, Verdict::Copied]);
    node.refused = vec![0, 1];
    let (clones, charged) = (node.clones.len(), node.charged.len());
    assert_eq!(node.see(packet, &tap).0, [Verdict::Copied, Verdict::Loop], "only a guarded target is asked");
    assert_eq!((node.clones.len(), node.charged.len()), (clones + 1, charged));
}

/// A packet that nobody would read is not charged. Readers of other targets get it.
#[test]
fn a_target_that_nobody_reads_gets_no_copies() {
    let metered = Session { flags: SESSION_METERED, ..session(0, 0, 0) };
    let tap = tap(TapKind::HostVeth, &[metered, session(1, 1, 0), session(2, 0, 0)]);
    let mut node = node(2);
    node.unread = vec![0, 1];
    node.targets[0].flags |= TARGET_WHEN_READ;
    let (verdicts, passed) = node.see(FROM_A, &tap);
    assert_eq!(verdicts, [Verdict::Unread, Verdict::Copied, Verdict::Unread], "only such a target is asked");
    assert_eq!((node.clones.len(), node.charged.len()), (1, 0));
    // The mark of its form is not set, so the next tap can copy it for a reader that has started meanwhile.
    node.unread.clear();
    assert_eq!(node.see(at(B, passed), &tap).0, [Verdict::Copied, Verdict::Duplicate, Verdict::Duplicate]);
    // A verdict about the packet itself takes precedence.
    node.unread = vec![0];
    let copy = Packet { tc_index: marks::of_copy(0), ..at(B, FROM_A) };
    assert_eq!(node.see(copy, &tap).0, [Verdict::Loop; 3]);
    node.targets[0].flags &= !TARGET_UP;
    assert_eq!(node.see(FROM_A, &tap).0[0], Verdict::TargetDown);
}

#[test]
fn a_tunnel_gets_copies_only_while_they_are_addressed() {
    let packet = FROM_A;
    let tap = tap(TapKind::HostVeth, &[session(0, 0, 0), session(1, 1, 0)]);
    let mut node = node(2);
    node.targets[1].flags |= TARGET_TUNNEL;
    assert_eq!(node.see(packet, &tap).0, [Verdict::Copied, Verdict::Copied]);
    node.targets[1].flags &= !TARGET_CUTS;
    assert_eq!(node.see(packet, &tap).0, [Verdict::Copied, Verdict::TargetDown]);
}

/// A filter on the length, for example, gives no answer for the segments that a reader makes of a super-frame. A device
/// gets the super-frame itself.
#[test]
fn a_filter_of_segments_lets_super_frames_pass_into_streams() {
    let stream = Reach { ifindex: 0, flags: TARGET_UP | TARGET_STREAM };
    let device = Reach { ifindex: 20, flags: READY };
    let of_segments = Session { flags: SESSION_FILTERED | SESSION_SEGMENTS, ..session(0, 0, 0) };
    let plain = Session { flags: SESSION_FILTERED, ..session(0, 0, 0) };
    for (target, session, is_super_frame, verdict) in [
        (stream, of_segments, true, Verdict::Copied),
        (stream, of_segments, false, Verdict::Filtered),
        (stream, plain, true, Verdict::Filtered),
        (device, of_segments, true, Verdict::Filtered),
    ] {
        let mut node = Node { targets: vec![target], filtered: vec![0], is_super_frame, ..Node::default() };
        assert_eq!(
            node.see(FROM_A, &tap(TapKind::HostVeth, &[session])).0,
            [verdict],
            "{session:?} {is_super_frame}"
        );
    }
}
