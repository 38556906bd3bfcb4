//! The agent's HTTP server: metrics, readiness, health, and malicious clients.

use std::{collections::BTreeMap, io::Write as _, net::TcpListener};

use mirror_tests::{Agent, LISTEN, Lab, Metrics, PodSpec, PodsFile, SOON, Status, check, eventually};

use crate::{MIRROR, Node, any_mode};

/// A gauge for each direction of a NIC, whose label depends on the traffic.
const COVERAGE: &str = "podmirror_nic_coverage";
const UP: &str = "podmirror_target_up{destination=\"mirror0\",target=\"default\",type=\"device\"}";
const DROPPED: &str = "podmirror_target_dropped_frames_total{destination=\"mirror0\",target=\"default\"}";
const OPS: [&str; 10] = [
    "set_target",
    "remove_target",
    "set_ceilings",
    "put_tap",
    "remove_tap",
    "add_session",
    "change_session",
    "remove_session",
    "attach",
    "detach",
];

/// The expected metrics of packets and bytes, from the status.
fn counters_of(status: &Status) -> Metrics {
    let mut counters = Metrics::new();
    for tap in &status.taps {
        let pod = tap.pod.as_ref().unwrap();
        for (session, counts) in tap.sessions.iter().flat_map(|of| of.counters.iter().map(move |it| (of, it)))
        {
            let labels = format!(
                "{{direction=\"{}\",mirror=\"{}\",namespace=\"{}\",nic=\"{}\",pod=\"{}\",result=\"{}\",target=\"{}\"}}",
                counts.direction,
                session.mirror,
                pod.namespace,
                tap.nic,
                pod.name,
                counts.result,
                session.target,
            );
            counters.insert(format!("podmirror_packets_total{labels}"), counts.packets as f64);
            counters.insert(format!("podmirror_bytes_total{labels}"), counts.bytes as f64);
        }
    }
    counters
}

/// The metrics whose names begin with one of `starts`.
fn only(metrics: &Metrics, starts: &[&str]) -> Metrics {
    let is_one = |series: &String| starts.iter().any(|start| series.starts_with(start));
    metrics
        .iter()
        .filter(|(series, _)| is_one(series))
        .map(|(series, value)| (series.clone(), *value))
        .collect()
}

/// The metrics that are neither times, nor counters of packets and bytes, nor the coverage, nor of the process.
fn states(metrics: &Metrics) -> BTreeMap<&str, f64> {
    let is_other = |series: &str| {
        let of_packets = series.contains("s_total{direction") || series.starts_with(COVERAGE);
        series.contains("_seconds") || series.starts_with("process_") || of_packets
    };
    metrics
        .iter()
        .map(|(series, value)| (series.as_str(), *value))
        .filter(|(series, _)| !is_other(series))
        .collect()
}

