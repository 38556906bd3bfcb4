//! `kubectl mirror` beside kubectl, with a real API server: the same words, outputs and exit codes.

mod terminal;

use std::{
    env, fs,
    os::unix::fs::symlink,
    process::{Command, Output},
};

use mirror_tests::{Api, SOON, check, eventually};
use serde_json::{Value, json};

use crate::{
    controller::alone,
    resources::{Story, resource},
};

/// The exit code, and what was printed to standard output and standard error.
pub(crate) type Told = (Option<i32>, String, String);

fn told(command: &mut Command) -> Told {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
    (status.code(), stdout, stderr)
}

/// `kubectl mirror` with these words, for the namespace of the story.
pub(crate) fn plugin(api: &Api, words: &str) -> Told {
    told(&mut command(api, words))
}

pub(crate) fn command(api: &Api, words: &str) -> Command {
    let mut plugin = Command::new(env::var_os("MIRROR_PLUGIN").unwrap());
    plugin.env("KUBECONFIG", api.kubeconfig()).args(words.split_whitespace());
    plugin
}

fn kubectl(api: &Api, words: &str) -> Told {
    told(&mut api.command(words))
}

fn said(line: &str) -> Told {
    (Some(0), format!("{line}\n"), String::new())
}

/// A Deployment that no controller makes pods for.
fn deploy(api: &Api, name: &str) {
    let template = api.object(name, &[]);
    api.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": name },
        "spec": {
            "selector": { "matchLabels": { "app": name } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    }));
}

#[test]
fn a_mirror_is_made_shown_and_deleted_as_by_kubectl() {
    let story = Story::new("plugin");
    let api = &story.node.api;
    deploy(api, "web");
    let name = "mirror.podmirror.io/deploy-web";
    let no_mirrors = kubectl(api, "get mirrors");
    assert_eq!(no_mirrors.0, Some(0));
    assert_eq!(plugin(api, "status"), no_mirrors);

    // A dry run prints what kubectl takes.
    let (code, yaml, _) = plugin(api, "on deploy web --filter udp --dry-run=client -o yaml");
    assert_eq!(code, Some(0), "{yaml}");
    let applied = api.kubectl_with("apply --server-side --dry-run=server -f -", &yaml);
    assert_eq!(applied, format!("{name} serverside-applied (server dry run)\n"));
    assert_eq!(plugin(api, "on deploy web --dry-run=client"), said(&format!("{name} created (dry run)")));
    assert_eq!(
        plugin(api, "on deploy web --dry-run=server"),
        said(&format!("{name} created (server dry run)"))
    );
    assert_eq!(plugin(api, "status"), no_mirrors);
    // Without a server, too.
    let nowhere = "--server http://127.0.0.1:1";
    assert_eq!(
        plugin(api, &format!("on -l app=web --name mine --dry-run=client {nowhere}")),
        said("mirror.podmirror.io/mine created (dry run)")
    );
    let (code, _, why) = plugin(api, &format!("status {nowhere}"));
    assert!(code == Some(1) && why.starts_with("error: the API server http://127.0.0.1:1: "), "{why}");

    assert_eq!(plugin(api, "on deploy/web --filter udp"), said(&format!("{name} created")));
    assert_eq!(plugin(api, "on deployments.apps/web --filter udp"), said(&format!("{name} unchanged")));
    assert_eq!(plugin(api, "on deployment web --filter tcp"), said(&format!("{name} configured")));
    assert_eq!(plugin(api, "on deploy web --filter tcp -o name"), said(name));
    assert_eq!(plugin(api, "status -o name"), kubectl(api, "get mirrors -o name"));
    // JSON is YAML, too. A controller of another story can change the status between both commands.
    for format in ["json", "yaml"] {
        eventually(SOON, || {
            let shown = [
                plugin(api, &format!("status -o {format}")),
                kubectl(api, &format!("get mirrors -o {format}")),
            ];
            let [ours, theirs] = shown.map(|(_, text, _)| serde_saphyr::from_str::<Value>(&text).unwrap());
            check(ours == theirs, || format!("{ours} and {theirs}"))
        });
    }
    let (_, table, _) = plugin(api, "status");
    assert!(table.starts_with("NAME  ") && table.lines().count() == 2, "{table}");

    let dry_run = kubectl(api, "delete mirror deploy-web --dry-run=server");
    assert_eq!(plugin(api, "off deploy web --dry-run=server"), dry_run);
    let (code, deleted, why) = dry_run;
    let deleted = deleted.replace(" (server dry run)", "");
    assert_eq!(plugin(api, "off deploy web"), (code, deleted, why));
    assert_eq!(plugin(api, "off deploy/web"), kubectl(api, "get mirror deploy-web"));
    let ignored = kubectl(api, "delete mirror deploy-web --ignore-not-found");
    assert_eq!(plugin(api, "off deploy web --ignore-not-found"), ignored);
    assert_eq!(plugin(api, "on deploy/nosuch"), kubectl(api, "get deploy nosuch"));
    assert_eq!(plugin(api, "explain pod nosuch"), kubectl(api, "get pod nosuch"));
    // A Mirror of another author.
    api.apply(&resource("Mirror", "mine", &json!({}), &json!({})));
    let (code, _, why) = plugin(api, "off --name mine");
    assert!(code == Some(1) && why.starts_with("error: ") && why.contains("left alone"), "{why}");
    assert_eq!(kubectl(api, "get mirrors -o name"), said("mirror.podmirror.io/mine"));
}

