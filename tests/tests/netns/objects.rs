//! Mirrors that tenants have made as large and as slow as they could, from an API server whose CRDs have no bounds. The
//! agent mirrors the pod of another tenant, answers its health checks, and keeps its memory small.
//!
//! The server has canned responses: a real one refuses such objects, because the CRDs have bounds.

use std::time::{Duration, Instant};

use mirror_tests::{Capture, Lab, SOON, SessionStatus, check, cpu_time, eventually, memory, scaled};
use serde_json::json;

use crate::{
    Inside, MIRROR,
    server::{self, CGROUP, Server},
};

/// Number of Mirrors of 1.3 MB, and of Mirrors with a slow filter.
const LARGE: usize = 200;
const SLOW: usize = 200;
/// Number of changes of a large Mirror.
const CHANGES: usize = 20;
/// The limit of the chart is 256 MiB.
const MOST_MIB: f64 = 100.0;
/// The kubelet's timeout for a health check.
const HEALTH: Duration = Duration::from_secs(1);
/// The same while other stories use the CPUs.
const BUSY_HEALTH: Duration = Duration::from_secs(5);

#[test]
fn hostile_mirrors_cost_neither_the_agent_nor_a_neighbour() {
    let lab = Lab::new("objects");
    lab.bridge("br0");
    let [web, db] = ["web", "db"].map(|name| lab.pod(name, "br0"));
    let _container = lab.container(web.netns(), CGROUP);
    let mut objects = server::web(&lab, &json!({}));
    for kind in ["clustermirrors", "mirrortargets"] {
        objects.insert(kind, (0, Box::new(|_| unreachable!())));
    }
    let large = large();
    objects.insert("mirrors", (LARGE + SLOW + 1, Box::new(move |number| mirror(number, &large))));
    let server = Server::start(&lab, objects);
    let began = Instant::now();
    let agent = server::agent(&lab, &[]);
    // The longest time until an answer, and the longest of these times in which the agent had a CPU.
    let (mut longest, mut own) = (Duration::ZERO, Duration::ZERO);
    let mut healthy = || {
        let (asked, used) = (Instant::now(), cpu_time(agent.pid()));
        let answer = lab.request("GET", "/healthz")?;
        let (took, used) = (asked.elapsed(), cpu_time(agent.pid()) - used);
        (longest, own) = (longest.max(took), own.max(took.min(used)));
        check(answer.status == 200, || format!("{answer:?}"))
    };
    eventually(SOON, &mut healthy);
    let mut wait = |is_so: &dyn Fn(&SessionStatus) -> bool| {
        eventually(6 * SOON, || {
            healthy()?;
            let taps = lab.try_status()?.taps;
            let sessions: Vec<_> = taps.iter().flat_map(|tap| &tap.sessions).collect();
            check(sessions.len() == 1 && is_so(sessions[0]), || format!("{sessions:?}"))
        });
    };
    wait(&|_| true);
    let listed = began.elapsed();
    let (inside, mirror) = (Inside::of(&web), Capture::start(lab.node(), MIRROR));
    db.ping(web.v4(), 5, 56);
    eventually(SOON, || mirror.frames().same_as(&inside.capture.frames()));
    let refused = || agent.log_with(&["Mirror aaa/mirror-", "spec: it has more than 128 KiB"]).len();
    assert_eq!(refused(), LARGE);

    // The watch has these changes in order.
    let large = self::large();
    let changes = (0..CHANGES).map(|_| object(LARGE - 1, "aaa", &large));
    let cut = json!({ "podSelector": {}, "snapLength": 96 }).to_string();
    for change in changes.chain([object(LARGE + SLOW, "shop", &cut)]) {
        eventually(SOON, || check(server.send("mirrors", &change) == 1, || "no watch".into()));
    }
    wait(&|session| session.settings["snaplen"] == "96");
    assert_eq!(refused(), LARGE, "each is reported once");
    let (_, most) = memory(agent.pid());
    eprintln!(
        "objects: the neighbour's Mirror after {listed:.1?}; at most {most:.1} MiB; healthy within {longest:.2?}, with a CPU for {own:.2?}"
    );
    assert!(most < MOST_MIB, "{most} MiB");
    assert!(own < scaled(HEALTH) && longest < scaled(BUSY_HEALTH), "{own:?} {longest:?}");
    agent.stop();
}

/// The Mirrors of three tenants: the hostile ones in `aaa` and `bbb`, and the last one in `shop`.
fn mirror(number: usize, large: &str) -> String {
    if number < LARGE {
        object(number, "aaa", large)
    } else if number < LARGE + SLOW {
        let chains: Vec<_> = (1..40).map(|next| format!("ip6 protochain {next}")).collect();
        object(number, "bbb", &json!({ "podSelector": {}, "filter": chains.join(" or ") }).to_string())
    } else {
        object(number, "shop", &json!({ "podSelector": {} }).to_string())
    }
}

fn object(number: usize, namespace: &str, spec: &str) -> String {
    let metadata = json!({
        "name": format!("mirror-{number}"), "namespace": namespace, "uid": format!("uid-{number}"),
        "resourceVersion": "5", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z",
    });
    format!(r#"{{"apiVersion":"podmirror.io/v1alpha1","kind":"Mirror","metadata":{metadata},"spec":{spec}}}"#)
}

/// A selector of 1.3 MB, which selects no pod.
fn large() -> String {
    let values: Vec<_> = (0..65_000).map(|value| format!("some-value-{value:07}")).collect();
    let expression = json!({ "key": "app", "operator": "In", "values": values });
    json!({ "podSelector": { "matchExpressions": [expression] } }).to_string()
}
