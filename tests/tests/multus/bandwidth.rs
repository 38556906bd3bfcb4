//! The plugin `bandwidth` has qdiscs on the node side of a pod's NICs, where podmirror's programs are too.

use std::time::{Duration, Instant};

use mirror_tests::{Capture, Cluster, Frames, KubePod, MIRROR, SOON, check, eventually};
use serde_json::json;

use crate::{FEW_READINGS, OWN, PAGE, Site, bridge, fetch, ip, ping};

/// The plugin's limits: bits per second, and bits of a burst.
const RATE: usize = 400_000;
const BURST: usize = 160_000;

/// A pod with a limit for both of its NICs: for the first by annotations, for the second by Multus' annotation.
struct Scene<'a> {
    site: Site<'a>,
    web: KubePod,
    db: KubePod,
    /// The node sides of both NICs.
    ends: [String; 2],
    /// The qdiscs there, before the pod is mirrored.
    before: Vec<String>,
}

impl<'a> Scene<'a> {
    #[track_caller]
    fn new(cluster: &'a Cluster) -> Self {
        let site = Site::new(cluster);
        let mut plugin = bridge();
        plugin["capabilities"]["bandwidth"] = true.into();
        site.network("slow", plugin);
        let limits =
            json!({ "ingressRate": RATE, "ingressBurst": BURST, "egressRate": RATE, "egressBurst": BURST });
        let slow = json!([{ "name": "slow", "ips": ["10.13.0.2/24"], "bandwidth": limits }]);
        let first =
            ["ingress", "egress"].map(|way| (format!("kubernetes.io/{way}-bandwidth"), "10M".to_owned()));
        let first = first.each_ref().map(|(key, value)| (key.as_str(), value.as_str()));
        let web = site.pod_in("web", &slow, &first);
        let db = site.pod("db", &[("slow", "10.13.0.3/24")], &[]);
        let ends = [web.device.clone(), web.end_of(cluster.host(), "net1")];
        let mut scene = Self { site, web, db, ends, before: Vec::new() };
        scene.before = scene.qdiscs();
        for kind in ["tbf", "ingress"] {
            let count = scene.before.iter().filter(|line| line.contains(&format!("qdisc {kind} "))).count();
            assert_eq!(count, 2, "{kind}: {:#?}", scene.before);
        }
        scene
    }

    /// The qdiscs and the plugin's filters on the node side.
    fn qdiscs(&self) -> Vec<String> {
        let node = self.site.cluster.host().node();
        let of = |end: &String| {
            let qdiscs = node.tc(&format!("qdisc show dev {end}"));
            let filters = node.tc(&format!("filter show dev {end} ingress"));
            [qdiscs, filters].concat()
        };
        let all = self.ends.iter().map(of).collect::<String>();
        let is_ours =
            |line: &&str| line.contains("clsact") || line.contains("tap_") || line.contains(" bpf ");
        // tc shows a filter with the parent of the filter that was added last.
        let shown = |line: &str| line.replace(" parent ffff: ", " ");
        all.lines().filter(|line| !is_ours(line)).map(shown).collect()
    }

    /// In both directions, the page takes at least as long as the plugin's limit implies.
    #[track_caller]
    fn is_limited(&self) {
        let least = Duration::from_secs_f64((PAGE * 8 - BURST) as f64 / RATE as f64);
        for (from, to) in [(&self.db, "10.13.0.2"), (&self.web, "10.13.0.3")] {
            let begun = Instant::now();
            fetch(&from.netns, to);
            assert!(begun.elapsed() > least, "{to} in {:?}, and not in {least:?}", begun.elapsed());
        }
    }

    /// Packets to the pod exceed the plugin's limit. The mirror interface shows all of them, and the pod's answers.
    #[track_caller]
    fn what_is_dropped_is_copied(&self) {
        const SENT: usize = 100;
        let Self { site, web, db, .. } = self;
        let inside = Capture::start(&web.netns, "net1");
        let mirror = Capture::start(site.cluster.host().node(), MIRROR);
        db.netns.try_run(&format!("ping -q -n -i 0.002 -c {SENT} -s 1400 -W 1 10.13.0.2"));
        let kind = |frames: Frames, kind: u8| frames.ipv4().only(|frame| frame[23] == 1 && frame[34] == kind);
        let (request, answer) = (8, 0);
        eventually(SOON, || {
            kind(mirror.frames(), answer).same_as(&kind(inside.frames(), answer))?;
            let [shown, received] = [&mirror, &inside].map(|capture| kind(capture.frames(), request));
            let is_right = shown.len() == SENT && received.len() < SENT && received.less(&shown).is_empty();
            check(is_right, || format!("{} of {SENT} shown, {} received", shown.len(), received.len()))
        });
    }
}

/// podmirror's programs run before the plugin's qdiscs: they see the packets from and to the pod before the plugin
/// delays or drops any. The plugin works as without them.
#[test]
fn a_limit_of_the_plugin_holds_under_a_mirror_and_after_it() {
    let cluster = &Cluster::new("bandwidth");
    let scene = &Scene::new(cluster);
    let Scene { site, web, db, .. } = scene;
    scene.is_limited();
    cluster.kubectl("annotate pod web podmirror.io/mirror=true");
    let slow = site.full("slow");
    site.wait_mirrored(&[("eth0", OWN), ("net1", &slow)]);
    assert_eq!(scene.qdiscs(), scene.before);
    let talk = || {
        ping(&db.netns, &web.ip.to_string());
        fetch(&db.netns, &web.ip.to_string());
        fetch(&web.netns, &db.ip.to_string());
        // Fewer packets than the plugin's burst.
        db.netns.ping_every(Duration::from_millis(2), ip("10.13.0.2"), 10, 56);
    };
    site.copied_during(web, &["eth0", "net1"], talk);
    site.wait_covered(&["eth0", "net1"], talk);
    scene.is_limited();
    scene.what_is_dropped_is_copied();
    assert_eq!(site.reasons(), [""; 0]);
    cluster.uninstall();
    cluster.has_left_nothing();
    assert_eq!(scene.qdiscs(), scene.before);
    scene.is_limited();
}

/// The agent's filter runs after the plugin's, and an `ingress` qdisc has no hook for packets to the pod: the status
/// says so, and the plugin works.
#[test]
fn filters_of_ours_are_told_to_be_hidden_by_the_plugin() {
    let cluster = &Cluster::new("clsact");
    let scene = &Scene::new(cluster);
    cluster.install_with("--attach=clsact");
    cluster.kubectl("annotate pod web podmirror.io/mirror=true");
    // Both directions of both NICs are reported.
    eventually(FEW_READINGS, || {
        let reasons = scene.site.reasons();
        check(reasons == ["Hidden"; 4], || format!("{reasons:?}"))
    });
    assert_eq!(scene.qdiscs(), scene.before);
    scene.is_limited();
    cluster.uninstall();
    cluster.has_left_nothing();
    assert_eq!(scene.qdiscs(), scene.before);
    scene.is_limited();
}
