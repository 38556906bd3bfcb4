//! `mirror-agent explain --pod`: its text about one pod, from the first annotation to the pod's exclusion.

use mirror_tests::{Agent, Capture, Lab, PodSpec, PodsFile, SOON, check, eventually};

use crate::{MIRROR, Node, any_mode};

const WEB: &str = "default/web";

/// Waits until the text about a pod has all these parts, and returns it.
#[track_caller]
fn wait_told(lab: &Lab, pod: &str, parts: &[&str]) -> String {
    eventually(SOON, || {
        let exit = lab.agent_exit(&["explain", "--pod", pod]);
        let missing: Vec<_> = parts.iter().filter(|part| !exit.stdout.contains(**part)).collect();
        check(exit.code == Some(0) && missing.is_empty(), || {
            format!("no {missing:#?} in\n{}\n{}", exit.stdout, exit.stderr)
        })?;
        Ok(exit.stdout)
    })
}

/// Waits until the text about the pod has each counter of its tap.
#[track_caller]
fn wait_counters_told(lab: &Lab, device: &str) {
    eventually(SOON, || {
        let status = lab.status();
        let counters = &status.tap(device).counters;
        let text = lab.agent_exit(&["explain", "--pod", WEB]).stdout;
        let told = counters.iter().all(|counter| {
            let count =
                format!("{} {} packets ({} bytes)", counter.direction, counter.packets, counter.bytes);
            let of_result = |line: &str| line.trim_start().starts_with(&format!("{}: ", counter.result));
            text.lines().any(|line| of_result(line) && line.contains(&count))
        });
        check(told && !counters.is_empty(), || format!("{counters:#?} are not all in\n{text}"))
    });
}

