//! Sends traffic between pods. Every function checks that the data arrives unchanged.

use std::{
    fs::File,
    io::{Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::sys::signal::Signal;

use crate::{Netns, PodNs, SOON, check, eventually, frame::pattern, process::Process, scaled};

impl Netns {
    /// Pings an address from inside `count` times with `size` bytes of data. Every ping must be answered.
    #[track_caller]
    pub fn ping_every(&self, interval: Duration, to: IpAddr, count: usize, size: usize) {
        // A timeout that an emulated machine meets too: a lost ping is waited for, not hidden.
        let (wait, interval) = (scaled(SOON).as_secs(), interval.as_secs_f64());
        let output = self.run(&format!("ping -n -q -i {interval} -c {count} -s {size} -W {wait} {to}"));
        assert!(output.contains(&format!("{count} received")), "{output}");
    }
}

impl PodNs {
    /// Pings an address `count` times with `size` bytes of data. Every ping must be answered.
    #[track_caller]
    pub fn ping(&self, to: IpAddr, count: usize, size: usize) {
        self.ping_every(Duration::from_millis(2), to, count, size);
    }

    /// As [`PodNs::ping`], with this time between two pings.
    #[track_caller]
    pub fn ping_every(&self, interval: Duration, to: IpAddr, count: usize, size: usize) {
        self.netns().ping_every(interval, to, count, size);
    }

    /// Sends datagrams of these sizes in bytes to another pod's `address`, which sends each of them back.
    #[track_caller]
    pub fn udp_echo(&self, other: &PodNs, address: IpAddr, sizes: &[usize]) {
        let server = udp_socket(other, address);
        let client = udp_socket(self, if address.is_ipv4() { self.v4() } else { self.v6() });
        client.connect(server.local_addr().unwrap()).unwrap();
        let mut buffer = vec![0; 65536];
        for (index, &size) in sizes.iter().enumerate() {
            let sent = pattern(size, index);
            client.send(&sent).unwrap();
            let (received, from) = server.recv_from(&mut buffer).unwrap();
            assert_eq!(buffer[..received], sent, "datagram of {size} bytes");
            server.send_to(&sent, from).unwrap();
            let received = client.recv(&mut buffer).unwrap();
            assert_eq!(buffer[..received], sent, "answer of {size} bytes");
        }
    }
}

fn udp_socket(pod: &PodNs, address: IpAddr) -> UdpSocket {
    let socket = pod.netns().enter(|| UdpSocket::bind((address, 0))).unwrap();
    socket.set_read_timeout(Some(scaled(SOON))).unwrap();
    socket
}

/// A TCP connection between two pods.
#[derive(Debug)]
pub struct Conversation {
    client: TcpStream,
    server: TcpStream,
}

impl Conversation {
    /// Connects `client` to `address` of `server`.
    #[track_caller]
    pub fn open(client: &PodNs, server: &PodNs, address: IpAddr) -> Self {
        Self::between(client.netns(), server.netns(), address)
    }

    /// Connects the namespace `client` to `address` of the namespace `server`.
    #[track_caller]
    pub fn between(client: &Netns, server: &Netns, address: IpAddr) -> Self {
        let listener = server.enter(|| TcpListener::bind((address, 0))).unwrap();
        let to: SocketAddr = listener.local_addr().unwrap();
        let client = client.enter(|| TcpStream::connect_timeout(&to, scaled(SOON))).unwrap();
        let (server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(scaled(SOON))).unwrap();
            stream.set_write_timeout(Some(scaled(SOON))).unwrap();
        }
        Self { client, server }
    }

    /// The client sends text, the server answers in capital letters, and both close. Returns the answer.
    #[track_caller]
    pub fn ask(mut self, words: &str) -> String {
        self.client.write_all(words.as_bytes()).unwrap();
        self.client.shutdown(Shutdown::Write).unwrap();
        let (mut question, mut answer) = (String::new(), String::new());
        self.server.read_to_string(&mut question).unwrap();
        self.server.write_all(question.to_uppercase().as_bytes()).unwrap();
        self.server.shutdown(Shutdown::Write).unwrap();
        self.client.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends `len` bytes to the server and back.
    #[track_caller]
    pub fn exchange(&self, len: usize) {
        let bytes = pattern(len, len);
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            thread::scope(|scope| {
                scope.spawn(|| from.write_all(&bytes).unwrap());
                let mut received = vec![0; len];
                to.read_exact(&mut received).unwrap();
                assert!(received == bytes, "the bytes have changed on the way");
            });
        }
    }
}

/// Sends datagrams from one pod to another and back, one after the other as fast as possible, until it is stopped.
///
/// One thread does all work. With two threads that wake each other for every datagram, the kernel's RCU thread did not
/// run for seconds (Linux 6.18, two CPUs). In all tests, attaching programs and listing devices waits for that thread.
#[derive(Debug)]
pub struct Flood {
    rounds: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Starts to send, over IPv4.
    #[track_caller]
    pub fn start(from: &PodNs, to: &PodNs) -> Self {
        let (client, server) = (udp_socket(from, from.v4()), udp_socket(to, to.v4()));
        client.connect(server.local_addr().unwrap()).unwrap();
        server.connect(client.local_addr().unwrap()).unwrap();
        let (rounds, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (done, stopped) = (Arc::clone(&rounds), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut buffer = [0; 64];
            for round in 0_usize.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                client.send(&round.to_be_bytes()).unwrap();
                for (receiver, answer) in [(&server, true), (&client, false)] {
                    let received = receiver.recv(&mut buffer);
                    let len = received.unwrap_or_else(|error| panic!("datagram {round} is lost: {error}"));
                    assert_eq!(buffer[..len], round.to_be_bytes(), "datagrams arrive in order");
                    if answer {
                        receiver.send(&buffer[..len]).unwrap();
                    }
                }
                done.store(round + 1, Ordering::Relaxed);
            }
        });
        Self { rounds, stop, thread: Some(thread) }
    }

    /// Waits until `more` further datagrams have been sent and have come back.
    #[track_caller]
    pub fn go_on(&self, more: usize) {
        let goal = self.rounds.load(Ordering::Relaxed) + more;
        eventually(SOON, || {
            let rounds = self.rounds.load(Ordering::Relaxed);
            check(rounds >= goal, || format!("{rounds} of {goal} datagrams have come back"))
        });
    }

    /// Stops, and returns the number of datagrams that were sent and came back. Panics if one is lost.
    #[track_caller]
    pub fn stop(mut self) -> usize {
        self.end().expect("no datagram is lost");
        self.rounds.load(Ordering::Relaxed)
    }

    fn end(&mut self) -> thread::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(Ok(()), JoinHandle::join)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        // `stop` reports a failure of the thread; here the test has already failed.
        let _ = self.end();
    }
}

