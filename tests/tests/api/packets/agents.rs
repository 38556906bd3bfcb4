//! Agents: which of them a server accepts, and for which pods it believes them.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::ByteString;
use mirror_test_cluster::built::BACKEND_IP;
use mirror_tests::{Agent, Answer, Api, Lab, PacketFile, SOON, Way, check, eventually, lint_metrics, scaled};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, SignatureScheme, StreamOwned,
    crypto::ring::sign::any_ecdsa_type,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde_json::{Value, from_slice, from_value, json, to_value};

use super::{AGENT, Packets, rights::pki};
use crate::{
    Node,
    aggregation::{GROUP, SERVICE},
    metrics::has_documented,
    resources::run,
};

/// How a client of HTTP/2 begins.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The lifetime of a token that expires during a story, and the time for which the API server accepts an expired one.
const LIFETIME: Duration = Duration::from_secs(30);
const LEEWAY: Duration = Duration::from_secs(60);

/// A connection to the port of a server for agents.
type Connection = StreamOwned<ClientConnection, TcpStream>;

/// Requests to become an agent, as an agent with this version of the protocol does. Returns the head of the answer.
#[track_caller]
fn dial(packets: &Packets<'_>, version: u32, token: Option<&str>) -> (String, Connection) {
    let [_, port] = packets.ports[0];
    let words =
        format!("get apiservice v1alpha1.{GROUP} --output=go-template={{{{.spec.caBundle|base64decode}}}}");
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(packets.api.kubectl(&words).as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let tls = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());
    let name = ServerName::try_from(format!("{SERVICE}.{}.svc", packets.api.namespace())).unwrap();
    let connection = TcpStream::connect((BACKEND_IP, port)).unwrap();
    connection.set_read_timeout(Some(scaled(SOON))).unwrap();
    let mut connection = StreamOwned::new(ClientConnection::new(tls, name).unwrap(), connection);
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let upgrade = format!("Connection: upgrade\r\nUpgrade: podmirror-packets/{version}\r\n");
    write!(connection, "GET /agent HTTP/1.1\r\nHost: {SERVICE}\r\n{upgrade}{token}\r\n").unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        connection.read_exact(&mut byte).unwrap();
        head.extend_from_slice(&byte);
    }
    (String::from_utf8(head).unwrap(), connection)
}

