//! Tests of programs that request packets; the test plays the loop and publishes its reports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use tokio::{
    task::{JoinHandle, yield_now},
    time::Instant,
};

use super::*;
use crate::{
    model::{Directions, Name, ResourceId, Selector},
    select::{Coverage, Nics, NotCovered, Selected},
};

/// An agent with the stream `live`, and the reports of its loop.
struct Agent {
    control: Control,
    reports: watch::Sender<Arc<Report>>,
}

impl Agent {
    fn new() -> Self {
        Self::with(Policy::default())
    }

    fn with(policy: Policy) -> Self {
        let policy = Policy { targets: [(live(), Destination::Stream)].into(), ..policy };
        Self { control: Control::new(Rings::default(), policy), reports: watch::Sender::default() }
    }

    /// An agent whose loop has done its first round.
    fn ready() -> Self {
        let agent = Self::new();
        agent.round();
        agent
    }

    /// A round of the loop that includes the present programs.
    fn round(&self) {
        let rings = self.control.watch().borrow().rings();
        self.reports.send_modify(|report| {
            *report = Arc::new(Report { is_reconciled: true, rings, ..Report::clone(report) });
        });
    }

    /// A program connects. Returns its end of the connection.
    fn connect(&self) -> StdStream {
        let (program, agent) = StdStream::pair().unwrap();
        agent.set_nonblocking(true).unwrap();
        let agent = UnixStream::from_std(agent).unwrap();
        let (control, reports) = (self.control.clone(), self.reports.subscribe());
        tokio::spawn(async move { attend(agent, &control, reports).await });
        program
    }

    /// A program asks for the stream.
    fn ask(&self) -> Asking {
        self.ask_for(Request { of: Subject::Target("live".into()), ring_bytes: 1 << 16 })
    }

    /// A program requests a capture, with a ring of this many bytes.
    fn ask_for_capture(&self, ring_bytes: u32) -> Asking {
        let of = Subject::Capture {
            pods: BTreeSet::new(),
            interfaces: ["eth0".to_owned()].into(),
            direction: Directions::Both,
            settings: BTreeMap::new(),
        };
        self.ask_for(Request { of, ring_bytes })
    }

    /// A reader of the API asks for the pods of a namespace, or all.
    fn ask_for_pods(&self, namespace: Option<&str>, ring_bytes: u32) -> Asking {
        let namespace = namespace.map(str::to_owned);
        let of = ReadOf::Pods { namespace, name: None, labels: Default::default(), nics: None };
        let of = Subject::Reader { of, direction: Directions::Both, settings: Box::default() };
        self.ask_for(Request { of, ring_bytes })
    }

    /// Waits until this program is admitted and this many programs read.
    async fn admits(&self, asking: Asking, count: usize) -> (UnixStream, OwnedFd, Answer) {
        self.readers(count).await;
        self.round();
        asking.await.unwrap().unwrap()
    }

    fn ask_for(&self, request: Request) -> Asking {
        let connection = self.connect();
        tokio::spawn(async move { ask(connection, &request).await })
    }

    /// Waits until this many programs read.
    async fn readers(&self, count: usize) {
        self.control.watch().wait_for(|readers| readers.rings().len() == count).await.unwrap();
    }
}

/// The state of a reader that gets no packets.
fn coverage(capture: &Capture, not_covered: BTreeSet<NotCovered>) -> (RingId, Coverage) {
    let of = Selected {
        id: ResourceId { namespace: None, name: Name::default() },
        uid: String::new(),
        generation: 0,
        mirror: capture.mirror(),
        refused: None,
        target: capture.target(),
        nics: Nics::default(),
        pods: not_covered.iter().map(|of| of.pod.clone()).collect(),
    };
    (capture.ring, Coverage { of, covered: BTreeSet::new(), not_covered })
}

type Asking = JoinHandle<anyhow::Result<(UnixStream, OwnedFd, Answer)>>;

fn live() -> TargetName {
    TargetName("live".parse().unwrap())
}

/// Lets all tasks run, and the runtime poll all sockets.
async fn settle() {
    for _ in 0..1000 {
        yield_now().await;
    }
}

