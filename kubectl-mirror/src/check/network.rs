//! Detects the CNI of a cluster from the names of DaemonSets, and describes its coverage. Pure.
//!
//! The sentences must agree with the table in docs/support.md.

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt as _;

const VETH: &str = "packets from and to pods are seen (by design, not tested)";
const CILIUM: &str =
    "packets from and to pods are seen; with eBPF host routing, packets to pods are tapped inside the pod";
const CALICO: &str = "packets from and to pods are seen (by design, not tested); with the eBPF dataplane, packets to \
                      pods are tapped inside the pod";

/// The CNIs, by a word in the name of their DaemonSet, and what podmirror sees with them.
const NETWORKS: [(&str, &str); 8] = [
    ("antrea", VETH),
    ("calico", CALICO),
    ("canal", VETH),
    ("cilium", CILIUM),
    ("flannel", VETH),
    ("kindnet", VETH),
    ("kube-ovn", VETH),
    ("weave", VETH),
];

/// Returns the CNIs of these DaemonSets.
pub(super) fn of(daemon_sets: &[DaemonSet]) -> impl Iterator<Item = (&'static str, &'static str)> {
    NETWORKS.into_iter().filter(move |(name, _)| daemon_sets.iter().any(|set| set.name_any().contains(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(daemon_sets: &[&str]) -> Vec<&'static str> {
        let daemon_set = |name: &&str| {
            let mut set = DaemonSet::default();
            set.metadata.name = Some((*name).to_owned());
            set
        };
        let daemon_sets: Vec<_> = daemon_sets.iter().map(daemon_set).collect();
        of(&daemon_sets).map(|(name, _)| name).collect()
    }

    #[test]
    fn a_cni_is_known_by_its_name() {
        for (name, expected) in [
            ("cilium", "cilium"),
            ("calico-node", "calico"),
            ("kube-flannel-ds", "flannel"),
            ("kube-ovn-cni", "kube-ovn"),
            ("antrea-agent", "antrea"),
            ("weave-net", "weave"),
            ("kindnet", "kindnet"),
        ] {
            assert_eq!(names(&[name]), [expected]);
        }
        assert_eq!(names(&["cilium", "cilium-envoy", "kube-proxy"]), ["cilium"]);
        assert!(names(&["kube-proxy", "node-exporter"]).is_empty());
    }
}