#[test]
fn a_pod_is_explained_at_each_step_of_its_life() {
    let Node { web, db, lab } = &Node::bridged("explained");
    let spec = |annotations: &[(&str, &str)]| {
        let web = PodSpec::of(web);
        annotations.iter().fold(web, |web, (key, value)| web.annotated(&format!("podmirror.io/{key}"), value))
    };
    let pods = PodsFile::new(lab, &[spec(&[]), PodSpec::of(db).mirror("false")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);

    // No mirror is requested.
    let ask = "kubectl annotate --overwrite --namespace default pod web podmirror.io/mirror=true";
    wait_told(lab, WEB, &["default/web is not mirrored.\nNo mirror is requested: ", "(NoRequest)\n", ask]);
    wait_told(lab, "default/db", &["default/db is not mirrored.\nThe pod opts out: ", "(OptedOut)\n"]);

    // An annotation requests a mirror, with a filter and a budget.
    let icmp = [("mirror", "true"), ("filter", "icmp"), ("packets", "4")];
    pods.write(&[spec(&icmp), PodSpec::of(db).mirror("false")]);
    lab.wait_mirrored(&[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 1, 56);
    let device = web.veth_host();
    let (tapped, mirror_iface) = (lab.ifindex(device), lab.ifindex(MIRROR));
    let way = any_mode().name();
    wait_told(
        lab,
        WEB,
        &[
            "default/web is mirrored.\n\nNIC eth0\n",
            &format!("  It is tapped at the node side of its veth, {device} (ifindex {tapped}).\n"),
            &format!("egress ({way}) for what reaches the pod, ingress ({way}) for what leaves the pod.\n"),
            "  The agent sees no other program before them.\n",
            "\n  Mirror default\n    Requested by the annotation podmirror.io/mirror (or ovn.kubernetes.io/mirror, with --kube-ovn-annotations) of the pod.\n",
            "    It copies both directions: what reaches the pod, and what leaves the pod.\n",
            "    Filter of the packets to copy: \"icmp\".\n",
            "    End after this many copies of each NIC: 4; 2 are left.\n",
            &format!(
                "    The target default is the mirror interface {MIRROR} (ifindex {mirror_iface}). It accepts copies now.\n"
            ),
            "      copied: ingress 1 packets (98 bytes), egress 1 packets (98 bytes)\n",
        ],
    );
    wait_counters_told(lab, device);

    // The budget is used up.
    web.ping(db.v4(), 3, 56);
    wait_told(
        lab,
        WEB,
        &[
            "default/web has a mirror, but nothing is copied now. See the reasons below.\n",
            "of each NIC: 4; 0 are left.\n    It has ended, because its budget of packets is used up: nothing is copied.",
            "      copied: ingress 2 packets (196 bytes), egress 2 packets (196 bytes)\n",
            "      ended: ingress 2 packets (196 bytes), egress 2 packets (196 bytes)\n        A budget is used up.",
        ],
    );
    wait_counters_told(lab, device);
    eventually(SOON, || check(mirror.frames().len() == 4, || format!("{:?}", mirror.frames())));
    assert_eq!(mirror.stop().len(), 4, "what the budget allows, and no more");

    // The filter is wrong.
    let wrong = [("mirror", "true"), ("filter", "tcp prot 80")];
    pods.write(&[spec(&wrong), PodSpec::of(db).mirror("false")]);
    let told = [
        "default/web is not mirrored.\n\nNot as requested:\n  BadSetting: annotation podmirror.io/filter \"tcp prot 80\": ",
        "\n    Correct the annotation.",
    ];
    wait_told(lab, WEB, &told);

    // The target is down.
    pods.write(&[
        spec(&[("mirror", "egress"), ("odd", "1"), ("snaplen", "96")]),
        PodSpec::of(db).mirror("false"),
    ]);
    lab.wait_mirrored(&[web]);
    lab.node().ip(&format!("link set {MIRROR} down"));
    let down = format!(
        "(ifindex {mirror_iface}). It is down, so nothing is copied.\n    Bring it up on the node: ip link set {MIRROR} up.\n"
    );
    lab.wait_status(|status| check(!status.mirror().up, || "the mirror interface is up".into()));
    agent.wait_for_log(&["the mirror interface is down"]);
    web.ping(db.v4(), 2, 56);
    wait_told(
        lab,
        WEB,
        &[
            "default/web has a mirror, but nothing is copied now.",
            "  BadAnnotation: annotation podmirror.io/odd: there is no such annotation",
            "    It copies what leaves the pod (egress).\n    Bytes to copy of each packet: 96.\n",
            &down,
            "      other_direction: ingress ",
            "      target_down: egress ",
        ],
    );
    wait_counters_told(lab, device);

    // The agent is stopped, and the target is up again: the mirror continues. `explain` changes nothing.
    lab.node().ip(&format!("link set {MIRROR} up"));
    lab.wait_status(|status| check(status.mirror().up, || "the mirror interface is down".into()));
    agent.stop();
    let before = (lab.network_state(), lab.pins());
    wait_told(
        lab,
        WEB,
        &["default/web is mirrored.\nNo agent is running on this node.", "Without an answer of the agent"],
    );
    wait_counters_told(lab, device);
    assert_eq!((lab.network_state(), lab.pins()), before);

    // The administrator excludes the namespace, or does not include it.
    let agent = Agent::run(lab, any_mode(), &pods, &["--exclude-namespaces", "default"]);
    wait_told(
        lab,
        WEB,
        &["NamespaceExcluded: its namespace is excluded from mirroring", "Only the administrator"],
    );
    wait_told(lab, "default/db", &["(NamespaceExcluded)\nOnly the administrator can change this"]);
    agent.stop();
    pods.write(&[spec(&[]), PodSpec::of(db).mirror("true")]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--allow-namespaces", "shop"]);
    wait_told(lab, WEB, &["(NamespaceNotAllowed)\nOnly the administrator can change this"]);
    wait_told(lab, "default/db", &["NamespaceNotAllowed: its namespace is not allowed to request mirrors"]);
}

#[test]
fn the_error_for_an_unknown_pod_says_where_to_look() {
    let Node { web, lab, .. } = &Node::bridged("unexplained");
    let fails = |pod: &str, message: &str| {
        eventually(SOON, || {
            let exit = lab.agent_exit(&["explain", "--pod", pod]);
            check(exit.code == Some(1) && exit.stderr.contains(message), || format!("{exit:?}"))?;
            check(exit.stdout.is_empty(), || format!("{exit:?}"))
        });
    };
    fails(WEB, "no podmirror state in");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_mirrored(&[web]);
    wait_told(lab, WEB, &["default/web is mirrored.\n"]);
    fails("default/wbe", "the agent of this node has no pod default/wbe: check the name");
    fails("shop/web", "`kubectl get pod --namespace shop web --output wide` names its node");
    agent.stop();
    fails("default/wbe", "this node has no tap for pod default/wbe, and no agent is running");
    // Wrong usage.
    for (arguments, code, message) in
        [(&["explain"][..], 2, "--pod"), (&["explain", "--pod", "web"], 2, "as in shop/web")]
    {
        let exit = lab.agent_exit(arguments);
        assert!(exit.code == Some(code) && exit.stderr.contains(message), "{arguments:?}: {exit:?}");
    }
}
