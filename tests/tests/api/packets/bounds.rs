//! Bounds: a client that does not read, a hundred requests at a time, and one too many.

use std::{
    fs,
    io::{self, Read as _},
    ops::Range,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{Conversation, PacketFile, SOON, Tail, check, eventually, memory, scaled};
use serde_json::json;

use super::{
    Packets, Stream,
    rights::{Connection, Direct, ask, pki},
};
use crate::{
    Node,
    aggregation::GROUP,
    resources::{mirrors, run},
};

/// The time after which the server gives up a client that takes nothing, and at which it asks whether a user still has
/// the right.
const MINUTE: Duration = Duration::from_secs(60);
/// The maximum number of requests of a user, for a namespace, and to a replica.
const OF_A_USER: usize = 5;
const FOR_A_NAMESPACE: usize = 20;
const TO_A_REPLICA: usize = 100;
/// The maximum number of requests for a namespace on a node: those of bob, and one of alice.
const ON_A_NODE: usize = 5;
const OF_BOB: usize = ON_A_NODE - 1;
/// The requests for the namespace of the story: those of bob, and one each of alice and carol.
const OPEN: usize = OF_A_USER + 2;
/// A request that waits for pods.
const NOTHING: &str = "packets?labelSelector=none&watch=true";
/// Bytes that the pods exchange per turn, each way.
const WORDS: usize = 4_000_000;
/// Timeout for the buffers between a tap and a client that does not read to fill up.
const FULL: Duration = Duration::from_secs(60);
/// Number of pings at a time, and of their packets in a file with both pods.
const PINGS: usize = 10;
const PACKETS: usize = 4 * PINGS;
/// The memory of the server's container in MiB.
const MOST_MEMORY: f64 = 384.0;

/// alice reads nothing of what she requests, and carol loses her right. The server notices both after a minute. Bob is
/// read for all the time, also among a hundred requests.
#[test]
fn a_reader_that_stops_slows_nobody() {
    let node @ Node { api, lab } = &Node::new("packets-bounds");
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let mut packets = Packets::start(api, 1, &[]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let [alice, bob, carol] = &["alice", "bob", "carol"].map(|user| packets.grant(user, false, &rules));
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    // The API server learns of the roles in their order.
    eventually(SOON, || packets.get(carol, &brief));

    let icmp = packets.uri("packets?filter=icmp&watch=true");
    let of_bob: Vec<_> = (0..OF_BOB).map(|_| packets.stream(bob, &icmp)).collect();
    of_bob.iter().for_each(Stream::wait_begun);
    // This one waits for pods, so that it has no place on the node.
    let waiting = packets.stream(bob, &packets.uri(NOTHING));
    waiting.wait_begun();
    let (mut to_alice, from_kubectl) = io::pipe().unwrap();
    let uri = packets.uri("packets?fieldSelector=metadata.name%3Dweb&filter=tcp&watch=true");
    let mut kubectl = api.command(&format!("get --raw {uri} --as={alice}"));
    let of_alice = Tail::of(kubectl.stdout(from_kubectl), PathBuf::from("-"));
    // The command holds the other end of the pipe, too.
    drop(kubectl);
    let wait_read = |expected: [usize; 2]| {
        lab.wait_status(|status| {
            let readers = [web, db].map(|pod| mirrors(status, pod).len());
            let is_attached = status.taps.iter().all(|tap| tap.is_attached());
            check(readers == expected && is_attached, || format!("{readers:?}, and not {expected:?} readers"))
        });
    };
    wait_read([OF_BOB + 1, OF_BOB]);

    // The flood fills all buffers: then each packet for alice is lost at the tap.
    let conversation = Conversation::open(web, db, db.v4());
    let counted = || {
        let status = lab.status();
        let sessions = &status.tap(web.veth_host()).sessions;
        ["copied", "lost"].map(|verdict| sessions.iter().map(|of| of.total(verdict)).sum::<u64>())
    };
    let (begun, mut before) = (Instant::now(), counted());
    loop {
        (0..5).for_each(|_| conversation.exchange(WORDS));
        let now = counted();
        if now[0] == before[0] && now[1] > before[1] {
            break;
        }
        assert!(begun.elapsed() < scaled(FULL), "copied and lost: {before:?} and then {now:?}");
        before = now;
    }
    eprintln!("nothing was copied any more {:.1?} after the flood began", begun.elapsed());
    let [port, _] = packets.ports[0];
    let full = || connections(port).into_iter().filter(|[unacknowledged, _]| *unacknowledged > 0).count();
    assert_ne!(full(), 0, "the connection for {alice}");

    let stopped = Instant::now();
    let of_carol = packets.stream(carol, &packets.uri(NOTHING));
    of_carol.wait_begun();
    api.kubectl(&format!("delete rolebinding {carol}"));
    let mut pings = 0;
    let mut others_go_on = || {
        thread::scope(|scope| {
            scope.spawn(|| conversation.exchange(WORDS));
            web.ping(db.v4(), PINGS, 56);
        });
        pings += 1;
        eventually(SOON, || {
            for stream in &of_bob {
                let count = PacketFile::parse(&stream.bytes()).packets.len();
                check(count == pings * PACKETS, || format!("{count} packets of {pings} times {PACKETS}"))?;
            }
            Ok(())
        });
        // A stranger gets an answer, too.
        let answered = ask(&packets, None, "/apis", &[]).map(|(code, _)| code);
        assert_eq!((answered, lab.get("/healthz").status), (Ok(401), 200));
    };
    others_go_on();
    let client = Direct::new(&packets, Some(&pki("front-proxy-client.crt")));
    let mut held = fill(&packets, &client, bob);
    // Also a client that is sent nothing is known to be there.
    eventually(SOON, || {
        let unwatched = connections(port).into_iter().filter(|[_, timer]| *timer == 0).count();
        check(unwatched == 0, || format!("{unwatched} connections without a timer"))
    });
    others_go_on();
    let (now, most) = memory(packets.servers[0].pid());
    eprintln!("memory of the server with {TO_A_REPLICA} requests: {now:.1} MiB, at most {most:.1} MiB");
    assert!(most < MOST_MEMORY, "{most} MiB");
    // A place is free again when its request has ended.
    drop(held.pop());
    eventually(SOON, || open(&client, "late", &everywhere()).map(drop));
    drop(held);

    of_carol.wait_end(MINUTE + SOON, "a right was revoked: ");
    let refused = packets.get(carol, &brief).unwrap_err();
    assert!(refused.contains("(Forbidden)"), "{refused}");
    let server = &packets.servers[0];
    eventually(MINUTE + SOON, || {
        let told = server.log_with(&["a user has read packets", alice, "nothing was taken for 60 s"]);
        check(told.len() == 1, || format!("{alice} is not given up: {:#?}", server.log()))
    });
    eprintln!("alice was given up after {:.1?}", stopped.elapsed());
    wait_read([OF_BOB, OF_BOB]);
    // Later, the server closes her connection, and with it drops what waits for her.
    eventually(MINUTE, || check(full() == 0, || format!("what waits for {alice} is still there")));
    eprintln!("alice was disconnected after {:.1?}", stopped.elapsed());
    // If she reads on, she gets what was on its way, and an error, without the reason: there was no room for it.
    let reader = thread::spawn(move || {
        let mut rest = Vec::new();
        to_alice.read_to_end(&mut rest).map(|_| rest)
    });
    eventually(SOON, || check(reader.is_finished(), || "the stream does not end".into()));
    let file = PacketFile::parse(&reader.join().unwrap().unwrap());
    let has_end = file.comments.iter().any(|comment| comment.starts_with("podmirror: end: "));
    assert!(!file.packets.is_empty() && !has_end, "{} packets, {:?}", file.packets.len(), file.comments);
    let exit = of_alice.exit();
    assert_eq!(exit.code, Some(1), "{exit:?}");

    others_go_on();
    // A server that is stopped says so to the rest.
    packets.servers.remove(0).stop();
    for stream in of_bob.into_iter().chain([waiting]) {
        stream.wait_end(SOON, "the server ends");
    }
    lab.wait_mirrored(&[]);
    agent.stop();
}

/// The connections to a port, as the kernel lists them: the number of bytes that the client has not acknowledged, and
/// the kind of the timer, 0 without one.
fn connections(port: u16) -> Vec<[u32; 2]> {
    let of_line = |line: &str| {
        let words: Vec<_> = line.split([' ', ':']).filter(|word| !word.is_empty()).collect();
        // The number of the line, two addresses with ports, the state, two queues, the timer.
        let [_, _, local, _, _, "01", unacknowledged, _, timer, ..] = words[..] else { return None };
        let number = |word: &str| u32::from_str_radix(word, 16).unwrap();
        (number(local) == u32::from(port)).then(|| [unacknowledged, timer].map(number))
    };
    fs::read_to_string("/proc/net/tcp").unwrap().lines().filter_map(of_line).collect()
}

/// The URI of [`NOTHING`] in all namespaces.
fn everywhere() -> String {
    format!("/apis/{GROUP}/v1alpha1/{NOTHING}")
}

/// Sends a request as the API server does for an administrator with this name. Returns the connection with the stream,
/// or the answer if there is none.
#[track_caller]
fn open(client: &Direct, user: &str, uri: &str) -> Result<Connection, String> {
    let headers = [("X-Remote-User", user), ("X-Remote-Group", "system:masters")];
    let mut connection = client.send(uri, &headers).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        connection.read_exact(&mut byte).unwrap();
        answer.extend_from_slice(&byte);
    }
    if answer.starts_with(b"HTTP/1.1 200 ") {
        return Ok(connection);
    }
    // The server can close the connection without a message of TLS.
    let _ = connection.read_to_end(&mut answer);
    Err(String::from_utf8_lossy(&answer).into_owned())
}

/// Opens requests until each bound is reached, beside the [`OPEN`] ones. One too many is refused for now, with the
/// bound. Returns the connections.
#[track_caller]
fn fill(packets: &Packets<'_>, client: &Direct, bob: &str) -> Vec<Connection> {
    let (here, everywhere) = (packets.uri(NOTHING), everywhere());
    let of_web = packets.uri("packets?fieldSelector=metadata.name%3Dweb&watch=true");
    let opened = |numbers: Range<usize>, uri: &str| {
        let reader = |number: usize| format!("reader-{}", number / OF_A_USER);
        // A busy API server lists pods late, and the client has to come again.
        let open = |number| eventually(MINUTE, || open(client, &reader(number), uri));
        numbers.map(open).collect::<Vec<_>>()
    };
    let is_refused = |user: &str, uri: &str, why: &str| {
        let answer = open(client, user, uri).err().unwrap_or_default();
        let head = answer.to_lowercase();
        let is_for_now = head.starts_with("http/1.1 429 ") && head.contains("\r\nretry-after: 5\r\n");
        assert!(is_for_now && answer.contains(why), "{user} {uri}, and not {why:?}: {answer}");
    };
    is_refused(bob, &here, &format!("{OF_A_USER} requests of the user {bob} are open"));
    let namespace = packets.api.namespace();
    let on_the_node = format!("{ON_A_NODE} requests for the namespace {namespace} on the node are open");
    is_refused("late", &of_web, &on_the_node);
    let mut held = opened(OPEN..FOR_A_NAMESPACE, &here);
    is_refused("late", &here, &format!("{FOR_A_NAMESPACE} requests for the namespace {namespace} are open"));
    held.extend(opened(FOR_A_NAMESPACE..TO_A_REPLICA, &everywhere));
    is_refused("late", &everywhere, &format!("{TO_A_REPLICA} requests to this replica are open"));
    held
}
