//! Readers of the API read pods and interfaces as the agent's thread reads for them: requests at the control socket, and
//! `tail::stream` in this process. What binds a Mirror binds the readers of pods, and nothing of it binds root.

use std::{
    fmt::Display,
    fs::File,
    future::Future,
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    thread::{self, JoinHandle},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use mirror_agent::{
    capture::{
        control::{self, READER_RING, ReadOf, Request},
        tail::{self, Subject},
    },
    kernel::dataplane::pins::Pins,
};
use mirror_core::model::Directions;
use mirror_tests::{
    Agent, Flood, Lab, Netns, PacketFile, PodNs, PodSpec, PodsFile, SOON, Tail, check, eventually,
};
use tokio::sync::{mpsc, oneshot};

use crate::{Inside, Node, any_mode};

/// All pods with this label, or all.
fn pods(label: Option<(&str, &str)>) -> ReadOf {
    let match_labels = label.map(|(key, value)| [(key.to_owned(), value.to_owned())].into());
    ReadOf::Pods {
        namespace: Some("default".to_owned()),
        name: None,
        labels: LabelSelector { match_labels, ..LabelSelector::default() },
        nics: None,
    }
}

/// The end of the pod's veth on the node.
fn veth(pod: &PodNs) -> ReadOf {
    ReadOf::Interface(pod.veth_host().to_owned())
}

fn request(of: ReadOf) -> Request {
    let (direction, settings) = (Directions::Both, Box::default());
    Request { of: control::Subject::Reader { of, direction, settings }, ring_bytes: READER_RING }
}

fn block_on<T, E: Display>(future: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future).map_err(|error| format!("{error:#}"))
}

/// Requests packets, and lets go of them at once. Returns the agent's reasons, or why it refuses the request.
fn reasons(lab: &Lab, of: ReadOf) -> Result<Vec<String>, String> {
    ask(lab, &request(of))
}

/// The same.
fn ask(lab: &Lab, request: &Request) -> Result<Vec<String>, String> {
    lab.node().enter(|| {
        let agent = Pins::connect_control().unwrap().unwrap();
        block_on(async { control::ask(agent, request).await.map(|(.., answer)| answer.problems) })
    })
}

/// A reader of the API.
struct Reader {
    file: PathBuf,
    stop: oneshot::Sender<()>,
    stream: JoinHandle<Result<(), String>>,
    copy: JoinHandle<io::Result<u64>>,
}

impl Reader {
    /// Starts to read, and waits until the agent has admitted the reader.
    #[track_caller]
    fn start(lab: &Lab, of: ReadOf) -> Self {
        static READERS: AtomicU32 = AtomicU32::new(0);
        let file = lab.files().join(format!("reader-{}.pcapng", READERS.fetch_add(1, Ordering::Relaxed)));
        let (mut from, to) = io::pipe().unwrap();
        let mut into = File::create(&file).unwrap();
        let copy = thread::spawn(move || io::copy(&mut from, &mut into));
        let (bpffs, node) = (lab.bpffs().to_owned(), Netns::at(lab.node().path()));
        let subject = Subject { request: request(of), bpffs, since: None, duration: None };
        let (stop, stopped) = oneshot::channel();
        let (joined, has_joined) = oneshot::channel();
        let stream = thread::spawn(move || {
            node.enter(move || {
                let stop = async {
                    // The test may have failed.
                    let _ = stopped.await;
                };
                let (pipe, (_, asks)) = (File::from(OwnedFd::from(to)), mpsc::channel(1));
                block_on(tail::stream(&subject, pipe, true, asks, joined, stop))
            })
        });
        assert!(has_joined.blocking_recv().is_ok(), "{:?}", stream.join());
        Self { file, stop, stream, copy }
    }

    /// The packets so far.
    #[track_caller]
    fn file(&self) -> PacketFile {
        PacketFile::read(&self.file)
    }

    /// Ends the request.
    #[track_caller]
    fn stop(self) -> PacketFile {
        let Self { file, stop, stream, copy } = self;
        stop.send(()).unwrap();
        stream.join().unwrap().unwrap();
        copy.join().unwrap().unwrap();
        PacketFile::read(&file)
    }
}

