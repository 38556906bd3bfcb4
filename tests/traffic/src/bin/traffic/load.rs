//! Takes one sample: sends the messages of a scenario with a contestant.
//!
//! Each sample of a scenario has the same number of messages, so that all contestants do the same work. Latency is
//! measured here, with blocking sockets: sockperf and qperf need seconds for a sample. iperf3 measures bandwidth.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use mirror_test_traffic::{
    figures::quantile,
    plan::{Kind, Metric, Scenario},
    tools::{self, Busy, Figures, Iperf3},
};
use mirror_tests::{OneCpu, SOON, eventually};
use nix::sys::socket::{setsockopt, sockopt::TcpCongestion};

use crate::{
    http,
    stage::{IPERF3_PORT, REDIS_PORT, SOCKPERF_PORT, Stage},
};

/// Port of this program's own echo servers.
pub(crate) const LATENCY_PORT: u16 = 7000;
/// Connections of redis-benchmark.
const REDIS_CLIENTS: &str = "10";
/// Congestion control of the connections: the usual default of nodes. BBR, the default of some machines, paces by its
/// own measurements, and would measure itself here. sockperf uses the machine's.
pub(crate) const CONGESTION_CONTROL: &str = "cubic";
/// Messages of the first try, which determines the rate.
const FIRST: u64 = 500;
/// The minimum and maximum number of messages of a sample.
const MESSAGES: (u64, u64) = (200, 5_000_000);
/// Time limit of a client. Its work is bounded too.
const CLIENT_SECONDS: &str = "20";
/// ns of a tick of `/proc/stat`.
const TICK_NS: f64 = 1e7;
/// One in this many round trips warms up and is not counted.
const WARM_UP: u64 = 10;

/// The assignment of CPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpus {
    client: usize,
    pub(crate) server: usize,
    /// Agents, tcpdump, `tail`.
    pub(crate) reader: usize,
}

impl Cpus {
    /// Fails if client and server cannot have different CPUs.
    pub(crate) fn of_this_machine() -> Result<Self> {
        match OneCpu::usable()[..] {
            [client, server, reader, ..] => Ok(Self { client, server, reader }),
            [client, server] => Ok(Self { client, server, reader: server }),
            _ => bail!("the client and the server need a CPU each, and this machine has one"),
        }
    }

    /// A remark for the report.
    pub(crate) fn remark(self) -> String {
        let Self { client, server, reader } = self;
        let shared = if reader == server {
            ": readers and the server share a CPU, so readers slow it down"
        } else {
            ""
        };
        format!(
            "The client runs on CPU {client}, the server on CPU {server}, agents and readers on CPU {reader}{shared}."
        )
    }
}

/// What was sent in a sample.
struct Sent {
    seconds: f64,
    messages: u64,
    figures: Figures,
}

/// Whether the tool's duration, or a pause, determines the number of messages.
const fn takes_its_time(kind: Kind) -> bool {
    matches!(kind, Kind::TcpSockperf | Kind::UdpSockperf | Kind::Http | Kind::Ping)
}

pub(crate) struct Load {
    cpus: Cpus,
    messages: BTreeMap<Scenario, u64>,
}

impl Load {
    /// Finds how many messages take this long without a mirror. This also warms up.
    pub(crate) fn calibrated(cpus: Cpus, off: &Stage, scenarios: &[Scenario], time: Duration) -> Self {
        let mut load = Self { cpus, messages: BTreeMap::new() };
        for scenario in scenarios.iter().filter(|scenario| !takes_its_time(scenario.kind)) {
            let mut messages = FIRST;
            // The first try is short, so its rate differs from that of a whole sample.
            for _ in 0..3 {
                load.messages.insert(*scenario, messages);
                let more = time.as_secs_f64() / load.send(off, *scenario).seconds.max(1e-6);
                messages = ((messages as f64 * more.min(50.0)) as u64).clamp(MESSAGES.0, MESSAGES.1);
            }
            load.messages.insert(*scenario, messages);
        }
        for scenario in scenarios.iter().filter(|scenario| scenario.kind == Kind::Ping) {
            load.messages.insert(*scenario, scenario.pings(time.as_micros() as u64));
        }
        load
    }

