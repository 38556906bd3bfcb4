#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bounds;
mod missing;

use http::{Method, Uri};
use mirror_capture::{
    blocks::{self, Blocks},
    pcapng::{Packet, note},
};
use proptest::{collection::vec, prelude::*};
use serde_json::{from_value, json};

use super::*;
use crate::apiserver::query::{Query, parse};

const NOW: Duration = Duration::ZERO;

/// A request for the packets of the namespace `shop`, without a list of pods yet.
fn stream(query: &str) -> Stream {
    of("namespaces/shop/packets", query)
}

fn of(path: &str, query: &str) -> Stream {
    let uri = format!("/apis/packets.podmirror.io/v1alpha1/{path}?watch=true{query}");
    let Ok(Query::Packets(packets)) = parse(&Method::GET, &uri.parse::<Uri>().unwrap()) else {
        unreachable!("{uri}")
    };
    Stream::new(&packets).unwrap()
}

/// A pod of `shop`, on a node.
fn pod(name: &str, node: &str) -> Result<Seen, (bool, String)> {
    let metadata = json!({ "name": name, "namespace": "shop", "uid": format!("uid-{name}") });
    let object = json!({ "metadata": metadata, "spec": { "nodeName": node } });
    Ok((true, Event::Apply(from_value(object).unwrap())))
}

/// The same request with a complete list of these pods.
fn with(mut stream: Stream, pods: &[(&str, &str)]) -> Stream {
    for (name, node) in pods {
        stream.see(pod(name, node));
    }
    stream.see(Ok((true, Event::InitDone)));
    stream
}

/// Opens the streams of these agents' nodes, as far as they are wanted.
fn join(stream: &mut Stream, agents: &[&str]) -> Vec<(StreamId, String, bool)> {
    let joined = stream.join(&agents.iter().map(|node| ((*node).to_owned(), ())).collect());
    joined.iter().for_each(|(id, ..)| stream.opened(*id));
    joined
}

fn blocks(bytes: &[u8]) -> Vec<Block> {
    let mut blocks = Blocks::default();
    blocks.push(bytes);
    let all = std::iter::from_fn(|| blocks.pop().unwrap()).collect();
    assert!(!blocks.is_within_a_block());
    all
}

/// The blocks for the client so far.
fn taken(stream: &mut Stream) -> Vec<Block> {
    stream.pour(NOW, true);
    blocks(&take(&mut stream.pending))
}

/// The messages for the user since the last time.
fn said(stream: &mut Stream) -> Vec<String> {
    let comment = |block| if let Block::Names(Names { comment, .. }) = block { comment } else { None };
    taken(stream).into_iter().filter_map(comment).collect()
}

/// Takes in a note about a pod, with the reason why it is not read, or a note without a pod.
fn noted(stream: &mut Stream, id: StreamId, pod: &str, reason: Option<&str>) {
    let pod = Some(pod.to_owned()).filter(|pod| !pod.is_empty());
    let (reason, message) = (reason.unwrap_or_default().to_owned(), "a message".to_owned());
    let note = Finding { pod, reason, message, ..Finding::default() };
    assert_eq!(stream.block(id, Block::Note(serde_json::to_string(&note).unwrap()), NOW), None);
}

fn described(stream: &mut Stream, id: StreamId, name: &str) -> Option<Effect> {
    stream.block(id, Block::Interface(Interface { name: name.to_owned(), ..Default::default() }), NOW)
}

/// Takes in a packet of one byte, of the stream's interface with this number.
fn sent(stream: &mut Stream, id: StreamId, interface: u32, byte: u8) -> Option<Effect> {
    let mut bytes = Vec::new();
    packet(InterfaceId::at(interface), &[byte]).write(&mut bytes);
    stream.block(id, blocks(&bytes).remove(0), NOW)
}

fn packet(interface: InterfaceId, bytes: &[u8]) -> Packet<'_> {
    let len = u32::try_from(bytes.len()).unwrap();
    Packet { interface, time_ns: 0, bytes, len, direction: None, comment: None }
}

/// The bytes of a packet.
fn payload(packet: &blocks::Packet) -> &[u8] {
    let length = u32::from_le_bytes(*packet.block[20..].first_chunk().unwrap()) as usize;
    &packet.block[28..28 + length]
}