#[test]
fn metrics_tell_of_every_packet_what_status_tells() {
    let Node { web, db, lab } = &Node::bridged("metrics");
    let hidden = || PodSpec::named("hidden").mirror("true").host_network();
    let cut = |pod| PodSpec::of(pod).annotated("podmirror.io/snaplen", "96");
    let of_web = || cut(web).mirror("egress").annotated("podmirror.io/filter", "icmp");
    let chosen = [
        of_web(),
        cut(db).mirror("true").annotated("podmirror.io/packets", "3"),
        hidden(),
        PodSpec::named("odd").mirror("perhaps"),
    ];
    let pods = PodsFile::new(lab, &[PodSpec::named("idle")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_get("/readyz", 200);
    pods.write(&chosen);
    lab.wait_mirrored(&[web, db]);
    web.ping(db.v4(), 10, 56);
    web.udp_echo(db, db.v6(), &[1, 1000, 1400]);

    // The metrics can be older than the status, for a moment.
    let counted = ["podmirror_packets_total", "podmirror_bytes_total"];
    let (status, metrics) = eventually(SOON, || {
        let (metrics, status) = (lab.metrics(), lab.status());
        check(only(&metrics, &counted) == counters_of(&status), || format!("{metrics:#?}: {status:#?}"))?;
        Ok((status, metrics))
    });
    for verdict in ["copied", "other_direction", "filtered", "duplicate", "ended"] {
        let total: u64 = status.taps.iter().map(|tap| tap.total(verdict)).sum();
        assert!(total > 0, "no {verdict}: {status:#?}");
    }
    // Each ping of 98 bytes has a copy of 96.
    let total = |name: &str, result: &str| {
        let labels = "direction=\"egress\",mirror=\"default\",namespace=\"default\",nic=\"eth0\",pod=\"web\"";
        metrics[&format!("podmirror_{name}_total{{{labels}{result},target=\"default\"}}")]
    };
    let copied = total("packets", ",result=\"copied\"");
    assert!(copied >= 10.0, "{metrics:#?}");
    assert_eq!(total("bytes", ",result=\"copied\""), 98.0 * copied);
    assert_eq!(total("copied_bytes", ""), 96.0 * copied);

    let count = |metrics: &Metrics, name: &str| metrics[&format!("{name}_seconds_count")];
    assert_eq!(count(&metrics, "podmirror_attach_duration"), 5.0, "two hooks of two taps, one that cuts");
    assert_eq!(count(&metrics, "podmirror_tap_latency"), 2.0, "{metrics:#?}");
    assert!(count(&metrics, "podmirror_reconcile_duration") >= 2.0, "{metrics:#?}");
    assert!(metrics["podmirror_tap_latency_seconds_sum"] > 0.0, "{metrics:#?}");
    let cpus = aya::util::nr_cpus().unwrap().get();
    let (version, revision) = status.version.trim_end_matches(')').split_once(" (").unwrap();
    let build = format!("podmirror_build_info{{revision=\"{revision}\",version=\"{version}\"}}");
    let instructions = metrics["podmirror_filter_instructions"];
    assert!((4.0..1000.0).contains(&instructions), "of `icmp`: {instructions}");
    let mut expected = BTreeMap::from([
        (build.as_str(), 1.0),
        ("podmirror_taps_desired", 2.0),
        ("podmirror_taps", 2.0),
        ("podmirror_pod_side_taps", 0.0),
        ("podmirror_pods_not_mirrored{extent=\"whole\",reason=\"HostNetwork\"}", 1.0),
        ("podmirror_bad_annotations", 1.0),
        (UP, 1.0),
        (DROPPED, 0.0),
        ("podmirror_sessions", 2.0),
        ("podmirror_sessions_max", f64::from(4096.min(131_072 / cpus))),
        ("podmirror_taps_max", 4096.0),
        ("podmirror_filters", 1.0),
        ("podmirror_filters_max", 1024.0),
        ("podmirror_filter_instructions", instructions),
        ("podmirror_filter_instructions_max", 1_048_576.0),
        ("podmirror_ended_sessions", 1.0),
        ("podmirror_pending_failures", 0.0),
    ]);
    let failures = OPS.map(|op| format!("podmirror_op_failures_total{{op=\"{op}\"}}"));
    expected.extend(failures.iter().map(|series| (series.as_str(), 0.0)));
    assert_eq!(states(&metrics), expected);
    assert_eq!(only(&metrics, &[COVERAGE]).len(), 3, "egress of web, both directions of db: {metrics:#?}");

    // Every change shows in the metrics; series of removed objects disappear.
    lab.node().ip(&format!("link set {MIRROR} down"));
    lab.wait_metrics(|metrics| metrics[UP] == 0.0);
    pods.write(&[of_web()]);
    for (series, value) in [
        ("podmirror_taps_desired", 1.0),
        ("podmirror_taps", 1.0),
        ("podmirror_bad_annotations", 0.0),
        (UP, 0.0),
        ("podmirror_sessions", 1.0),
        ("podmirror_ended_sessions", 0.0),
    ] {
        expected.insert(series, value);
    }
    expected.remove("podmirror_pods_not_mirrored{extent=\"whole\",reason=\"HostNetwork\"}");
    let metrics = lab.wait_metrics(|metrics| states(metrics) == expected);
    assert_eq!(only(&metrics, &[COVERAGE]).len(), 1, "{metrics:#?}");
    assert_eq!(only(&metrics, &counted), counters_of(&lab.status()));
    agent.stop();
}

#[test]
fn ready_after_the_first_good_list_and_not_unready_by_a_bad_one() {
    let Node { web, db: _db, lab } = &Node::bridged("ready");
    let pods = PodsFile::new(lab, &[PodSpec::named("idle")]);
    pods.write_in_place("]garbage: [");
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    assert_eq!(lab.wait_get("/readyz", 503), "there is no complete list of pods yet\n");
    assert_eq!(lab.wait_get("/healthz", 200), "ok\n", "a bad file is no reason to start it again");
    pods.write(&[PodSpec::of(web).mirror("true")]);
    lab.wait_get("/readyz", 200);
    // When the agent is ready, the tap is attached.
    assert_eq!(lab.metrics()["podmirror_taps"], 1.0);
    lab.wait_mirrored(&[web]);
    pods.write_in_place("]garbage: [");
    agent.wait_for_log(&["the last good list of pods stays in force"]);
    assert_eq!((lab.get("/readyz").status, lab.get("/healthz").status), (200, 200));
    agent.stop();
}

#[test]
fn other_paths_and_methods_are_refused() {
    let lab = &Lab::new("http");
    let pods = PodsFile::new(lab, &[PodSpec::named("idle")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_get("/readyz", 200);
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/debug", 404),
        ("POST", "/metrics", 405),
        ("PUT", "/healthz", 405),
        ("DELETE", "/readyz", 405),
        ("GET", "/readyz?verbose", 200),
    ] {
        let answer = lab.request(method, path).unwrap();
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert_eq!(answer.head.contains("allow: GET, HEAD"), status == 405, "{answer:?}");
    }
    let head = lab.request("HEAD", "/healthz").unwrap();
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    agent.stop();
}

#[test]
fn clients_that_mean_no_good_stop_neither_the_loop_nor_each_other() {
    let Node { web, db, lab } = &Node::bridged("clients");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let mut silent: Vec<_> = (0..100).map(|_| lab.connect().unwrap()).collect();
    for (number, client) in silent.iter_mut().enumerate() {
        // Some clients send nothing, some half a request, some garbage. The agent has already closed the first
        // connections.
        let _ = match number % 3 {
            0 => Ok(()),
            1 => client.write_all(b"GET /metrics HTTP/1.1\r\nX-Slow: "),
            _ => client.write_all(&[0xff; 20_000]),
        };
    }
    assert_eq!(lab.get("/healthz").status, 200);
    assert_eq!(lab.metrics()["podmirror_taps"], 1.0);
    pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")]);
    lab.wait_mirrored(&[web, db]);
    let sockets = lab.node().run("ss -Htn state established sport = :10706");
    assert!(sockets.lines().count() <= 32, "{sockets}");
    agent.stop();
}

#[test]
fn an_address_that_cannot_be_used_is_told_and_tried_again_while_mirroring_goes_on() {
    let Node { web, db, lab } = &Node::bridged("in-use");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let taken = lab.node().enter(|| TcpListener::bind(LISTEN)).unwrap();
    let failures = |status: &Status| -> Vec<String> {
        let notes = status.notes.as_ref().map(|notes| notes["failures"].clone());
        notes.map_or_else(Vec::new, |failures| serde_json::from_value(failures).unwrap())
    };
    for (address, reason) in [("192.0.2.1:10706", "assign"), (LISTEN, "in use")] {
        let agent = Agent::run(lab, any_mode(), &pods, &["--listen", address]);
        let status = lab.wait_status(|status| {
            check(!failures(status).is_empty() && status.taps.len() == 1, || "no failure is reported".into())
        });
        let failure = &failures(&status)[0];
        for word in ["--listen", address, reason] {
            assert!(failure.contains(word), "no {word}: {failure}");
        }
        let table = lab.agent_exit(&["status"]).stdout;
        assert!(table.contains(failure), "{table}");
        // The mirrored pod stays mirrored, and new pods are mirrored too.
        lab.wait_mirrored(&[web]);
        pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")]);
        let copied = lab.wait_mirrored(&[web, db]).tap(web.veth_host()).total("copied");
        web.ping(db.v4(), 10, 56);
        assert!(lab.status().tap(web.veth_host()).total("copied") >= copied + 10);
        pods.write(&[PodSpec::of(web).mirror("true")]);
        lab.wait_mirrored(&[web]);
        if address == LISTEN {
            drop(taken);
            lab.wait_get("/readyz", 200);
            assert_eq!(failures(&lab.status()), Vec::<String>::new());
            agent.wait_for_log(&["serving /healthz", address]);
            assert_eq!(lab.metrics()["podmirror_taps"], 1.0);
            agent.stop();
            break;
        }
        let told = agent.log_with(&["ERROR", "mirroring continues", reason]);
        assert_eq!(told.len(), 1, "{:#?}", agent.log());
        agent.stop();
    }
    let exit = lab.agent_exit(&["run", "--pods-from", pods.path(), "--listen", "localhost"]);
    assert_eq!(exit.code, Some(2), "{exit:?}");
    assert!(exit.stderr.contains(LISTEN), "{exit:?}");
}

#[test]
fn an_empty_address_switches_it_off() {
    let lab = &Lab::new("off");
    let pods = PodsFile::new(lab, &[PodSpec::named("idle")]);
    for (arguments, variables) in [(&["--listen", ""][..], &[][..]), (&[], &[("PODMIRROR_LISTEN", "")])] {
        let words = [&["run", "--pods-from", pods.path()][..], arguments].concat();
        let agent = Agent::with_environment(lab, &words, variables);
        // By now the agent would listen.
        agent.wait_for_log(&["the mirror interface is up"]);
        assert_eq!(lab.node().run("ss -Hltn"), "");
        agent.stop();
    }
    let agent = Agent::run(lab, any_mode(), &pods, &["--listen", "[::1]:9465"]);
    agent.wait_for_log(&["[::1]:9465", "/metrics"]);
    assert!(lab.node().run("ss -Hltn").contains("[::1]:9465"));
    agent.stop();
}
