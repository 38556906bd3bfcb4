//! Mirrors with a stream: which programs get their packets from the agent's stream endpoint.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mirror_tests::{Flood, Lab, PacketFile, PodNs, SOON, Tail, check, eventually, lint_metrics, scaled};
use serde_json::{Value, json};

use crate::{
    Node,
    resources::{Story, file, resource, run},
};

/// The agent's default address for streams.
const STREAM_LISTEN: &str = "127.0.0.1:10707";
/// The key of these stories, and the output of `printf %s KEY | sha256sum`.
const KEY: &str = "a key of the stories";
const KEY_SHA256: &str = "876b53d1033f977b80be69a45b19f5ce6d8d1f87b101a1503823c41d7bbc244c";

/// Metrics of copies that are shorter or longer than requested, because of a tunnel's MTU or of long headers. Streams
/// have none.
const OF_MISFITS: [&str; 4] = [
    "podmirror_cut_packets_total",
    "podmirror_cut_bytes_total",
    "podmirror_long_packets_total",
    "podmirror_long_bytes_total",
];

/// Checks that a scrape and docs/metrics.md have the same metrics among those that `is_one` selects.
pub(crate) fn has_documented(scrape: &str, is_one: impl Fn(&str) -> bool) -> Result<(), String> {
    let document = file("docs/metrics.md");
    let is_one = |name: &&str| name.starts_with("podmirror_") && is_one(name);
    let words = document.split(|of: char| !of.is_ascii_alphanumeric() && of != '_');
    let documented: BTreeSet<_> = words.filter(is_one).collect();
    let types = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let scraped: BTreeSet<_> = types.filter(is_one).collect();
    let only_one_has: Vec<_> = scraped.symmetric_difference(&documented).collect();
    check(only_one_has.is_empty(), || format!("only in the scrape or the document: {only_one_has:?}"))
}

/// A program that reads a stream.
struct Program {
    connection: TcpStream,
}

impl Program {
    /// Connects and sends this request.
    #[track_caller]
    fn connect(lab: &Lab, request: &Value) -> Self {
        let connection = eventually(SOON, || {
            lab.node().enter(|| TcpStream::connect(STREAM_LISTEN)).map_err(|error| error.to_string())
        });
        connection.set_read_timeout(Some(scaled(2 * SOON))).unwrap();
        (&connection).write_all(format!("{request}\n").as_bytes()).unwrap();
        Self { connection }
    }

    /// Connects with the key as soon as the agent offers the stream.
    #[track_caller]
    fn admitted(lab: &Lab, mirror: &str) -> Self {
        Self::admitted_with(lab, &json!({ "mirror": mirror, "key": KEY }))
    }

    /// As [`Program::admitted`], with this request.
    #[track_caller]
    fn admitted_with(lab: &Lab, request: &Value) -> Self {
        let program = Self::connect(lab, request);
        let mut answer = [0; 3];
        (&program.connection).read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ok\n");
        program
    }

    /// Everything that the agent still sends, until it closes or resets the connection.
    fn rest(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = self.connection.read_to_end(&mut rest);
        rest
    }

    /// Starts a thread that reads everything from now on.
    fn reading(self) -> Reading {
        let end = self.connection.try_clone().unwrap();
        Reading { end, bytes: thread::spawn(move || self.rest()) }
    }
}

/// A program that reads everything it receives.
struct Reading {
    end: TcpStream,
    bytes: JoinHandle<Vec<u8>>,
}

impl Reading {
    /// Requests the end of the stream, and waits for the counters.
    fn stop(self) -> PacketFile {
        (&self.end).write_all(b".").unwrap();
        PacketFile::parse(&self.bytes.join().unwrap())
    }
}

