//! Each path of packets to and from a pod, in each of Cilium's modes.

use std::{net::IpAddr, time::Duration};

use mirror_tests::{Capture, Cluster, Frames, MIRROR, Netns, SOON, Settings, check, eventually};

use crate::{FEW_READINGS, Scene, by_direction, fetch};

/// Pings per path.
const PINGS: usize = 5;

fn ping(inside: &Netns, to: IpAddr) {
    inside.ping_every(Duration::from_millis(5), to, PINGS, 56);
}

/// The name of a path, and a function that sends packets there and back.
type Path = (&'static str, fn(&Scene<'_>));

/// The paths of pings.
const PINGED: [Path; 6] = [
    ("web to db", |scene| ping(&scene.web.netns, scene.db.ip)),
    ("db to web", |scene| ping(&scene.db.netns, scene.web.ip)),
    ("web to node", |scene| ping(&scene.web.netns, scene.edge())),
    ("node to web", |scene| ping(scene.cluster.host().node(), scene.web.ip)),
    ("web to outside", |scene| ping(&scene.web.netns, scene.far())),
    ("outside to web", |scene| ping(&scene.outside, scene.web.ip)),
];

/// The paths of connections.
const CONNECTED: [Path; 6] = [
    ("db to web", |scene| scene.fetch_in("db", scene.web.ip)),
    ("db to the service of web", |scene| scene.fetch_in("db", scene.service("web"))),
    ("web to the service of db", |scene| scene.fetch_in("web", scene.service("db"))),
    ("node to web", |scene| fetch(scene.cluster.host().node(), scene.web.ip, 80)),
    ("node to the service of web", |scene| fetch(scene.cluster.host().node(), scene.service("web"), 80)),
    ("outside to the node's port of web", |scene| fetch(&scene.outside, scene.edge(), scene.node_port)),
];

/// All twelve paths are complete. The mirror interface shows the same as the pod's own NIC, and the status says so.
#[track_caller]
fn each_path_is_copied(story: &str, settings: Settings) {
    let cluster = &Cluster::new(story);
    let host = cluster.host();
    let scene = &Scene::new(cluster, settings);
    for (path, act) in PINGED {
        let frames = scene.copied_during(|| act(scene));
        assert_eq!(by_direction(&scene.web, &frames), [PINGS; 2], "{path}: {frames}");
    }
    for (path, act) in CONNECTED {
        let frames = scene.copied_during(|| act(scene));
        let [sent, received] = by_direction(&scene.web, &frames);
        assert!(sent >= 3 && received >= 3, "{path}: {frames}");
    }
    scene.is_covered();
    let status = host.wait_taps(&[&scene.web.device]);
    let tap = status.tap(&scene.web.device);
    assert_eq!(tap.seen(), tap.total("copied"), "{tap:#?}");
    // Cilium's programs do not reveal its mode, so ingress is tapped on the pod side in every mode.
    assert!(tap.pod_side.is_some(), "{tap:#?}");

    cluster.kubectl("annotate pod web podmirror.io/mirror-");
    host.wait_taps(&[]);
    let mirror = Capture::start(host.node(), MIRROR);
    ping(&scene.db.netns, scene.web.ip);
    assert_eq!(mirror.stop(), Frames::default());
    eventually(FEW_READINGS, || {
        let devices = scene.web.netns.devices();
        check(devices == ["eth0", "lo"], || format!("something is left inside the pod: {devices:?}"))
    });
}

#[test]
fn with_ebpf_host_routing_each_path_is_copied() {
    each_path_is_copied("ebpf", Settings::default());
}

#[test]
fn with_endpoint_routes_each_path_is_copied() {
    each_path_is_copied("routes", Settings { endpoint_routes: true, ..Settings::default() });
}

#[test]
fn with_legacy_host_routing_each_path_is_copied() {
    each_path_is_copied("legacy", Settings { legacy_host_routing: true, ..Settings::default() });
}

#[test]
fn with_ciliums_filters_each_path_is_copied() {
    each_path_is_copied("filters", Settings { tcx: false, ..Settings::default() });
}

#[test]
fn with_ciliums_filters_and_endpoint_routes_each_path_is_copied() {
    each_path_is_copied("both", Settings { tcx: false, endpoint_routes: true, ..Settings::default() });
}

/// A packet between two mirrored pods is copied once, when it leaves the first pod.
#[test]
fn a_packet_between_two_mirrored_pods_is_copied_once() {
    let cluster = &Cluster::new("two");
    let host = cluster.host();
    let scene = &Scene::new(cluster, Settings::default());
    cluster.kubectl("annotate pod db podmirror.io/mirror=true");
    host.wait_taps(&[&scene.web.device, &scene.db.device]);
    let inside = [&scene.web, &scene.db].map(|pod| Capture::start(&pod.netns, "eth0"));
    let mirror = Capture::start(host.node(), MIRROR);
    ping(&scene.web.netns, scene.db.ip);
    ping(&scene.db.netns, scene.web.ip);
    scene.fetch_in("web", scene.service("db"));
    scene.fetch_in("db", scene.service("web"));
    eventually(SOON, || {
        let [of_web, of_db] = [(&inside[0], &scene.web), (&inside[1], &scene.db)].map(|(capture, pod)| {
            let mac = pod.mac();
            capture.frames().ipv4().only(|frame| frame[6..12] == mac)
        });
        mirror.frames().ipv4().same_as(&of_web.and(&of_db))
    });
}

/// Cilium writes its ARP reply into the packet of the request. Both are copied.
#[test]
fn an_answer_that_cilium_writes_into_the_question_is_copied() {
    let cluster = &Cluster::new("arp");
    let scene = &Scene::new(cluster, Settings::default());
    let netns = &scene.web.netns;
    netns.keep_neighbours("eth0");
    let is_arp = |frame: &[u8]| frame[12..14] == [0x08, 0x06];
    let inside = Capture::start(netns, "eth0");
    let mirror = Capture::start(cluster.host().node(), MIRROR);
    netns.ip("neighbour flush dev eth0");
    ping(netns, scene.db.ip);
    eventually(SOON, || {
        let asked = inside.frames().only(is_arp);
        check(by_direction(&scene.web, &asked) == [1, 1], || format!("{asked}"))?;
        mirror.frames().only(is_arp).same_as(&asked)
    });
}

/// A CNI is recognised when the tap is new. After a change of its mode under a mirrored pod, everything is copied as
/// before. Packets during the change are not compared.
#[test]
fn after_a_change_of_mode_under_a_mirrored_pod_each_path_is_copied() {
    let cluster = &Cluster::new("changes");
    let scene = &Scene::new(cluster, Settings { legacy_host_routing: true, ..Settings::default() });
    for settings in [Settings::default(), Settings { tcx: false, ..Settings::default() }, Settings::default()]
    {
        cluster.cilium_runs_with(settings);
        for (path, act) in PINGED {
            let frames = scene.copied_during(|| act(scene));
            assert_eq!(by_direction(&scene.web, &frames), [PINGS; 2], "{settings:?}, {path}: {frames}");
        }
    }
    scene.is_covered();
}
