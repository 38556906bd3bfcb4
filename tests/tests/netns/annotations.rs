//! Which pods are mirrored: annotations, the default, and pods that cannot be mirrored.

use mirror_tests::{Agent, Lab, Netns, PodSpec, PodsFile};

use crate::{Node, any_mode};

const OURS: &str = "podmirror.io/mirror";
const KUBE_OVN: &str = "ovn.kubernetes.io/mirror";
const KUBE_OVN_FLAG: &str = "--kube-ovn-annotations";

#[test]
fn kube_ovns_annotation_is_honoured_with_its_flag_and_ours_wins() {
    let Node { web, db, lab } = &Node::bridged("kube-ovn");
    let specs = [PodSpec::of(web).annotated(KUBE_OVN, "true"), PodSpec::of(db).mirror("true")];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[db]);
    agent.stop();
    let agent = Agent::run(lab, any_mode(), &pods, &[KUBE_OVN_FLAG]);
    let status = lab.wait_mirrored(&[web, db]);
    assert_eq!(status.tap(web.veth_host()).direction, "both");
    pods.write(&[
        PodSpec::of(web).annotated(KUBE_OVN, "true").mirror("false"),
        PodSpec::of(db).annotated(KUBE_OVN, "false").mirror("egress"),
    ]);
    let status = lab.wait_mirrored(&[db]);
    assert_eq!(status.tap(db.veth_host()).direction, "egress");
    assert_eq!(agent.log_with(&["annotation"]), Vec::<String>::new());
}

#[test]
fn with_enable_mirror_every_pod_is_mirrored_that_does_not_opt_out() {
    let lab = &Lab::new("enable");
    lab.bridge("br0");
    let [plain, out, kube_ovn_out, ingress] =
        ["plain", "out", "ovn-out", "ingress"].map(|name| lab.pod(name, "br0"));
    let specs = [
        PodSpec::of(&plain),
        PodSpec::of(&out).mirror("false"),
        PodSpec::of(&kube_ovn_out).annotated(KUBE_OVN, "false"),
        PodSpec::of(&ingress).mirror("ingress"),
    ];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, any_mode(), &pods, &["--enable-mirror", KUBE_OVN_FLAG]);
    let status = lab.wait_mirrored(&[&plain, &ingress]);
    assert_eq!(status.tap(plain.veth_host()).direction, "both");
    assert_eq!(status.tap(ingress.veth_host()).direction, "ingress");
    agent.stop();
    let _agent = Agent::run(lab, any_mode(), &pods, &["--enable-mirror=false"]);
    lab.wait_mirrored(&[&ingress]);
}

#[test]
fn an_unknown_value_is_told_once_and_ignored() {
    let Node { web, db, lab } = &Node::bridged("unknown-value");
    let odd = |pod| PodSpec::of(pod).mirror("yes, please");
    let pods = PodsFile::new(lab, &[odd(web), PodSpec::of(db).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[KUBE_OVN_FLAG]);
    lab.wait_mirrored(&[db]);
    let line = agent.wait_for_log(&["default/web", OURS, "yes, please"]);
    assert!(line.contains("WARN"), "{line}");
    // The agent reads the pods again and finds the same value, together with a change that the story can observe.
    pods.write(&[odd(web), PodSpec::of(db).mirror("ingress")]);
    lab.wait_status(|status| {
        let direction = &status.tap(db.veth_host()).direction;
        mirror_tests::check(direction == "ingress", || "the change has not been seen".into())
    });
    assert_eq!(agent.log_with(&["yes, please"]).len(), 1, "{:#?}", agent.log());
    // The value counts as absent: another annotation applies, and so does the default.
    pods.write(&[odd(web).annotated(KUBE_OVN, "true"), PodSpec::of(db)]);
    lab.wait_mirrored(&[web]);
    agent.stop();
    pods.write(&[odd(web), PodSpec::of(db).mirror("false")]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--enable-mirror"]);
    lab.wait_mirrored(&[web]);
}

#[test]
fn what_has_no_veth_of_its_own_is_not_mirrored_and_the_reason_is_told() {
    let Node { web, db, lab } = &Node::bridged("reasons");
    let [bare, odd] = ["bare", "odd"].map(|name| Netns::new(&format!("{}-{name}", lab.node().name())));
    // A NIC without a node side.
    odd.ip("link add eth0 up type bridge");
    // As docker creates them in a pod: no mirror was requested for those.
    web.netns().ip("link add docker0 up type bridge");
    web.netns().ip("link add veth1a2b3c up type veth peer name inner");
    let node_path = lab.node().path().to_str().unwrap();
    let at =
        |name: &str, path: &str| PodSpec::named(name).annotated("podmirror.io/netns", path).mirror("true");
    let pods = PodsFile::new(
        lab,
        &[
            PodSpec::of(web).mirror("true"),
            PodSpec::of(db).mirror("true").host_network(),
            at("disguised", node_path),
            PodSpec::named("nowhere").mirror("true"),
            at("gone", "/run/netns/pm-does-not-exist"),
            at("bare", bare.path().to_str().unwrap()),
            at("odd", odd.path().to_str().unwrap()),
        ],
    );
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    for (pod, reason) in [
        ("default/db", "HostNetwork"),
        ("default/disguised", "HostNetwork"),
        ("default/nowhere", "NoNetns"),
        ("default/gone", "NetnsUnreadable"),
        ("default/bare", "NoNic"),
        ("default/odd", "NoHostInterface"),
    ] {
        agent.wait_for_log(&["not mirrored", &format!("\"{pod}\""), &format!("\"{reason}\"")]);
    }
    assert_eq!(agent.log_with(&["not mirrored"]).len(), 6, "{:#?}", agent.log());
}