/// Waits until a program reads exactly these pods.
#[track_caller]
fn wait_read(lab: &Lab, pods: &[&PodNs]) {
    lab.wait_mirrored(pods);
    lab.wait_status(|status| {
        let sessions = status.taps.iter().flat_map(|tap| &tap.sessions);
        let others: Vec<_> = sessions
            .map(|session| &session.mirror)
            .filter(|mirror| !mirror.starts_with("capture."))
            .collect();
        check(others.is_empty(), || format!("{others:?}"))
    });
}

#[test]
fn the_packets_of_a_stream_are_for_the_program_that_has_the_key() {
    let story = &Story::new("keys");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    lab.wait_get("/readyz", 200);
    story.mirror("live", "web", &json!({ "filter": "icmp", "stream": { "keySha256": KEY_SHA256 } }));
    let mirror = format!("{}/live", api.namespace());
    let told = story.wait_told("live", |of| of["pods"]["selected"] == 1);
    assert_eq!(told["uncovered"][0]["reason"], "NoReader", "{told:#}");
    lab.wait_mirrored(&[]);

    // Without the key a client gets no byte, and nothing is mirrored for it.
    let requests = [
        json!({ "mirror": mirror, "key": "another key" }),
        json!({ "mirror": mirror, "key": KEY_SHA256 }),
        json!({ "mirror": format!("{}/other", api.namespace()), "key": KEY }),
        json!("live"),
    ];
    for stranger in requests.map(|request| Program::connect(lab, &request)) {
        assert_eq!(stranger.rest(), b"");
    }
    lab.wait_mirrored(&[]);

    let reading = Program::admitted(lab, &mirror).reading();
    wait_read(lab, &[web]);
    // A second program has to wait.
    let second = Program::connect(lab, &json!({ "mirror": mirror, "key": KEY })).rest();
    let second = String::from_utf8(second).unwrap();
    assert!(second.starts_with("another program reads this stream"), "{second}");
    web.ping(db.v4(), 5, 400);
    web.udp_echo(db, db.v4(), &[1, 1000]);
    // A pod that starts to match the selector is read on the same connection, and one that no longer matches is not.
    api.kubectl("label --overwrite pod db app=web");
    wait_read(lab, &[web, db]);
    db.ping(web.v4(), 3, 100);
    api.kubectl("label --overwrite pod web app=other");
    wait_read(lab, &[db]);
    web.ping(db.v4(), 2, 200);
    let told = story.wait_told("live", |of| of["pods"]["covered"] == 1);
    assert_eq!(told["uncovered"], Value::Null, "{told:#}");
    let file = reading.stop();
    lab.wait_mirrored(&[]);
    let of = |pod: &str, length: usize| {
        let name = format!("{}/{pod} eth0", api.namespace());
        let packets = file.packets.iter().filter(|packet| packet.interface == name);
        let lengths = packets.filter(|packet| packet.frame.bytes.len() == 14 + 20 + 8 + length);
        lengths.map(|packet| packet.direction).collect::<Vec<_>>()
    };
    assert_eq!(of("web", 400), ["egress", "ingress"].repeat(5));
    assert_eq!((of("web", 100).len(), of("db", 100).len()), (6, 6));
    assert_eq!((of("web", 200).len(), of("db", 200).len()), (0, 4));
    assert_eq!(file.packets.len(), 10 + 12 + 4, "no other packets: {:#?}", file.interfaces);
    let (received, lost): (Vec<_>, Vec<_>) = file.statistics.iter().copied().unzip();
    assert_eq!((received.iter().sum::<u64>(), lost.iter().sum::<u64>()), (26, 0));
    agent.stop();
}

