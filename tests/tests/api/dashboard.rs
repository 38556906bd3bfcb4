//! The chart's dashboard and alerts: a real Prometheus scrapes an agent, a controller and a packets API server, and
//! answers each query.
//!
//! With `PODMIRROR_WRITE_DASHBOARD=1` the story takes two minutes longer, and draws `docs/dashboard.svg`.

mod picture;

use std::{
    env, fs,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use mirror_test_cluster::built::BACKEND_IP;
use mirror_tests::{Answer, LISTEN, Lab, Pinging, Reader, Relay, SOON, Tail, check, eventually};
use serde_json::{Value, json};

use self::picture::Panel;
use crate::{
    Node,
    controller::controller,
    packets::Packets,
    resources::{Story, file, run},
};

const PROMETHEUS: &str = "127.0.0.1:9090";
const CONTROLLER: &str = "127.0.0.1:10707";
const ALERTS: &str = "deploy/chart/files/alerts.yaml";
const DASHBOARD: &str = "deploy/chart/files/dashboard.json";
/// The tests of the alerts for promtool.
const ALERT_TESTS: &str = "xtask/chart/alerts.yaml";
const PICTURE: &str = "docs/dashboard.svg";
/// Alerts whose condition holds in the story. Only the time is missing.
const PENDING: [&str; 2] = ["PodmirrorNotMirrored", "PodmirrorTargetDown"];
/// The traffic of the picture: milliseconds between two pings, and their number.
const PHASES: [(u64, usize); 4] = [(50, 600), (5, 6000), (1, 20_000), (20, 1500)];
/// The time that the picture shows, in seconds.
const SHOWN: u64 = 100;

/// The path of a file of the work tree.
fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)
}

/// A query of the dashboard: its panel's title and unit, the expression, and the name of each series. A variable has no
/// panel, and its title is empty.
#[derive(Debug)]
struct Query {
    title: String,
    unit: String,
    expr: String,
    legend: String,
}

impl Query {
    /// The name of a series in the legend. An error if the series lacks a label.
    fn name(&self, series: &Value) -> Result<String, String> {
        let mut name = self.legend.clone();
        while let Some((before, rest)) = name.split_once("{{") {
            let (label, after) = rest.split_once("}}").unwrap();
            let value = &series["metric"][label];
            let value = value.as_str().ok_or_else(|| format!("no label {label}: {series}"))?;
            name = format!("{before}{value}{after}");
        }
        Ok(name)
    }
}

/// All queries of the dashboard.
fn queries() -> Vec<Query> {
    let dashboard: Value = serde_json::from_str(&file(DASHBOARD)).unwrap();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut queries = Vec::new();
    for panel in list(&dashboard["panels"]) {
        let (title, unit) = (text(&panel["title"]), text(&panel["fieldConfig"]["defaults"]["unit"]));
        queries.extend(list(&panel["targets"]).iter().map(|target| Query {
            title: title.clone(),
            unit: unit.clone(),
            expr: text(&target["expr"]),
            legend: text(&target["legendFormat"]),
        }));
    }
    for variable in list(&dashboard["templating"]["list"]) {
        if let Some(values) = text(&variable["query"]).strip_prefix("label_values(") {
            let (metric, label) = values.trim_end_matches(')').split_once(", ").unwrap();
            let (expr, legend) = (format!("group by ({label}) ({metric})"), format!("{{{{{label}}}}}"));
            queries.push(Query { title: String::new(), unit: String::new(), expr, legend });
        }
    }
    queries
}

/// Queries for the series with which promtool tests the alerts: those of podmirror, with the same labels and any values.
fn series_of_alerts() -> Vec<Query> {
    let tests: Value = serde_saphyr::from_str(&file(ALERT_TESTS)).unwrap();
    let tests = tests["tests"].as_array().unwrap();
    let series = tests.iter().flat_map(|test| test["input_series"].as_array().unwrap());
    let series = series.map(|series| series["series"].as_str().unwrap());
    let queries = series.filter(|series| series.starts_with("podmirror_")).map(|series| {
        let without_values: Vec<_> = series.split('"').step_by(2).collect();
        let expr = without_values.join("\"\"").replace('=', "!=");
        Query { title: String::new(), unit: String::new(), expr, legend: String::new() }
    });
    queries.collect()
}