/// Mirrors of the plugin have `ours` in their names, and those of kubectl `theirs`.
#[test]
fn the_plugins_forms_are_kubectls() {
    let story = Story::new("plugin-forms");
    let (api, files) = (&story.node.api, story.node.lab.files());
    deploy(api, "ours");
    for filter in ["udp", "tcp"] {
        let pods = json!({ "matchLabels": { "app": "ours" } });
        let mut mirror = resource("Mirror", "deploy-theirs", &pods, &json!({ "filter": filter }));
        mirror["metadata"]["labels"] = json!({ "app.kubernetes.io/managed-by": "kubectl-mirror" });
        fs::write(files.join(format!("{filter}.json")), mirror.to_string()).unwrap();
    }
    let kubectl = |words: &str| {
        let (code, stdout, stderr) = told(api.command(words).current_dir(files));
        let [stdout, stderr] = [stdout, stderr].map(|text| text.replace("theirs", "ours"));
        (code, stdout, stderr)
    };
    // In this order: a Mirror is created, changed and deleted.
    for (ours, theirs) in [
        ("status -o wide", "get mirrors -o wide"),
        ("status -o name", "get mirrors -o name"),
        ("status -n nosuch", "get mirrors -n nosuch"),
        ("off deploy/ours", "delete mirror deploy-theirs"),
        ("off --name ours --dry-run=server", "delete mirror/theirs --dry-run=server"),
        ("on deploy/ours --filter udp --dry-run=client", "create -f udp.json --dry-run=client"),
        (
            "on deploy ours --filter udp --dry-run=client -o name",
            "create -f udp.json --dry-run=client -o name",
        ),
        ("on deploy/ours --filter udp --dry-run=server", "apply -f udp.json --dry-run=server"),
        (
            "on deploy ours --filter udp --dry-run=server -o name",
            "apply -f udp.json --dry-run=server -o name",
        ),
        ("on deploy/ours --filter udp", "apply -f udp.json"),
        ("on deploy ours --filter udp", "apply -f udp.json"),
        ("on deploy/ours --filter udp --dry-run=server", "apply -f udp.json --dry-run=server"),
        ("on deploy/ours --filter tcp --dry-run=server", "apply -f tcp.json --dry-run=server"),
        ("on deploy/ours --filter tcp", "apply -f tcp.json"),
        ("on deploy/ours --filter tcp -o name", "apply -f tcp.json -o name"),
        ("off deploy/ours --dry-run=client", "delete mirror/deploy-theirs --dry-run=client"),
        ("off deploy ours --dry-run=server -o name", "delete mirror deploy-theirs --dry-run=server -o name"),
        ("off deploy ours -o name", "delete mirror deploy-theirs -o name"),
        ("explain missing", "get pod missing"),
        ("tail missing", "get pod missing"),
        ("tail po/missing", "get po/missing"),
        ("tail deployments.apps/missing", "get deployments.apps/missing"),
        ("on sts missing", "get sts missing"),
        ("tail daemonset/missing", "get daemonset/missing"),
        ("on rs missing", "get rs missing"),
        ("tail rc/missing", "get rc/missing"),
        ("on jobs.batch missing", "get jobs.batch missing"),
        ("tail svc missing", "get svc missing"),
    ] {
        assert_eq!(plugin(api, ours), kubectl(theirs), "{ours}, and kubectl {theirs}");
    }
    let forms = ["on deploy/ours --filter udp --dry-run=client", "create -f udp.json --dry-run=client"];
    let [json, yaml] = ["json", "yaml"].map(|output| {
        let [ours, theirs] = forms.map(|words| format!("{words} -o {output}"));
        [plugin(api, &ours), kubectl(&theirs)]
    });
    let json = json.map(|(code, text, why)| (code, serde_json::from_str::<Value>(&text).unwrap(), why));
    let yaml = yaml.map(|(code, text, why)| (code, serde_saphyr::from_str::<Value>(&text).unwrap(), why));
    for [ours, theirs] in [json, yaml] {
        assert_eq!(ours, theirs);
    }

    // Of the texts, only the streams are the same. Wrong usage has an exit code of its own.
    for (ours, theirs) in [
        ("nosuch", "nosuch"),
        ("status --nosuch", "get mirrors --nosuch"),
        ("status -o nosuch", "get mirrors -o nosuch"),
        ("on deploy/ours --dry-run=nosuch", "create -f udp.json --dry-run=nosuch"),
        ("off", "delete"),
    ] {
        for (expected, (code, out, why)) in [(2, plugin(api, ours)), (1, kubectl(theirs))] {
            let is_told = out.is_empty() && why.starts_with("error: ");
            assert!(code == Some(expected) && is_told, "{ours}, and kubectl {theirs}: {code:?} {out} {why}");
        }
    }
    for (ours, theirs) in [("--help", "--help"), ("status -h", "get -h"), ("help on", "help apply")] {
        for (code, out, why) in [plugin(api, ours), kubectl(theirs)] {
            let is_told = !out.is_empty() && why.is_empty();
            assert!(code == Some(0) && is_told, "{ours}, and kubectl {theirs}: {code:?} {out} {why}");
        }
    }
}

