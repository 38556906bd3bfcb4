//! The ends of a stream: by the server, with a reason, and by the death of kube-apiserver, without one.

use std::{
    collections::BTreeSet,
    env, fs,
    time::{Duration, Instant},
};

use mirror_tests::{PacketFile, SOON, Tail, check, eventually};
use serde_json::json;

use super::{
    Packets,
    renewal::{GAP, INCOMPLETE},
};
use crate::{
    Node,
    aggregation::GROUP,
    resources::{mirrors, run},
};

/// `--min-request-timeout` of a kube-apiserver, which ends a watch of its own resources after once to twice this time.
const LIMIT: Duration = Duration::from_secs(3);
/// The duration of a stream, which is longer.
const LONGER: Duration = Duration::from_secs(8);
/// Number of pings at a time, and the size by which the last ones are recognised.
const PINGS: usize = 5;
const SIZE: usize = 200;

/// Only the server ends a stream at a time: kube-apiserver's limit is for its own resources. When it is killed, the
/// plugin goes on at another one behind the same address, as with a load balancer.
#[test]
fn kube_apiserver_limits_no_stream_and_cuts_all_off_when_it_is_killed() {
    let node @ Node { api, lab } = &Node::new("packets-endings");
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let packets = Packets::start(api, 1, &[]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let alice = &packets.grant("alice", false, &rules);
    let limited = api.another(&[&format!("--min-request-timeout={}", LIMIT.as_secs())]);
    let address = limited.address();
    let through = |uri: &str| format!("{uri} --server=https://{address}");
    // Each API server learns of the role and of the APIService after some moments.
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, &brief));
    eventually(SOON, || packets.get(alice, &through(&brief)));

    let of_web = packets.uri("packets?fieldSelector=metadata.name%3Dweb&filter=icmp&watch=true");
    let mut stream = packets.stream(alice, &through(&of_web));
    stream.wait_begun();
    api.lead_to(&limited);
    let path = lab.files().join("plugin.pcapng");
    let words = format!("tail web --as {alice} --write {} -- icmp", path.display());
    let mut plugin = lab.node().command(env::var_os("MIRROR_PLUGIN").unwrap());
    plugin.env("KUBECONFIG", api.kubeconfig()).args(words.split_whitespace());
    let reading = Tail::of(&mut plugin, path.clone());
    lab.wait_status(|status| {
        let readers = mirrors(status, web).len();
        let is_attached = status.taps.iter().all(|tap| tap.is_attached());
        check(readers == 2 && is_attached, || format!("{readers} readers"))
    });

    let begun = Instant::now();
    let longer = format!("packets?labelSelector=none&timeoutSeconds={}&watch=true", LONGER.as_secs());
    let ended = packets.stream(alice, &through(&packets.uri(&longer)));
    // Without the limit, it would end after half an hour.
    let own = format!("/api/v1/namespaces/{}/pods?watch=true --request-timeout=30s", api.namespace());
    api.kubectl(&format!("get --raw {}", through(&own)));
    assert!(begun.elapsed() >= LIMIT, "a watch has ended after {:?}", begun.elapsed());
    ended.wait_end(SOON, "timeoutSeconds");
    assert!(begun.elapsed() >= LONGER, "a stream has ended after {:?}", begun.elapsed());
    let so_far = || PacketFile::parse(&fs::read(&path).unwrap_or_default()).packets;
    web.ping(db.v4(), PINGS, 56);
    eventually(SOON, || {
        let counts = [PacketFile::parse(&stream.bytes()).packets.len(), so_far().len()];
        check(counts == [2 * PINGS; 2], || format!("{counts:?} packets"))
    });

    drop(limited);
    let status = eventually(SOON, || stream.ended().ok_or_else(|| "the stream goes on".to_owned()));
    let comments = PacketFile::parse(&stream.bytes()).comments;
    let has_end = comments.iter().any(|comment| comment.starts_with("podmirror: end: "));
    assert!(!status.success() && !has_end, "{status}: {comments:#?}");
    api.lead_back();
    eventually(SOON, || {
        web.ping(db.v4(), 1, 56);
        check(so_far().len() > 2 * PINGS, || "the plugin does not go on".into())
    });
    // From now on nothing is lost.
    web.ping(db.v4(), PINGS, SIZE);
    eventually(SOON, || {
        let is_late = |length: usize| length == 14 + 20 + 8 + SIZE;
        let late = so_far().iter().filter(|packet| is_late(packet.frame.length)).count();
        check(late == 2 * PINGS, || format!("{late} packets"))
    });
    reading.interrupt();
    let exit = reading.exit();
    let gaps = exit.stderr.lines().filter(|line| line.contains(GAP)).count();
    assert_eq!((exit.code, gaps), (Some(INCOMPLETE), 1), "{exit:?}");
    let file = PacketFile::whole(&path);
    let in_file = file.comments.iter().filter(|comment| comment.contains(GAP)).count();
    assert_eq!(in_file, gaps, "{:#?}", file.comments);
    let frames: BTreeSet<_> = file.packets.iter().map(|packet| &packet.frame.bytes).collect();
    assert_eq!(frames.len(), file.packets.len(), "a packet is there twice");
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    lab.wait_mirrored(&[]);
    agent.stop();
}
