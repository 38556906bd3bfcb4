//! One request of kubectl and one tshark after it for minutes: each conversation is there from its first segment to its
//! last one.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use mirror_tests::{
    Cluster, PATIENCE, Reader, SOON, Tail, check, eventually, list, pod_object, random::from_environment,
};
use serde_json::json;

use super::{SECONDS, allow, packets};

/// The longest duration of the story in seconds, unless `MIRROR_GROWTH_SECONDS` is less.
const LONGEST: u64 = 180;
/// Number of different pages.
const PAGES: usize = 100;
/// The segments of a complete connection: of the client (`>`) and of the server (`<`), in the order of the text.
const COMPLETE: [&str; 4] = ["<FIN", "<SYN", ">FIN", ">SYN"];
/// tshark's fields of a segment, before [`MISTAKES`].
const FIELDS: [&str; 6] =
    ["frame.interface_name", "tcp.stream", "ip.src_host", "ip.dst_host", "tcp.flags", "tcp.payload"];
/// tshark's fields for an additional, missing or reordered segment.
const MISTAKES: [&str; 5] = [
    "tcp.analysis.out_of_order",
    "tcp.analysis.retransmission",
    "tcp.analysis.duplicate_ack",
    "tcp.analysis.lost_segment",
    "tcp.analysis.ack_lost_segment",
];

/// A connection as one pod has it.
#[derive(Default)]
struct Connection<'a> {
    nic: &'a str,
    client: &'a str,
    server: &'a str,
    /// The segments that begin and end it, and mistakes.
    course: Vec<String>,
    request: String,
    answer: String,
}

/// The connections in tshark's output, each as a line, in the order of the text.
fn connections(shown: &str) -> Vec<String> {
    let mut connections = BTreeMap::<&str, Connection<'_>>::new();
    for line in shown.lines() {
        let fields: Vec<_> = line.split('\t').collect();
        // Lines of standard error, and a line that tshark is writing.
        let &[nic, stream, from, to, flags, payload, ref mistakes @ ..] = &fields[..] else { continue };
        let Ok(flags) = u16::from_str_radix(flags.trim_start_matches("0x"), 16) else { continue };
        let connection = connections.entry(stream).or_insert_with(|| Connection {
            nic,
            client: from,
            server: to,
            ..Connection::default()
        });
        let way = match (from, to) {
            ends if ends == (connection.client, connection.server) => '>',
            ends if ends == (connection.server, connection.client) => '<',
            // The name of an address has changed.
            _ => '?',
        };
        let bits = [(0x01_u16, "FIN"), (0x02, "SYN"), (0x04, "RST")];
        let set = bits.iter().filter(|(bit, _)| flags & bit != 0).map(|(_, name)| *name);
        let wrong = MISTAKES.iter().zip(mistakes).filter(|(_, is)| !is.is_empty()).map(|(name, _)| *name);
        connection.course.extend(set.chain(wrong).map(|word| format!("{way}{word}")));
        let content = if way == '>' { &mut connection.request } else { &mut connection.answer };
        content.push_str(&text(payload));
    }
    let mut lines: Vec<_> = connections.into_values().map(Connection::line).collect();
    lines.sort();
    lines
}

impl Connection<'_> {
    fn line(self) -> String {
        let Self { nic, client, server, mut course, request, answer } = self;
        course.sort();
        // "GET /7?107 HTTP/1.1"
        let page = request.split(' ').nth(1).unwrap_or_default();
        let body = answer.split_once("\r\n\r\n").map_or(answer.as_str(), |(_, body)| body);
        line(nic, [client, server], &course.join(" "), page, body)
    }
}

fn line(nic: &str, [client, server]: [&str; 2], course: &str, page: &str, body: &str) -> String {
    format!("{nic}: {client} to {server}: {course}: {page} is {body:?}")
}

/// The text of hexadecimal digits.
fn text(digits: &str) -> String {
    let byte = |at: usize| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok();
    (0..digits.len() / 2).filter_map(byte).map(char::from).collect()
}