/// The status code of the answer to an agent with this token.
#[track_caller]
fn code(packets: &Packets<'_>, token: Option<&str>) -> u16 {
    dial(packets, 1, token).0.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_agent_needs_a_token_of_a_pod_of_its_node_and_the_same_version() {
    let lab = Lab::new("packets-tokens");
    let api = Api::new(&lab, "packets-tokens");
    let packets = Packets::start(&api, 1, &[]);
    let audience = &format!("--audience={GROUP}");
    let of_node = &packets.token("node-1", audience);
    let of_api_server = &packets.token("node-1", "");
    let unbound = api.kubectl(&format!("create token {AGENT} {audience}"));
    api.kubectl("create serviceaccount other");
    let of_other = api.kubectl(&format!("create token other {audience}"));
    for (token, expected) in [
        (None, 401),
        (Some("no.token.at-all"), 401),
        (Some(of_api_server.as_str()), 401),
        (Some(of_other.trim()), 403),
        (Some(unbound.trim()), 403),
    ] {
        assert_eq!(code(&packets, token), expected, "{token:?}");
    }
    let (answer, _) = dial(&packets, 2, Some(of_node));
    assert!(answer.starts_with("HTTP/1.1 426 "), "{answer}");
    assert!(answer.to_lowercase().contains("\r\nupgrade: podmirror-packets/1\r\n"), "{answer}");
    let server = &packets.servers[0];
    assert_eq!(server.log_with(&["has connected"]), Vec::<String>::new());

    let (answer, mut connection) = dial(&packets, 1, Some(of_node));
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    let mut preface = [0; PREFACE.len()];
    connection.read_exact(&mut preface).unwrap();
    assert_eq!(preface, PREFACE, "the server sends the requests");
    server.wait_for_log(&["has connected", "\"node-1\""]);
    drop(connection);
    server.wait_for_log(&["has ended", "\"node-1\""]);

    // A token does not outlive its pod. The API server believes in a token for some seconds more.
    api.kubectl("delete pod agent-node-1 --grace-period=0 --force");
    eventually(SOON, || {
        let code = code(&packets, Some(of_node));
        check(code == 401, || format!("{code}"))
    });
}

/// An agent that has the token of another node, like a stolen one, is that node's agent. It answers about the pods that
/// it sees, but the server knows where they are. The server has counted that, so it has all metrics of the document.
#[test]
fn a_node_answers_for_its_own_pods_alone() {
    let node @ Node { api, lab } = &Node::new("packets-foreign");
    let other = &Lab::new("packets-foreign-2");
    other.bridge("br0");
    let _relay = api.connect(other);
    let pods = node.pods(["web", "db"]);
    let [web, db] = &pods;
    let others = ["spied", "peer"].map(|name| other.pod(name, "br0"));
    let [spied, peer] = &others;
    let _containers = [web, db].map(|pod| api.run(lab, pod, &[]));
    let _other_containers = [spied, peer].map(|pod| {
        let mut object = api.object(pod.name(), &[]);
        object["spec"]["nodeName"] = other.node().name().into();
        api.apply(&object);
        api.start(other, pod)
    });
    // The port is free again, and unlikely to be taken before the server uses it.
    let metrics = TcpListener::bind((BACKEND_IP, 0)).unwrap().local_addr().unwrap();
    let packets = Packets::start(api, 1, &["--listen", &metrics.to_string()]);
    let agents = [lab, other].map(|lab| {
        packets.connect(lab);
        packets.agent(lab, &[])
    });
    packets.wait_connected(&[lab, other]);
    let rules = json!([
        { "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] },
        { "apiGroups": [GROUP], "resources": ["podreports"], "verbs": ["list"] },
    ]);
    let alice = &packets.grant("alice", false, &rules);
    let names = ["web", "db", "spied", "peer"];
    // Waits until there are reports about these pods alone. Returns the number of packets of each pod, and of all.
    let read = |expected: [bool; 4]| {
        eventually(SOON, || {
            let reports: Value =
                serde_json::from_str(&packets.get(alice, &packets.uri("podreports"))?).unwrap();
            let reports = reports["items"].as_array().unwrap();
            let reported = names.map(|name| reports.iter().any(|report| report["metadata"]["name"] == name));
            // A busy node answers late, and then is missing for once.
            check(reported == expected, || format!("{reported:?}"))
        });
        let uri = packets.uri("packets?filter=icmp&timeoutSeconds=15&watch=true");
        let stream = packets.stream(alice, &uri);
        stream.wait_begun();
        // Both agents copy, whatever the server makes of the copies.
        lab.wait_mirrored(&[web, db]);
        other.wait_mirrored(&[spied, peer]);
        web.ping(db.v4(), 5, 56);
        spied.ping(peer.v4(), 5, 56);
        let file = PacketFile::parse(&stream.wait_end(SOON, "timeoutSeconds"));
        let count = |name: &str| {
            let name = format!("{}/{name} eth0", api.namespace());
            file.packets.iter().filter(|packet| packet.interface == name).count()
        };
        (names.map(count), file.packets.len())
    };
    assert_eq!(read([true; 4]), ([10; 4], 40));

    let server = &packets.servers[0];
    let token = packets.token("third", &format!("--audience={GROUP}"));
    fs::write(other.files().join("apiserver-token"), token).unwrap();
    let set = |way| packets.relays.borrow()[1].set(way);
    set(Way::Refused);
    server.wait_for_log(&["has ended", other.node().name()]);
    set(Way::Open);
    server.wait_for_log(&["has connected", "\"third\""]);
    assert_eq!(read([true, true, false, false]), ([10, 10, 0, 0], 20));
    let connection = TcpStream::connect(metrics).unwrap();
    let scrape = Answer::to("GET /metrics HTTP/1.1\r\nHost: server\r\n\r\n", connection).unwrap().body;
    lint_metrics(&scrape);
    has_documented(&scrape, |name| name.starts_with("podmirror_apiserver_")).unwrap();
    agents.into_iter().for_each(Agent::stop);
}

/// The same token with a lifetime of [`LIFETIME`], signed with the key of the API server, which itself makes none of less
/// than ten minutes.
#[track_caller]
fn expiring(token: &str) -> String {
    let parts: Vec<_> = token.split('.').collect();
    let [header, claims, _] = parts[..] else { panic!("{token}") };
    let mut claims: Value = from_slice(&from_base64(claims)).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let end = now + LIFETIME - LEEWAY;
    for (claim, time) in [("iat", end - LEEWAY), ("nbf", end - LEEWAY), ("exp", end)] {
        claims[claim] = time.as_secs().into();
    }
    let signed = format!("{header}.{}", base64(claims.to_string().as_bytes()));
    let key = PrivateKeyDer::from_pem_file(pki("service-accounts.key")).unwrap();
    let signer = any_ecdsa_type(&key).unwrap().choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256]);
    let signature = signer.unwrap().sign(signed.as_bytes()).unwrap();
    format!("{signed}.{}", base64(&numbers(&signature)))
}

