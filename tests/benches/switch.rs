//! The mirror of Open vSwitch, which the reference solution uses, compared with podmirror: both for a pod on one bridge
//! of Open vSwitch. Run by `cargo xtask bench switch`, in a guest whose kernel has the datapath and dummy devices.
//!
//! Measured are the sender of UDP datagrams between two pods, and a round trip. The contestants take turns in every
//! round, in a random order, and the ratio to no mirror within a round is compared. The guest's CPU is emulated:
//! absolute times mean nothing, and a ratio is only a hint.
//!
//! No time is a pass or fail: the bench prints, and a person judges.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

#[expect(dead_code, reason = "what other benches compare")]
#[path = "measure/figures.rs"]
mod figures;

use std::{net::UdpSocket, thread, time::Instant};

use mirror_tests::{
    Agent, AttachMode, Lab, MIRROR, OneCpu, PodNs, PodSpec, PodsFile, SOON, Switch, check, eventually,
    random::Random, scaled,
};

use self::figures::report;

const ROUNDS: usize = 15;
const BRIDGE: &str = "br-ovs";
/// Output port of Open vSwitch's mirror: an internal port, as in the reference solution.
const PORT: &str = "copies0";

const OFF: &str = "off";
const AGAIN: &str = "off, again";
const OURS: &str = "podmirror";
const THEIRS: &str = "Open vSwitch";
const CONTESTANTS: [&str; 4] = [OFF, AGAIN, OURS, THEIRS];

/// Bytes of a datagram, and number of datagrams per turn.
const SIZES: [(usize, u32); 3] = [(64, 4000), (1024, 4000), (4096, 1500)];
/// Round trips per turn, each of 64 bytes.
const ROUND_TRIPS: u32 = 500;
/// Number of figures: the sizes, and the round trip.
const FIGURES: usize = SIZES.len() + 1;
/// Untimed packets before each figure: the switch learns the flow.
const WARM_UP: u32 = 100;

fn main() {
    let lab = Lab::new("bench-switch");
    let node = lab.node();
    assert!(node.has_datapath(), "this kernel has no module openvswitch");
    let switch = Switch::start(&lab, node);
    lab.bridge("br0");
    let [web, db] = ["web", "db"].map(|name| lab.pod(name, "br0"));
    let mut ports = format!(
        "ovs-vsctl add-br {BRIDGE} -- add-port {BRIDGE} {PORT} -- set interface {PORT} type=internal"
    );
    for pod in [&web, &db] {
        node.ip(&format!("link set {} nomaster", pod.veth_host()));
        ports += &format!(" -- add-port {BRIDGE} {}", pod.veth_host());
    }
    switch.run(&ports);
    // The switch floods nothing, so every packet at the output port is a copy.
    for (from, to) in [(&web, &db), (&db, &web)] {
        let flow = format!("in_port={},actions=output:{}", from.veth_host(), to.veth_host());
        switch.run(&format!("ovs-ofctl add-flow {BRIDGE} {flow}"));
    }
    node.ip(&format!("link set {PORT} up"));
    web.ping(db.v4(), 3, 56);
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web)]);
    let agent = Agent::run(&lab, AttachMode::Tcx, &pods, &[]);
    lab.wait_mirrored(&[]);
    let rig = Rig { lab: &lab, switch: &switch, pods: &pods, web: &web, db: &db };
    let is_dummy = node.ip(&format!("-d link show {MIRROR}")).contains("dummy");
    let release = nix::sys::utsname::uname().unwrap();
    println!(
        "pods on a bridge of Open vSwitch, Linux {}, podmirror's copies go to a {}; {ROUNDS} rounds\n",
        release.release().to_string_lossy(),
        if is_dummy { "dummy" } else { "veth pair" },
    );

    let mut random = Random::new(1);
    let round = |_| {
        let mut order: Vec<_> = (0..CONTESTANTS.len()).collect();
        random.shuffle(&mut order);
        let mut figures = CONTESTANTS.map(|_| [0.0; FIGURES]);
        order.into_iter().for_each(|who| figures[who] = rig.turn(CONTESTANTS[who]));
        figures
    };
    // The first round warms up.
    let rounds: Vec<_> = (0..=ROUNDS).map(round).skip(1).collect();
    let titles =
        SIZES.iter().map(|(bytes, _)| format!("ns, {bytes} B sent")).chain(["ns, round trip".to_owned()]);
    for (figure, title) in titles.enumerate() {
        let of_figure: Vec<_> =
            rounds.iter().map(|round| round.iter().map(|turn| turn[figure]).collect()).collect();
        report(&title, &CONTESTANTS, OFF, &of_figure);
    }
    agent.stop();
    switch.end(BRIDGE);
    drop((web, db));
    lab.cleanup();
}

