//! A pod that is mirrored from its first packet.

use std::fs;

use mirror_tests::{Capture, Cluster, KubePod, MIRROR, SOON, Settings, check, eventually, pod_object};

use crate::by_direction;

/// Cilium is recognised before the pod's first packet: the mirror interface shows as many packets as the pod's kernel
/// has counted, in both directions.
#[test]
fn the_first_packets_of_a_new_pod_are_copied() {
    let cluster = &Cluster::new("first");
    cluster.cilium_runs_with(Settings::default());
    let host = cluster.host();
    let [db] = &cluster.pods([("db", None)]);
    for number in 0..4 {
        // The pod's first packet is recognised by its size.
        let name = format!("new{number}");
        let mut object =
            pod_object(&name, &format!("ping -c 1 -s 100 {} && touch /done; exec sleep 3600", db.ip));
        object["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
        let mirror = Capture::start(host.node(), MIRROR);
        cluster.apply(&object);
        let pod = cluster.running(&name);
        eventually(SOON, || cluster.try_kubectl(&format!("exec {name} -- ls /done")).map(drop));
        eventually(SOON, || {
            let mac = pod.mac();
            let own = mirror.frames().ipv4().only(|frame| frame[..6] == mac || frame[6..12] == mac);
            let (shown, counted) = (by_direction(&pod, &own), counted(&pod));
            check(shown == counted && counted[0] > 0, || format!("of {counted:?} packets of {name}: {own}"))?;
            let of_first = own.only(|frame| frame.len() == 14 + 20 + 8 + 100);
            check(of_first.len() == 2, || format!("the first ping and its answer: {own}"))
        });
    }
}

/// The IPv4 packets that a pod has sent and received, by the kernel's counters.
fn counted(pod: &KubePod) -> [usize; 2] {
    let text = pod.netns.enter(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap();
    // One line with names, and one with values.
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: ").map(|line| line.split(' ')));
    let fields: Vec<_> = lines.next().unwrap().zip(lines.next().unwrap()).collect();
    ["OutRequests", "InReceives"]
        .map(|wanted| fields.iter().find(|(name, _)| *name == wanted).unwrap().1.parse().unwrap())
}