/// The next program waits until a round has removed the ring of the one before, and until that program has closed its
/// connection: after that it returns no more room.
#[tokio::test]
async fn one_program_reads_after_the_other() {
    let agent = Agent::ready();
    let first = agent.ask();
    agent.readers(1).await;
    agent.round();
    let (mut first, _ring, answer) = first.await.unwrap().unwrap();
    assert_eq!(answer, Answer { target: "live".into(), ..Answer::default() });
    let refused = agent.ask().await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("another program reads target live"), "{refused}");

    first.write_all(b"-\n").await.unwrap();
    agent.readers(0).await;
    let second = agent.ask();
    settle().await;
    assert!(agent.control.watch().borrow().rings().is_empty(), "the round is missing");
    agent.round();
    assert!(first.read_u8().await.is_err(), "no more packets from here");
    settle().await;
    assert!(agent.control.watch().borrow().rings().is_empty(), "the first program is still connected");
    drop(first);
    agent.readers(1).await;
    agent.round();
    second.await.unwrap().unwrap();
}

/// A stopped program does not keep the target forever.
#[tokio::test(start_paused = true)]
async fn a_program_that_does_not_close_the_connection_is_not_waited_for() {
    let agent = Agent::ready();
    let first = agent.ask();
    agent.readers(1).await;
    agent.round();
    let (mut first, _ring, _) = first.await.unwrap().unwrap();
    first.write_all(b"-\n").await.unwrap();
    agent.readers(0).await;
    let (began, second) = (Instant::now(), agent.ask());
    agent.round();
    agent.readers(1).await;
    assert!((PATIENCE..PATIENCE * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    agent.round();
    second.await.unwrap().unwrap();
}

/// The reports of a recorder count until its end. A report that crosses the end of the agent does not free the target.
#[tokio::test]
async fn a_recorder_reports_how_full_it_is() {
    let agent = Agent::ready();
    let first = agent.ask();
    agent.readers(1).await;
    agent.round();
    let (mut first, _ring, _) = first.await.unwrap().unwrap();
    let mut fills = agent.control.fills();
    for used in [70, 80] {
        let fill = Fill { used, size: 99, oldest_ns: 5 };
        write_line(&mut first, &fill).await.unwrap();
        fills.wait_for(|fills| *fills == BTreeMap::from([(live(), fill)])).await.unwrap();
    }
    agent.control.end();
    agent.round();
    fills.wait_for(BTreeMap::is_empty).await.unwrap();
    write_line(&mut first, &Fill { used: 90, size: 99, oldest_ns: 5 }).await.unwrap();
    let second = agent.ask();
    settle().await;
    assert!(agent.control.watch().borrow().rings().is_empty(), "the first program is still connected");
    drop(first);
    agent.readers(1).await;
    agent.round();
    second.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_ring_that_cannot_be_written_is_told() {
    let agent = Agent::ready();
    let asking = agent.ask();
    agent.readers(1).await;
    let unwritten = [(live(), "cannot write a ring: no memory".to_owned())].into();
    agent.reports.send_modify(|report| {
        *report = Arc::new(Report { unwritten, ..Report::clone(report) });
    });
    agent.round();
    let (_, _, answer) = asking.await.unwrap().unwrap();
    let told = "nothing is copied for this command yet: cannot write a ring: no memory; the agent retries";
    assert_eq!(answer.problems, [told]);
}

/// The resources of a program that ended a moment ago are free for the next one.
#[tokio::test]
async fn all_room_for_rings_goes_from_one_program_to_the_next() {
    let agent = Agent::ready();
    let first = agent.ask_for_capture(64 << 20);
    agent.readers(1).await;
    agent.round();
    let first = first.await.unwrap().unwrap();
    drop(first);
    let second = agent.ask_for_capture(64 << 20);
    agent.readers(0).await;
    agent.round();
    agent.readers(1).await;
    agent.round();
    let (_second, ..) = second.await.unwrap().unwrap();
    let refused = agent.ask_for_capture(1 << 16).await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("64 MiB are in use"), "{refused}");
}

/// Readers of the API, however many, leave two captures to root, with most of the room for rings.
#[tokio::test]
async fn two_captures_are_left_for_root() {
    let agent = Agent::ready();
    let ask_for_pods = |ring_bytes| agent.ask_for_pods(None, ring_bytes);
    let refused = ask_for_pods(2 * READER_RING).await.unwrap().unwrap_err().to_string();
    assert_eq!(refused, "the buffer of a reader has at most 4 MiB");
    let mut present = Vec::new();
    for count in 1..=MAX_READERS {
        present.push(agent.admits(ask_for_pods(READER_RING), count).await);
    }
    let refused = ask_for_pods(READER_RING).await.unwrap().unwrap_err().to_string();
    assert_eq!(refused, "the limit of 6 readers per node is reached");
    for count in [7, 8] {
        present.push(agent.admits(agent.ask_for_capture(16 << 20), count).await);
    }
    let refused = agent.ask_for_capture(1 << 16).await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("the limit of 8 captures per node"), "{refused}");
    // A place of a reader goes to the next reader.
    drop(present.remove(0));
    agent.readers(7).await;
    agent.round();
    agent.admits(ask_for_pods(READER_RING), 8).await;
}

#[tokio::test]
async fn a_reader_gets_the_reasons_for_its_own_pods() {
    let agent = Agent::ready();
    let asking = [(); 2].map(|()| agent.ask_for_pods(None, 1 << 16));
    agent.readers(2).await;
    let captures = agent.control.watch().borrow().captures.clone();
    let with_reason = |(capture, reason): (&Capture, &'static str)| {
        let pod = PodId { namespace: "shop".into(), name: "web".into(), uid: "1".into() };
        let (nic, message) = (None, format!("the reason is {reason}"));
        coverage(capture, [NotCovered { pod, nic, reason, message }].into())
    };
    let readers = captures.iter().zip(["OptedOut", "NoNic"]).map(with_reason).collect();
    agent.reports.send_modify(|report| {
        *report = Arc::new(Report { readers, ..Report::clone(report) });
    });
    agent.round();
    let mut problems = Vec::new();
    for asking in asking {
        problems.extend(asking.await.unwrap().unwrap().2.problems);
    }
    problems.sort();
    assert_eq!(problems, ["shop/web: the reason is NoNic", "shop/web: the reason is OptedOut"]);
}

/// A node has more pods, with longer reasons, than an answer has room for.
#[tokio::test]
async fn an_answer_has_a_bound() {
    let agent = Agent::ready();
    let asking = agent.ask_for_pods(Some("shop"), 1 << 16);
    agent.readers(1).await;
    let captures = agent.control.watch().borrow().captures.clone();
    let pods = || {
        let names = (0..5000).map(|number| format!("{number:0>253}"));
        names.map(|name| PodId { uid: name.clone(), namespace: "shop".into(), name })
    };
    let of_pod = |pod| NotCovered { pod, nic: None, reason: "NetnsUnreadable", message: "é".repeat(1000) };
    let readers = [coverage(&captures[0], pods().map(of_pod).collect())].into();
    let pods = Some(pods().map(|pod| (pod, None)).collect());
    agent.reports.send_modify(|report| {
        *report = Arc::new(Report { readers, pods, ..Report::clone(report) });
    });
    agent.round();
    let (.., Answer { problems, past, .. }) = asking.await.unwrap().unwrap();
    let told = (problems.len(), problems.last().map(String::as_str));
    assert_eq!(told, (problems::MOST + 1, Some("and 4960 more")));
    // Without the pods that are present, deleted ones cannot be told from them.
    assert_eq!((past.of, past.except), (Some(BTreeSet::new()), BTreeSet::new()));
}

/// The program waits longer than the agent, so it gets the reason.
#[tokio::test(start_paused = true)]
async fn an_agent_that_is_slow_says_so_before_the_program_gives_up() {
    let (agent, began) = (Agent::new(), Instant::now());
    let refused = agent.ask_for_capture(1 << 16).await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("the agent is not ready yet"), "{refused}");
    assert!((ROUND..ANSWER).contains(&began.elapsed()), "{:?}", began.elapsed());

    // The agent is ready late, and no round after that includes the program.
    let (agent, began) = (Agent::new(), Instant::now());
    let asking = agent.ask_for_capture(1 << 16);
    tokio::time::sleep(ROUND - Duration::from_secs(1)).await;
    agent.round();
    let (_, _, answer) = asking.await.unwrap().unwrap();
    assert_eq!(answer.problems, ["the agent has not completed the request yet; it retries"]);
    assert!((ROUND..ANSWER).contains(&began.elapsed()), "{:?}", began.elapsed());
}