/// The code and the message of a refusal, or none if packets can come.
fn answer(stream: &Stream, is_late: bool) -> Option<Result<(), (u16, String)>> {
    let short = |refusal: Refusal| (refusal.code, refusal.message);
    stream.answer(is_late).map(|answer| answer.map_err(short))
}

#[test]
fn the_answer_waits_for_the_list_and_for_the_agents() {
    let mut unlisted = stream("");
    assert_eq!(join(&mut unlisted, &["a"]), []);
    assert_eq!(answer(&unlisted, false), None);
    let late = |stream: &Stream| stream.answer(true).unwrap().unwrap_err();
    assert!(late(&unlisted).message.starts_with("the API server has not listed"));
    // A list of Services does not mend that of pods.
    unlisted.see(Err((false, "no Services".to_owned())));
    unlisted.see(Err((true, "no connection".to_owned())));
    unlisted.see(Ok((false, Event::InitDone)));
    assert_eq!(late(&unlisted).message, "pods: no connection");
    // The watch goes on. Pods can come.
    assert_eq!(answer(&with(unlisted, &[]), false), Some(Ok(())));

    let named = "&fieldSelector=metadata.name%3Dweb";
    let refused = |code, why: &str| Some(Err((code, why.to_owned())));
    let missing = "there is no pod \"web\"";
    assert_eq!(answer(&with(stream(named), &[("db", "a")]), false), refused(404, missing));
    assert_eq!(answer(&with(stream(&format!("{named}&since=1h")), &[]), false), refused(404, missing));
    // Any node may have packets of a deleted pod.
    let mut past = with(stream(&format!("{named}&since=1h&follow=false")), &[]);
    assert_eq!(answer(&past, false), refused(503, "no agent is connected"));
    assert_eq!(join(&mut past, &["a"]).len(), 1);
    past.block(0, Block::Section("the past of 1 h".to_owned()), NOW);
    assert_eq!(answer(&past, false), Some(Ok(())));

    let mut away = with(stream(""), &[("web", "a")]);
    assert_eq!(join(&mut away, &["b"]), []);
    assert_eq!(answer(&away, false), Some(Err((503, "a: its agent is not connected".to_owned()))));
    let joined = join(&mut away, &["a", "b"]);
    assert_eq!(joined, [(0, "a".to_owned(), true)]);
    assert_eq!(answer(&away, false), None);
    assert_eq!(answer(&away, true), Some(Ok(())));
    noted(&mut away, 0, "", None);
    assert_eq!(answer(&away, false), Some(Ok(())));
    let full = Refusal { retry: Some(5), ..Refusal::new(429, "TooManyRequests", "6 readers") };
    away.ended(0, Err(full));
    let refusal = away.answer(false).unwrap().unwrap_err();
    assert_eq!((refusal.code, refusal.retry, &*refusal.message), (429, Some(5), "a: 6 readers"));

    let mut interface = of("nodepackets", "&fieldSelector=metadata.name%3Da&interface=eth0");
    assert_eq!(join(&mut interface, &["a", "b"]), [(0, "a".to_owned(), true)]);
    assert_eq!(answer(&interface, false), None);
    interface.ended(0, Err(Refusal::new(409, "Conflict", "no such interface")));
    assert_eq!(answer(&interface, false), Some(Err((409, "a: no such interface".to_owned()))));
}

