//! The demo: three pods, one of them mirrored. It shows the mirrored packets on the mirror interface and in a parallel
//! `tail`.
//!
//! `cargo xtask demo` shows it to people, and the level netns runs it. The node and the pods are network namespaces of
//! their own, so this machine's network does not change. At its end, and after Ctrl-C, the demo removes everything that
//! it has created.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it is there to be read")]
#![expect(clippy::expect_used, reason = "a demo that cannot go on has failed")]

use std::{
    io::{Write as _, stdout},
    net::IpAddr,
    panic,
    process::ExitCode,
    time::Duration,
};

use mirror_tests::{
    Agent, Capture, Conversation, Frames, Lab, MIRROR, PipedTail, PodNs, PodSpec, PodsFile, SOON, Status,
    check, eventually,
};

/// Echo requests of each ping.
const PINGS: usize = 3;
const BRIDGE: &str = "br0";
/// Super-frames and partial checksums stay as on the mirror interface.
const TAIL: [&str; 4] = ["tail", "--pod", "default/web", "--super-frames"];

fn main() -> ExitCode {
    ctrlc::set_handler(mirror_tests::interrupt).expect("no other handler is set");
    panic::set_hook(Box::new(|why| {
        let text = why.payload().downcast_ref::<String>().map(String::as_str);
        eprintln!("error: {}", text.or_else(|| why.payload().downcast_ref().copied()).unwrap_or("a defect"));
    }));
    match panic::catch_unwind(show) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn show() {
    let lab = Lab::new("demo");
    lab.bridge(BRIDGE);
    let [web, db, client] = ["web", "db", "client"].map(|name| lab.pod(name, BRIDGE));
    step("a node with a bridge and three pods, each in a network namespace of its own");
    for (pod, about) in [
        (&web, "annotated podmirror.io/mirror: \"true\""),
        (&db, "not annotated"),
        (&client, "not annotated"),
    ] {
        println!("    {:<7} {}  {about}", pod.name(), pod.v4());
    }

    step("the agent starts on the node; it reads the pods from a file");
    let specs = [PodSpec::of(&web).mirror("true"), PodSpec::of(&db), PodSpec::of(&client)];
    let file = PodsFile::new(&lab, &specs);
    indented(PodsFile::yaml(&specs).lines());
    let agent = Agent::readable(&lab, &["run", "--pods-from", file.path()]);
    agent.wait_for_log(&["mirroring"]);
    lab.wait_mirrored(&[&web]);
    indented(agent.log().iter().map(String::as_str));
    step("web is tapped; the others carry no program");

    step(&format!("tcpdump -ni {MIRROR}"));
    let inside = Capture::start(web.netns(), &web.eth0().name);
    let mirror = Capture::start(lab.node(), MIRROR);
    step(&format!("mirror-agent {} -w - | tee web.pcapng | tcpdump -nr -", TAIL.join(" ")));
    let tail = PipedTail::start(&lab, &TAIL);
    step("db and client talk: none of it may appear");
    talk(&db, &client);
    step("web and db talk: each packet must appear");
    talk(&web, &db);
    let seen = eventually(SOON, || {
        let seen = Seen::of(&mirror.frames().ipv4(), &web);
        check(seen.is_complete(), || {
            format!("{MIRROR} does not show all that web said and heard: {seen:?}")
        })?;
        Ok(seen)
    });
    step(&format!("captured on {MIRROR}"));
    indented(mirror.text("ip or arp").lines());
    println!("    Broadcasts and multicasts of all pods (ARP requests, IGMP) reach web too.");
    seen.judge();
    let shown = eventually(SOON, || {
        let shown = mirror.frames().ipv4();
        shown.same_as(&inside.frames().ipv4())?;
        tail.file().all_frames().ipv4().same_as(&shown)?;
        Ok(shown)
    });
    let (file, text) = tail.stop();
    step("the same from tail, which needs no mirror interface");
    indented(text.lines());
    let in_file = file.all_frames().ipv4();
    in_file.same_as(&shown).expect("the file that tail has left is as it was");
    println!("    {} IPv4 packets on {MIRROR}, and the same {} in web.pcapng", shown.len(), in_file.len());

    step("what the agent counted");
    counters(&lab.status());
    agent.stop();
    step("removing everything that the demo made");
    lab.cleanup();
    assert!(lab.pins().is_empty(), "`mirror-agent cleanup` has left {:?}", lab.pins());
    drop((web, db, client));
    drop(lab);
    step("demo: web's packets were captured, what db said to others was not");
}

/// A ping and a TCP connection from one pod to another.
fn talk(from: &PodNs, to: &PodNs) {
    from.ping_every(Duration::from_millis(200), to.v4(), PINGS, 56);
    println!("    {} pings {} {PINGS} times", from.name(), to.name());
    let heard = Conversation::open(from, to, to.v4()).ask("hello");
    println!("    {} says \"hello\" to {} over TCP, and {0} hears {heard:?}", from.name(), to.name());
}

/// Numbers of packets on the mirror interface.
#[derive(Debug, Default)]
struct Seen {
    requests: usize,
    replies: usize,
    tcp_from_web: usize,
    tcp_to_web: usize,
    of_others: usize,
}

impl Seen {
    /// Counts IPv4 frames without options. These pods send no others.
    fn of(frames: &Frames, web: &PodNs) -> Self {
        const ICMP: u8 = 1;
        const TCP: u8 = 6;
        let mut seen = Self::default();
        for (frame, times) in frames.iter() {
            let address = |at: usize| IpAddr::from([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
            let (from, to) = (address(26), address(30));
            let counter = match (frame[23], frame[34]) {
                _ if from != web.v4() && to != web.v4() && !to.is_multicast() => &mut seen.of_others,
                (ICMP, 8) => &mut seen.requests,
                (ICMP, 0) => &mut seen.replies,
                (TCP, _) if from == web.v4() => &mut seen.tcp_from_web,
                (TCP, _) => &mut seen.tcp_to_web,
                _ => continue,
            };
            *counter += times;
        }
        seen
    }

    /// Whether all pings are there, and at least as many segments as a TCP connection has: four from web, three to it.
    fn is_complete(&self) -> bool {
        let Self { requests, replies, tcp_from_web, tcp_to_web, .. } = *self;
        requests >= PINGS && replies >= PINGS && tcp_from_web >= 4 && tcp_to_web >= 3
    }

    fn judge(&self) {
        let Self { requests, replies, tcp_from_web, tcp_to_web, of_others } = *self;
        println!("    of web:    {requests} echo requests and {replies} replies, of {PINGS} each");
        println!("               {tcp_from_web} TCP segments from web, {tcp_to_web} to it");
        println!("    of others: {of_others} packets between db and client");
        assert_eq!((requests, replies), (PINGS, PINGS), "not every ping is on {MIRROR} once");
        assert_eq!(of_others, 0, "packets of pods that are not mirrored are on {MIRROR}");
    }
}

fn counters(status: &Status) {
    for tap in &status.taps {
        let pod = tap.pod.as_ref().map_or("-", |pod| &pod.name);
        let attached = tap.attached.get("ingress").map_or("-", String::as_str);
        println!("    pod {pod}, device {} ({attached})", tap.device);
        for counts in &tap.counters {
            println!(
                "    {:<8} {:<12} {:>5} packets {:>7} bytes",
                counts.direction, counts.result, counts.packets, counts.bytes
            );
        }
    }
}

fn step(what: &str) {
    println!("==> {what}");
    // Errors of the agent and of tcpdump go to the same terminal.
    let _ = stdout().flush();
}

fn indented<'a>(lines: impl Iterator<Item = &'a str>) {
    lines.for_each(|line| println!("    | {line}"));
}
