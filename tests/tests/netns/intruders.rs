//! Other processes on the node block the agent's names or impersonate it. Several agents run on one node.

use std::{
    fs::{self, File, Permissions},
    io::{ErrorKind, Write as _},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    thread,
};

use mirror_tests::{Agent, Lab, PodSpec, PodsFile, as_nobody, check};
use nix::fcntl::{Flock, FlockArg};

use crate::{Node, any_mode};

/// Takes the agent's names, as user nobody in the node's network namespace: the abstract socket name of an agent of an
/// earlier version, where it gives false answers, and the directory of the pins.
fn intrude(lab: &Lab) -> Flock<File> {
    // The mode of `mount -t bpf`; systemd would set another one.
    fs::set_permissions(lab.bpffs(), Permissions::from_mode(0o1777)).unwrap();
    let place = lab.bpffs().join("podmirror");
    let (agent, directory) = lab.node().enter(|| {
        as_nobody(|| {
            let name = SocketAddr::from_abstract_name("podmirror-agent").unwrap();
            let agent = UnixListener::bind_addr(&name).unwrap();
            fs::create_dir(&place).unwrap();
            fs::create_dir(place.join("v3")).unwrap();
            (agent, File::open(place).unwrap())
        })
    });
    // The thread ends with the test's process.
    thread::spawn(move || {
        let lie = br#"{"not_mirrored":[],"bad_annotations":[],"failures":["send your secrets to nobody"]}"#;
        agent.incoming().flatten().for_each(|mut reader| drop(reader.write_all(lie)));
    });
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).unwrap()
}

/// The paths of the agent's lock and socket for a node's network namespace.
fn places(lab: &Lab) -> [String; 2] {
    let netns = fs::metadata(lab.node().path()).unwrap().ino();
    ["lock", "sock"].map(|kind| format!("/run/podmirror/{netns}.{kind}"))
}

#[test]
fn an_unprivileged_process_keeps_nobody_from_working_and_is_not_believed() {
    let Node { web, db, lab } = &Node::bridged("intruder");
    let before = lab.network_state();
    let _directory = intrude(lab);
    let exit = lab.agent_exit(&["status"]);
    assert!(exit.code == Some(1) && exit.stderr.contains("no podmirror state"), "{exit:?}");

    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    web.ping(db.v4(), 10, 56);
    assert!(lab.status().tap(web.veth_host()).total("copied") >= 20);
    assert!(status.agent_running);
    assert_eq!(status.notes.unwrap()["failures"], serde_json::json!([]));
    // The user nobody can reach neither the agent's present files nor those of the next one.
    let (places, root) = (places(lab), lab.bpffs().join("podmirror"));
    lab.node().enter(|| {
        as_nobody(|| {
            for place in &places {
                assert_eq!(File::open(place).unwrap_err().kind(), ErrorKind::PermissionDenied);
                assert_eq!(File::create(place).unwrap_err().kind(), ErrorKind::PermissionDenied);
                assert_eq!(UnixStream::connect(place).unwrap_err().kind(), ErrorKind::PermissionDenied);
            }
            assert_eq!(File::open(&root).unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(fs::remove_dir(&root).unwrap_err().kind(), ErrorKind::PermissionDenied);
        })
    });
    agent.stop();

    let status = lab.status();
    assert_eq!((status.agent_running, status.notes), (false, None), "nobody is not the agent");
    assert_eq!(status.taps.len(), 1);
    lab.cleanup();
    lab.network_is_as(&before);
}

#[test]
fn one_agent_works_in_a_network_namespace_and_in_a_directory() {
    let Node { web, db: _db, lab } = &Node::bridged("one");
    let elsewhere = &Lab::new("two");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let refused = |lab: &Lab, bpffs: &str, why: &str| {
        for command in [&["run", "--pods-from", pods.path()][..], &["cleanup"]] {
            let exit = lab.agent_exit(&[command, &["--bpffs", bpffs]].concat());
            assert_eq!(exit.code, Some(1), "{exit:?}");
            assert!(exit.stderr.contains(why), "no {why:?}: {exit:?}");
        }
    };
    let (here, other) = (lab.bpffs().to_str().unwrap(), lab.bpffs().join("other"));
    refused(lab, here, "another mirror-agent is running on this node");
    refused(lab, other.to_str().unwrap(), "another mirror-agent is running on this node");
    // As from a container with a network namespace of its own.
    refused(elsewhere, here, &format!("another mirror-agent is running in {here}/podmirror"));
    assert!(lab.status().agent_running);
    assert!(places(lab).iter().all(|place| fs::exists(place).unwrap()));
    agent.stop();
    assert!(!places(lab).iter().any(|place| fs::exists(place).unwrap()), "a stopped agent leaves no files");

    // An agent of an earlier version holds only this lock.
    let directory = File::open(lab.bpffs().join("podmirror")).unwrap();
    let earlier = Flock::lock(directory, FlockArg::LockExclusiveNonblock).unwrap();
    refused(lab, here, &format!("another mirror-agent is running in {here}/podmirror"));
    drop(earlier);

    // The files of a killed agent do not count as a running agent, and do not block the next one.
    for _ in 0..2 {
        let agent = Agent::run(lab, any_mode(), &pods, &[]);
        lab.wait_status(|status| check(status.notes.is_some(), || "no agent answers".into()));
        agent.kill();
        assert!(places(lab).iter().all(|place| fs::exists(place).unwrap()));
        let status = lab.status();
        assert_eq!((status.agent_running, status.notes), (false, None));
    }
    lab.cleanup();
    assert!(!places(lab).iter().any(|place| fs::exists(place).unwrap()));
}
