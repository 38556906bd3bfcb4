//! `cargo xtask demo`: two pods, one of them mirrored, and what then stands on the mirror interface.
//!
//! Everything happens in network namespaces that the demo makes (`lab`), the node's included, so that this machine's
//! own network stays as it is. Whatever the end, also Ctrl-C, all that was made is removed.

mod lab;

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use serde_json::Value;

use crate::{
    process::{command, is_root, step},
    programs,
    test::bpffs,
    tools, workspace,
};
use lab::{CLIENT, DB, Lab, WEB};

/// Set by Ctrl-C: every wait ends, and the lab is removed.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Echo requests of each ping.
const PINGS: usize = 3;

/// Shows it, and fails if the mirror copies too little or too much.
pub(crate) fn run() -> Result<()> {
    if !is_root() {
        bail!("the demo needs root, to load programs and to make network namespaces");
    }
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    bpffs()?;
    step("building the agent");
    let agent = workspace::agent()?;
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed))?;

    let lab = Lab::new();
    let shown = show(&lab, &agent);
    step("removing everything that the demo made");
    let removed = lab.remove(&agent);
    if is_interrupted() {
        removed?;
        bail!("interrupted");
    }
    shown?;
    removed?;
    step("demo: web's packets were captured, what db said to others was not");
    Ok(())
}

fn show(lab: &Lab, agent: &Path) -> Result<()> {
    step("a node with a bridge and three pods, each in a network namespace of its own");
    for pod in lab::PODS {
        println!("    {:<7} {}  {}", pod.name, pod.address, pod.about);
    }
    lab.build()?;

    step("the agent starts on the node; it reads the pods from a file");
    println!("{}", indented(&lab.pods()));
    lab.write_pods()?;
    let log = lab.dir.join("agent.log");
    let mut run = lab.agent(agent);
    run.arg("run").arg("--pods-from").arg(lab.dir.join("pods.yaml"));
    run.stdin(Stdio::null()).stderr(File::create(&log)?);
    let mut agent_process = Process(lab.node.spawn(&mut run)?);
    let started = wait_for("the tap on web", || {
        if let Some(status) = agent_process.0.try_wait()? {
            bail!("the agent has ended: {status}");
        }
        // It may not have made its state yet.
        Ok(status(lab, agent).is_ok_and(|status| is_tapped(&status)).then_some(()))
    });
    println!("{}", indented(&std::fs::read_to_string(&log)?));
    started?;
    step("web is tapped; the others carry no program");

    step("tcpdump -ni mirror0");
    let (tcpdump, captured) = capture(lab)?;
    step("db and client talk: none of it may appear");
    talk(lab, &DB, &CLIENT)?;
    step("web and db talk: each packet must appear");
    talk(lab, &WEB, &DB)?;
    // Packets are captured in the order in which they were copied: after web's last one, nothing of db's can come.
    let outcome = wait_for("web's packets on mirror0", || {
        let lines = captured.lock().map_err(|_| anyhow::anyhow!("the capture has ended"))?;
        Ok(Captured::of(&lines).is_complete().then_some(()))
    });
    let lines = captured.lock().map_err(|_| anyhow::anyhow!("the capture has ended"))?.clone();
    step("captured on mirror0");
    println!("{}", indented(&lines.join("\n")));
    drop(tcpdump);
    println!("    What is sent to all (ARP's requests, IGMP) reaches web too, whoever sends it.");
    outcome?;
    Captured::of(&lines).judge()?;

    step("what the agent counted");
    show_counters(&status(lab, agent)?);
    drop(agent_process);
    Ok(())
}

