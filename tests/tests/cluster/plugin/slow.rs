//! A program after `kubectl mirror tail` that does not read for a while: from its pipe back to the pod.

use std::{
    fs::File,
    io,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use mirror_tests::{Cluster, Conversation, PATIENCE, PacketFile, Tail, check, dissected, eventually, memory};

use super::{directions, plugin};

/// Bytes that the pods exchange per turn, each way.
const WORDS: usize = 4_000_000;
/// Upper bound of turns until packets are lost: the buffers between the pod and the reader hold much less.
const MOST: usize = 50;
/// Upper bound of `tail`'s memory for one node, in MiB: its program and its queue.
const MOST_MEMORY: f64 = 48.0;

#[test]
fn a_reader_that_stops_for_a_while_costs_packets_and_nothing_else() {
    let cluster = &Cluster::new("slow");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", None), ("db", None)]);
    let agent = cluster.agent_pid().unwrap();
    let (mut from_tail, to_reader) = io::pipe().unwrap();
    // With whole super-frames, one packet of the file is one packet of the counters.
    let mut command = plugin(cluster, &["tail", "pod/web", "--super-frames"]);
    let reading = Tail::of(command.stdout(to_reader), PathBuf::from("-"));
    drop(command);
    host.wait_taps(&[&web.device]);

    let lost = || host.status().tap(&web.device).sessions[0].total("lost");
    let conversation = Conversation::between(&web.netns, &db.netns, db.ip);
    // Each byte must arrive, and in time.
    let converse = || {
        let begun = Instant::now();
        conversation.exchange(WORDS);
        begun.elapsed()
    };
    let begun = Instant::now();
    let times: Vec<Duration> = (0..MOST).map_while(|_| (lost() == 0).then(converse)).collect();
    let until_lost = begun.elapsed();
    assert!(lost() > 0, "nothing is lost after {times:?}");
    let while_lost = [(); 5].map(|()| converse());
    let (now, most) = memory(reading.pid());
    eprintln!(
        "{} times in {until_lost:.2?} until packets were lost: {times:.2?}; then {while_lost:.2?}",
        times.len()
    );
    eprintln!("memory of tail: {now:.1} MiB, at most {most:.1} MiB");
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
    let lost = lost();
    reading.interrupt();
    let exit = reading.exit();
    let bytes = reader.join().unwrap();
    let file = PacketFile::read(&path);
    let came = file.packets.len() as u64;
    eprintln!("{bytes} bytes; {came} packets came, {lost} were lost");
    assert_eq!((file.interfaces.len(), &file.statistics[..]), (1, &[(came + lost, lost)][..]), "{exit:?}");
    let told = format!("{came} packets; 1 interfaces; 1 nodes; 0 packets limited; {lost} packets lost");
    assert!(exit.code == Some(0) && exit.stderr.contains(&told), "{told}: {exit:?}");
    // The file is complete: tshark reads it to its end.
    assert_eq!(dissected(&path, "icmp", &["frame.number"]).len(), directions(&file, cluster, web).len());
    assert_eq!(cluster.agent_pid(), Some(agent));
    assert_eq!(cluster.kubectl("get mirrors -o name"), "");
    host.wait_taps(&[]);
}
