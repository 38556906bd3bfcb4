//! Each kind of NIC that the reference plugins create: its packets are copied, on the node side or inside the pod.

use mirror_tests::{BpfObjects, Cluster, Lab, Netns, check, eventually, has_kind};
use serde_json::Value;

use crate::{EXIT, FEW_READINGS, OWN, PAIR, Site, bridge, device, fetch, over, ping};

const MIRROR: [(&str, &str); 1] = [("podmirror.io/mirror", "true")];

/// Two pods in a network over a veth pair of the node: they talk to each other, and to the machine at its other end.
#[track_caller]
fn a_nic_over_a_cable_is_mirrored_inside_the_pod(story: &str, plugin: &Value) {
    let cluster = &Cluster::new(story);
    let site = &Site::new(cluster);
    site.cable("pmtest0", "10.12.0.9/24");
    site.network("fast", plugin.clone());
    let web = &site.pod("web", &[("fast", "10.12.0.2/24")], &MIRROR);
    let db = &site.pod("db", &[("fast", "10.12.0.3/24")], &[]);
    let status = site.wait_mirrored(&[("eth0", OWN), ("net1", &site.full("fast"))]);
    assert_eq!((status.tap("net1").inside, status.tap(&web.device).inside), (true, false));
    let talk = || {
        ping(&web.netns, "10.12.0.3");
        ping(&db.netns, "10.12.0.2");
        ping(&web.netns, "10.12.0.9");
        ping(&site.far, "10.12.0.2");
        fetch(&db.netns, "10.12.0.2");
        fetch(&web.netns, "10.12.0.3");
        fetch(&site.far, "10.12.0.2");
    };
    site.copied_during(web, &["net1"], talk);
    site.wait_covered(&["net1"], talk);
    assert_eq!(site.reasons(), [""; 0]);
    ends_without_a_trace(site, &["eth0", "lo", "net1"], &web.netns);
}

/// The mirror ends, and nothing of it is left inside the pod.
#[track_caller]
fn ends_without_a_trace(site: &Site<'_>, devices: &[&str], web: &Netns) {
    site.cluster.kubectl("annotate pod web podmirror.io/mirror-");
    site.wait_mirrored(&[]);
    eventually(FEW_READINGS, || {
        let left = web.devices();
        check(left == devices, || format!("{EXIT} may be left inside the pod: {left:?}"))
    });
}

#[test]
fn a_macvlan_is_mirrored_inside_the_pod() {
    a_nic_over_a_cable_is_mirrored_inside_the_pod("macvlan", &over("macvlan", "pmtest0", "bridge"));
}

#[test]
fn an_ipvlan_is_mirrored_inside_the_pod() {
    if has_kind(&Lab::new("kind"), "ipvlan") {
        a_nic_over_a_cable_is_mirrored_inside_the_pod("ipvlan", &over("ipvlan", "pmtest0", "l2"));
    }
}

/// A second bridge of the node, with a second veth of the pod.
#[test]
fn a_second_veth_is_mirrored_at_the_node() {
    let cluster = &Cluster::new("bridge");
    let site = &Site::new(cluster);
    site.network("wide", bridge());
    let web = &site.pod("web", &[("wide", "10.13.0.2/24")], &MIRROR);
    let db = &site.pod("db", &[("wide", "10.13.0.3/24")], &[]);
    let status = site.wait_mirrored(&[("eth0", OWN), ("net1", &site.full("wide"))]);
    assert!(status.taps.iter().all(|tap| !tap.inside && tap.device.starts_with("veth")), "{status:#?}");
    let talk = || {
        ping(&web.netns, "10.13.0.3");
        ping(&db.netns, "10.13.0.2");
        fetch(&db.netns, "10.13.0.2");
        fetch(&web.netns, "10.13.0.3");
    };
    site.copied_during(web, &["net1"], talk);
    site.wait_covered(&["net1"], talk);
    assert_eq!(site.reasons(), [""; 0]);
    ends_without_a_trace(site, &["eth0", "lo", "net1"], &web.netns);
}

/// One end of a veth pair of the node becomes a NIC of the pod: it is tapped at the other end.
#[test]
fn a_device_of_the_node_is_mirrored_at_its_other_end() {
    let cluster = &Cluster::new("device");
    let site = &Site::new(cluster);
    let node = cluster.host().node();
    site.pair(PAIR, "10.14.0.1/24");
    site.network("whole", device(PAIR[1]));
    let web = &site.pod("web", &[("whole", "10.14.0.2/24")], &MIRROR);
    let status = site.wait_mirrored(&[("eth0", OWN), ("net1", &site.full("whole"))]);
    assert!(!status.tap(PAIR[0]).inside, "{status:#?}");
    let talk = || {
        ping(&web.netns, "10.14.0.1");
        ping(node, "10.14.0.2");
        fetch(node, "10.14.0.2");
    };
    site.copied_during(web, &["net1"], talk);
    site.wait_covered(&["net1"], talk);
    site.delete_pods();
    site.wait_mirrored(&[]);
}

/// A device that bypasses the node cannot be distinguished from a veth between containers: it is mirrored only if it is
/// named, inside the pod. When the pod is deleted, the node has its device back, without a program of podmirror.
#[test]
fn a_device_that_leads_past_the_node_is_mirrored_where_it_is_named() {
    let cluster = &Cluster::new("past");
    let site = &Site::new(cluster);
    site.cable("pmtest3", "10.15.0.9/24");
    site.network("past", device("pmtest3"));
    let web = &site.pod("web", &[("past", "10.15.0.2/24")], &MIRROR);
    site.wait_mirrored(&[("eth0", OWN)]);
    assert_eq!(site.reasons(), ["NoHostInterface"]);
    cluster.kubectl("annotate pod web podmirror.io/nics=eth0,net1");
    let status = site.wait_mirrored(&[("eth0", OWN), ("net1", &site.full("past"))]);
    assert!(status.tap("net1").inside, "{status:#?}");
    let talk = || {
        ping(&web.netns, "10.15.0.9");
        ping(&site.far, "10.15.0.2");
        fetch(&site.far, "10.15.0.2");
    };
    site.copied_during(web, &["net1"], talk);
    site.wait_covered(&["net1"], talk);
    let ours = BpfObjects::of(cluster.host());
    site.delete_pods();
    site.wait_mirrored(&[]);
    eventually(FEW_READINGS, || {
        let left = ours.remaining().links;
        check(left.is_empty(), || format!("links at a device that is the node's again: {left:?}"))
    });
}
