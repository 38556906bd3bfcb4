//! Each known combination of driver, version, runtime and cluster, with an arbitrary UID.

use proptest::prelude::*;

use super::*;

const UID: &str = "0b26ecd8-3f7e-4b8f-9f0a-5a1b7d6c2e11";
const ID: &str = "9d1f2c3b4a5968778695a4b3c2d1e0f99d1f2c3b4a5968778695a4b3c2d1e0f9";

/// Paths with the placeholders `UID` or `U_ID` (systemd) for the pod's UID, and `ID` for a container's.
const PATHS: &[&str] = &[
    // cgroupfs driver: containerd, CRI-O, docker with cri-dockerd; Burstable, BestEffort, Guaranteed.
    "/kubepods/burstable/podUID/ID",
    "/kubepods/besteffort/podUID/ID",
    "/kubepods/podUID/ID",
    "/kubepods/burstable/podUID/crio-ID",
    // Between the creation of the pod and that of its first container, the path ends with the UID.
    "/kubepods/besteffort/podUID",
    // systemd driver: containerd, CRI-O, docker with cri-dockerd.
    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_ID.slice/cri-containerd-ID.scope",
    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podU_ID.slice/crio-ID.scope",
    "/kubepods.slice/kubepods-podU_ID.slice/docker-ID.scope",
    "/kubepods.slice/kubepods-podU_ID.slice/crio-ID.scope/container",
    // The runtime uses the cgroupfs driver, and the kubelet the systemd one.
    "/system.slice/containerd.service/kubepods-burstable-podU_ID.slice:cri-containerd:ID",
    // kind, with either driver, and on a node with cgroup v1.
    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podU_ID.slice/cri-containerd-ID.scope",
    "/kubelet/kubepods/besteffort/podUID/ID",
    "/docker/ID/kubelet/kubepods/burstable/podUID/ID",
    "/docker/ID/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-podU_ID.slice/cri-containerd-ID.scope",
    // k3s, RKE, and a kubelet with --cgroup-root.
    "/system.slice/k3s.service/kubepods/burstable/podUID/ID",
    "/system.slice/rke2-server.service/kubepods.slice/kubepods-podU_ID.slice/cri-containerd-ID.scope",
    "/my.slice/my-own.slice/my-own-kubepods.slice/my-own-kubepods-podU_ID.slice/cri-containerd-ID.scope",
    // Seen from the cgroup namespace of an agent that runs in a pod.
    "/../../../kubepods/burstable/podUID/ID",
    "/../../podUID/ID",
    "/../../../burstable/podUID/ID",
    "/../../kubepods-burstable-podU_ID.slice/cri-containerd-ID.scope",
    "/../../../kubepods-besteffort.slice/kubepods-besteffort-podU_ID.slice/crio-ID.scope",
    // Cgroups that a container creates below its own: docker, systemd, a nested kubelet.
    "/kubepods/burstable/podUID/ID/docker/ID",
    "/kubepods/podUID/ID/user.slice/user-1000.slice/session-1.scope",
    "/kubepods.slice/kubepods-podU_ID.slice/cri-containerd-ID.scope/init.scope",
    "/kubepods/podUID/ID/kubelet/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/ID",
    "/kubepods.slice/kubepods-podU_ID.slice/cri-containerd-ID.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod11111111_2222.slice/cri-containerd-ID.scope",
];

fn filled(path: &str, uid: &str) -> String {
    path.replace("U_ID", &uid.replace('-', "_"))
        .replace("UID", uid)
        .replace("/ID", &format!("/{ID}"))
        .replace("-ID", &format!("-{ID}"))
}

/// The file of a process with all controllers at one path, for cgroup v2, cgroup v1 and the hybrid of both.
fn files(path: &str) -> [String; 3] {
    let v1 = format!(
        "11:cpuset:{path}\n10:net_cls,net_prio:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"
    );
    [format!("0::{path}\n"), v1.clone(), format!("9:name=systemd:/\n8:pids:/\n0::{path}\n")]
}

#[test]
fn the_uid_of_a_pod_is_found_wherever_its_cgroup_is() {
    for path in PATHS {
        for file in files(&filled(path, UID)) {
            assert_eq!(pod_uid(&file).as_deref(), Some(UID), "{file}");
        }
    }
}

#[test]
fn a_static_pods_uid_is_a_hash() {
    let hash = "f2f7c5d2b6b9a0c1d4e3f6a7b8c9d0e1";
    for file in [
        format!("0::/kubepods/burstable/pod{hash}/{ID}\n"),
        format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{hash}.slice/crio-{ID}.scope\n"
        ),
    ] {
        assert_eq!(pod_uid(&file).as_deref(), Some(hash));
    }
}

#[test]
fn what_is_no_process_of_a_pod_has_no_uid() {
    for path in [
        "/",
        "/init.scope",
        "/system.slice/containerd.service",
        "/system.slice/kubelet.service",
        "/user.slice/user-1000.slice/session-1.scope",
        "/kubepods",
        "/kubepods/burstable",
        "/kubepods/burstable/pod",
        "/kubepods.slice/kubepods-burstable.slice",
        "/kubepods.slice/kubepods-pod.slice/crio-1.scope",
        "/docker/9d1f2c3b",
        "/machine.slice/libpod-9d1f2c3b.scope/container",
        "/machine.slice/libpod_pod_9d1f2c3b.slice",
        "/user.slice/podman-1234.scope",
        "/somewhere/pod0b26ecd8",
        "/my.slice/my-pod0b26ecd8.slice",
        "/notkubepods.slice/notkubepods-pod0b26ecd8.slice/crio-1.scope",
        "/..",
        "/../9d1f2c3b",
        // CRI-O's monitors, with either driver.
        "/kubepods.slice/kubepods-podU_ID.slice/crio-conmon-ID.scope",
        "/kubepods/burstable/podUID/crio-conmon-ID",
    ] {
        for file in files(&filled(path, UID)) {
            assert_eq!(pod_uid(&file), None, "{file}");
        }
    }
    for file in ["", "\n", "0::", "0:", "garbage", "0", ":::::"] {
        assert_eq!(pod_uid(file), None, "{file:?}");
    }
}

/// systemd delegates cgroups to a user, who chooses the names below them.
#[test]
fn a_user_of_the_node_cannot_pose_as_a_pod() {
    for session in ["/user.slice/user-1000.slice/user@1000.service", "/../../user.slice"] {
        for path in PATHS {
            for file in files(&filled(&format!("{session}{path}"), UID)) {
                assert_eq!(pod_uid(&file), None, "{file}");
            }
        }
    }
}

proptest! {
    #[test]
    fn any_uid_comes_out_of_any_form(uid in "[a-z0-9]{1,8}(-[a-z0-9]{1,8}){0,5}", path in prop::sample::select(PATHS)) {
        for file in files(&filled(path, &uid)) {
            prop_assert_eq!(pod_uid(&file), Some(uid.clone()), "{}", file);
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in ".*", words in prop::collection::vec(
        prop::sample::select(vec!["/", ":", "0::", "\n", "..", "kubepods", "-pod", "pod", ".slice", "crio-conmon-", "é", "_"]), 0..20)
    ) {
        for text in [text, words.concat()] {
            if let Some(uid) = pod_uid(&text) {
                prop_assert!(!uid.is_empty() && !uid.contains('/'));
            }
        }
    }
}
