//! The flight recorder: the chart's container, and `kubectl mirror tail --since`.

use std::{
    fs::{self, File},
    net::UdpSocket,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use mirror_tests::{
    AGENT, Capture, Cluster, KubePod, PATIENCE, PacketFile, SOON, Tail, check, eventually, pod_object,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::plugin::plugin;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
/// The recorder's command in its container.
const COMMAND: [&str; 5] = ["recorder", "--ring", "16MiB", "--buffer", "4Mi"];
/// Ring size of that command.
const RING: u64 = 16 << 20;
/// Its only capability, BPF, as the kernel prints a capability set.
const BPF_ALONE: &str = "CapEff:\t0000008000000000";

/// The exit code and the messages of `kubectl mirror tail` for the packets of the past alone.
fn tail(cluster: &Cluster, words: &[&str]) -> (Option<i32>, String) {
    let words = [&["tail", "--since", "1h", "--no-follow"], words].concat();
    let Output { status, stderr, .. } = plugin(cluster, &words).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// The file with the packets of the past, and the messages. An error unless the command exits with 0.
fn past(cluster: &Cluster, words: &[&str]) -> Result<(PacketFile, String), String> {
    let file = file(cluster);
    match tail(cluster, &[words, &["--write", file.to_str().unwrap()]].concat()) {
        (Some(0), told) => Ok((PacketFile::read(&file), told)),
        (code, told) => Err(format!("{code:?}: {told}")),
    }
}

fn file(cluster: &Cluster) -> PathBuf {
    cluster.host().files().join("last.pcapng")
}

/// The recorder's process.
#[track_caller]
fn recorder(cluster: &Cluster) -> u32 {
    cluster.pid_of(&COMMAND).unwrap()
}

/// A pod whose mirror copies to the recorder.
#[track_caller]
fn recorded(cluster: &Cluster, name: &str) -> KubePod {
    let mut pod = pod_object(name, "exec sleep 3600");
    for (key, value) in [("mirror", "true"), ("target", "recorder")] {
        pod["metadata"]["annotations"][format!("podmirror.io/{key}.recorder")] = value.into();
    }
    cluster.apply(&pod);
    let pod = cluster.running(name);
    cluster.host().wait_taps(&[&pod.device]);
    pod
}

/// Kills the agent, and waits until the next one and the recorder continue.
#[track_caller]
fn kill_the_agent(cluster: &Cluster) {
    let before = cluster.agent_pid().unwrap();
    kill(Pid::from_raw(before.cast_signed()), Signal::SIGKILL).unwrap();
    eventually(PATIENCE, || {
        let now = cluster.agent_pid();
        check(now.is_some_and(|now| now != before), || "no other agent yet".into())
    });
    // Until the recorder is back, nothing is copied.
    eventually(PATIENCE, || {
        let log = cluster.try_kubectl(&format!("-n {AGENT} logs daemonset/{AGENT} -c recorder"))?;
        check(log.matches("\"recording\"").count() == 2, || log)
    });
}

#[test]
fn the_packets_of_a_pod_that_has_gone_are_read() {
    let cluster = &Cluster::new("recorder");
    let host = cluster.host();
    let [db] = &cluster.pods([("db", None)]);
    // The published manifests have no recorder.
    let why = past(cluster, &["pod/db"]).unwrap_err();
    let is_told =
        why.contains(": no past: no recorder runs on this node") && why.contains("recorder.enabled");
    assert!(
        is_told && why.starts_with("Some(1)") && why.contains("(Conflict): no packets can be read"),
        "{why}"
    );

    cluster.uninstall();
    let all = format!("--namespace {AGENT} --wait --timeout {}s", PATIENCE.as_secs());
    cluster.helm(&format!(
        "install {AGENT} {CHART} {all} --create-namespace --set recorder.enabled=true --set recorder.ring=16MiB"
    ));
    cluster.wait_rolled_out();
    cluster.wait_served();
    host.wait_status(|status| {
        check(status.target("recorder").up, || format!("nobody records: {:#?}", status.targets))
    });
    let pid = recorder(cluster);
    it_has_what_it_needs_and_no_more(pid);

    let web = recorded(cluster, "web");
    let inside = Capture::start(&web.netns, "eth0");
    web.ping(db.ip, 10);
    kill_the_agent(cluster);
    host.wait_taps(&[&web.device]);
    web.ping(db.ip, 10);
    it_goes_on_after_the_past(cluster, &web, db);
    let frames = eventually(SOON, || {
        let frames = inside.frames().ipv4();
        check(frames.len() == 50, || format!("{frames}")).map(|()| frames)
    });
    cluster.kubectl("delete pod web");
    host.wait_taps(&[]);

    // The pod no longer exists, so the API server does not know its node.
    let (packets, told) = past(cluster, &["pod/web"]).unwrap();
    packets.all_frames().ipv4().same_as(&frames).unwrap();
    let name = format!("{}/web", cluster.namespace());
    assert!(packets.packets.iter().all(|packet| packet.interface == format!("{name} eth0")), "{packets:?}");
    assert!(packets.packets.is_sorted_by_key(|packet| packet.time_ns));
    let lost: u64 = packets.statistics.iter().map(|(_, lost)| lost).sum();
    assert_eq!(lost, 0, "{:?}", packets.statistics);
    let count = packets.packets.len();
    let is_told = format!("recorded packets of the last 3600 s: {name} {count}; its memory reaches back ");
    assert!(told.contains(&is_told), "{told}");
    let summary = format!("{count} packets; 2 interfaces; 1 nodes; 0 packets limited; 0 packets lost\n");
    assert!(told.ends_with(&summary), "{told}");
    assert_eq!(fs::metadata(file(cluster)).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(icmp(&file(cluster)), [25, 25]);
    // Each request returns the same packets, also through standard output and for the whole namespace.
    let (again, told) = past(cluster, &["-l", ""]).unwrap();
    assert_eq!(again.packets, packets.packets, "{told}");
    let piped = file(cluster).with_file_name("piped.pcapng");
    let mut command = plugin(cluster, &["tail", "web", "--since", "1h", "--no-follow"]);
    assert!(command.stdout(File::create(&piped).unwrap()).status().unwrap().success());
    assert_eq!(PacketFile::read(&piped).packets, packets.packets);

    it_says_what_is_missing(cluster, &db.name);
    it_says_that_a_recorder_waits(cluster, pid);
    a_flood_costs_neither_recorder_nor_agent(cluster, db);
    assert_eq!(recorder(cluster), pid);
    cluster.helm(&format!("uninstall {AGENT} {all}"));
    cluster.has_left_nothing();
    assert_eq!(cluster.pid_of(&COMMAND), None);
}

/// Number of ICMP echo requests and answers that tcpdump reads in the file.
fn icmp(file: &Path) -> [usize; 2] {
    ["echo request", "echo reply"].map(|kind| {
        let tcpdump = Command::new("tcpdump").args(["-n", "-Z", "root", "-r"]).arg(file).output().unwrap();
        assert!(tcpdump.status.success(), "{tcpdump:?}");
        String::from_utf8(tcpdump.stdout).unwrap().matches(kind).count()
    })
}

/// The recorder has one capability, and no token for the API server.
fn it_has_what_it_needs_and_no_more(pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in [BPF_ALONE, "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.lines().any(|found| found == line), "{line}: {status}");
    }
    let token = format!("/proc/{pid}/root/var/run/secrets/kubernetes.io/serviceaccount");
    assert_eq!(fs::read_dir(token).unwrap().count(), 0);
}

/// Without `--no-follow`, packets of the past are followed by those that come.
fn it_goes_on_after_the_past(cluster: &Cluster, web: &KubePod, db: &KubePod) {
    let path = file(cluster);
    let mut command = plugin(cluster, &["tail", "web", "--since", "1h"]);
    let reading = Tail::of(command.arg("--write").arg(&path), path.clone());
    let has = |frames: usize| {
        eventually(PATIENCE, || {
            let now = PacketFile::parse(&fs::read(&path).unwrap_or_default()).all_frames().ipv4();
            check(now.len() == frames, || format!("{now}"))
        });
    };
    has(40);
    cluster.host().wait_status(|status| {
        let read = status.targets.iter().filter(|target| target.stream && target.up).count();
        check(read == 2, || format!("{:#?}", status.targets))
    });
    web.ping(db.ip, 5);
    has(50);
    assert_eq!(reading.stop().interfaces.len(), 3, "two of the recorder, and that of the stream");
}

/// The reasons for a file without packets are reported.
fn it_says_what_is_missing(cluster: &Cluster, other: &str) {
    for (words, why) in [
        (&["nosuch"][..], "nothing is recorded of these pods"),
        (&[other], "nothing is recorded of these pods"),
        (&["deploy/nosuch"], "deployments.apps \"nosuch\" not found"),
        (&["-l", "app=nosuch"], "nothing is recorded of these pods"),
    ] {
        let told = past(cluster, words).unwrap_err();
        assert!(told.starts_with("Some(1)") && told.contains(why), "{words:?}: {told}");
    }
}

/// The recorder has no socket, as before the first agent admits it.
fn it_says_that_a_recorder_waits(cluster: &Cluster, recorder: u32) {
    let namespace = fs::metadata(format!("/proc/{recorder}/ns/net")).unwrap().ino();
    let run = PathBuf::from(format!("/proc/{recorder}/root/run/podmirror"));
    let socket = run.join(format!("{namespace}.recorder.recorder"));
    let away = socket.with_extension("away");
    fs::rename(&socket, &away).unwrap();
    let told = past(cluster, &["-l", ""]);
    fs::rename(&away, &socket).unwrap();
    let told = told.unwrap_err();
    assert!(told.starts_with("Some(1)") && told.contains("or it waits for its agent"), "{told}");
    past(cluster, &["-l", ""]).unwrap();
}

/// A file size limit simulates a full disk.
fn what_does_not_fit_is_an_error(cluster: &Cluster) {
    let file = file(cluster);
    let words = ["tail", "loud", "--since", "1h", "--no-follow", "--write", file.to_str().unwrap()];
    let plugin = plugin(cluster, &words);
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"]);
    limited.arg(plugin.get_program()).args(plugin.get_args());
    let output = limited.env("KUBECONFIG", cluster.kubeconfig()).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    let why = format!("cannot write to {}", file.display());
    assert!(output.status.code() == Some(1) && told.contains(&why), "{:?}: {told}", output.status);
}

/// One second's packets exceed the ring, while it is being copied. Everything stays within the container's memory
/// limit.
fn a_flood_costs_neither_recorder_nor_agent(cluster: &Cluster, db: &KubePod) {
    let loud = recorded(cluster, "loud");
    let agent = cluster.agent_pid();
    let (stop, to) = (AtomicBool::new(false), (db.ip, 9));
    let socket = loud.netns.enter(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            // The other pod has no such port, so some of these sends fail.
            while !stop.load(Ordering::Relaxed) {
                let _ = socket.send_to(&[7; 1400], to);
            }
        });
        let flooded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let full = |packets: &PacketFile| packets.packets.len() as u64 * 1500 > RING * 9 / 10;
            eventually(PATIENCE, || {
                let (packets, told) = past(cluster, &["loud"])?;
                check(full(&packets), || told)
            });
            for _ in 0..5 {
                let (packets, told) = past(cluster, &["loud"]).unwrap();
                assert!(full(&packets), "{told}");
                assert!(fs::metadata(file(cluster)).unwrap().len() <= RING + (1 << 16), "{told}");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        flooded.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    assert_eq!(cluster.agent_pid(), agent);
    what_does_not_fit_is_an_error(cluster);
    let pods = format!("-n {AGENT} get pods -l app.kubernetes.io/component=agent");
    let restarts = r#"jsonpath={.items[*].status.containerStatuses[?(@.name=="recorder")].restartCount}"#;
    assert_eq!(cluster.kubectl(&format!("{pods} -o {restarts}")), "0");
}