/// A ping and a TCP connection from one pod to another.
fn talk(lab: &Lab, from: &lab::Pod, to: &lab::Pod) -> Result<()> {
    const PORT: u16 = 8080;
    if is_interrupted() {
        bail!("interrupted");
    }
    let address = to.address;
    let mut ping = command("ping");
    ping.args(["-n", "-q", "-i", "0.2", "-W", "5", "-c", &PINGS.to_string(), &address.to_string()]);
    let mut ping = lab.netns(from).spawn(ping.stdout(Stdio::null()))?;
    if !ping.wait()?.success() {
        bail!("{} cannot ping {}", from.name, to.name);
    }
    println!("    {} pings {} {PINGS} times", from.name, to.name);

    let listener = lab.netns(to).enter(move || Ok(TcpListener::bind((address, PORT))?))?;
    let server = thread::spawn(move || -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut request = String::new();
        stream.read_to_string(&mut request)?;
        Ok(stream.write_all(request.to_uppercase().as_bytes())?)
    });
    let mut stream =
        lab.netns(from).enter(move || Ok(TcpStream::connect_timeout(&(address, PORT).into(), PATIENCE)?))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"hello")?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    server.join().map_err(|_| anyhow::anyhow!("the TCP server failed"))??;
    println!("    {} says \"hello\" to {} over TCP, and {0} hears {answer:?}", from.name, to.name);
    Ok(())
}

/// Starts tcpdump on the node, and returns once it listens.
fn capture(lab: &Lab) -> Result<(Process, Arc<Mutex<Vec<String>>>)> {
    let mut tcpdump = command("tcpdump");
    tcpdump.args(["-nlq", "-i", "mirror0", "--immediate-mode", "ip or arp"]);
    tcpdump.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = lab.node.spawn(&mut tcpdump)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let process = Process(child);
    let lines = Arc::new(Mutex::new(Vec::new()));
    let into = lines.clone();
    let stdout = stdout.context("tcpdump has no output")?;
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if let Ok(mut lines) = into.lock() {
                lines.push(line);
            }
        }
    });
    let mut told = BufReader::new(stderr.context("tcpdump has no output")?);
    let mut line = String::new();
    while !line.starts_with("listening on") {
        line.clear();
        if told.read_line(&mut line)? == 0 {
            bail!("tcpdump does not listen on mirror0");
        }
    }
    // Read on to its end, so that it never waits for us.
    thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
    Ok((process, lines))
}

/// What was captured, in numbers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Captured {
    requests: usize,
    replies: usize,
    tcp_from_web: usize,
    tcp_from_db: usize,
    of_others: usize,
}

impl Captured {
    fn of(lines: &[String]) -> Self {
        let mut captured = Self::default();
        for line in lines {
            let words: Vec<_> = line.split_whitespace().collect();
            // "12:00:00.000000 IP 192.0.2.2.34567 > 192.0.2.3.8080: tcp 5"
            let [_, "IP", from, ">", to, ..] = words[..] else { continue };
            let (from, to) = (address(from), address(to));
            let web = [from, to].contains(&Some(WEB.address));
            let others = |address| [Some(DB.address), Some(CLIENT.address)].contains(&address);
            if web && line.contains("ICMP echo request") {
                captured.requests += 1;
            } else if web && line.contains("ICMP echo reply") {
                captured.replies += 1;
            } else if web && line.contains(": tcp ") {
                let from_web = from == Some(WEB.address);
                *if from_web { &mut captured.tcp_from_web } else { &mut captured.tcp_from_db } += 1;
            } else if others(from) && others(to) {
                captured.of_others += 1;
            }
        }
        captured
    }

    /// The handshake, the words and the ends of the connection are at least four segments each way.
    fn is_complete(&self) -> bool {
        let Self { requests, replies, tcp_from_web, tcp_from_db, .. } = *self;
        requests >= PINGS && replies >= PINGS && tcp_from_web >= 4 && tcp_from_db >= 3
    }