    /// Takes one sample: returns the number of messages, and the figures.
    pub(crate) fn sample(&self, stage: &Stage, scenario: Scenario) -> (u64, Figures) {
        let reader = stage.start_reader(self.cpus, scenario.way);
        let (packets_before, before) = (stage.packets(scenario.way), busy_ticks());
        let Sent { messages, mut figures, .. } = self.send(stage, scenario);
        let (after, packets_after) = (busy_ticks(), stage.packets(scenario.way));
        if !scenario.is_mostly_idle() {
            let ns = |after: u64, before: u64| after.saturating_sub(before) as f64 * TICK_NS;
            let (user, kernel) = (ns(after.user, before.user), ns(after.kernel, before.kernel));
            let packets = (packets_after - packets_before) as f64;
            figures.insert(Metric::CpuNsPerMessage, (user + kernel) / messages as f64);
            figures.insert(Metric::CpuUserNsPerPacket, user / packets);
            figures.insert(Metric::CpuKernelNsPerPacket, kernel / packets);
        }
        if let Some(reader) = reader {
            figures.insert(Metric::ReaderLossPercent, Stage::stop_reader(reader));
        }
        (messages, figures)
    }

    fn send(&self, stage: &Stage, scenario: Scenario) -> Sent {
        match scenario.kind {
            Kind::TcpLatency => self.round_trips(stage, scenario, tcp),
            Kind::UdpLatency => self.round_trips(stage, scenario, udp),
            Kind::TcpBandwidth => self.iperf3(stage, scenario, &["--congestion", CONGESTION_CONTROL]),
            Kind::UdpBandwidth => self.iperf3(stage, scenario, &["--udp", "--bitrate", "0"]),
            Kind::TcpSockperf => self.sockperf(stage, scenario, &["--tcp"]),
            Kind::UdpSockperf => self.sockperf(stage, scenario, &[]),
            Kind::Http => self.wrk(stage, scenario),
            Kind::RedisGet => self.redis(stage, scenario, "get"),
            Kind::RedisSet => self.redis(stage, scenario, "set"),
            Kind::Ping => self.ping(stage, scenario),
        }
    }

    fn round_trips(&self, stage: &Stage, scenario: Scenario, connect: fn(&Stage, Scenario) -> Ends) -> Sent {
        let Ends { mut client, mut server } = connect(stage, scenario);
        let messages = self.messages[&scenario];
        let bytes = scenario.parameter as usize;
        let times: Vec<f64> = thread::scope(|scope| {
            scope.spawn(|| {
                let _on = OneCpu::numbered(self.cpus.server);
                let mut message = vec![0; bytes];
                for _ in 0..messages {
                    server(&mut message, false).unwrap();
                }
            });
            let client = scope.spawn(|| {
                let _on = OneCpu::numbered(self.cpus.client);
                let mut message = vec![0; bytes];
                let mut round_trip = || {
                    let begun = Instant::now();
                    client(&mut message, true).unwrap();
                    begun.elapsed().as_secs_f64()
                };
                (0..messages).map(|_| round_trip()).collect()
            });
            client.join().unwrap_or_else(|why| std::panic::resume_unwind(why))
        });
        let warm = &times[(messages / WARM_UP) as usize..];
        let half_us = |share| quantile(warm, share).unwrap() * 1e6 / 2.0;
        let figures = [(Metric::LatencyUs, half_us(0.5)), (Metric::LatencyP99Us, half_us(0.99))].into();
        Sent { seconds: times.iter().sum(), messages, figures }
    }

    fn iperf3(&self, stage: &Stage, scenario: Scenario, more: &[&str]) -> Sent {
        let (messages, bytes) = (self.messages[&scenario].to_string(), scenario.parameter.to_string());
        let (address, port) = address(stage, scenario, IPERF3_PORT);
        let words = ["--json", "--port", &port, "--blockcount", &messages, "--length", &bytes, "--client"];
        let said = self.client(stage, scenario, "iperf3", &[&words[..], &[&address], more].concat());
        let Iperf3 { seconds, figures } =
            tools::iperf3(&said).unwrap_or_else(|why| panic!("{scenario}: {why}"));
        Sent { seconds, messages: self.messages[&scenario], figures }
    }

    /// The tool runs for whole seconds.
    fn sockperf(&self, stage: &Stage, scenario: Scenario, more: &[&str]) -> Sent {
        let bytes = scenario.parameter.to_string();
        let (address, port) = address(stage, scenario, SOCKPERF_PORT);
        let words = ["ping-pong", "-i", &address, "-p", &port, "-m", &bytes, "-t", "1"];
        let said = self.client(stage, scenario, "sockperf", &[&words[..], more].concat());
        let (messages, figures) = tools::sockperf(&said).unwrap_or_else(|why| panic!("{scenario}: {why}"));
        Sent { seconds: 1.0, messages, figures }
    }

    /// The tool runs for whole seconds.
    fn wrk(&self, stage: &Stage, scenario: Scenario) -> Sent {
        let connections = scenario.parameter.to_string();
        let url = format!("http://{}/", stage.network.address(scenario.way, http::PORT));
        let words = ["--threads", "1", "--duration", "1s", "--latency", "--connections", &connections, &url];
        let said = self.client(stage, scenario, "wrk", &words);
        let (messages, figures) = tools::wrk(&said).unwrap_or_else(|why| panic!("{scenario}: {why}"));
        Sent { seconds: 1.0, messages, figures }
    }