#[test]
fn nothing_is_refused_while_something_can_be_read() {
    type Noted = &'static [(StreamId, &'static str, Option<&'static str>)];
    let cases: [(Noted, Option<u16>); 7] = [
        (&[(0, "shop/web", Some("OptedOut"))], Some(409)),
        (&[(0, "shop/web", Some("OptedOut")), (1, "shop/db", None)], None),
        (&[(0, "shop/web", Some("OptedOut")), (1, "shop/db", Some("NoNetns"))], None),
        (&[(0, "shop/web", Some("OptedOut")), (1, "shop/db", Some("NamespaceExcluded"))], Some(409)),
        (
            &[(0, "shop/web", Some("NamespaceNotAllowed")), (1, "shop/db", Some("NamespaceExcluded"))],
            Some(403),
        ),
        // Notes about pods of other nodes and of other namespaces do not count.
        (&[(0, "shop/web", Some("OptedOut")), (0, "shop/db", None), (1, "other/db", None)], Some(409)),
        (&[(0, "shop/db", Some("OptedOut"))], None),
    ];
    for (notes, code) in cases {
        let mut stream = with(stream(""), &[("web", "a"), ("db", "b")]);
        assert_eq!(join(&mut stream, &["a", "b"]).len(), 2);
        for (id, pod, reason) in notes {
            noted(&mut stream, *id, pod, *reason);
        }
        let is_covered = notes.contains(&(1, "shop/db", None));
        assert_eq!(answer(&stream, false), is_covered.then_some(Ok(())), "{notes:?}");
        [0, 1].into_iter().for_each(|id| noted(&mut stream, id, "", None));
        let refusal = stream.answer(false).unwrap().err();
        assert_eq!(refusal.as_ref().map(|refusal| refusal.code), code, "{notes:?}");
        if let Some(Refusal { causes, message, .. }) = refusal {
            assert!(message.starts_with("no packets can be read: shop/"), "{message}");
            let causes: Vec<_> = causes.iter().map(|cause| (&*cause.field, Some(&*cause.reason))).collect();
            let mut expected: Vec<_> = notes
                .iter()
                .filter(|(.., reason)| reason.is_some())
                .map(|(_, pod, reason)| (*pod, *reason))
                .collect();
            expected.sort_unstable();
            assert_eq!(causes, expected);
        }
    }
}

#[test]
fn the_past_alone_is_that_of_all_nodes() {
    let mut past = with(stream("&since=1h&follow=false"), &[]);
    assert_eq!(answer(&past, false), Some(Err((503, "no agent is connected".to_owned()))));
    assert_eq!(join(&mut past, &["a", "b"]).len(), 2);
    assert_eq!(join(&mut past, &["a", "b", "c"]), [], "each stream begins once");
    past.block(0, Block::Section("no past: no recorder".to_owned()), NOW);
    assert_eq!(answer(&past, false), None);
    let mut other = with(stream("&since=1h&follow=false"), &[]);
    join(&mut other, &["a", "b"]);
    other.block(0, Block::Section("no past: no recorder".to_owned()), NOW);
    past.ended(0, Ok(()));
    past.block(1, Block::Section("no past: no recorder".to_owned()), NOW);
    past.ended(1, Ok(()));
    let message = "no packets can be read: a: NoPast: no past: no recorder; and 1 more";
    assert_eq!(answer(&past, false), Some(Err((409, message.to_owned()))));
    assert!(past.is_idle());

    assert_eq!(described(&mut other, 1, "shop/gone eth0"), None);
    assert_eq!(answer(&other, false), Some(Ok(())));
    assert_eq!(said(&mut other), ["podmirror: a: NoPast: no past: no recorder"]);
    assert_eq!(other.outcome(), "incomplete");

    let mut labelled = with(stream("&since=1h&follow=false&labelSelector=app=web"), &[("db", "a")]);
    assert_eq!((join(&mut labelled, &["a"]), answer(&labelled, false)), (vec![], Some(Ok(()))));

    // If packets of the present are wanted too, the request waits for them.
    let mut both = with(stream("&since=1h"), &[("web", "a")]);
    join(&mut both, &["a"]);
    both.block(0, Block::Section("no past: no recorder".to_owned()), NOW);
    noted(&mut both, 0, "", None);
    assert_eq!(answer(&both, false), Some(Ok(())));
}

/// More packets than the server can keep until another node sends its earlier ones.
#[test]
fn packets_of_the_past_that_are_out_of_order_are_announced() {
    for (first_ns, expected) in [
        (5, vec![format!("podmirror: {OUT_OF_ORDER}"), "podmirror: end: complete".into()]),
        (10, vec!["podmirror: end: complete".into()]),
    ] {
        let mut past = with(stream("&since=1h&follow=false"), &[]);
        join(&mut past, &["a", "b"]);
        (0..2).for_each(|id| drop(described(&mut past, id, "shop/web eth0")));
        let mut send = |id, time_ns, length| {
            let (mut bytes, payload) = (Vec::new(), vec![0; length]);
            Packet { time_ns, ..packet(InterfaceId::at(0), &payload) }.write(&mut bytes);
            past.block(id, blocks(&bytes).remove(0), NOW);
            taken(&mut past).iter().filter(|block| matches!(block, Block::Packet(_))).count()
        };
        let released: usize = (10..16).map(|time_ns| send(0, time_ns, 200_000)).sum();
        assert_eq!(released, 1);
        send(1, first_ns, 1);
        past.finish("complete", NOW);
        assert_eq!(said(&mut past), expected);
    }
}

