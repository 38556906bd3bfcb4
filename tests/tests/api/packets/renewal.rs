//! What is renewed while a user reads packets: certificates, and the stream itself.

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use mirror_test_cluster::built::BACKEND_IP;
use mirror_tests::{
    Capture, Captured, PacketFile, Pinging, SOON, Tail, check, eventually, served_certificate,
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::json;

use super::Packets;
use crate::{
    Node,
    aggregation::{GROUP, SERVICE},
    mirror_nodes::shipped,
    plugin::{command, plugin},
    resources::wait_mirrors,
};

/// The lifetime of a CA. It signs for two thirds of it, certificates that last a quarter of it.
const LIFETIME: Duration = Duration::from_secs(48);
/// The longest duration of a request, where streams are renewed.
const LONGEST: Duration = Duration::from_secs(5);
/// The exit code of `tail` if a part of the packets is missing.
pub(super) const INCOMPLETE: i32 = 3;
/// How `tail` reports a time without packets.
pub(super) const GAP: &str = "no packets were read between ";

/// The certificates in the APIService's caBundle.
fn bundle(packets: &Packets<'_>) -> Vec<CertificateDer<'static>> {
    let words =
        format!("get apiservice v1alpha1.{GROUP} --output=go-template={{{{.spec.caBundle|base64decode}}}}");
    CertificateDer::pem_slice_iter(packets.api.kubectl(&words).as_bytes()).map(Result::unwrap).collect()
}

/// The certificate at this port of a server, verified with the present caBundle.
fn certificate(packets: &Packets<'_>, port: u16) -> Result<Vec<u8>, String> {
    let server = SocketAddr::new(BACKEND_IP.parse().unwrap(), port);
    served_certificate(server, &format!("{SERVICE}.{}.svc", packets.api.namespace()), bundle(packets))
}

/// Each server replaces its certificate several times, and one of them the CA. New connections trust the servers,
/// and open streams go on.
#[test]
fn certificates_are_renewed_during_a_stream() {
    let node @ Node { api, lab } = &Node::new("packets-renewal");
    let pods = node.pods(["web", "db"]);
    let [web, db] = &pods;
    let _containers = [web, db].map(|pod| api.run(lab, pod, &[]));
    let lifetime = format!("{}s", LIFETIME.as_secs());
    let mut packets = Packets::start(api, 2, &["--ca-lifetime", &lifetime]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    let alice = &packets.grant(
        "alice",
        false,
        &json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]),
    );
    let brief = packets.uri("packets?timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, &brief));
    let stream = packets.stream(alice, &packets.uri("packets?filter=icmp&watch=true"));
    stream.wait_begun();
    lab.wait_mirrored(&[web, db]);
    web.ping(db.v4(), 5, 56);

    let first = bundle(&packets)[0].clone();
    let ports: Vec<u16> = packets.ports.iter().flatten().copied().collect();
    let (begun, mut seen) = (Instant::now(), vec![BTreeSet::new(); ports.len()]);
    eventually(3 * LIFETIME, || {
        for (port, seen) in ports.iter().zip(&mut seen) {
            seen.insert(certificate(&packets, *port)?);
        }
        api.try_kubectl(&format!("get --raw /apis/{GROUP}/v1alpha1"))?;
        let (bundle, counts) = (bundle(&packets), seen.iter().map(BTreeSet::len).collect::<Vec<_>>());
        let is_over = !bundle.contains(&first) && counts.iter().all(|count| *count > 3);
        check(is_over, || format!("{} CAs, {counts:?} certificates", bundle.len()))
    });
    eprintln!("another CA, and more than three certificates of each server, within {:.1?}", begun.elapsed());

    web.ping(db.v4(), 5, 56);
    for server in packets.servers.drain(..) {
        let of_agent = server.log_with(&["has connected", lab.node().name()]);
        assert_eq!(of_agent.len(), 1, "the agent has connected again: {of_agent:#?}");
        server.stop();
    }
    let file = PacketFile::parse(&stream.wait_end(SOON, "the server ends"));
    let count = |name: &str| {
        let name = format!("{}/{name} eth0", api.namespace());
        file.packets.iter().filter(|packet| packet.interface == name).count()
    };
    assert_eq!((["web", "db"].map(count), file.packets.len()), ([20; 2], 40));
    agent.stop();
}

/// Reports about a pod, as the plugin shows them to a user.
#[track_caller]
fn the_plugin_shows(packets: &Packets<'_>, user: &str, node: &str, pod: &str) {
    let namespace = packets.api.namespace();
    for report in ["top", "coverage"] {
        eventually(SOON, || {
            let (code, table, why) = plugin(packets.api, &format!("{report} --as {user}"));
            let place = table.lines().nth(1).unwrap_or_default().split_whitespace().take(4);
            let is_shown = place.eq([namespace, pod, "eth0", node]);
            check(code == Some(0) && is_shown, || format!("{report}: {code:?} {table}{why}"))
        });
    }
    let (code, text, why) = plugin(packets.api, &format!("explain {pod} --as {user}"));
    let is_shown = text.starts_with(&format!("{namespace}/{pod} is mirrored.\n"));
    assert!(code == Some(0) && is_shown, "{code:?} {text}{why}");
}

/// The user has the rights of the chart's ClusterRole and no others.
#[test]
fn a_stream_ends_at_its_time_and_the_plugin_goes_on() {
    let node @ Node { api, lab } = &Node::new("packets-ends");
    let pods = node.pods(["web", "db"]);
    let [web, db] = &pods;
    let _web = api.run(lab, web, &[("podmirror.io/mirror", "true")]);
    let _db = api.run(lab, db, &[]);
    let packets = &Packets::start(api, 1, &["--max-duration", &format!("{}s", LONGEST.as_secs())]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    lab.wait_mirrored(&[web]);
    let role = shipped("ClusterRole", "podmirror-packets");
    let alice = &packets.grant("alice", false, &role["rules"]);
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, &brief));

    let capture = Capture::start(web.netns(), "eth0");
    let pinging = Pinging::start(web.netns(), db.v4());
    let path = lab.files().join("plugin.pcapng");
    let words = format!("tail web --as {alice} --write {} -- icmp", path.display());
    let reading = Tail::of(&mut command(api, &words), path);
    let begun = Instant::now();
    let streams =
        [("&timeoutSeconds=2", 2, "timeoutSeconds"), ("", 5, "the longest duration of a request is 5s")];
    let streams = streams.map(|(time, seconds, why)| {
        let uri = packets.uri(&format!("packets?filter=icmp{time}&watch=true"));
        (packets.stream(alice, &uri), Duration::from_secs(seconds), why)
    });
    the_plugin_shows(packets, alice, lab.node().name(), "web");
    for (stream, lasts, why) in streams {
        let file = PacketFile::parse(&stream.wait_end(SOON, why));
        assert!(begun.elapsed() >= lasts, "{why} after {:?}", begun.elapsed());
        let is_counted = !file.statistics.is_empty() && file.statistics.iter().all(|(_, lost)| *lost == 0);
        assert!(
            !file.packets.is_empty() && is_counted,
            "{} packets, {:?}",
            file.packets.len(),
            file.statistics
        );
    }

    // Two streams of the plugin end, and packets of the third one come.
    let so_far = || PacketFile::parse(&fs::read(reading.path()).unwrap_or_default());
    let third = eventually(4 * LONGEST + SOON, || {
        let file = so_far();
        check(file.interfaces.len() > 2, || {
            format!("{} streams: {:#?}", file.interfaces.len(), file.comments)
        })?;
        Ok(file.packets.len())
    });
    eventually(SOON, || check(so_far().packets.len() > third, || "no packet of the third stream".into()));
    reading.interrupt();
    let path = reading.path().to_owned();
    let exit = reading.exit();
    pinging.stop();
    assert_eq!(exit.code, Some(INCOMPLETE), "{exit:?}");
    let gaps: Vec<_> = exit.stderr.lines().filter(|line| line.contains(GAP)).collect();
    let why = ": the stream has ended: the longest duration of a request is 5s";
    assert!(gaps.len() >= 2 && gaps.iter().all(|gap| gap.ends_with(why)), "{exit:?}");
    let file = PacketFile::read(&path);
    let in_file = file.comments.iter().filter(|comment| comment.starts_with(&format!("podmirror: {GAP}")));
    assert_eq!(in_file.count(), gaps.len(), "{:#?}", file.comments);
    // Each begins with the newest packet before it.
    let time = |ns: u64| format!("{:.3}", Timestamp::from_nanosecond(ns.into()).unwrap());
    let times: BTreeSet<_> = file.packets.iter().map(|packet| time(packet.time_ns)).collect();
    let begin = |gap: &str| gap.split_once(GAP).unwrap().1.split(' ').next().unwrap().to_owned();
    assert!(gaps.iter().all(|gap| times.contains(&begin(gap))), "{exit:?}");

    // Each packet is there once, and the only ones that are missing are those of the gaps.
    let read: BTreeSet<_> = file.packets.iter().map(|packet| &packet.frame.bytes).collect();
    assert_eq!(read.len(), file.packets.len(), "a packet is there twice");
    let is_ping = |frame: &&Captured| frame.bytes[12..14] == [8, 0] && frame.bytes[23] == 1;
    let frames = capture.in_order();
    let are_read: Vec<_> = frames.iter().filter(is_ping).map(|frame| read.contains(&frame.bytes)).collect();
    let [first, last] = [are_read.iter().position(|is| *is), are_read.iter().rposition(|is| *is)];
    let between = &are_read[first.unwrap()..last.unwrap()];
    let holes = between.chunk_by(|one, next| one == next).filter(|run| !run[0]).count();
    assert!((2..=gaps.len()).contains(&holes), "{holes} holes, {exit:?}");
    assert_eq!(are_read.iter().filter(|is| **is).count(), read.len(), "a packet was never sent");
    wait_mirrors(lab, web, &["default"]);
    agent.stop();
}
