//! What tenants and agents can make large.

use std::net::Ipv4Addr;

use super::*;

#[test]
fn an_agent_cannot_make_anything_large() {
    let mut stream = with(stream(""), &[]);
    stream.see(pod("web", "a"));
    join(&mut stream, &["a"]);
    let long = "x".repeat(10_000);
    for number in 0..=MAX_NOTES {
        described(&mut stream, 0, &format!("shop/{number} {long}")[..number % 2000 + 10]);
        let reason = if number == 0 { long.as_str() } else { "OptedOut" };
        noted(&mut stream, 0, &format!("shop/{number}"), Some(reason));
        stream.pending.clear();
    }
    let nodes = stream.nodes.values().map(|node| node.interfaces.len()).collect::<Vec<_>>();
    assert_eq!((nodes, stream.notes.len()), (vec![MAX_INTERFACES], MAX_NOTES));
    let reasons = stream.notes.values().flatten().map(|(reason, _)| reason.len());
    assert_eq!(reasons.max(), Some(MAX_TEXT));
    stream.is_read = false;
    let refusal = stream.answer(true).unwrap().unwrap_err();
    assert_eq!((refusal.code, refusal.causes.len()), (409, MAX_CAUSES));
}

/// A text becomes longer when it is made fit for a terminal.
#[test]
fn the_messages_of_an_agent_have_a_bound_together() {
    let mut stream = with(stream(""), &[("web", "a")]);
    join(&mut stream, &["a"]);
    let text = "\u{1b}".repeat(MAX_TEXT);
    for number in 0..MAX_NOTES {
        let (pod, nic) = (Some(format!("shop/{number}")), Some(text.clone()));
        let (reason, message) = (text.clone(), text.clone());
        let note = Finding { pod, nic, reason, message, ..Finding::default() };
        stream.note(0, note);
        stream.pending.clear();
    }
    let size = |(part, note): (&String, &Option<(String, String)>)| {
        let (reason, message) = note.as_ref().unwrap();
        let lengths = [part, reason, message].map(String::len);
        assert!(lengths[1..].iter().all(|length| *length <= MAX_TEXT), "{lengths:?}");
        lengths.into_iter().sum::<usize>()
    };
    let bytes: usize = stream.notes.iter().map(size).sum();
    assert!(stream.notes.len() > 100 && bytes <= MAX_NOTES_BYTES, "{bytes} bytes");
    assert_eq!(stream.note_bytes, bytes);
}

#[test]
fn a_node_whose_stream_begins_again_and_again_takes_no_memory() {
    let mut stream = with(stream(""), &[("web", "a")]);
    for id in 0..20 {
        assert_eq!(join(&mut stream, &["a"]).len(), 1);
        for number in 0..MAX_INTERFACES {
            described(&mut stream, id, &format!("shop/{id}-{number} eth0"));
        }
        stream.pending.clear();
        stream.ended(id, Ok(()));
    }
    assert_eq!((stream.covered.len(), stream.failures.len(), stream.nodes.len()), (0, 0, 0));
}

#[test]
fn the_texts_of_an_interface_are_cut() {
    let mut stream = with(stream(""), &[("web", "a")]);
    join(&mut stream, &["a"]);
    let long = "x".repeat(60_000);
    let [description, filter, comment] = [(); 3].map(|()| Some(long.clone()));
    let name = format!("shop/web {long}");
    let of = Interface { name, description, filter, comment, ..Interface::default() };
    assert!(matches!(stream.block(0, Block::Interface(of), NOW), Some(Effect::Covered { .. })));
    let lengths = taken(&mut stream).into_iter().find_map(|block| match block {
        Block::Interface(of) => {
            Some([Some(of.name), of.description, of.filter, of.comment].map(|text| text.unwrap().len()))
        }
        _ => None,
    });
    assert_eq!(lengths, Some([MAX_TEXT; 4]));
}

#[test]
fn what_is_beyond_a_bound_is_said_once() {
    let mut stream = with(stream(""), &[("web", "a")]);
    join(&mut stream, &["a"]);
    for _ in 0..MAX_INTERFACES + 2 {
        described(&mut stream, 0, "shop/web eth0");
    }
    let interfaces = "podmirror: a interfaces: it has more than 4096 interfaces, and later ones are not read";
    assert_eq!(said(&mut stream), [interfaces]);
    for number in 0..MAX_NOTES + 2 {
        noted(&mut stream, 0, &format!("shop/{number}"), Some("OptedOut"));
    }
    let notes = "podmirror: other messages: more than 10000, or 1 MiB, are left out";
    let said = said(&mut stream);
    assert_eq!((said.len(), said.last().map(String::as_str)), (MAX_NOTES + 1, Some(notes)));
}

#[test]
fn names_wait_for_the_answer() {
    let mut stream = with(stream(""), &[]);
    for number in 0..6000_u32 {
        let Ok((are_pods, Event::Apply(mut pod))) = pod(&format!("web-{number:050}"), "a") else {
            unreachable!()
        };
        let address = Ipv4Addr::from(0x0a00_0000 + number);
        pod.status = Some(from_value(json!({ "podIPs": [{ "ip": address }] })).unwrap());
        stream.see(Ok((are_pods, Event::Apply(pod))));
    }
    stream.pour(NOW, false);
    assert!(stream.has_room(), "for what the answer depends on");
    stream.pour(NOW, true);
    assert!(!stream.has_room(), "the names follow");
}

#[test]
fn a_request_reads_a_bounded_number_of_nodes() {
    let many: Vec<_> = (0..300).map(|number| format!("node-{number}")).collect();
    let pods: Vec<_> = many.iter().map(|node| (node.as_str(), node.as_str())).collect();
    let mut stream = with(stream(""), &pods);
    let agents: Vec<_> = many.iter().map(String::as_str).collect();
    assert_eq!(join(&mut stream, &agents).len(), MAX_NODES);
    assert_eq!(said(&mut stream), ["podmirror: other nodes: a request reads at most 256 nodes"]);
    assert_eq!(join(&mut stream, &agents), []);
    // All pods are deleted.
    [Event::Init, Event::InitDone].into_iter().for_each(|event| _ = stream.see(Ok((true, event))));
    assert_eq!(join(&mut stream, &agents), []);
    assert_eq!(said(&mut stream), ["podmirror: other nodes: none is left out any more"]);
}

#[test]
fn the_nodes_of_the_pods_have_the_first_places() {
    let mut past = with(stream("&since=1h&follow=false"), &[("web", "node-999")]);
    let many: Vec<_> = (100..400).map(|number| format!("node-{number}")).collect();
    let agents: Vec<_> = many.iter().map(String::as_str).chain(["node-999"]).collect();
    let joined = join(&mut past, &agents);
    assert_eq!((joined.len(), &*joined[0].1), (MAX_NODES, "node-999"));
}

#[test]
fn a_request_reads_a_bounded_number_of_pods() {
    let mut stream = stream("");
    for number in 0..50_002 {
        stream.see(pod(&format!("web-{number}"), "a"));
    }
    assert_eq!(said(&mut stream), ["podmirror: a request reads at most 50000 pods, and others are left out"]);
}
