//! The plugin `bandwidth` has qdiscs at the node's ends of a pod's NICs, where our programs are too.

use std::time::{Duration, Instant};

use mirror_tests::{AttachMode, Capture, Cluster, Frames, KubePod, MIRROR, SOON, check, eventually};
use serde_json::json;

use crate::{FEW_READINGS, OWN, PAGE, Site, bridge, fetch, ip, ping};

/// What the plugin lets through: bits a second, and bits at once.
const RATE: usize = 400_000;
const BURST: usize = 160_000;

/// A pod with a limit for both of its NICs: for the first by annotations, for the second by Multus' annotation.
struct Scene<'a> {
    site: Site<'a>,
    web: KubePod,
    db: KubePod,
    /// The node's ends of both NICs.
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

    /// The qdiscs and the plugin's filters at the node's ends.
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
        // A filter is shown with the parent of the last one that came.
        let shown = |line: &str| line.replace(" parent ffff: ", " ");
        all.lines().filter(|line| !is_ours(line)).map(shown).collect()
    }

    /// In both directions, the page takes at least as long as the plugin's limit says.
    #[track_caller]
    fn is_limited(&self) {
        let least = Duration::from_secs_f64((PAGE * 8 - BURST) as f64 / RATE as f64);
        for (from, to) in [(&self.db, "10.13.0.2"), (&self.web, "10.13.0.3")] {
            let begun = Instant::now();
            fetch(&from.netns, to);
            assert!(begun.elapsed() > least, "{to} in {:?}, and not in {least:?}", begun.elapsed());
        }
    }

    /// More than the plugin lets through goes to the pod. The mirror interface shows all of it, and what the pod answers.
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

/// Our programs are ahead of the plugin's qdiscs: they see what the pod sends, and what is sent to it, before the plugin
/// delays or drops any of it. They change nothing for the plugin.
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
        // Fewer than the plugin lets through at once.
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

/// A filter of ours is behind the plugin's, and at an `ingress` qdisc there is no hook for what reaches the pod: the status
/// says so, and the plugin works.
#[test]
fn filters_of_ours_are_told_to_be_hidden_by_the_plugin() {
    let cluster = &Cluster::new("clsact");
    let scene = &Scene::new(cluster);
    cluster.install_attaching(AttachMode::Clsact);
    cluster.kubectl("annotate pod web podmirror.io/mirror=true");
    // Both directions of both NICs.
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
