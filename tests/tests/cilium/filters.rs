//! Our agent with `--attach clsact`: it sees what it can, and says what it cannot.

use mirror_tests::{AttachMode, Cluster, Settings};

use crate::Scene;

/// Behind Cilium's TCX programs a filter at the node's end sees next to nothing, and the status says which program is in
/// the way. What reaches the pod is seen by a filter inside the pod.
#[test]
fn behind_ciliums_links_our_filters_are_told_to_be_hidden() {
    let cluster = &Cluster::new("hidden");
    cluster.install_attaching(AttachMode::Clsact);
    let scene = &Scene::new(cluster, Settings::default());
    let coverage = scene.wait_states(["Covered", "Hidden"]);
    let words = coverage["egress"]["message"].as_str().unwrap();
    assert!(words.contains("cil_from_contai"), "{coverage}");
    assert_eq!(scene.reasons(), ["Hidden"]);
}

/// Beside Cilium's filters ours see what leaves the pod, and inside the pod what reaches it.
#[test]
fn beside_ciliums_filters_ours_see_all() {
    let cluster = &Cluster::new("beside");
    cluster.install_attaching(AttachMode::Clsact);
    let scene = &Scene::new(cluster, Settings { tcx: false, ..Settings::default() });
    scene.wait_states(["Covered", "Covered"]);
    assert_eq!(scene.reasons(), [""; 0]);
}
