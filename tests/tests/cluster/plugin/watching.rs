//! `kubectl mirror status` in its output formats, and with `--watch`.

use std::fs::{self, File};

use mirror_tests::{Cluster, SOON, Tail, Terminal, check, eventually, pod_object};
use serde_json::{Value, json};

use super::{plugin, told};

/// Moves to the upper left corner of a terminal; clears the rest of a line, and all below.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

/// A Mirror for the pods with this label `app`.
fn mirror(cluster: &Cluster, name: &str, app: &str) {
    cluster.apply(&json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": { "name": name },
        "spec": { "podSelector": { "matchLabels": { "app": app } }, "filter": "icmp" },
    }));
}

#[test]
fn status_names_the_nodes_and_the_pods_that_are_not_covered() {
    let cluster = &Cluster::new("forms");
    let namespace = cluster.namespace();
    let [web] = &cluster.pods([("web", None)]);
    let mut on_host = pod_object("on-host", "exec sleep 3600");
    on_host["metadata"]["labels"]["app"] = "web".into();
    on_host["spec"]["hostNetwork"] = true.into();
    cluster.apply(&on_host);
    mirror(cluster, "mine", "web");
    cluster.host().wait_taps(&[&web.device]);
    let node = cluster.kubectl("get nodes -o jsonpath={.items[*].metadata.name}");

    let list = eventually(3 * SOON, || {
        let list: Value = serde_json::from_str(&told(cluster, &["status", "-o", "json"])).unwrap();
        let pods = &list["items"][0]["status"]["pods"];
        check(*pods == json!({ "selected": 2, "covered": 1 }), || format!("{list:#}")).map(|()| list.clone())
    });
    let status = &list["items"][0]["status"];
    assert_eq!(
        (&status["reportingNodes"], &status["uncovered"][0]["node"]),
        (&json!(1), &json!(node)),
        "{list:#}"
    );

    let why = format!("Mirror {namespace}/mine does not cover {namespace}/on-host on {node}: HostNetwork: ");
    let wide = told(cluster, &["status", "-o", "wide"]);
    let lines: Vec<_> = wide.lines().collect();
    assert!(lines.len() == 3 && lines[0].ends_with("  NODES  DIRECTION  FILTER"), "{wide}");
    assert!(lines[1].ends_with("  1      <none>     icmp") && lines[2].starts_with(&why), "{wide}");
    let table = told(cluster, &["status"]);
    assert!(table.lines().count() == 2 && table.ends_with("  1\n"), "{table}");
}

#[test]
fn status_shows_a_change_while_it_is_watched() {
    let cluster = &Cluster::new("watched");
    let files = cluster.host().files();
    let path = files.join("watched.txt");
    let mut appended = plugin(cluster, &["status", "-w"]);
    let mut appending = Tail::of(appended.stdout(File::create(&path).unwrap()), path.clone());
    let terminal = Terminal::start(&plugin(cluster, &["status", "--watch"]), files);
    let shown = |read: &dyn Fn() -> String, text: &str| {
        eventually(SOON, || check(read().contains(text), || format!("no {text:?}: {:?}", read())));
    };
    let none = format!("No resources found in {} namespace.", cluster.namespace());
    appending.wait_for_log(&none);
    shown(&|| terminal.shown(), &none);
    mirror(cluster, "mine", "nobody");
    shown(&|| terminal.shown(), "mine ");
    shown(&|| fs::read_to_string(&path).unwrap(), "mine ");
    appending.interrupt();
    let exit = appending.exit();
    assert_eq!((exit.code, &exit.stderr), (Some(0), &none), "{exit:?}");
    let screens = terminal.shown();
    assert_eq!(terminal.interrupt(), Some(0), "{screens:?}");

    // In a file, tables that differ follow each other; on a terminal, each is drawn over the one before.
    let text = fs::read_to_string(&path).unwrap();
    let tables: Vec<_> = text.trim_end().split("\n\n").collect();
    assert!(tables.iter().all(|table| table.starts_with("NAME ")), "{text:?}");
    assert!(tables.is_sorted_by(|one, next| one != next) && !text.contains('\x1b'), "{text:?}");
    let (_, screens) = screens.split_once(HOME).unwrap();
    let screens: Vec<_> = screens.split(HOME).collect();
    assert!(screens.len() >= 2 && screens[0] == format!("{none}{REST_OF_LINE}\r\n{REST}"), "{screens:?}");
    // The last one may be cut.
    let (_, whole) = screens.split_last().unwrap();
    for screen in whole {
        let lines = screen.strip_suffix(REST).unwrap();
        assert!(!lines.contains(REST), "{screens:?}");
        assert!(lines.lines().all(|line| line.ends_with(REST_OF_LINE)), "{screens:?}");
    }
}