/// The two numbers of a signature in DER, as a token has them: 32 bytes each.
fn numbers(der: &[u8]) -> Vec<u8> {
    let (mut both, mut rest) = (Vec::new(), &der[2..]);
    while let [2, length, after @ ..] = rest {
        let (number, after) = after.split_at(usize::from(*length));
        // DER has no zeros before a number, or one of them.
        let padded = [&[0; 32][..], number].concat();
        both.extend_from_slice(&padded[padded.len() - 32..]);
        rest = after;
    }
    both
}

/// Base64 with the letters for URLs, without padding.
fn base64(bytes: &[u8]) -> String {
    let text = to_value(ByteString(bytes.to_vec())).unwrap();
    text.as_str().unwrap().trim_end_matches('=').replace('+', "-").replace('/', "_")
}

fn from_base64(text: &str) -> Vec<u8> {
    let padding = "=".repeat(text.len().wrapping_neg() % 4);
    let text = text.replace('-', "+").replace('_', "/") + &padding;
    from_value::<ByteString>(text.into()).unwrap().0
}

/// The kubelet replaces the token in time. If it does not, the connection goes on, and the next one waits for a token.
#[test]
fn a_token_can_expire_after_its_agent_has_connected() {
    let node @ Node { api, lab } = &Node::new("packets-expired");
    let pods = node.pods(["web", "db"]);
    let _containers = run(node, &pods, &[]);
    let [web, db] = &pods;
    let packets = Packets::start(api, 1, &[]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["packets"], "verbs": ["watch"] }]);
    let alice = &packets.grant("alice", false, &rules);
    let of_web = packets.uri("packets?fieldSelector=metadata.name%3Dweb&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, &of_web));
    let (name, file) = (lab.node().name(), lab.files().join("apiserver-token"));
    let reconnect_with = |token: &str| {
        fs::write(&file, token).unwrap();
        [Way::Refused, Way::Open].into_iter().for_each(|way| packets.relays.borrow()[0].set(way));
    };
    let connections = || packets.servers[0].log_with(&["has connected", name]).len();
    let wait_connections = |expected: usize| {
        eventually(2 * SOON, || {
            let connections = connections();
            check(connections == expected, || format!("{connections} connections, not {expected}"))
        });
    };
    let long = packets.token(name, &format!("--audience={GROUP}"));
    let short = expiring(&long);
    reconnect_with(&short);
    wait_connections(2);
    let stream = packets.stream(alice, &packets.uri("packets?filter=icmp&watch=true"));
    stream.wait_begun();
    let ping = |expected: usize| {
        lab.wait_mirrored(&[web, db]);
        web.ping(db.v4(), 5, 56);
        eventually(SOON, || {
            let count = PacketFile::parse(&stream.bytes()).packets.len();
            check(count == expected, || format!("{count} packets, not {expected}"))
        });
    };
    ping(20);

    let review = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": { "token": short, "audiences": [GROUP] },
    });
    eventually(LIFETIME + SOON, || {
        let review: Value =
            from_slice(api.kubectl_with("create -f - -o json", &review.to_string()).as_bytes()).unwrap();
        let why = review["status"]["error"].as_str().unwrap_or_default();
        check(why.contains("expired"), || format!("{review:#}"))
    });
    ping(40);
    packets.get(alice, &of_web).unwrap();
    assert_eq!(connections(), 2);

    let wait_told = |text: &str| {
        eventually(SOON, || {
            let comments = PacketFile::parse(&stream.bytes()).comments;
            let text = format!("podmirror: {name}: {text}");
            check(comments.contains(&text), || format!("not {text:?}: {comments:#?}"))
        });
    };
    reconnect_with(&short);
    agent.wait_for_log(&["401 Unauthorized", "the token is not valid for this server"]);
    wait_told("its agent is not connected");
    assert_eq!(connections(), 2);
    fs::write(&file, long).unwrap();
    wait_connections(3);
    wait_told("its packets are read");
    ping(60);
    agent.stop();
}
