//! Detects the CNI of a cluster from the names and images of DaemonSets, and describes its coverage. Pure.
//!
//! The sentences are those of the table in docs/choosing.md.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::DaemonSet;

/// A CNI: its name, a part of the name or of an image of its DaemonSet, and what podmirror sees with it. `None`: known by
/// its documentation at most, and never tested.
pub(super) type Network = (&'static str, &'static str, Option<&'static str>);

const VETH: &str = "packets from and to pods are seen (by design, not tested)";
const CILIUM: &str =
    "packets from and to pods are seen; with eBPF host routing, packets to pods are tapped inside the pod";
const CALICO: &str = "packets from and to pods are seen (by design, not tested); with the eBPF dataplane, packets to \
                      pods are tapped inside the pod";

const NETWORKS: [Network; 14] = [
    ("Cilium", "cilium", Some(CILIUM)),
    ("Calico", "calico", Some(CALICO)),
    ("Canal", "canal", Some(VETH)),
    ("Flannel", "flannel", Some(VETH)),
    ("Kindnet", "kindnet", Some(VETH)),
    ("Weave", "weave", Some(VETH)),
    ("Antrea", "antrea", Some(VETH)),
    ("Kube-OVN", "kube-ovn", Some(VETH)),
    ("OVN-Kubernetes", "ovnkube", None),
    ("kube-router", "kube-router", None),
    ("Amazon VPC CNI", "aws-node", None),
    ("Azure CNI", "azure-cns", None),
    ("GKE netd", "netd", None),
    ("OpenShift SDN", "openshift-sdn", None),
];

/// Returns the CNIs of these DaemonSets.
pub(super) fn of(daemon_sets: &[DaemonSet]) -> BTreeSet<Network> {
    let words = |of: &DaemonSet| {
        let containers = of.spec.iter().flat_map(|spec| spec.template.spec.iter());
        let images = containers.flat_map(|pod| &pod.containers).filter_map(|of| of.image.clone());
        images.chain(of.metadata.name.clone()).map(|word| word.to_lowercase()).collect::<Vec<_>>()
    };
    let words: Vec<_> = daemon_sets.iter().flat_map(words).collect();
    NETWORKS.into_iter().filter(|(_, part, _)| words.iter().any(|word| has(word, part))).collect()
}

/// Whether a name or image is this word, or contains it between hyphens, as in `kube-flannel-ds`.
fn has(text: &str, word: &str) -> bool {
    let is_end = |char: Option<char>| char.is_none_or(|char| !char.is_ascii_alphanumeric());
    text.match_indices(word).any(|(at, _)| {
        is_end(text[..at].chars().next_back()) && is_end(text[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{from_value, json};

    use super::*;

    fn names(daemon_sets: &[(&str, &str)]) -> Vec<&'static str> {
        let daemon_set = |(name, image): &(&str, &str)| {
            from_value(json!({
                "metadata": { "name": name },
                "spec": {
                    "selector": {},
                    "template": { "spec": { "containers": [{ "name": "x", "image": image }] } },
                },
            }))
            .unwrap()
        };
        let daemon_sets: Vec<DaemonSet> = daemon_sets.iter().map(daemon_set).collect();
        of(&daemon_sets).into_iter().map(|(name, ..)| name).collect()
    }

    #[test]
    fn a_cni_is_known_by_its_name_or_its_image() {
        for (name, image, expected) in [
            ("cilium", "quay.io/cilium/cilium:v1.20.2", "Cilium"),
            ("calico-node", "docker.io/calico/node:v3.30", "Calico"),
            ("kube-flannel-ds", "ghcr.io/flannel-io/flannel:v0.27", "Flannel"),
            ("kube-ovn-cni", "kubeovn/x:v1", "Kube-OVN"),
            ("antrea-agent", "antrea/antrea-agent-ubuntu:v2", "Antrea"),
            ("weave-net", "weaveworks/x", "Weave"),
            ("kindnet", "kindest/x", "Kindnet"),
            ("aws-node", "x/amazon-k8s-cni:v1", "Amazon VPC CNI"),
            ("ovnkube-node", "x", "OVN-Kubernetes"),
        ] {
            assert_eq!(names(&[(name, image)]), [expected], "{name}");
        }
        // Two DaemonSets of one CNI, and programs with similar names.
        assert_eq!(names(&[("cilium", "a"), ("cilium-envoy", "quay.io/cilium/x")]), ["Cilium"]);
        assert!(names(&[("kube-proxy", "registry.k8s.io/kube-proxy:v1"), ("netdata", "netdata")]).is_empty());
    }
}