#[test]
fn what_binds_a_mirror_binds_a_reader() {
    let Node { web, db, lab } = &Node::bridged("apibound");
    let specs = [PodSpec::of(web), PodSpec::of(db).mirror("false")];
    let file = PodsFile::new(lab, &specs);
    for (flag, namespace) in [("--exclude-namespaces", "default"), ("--allow-namespaces", "shop")] {
        let agent = Agent::run(lab, any_mode(), &file, &[flag, namespace]);
        agent.wait_for_log(&["agent started"]);
        for (of, count) in [(pods(None), 2), (veth(web), 1)] {
            let reasons = reasons(lab, of).unwrap();
            let are_of_flag = reasons.iter().all(|reason| reason.contains(flag));
            assert!(reasons.len() == count && are_of_flag, "{reasons:?}");
        }
        agent.stop();
    }
    let agent = Agent::run(lab, any_mode(), &file, &[]);
    agent.wait_for_log(&["agent started"]);
    for (of, db) in [(pods(None), "default/db"), (veth(db), db.veth_host())] {
        let opted_out = format!("{db}: the pod opts out: an annotation on it is \"false\"");
        assert_eq!(reasons(lab, of).unwrap(), [opted_out]);
    }
    assert_eq!(reasons(lab, veth(web)).unwrap(), [""; 0]);

    let (reader, of_interface) = (Reader::start(lab, pods(None)), Reader::start(lab, veth(web)));
    assert_eq!(lab.wait_mirrored(&[web]).tap(web.veth_host()).sessions[0].origin, "reader");
    let inside = Inside::of(web);
    web.ping(db.v4(), 10, 1000);
    web.udp_echo(db, db.v4(), &[0, 1472, 9000]);
    eventually(SOON, || {
        let (file, (sent, received)) = (reader.file(), inside.frames());
        file.frames("egress").same_as(&sent)?;
        file.frames("ingress").same_as(&received)
    });
    // The other pod opts out while it is read.
    file.write(&specs.map(|spec| spec.mirror("false")));
    lab.wait_mirrored(&[]);
    let (sent, received) = inside.stop();
    // Root can read both.
    let tail = Tail::start(lab, &["tail", "--pod", "default/db", "--pod", "default/web"]);
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || {
        let packets = tail.file().packets.len();
        check(packets >= 20, || format!("{packets} packets"))
    });
    tail.stop();
    let all = sent.len() + received.len();
    for file in [reader, of_interface].map(Reader::stop) {
        assert_eq!((file.packets.len(), file.interfaces), (all, vec!["default/web eth0".to_owned()]));
        assert_eq!(file.statistics, [(all as u64, 0)]);
    }
    assert!(agent.log_with(&["\"WARN\"", "opts out"]).is_empty(), "{:#?}", agent.log());
    lab.wait_mirrored(&[]);
}

/// A pod is flooded, and its reader gets what the limit leaves. Root gets everything.
#[test]
fn ceilings_bind_readers() {
    let Node { web, db, lab } = &Node::bridged("apiceilings");
    let file = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    for (number, flag) in ["--max-pod-rate", "--max-namespace-rate", "--max-rate"].into_iter().enumerate() {
        let agent = Agent::run(lab, any_mode(), &file, &[flag, "100pps"]);
        agent.wait_for_log(&["agent started"]);
        let of_pods = Reader::start(lab, pods(None));
        let of_interface = Reader::start(lab, veth(web));
        // The count is never reached; it only makes the name of the file differ.
        let count = (1_000_000 + number).to_string();
        let tail = Tail::start(lab, &["tail", "--pod", "default/web", "-c", &count]);
        let flood = Flood::start(web, db);
        flood.go_on(2000);
        flood.stop();
        let status = lab.status();
        let sessions = &status.tap(web.veth_host()).sessions;
        let of = |origin| -> Vec<_> { sessions.iter().filter(|session| session.origin == origin).collect() };
        let (of_root, of_readers) = (of("capture"), of("reader"));
        assert_eq!((of_root.len(), of_readers.len()), (1, 2), "{status:#?}");
        assert_eq!(of_root[0].total("limited"), 0, "{flag}: {of_root:#?}");
        for session in &of_readers {
            let (copied, limited) = (session.total("copied"), session.total("limited"));
            assert!(copied < limited && limited > 1000, "{flag}: {session:#?}");
        }
        let copied: u64 = of_readers.iter().map(|session| session.total("copied")).sum();
        assert!(copied > 0, "{flag}: {of_readers:#?}");
        assert!(tail.stop().packets.len() > 1000);
        let files = [of_interface, of_pods].map(Reader::stop);
        let packets = files.iter().flat_map(|file| &file.packets);
        let of_web = packets.filter(|packet| packet.interface == "default/web eth0").count();
        assert_eq!(of_web as u64, copied, "{flag}");
        assert!(files.iter().all(|file| file.limited.iter().all(|limited| *limited > 1000)), "{files:?}");
        agent.stop();
    }
}

