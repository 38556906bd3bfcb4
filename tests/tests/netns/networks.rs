//! The networks of a pod's NICs: Kube-OVN's annotations of attachments, and the names that people read.

use std::collections::BTreeMap;

use mirror_tests::{Agent, Capture, Lab, PodNs, PodSpec, PodsFile, SOON, Status, Tail, check, eventually};
use serde_json::json;

use crate::{MIRROR, Node, any_mode, shows};

const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const KUBE_OVN_FLAG: &str = "--kube-ovn-annotations";
const FAST: &str = "fast.shop.ovn.kubernetes.io/mirror";

/// Two pods with two NICs each, on two networks.
struct Networks {
    web: PodNs,
    db: PodNs,
    lab: Lab,
}

impl Networks {
    fn new(story: &str) -> Self {
        let Node { mut web, mut db, lab } = Node::bridged(story);
        lab.bridge("br1");
        web.add_nic(&lab, "br1");
        db.add_nic(&lab, "br1");
        Self { web, db, lab }
    }

    /// The node sides of the NICs of the pod `web`.
    fn hosts(&self) -> [&str; 2] {
        [0, 1].map(|nic: usize| self.web.nics()[nic].host.as_str())
    }

    /// Sends echo requests from each NIC, and receives the answers.
    fn ping(&self, count: usize) {
        let Self { web, db, .. } = self;
        web.ping(db.v4(), count, 56);
        web.ping(db.nics()[1].v4.into(), count, 56);
    }
}

/// The pod with the annotation in Multus' format, for a second NIC in this network.
fn with_network(spec: PodSpec, network: &str) -> PodSpec {
    let status = json!([
        {"name": "kube-ovn", "interface": "eth0", "ips": ["10.0.0.1"], "default": true, "dns": {}},
        {"name": network, "interface": "eth1", "ips": ["10.0.1.3"], "mac": "02:00:00:00:00:03", "dns": {}},
    ]);
    spec.annotated(NETWORK_STATUS, &status.to_string())
}

/// Waits until the agent reports exactly these reasons why something is not mirrored.
#[track_caller]
fn wait_reasons(lab: &Lab, expected: &[&str]) -> Status {
    lab.wait_status(|status| {
        let notes = status.notes.as_ref().ok_or("no agent")?;
        let reasons = notes["not_mirrored"].as_array().into_iter().flatten();
        let reasons: Vec<_> = reasons.filter_map(|of| of["reason"].as_str()).collect();
        check(reasons == expected, || format!("{reasons:?}"))
    })
}

/// The pod requests a mirror of its attachment. Multus names the attachment's NIC a moment after the pod was created.
#[test]
fn an_attachment_is_mirrored_alone() {
    let scene = Networks::new("attachment");
    let Networks { web, lab, .. } = &scene;
    let [_, second] = scene.hosts();
    let asked = || PodSpec::of(web).annotated(FAST, "true");
    let pods = PodsFile::new(lab, &[asked()]);
    let agent = Agent::run(lab, any_mode(), &pods, &[KUBE_OVN_FLAG]);
    lab.wait_taps(&[]);
    wait_reasons(lab, &["NoSuchNetwork"]);
    agent.wait_for_log(&["not mirrored yet", FAST, NETWORK_STATUS]);

    pods.write(&[with_network(asked(), "shop/fast")]);
    let status = lab.wait_taps(&[second]);
    let tap = status.tap(second);
    assert_eq!((tap.nic.as_str(), tap.network.as_deref()), ("eth1", Some("shop/fast")));
    assert_eq!((tap.direction.as_str(), tap.origin.as_str()), ("both", "annotation"));
    wait_reasons(lab, &[]);
    let (mirror, inside) = (Capture::start(lab.node(), MIRROR), Capture::start(web.netns(), "eth1"));
    let other = Capture::start(web.netns(), "eth0");
    scene.ping(9);
    shows(&mirror, || inside.frames());
    let (inside, mirror, other) = (inside.stop(), mirror.stop(), other.stop());
    mirror.same_as(&inside).unwrap();
    assert!(inside.len() >= 18 && other.len() >= 18, "both NICs have sent");
    let sent = inside.only(|frame| frame[6..12] == web.nics()[1].mac).len() as u64;
    let counted = BTreeMap::from([
        ("egress copied".to_owned(), sent),
        ("ingress copied".to_owned(), inside.len() as u64 - sent),
    ]);
    assert_eq!(lab.status().tap(second).verdicts(), counted);

    let table = lab.agent_exit(&["status"]).stdout;
    assert!(table.contains(" NETWORK ") && table.contains(" shop/fast "), "{table}");
    let info = "podmirror_nic_info{namespace=\"default\",network=\"shop/fast\",nic=\"eth1\",pod=\"web\"}";
    assert_eq!(lab.metrics().get(info), Some(&1.0));

    // Multus assigns another network to the NIC.
    pods.write(&[with_network(asked(), "shop/slow")]);
    lab.wait_taps(&[]);
    wait_reasons(lab, &["NoSuchNetwork"]);
    agent.wait_for_log(&["not mirrored", FAST, "for no NIC of the pod"]);
    agent.stop();
    lab.cleanup();
    assert!(lab.pins().is_empty() && !lab.devices().contains(&MIRROR.to_owned()), "{:?}", lab.pins());
}

