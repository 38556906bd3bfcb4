//! `kubectl mirror status` in its output formats, and with `--watch`.

use std::fs::{self, File};

use mirror_tests::{Cluster, SOON, Tail, Terminal, check, eventually, pod_object};
use serde_json::{Value, json};

use super::{plugin, told};

/// Moves to the upper left corner of a terminal, and clears it.
const CLEAR: &str = "\x1b[H\x1b[J";

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

    let rows: Value = eventually(3 * SOON, || {
        let rows: Value = serde_json::from_str(&told(cluster, &["status", "-o", "json"])).unwrap();
        let counts = (&rows[0]["selected"], &rows[0]["covered"]);
        check(counts == (&json!(2), &json!(1)), || format!("{rows:#}")).map(|()| rows)
    });
    assert_eq!((&rows[0]["nodes"], rows.as_array().unwrap().len()), (&json!([node]), 1), "{rows:#}");
    let yaml = told(cluster, &["status", "-o", "yaml"]);
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), rows, "{yaml}");

    let why = format!("Mirror {namespace}/mine does not cover {namespace}/on-host on {node}: HostNetwork: ");
    let wide = told(cluster, &["status", "-o", "wide"]);
    let lines: Vec<_> = wide.lines().collect();
    assert!(lines.len() == 3 && lines[0].ends_with("  NODES"), "{wide}");
    assert!(lines[1].ends_with(&format!("  {node}")) && lines[2].starts_with(&why), "{wide}");
    let table = told(cluster, &["status"]);
    assert!(table.lines().count() == 2 && table.ends_with("  1\n"), "{table}");
}

#[test]
fn status_shows_a_change_while_it_is_watched() {
    let cluster = &Cluster::new("watched");
    let files = cluster.host().files();
    let path = files.join("watched.txt");
    let mut appended = plugin(cluster, &["status", "--watch"]);
    let appending = Tail::of(appended.stdout(File::create(&path).unwrap()), path.clone());
    let terminal = Terminal::start(&plugin(cluster, &["status", "--watch"]), files);
    let shown = |text: &str| {
        for read in [&|| fs::read_to_string(&path).unwrap(), &|| terminal.shown()] as [&dyn Fn() -> String; 2]
        {
            eventually(SOON, || check(read().contains(text), || format!("no {text:?}: {:?}", read())));
        }
    };
    shown("no Mirrors");
    mirror(cluster, "mine", "nobody");
    shown(" mine ");
    appending.interrupt();
    let exit = appending.exit();
    assert_eq!((exit.code, &exit.stderr[..]), (Some(0), ""), "{exit:?}");
    let screens = terminal.shown();
    assert_eq!(terminal.interrupt(), Some(0), "{screens:?}");

    // In a file, the outputs follow each other; on a terminal, each replaces the one before.
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("no Mirrors\n\n") && !text.contains('\x1b'), "{text:?}");
    let tables: Vec<_> = text.split("\n\n").collect();
    assert!(
        tables.iter().all(|table| table.starts_with("no Mirrors") || table.starts_with("KIND ")),
        "{text:?}"
    );
    let (_, screens) = screens.split_once(CLEAR).unwrap();
    let screens: Vec<_> = screens.split(CLEAR).collect();
    assert!(screens.len() >= 2 && screens[0].starts_with("no Mirrors\r\n"), "{screens:?}");
    assert!(screens.iter().all(|screen| !screen.contains("\r\n\r\n")), "{screens:?}");
}
