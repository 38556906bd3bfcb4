//! The API server is unreachable or refuses requests. Mirrored pods stay mirrored.
//!
//! These stories wait for minutes. By the name of this module they run first, so the others run meanwhile.

use std::{fs, time::Duration};

use mirror_tests::{Comparison, Metrics, Pinging, Status, Way, check, eventually};
use serde_json::{Value, json};

use crate::Node;

const MIRROR: [(&str, &str); 1] = [("podmirror.io/mirror", "true")];
/// Time until the agent notices that a server is silent that still acknowledges packets: a watch may be silent for 150
/// s, and a response may start after 60 s.
const NOTICED: Duration = Duration::from_secs(220);
/// Time until the agent notices that its packets to the server are lost.
const CUT_OFF: Duration = Duration::from_secs(70);
/// Time until the agent is unready after that: a minute. To be ready again takes a little longer at most: a response and
/// a pause.
const UNREADY: Duration = Duration::from_secs(90);

#[test]
fn what_happened_meanwhile_is_made_up_for() {
    let node = &Node::new("meanwhile");
    let Node { api, lab } = node;
    let [web, gone, late, new] = &node.pods(["web", "gone", "late", "new"]);
    let _containers = [api.run(lab, web, &MIRROR), api.run(lab, late, &[])];
    let of_gone = api.run(lab, gone, &MIRROR);
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[web, gone]);
    let comparison = Comparison::of(web.netns(), lab);
    let pinging = Pinging::start(web.netns(), late.v4());
    api.set_way(Way::Refused);
    agent.wait_for_log(&["is unavailable", "pods"]);

    api.kubectl("delete pod gone");
    api.kubectl("annotate pod late podmirror.io/mirror=egress");
    let _new = api.run(lab, new, &MIRROR);
    // The agent has not noticed yet. It goes on as before, and new rounds change nothing.
    let rounds = |metrics: &Metrics| metrics["podmirror_reconcile_duration_seconds_count"];
    let before = rounds(&lab.metrics());
    lab.node().ip("link add unrelated type veth peer name other");
    lab.wait_metrics(|metrics| rounds(metrics) > before);
    lab.wait_mirrored(&[web, gone]);
    assert_eq!(agent.log_with(&["no longer mirroring"]), Vec::<String>::new());
    assert_eq!(["/healthz", "/readyz"].map(|path| lab.get(path).status), [200, 200]);

    drop(of_gone);
    api.set_way(Way::Open);
    eventually(UNREADY, || {
        check(!agent.log_with(&["API is available again", "pods"]).is_empty(), || "it is away".into())
    });
    let status = lab.wait_mirrored(&[web, late, new]);
    assert_eq!(status.tap(late.veth_host()).direction, "egress");
    let sent = pinging.stop();
    assert_eq!(comparison.is_equal().len(), 2 * sent);
    agent.stop();
}

#[test]
fn a_server_that_falls_silent_is_noticed() {
    let node = &Node::new("silent");
    let Node { api, lab } = node;
    let [web, db] = &node.pods(["web", "db"]);
    let _containers = [api.run(lab, web, &MIRROR), api.run(lab, db, &[])];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[web]);
    api.set_way(Way::Silent);
    eventually(NOTICED, || {
        check(!agent.log_with(&["is unavailable", "pods"]).is_empty(), || "not noticed".into())
    });
    node.is_mirrored(web, db);
    api.kubectl("annotate pod db podmirror.io/mirror=true");
    api.set_way(Way::Open);
    eventually(UNREADY, || {
        check(!agent.log_with(&["API is available again", "pods"]).is_empty(), || "it is away".into())
    });
    lab.wait_mirrored(&[web, db]);
    agent.stop();
}

#[test]
fn packets_that_get_lost_are_noticed_within_a_minute() {
    let node = &Node::new("cut");
    let Node { api, lab } = node;
    let [web, db] = &node.pods(["web", "db"]);
    let _containers = [api.run(lab, web, &MIRROR), api.run(lab, db, &[])];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[web]);
    lab.wait_get("/readyz", 200);
    // Packets between agent and server are dropped, and neither of them gets an error.
    lab.node().run("nft add table ip cut");
    lab.node().run("nft add chain ip cut input { type filter hook input priority 0 ; }");
    lab.node().run(&format!("nft add rule ip cut input tcp sport {} drop", api.port()));
    lab.node().run(&format!("nft add rule ip cut input tcp dport {} drop", api.port()));
    eventually(CUT_OFF, || {
        check(!agent.log_with(&["is unavailable", "pods"]).is_empty(), || "not noticed".into())
    });
    assert_eq!(lab.get("/readyz").status, 200, "a short absence disturbs nobody");
    node.is_mirrored(web, db);
    eventually(UNREADY, || check(lab.get("/readyz").status == 503, || "still ready".into()));
    assert_eq!(lab.get("/healthz").status, 200, "to start it again would not help");
    node.is_mirrored(web, db);
    api.kubectl("annotate pod db podmirror.io/mirror=true");
    lab.node().run("nft delete table ip cut");
    eventually(UNREADY, || check(lab.get("/readyz").status == 200, || "not ready".into()));
    lab.wait_mirrored(&[web, db]);
    agent.stop();
}

