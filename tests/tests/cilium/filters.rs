//! The agent with `--attach clsact`: it sees what it can, and reports what it cannot see.

use mirror_tests::{Cluster, Settings};

use crate::Scene;

/// After Cilium's TCX programs a filter on the node side sees almost nothing, and the status names the hiding program.
/// Packets to the pod are seen by a filter inside the pod.
#[test]
fn behind_ciliums_links_our_filters_are_told_to_be_hidden() {
    let cluster = &Cluster::new("hidden");
    cluster.install_with("--attach=clsact");
    let scene = &Scene::new(cluster, Settings::default());
    let coverage = scene.wait_states(["Covered", "Hidden"]);
    let words = coverage["egress"]["message"].as_str().unwrap();
    assert!(words.contains("cil_from_contai"), "{coverage}");
    assert_eq!(scene.reasons(), ["Hidden"]);
}

/// Beside Cilium's filters the agent's filters see the pod's egress, and inside the pod its ingress.
#[test]
fn beside_ciliums_filters_ours_see_all() {
    let cluster = &Cluster::new("beside");
    cluster.install_with("--attach=clsact");
    let scene = &Scene::new(cluster, Settings { tcx: false, ..Settings::default() });
    scene.wait_states(["Covered", "Covered"]);
    assert_eq!(scene.reasons(), [""; 0]);
}
