//! Tests of the authentication of streams. The delivery of packets is tested in the stories of the level api.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use tokio::{net::TcpSocket, sync::watch, task::JoinHandle};

use super::*;

fn id(name: &str) -> ResourceId {
    ResourceId { namespace: Some("shop".into()), name: name.parse().unwrap() }
}

fn keyed(uid: &str, key: &str) -> Keyed {
    let key_sha256 = Sha256::digest(key).into();
    Keyed { uid: uid.into(), key_sha256, named: BTreeSet::new(), filter: None }
}

fn report(streams: &[(&str, &str)]) -> Report {
    let streams = streams.iter().map(|(name, key)| (id(name), keyed("1", key))).collect();
    Report { streams, ..Report::default() }
}

fn request(mirror: &str, key: &str) -> Request {
    Request { mirror: mirror.into(), key: key.into(), super_frames: false, since: None, no_follow: false }
}

#[test]
fn a_stream_is_for_the_key_of_its_own_mirror() {
    let report = report(&[("a", "secret"), ("b", "other"), ("empty", "")]);
    let admitted = |mirror, key| request(mirror, key).admitted(&report).map(|(id, _)| id.to_string());
    assert_eq!(admitted("shop/a", "secret").as_deref(), Some("Mirror shop/a"));
    assert_eq!(admitted("shop/b", "other").as_deref(), Some("Mirror shop/b"));
    let hash = format!("{:x?}", keyed("1", "secret").key_sha256);
    for (mirror, key) in [
        ("shop/a", "other"),
        ("shop/b", "secret"),
        ("shop/a", ""),
        ("shop/a", "secret "),
        ("shop/a", hash.as_str()),
        ("shop/c", "secret"),
        ("bank/a", "secret"),
        ("a", "secret"),
        ("", ""),
        ("shop/a/b", "secret"),
    ] {
        assert_eq!(admitted(mirror, key), None, "{mirror} {key}");
    }
}

#[test]
fn a_stream_has_one_reader_and_a_node_has_a_few() {
    let places = Places::default();
    reserve(&places, &id("a")).unwrap();
    assert!(reserve(&places, &id("a")).unwrap_err().contains("another program reads this stream"));
    lock(&places).remove(&id("a"));
    for number in 0..MAX_CAPTURES {
        reserve(&places, &id(&format!("m{number}"))).unwrap();
    }
    assert!(reserve(&places, &id("one-more")).unwrap_err().contains("is reached"));
    lock(&places).remove(&id("m0"));
    reserve(&places, &id("one-more")).unwrap();
}

/// Starts an endpoint, and returns its address.
async fn endpoint(reports: &watch::Sender<Arc<Report>>) -> (SocketAddr, JoinHandle<()>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    (address, tokio::spawn(serve(listener, reports.subscribe(), Path::new("/nosuch").into())))
}

/// Connects, and sends this.
async fn stranger(address: SocketAddr, says: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(says.as_bytes()).await.unwrap();
    stream
}

/// Reads to the end of the connection. A connection that is closed with unread bytes is reset.
async fn all(mut stream: TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    all
}

#[tokio::test]
async fn strangers_get_no_byte_and_hold_no_place() {
    let reports = watch::Sender::new(Arc::new(report(&[("a", "secret")])));
    let (address, _endpoint) = endpoint(&reports).await;
    let silent = stranger(address, "").await;
    for says in ["\n", "GET / HTTP/1.1\r\n\r\n", "{}\n", "{\"mirror\": \"shop/a\"}\n", &"x".repeat(5000)] {
        assert_eq!(all(stranger(address, says).await).await, b"", "{says:?}");
    }
    // Enough connections to evict the first one, long before its timeout.
    let mut others = Vec::new();
    for _ in 0..STRANGERS {
        others.push(stranger(address, "{\"mirror\": \"shop/a\", \"key\": \"wrong\"}\n").await);
    }
    let at_once = timeout(PATIENCE / 2, all(silent)).await;
    assert_eq!(at_once.unwrap(), b"");
    for other in others {
        assert_eq!(timeout(2 * PATIENCE, all(other)).await.unwrap(), b"", "the key is wrong");
    }
}

/// The Mirror reaches the agent later than the client.
#[tokio::test]
async fn a_mirror_that_was_made_just_now_is_waited_for() {
    let reports = watch::Sender::new(Arc::new(report(&[])));
    let (address, _endpoint) = endpoint(&reports).await;
    let mut program = stranger(address, "{\"mirror\": \"shop/a\", \"key\": \"secret\"}\n").await;
    reports.send_replace(Arc::new(report(&[("other", "secret")])));
    reports.send_replace(Arc::new(report(&[("a", "secret")])));
    let mut answer = [0; 3];
    timeout(PATIENCE, program.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"ok\n");
}
