//! Programs read what `tail` writes into a pipe.

use std::process::Command;

use mirror_tests::{Agent, PodSpec, Reader, SOON, Tail, check, eventually};

use crate::{Node, any_mode};

/// Ends the agent's command as Ctrl-C does.
#[track_caller]
pub(crate) fn ends_well(tail: Tail) {
    tail.interrupt();
    let exit = tail.exit();
    assert_eq!(exit.code, Some(0), "{exit:?}");
}

/// Like Wireshark, tshark lets dumpcap read the pipe. It shows the pod's name.
#[test]
fn wireshark_reads_a_stream_and_names_the_pod() {
    let Node { web, db, lab } = &Node::new("shark-stream");
    let agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let mut tshark = Command::new("tshark");
    tshark.args(["-n", "-l", "-i", "-", "-Y", "icmp"]);
    tshark.args(["-T", "fields", "-e", "frame.interface_name", "-e", "ip.src"]);
    let (tail, pipe) = Tail::piped(lab, &["tail", "--pod", "default/web"]);
    let tshark = Reader::fed_by(lab, "tshark", tshark, pipe);
    web.ping(db.v4(), 3, 56);
    let expected = [web, db].map(|pod| format!("default/web eth0\t{}", pod.v4()));
    let lines = |said: &str| said.lines().filter(|line| expected.iter().any(|one| one == line)).count();
    eventually(SOON, || check(lines(&tshark.said()) == 6, || tshark.said()));
    ends_well(tail);
    let said = tshark.wait();
    assert_eq!(lines(&said), 6, "{said}");
    agent.stop();
    lab.cleanup();
}

/// Two mirrors with different snap lengths are in one stream. libpcap, which Suricata also uses, accepts only files
/// whose interfaces all have the same snap length.
#[test]
fn tcpdump_reads_mirrors_with_different_snap_lengths() {
    let Node { web, db, lab } = &Node::new("dump-stream");
    let cut = |pod, bytes| PodSpec::of(pod).mirror("true").annotated("podmirror.io/snaplen", bytes);
    let filter = |pod: &mirror_tests::PodNs| format!("icmp[icmptype] == icmp-echo and src host {}", pod.v4());
    let specs = [(web, "96"), (db, "200")].map(|(pod, bytes)| {
        cut(pod, bytes)
            .annotated("podmirror.io/target", "live")
            .annotated("podmirror.io/filter", &filter(pod))
    });
    let agent = Agent::mirroring(lab, any_mode(), &specs, &["--define-target", "live=stream"], &[web, db]);
    let (tail, pipe) = Tail::piped(lab, &["tail", "--target", "live"]);
    let mut tcpdump = Command::new("tcpdump");
    tcpdump.args(["-n", "-l", "-Z", "root", "-r", "-"]);
    let tcpdump = Reader::fed_by(lab, "tcpdump", tcpdump, pipe);
    web.ping(db.v4(), 3, 1000);
    db.ping(web.v4(), 2, 1000);
    let asked = |said: &str, pod: &mirror_tests::PodNs| {
        said.lines().filter(|line| line.contains(&format!("IP {} >", pod.v4()))).count()
    };
    eventually(SOON, || {
        let said = tcpdump.said();
        check((asked(&said, web), asked(&said, db)) == (3, 2), || said)
    });
    ends_well(tail);
    let said = tcpdump.wait();
    assert_eq!((asked(&said, web), asked(&said, db)), (3, 2), "{said}");
    agent.stop();
    lab.cleanup();
}
