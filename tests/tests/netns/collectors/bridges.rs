//! Several bridges on a node: a frame with the collector's MAC address reaches the collector on its own bridge alone.

use mirror_tests::{Agent, Capture, Frame, PodNs, SOON, check, eventually};

use super::{Scene, TARGET, verdicts, wait_target};
use crate::{Inside, Node, any_mode, shows};

/// The pod and the collector change their bridges while the agent runs. The collector gets each frame once: as a copy
/// where the frame itself does not reach it, else from the bridge.
#[test]
fn a_collectors_address_on_another_bridge_hides_nothing() {
    let node = Node::bridged("collector-bridges");
    node.lab.bridge("br1");
    let scene = &Scene::new(node, |lab| lab.pod("ids", "br1"));
    let Scene { ids, node: Node { web, lab, .. } } = scene;
    let agent = Agent::mirroring(lab, any_mode(), &[scene.web(), scene.ids()], &TARGET, &[web]);
    wait_target(lab, true);
    let counted = || verdicts(&lab.status(), web, "default");
    let send = |number| {
        web.send_frame(&Frame::new(ids.eth0().mac, web.eth0().mac).filled(100, number).bytes());
    };
    let each_arrives_once_as = |verdict: &str| {
        // The agent has noticed the bridges.
        eventually(SOON, || {
            let before = counted();
            send(0);
            // A frame that is counted late could satisfy a later attempt.
            let after = eventually(SOON, || {
                let after = counted();
                let is_one_more = after.values().sum::<u64>() == before.values().sum::<u64>() + 1;
                check(is_one_more, || format!("not one more than {before:?}: {after:?}")).map(|()| after)
            });
            check(after.get(verdict) > before.get(verdict), || format!("not {verdict}: {after:?}"))
        });
        let (inside, collector) = (Inside::of(web), Capture::start(ids.netns(), "eth0"));
        let mut expected = counted();
        (1..=20).for_each(send);
        shows(&collector, || inside.capture.frames());
        let (sent, _) = inside.stop();
        collector.stop().same_as(&sent).unwrap();
        assert_eq!(sent.len(), 20);
        *expected.entry(verdict.to_owned()).or_default() += 20;
        assert_eq!(counted(), expected);
    };
    let set = |pod: &PodNs, to: &str| drop(lab.node().ip(&format!("link set {} {to}", pod.veth_host())));

    each_arrives_once_as("egress copied");
    let names: Vec<_> = counted().into_keys().collect();
    assert_eq!(names, ["egress copied"], "no frame counts as the collector's");
    set(web, "master br1");
    each_arrives_once_as("egress loop");
    set(web, "nomaster");
    each_arrives_once_as("egress copied");
    set(web, "master br1");
    each_arrives_once_as("egress loop");
    set(ids, "master br0");
    each_arrives_once_as("egress copied");
    agent.stop();
    lab.cleanup();
}