/// A pod fetches pages through a Service, and the user's tshark shows each conversation as both pods have it: beginning
/// and end, request and page, with names and without a gap. `MIRROR_GROWTH_SECONDS=180` makes it three minutes.
#[test]
fn conversations_of_three_minutes_are_complete_and_have_names() {
    let seconds = from_environment("MIRROR_GROWTH_SECONDS", || SECONDS).min(LONGEST);
    let time = Duration::from_secs(seconds);
    let cluster = &Cluster::new("conversations");
    let (host, namespace) = (cluster.host(), cluster.namespace());
    let pages = format!("for n in $(seq 0 {}); do echo page $n > /www/$n; done", PAGES - 1);
    let server = format!("mkdir /www; {pages}; echo > /www/first; exec httpd -f -p 8080 -h /www");
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "front" },
        "spec": { "selector": { "app": "db" }, "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    cluster.apply(&list(&[pod_object("web", "exec sleep 3600"), pod_object("db", &server), service]));
    let (web, db) = (&cluster.running("web"), &cluster.running("db"));
    allow(cluster);
    let address = cluster.kubectl("get service front -o jsonpath={.spec.clusterIP}");
    let fetch = |page: &str| {
        cluster.try_kubectl(&format!("exec web -- timeout 5 wget -q -O - http://{address}/{page}"))
    };
    // kube-proxy learns the pod of the Service some time later.
    eventually(SOON, || fetch("first"));

    let (from_kubectl, to_tshark) = io::pipe().unwrap();
    let mut command = packets(cluster, "timeoutSeconds=1800");
    let kubectl = Tail::of(command.stdout(to_tshark), PathBuf::from("-"));
    // The command holds the other end of the pipe, too.
    drop(command);
    let mut tshark = Command::new("tshark");
    tshark.args(["-i", "-", "-l", "-N", "n", "-Y", "tcp.port == 80 || tcp.port == 8080", "-T", "fields"]);
    tshark.args(FIELDS.iter().chain(&MISTAKES).flat_map(|field| ["-e", field]));
    let tshark = Reader::fed_by(host, "tshark", tshark, from_kubectl);
    host.wait_taps(&[&web.device, &db.device]);
    let [of_web, of_db] = ["web", "db"].map(|pod| format!("{pod}.{namespace}"));
    let of_service = format!("front.{namespace}.svc");
    // The name of the Service can come after its first packets.
    eventually(SOON, || {
        fetch("first")?;
        let shown = tshark.said();
        check(shown.contains(&format!("\t{of_web}\t{of_service}\t")), || shown.clone())
    });

    let (begun, mut expected) = (Instant::now(), Vec::new());
    for number in (0..).take_while(|_| begun.elapsed() < time) {
        let page = number % PAGES;
        let (path, body) = (format!("{page}?{number}"), format!("page {page}\n"));
        assert_eq!(fetch(&path).unwrap(), body);
        for (pod, server) in [("web", &of_service), ("db", &of_db)] {
            let nic = format!("{namespace}/{pod} eth0");
            expected.push(line(&nic, [&of_web, server], &COMPLETE.join(" "), &format!("/{path}"), &body));
        }
    }
    expected.sort();
    eprintln!("{} conversations in {time:?}", expected.len() / 2);
    assert!(expected.len() as u64 > seconds, "{expected:#?}");
    let numbered = |shown: &str| {
        let mut connections = connections(shown);
        connections.retain(|line| !line.contains(": /first is "));
        connections
    };
    eventually(PATIENCE, || {
        let found = numbered(&tshark.said());
        check(found == expected, || {
            let wrong: Vec<_> = found.iter().filter(|line| expected.binary_search(line).is_err()).collect();
            format!("{} conversations, and not {}: {wrong:#?}", found.len(), expected.len())
        })
    });
    kubectl.kill();
    assert_eq!(numbered(&tshark.wait()), expected);
    host.wait_taps(&[]);
}