/// A deleted pod is known by its name alone, and a pod that exists by its sessions.
#[test]
fn the_past_of_a_reader_is_that_of_its_own_pods() {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let pod = |namespace: &str, name: &str| {
        (PodId { namespace: namespace.into(), name: name.into(), uid: name.into() }, None)
    };
    let pods = Some([pod("shop", "web"), pod("bank", "gone")].into());
    let report = Report { pods, ..Report::default() };
    let settings =
        [("filter", "icmp"), ("snaplen", "96")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    let settings = parse(&settings.into()).unwrap();
    let past_of = |policy: Policy, wants: Wants| {
        let (ring, settings) = (RingId(1), settings.clone());
        let (origin, directions) = (Origin::Reader, Directions::Ingress);
        let capture = Capture { ring, origin, wants, directions, settings };
        Agent::with(policy).control.past_of(&capture, &report)
    };
    let reader = |namespace: Option<&str>, name: Option<&str>, labels: Selector| {
        let (namespace, name) = (namespace.map(str::to_owned), name.map(str::to_owned));
        let request = model::Request { nics: Some(vec!["net1".into()]), ..model::Request::default() };
        Wants::Reader(Box::new(Resource::of_reader(namespace, name, labels, request)))
    };
    let all = Selector::default;
    for (namespace, name, labels, expected) in [
        (Some("shop"), None, all(), &["shop/*"][..]),
        (Some("shop"), None, Selector::nothing(), &[]),
        (Some("shop"), Some("gone"), all(), &["shop/gone"]),
        (Some("shop"), Some("web"), all(), &[]),
        (None, Some("gone"), all(), &[]),
    ] {
        let of_shop = namespace.map_or(set(&[]), |_| set(&["shop/web"]));
        let Wanted { of, except, nics, directions, filter, snaplen, .. } =
            past_of(Policy::default(), reader(namespace, name, labels));
        assert_eq!((of, except), (Some(set(expected)), of_shop), "{namespace:?} {name:?}");
        assert_eq!((filter.as_deref(), directions, snaplen), (Some("icmp"), Directions::Ingress, Some(96)));
        assert_eq!(nics, Some(set(&["net1"])));
    }
    let excluded = Policy { exclude_namespaces: set(&["shop"]), ..Policy::default() };
    assert_eq!(past_of(excluded, reader(Some("shop"), None, all())).of, Some(set(&[])));
    let named = Wants::Named { pods: BTreeSet::new(), interfaces: set(&["eth0"]) };
    assert_eq!(past_of(Policy::default(), named), Wanted::default());
}

#[test]
fn pods_are_wanted_by_name_or_by_namespace() {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let wanted = |of: &[&str], interface| {
        Wanted { of: Some(set(of)), except: set(&["shop/out"]), ..Wanted::default() }.has(interface)
    };
    assert!(Wanted::default().has("shop/web eth0") && Wanted::default().has("veth1"));
    assert!(wanted(&["shop/web"], "shop/web eth0") && wanted(&["a/b", "shop/*"], "shop/db net1"));
    assert!(wanted(&["veth1"], "veth1") && wanted(&["shop/*", "shop/out eth0"], "shop/out eth0"));
    assert!(!wanted(&[], "shop/web eth0") && !wanted(&["shop/*"], "shop/out eth0"));
    let of = Some(set(&["shop/*", "a/b", "shop/web eth0", "veth1"]));
    let of_nic = Wanted { of, nics: Some(set(&["net1"])), ..Wanted::default() };
    let has = |interface| of_nic.has(interface);
    assert!(has("shop/db net1") && has("a/b net1") && !has("shop/db eth0") && !has("a/b net2"));
    assert!(has("shop/web eth0") && has("veth1"));
    for interface in ["shop/web-2 eth0", "shop2/web eth0", "other/web eth0", "veth1", "shop"] {
        assert!(!wanted(&["shop/web", "stop/*"], interface), "{interface}");
    }
}
