//! Why a user gets no packets of a pod, and what others learn of those who do.

use mirror_tests::{PacketFile, SOON, check, eventually, wait_audited};
use serde_json::{Value, json};

use super::Packets;
use crate::{
    Node,
    aggregation::GROUP,
    resources::{Story, mirrors},
};

/// The maximum number of mirrors of a pod.
const MIRRORS: usize = 8;

#[test]
fn a_reader_learns_why_it_gets_nothing() {
    let story = &Story::new("packets-reasons");
    let node @ Node { api, lab } = &story.node;
    let pods = node.pods(["web", "quiet", "busy"]);
    let [web, quiet, busy] = &pods;
    let _containers = [(web, None), (quiet, Some("false")), (busy, None)].map(|(pod, value)| {
        let annotation = value.map(|value| ("podmirror.io/mirror", value));
        api.run(lab, pod, annotation.as_slice())
    });
    let mut host = api.object("host", &[]);
    host["spec"]["hostNetwork"] = true.into();
    api.apply(&host);
    for number in 1..=MIRRORS {
        story.mirror(&format!("mirror-{number}"), "busy", &json!({ "filter": format!("port {number}") }));
    }
    let packets = Packets::start(api, 1, &["--pod-events"]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    lab.wait_status(|status| {
        let mirrors = mirrors(status, busy);
        check(mirrors.len() == MIRRORS, || format!("{mirrors:?}"))
    });
    let rules =
        json!([{ "apiGroups": [GROUP], "resources": ["packets", "nodepackets"], "verbs": ["watch"] }]);
    let alice = &packets.grant("alice", true, &rules);
    let brief = packets.uri("packets?labelSelector=none&timeoutSeconds=1&watch=true");
    eventually(SOON, || packets.get(alice, &brief));

    let (namespace, name) = (api.namespace(), lab.node().name());
    let of_pod = |pod: &str| packets.uri(&format!("packets?fieldSelector=metadata.name%3D{pod}&watch=true"));
    let of_node = format!(
        "/apis/{GROUP}/v1alpha1/nodepackets?fieldSelector=metadata.name%3D{name}&interface=nosuch0&watch=true"
    );
    for (uri, expected) in [
        (of_pod("nosuch"), "(NotFound): there is no pod \"nosuch\"".to_owned()),
        (of_pod("quiet"), format!("(Conflict): no packets can be read: {namespace}/quiet: OptedOut: ")),
        (of_pod("host"), format!("(Conflict): no packets can be read: {namespace}/host: HostNetwork: ")),
        (of_pod("busy"), format!("(Conflict): no packets can be read: {namespace}/busy: TooManyMirrors: ")),
        (of_node, format!("(Conflict): {name}: nosuch0: the interface does not exist")),
    ] {
        let refused = packets.get(alice, &uri).unwrap_err();
        assert!(refused.contains(&expected), "{uri}: {refused}");
    }

    // Of several pods, those that can be read are read. The user learns of each change.
    let uri = packets.uri("packets?filter=icmp&watch=true");
    let stream = packets.stream(alice, &uri);
    let wait_told = |expected: &[(&str, &str)]| {
        eventually(SOON, || {
            let file = PacketFile::parse(&stream.bytes());
            for (pod, text) in expected {
                let text = format!("podmirror: {namespace}/{pod}: {text}");
                check(file.comments.iter().any(|comment| comment.starts_with(&text)), || {
                    format!("not {text:?}: {:#?}", file.comments)
                })?;
            }
            Ok(file)
        })
    };
    let reasons = [("quiet", "OptedOut: "), ("host", "HostNetwork: "), ("busy", "TooManyMirrors: ")];
    let file = wait_told(&reasons);
    assert!(!file.comments.iter().any(|comment| comment.contains("/web: ")), "{:#?}", file.comments);
    let event = wait_audited(|event| event["requestURI"] == uri);
    let audit_id = event["auditID"].as_str().unwrap();
    let of_web = format!("{namespace}/web");
    packets.servers[0].wait_for_log(&["a user reads the packets of a pod", &of_web, alice, audit_id]);
    eventually(SOON, || {
        let events = api.try_kubectl("get events --field-selector=reason=PacketsRead -o json")?;
        let events: Value = serde_json::from_str(&events).unwrap();
        let events = events["items"].as_array().unwrap();
        let end = format!("(audit ID {audit_id}, filter \"icmp\")");
        let says =
            |text: &Value| text.as_str().is_some_and(|text| text.contains(alice) && text.ends_with(&end));
        let said: Vec<_> = events.iter().filter(|event| says(&event["message"])).collect();
        check(matches!(said[..], [one] if one["involvedObject"]["name"] == "web"), || format!("{events:#?}"))
    });
    web.ping(quiet.v4(), 5, 56);
    eventually(SOON, || {
        let file = PacketFile::parse(&stream.bytes());
        let of_web = |interface: &String| *interface == format!("{namespace}/web eth0");
        let is_so = file.packets.len() == 10 && file.interfaces.iter().all(of_web);
        check(is_so, || format!("{} packets of {:?}", file.packets.len(), file.interfaces))
    });
    api.kubectl("annotate pod web podmirror.io/mirror=false");
    wait_told(&[("web", "OptedOut: ")]);
    api.kubectl("annotate pod web podmirror.io/mirror-");
    api.kubectl("delete mirror mirror-1");
    wait_told(&[("web", "its packets are read"), ("busy", "its packets are read")]);
    drop(stream);

    // Only the administrator can change this.
    agent.stop();
    let agent = packets.agent(lab, &["--exclude-namespaces", namespace]);
    eventually(SOON, || {
        let connected = packets.servers[0].log_with(&["has connected", name]).len();
        check(connected >= 2, || "the agent is not connected again".into())
    });
    let refused = packets.get(alice, &of_pod("web")).unwrap_err();
    let expected = format!("(Forbidden): no packets can be read: {namespace}/web: NamespaceExcluded: ");
    assert!(refused.contains(&expected), "{refused}");
    agent.stop();
}