#[test]
fn a_server_that_answers_from_the_past_changes_nothing() {
    const BUDGET: [(&str, &str); 2] = [("podmirror.io/mirror", "true"), ("podmirror.io/packets", "4")];
    let node = &Node::new("past");
    let Node { api, lab } = node;
    let [web, revoked, ended, db] = &node.pods(["web", "revoked", "ended", "db"]);
    let _containers = [
        api.run(lab, web, &[]),
        api.run(lab, revoked, &MIRROR),
        api.run(lab, ended, &[]),
        api.run(lab, db, &[]),
    ];
    let agent = api.agent(lab, &[]);
    lab.wait_mirrored(&[revoked]);
    // The other API server does not see any change from here on.
    let lagging = api.another(&[]);
    lagging.set_store(Way::Silent);
    api.kubectl("annotate pod web podmirror.io/mirror=true");
    api.kubectl("annotate --overwrite pod revoked podmirror.io/mirror=false");
    let budget = BUDGET.map(|(key, value)| format!("{key}={value}")).join(" ");
    api.kubectl(&format!("annotate pod ended {budget}"));
    lab.wait_mirrored(&[web, ended]);
    db.ping(ended.v4(), 5, 56);
    let has_ended = |status: &Status| {
        let tap = status.tap(ended.veth_host());
        check(tap.ended.as_deref() == Some("packets") && tap.total("copied") == 4, || format!("{tap:#?}"))
    };
    lab.wait_status(has_ended);
    let before = agent.log_with(&["irroring"]).len();

    api.set_way(Way::Refused);
    agent.wait_for_log(&["is unavailable", "pods"]);
    api.lead_to(&lagging);
    api.set_way(Way::Open);
    // The agent has sent a request to the other server and has its answer.
    eventually(NOTICED, || {
        let told = agent.log_with(&["is unavailable", "\"watched\":\"pods\""]);
        check(told.iter().any(|line| line.contains("no answer") || line.contains("timeout")), || {
            format!("{told:#?}")
        })
    });
    lab.wait_mirrored(&[web, ended]);
    node.is_mirrored(web, db);
    has_ended(&lab.status()).unwrap();
    assert_eq!(agent.log_with(&["irroring"]).len(), before, "{:#?}", agent.log());

    // The other server catches up.
    lagging.set_store(Way::Open);
    api.kubectl("annotate pod db podmirror.io/mirror=true");
    eventually(UNREADY, || {
        check(!agent.log_with(&["API is available again", "pods"]).is_empty(), || "it is away".into())
    });
    lab.wait_mirrored(&[web, ended, db]);
    db.ping(ended.v4(), 5, 56);
    has_ended(&lab.status()).unwrap();
    agent.stop();
}

#[test]
fn a_token_that_is_refused_is_followed_by_the_next_one() {
    let node = &Node::new("token");
    let Node { api, lab } = node;
    let [web, db] = &node.pods(["web", "db"]);
    let _containers = [api.run(lab, web, &MIRROR), api.run(lab, db, &[])];
    // As in a pod: the kubelet replaces the token file.
    let token = lab.files().join("token");
    let issue = || {
        api.kubectl("create serviceaccount agent");
        fs::write(&token, api.kubectl("create token agent").trim()).unwrap();
    };
    issue();
    let binding = format!("{}-agent", api.namespace());
    let subject = format!("{}:agent", api.namespace());
    api.kubectl(&format!("create clusterrole {binding} --verb=get,list,watch --resource=pods,namespaces"));
    api.kubectl(&format!(
        "create clusterrolebinding {binding} --clusterrole={binding} --serviceaccount={subject}"
    ));
    let mut config: Value = serde_json::from_str(&api.kubectl("config view --raw -o json")).unwrap();
    config["users"][0]["user"] = json!({ "tokenFile": token });
    let kubeconfig = lab.files().join("kubeconfig");
    fs::write(&kubeconfig, config.to_string()).unwrap();
    let agent = api.agent_as(lab, kubeconfig.to_str().unwrap(), &[]);
    lab.wait_mirrored(&[web]);

    api.kubectl("delete serviceaccount agent");
    // The API server caches the token's validity for some seconds. The agent repeatedly requests the Mirrors, which it
    // may not read.
    let is_refused = |texts: &[&str]| check(!agent.log_with(texts).is_empty(), || "no 401".into());
    eventually(NOTICED, || is_refused(&["is unavailable", "Unauthorized"]));
    // A running watch continues.
    api.set_way(Way::Refused);
    api.set_way(Way::Open);
    eventually(NOTICED, || is_refused(&["is unavailable", "Unauthorized", "\"watched\":\"pods\""]));
    node.is_mirrored(web, db);
    issue();
    api.kubectl("annotate pod db podmirror.io/mirror=true");
    eventually(NOTICED, || {
        check(!agent.log_with(&["API is available again", "pods"]).is_empty(), || "no".into())
    });
    lab.wait_mirrored(&[web, db]);
    agent.stop();
    for kind in ["clusterrolebinding", "clusterrole"] {
        api.kubectl(&format!("delete {kind} {binding}"));
    }
}
