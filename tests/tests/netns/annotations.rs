//! Pods that cannot be mirrored.

use mirror_tests::{Agent, Netns, PodSpec, PodsFile};

use crate::{Node, any_mode};

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
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
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
