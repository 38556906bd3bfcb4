//! Pods with the annotation are mirrored, and no other pods.

use std::fs;

use mirror_tests::{
    AGENT, Capture, Cluster, Comparison, Frames, MIRROR, SOON, check, eventually, list, pod_object,
};
use serde_json::json;

#[test]
fn an_annotated_pod_is_mirrored_and_no_other() {
    let cluster = &Cluster::new("annotated");
    let host = cluster.host();
    let server = "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www";
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "db" },
        "spec": { "selector": { "app": "db" }, "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    cluster.apply(&list(&[pod_object("web", "exec sleep 3600"), pod_object("db", server), service]));
    let (web, db) = (&cluster.running("web"), &cluster.running("db"));
    let address = cluster.kubectl("get service db -o jsonpath={.spec.clusterIP}");
    let fetch = format!("exec web -- timeout 5 wget -q -O - http://{address}/");
    // kube-proxy learns the service's pod some time later.
    eventually(SOON, || cluster.try_kubectl(&fetch).map(drop));
    host.wait_taps(&[]);

    cluster.kubectl("annotate pod web podmirror.io/mirror=true");
    host.wait_taps(&[&web.device]);
    let comparison = Comparison::of(&web.netns, host);
    let node = cluster.address();
    cluster.kubectl(&format!("exec web -- ping -c 3 {}", db.ip));
    assert_eq!(cluster.kubectl(&fetch), "hello\n");
    web.ping(node, 3);
    db.ping(web.ip, 3);
    // Traffic of the other pod only.
    db.ping(node, 20);
    let frames = comparison.is_equal();
    assert!(frames.len() >= 18 + 6, "9 pings and a connection: {frames}");
    let told = cluster.kubectl(&format!("-n {AGENT} exec daemonset/{AGENT} -- /mirror-agent status -o json"));
    let told: mirror_tests::Status = serde_json::from_str(&told).unwrap();
    let tap = told.tap(&web.device);
    let pod = tap.pod.as_ref().unwrap();
    assert_eq!([&pod.uid, &pod.namespace, &pod.name], [&web.uid, cluster.namespace(), "web"]);
    assert!(told.agent_running && tap.total("copied") >= frames.len() as u64, "{tap:#?}");
    // The bridge can send a port's own multicasts back to it (`hairpinMode`).
    assert_eq!(tap.seen(), tap.total("copied") + tap.total("duplicate"), "{tap:#?}");

    cluster.kubectl("annotate pod web podmirror.io/mirror-");
    host.wait_taps(&[]);
    let mirror = Capture::start(host.node(), MIRROR);
    web.ping(db.ip, 5);
    assert_eq!(mirror.stop(), Frames::default());
    let links: Vec<_> =
        host.pins().into_iter().filter(|pin| pin.starts_with(host.bpffs().join("podmirror"))).collect();
    let links: Vec<_> = links.iter().filter(|pin| pin.parent().unwrap().ends_with("links")).collect();
    assert!(links.is_empty(), "{links:?}");
}

#[test]
fn the_first_packet_of_a_new_pod_is_mirrored() {
    const PODS: usize = 4;
    let cluster = &Cluster::new("first");
    let host = cluster.host();
    // The mirror interface is created with the first tap, so one tap must exist.
    let [early] = cluster.pods([("early", Some("true"))]);
    host.wait_taps(&[&early.device]);
    cluster.kubectl("delete pod early");
    host.wait_taps(&[]);

    let mirror = Capture::start(host.node(), MIRROR);
    let pods: [_; PODS] = std::array::from_fn(|number| {
        // The pod's first packet is recognised by its size.
        let shell = format!("ping -c 1 -s {} {}; exec sleep 3600", 100 + number, cluster.address());
        let mut object = pod_object(&format!("new{number}"), &shell);
        object["metadata"]["annotations"]["podmirror.io/mirror"] = "egress".into();
        object
    });
    cluster.apply(&list(&pods));
    for number in 0..PODS {
        let pod = cluster.running(&format!("new{number}"));
        // The kernel's count of the pod's sent packets, independent of any tap.
        let sent = eventually(SOON, || {
            let sent = ipv4_sent(&pod);
            check(sent > 0, || "it has not sent anything yet".into()).map(|()| sent)
        });
        let frames = eventually(SOON, || {
            let from_pod = mirror.frames().ipv4().only(|frame| frame[6..12] == pod.mac());
            check(from_pod.len() == sent, || format!("of {sent} packets of {}: {from_pod}", pod.name))?;
            Ok(from_pod)
        });
        let is_first = |frame: &[u8]| frame.len() == 14 + 20 + 8 + 100 + number;
        assert_eq!(frames.only(is_first).len(), 1, "{frames}");
    }
}

/// The number of IPv4 packets that have left a pod, by the kernel's counter.
fn ipv4_sent(pod: &mirror_tests::KubePod) -> usize {
    let text = pod.netns.enter(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap();
    // One line with names, and one with values.
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: ").map(|line| line.split(' ')));
    let mut fields = lines.next().unwrap().zip(lines.next().unwrap());
    fields.find(|(name, _)| *name == "OutRequests").unwrap().1.parse().unwrap()
}

#[test]
fn the_agent_has_the_rights_that_it_says_and_no_other() {
    let cluster = Cluster::new("rights");
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.agent_pid().unwrap())).unwrap();
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.unwrap().trim().to_owned()
    };
    // NET_ADMIN, SYS_PTRACE and SYS_ADMIN.
    let rights = format!("{:016x}", 1_u64 << 12 | 1 << 19 | 1 << 21);
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(value(set), rights, "{set}");
    }
    assert_eq!((value("NoNewPrivs").as_str(), value("Seccomp").as_str()), ("1", "2"), "2: by a filter");
}