#[test]
fn a_template_prints_what_it_prints_with_kubectl() {
    // A controller would change the status between the two commands.
    let _alone = alone();
    let story = Story::new("plugin-templates");
    let api = &story.node.api;
    let printed =
        |command: &mut Command, template: &str| told(command.args(["-o", &format!("jsonpath={template}")]));
    let ours = |template: &str| printed(&mut command(api, "status"), template);
    let theirs = |template: &str| printed(&mut api.command("get mirrors"), template);
    let names = "{.items[*].metadata.name}";
    assert_eq!((ours(names), theirs(names)), ((Some(0), String::new(), String::new()), ours(names)));
    for (name, ready) in [("db", "False"), ("web", "True")] {
        let mut mirror = resource("Mirror", name, &json!({}), &json!({ "snapLength": 96, "filter": "udp" }));
        mirror["metadata"]["labels"] = json!({ "example.com/the-app": name });
        api.apply(&mirror);
        let condition = |of, status: &str| {
            json!({
                "type": of, "status": status, "reason": format!("{of}{status}"), "message": "a message",
                "lastTransitionTime": "2026-01-01T12:00:00Z",
            })
        };
        mirror["status"] = json!({
            "observedGeneration": 1, "conditions": [condition("Accepted", "True"), condition("Ready", ready)],
            "reportingNodes": 2, "pods": { "selected": 5, "covered": 4 }, "packets": { "copied": 200, "lost": 2 },
        });
        mirror.as_object_mut().unwrap().remove("spec");
        api.kubectl_with("apply --server-side --subresource=status -f -", &mirror.to_string());
    }
    for template in [
        names,
        "names: {.items[*]['metadata.name']}\\n",
        "{.kind} {$.apiVersion}{'\\n'}",
        r#"{range .items[*]}{.metadata.name}{"\t"}{.spec.snapLength}{"\n"}{end}"#,
        r#"{.items[*].status.conditions[?(@.type=="Ready")].status}"#,
        r#"{range .items[*]}{@.metadata.name}: {.status.conditions[?(@.type == 'Ready')].reason}{"\n"}{end}."#,
        "{range .items[*]}{range .status.conditions[*]}{.type}={.status};{end}{'\\n'}{end}",
        "{.items[?(@.status.pods.covered<5)].metadata.name}",
        "{.items[?(@.metadata.name!='db')].status.packets}",
        "{.items[?(@.nosuch!='db')].metadata.name}{.items[?(@.spec.target)].metadata.name}{.items[*].nosuch}",
        "{.items[0].spec.podSelector}{.items[-1].metadata.name}{.items[0:2].metadata.generation}",
        r"{.items[*].metadata.labels.example\.com/the-app}{.items[1].metadata.labels['example\.com/the-app']}",
        "{.items[*]..namespace}",
    ] {
        let ours = ours(template);
        assert_eq!((ours.0, ours == theirs(template)), (Some(0), true), "{template}: {ours:?}");
    }
    let list: Value = serde_json::from_str(&ours("{@}").1).unwrap();
    assert_eq!(list, serde_json::from_str::<Value>(&kubectl(api, "get mirrors -o json").1).unwrap());
    let new = "on -l app=web --name new --dry-run=server";
    assert_eq!(
        printed(&mut command(api, new), "{.kind} {.metadata.name}"),
        (Some(0), "Mirror new".to_owned(), String::new())
    );
    let report: Value = serde_json::from_str(&plugin(api, "check -o json").1).unwrap();
    assert_eq!(report["result"], printed(&mut command(api, "check"), "{.result}").1);
    for (template, place) in [
        ("{.items[*]", "no closing brace for the one at character 1"),
        ("names: {end}", "no range to end at character 8"),
        ("{range .items[*]}{.metadata.name}", "no {end} for the range at character 1"),
        ("{.kind}{.items[}", "invalid path in {.items[} at character 8"),
    ] {
        let (code, text, why) = ours(template);
        assert!(
            code == Some(2) && text.is_empty() && why.contains(place),
            "{template}: {code:?} {text} {why}"
        );
    }
}

