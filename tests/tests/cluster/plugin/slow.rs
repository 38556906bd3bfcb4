//! A program after `kubectl mirror tail` that does not read for a while: from its pipe back to the pod.

use std::{
    fs::File,
    io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{Cluster, Conversation, PATIENCE, PacketFile, Tail, check, dissected, eventually, memory};

use super::{directions, interface, plugin};

/// Bytes that the pods exchange per turn, each way.
const WORDS: usize = 4_000_000;
/// Maximum time until packets are lost: the buffers between the pod and the reader fill at `--max-rate`. The server
/// gives a reader up only after a minute.
const FULL: Duration = Duration::from_secs(25);
/// Duration of the request. At its end, `tail` gets the last counters.
const LASTS: &str = "40s";
/// Upper bound of `tail`'s memory for one node, in MiB: its program and its queue.
const MOST_MEMORY: f64 = 48.0;

/// What the file does not have is beyond the rate of a request, or did not fit into the full ring, and the file and
/// standard error count both.
#[test]
fn a_reader_that_stops_for_a_while_loses_nothing_silently() {
    let cluster = &Cluster::new("slow");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    let agent = cluster.agent_pid().unwrap();
    let (mut from_tail, to_reader) = io::pipe().unwrap();
    // With whole super-frames, one packet of the file is one packet of the counters.
    let mut command = plugin(cluster, &["tail", "pod/web", "--super-frames", "--duration", LASTS]);
    let reading = Tail::of(command.stdout(to_reader), PathBuf::from("-"));
    drop(command);
    host.wait_taps(&[&web.device]);

    let counted = |verdict: &str| host.status().tap(&web.device).sessions[0].total(verdict);
    let conversation = Conversation::between(&web.netns, &db.netns, db.ip);
    // Each byte must arrive, and in time.
    let converse = || {
        let begun = Instant::now();
        conversation.exchange(WORDS);
        begun.elapsed()
    };
    let (begun, mut times) = (Instant::now(), Vec::new());
    while counted("lost") == 0 {
        assert!(begun.elapsed() < FULL, "nothing is lost after {} times", times.len());
        times.push(converse());
    }
    let until_lost = begun.elapsed();
    let while_lost = [(); 5].map(|()| converse());
    let (now, most) = memory(reading.pid());
    let (count, longest) = (times.len(), times.iter().max());
    eprintln!("{count} times in {until_lost:.2?} until packets were lost, {longest:.2?} at most");
    eprintln!("then {while_lost:.2?}; memory of tail: {now:.1} MiB, at most {most:.1} MiB");
    assert!(most < MOST_MEMORY, "{most} MiB");
    assert_eq!(cluster.agent_pid(), Some(agent));

    // The reader continues.
    let path = host.files().join("slow.pcapng");
    let mut file = File::create(&path).unwrap();
    let reader = thread::spawn(move || io::copy(&mut from_tail, &mut file).unwrap());
    eventually(PATIENCE, || {
        // When one of these pings is in the file, the ring has room again.
        web.ping(db.ip, 1);
        let pings = directions(&PacketFile::read(&path), cluster, web).len();
        check(pings >= 2, || format!("{pings} pings"))
    });
    let [lost, limited] = ["lost", "limited"].map(counted);
    eventually(PATIENCE, || check(reader.is_finished(), || "tail still runs".into()));
    let (bytes, exit) = (reader.join().unwrap(), reading.exit());
    let file = PacketFile::read(&path);
    let came = file.packets.len() as u64;
    let matched = came + lost + limited;
    eprintln!("{bytes} bytes; {came} packets came, {lost} were lost, {limited} were beyond the rate");
    assert!(limited > 0, "the pods are not faster than the rate of a request");
    assert_eq!(file.statistics, [(matched, lost)], "{exit:?}");
    assert_eq!(file.limited, [limited], "{exit:?}");
    let place = format!("{} on node {}", interface(cluster, web), file.hardware[0]);
    for told in [
        format!("{came} packets; 1 interfaces; 1 nodes; {limited} packets limited; {lost} packets lost"),
        format!("{place}: {lost} of {matched} packets were lost"),
        format!("{place}: {limited} of {matched} packets were not copied because of a rate limit"),
    ] {
        assert!(exit.code == Some(0) && exit.stderr.contains(&told), "{told}: {exit:?}");
    }
    assert_eq!(file.comments.last().unwrap(), "podmirror: end: timeoutSeconds");
    // The file is complete: tshark reads it to its end.
    assert_eq!(dissected(&path, "icmp", &["frame.number"]).len(), directions(&file, cluster, web).len());
    assert_eq!(cluster.agent_pid(), Some(agent));
    host.wait_taps(&[]);
}