/// A Prometheus on the node, with the chart's alerts. It is killed on drop.
struct Prometheus<'l> {
    lab: &'l Lab,
    _server: Reader,
}

impl<'l> Prometheus<'l> {
    /// Starts it. `server` is the address of the metrics of the packets API server.
    #[track_caller]
    fn start(lab: &'l Lab, server: SocketAddr) -> Self {
        // As the chart's PodMonitor does.
        let labels = json!({ "namespace": "podmirror", "node": "one", "pod": "podmirror-one" });
        let scraped = json!({ "targets": [LISTEN, CONTROLLER, server.to_string()], "labels": labels });
        let config = json!({
            "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
            "rule_files": [path(ALERTS)],
            "scrape_configs": [{ "job_name": "podmirror", "honor_labels": true, "static_configs": [scraped] }],
        });
        let [config_file, data] = ["prometheus.json", "prometheus"].map(|name| lab.files().join(name));
        fs::write(&config_file, config.to_string()).unwrap();
        let promtool = PathBuf::from(env::var_os("MIRROR_PROMTOOL").unwrap());
        let mut server = lab.node().command(promtool.with_file_name("prometheus"));
        server.arg("--config.file").arg(config_file).arg("--storage.tsdb.path").arg(data);
        server.args(["--web.listen-address", PROMETHEUS, "--log.level", "warn"]);
        Self { lab, _server: Reader::start(lab, "prometheus", server) }
    }

    /// The data in the answer to a request.
    fn get(&self, path: &str) -> Result<Value, String> {
        let address: SocketAddr = PROMETHEUS.parse().unwrap();
        let connection = self.lab.node().enter(|| TcpStream::connect(address));
        let connection = connection.map_err(|error| format!("{address}: {error}"))?;
        let Answer { status, body, .. } = Answer::to(&format!("GET {path} HTTP/1.0\r\n\r\n"), connection)?;
        check(status == 200, || body.clone())?;
        let mut answer: Value = serde_json::from_str(&body).map_err(|error| format!("{error}: {body}"))?;
        Ok(answer["data"].take())
    }

    /// The series of a query, with variables as Grafana sets them for all nodes and namespaces.
    fn series(&self, request: &str, query: &Query) -> Result<Vec<Value>, String> {
        let variables = [("$__rate_interval", "10s"), ("$node", ".*"), ("$namespace", ".*")];
        let expr = variables.iter().fold(query.expr.clone(), |expr, (name, value)| expr.replace(name, value));
        let encoded: String = expr.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let data = self.get(&format!("/api/v1/{request}query={encoded}"))?;
        data["result"].as_array().cloned().ok_or_else(|| format!("no series: {data}"))
    }

    /// Checks that a query has a number, and each of its series a name.
    fn has_data(&self, query: &Query) -> Result<(), String> {
        let series = self.series("query?", query)?;
        let is_number = |series: &Value| series["value"][1].as_str().is_some_and(|value| value != "NaN");
        check(series.iter().any(is_number), || format!("no data: {query:?}, {series:?}"))?;
        series.iter().try_for_each(|series| query.name(series).map(drop))
    }