#[test]
fn the_user_learns_what_changes() {
    let mut stream = with(stream(""), &[("web", "a")]);
    join(&mut stream, &["a"]);
    let nics = ["shop/web eth0", "shop/web net1"].map(|nic| described(&mut stream, 0, nic));
    let (pod, uid) = ("shop/web".to_owned(), "uid-web".to_owned());
    assert_eq!(nics, [Some(Effect::Covered { pod, uid }), None], "once for a pod");
    (0..2).for_each(|_| noted(&mut stream, 0, "shop/web", None));
    assert_eq!(said(&mut stream), Vec::<String>::new(), "its interface says it");
    for _ in 0..2 {
        noted(&mut stream, 0, "shop/web", Some("Opted\u{1b}Out"));
    }
    noted(&mut stream, 0, "shop/web", None);
    assert_eq!(
        said(&mut stream),
        [r"podmirror: shop/web: Opted\u{1b}Out: a message", "podmirror: shop/web: a message"]
    );

    let ended = || Err(Refusal::unavailable("the agent has ended the stream"));
    stream.ended(0, ended());
    assert_eq!(join(&mut stream, &[]), []);
    assert_eq!(join(&mut stream, &[]), []);
    assert_eq!(join(&mut stream, &["a"]), [(1, "a".to_owned(), false)]);
    let expected = [
        "podmirror: a: the agent has ended the stream",
        "podmirror: a: its agent is not connected",
        "podmirror: a: its packets are read",
    ];
    assert_eq!(said(&mut stream), expected);
    stream.cut_off();
    stream.finish("timeoutSeconds", NOW);
    let last = "podmirror: a: its last packets are missing: its stream has not ended in time";
    assert_eq!(said(&mut stream), [last, "podmirror: end: timeoutSeconds"]);
    assert!(stream.is_idle());
}

#[test]
fn a_pod_that_has_moved_is_the_new_nodes() {
    let mut stream = with(stream(""), &[("web", "a"), ("db", "b")]);
    join(&mut stream, &["a", "b"]);
    assert!(matches!(described(&mut stream, 0, "shop/web eth0"), Some(Effect::Covered { .. })));
    assert_eq!(described(&mut stream, 1, "shop/web eth0"), Some(Effect::Foreign { node: "b".to_owned() }));
    let counted = |interface, received| {
        let (interface, received) = (InterfaceId::at(interface), Some(received));
        Block::Statistics(Statistics { interface, received, ..Statistics::default() })
    };
    for (id, byte) in [(0, 1), (1, 2)] {
        sent(&mut stream, id, 0, byte);
        sent(&mut stream, id, 7, 9);
        [1, 1].into_iter().for_each(|received| drop(stream.block(id, counted(0, received), NOW)));
    }
    stream.see(pod("web", "b"));
    for (id, byte) in [(0, 3), (1, 4)] {
        sent(&mut stream, id, 0, byte);
        stream.block(id, counted(0, 2), NOW);
    }
    stream.finish("complete", NOW);
    let (mut packets, mut counters) = (Vec::new(), Vec::new());
    for block in taken(&mut stream) {
        match block {
            Block::Packet(packet) => packets.push((packet.interface, payload(&packet)[0])),
            Block::Statistics(of) => counters.push((of.interface.number(), of.received.unwrap())),
            _ => {}
        }
    }
    assert_eq!((packets, counters), (vec![(0, 1), (1, 4)], vec![(0, 1), (1, 2)]));
}