/// A resource inherits no setting from the agent's flags: the sample of one packet in many does not apply to it.
#[test]
fn what_the_rate_of_a_mirror_keeps_out_of_its_stream_is_counted() {
    let story = &Story::new("limited");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &["--sample", "1/1000000"]);
    let rate_limit = json!({ "packetsPerSecond": 10, "burst": "100ms" });
    let spec = json!({ "filter": "icmp", "rateLimit": rate_limit, "stream": { "keySha256": KEY_SHA256 } });
    story.mirror("live", "web", &spec);
    let reading = Program::admitted(lab, &format!("{}/live", api.namespace())).reading();
    wait_read(lab, &[web]);
    web.ping(db.v4(), 20, 56);
    let file = reading.stop();
    let (came, limited) = (file.packets.len() as u64, file.limited[0]);
    assert!(came > 0 && limited > 0 && came + limited == 40, "{came} {limited}");
    assert_eq!((file.limited.len(), &file.statistics[..]), (1, &[(40, 0)][..]));
    agent.stop();
}

#[test]
fn a_stream_ends_with_its_program_and_with_its_mirror() {
    let story = &Story::new("ends");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    let mirror = format!("{}/live", api.namespace());
    // The program connects before its Mirror is known.
    let early = Program::connect(lab, &json!({ "mirror": mirror, "key": KEY }));
    story.mirror("live", "web", &json!({ "filter": "icmp or udp", "stream": { "keySha256": KEY_SHA256 } }));
    let mut answer = [0; 3];
    (&early.connection).read_exact(&mut answer).unwrap();
    wait_read(lab, &[web]);
    // As if the program were killed: the kernel closes its connection.
    early.connection.shutdown(Shutdown::Both).unwrap();
    drop(early);
    lab.wait_mirrored(&[]);

    // A program that does not read: the agent's loop goes on, the pod's packets too, and others are read.
    let silent = Program::admitted(lab, &mirror);
    wait_read(lab, &[web]);
    story.mirror("other", "db", &json!({ "filter": "icmp", "stream": { "keySha256": KEY_SHA256 } }));
    let other = Program::admitted(lab, &format!("{}/other", api.namespace())).reading();
    wait_read(lab, &[web, db]);
    let flood = Flood::start(web, db);
    eventually(2 * SOON, || {
        let status = lab.status();
        let sessions = status.tap(web.veth_host()).sessions.iter();
        let lost: u64 = sessions.map(|session| session.total("lost")).sum();
        check(lost > 0, || "nothing is lost yet".into())
    });
    assert_eq!(lab.get("/healthz").status, 200);
    web.ping(db.v4(), 3, 56);
    flood.stop();
    assert_eq!(other.stop().packets.len(), 6);
    drop(silent);
    lab.wait_mirrored(&[]);

    // The Mirror is deleted, and the stream ends.
    let reading = Program::admitted(lab, &mirror).reading();
    wait_read(lab, &[web]);
    web.ping(db.v4(), 3, 56);
    api.kubectl("delete mirror live other");
    let file = PacketFile::parse(&reading.bytes.join().unwrap());
    assert_eq!((file.packets.len(), file.statistics), (6, vec![(6, 0)]));
    lab.wait_mirrored(&[]);
    agent.stop();
}