    fn judge(&self) -> Result<()> {
        let Self { requests, replies, tcp_from_web, tcp_from_db, of_others } = *self;
        println!("    of web:    {requests} echo requests and {replies} replies, of {PINGS} each");
        println!("               {tcp_from_web} TCP segments from web, {tcp_from_db} to it");
        println!("    of others: {of_others} packets between db and client");
        if requests != PINGS || replies != PINGS {
            bail!("not every ping stands on the mirror interface once");
        }
        if of_others != 0 {
            bail!("packets of pods that are not mirrored stand on the mirror interface");
        }
        Ok(())
    }
}

/// The address in "192.0.2.2", "192.0.2.2.34567" or "192.0.2.3.8080:".
fn address(word: &str) -> Option<Ipv4Addr> {
    word.trim_end_matches(':').split('.').take(4).collect::<Vec<_>>().join(".").parse().ok()
}

/// `mirror-agent status -o json`.
fn status(lab: &Lab, agent: &Path) -> Result<Value> {
    let mut status = lab.agent(agent);
    status.args(["status", "-o", "json"]);
    let output = lab.node.enter(move || Ok(status.output()?))?;
    if !output.status.success() {
        bail!("mirror-agent status: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("the agent's status")
}

/// Whether web, and nobody else, is tapped in both directions.
fn is_tapped(status: &Value) -> bool {
    let Some([tap]) = status["taps"].as_array().map(Vec::as_slice) else { return false };
    let attached = |hook: &str| tap["attached"][hook].as_str().is_some_and(|how| how != "none");
    tap["pod"]["name"] == WEB.name && attached("ingress") && attached("egress")
}

fn show_counters(status: &Value) {
    for tap in status["taps"].as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        println!(
            "    pod {}, device {} ({})",
            text(&tap["pod"]["name"]),
            text(&tap["device"]),
            text(&tap["attached"]["ingress"])
        );
        for counter in tap["counters"].as_array().into_iter().flatten() {
            println!(
                "    {:<8} {:<12} {:>5} packets {:>7} bytes",
                text(&counter["direction"]),
                text(&counter["verdict"]),
                counter["packets"],
                counter["bytes"],
            );
        }
    }
}

fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Asks until there is an answer; an interrupt or too long a time is an error.
fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if is_interrupted() {
            bail!("interrupted");
        }
        if Instant::now() > deadline {
            bail!("waited {} s for {what}", PATIENCE.as_secs());
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// A program that is told to end when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        let pid = Pid::from_raw(self.0.id().cast_signed());
        let mut told = false;
        // It may have ended by itself, or by the Ctrl-C that went to all of us.
        while let Ok(None) = self.0.try_wait() {
            if Instant::now() > deadline {
                let _ = self.0.kill();
            } else if !told {
                told = signal::kill(pid, Signal::SIGTERM).is_ok();
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    | {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_others_are_told_from_those_of_web() {
        let lines = [
            "12:00:00.1 ARP, Request who-has 192.0.2.4 tell 192.0.2.3, length 28",
            "12:00:00.1 IP 0.0.0.0 > 224.0.0.22: igmp",
            "12:00:00.1 IP 192.0.2.3 > 192.0.2.4: ICMP echo request, id 1, seq 1, length 64",
            "12:00:00.1 IP 192.0.2.2 > 192.0.2.3: ICMP echo request, id 1, seq 1, length 64",
            "12:00:00.1 IP 192.0.2.3 > 192.0.2.2: ICMP echo reply, id 1, seq 1, length 64",
            "12:00:00.1 IP 192.0.2.2.40000 > 192.0.2.3.8080: tcp 5",
            "12:00:00.1 IP 192.0.2.3.8080 > 192.0.2.2.40000: tcp 0",
            "12:00:00.1 IP 192.0.2.3.8080 > 192.0.2.4.40000: tcp 0",
        ];
        assert_eq!(
            Captured::of(&lines.map(str::to_owned)),
            Captured { requests: 1, replies: 1, tcp_from_web: 1, tcp_from_db: 1, of_others: 2 }
        );
    }
}