/// Six readers with the largest rings are admitted, and not a seventh. Root has two captures with large rings then, also
/// of a pod whose mirrors and readers leave no room: the newest readers give way.
#[test]
fn two_captures_are_left_for_root() {
    let Node { web, db, lab } = &Node::bridged("apiplaces");
    let mirrored = PodSpec::of(web).mirror("true").annotated("podmirror.io/mirror.ids", "true");
    let file = PodsFile::new(lab, &[mirrored, PodSpec::of(db)]);
    let _agent = Agent::run(lab, any_mode(), &file, &[]);
    lab.wait_mirrored(&[web]);
    let large = Request { ring_bytes: 2 * READER_RING, ..request(pods(None)) };
    assert_eq!(ask(lab, &large).unwrap_err(), "the buffer of a reader has at most 4 MiB");
    let mut readers: Vec<_> = (0..6).map(|_| Reader::start(lab, pods(None))).collect();
    let refused = reasons(lab, pods(None)).unwrap_err();
    assert_eq!(refused, "the limit of 6 readers per node is reached");
    let tail = ["tail", "--pod", "default/web", "--buffer", "16MiB"];
    let tails = ["1001", "1002"].map(|count| Tail::start(lab, &[&tail[..], &["-c", count]].concat()));
    let exit = lab.agent_exit(&[&tail[..], &["-w", "/dev/null"]].concat());
    assert!(exit.code == Some(1) && exit.stderr.contains("the limit of 8 captures"), "{exit:?}");
    let status = lab.wait_mirrored(&[web, db]);
    let count = |pod: &PodNs, origin| {
        status.tap(pod.veth_host()).sessions.iter().filter(|session| session.origin == origin).count()
    };
    let counts = ["annotation", "capture", "reader"].map(|origin| [web, db].map(|pod| count(pod, origin)));
    assert_eq!(counts, [[2, 0], [2, 0], [4, 6]]);
    web.ping(db.v4(), 10, 56);
    let is_of = |file: &PacketFile, pod: &str| {
        file.packets.iter().filter(|packet| packet.interface == format!("default/{pod} eth0")).count() >= 20
    };
    assert!(tails.into_iter().all(|tail| is_of(&tail.stop(), "web")));
    let [oldest, newest] = [readers.remove(0), readers.remove(4)].map(Reader::stop);
    let are_of = [&oldest, &newest].map(|file| ["web", "db"].map(|pod| is_of(file, pod)));
    assert_eq!(are_of, [[true; 2], [false, true]]);
    // The place of a reader that has ended is for the next reader.
    let wait_sessions = |sessions: usize| {
        lab.wait_status(|status| {
            let left = status.tap(web.veth_host()).sessions.len();
            check(left == sessions, || format!("{left} sessions"))
        });
    };
    wait_sessions(2 + 4);
    readers.push(Reader::start(lab, pods(None)));
    wait_sessions(2 + 5);
    readers.into_iter().for_each(|reader| drop(reader.stop()));
    wait_sessions(2);
}

#[test]
fn a_reader_waits_for_its_pods_and_not_for_interfaces() {
    let Node { web, db, lab } = &Node::bridged("apilater");
    let labelled = |pod, app| PodSpec::of(pod).labelled("app", app);
    let file = PodsFile::new(lab, &[labelled(db, "db")]);
    let _agent = Agent::run(lab, any_mode(), &file, &[]);
    lab.wait_mirrored(&[]);
    let missing = reasons(lab, ReadOf::Interface("nosuch0".to_owned())).unwrap();
    assert_eq!(missing, ["nosuch0: the interface does not exist"]);
    let by_label = Reader::start(lab, pods(Some(("app", "web"))));
    let by_name = {
        let (namespace, name) = (None, Some("web".to_owned()));
        Reader::start(lab, ReadOf::Pods { namespace, name, labels: LabelSelector::default(), nics: None })
    };
    let of_interface = Reader::start(lab, veth(db));
    lab.wait_mirrored(&[db]);
    file.write(&[labelled(web, "web"), labelled(db, "db")]);
    lab.wait_mirrored(&[web, db]);
    let (web_inside, db_inside) = (Inside::of(web), Inside::of(db));
    web.ping(db.v4(), 10, 56);
    for (reader, inside) in [(&by_label, &web_inside), (&by_name, &web_inside), (&of_interface, &db_inside)] {
        eventually(SOON, || {
            let (file, (sent, received)) = (reader.file(), inside.frames());
            file.frames("egress").same_as(&sent)?;
            file.frames("ingress").same_as(&received)
        });
    }
    let interfaces = [by_label, by_name, of_interface].map(|reader| reader.stop().interfaces.concat());
    assert_eq!(interfaces, ["default/web eth0", "default/web eth0", db.veth_host()]);
}