/// The network's name is for people. It does not affect copies and counters, and stays known without an agent.
#[test]
fn a_network_with_a_new_name_keeps_its_mirror() {
    let scene = Networks::new("networks");
    let Networks { web, lab, .. } = &scene;
    let hosts = scene.hosts();
    let named = |network: &str| [with_network(PodSpec::of(web).mirror("true"), network)];
    let pods = PodsFile::new(lab, &named("shop/fast"));
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_taps(&hosts);
    let tail = Tail::start(lab, &["tail", "--pod", "default/web"]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let inside = ["eth0", "eth1"].map(|nic| Capture::start(web.netns(), nic));
    let wait_networks = |expected: [Option<&str>; 2]| {
        lab.wait_status(|status| {
            let networks = hosts.map(|host| status.tap(host).network.as_deref());
            check(networks == expected, || format!("{networks:?}"))
        })
    };
    wait_networks([Some("kube-ovn"), Some("shop/fast")]);
    scene.ping(5);
    pods.write(&named("shop/quick"));
    wait_networks([Some("kube-ovn"), Some("shop/quick")]);
    scene.ping(5);
    let all = || inside[0].frames().and(&inside[1].frames());
    shows(&mirror, all);
    let seen = all().len() as u64;
    let status = lab.status();
    assert_eq!(hosts.map(|host| status.tap(host).seen()).iter().sum::<u64>(), seen, "the counters went on");
    eventually(SOON, || tail.file().all_frames().same_as(&all()));
    let file = tail.stop();
    let described: BTreeMap<_, _> = file.interfaces.iter().zip(&file.descriptions).collect();
    for (nic, network, host) in [("eth0", "kube-ovn", hosts[0]), ("eth1", "shop/fast", hosts[1])] {
        let description = described[&format!("default/web {nic}")];
        assert_eq!(*description, format!("device {host} of the node, network {network}"));
    }

    // An unreadable annotation provides no names, and ends no mirror.
    pods.write(&[PodSpec::of(web).mirror("true").annotated(NETWORK_STATUS, "[{")]);
    wait_networks([None, None]);
    agent.wait_for_log(&["WARN", NETWORK_STATUS, "it is not a JSON list (line 1, column 2); it is ignored"]);
    pods.write(&named("shop/quick"));
    wait_networks([Some("kube-ovn"), Some("shop/quick")]);
    agent.stop();
    let status = lab.status();
    assert!(!status.agent_running);
    assert_eq!(status.tap(hosts[1]).network.as_deref(), Some("shop/quick"));
    assert_eq!(hosts.map(|host| status.tap(host).sessions.len()), [1, 1]);
}

/// A macvlan: nothing changes on the node when it is plugged in.
#[test]
fn a_nic_that_multus_names_is_looked_for_at_once() {
    let lab = Lab::new("plugged");
    lab.bridge("br0");
    for line in ["add up0 type veth peer name up1", "set up0 up", "set up1 up"] {
        lab.node().ip(&format!("link {line}"));
    }
    let mut web = lab.pod("web", "br0");
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true")]);
    let agent = Agent::run_until(&lab, any_mode(), &pods, &[], &[&web]);
    web.add_nic_over(&lab, "macvlan mode bridge", "up0");
    let of_web = || with_network(PodSpec::of(&web).mirror("true"), "shop/fast");
    pods.write(&[of_web()]);
    let status = lab.wait_taps(&[web.veth_host(), "eth1"]);
    assert_eq!(status.tap("eth1").network.as_deref(), Some("shop/fast"));
    wait_reasons(&lab, &[]);

    // A NIC that the annotation names but that does not exist is reported.
    let absent = serde_json::json!([{"name": "shop/slow", "interface": "net9"}]).to_string();
    pods.write(&[PodSpec::of(&web).mirror("true").annotated(NETWORK_STATUS, &absent)]);
    wait_reasons(&lab, &["NoSuchNic"]);
    agent.stop();
}