#[test]
fn a_reader_of_an_interface_learns_while_it_is_not_read() {
    let mut stream = of("nodepackets", "&fieldSelector=metadata.name%3Da&interface=eth0");
    join(&mut stream, &["a"]);
    let mut noted = |reason: Option<&str>| {
        let (nic, message) = (Some("eth0".to_owned()), "a message".to_owned());
        let reason = reason.unwrap_or_default().to_owned();
        let note = Finding { nic, reason, message, ..Finding::default() };
        assert_eq!(stream.block(0, Block::Note(serde_json::to_string(&note).unwrap()), NOW), None);
        said(&mut stream)
    };
    assert_eq!(noted(None), Vec::<String>::new(), "it is read from the beginning");
    assert_eq!(noted(Some("TooManyMirrors")), ["podmirror: a eth0: TooManyMirrors: a message"]);
    assert_eq!(noted(None), ["podmirror: a eth0: a message"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Streams that arrive in parts of any length and in any order, for a client that reads now and then. A packet of a
    /// node is drawn as its interface (of the node's own pod, of a deleted pod, of another node's pod), its length, and
    /// the time in ms since the one before.
    #[test]
    fn a_file_has_each_packet_of_each_nodes_own_pods_once(
        drawn in vec(vec((0..3_usize, 0..60_000_usize, 0..300_u64), 0..20), 1..4),
        steps in vec((0..1000_usize, 1..100_000_usize, any::<bool>()), 0..200),
    ) {
        let nodes: Vec<_> = (0..drawn.len()).map(|node| format!("node-{node}")).collect();
        let pods: Vec<_> = nodes.iter().map(|node| (node.as_str(), node.as_str())).collect();
        let mut stream = with(stream(""), &pods);
        let agents: Vec<_> = nodes.iter().map(String::as_str).collect();
        prop_assert_eq!(join(&mut stream, &agents).len(), drawn.len());
        let mut parts: Vec<(Blocks, Vec<u8>)> = Vec::new();
        for (node, packets) in drawn.iter().enumerate() {
            let mut bytes = Vec::new();
            let mut writer = Writer::begin(&mut bytes, &Section::default());
            note(&mut bytes, "{}");
            let names = [node, 9, node + 1].map(|of| format!("shop/node-{of} eth0"));
            let ids = names.each_ref().map(|name| {
                writer.interface(&mut bytes, &Interface { name: name.clone(), ..Interface::default() })
            });
            let mut time_ns = 0;
            for (number, (interface, length, step)) in packets.iter().enumerate() {
                time_ns += step * 1_000_000;
                let head = [node as u8, number as u8, *interface as u8];
                let bytes_of = [&head[..], &vec![0; *length]].concat();
                Packet { time_ns, ..packet(ids[*interface], &bytes_of) }.write(&mut bytes);
            }
            parts.push((Blocks::default(), bytes));
        }
        let (mut file, mut now) = (Vec::new(), NOW);
        let rest = (0..=drawn.len()).map(|_| (0, usize::MAX, true));
        for (index, length, is_taken) in steps.into_iter().chain(rest) {
            let left: Vec<_> = (0..parts.len()).filter(|node| !parts[*node].1.is_empty()).collect();
            if !left.is_empty() && stream.has_room() {
                let node = left[index % left.len()];
                let (blocks, bytes) = &mut parts[node];
                blocks.push(&bytes.drain(..length.min(bytes.len())).collect::<Vec<_>>());
                while let Some(block) = blocks.pop().unwrap() {
                    stream.block(node as StreamId, block, now);
                }
            }
            now += Duration::from_millis(20);
            stream.pour(now, true);
            prop_assert!(stream.pending.len() < PENDING + 61_000);
            if is_taken {
                file.append(&mut stream.pending);
            }
        }
        stream.finish("complete", now);
        file.append(&mut stream.pending);

        let (mut names, mut found) = (Vec::new(), vec![Vec::new(); drawn.len()]);
        for block in blocks(&file) {
            match block {
                Block::Interface(of) => names.push(of.name),
                Block::Packet(packet) => {
                    let [node, number, interface] = *payload(&packet).first_chunk().unwrap();
                    let name = [usize::from(node), 9, usize::from(node) + 1][usize::from(interface)];
                    prop_assert_eq!(&names[packet.interface as usize], &format!("shop/node-{name} eth0"));
                    found[usize::from(node)].push(usize::from(number));
                }
                Block::Names(Names { comment, .. }) => prop_assert_eq!(comment.unwrap(), "podmirror: end: complete"),
                other => prop_assert!(false, "{:?}", other),
            }
        }
        for (node, (packets, found)) in drawn.iter().zip(found).enumerate() {
            // The last node's neighbour does not exist, so nobody else answers for it.
            let is_own = |interface: usize| interface != 2 || node + 1 == drawn.len();
            let expected = packets.iter().enumerate().filter(|(_, (interface, ..))| is_own(*interface));
            prop_assert_eq!(found, expected.map(|(number, _)| number).collect::<Vec<_>>());
        }
    }
}
