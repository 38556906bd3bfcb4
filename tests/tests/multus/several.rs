//! A pod with NICs of several kinds at once: which of them are mirrored, and that nothing is left of it.

use mirror_tests::{BpfObjects, Capture, Cluster, Frames, KubePod, MIRROR, check, eventually};

use crate::{FEW_READINGS, OWN, PAIR, Site, bridge, device, fetch, over, ping};

/// A pod with a macvlan, a veth to a second bridge, and a veth of the node, in addition to its first NIC.
struct Scene<'a> {
    site: Site<'a>,
    web: KubePod,
    db: KubePod,
}

impl<'a> Scene<'a> {
    #[track_caller]
    fn new(cluster: &'a Cluster) -> Self {
        let site = Site::new(cluster);
        site.cable("pmtest0", "10.12.0.9/24");
        site.pair(PAIR, "10.14.0.1/24");
        site.network("fast", over("macvlan", "pmtest0", "bridge"));
        site.network("wide", bridge());
        site.network("whole", device(PAIR[1]));
        let networks = [("fast", "10.12.0.2/24"), ("wide", "10.13.0.2/24"), ("whole", "10.14.0.2/24")];
        let web = site.pod("web", &networks, &[]);
        let db = site.pod("db", &[("fast", "10.12.0.3/24"), ("wide", "10.13.0.3/24")], &[]);
        Self { site, web, db }
    }

    /// Sends packets over each of the NICs, in both directions.
    fn talk(&self) {
        let Self { site, web, db } = self;
        let node = site.cluster.host().node();
        ping(&db.netns, &web.ip.to_string());
        fetch(&db.netns, &web.ip.to_string());
        for (to, from, back) in [
            ("10.12.0.9", &site.far, "10.12.0.2"),
            ("10.13.0.3", &db.netns, "10.13.0.2"),
            ("10.14.0.1", node, "10.14.0.2"),
        ] {
            ping(&web.netns, to);
            ping(from, back);
            fetch(from, back);
        }
    }

    /// Annotates `web`, and waits until these NICs are mirrored. Of the packets sent then, the mirror interface shows
    /// exactly those of these NICs.
    #[track_caller]
    fn mirrors(&self, annotations: &str, nics: &[&str]) {
        let Self { site, web, .. } = self;
        site.cluster.kubectl(&format!("annotate --overwrite pod web {annotations}"));
        let [fast, wide, whole] = ["fast", "wide", "whole"].map(|network| site.full(network));
        let all = [("eth0", OWN), ("net1", &*fast), ("net2", &*wide), ("net3", &*whole)];
        let expected: Vec<_> = all.into_iter().filter(|(nic, _)| nics.contains(nic)).collect();
        site.wait_mirrored(&expected);
        site.copied_during(web, nics, || self.talk());
    }
}

#[test]
fn all_nics_of_a_pod_are_mirrored_or_those_that_are_named() {
    let cluster = &Cluster::new("several");
    cluster.install_with("--kube-ovn-annotations");
    let host = cluster.host();
    let scene = &Scene::new(cluster);
    let Scene { site, web, .. } = scene;
    let all = ["eth0", "net1", "net2", "net3"];
    scene.mirrors("podmirror.io/mirror=true", &all);
    site.wait_covered(&all, || scene.talk());
    scene.mirrors("podmirror.io/nics=net1", &["net1"]);
    scene.mirrors("podmirror.io/nics=net3,net2", &["net2", "net3"]);
    // Kube-OVN's annotations name networks, and Multus' annotation assigns NICs to them.
    let attachment = |network: &str, value: &str| {
        format!("{network}.{}.ovn.kubernetes.io/mirror={value}", cluster.namespace())
    };
    scene.mirrors(
        &format!("podmirror.io/mirror- podmirror.io/nics- {}", attachment("fast", "true")),
        &["net1"],
    );
    scene.mirrors(&attachment("whole", "true"), &["net1", "net3"]);
    scene.mirrors(
        &format!("ovn.kubernetes.io/mirror=true {}", attachment("fast", "false")),
        &["eth0", "net2", "net3"],
    );
    assert_eq!(site.reasons(), [""; 0]);

    // Deletes the pod, then the agent.
    let ours = BpfObjects::of(host);
    site.delete_pods();
    site.wait_mirrored(&[]);
    let mirror = Capture::start(host.node(), MIRROR);
    ping(host.node(), "10.14.0.1");
    assert_eq!(mirror.stop(), Frames::default());
    cluster.uninstall();
    host.cleanup();
    cluster.has_left_nothing();
    eventually(FEW_READINGS, || {
        let left = ours.remaining();
        check(left == BpfObjects::default(), || format!("{left:?}"))
    });
    let devices = host.devices();
    assert!(!devices.iter().any(|device| device.starts_with("podmirror-hub")), "{devices:?}");
    assert!(web.device.starts_with("veth") && !devices.contains(&web.device), "{devices:?}");
}