    /// The panels of these queries, drawn.
    fn picture(&self, queries: &[Query]) -> String {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let begin = now - SHOWN;
        let request = format!("query_range?start={begin}&end={now}&step=1&");
        let point = |point: &Value| {
            let value: f64 = point[1].as_str()?.parse().ok()?;
            value.is_finite().then_some((point[0].as_f64()? - begin as f64, value))
        };
        let drawn = |query: &Query| {
            let series = self.series(&request, query).unwrap();
            let lines = series.iter().map(|series| {
                let points = series["values"].as_array().unwrap();
                (query.name(series).unwrap(), points.iter().filter_map(&point).collect())
            });
            lines.collect::<Vec<_>>()
        };
        let panels =
            queries.chunk_by(|one, next| one.title == next.title).filter(|of| !of[0].title.is_empty());
        let panels = panels.map(|of| Panel {
            title: &of[0].title,
            unit: &of[0].unit,
            series: of.iter().flat_map(&drawn).collect(),
        });
        picture::draw(&panels.collect::<Vec<_>>())
    }
}

#[test]
fn prometheus_answers_every_query_of_the_dashboard_and_the_alerts() {
    let story = &Story::new("dashboard");
    let node @ Node { api, lab } = &story.node;
    // The port is free again, and unlikely to be taken before the server uses it.
    let server = TcpListener::bind((BACKEND_IP, 0)).unwrap().local_addr().unwrap();
    let packets = Packets::start(api, 1, &["--listen", &server.to_string()]);
    packets.connect(lab);
    let _relay = Relay::start(lab.node(), server);
    let prometheus = Prometheus::start(lab, server);
    // A controller that waits for the Lease has all its metrics, and writes no status.
    api.apply(&json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "podmirror-controller" },
        "spec": { "holderIdentity": "other", "leaseDurationSeconds": 3600 },
    }));
    let waiting = controller(story, "waiting", CONTROLLER);
    let pods = node.pods(["web", "db"]);
    let annotations = [
        ("podmirror.io/mirror", "true"),
        ("podmirror.io/mirror.live", "true"),
        ("podmirror.io/target.live", "live"),
        ("podmirror.io/mirror.gone", "true"),
        ("podmirror.io/target.gone", "gone"),
    ];
    let _containers = run(node, &pods, &annotations);
    // A pod without a network namespace yet.
    api.apply(&api.object("starting", &annotations));
    let [web, db] = &pods;
    let gone = format!("gone=pod:{}/gone", api.namespace());
    let agent = packets.agent(lab, &["--define-target", "live=stream", "--define-target", &gone]);
    lab.wait_mirrored(&[web, db]);
    packets.wait_connected(&[lab]);
    let reports = format!("get --raw {}", packets.uri("podreports"));
    api.kubectl(&reports);
    let recorder = Tail::of(
        &mut lab.agent(&["recorder", "--target", "live", "--ring", "1MB"]),
        lab.files().join("none"),
    );
    let pinging = Pinging::start(db.netns(), web.v4());

    let queries = queries();
    assert!(queries.len() > 20, "{queries:#?}");
    eventually(SOON, || queries.iter().try_for_each(|query| prometheus.has_data(query)));
    let series = series_of_alerts();
    assert!(series.len() > 20, "{series:#?}");
    eventually(SOON, || series.iter().try_for_each(|query| prometheus.has_data(query)));
    eventually(SOON, || {
        let data = prometheus.get("/api/v1/rules")?;
        let rules = data["groups"][0]["rules"].as_array().ok_or("no rules")?;
        let pending = rules.iter().filter(|rule| rule["state"] == "pending").map(|rule| &rule["name"]);
        let is_well = rules.iter().all(|rule| rule["health"] == "ok") && pending.eq(&PENDING);
        check(is_well, || format!("{data:#}"))
    });

    if env::var_os("PODMIRROR_WRITE_DASHBOARD").is_some() {
        for (interval, count) in PHASES {
            db.ping_every(Duration::from_millis(interval), web.v4(), count, 500);
            api.kubectl(&reports);
        }
        fs::write(path(PICTURE), prometheus.picture(&queries)).unwrap();
    }
    let picture = file(PICTURE);
    for Query { title, .. } in &queries {
        assert!(picture.contains(title), "{title} is not in {PICTURE}: PODMIRROR_WRITE_DASHBOARD=1 draws it");
    }
    pinging.stop();
    recorder.kill();
    agent.stop();
    waiting.stop();
}