struct Rig<'a> {
    lab: &'a Lab,
    switch: &'a Switch<'a>,
    pods: &'a PodsFile,
    web: &'a PodNs,
    db: &'a PodNs,
}

impl Rig<'_> {
    /// ns per datagram of each size, and per round trip.
    fn turn(&self, name: &str) -> [f64; FIGURES] {
        let before = self.copies();
        self.mirror(name);
        let figures = self.measure();
        let now = self.copies();
        // The daemon changes some flows shortly after the configuration, so a few packets more or less can be copied.
        let is_copied = [0, 1].map(|who| now[who] - before[who] > u64::from(ROUND_TRIPS));
        assert_eq!(is_copied, [name == OURS, name == THEIRS], "{name}: {before:?}, now {now:?}");
        figures
    }

    /// Turns on the mirror of this contestant and turns off all others.
    fn mirror(&self, name: &str) {
        let Self { lab, switch, pods, web, db } = self;
        let (value, mirrored) =
            if name == OURS { ("true", Vec::from([*web])) } else { ("false", Vec::new()) };
        pods.write(&[PodSpec::of(web).mirror(value)]);
        lab.wait_mirrored(&mirrored);
        if name == THEIRS {
            let port = web.veth_host();
            switch.asked(&format!(
                "ovs-vsctl -- --id=@pod get port {port} -- --id=@to get port {PORT} -- --id=@mirror create mirror \
                 name=copies select-src-port=@pod select-dst-port=@pod output-port=@to \
                 -- set bridge {BRIDGE} mirrors=@mirror"
            ));
        } else {
            switch.run(&format!("ovs-vsctl clear bridge {BRIDGE} mirrors"));
        }
        // Otherwise the daemon keeps the flows in the kernel as they are, as long as packets arrive.
        switch.forget_flows();
        eventually(SOON, || {
            let [_, before] = self.copies();
            web.ping(db.v4(), 2, 56);
            let [_, after] = self.copies();
            let expected = if name == THEIRS { 4 } else { 0 };
            check(after - before == expected, || format!("{name}: {} copies of 4", after - before))
        });
    }

    /// Copies so far: podmirror's, and those of Open vSwitch.
    fn copies(&self) -> [u64; 2] {
        let count = |device: &str, of: &str| {
            let link = self.lab.node().ip(&format!("-j -s link show dev {device}"));
            let link: serde_json::Value = serde_json::from_str(&link).unwrap();
            link[0]["stats64"][of]["packets"].as_u64().unwrap()
        };
        // A packet that the switch sends to an internal port is received by the node.
        [count(MIRROR, "tx"), count(PORT, "rx")]
    }

    fn measure(&self) -> [f64; FIGURES] {
        let socket = |pod: &PodNs| {
            let socket = pod.netns().enter(|| UdpSocket::bind((pod.v4(), 0))).unwrap();
            socket.set_read_timeout(Some(scaled(SOON))).unwrap();
            socket
        };
        let (client, server) = (socket(self.web), socket(self.db));
        client.connect(server.local_addr().unwrap()).unwrap();
        let _on = OneCpu::numbered(0);
        let mut figures = [0.0; FIGURES];
        for ((bytes, times), figure) in SIZES.iter().zip(&mut figures) {
            let datagram = vec![7; *bytes];
            *figure = timed(*times, || assert_eq!(client.send(&datagram).unwrap(), *bytes));
        }
        let (client, server) = (socket(self.web), socket(self.db));
        client.connect(server.local_addr().unwrap()).unwrap();
        figures[SIZES.len()] = thread::scope(|scope| {
            scope.spawn(|| {
                let _on = OneCpu::numbered(1);
                let mut datagram = [0; 64];
                for _ in 0..WARM_UP + ROUND_TRIPS {
                    let (_, from) = server.recv_from(&mut datagram).unwrap();
                    server.send_to(&datagram, from).unwrap();
                }
            });
            let mut answer = [0; 64];
            timed(ROUND_TRIPS, || {
                client.send(&[7; 64]).unwrap();
                client.recv(&mut answer).unwrap();
            })
        });
        figures
    }
}

/// ns per call, over `times` calls.
fn timed(times: u32, mut call: impl FnMut()) -> f64 {
    (0..WARM_UP).for_each(|_| call());
    let start = Instant::now();
    (0..times).for_each(|_| call());
    start.elapsed().as_nanos() as f64 / f64::from(times)
}
