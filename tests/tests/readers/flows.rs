//! softflowd counts the flows of a mirrored pod on another machine, at the end of a tunnel, and nfdump reads what it
//! exports.

use std::net::IpAddr;

use mirror_tests::{Agent, Capture, Flood, Lab, Netns, PodSpec, PodsFile, Reader, SOON, check, eventually};
use nix::sys::signal::Signal;

use crate::{Node, any_mode};

/// nfcapd's port.
const PORT: u16 = 2055;
/// softflowd's control socket.
const CONTROL: &str = "/run/story/softflowd.ctl";

/// IP protocol numbers.
const ICMP: u8 = 1;
const UDP: u8 = 17;

/// The number of packets that softflowd has counted.
fn counted(lab: &Lab, far: &Netns) -> usize {
    let text = control(lab, far, "statistics");
    let count = text.lines().find_map(|line| line.strip_prefix("Packets processed: "));
    count.and_then(|count| count.trim().parse().ok()).ok_or(text).unwrap()
}

/// Sends a command to softflowd, and returns its output.
fn control(lab: &Lab, far: &Netns, word: &str) -> String {
    let output = lab.reader(far, &["softflowctl", "-c", CONTROL, word]).output().unwrap();
    assert!(output.status.success(), "{word}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Checks that nfcapd has read all datagrams that have arrived.
fn nothing_waits(netns: &Netns) -> Result<(), String> {
    let sockets = netns.enter(|| std::fs::read_to_string("/proc/thread-self/net/udp")).unwrap();
    let port = format!(":{PORT:04X}");
    // "sl local_address rem_address st tx_queue:rx_queue ..."
    let mut lines = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = lines.find(|fields| fields[1].ends_with(&port)).ok_or("no nfcapd")?;
    check(own[4].ends_with(":00000000"), || format!("{own:?}"))
}

/// A flow in one direction: from, to, protocol, packets, bytes.
fn flow(from: IpAddr, to: IpAddr, protocol: u8, sizes: &[usize]) -> String {
    // With the headers of IPv4, and of UDP or ICMP (8 bytes).
    let bytes: usize = sizes.iter().map(|size| size + 28).sum();
    format!("{from} {to} {protocol} {} {bytes}", sizes.len())
}

#[test]
fn softflowd_exports_the_flows_of_the_mirrored_pod() {
    let node = Node::new("flows");
    let far = node.cable();
    let Node { web, db, lab } = &node;
    let quiet = lab.pod("quiet", "br0");
    quiet.ping(db.v4(), 2, 56);
    far.ip("address add 10.9.0.5/24 dev up1");
    far.ip("link add flows0 type vxlan id 77 dstport 14789 local 10.9.0.5 nolearning");
    far.sysctl("ipv6/conf/flows0/disable_ipv6", "1");
    far.ip("link set flows0 up");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let targets = ["--define-target", "flows=vxlan:10.9.0.5:14789/vni=77", "--target", "flows"];
    for version in ["9", "10"] {
        let agent = Agent::run_until(lab, any_mode(), &pods, &targets, &[web]);
        lab.wait_status(|status| check(status.target("flows").up, || "the target is down".into()));
        let directory = format!("flows-{version}");
        std::fs::create_dir(lab.files().join(&directory)).unwrap();
        let directory = format!("/run/story/{directory}");
        let nfcapd = ["nfcapd", "-w", &directory, "-b", "127.0.0.1", "-p", &PORT.to_string()];
        let mut nfcapd = Reader::start(lab, "nfcapd", lab.reader(&far, &nfcapd));
        nfcapd.wait_for("Startup");
        let exporter =
            ["softflowd", "-d", "-i", "flows0", "-n", "127.0.0.1:2055", "-v", version, "-c", CONTROL];
        let mut softflowd = Reader::start(lab, "softflowd", lab.reader(&far, &exporter));
        softflowd.wait_for("starting data collection");

        let arrived = Capture::start(&far, "flows0");
        let sizes = [0, 100, 1400];
        web.udp_echo(db, db.v4(), &sizes);
        web.ping(db.v4(), 5, 56);
        quiet.ping(db.v4(), 5, 56);
        eventually(SOON, || {
            let frames = arrived.frames().len();
            check(frames == 2 * (sizes.len() + 5), || format!("{frames} frames have arrived"))
        });
        arrived.stop();
        // softflowd receives packets in blocks. The packets that fill the block are a flow of their own.
        let filling = Flood::start(web, db);
        filling.go_on(3000);
        filling.stop();
        eventually(SOON, || {
            let count = counted(lab, &far);
            check(count > 2 * (sizes.len() + 5), || format!("{count} packets are counted"))
        });
        control(lab, &far, "expire-all");
        softflowd.stop(Signal::SIGTERM);
        eventually(SOON, || nothing_waits(&far));
        nfcapd.stop(Signal::SIGINT);

        let nfdump = ["nfdump", "-R", &directory, "-q", "-N", "-o", "fmt:%sa %da %pr %pkt %byt"];
        let output = lab.reader(&far, &nfdump).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let (mut flows, filling): (Vec<_>, Vec<_>) = lines.partition(|fields| fields[3].len() < 3);
        assert_eq!(filling.len(), 2, "one in each direction: {text}");
        flows.sort();
        let flows: Vec<_> = flows.iter().map(|fields| fields.join(" ")).collect();
        let both = |protocol, sizes: &[usize]| {
            [(web, db), (db, web)].map(|(from, to)| flow(from.v4(), to.v4(), protocol, sizes))
        };
        let mut expected = [both(UDP, &sizes), both(ICMP, &[56; 5])].concat();
        expected.sort();
        assert_eq!(flows, expected, "version {version}");
        agent.stop();
        lab.cleanup();
    }
}