    fn redis(&self, stage: &Stage, scenario: Scenario, command: &str) -> Sent {
        let messages = self.messages[&scenario];
        let (requests, bytes) = (messages.to_string(), scenario.parameter.to_string());
        let (address, port) = address(stage, scenario, REDIS_PORT);
        let to = ["--csv", "-h", &address, "-p", &port];
        let what = ["-t", command, "-n", &requests, "-d", &bytes, "-c", REDIS_CLIENTS];
        let said = self.client(stage, scenario, "redis-benchmark", &[&to[..], &what].concat());
        let figures = tools::redis_benchmark(&said).unwrap_or_else(|why| panic!("{scenario}: {why}"));
        Sent { seconds: messages as f64 / figures[&Metric::RequestsPerSecond], messages, figures }
    }

    fn ping(&self, stage: &Stage, scenario: Scenario) -> Sent {
        let (messages, address) = (self.messages[&scenario], address(stage, scenario, 0).0);
        let (count, pause) = (messages.to_string(), format!("{}", f64::from(scenario.parameter) / 1e6));
        let pace: &[&str] = if scenario.parameter == 0 { &["-f"] } else { &["-i", &pause] };
        let words = [&["-n", "-q", "-c", &count][..], pace, &[&address]].concat();
        let said = self.client(stage, scenario, "ping", &words);
        let figures = tools::ping(&said).unwrap_or_else(|why| panic!("{scenario}: {why}"));
        Sent { seconds: 0.0, messages, figures }
    }

    /// Runs a client to its end, and returns its output. iperf3's server may still be finishing the previous sample.
    fn client(&self, stage: &Stage, scenario: Scenario, program: &str, words: &[&str]) -> String {
        let _on = OneCpu::numbered(self.cpus.client);
        eventually(SOON, || {
            let mut command = stage.network.client(scenario.way).command("timeout");
            let output = command.args([CLIENT_SECONDS, program]).args(words).output().unwrap();
            let [said, complaint] =
                [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            // With JSON, iperf3 exits with 0 even in this case.
            match output.status.success() {
                _ if said.contains("the server is busy") => Err(said),
                true => Ok(said),
                false => panic!("{program} {}: {}: {said}{complaint}", words.join(" "), output.status),
            }
        })
    }
}

/// The address and the port by which the client reaches a server that listens on this port.
fn address(stage: &Stage, scenario: Scenario, port: u16) -> (String, String) {
    let to = stage.network.address(scenario.way, port);
    (to.ip().to_string(), to.port().to_string())
}

/// One end of a connection: sends the message and receives as much, or the reverse.
type End = Box<dyn FnMut(&mut [u8], bool) -> io::Result<()> + Send>;

struct Ends {
    client: End,
    server: End,
}

fn tcp(stage: &Stage, scenario: Scenario) -> Ends {
    let Stage { network, .. } = stage;
    let listen = || TcpListener::bind(("0.0.0.0", LATENCY_PORT));
    let listener = network.server(scenario.way).enter(listen).unwrap();
    let to = network.address(scenario.way, LATENCY_PORT);
    let client = network.client(scenario.way).enter(|| TcpStream::connect_timeout(&to, SOON)).unwrap();
    let (server, _) = listener.accept().unwrap();
    let end = |mut stream: TcpStream| -> End {
        stream.set_nodelay(true).unwrap();
        setsockopt(&stream, TcpCongestion, &CONGESTION_CONTROL.into()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Box::new(move |message, sends_first| {
            if sends_first {
                stream.write_all(message)?;
                return stream.read_exact(message);
            }
            stream.read_exact(message)?;
            stream.write_all(message)
        })
    };
    Ends { client: end(client), server: end(server) }
}

fn udp(stage: &Stage, scenario: Scenario) -> Ends {
    let Stage { network, .. } = stage;
    let server = network.server(scenario.way).enter(|| UdpSocket::bind(("0.0.0.0", LATENCY_PORT))).unwrap();
    let client = network.client(scenario.way).enter(|| UdpSocket::bind(("0.0.0.0", 0))).unwrap();
    client.connect(network.address(scenario.way, LATENCY_PORT)).unwrap();
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(SOON)).unwrap();
    }
    let client = move |message: &mut [u8], _| {
        client.send(message)?;
        client.recv(message).map(drop)
    };
    let server = move |message: &mut [u8], _| {
        let (_, from) = server.recv_from(message)?;
        server.send_to(message, from).map(drop)
    };
    Ends { client: Box::new(client), server: Box::new(server) }
}

fn busy_ticks() -> Busy {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    tools::busy_ticks(&stat).unwrap_or_else(|why| panic!("{why}"))
}
