//! Static pods: the kubelet runs them from files on the node, and the API server has only a copy of their objects.

use std::{fs, path::PathBuf};

use mirror_test_cluster::built::MANIFESTS;
use mirror_tests::{Cluster, Comparison, PATIENCE, eventually, pod_object};

/// A file from which the kubelet runs a static pod. Deleted when dropped, which ends the pod.
struct Manifest(PathBuf);

impl Drop for Manifest {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The annotations by which a pod claims to be the API copy of a static pod are for anybody to write.
#[test]
fn a_static_pod_is_mirrored_and_no_tenant_gets_its_packets() {
    let cluster = &Cluster::new("static");
    let host = cluster.host();
    let [db] = cluster.pods([("db", None)]);
    let mut object = pod_object("fixed", "exec sleep 3600");
    object["metadata"]["namespace"] = cluster.namespace().into();
    object["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
    let manifest = Manifest(PathBuf::from(MANIFESTS).join(format!("{}.json", cluster.namespace())));
    fs::write(&manifest.0, object.to_string()).unwrap();
    let node = cluster.kubectl("get pod db -o jsonpath={.spec.nodeName}");
    let name = &format!("fixed-{node}");
    eventually(PATIENCE, || cluster.try_kubectl(&format!("get pod {name}")).map(drop));
    let fixed = cluster.running(name);
    let tap = host.wait_taps(&[&fixed.device]).tap(&fixed.device).clone();
    assert_eq!(tap.pod.as_ref().unwrap().name, *name);

    let hash = |of: &str| format!("{{.metadata.annotations.kubernetes\\.io/config\\.{of}}}");
    let hash = cluster.kubectl(&format!("get pod {name} -o jsonpath={}", hash("hash")));
    let comparison = Comparison::of(&fixed.netns, host);
    for number in 0..5 {
        // The kubelet deletes such a pod after some seconds.
        let mut claim = pod_object(&format!("claim{number}"), "exec sleep 3600");
        claim["spec"]["nodeName"] = node.as_str().into();
        let annotations = &mut claim["metadata"]["annotations"];
        annotations["podmirror.io/mirror.theft"] = "true".into();
        for key in ["config.hash", "config.mirror"] {
            annotations[format!("kubernetes.io/{key}")] = hash.as_str().into();
        }
        annotations["kubernetes.io/config.source"] = "file".into();
        cluster.apply(&claim);
        fixed.ping(db.ip, 20);
        let now = host.status().tap(&fixed.device).clone();
        assert_eq!((&now.pod, now.sessions.len()), (&tap.pod, 1), "{now:#?}");
    }
    assert_eq!(comparison.is_equal().len(), 5 * 2 * 20);
    drop(manifest);
    host.wait_taps(&[]);
}