/// Runs `work` while one pod pings the other a thousand times a second. That is slow enough for captures to get every
/// frame. Every ping must be answered.
#[track_caller]
pub fn while_talking<T>(from: &PodNs, to: &PodNs, work: impl FnOnce() -> T) -> T {
    while_pinging(Duration::from_millis(1), from, to, work)
}

/// As [`while_talking`], with this time between two pings.
#[track_caller]
pub fn while_pinging<T>(interval: Duration, from: &PodNs, to: &PodNs, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let (answered, first) = mpsc::channel();
    thread::scope(|scope| {
        let stop = &stop;
        let talk = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                from.ping_every(interval, to.v4(), 50, 56);
                let _ = answered.send(());
            }
        });
        // On a busy machine, `work` could end before the first ping. If a ping fails, there is no sender any more.
        let _ = first.recv();
        // Stops the pings also if `work` panics: otherwise the scope would wait forever.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        talk.join().expect("every ping is answered");
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Pings 20 times a second from inside a network namespace until it is stopped.
#[derive(Debug)]
pub struct Pinging {
    ping: Process,
    summary: File,
}

impl Pinging {
    /// Starts to ping, and waits for the first answer.
    #[track_caller]
    pub fn start(netns: &Netns, to: IpAddr) -> Self {
        let summary = tempfile::tempfile().unwrap();
        let mut command = netns.command("ping");
        command.args(["-n", "-i", "0.05", "-W", &scaled(SOON).as_secs().to_string(), &to.to_string()]);
        let ping = Process::start(command.stdout(summary.try_clone().unwrap()));
        let pinging = Self { ping, summary };
        eventually(SOON, || {
            let text = text_of(&pinging.summary);
            check(text.contains("time="), || format!("no answer: {text}"))
        });
        pinging
    }

    /// Stops, and returns the number of sent pings. Panics if a ping was not answered.
    #[track_caller]
    pub fn stop(mut self) -> usize {
        self.ping.end(Signal::SIGINT);
        let text = text_of(&self.summary);
        // "20 packets transmitted, 20 received, 0% packet loss, time 953ms"
        let line = text.lines().find(|line| line.contains(" packets transmitted")).unwrap_or_default();
        let mut counts = line.split(", ").map(|part| part.split(' ').next()?.parse::<usize>().ok());
        let (sent, received) = (counts.next().flatten(), counts.next().flatten());
        assert!(sent.is_some() && sent == received, "{line}");
        sent.unwrap()
    }
}

/// The whole content of a file, independent of the position of its writer.
fn text_of(file: &File) -> String {
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = file.read_at(&mut buffer, text.len() as u64) {
        text.extend_from_slice(&buffer[..length]);
    }
    String::from_utf8(text).unwrap()
}