/// A recorder has the packets of two pods. A stream begins with those of its own pods, and of deleted ones that it
/// selects without labels. Meanwhile the agent has all metrics but [`OF_MISFITS`].
#[test]
fn a_stream_begins_with_the_recorded_packets_of_its_pods() {
    let story = &Story::new("past");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let annotations = ["mirror", "target", "filter"].map(|key| format!("podmirror.io/{key}"));
    let network = ("k8s.v1.cni.cncf.io/network-status", r#"[{"name":"kube-ovn","interface":"eth0"}]"#);
    let annotations = annotations.iter().map(String::as_str).zip(["true", "live", "icmp"]);
    let annotations: Vec<_> = annotations.chain([network]).collect();
    let mut containers = run(node, &pods, &annotations);
    // A pod without a network namespace yet.
    api.apply(&api.object("starting", &annotations));
    let [web, db] = &pods;
    let agent = api.agent(lab, &["--define-target", "live=stream"]);
    lab.wait_mirrored(&[web, db]);
    let keyed = json!({ "keySha256": KEY_SHA256 });
    story.mirror("labels", "web", &json!({ "stream": keyed }));
    let named = json!({ "keySha256": KEY_SHA256, "pods": ["web"] });
    for (name, stream) in [("named", named), ("all", keyed)] {
        api.apply(&resource("Mirror", name, &json!({}), &json!({ "stream": stream })));
    }
    let past = |mirror: &str| {
        let mirror = format!("{}/{mirror}", api.namespace());
        let request = json!({ "mirror": mirror, "key": KEY, "since": "1h", "no_follow": true });
        PacketFile::parse(&Program::admitted_with(lab, &request).rest())
    };
    // The packets of web and of db.
    let counts = |mirror: &str| {
        let file = past(mirror);
        ["web", "db"].map(|pod| {
            let name = format!("{}/{pod} eth0", api.namespace());
            file.packets.iter().filter(|packet| packet.interface == name).count()
        })
    };
    let wait_counts = |mirror, expected| {
        eventually(SOON, || {
            let counts = counts(mirror);
            check(counts == expected, || format!("{mirror}: {counts:?}, and not {expected:?}"))
        });
    };
    assert_eq!(past("all"), PacketFile::default(), "there is no recorder");

    let recorder = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    lab.wait_status(|status| check(status.target("live").up, || "nobody records".into()));
    web.ping(db.v4(), 5, 56);
    // A packet between two recorded pods is kept once, with the sender.
    wait_counts("all", [5, 5]);
    let scrape = eventually(SOON, || {
        let scrape = lab.get("/metrics").body;
        let is_of_agent = |name: &str| !name.starts_with("podmirror_controller_");
        has_documented(&scrape, |name| is_of_agent(name) && !OF_MISFITS.contains(&name)).map(|()| scrape)
    });
    lint_metrics(&scrape);
    assert_eq!([counts("labels"), counts("named")], [[5, 0]; 2]);

    drop(containers.remove(0));
    api.kubectl("delete pod web --grace-period=0 --force");
    lab.wait_mirrored(&[db]);
    wait_counts("labels", [0, 0]);
    wait_counts("named", [5, 0]);
    wait_counts("all", [5, 5]);
    // Its author has switched mirrors off since.
    api.kubectl("annotate --overwrite pod db podmirror.io/mirror=false");
    wait_counts("all", [5, 0]);
    recorder.kill();
    agent.stop();
}

/// The program's connection stays open, like that of a suspended machine.
#[test]
fn a_program_that_takes_nothing_for_half_a_minute_loses_its_stream() {
    let story = &Story::new("stalled");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let agent = api.agent(lab, &[]);
    story.mirror("live", "web", &json!({ "filter": "icmp or udp", "stream": { "keySha256": KEY_SHA256 } }));
    let mirror = format!("{}/live", api.namespace());
    let silent = Program::admitted(lab, &mirror);
    wait_read(lab, &[web]);
    let flood = Flood::start(web, db);
    eventually(2 * SOON, || {
        let lost = lab.status().tap(web.veth_host()).sessions[0].total("lost");
        check(lost > 0, || "nothing is lost yet".into())
    });
    flood.stop();
    let begun = Instant::now();
    eventually(3 * SOON, || {
        let taps = lab.try_status()?.taps.len();
        check(taps == 0, || "it is still read".into())
    });
    let until_the_end = begun.elapsed();
    eprintln!("the stream has ended after {until_the_end:.1?}");
    assert!(until_the_end > Duration::from_secs(10), "it may take its time: {until_the_end:?}");

    // The program still finds the bytes that were in transit. Another one can read the stream.
    let rest = PacketFile::parse(&silent.rest());
    assert_eq!(rest.statistics, []);
    let reading = Program::admitted(lab, &mirror).reading();
    wait_read(lab, &[web]);
    web.ping(db.v4(), 3, 56);
    assert_eq!(reading.stop().packets.len(), 6);
    agent.stop();
}
