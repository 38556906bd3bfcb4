//! tshark finds the kubectl plugin in Wireshark's extcap folder, as Wireshark does. The API server is of this process,
//! and sends what the agent's `tail` writes.

use std::{
    env, fs,
    io::{self, BufRead as _, BufReader, PipeReader, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::fs::symlink,
    process::Command,
    sync::{Arc, Mutex},
    thread,
};

use mirror_tests::{Agent, Lab, PodSpec, Reader, SOON, Tail, check, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{Node, any_mode, streams::ends_well};

/// The extcap folder of a user: before Wireshark 4.2, and since.
const FOLDERS: [&str; 2] = [".config/wireshark/extcap", ".local/lib/wireshark/extcap"];
/// The name of a cluster of EKS.
const EKS: &str = "arn:aws:eks:eu-west-1:1:cluster/other";
/// The event in the server's log that the client has closed the answer with packets.
const CLOSED: &str = "closed";

/// An API server with a Deployment `web`. It closes the connection after each answer.
struct Server {
    port: u16,
    /// The URIs of requests, and [`CLOSED`].
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts a server that has these packets for the first request for packets.
    fn start(packets: PipeReader) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self { port: listener.local_addr().unwrap().port(), log: Arc::default() };
        let (log, mut packets) = (Arc::clone(&server.log), Some(packets));
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                // The client can end at any time.
                let _ = answer(connection, &mut packets, &log);
            }
        });
        server
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }
}

fn answer(
    mut connection: TcpStream,
    packets: &mut Option<PipeReader>,
    log: &Mutex<Vec<String>>,
) -> io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let uri = head.split(' ').nth(1).unwrap_or_default();
    log.lock().unwrap().push(uri.to_owned());
    let begin = |status: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
    };
    if uri.contains("/packets?")
        && let Some(mut packets) = packets.take()
    {
        connection.write_all(begin("200 OK").as_bytes())?;
        thread::spawn(move || io::copy(&mut packets, &mut connection));
        // The client sends no more. Its end is that of the connection.
        let _ = io::copy(&mut reader, &mut io::sink());
        log.lock().unwrap().push(CLOSED.to_owned());
        return Ok(());
    }
    let (status, object) = if uri.ends_with("/deployments/web") {
        let spec = json!({ "selector": { "matchLabels": { "app": "web" } } });
        ("200 OK", json!({ "metadata": { "name": "web" }, "spec": spec }))
    } else {
        let (reason, message) = ("NotFound", "there is no such Deployment");
        ("404 Not Found", json!({ "status": "Failure", "reason": reason, "code": 404, "message": message }))
    };
    connection.write_all(format!("{}{object}", begin(status)).as_bytes())
}

/// tshark of a user who has the plugin in the extcap folder, and a kubeconfig.
fn tshark(lab: &Lab, words: &[&str]) -> Command {
    let mut tshark = Command::new("tshark");
    tshark.env("HOME", lab.files()).env("KUBECONFIG", lab.files().join("kubeconfig"));
    tshark.env_remove("XDG_CONFIG_HOME").args(words);
    tshark
}

/// Output of a tshark that ends by itself.
#[track_caller]
fn output(lab: &Lab, words: &[&str]) -> String {
    let output = tshark(lab, words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn tshark_lists_and_reads_a_context() {
    let Node { web, db, lab } = &Node::new("extcap");
    let agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web), PodSpec::of(db)], &[], &[]);
    let (tail, pipe) = Tail::piped(lab, &["tail", "--pod", "default/web"]);
    let server = Server::start(pipe);
    for folder in FOLDERS.map(|folder| lab.files().join(folder)) {
        fs::create_dir_all(&folder).unwrap();
        symlink(env::var_os("MIRROR_PLUGIN").unwrap(), folder.join("kubectl-mirror")).unwrap();
    }
    let cluster = |name: &str, port: u16| {
        let server = format!("http://127.0.0.1:{port}");
        json!({ "name": name, "cluster": { "server": server } })
    };
    let context = |name: &str| json!({ "name": name, "context": { "cluster": name, "namespace": "shop" } });
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": EKS,
        "clusters": [cluster("kind", server.port), cluster(EKS, 1)],
        "contexts": [context("kind"), context(EKS)],
    });
    fs::write(lab.files().join("kubeconfig"), kubeconfig.to_string()).unwrap();

    let listed = output(lab, &["-D"]);
    let interface = |context: &str| {
        // As in `12. podmirror:kind (Kubernetes: kind)`.
        let display = format!(" (Kubernetes: {context})");
        let line = listed.lines().find_map(|line| line.strip_suffix(&display));
        assert!(line.is_some(), "no interface of {context}: {listed}");
        line.and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned()
    };
    let (kind, eks) = (interface("kind"), interface(EKS));
    for interface in [&kind, &eks] {
        let types = output(lab, &["-i", interface, "-L"]);
        assert!(types.contains("EN10MB"), "{types}");
    }
    assert_eq!(server.log(), [""; 0], "a start sends no request");

    // Wireshark's name of an option.
    let workload = |name: &str| format!("extcap.podmirror_kind.workload:deploy/{name}");
    let mut reading = tshark(lab, &["-n", "-l", "-i", &kind, "-o", &workload("web"), "-f", "icmp or arp"]);
    reading.args(["-Y", "icmp", "-T", "fields", "-e", "frame.interface_name", "-e", "ip.src"]);
    let reader = Reader::start(lab, "tshark", reading);
    web.ping(db.v4(), 3, 56);
    let expected = [web, db].map(|pod| format!("default/web eth0\t{}", pod.v4()));
    let lines = |said: &str| said.lines().filter(|line| expected.iter().any(|one| one == line)).count();
    eventually(SOON, || check(lines(&reader.said()) == 6, || reader.said()));
    let said = reader.stop(Signal::SIGINT);
    assert_eq!(lines(&said), 6, "{said}");
    // Wireshark shows anything that the plugin prints as a failure.
    assert!(!said.contains("extcap pipe"), "{said}");
    // The plugin has ended too.
    eventually(SOON, || {
        let log = server.log();
        check(log.last().is_some_and(|event| event == CLOSED), || format!("{log:?}"))
    });
    let log = server.log();
    let of_workload = "/apis/apps/v1/namespaces/shop/deployments/web";
    let of_packets = "/apis/packets.podmirror.io/v1alpha1/namespaces/shop/packets?watch=true\
                      &labelSelector=app%3Dweb&filter=icmp%20or%20arp&timeoutSeconds=";
    assert!(log.len() == 3 && log[0] == of_workload && log[1].starts_with(of_packets), "{log:?}");

    // tshark does not wait for packets if there are none, and prints the reason.
    let failed = Reader::start(lab, "failed", tshark(lab, &["-i", &kind, "-o", &workload("nosuch")]));
    let why = "Error from server (NotFound): there is no such Deployment";
    eventually(SOON, || check(failed.said().contains(why), || failed.said()));
    drop(failed);

    ends_well(tail);
    agent.stop();
    lab.cleanup();
}