#[test]
fn the_options_of_kubectl_choose_cluster_and_user() {
    let story = Story::new("plugin-options");
    let api = &story.node.api;
    let server = api.kubectl("config view --minify -o jsonpath={.clusters[0].cluster.server}");
    let context = api.kubectl("config current-context");
    api.kubectl("create serviceaccount nobody");
    let token = api.kubectl("create token nobody");
    for words in [
        format!("--context {} --server {server}", context.trim()),
        "--insecure-skip-tls-verify --request-timeout 10s".to_owned(),
        "--namespace default".to_owned(),
        "--as nobody --as-group nobodies".to_owned(),
        format!("--token {token}"),
        "--context nosuch".to_owned(),
        "--cluster nosuch".to_owned(),
        "--tls-server-name other.test".to_owned(),
    ] {
        let [ours, theirs] =
            [plugin(api, &format!("status {words}")), kubectl(api, &format!("get mirrors {words}"))];
        let is_the_servers = theirs.0 == Some(0) || theirs.2.starts_with("Error from server");
        // Of failures to connect, the words differ.
        let is_same =
            if is_the_servers { ours == theirs } else { (ours.0, &ours.1) == (theirs.0, &theirs.1) };
        assert!(is_same, "{words}: {ours:?}, and kubectl: {theirs:?}");
    }
    assert_eq!(plugin(api, "status --as nobody").0, Some(1));
    for words in ["on pod web", "tail deploy/web -- tcp prot 80"] {
        let (code, out, why) = plugin(api, words);
        assert!(code == Some(2) && out.is_empty() && why.starts_with("error: "), "{words}: {code:?} {why}");
    }
}

#[test]
fn the_shell_completes_what_kubectl_asks_the_plugin_for() {
    let story = Story::new("plugin-words");
    let api = &story.node.api;
    let namespace = api.namespace();
    deploy(api, "web");
    api.apply(&api.object("db", &[]));
    let plugin = env::var_os("MIRROR_PLUGIN").unwrap();
    let links = story.node.lab.files().join("links");
    fs::create_dir(&links).unwrap();
    for name in ["kubectl-mirror", "kubectl_complete-mirror"] {
        symlink(&plugin, links.join(name)).unwrap();
    }
    let path = env::join_paths([links].into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap())));
    let path = path.unwrap();
    // The last word is the one to complete.
    let completed = |words: &[&str]| {
        let (code, candidates, why) = told(api.command("__complete mirror").args(words).env("PATH", &path));
        assert_eq!(code, Some(0), "{why}");
        candidates.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(completed(&["o"]), ["on", "off", ":4"]);
    assert_eq!(completed(&["status", "--wat"]), ["--watch", ":4"]);
    assert_eq!(completed(&["explain", "d"]), ["db", "deploy", "ds", ":4"]);
    assert_eq!(completed(&["tail", "deploy", ""]), ["web", ":4"]);
    assert_eq!(completed(&["tail", "web", "d"]), ["db", ":4"]);
    assert_eq!(completed(&["explain", "web", "d"]), [":4"]);
    let (_, context, _) = kubectl(api, "config current-context");
    assert!(completed(&["status", "--context", ""]).contains(&context.trim().to_owned()), "{context}");
    assert_eq!(completed(&["on", "deploy/w"]), ["deploy/web", ":4"]);
    assert_eq!(completed(&["on", "-n", "default", "deploy", "w"]), [":4"]);
    assert_eq!(completed(&["status", "-n", namespace]), [namespace, ":4"]);
    api.apply(&resource("Mirror", "mine", &json!({}), &json!({})));
    assert_eq!(completed(&["off", "--name", ""]), ["mine", ":4"]);
    // Without a cluster there are no names.
    assert_eq!(completed(&["--server", "https://127.0.0.1:1", "tail", "deploy", ""]), [":4"]);
}
