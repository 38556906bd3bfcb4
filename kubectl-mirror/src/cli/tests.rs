//! Tests of the command line: what can be typed, and what is refused.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{fs, path::Path};

use serde_json::json;

use super::*;

fn parse(words: &str) -> Result<Cli, String> {
    let words = ["kubectl-mirror"].into_iter().chain(words.split_whitespace());
    read(words.map(OsString::from)).map_err(|error| error.to_string())
}

#[test]
fn the_command_line_is_consistent() {
    command().debug_assert();
}

/// `kubectl mirror man` writes them.
#[test]
fn each_command_that_is_shown_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    clap_mangen::generate_to(command(), &directory).unwrap();
    let pages = fs::read_dir(&directory).unwrap().count();
    let command = command();
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    assert_eq!(pages, 1 + shown.count());
    let tail = fs::read_to_string(directory.path().join("kubectl-mirror-tail.1")).unwrap();
    for text in [".TH kubectl-mirror-tail 1", "super\\-frames", "\\-\\-context", "TYPE/NAME"] {
        assert!(tail.contains(text), "{text}: {tail}");
    }
}

/// The examples of `kubectl mirror` in a document, each up to a pipe, a comment or a second command.
fn examples(document: &str) -> Vec<String> {
    let document = document.replace("\\\n", " ");
    let blocks = document.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    let commands = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("kubectl mirror "));
    commands.map(|words| words.split(['|', '#', '>', '&']).next().unwrap().to_owned()).collect()
}

#[test]
fn the_examples_of_the_documents_can_be_typed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let documents = documents.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut found = 0;
    for path in documents.chain([root.join("README.md")]) {
        for words in examples(&fs::read_to_string(&path).unwrap()) {
            parse(&words).unwrap_or_else(|error| panic!("{}: {words}: {error}", path.display()));
            found += 1;
        }
    }
    assert!(found > 5, "{found}");
}

#[test]
fn each_form_can_be_typed() {
    for words in [
        "tail -n shop pod/web",
        "tail -n shop deploy checkout --duration 2m --snaplen 96 --super-frames --write web.pcapng -- tcp",
        "tail pod web-0 web-1 --super-frames=false -- tcp port 443",
        "tail -l app=web --agents tools --context west -- not udp",
        "tail -n shop -l= --since 5m",
        "tail -A -l app=web -- udp",
        "tail -A pod web db",
        "on -n shop deploy/checkout --target ids-west --filter udp --rate 10kpps --direction ingress",
        "on deploy checkout --dry-run=client -o yaml",
        "on -l app=web --name mine --dry-run server -o name",
        "off -n shop deploy checkout",
        "off --name mine --ignore-not-found",
        "status -A -o wide --watch",
        "explain pod web --agents tools",
        "explain -A web",
        "coverage -n shop",
        "coverage -A -o yaml",
        "top -n shop",
        "top -A -w --rows 10",
        "top -o json",
        "top -A=false --watch=true",
        "status -Aw -o json --watch=false",
        "status -s https://10.0.0.1:6443 --token t --as ada --as-group a --as-group b --as-uid 7",
        "--kubeconfig k --cluster c --user u status --certificate-authority ca.pem --tls-server-name n",
        "status --insecure-skip-tls-verify --request-timeout 5s",
        "status --client-certificate client.pem --client-key client.key",
        "check -n shop --agents tools -o json",
        "sysdump",
        "sysdump --agents tools -o bug.tar.gz",
    ] {
        parse(words).unwrap_or_else(|error| panic!("{words}: {error}"));
    }
}

#[test]
fn the_flags_are_the_settings_of_the_mirror() {
    let spec = |words: &str| {
        let settings = match parse(words).unwrap().command {
            Command::On(args) => args.settings.0,
            Command::Tail(args) => args.settings().unwrap(),
            other => panic!("{other:?}"),
        };
        serde_json::to_value(settings).unwrap()
    };
    assert_eq!(
        spec("on deploy/web --filter udp --sample 10% --rate 10kpps,burst=1s --snaplen 96 --duration 1d"),
        json!({
            "filter": "udp", "sampling": { "oneIn": 10 }, "snapLength": 96, "limits": { "duration": "24h" },
            "rateLimit": { "packetsPerSecond": 10_000, "burst": "1s" },
        })
    );
    assert_eq!(spec("on deploy/web"), json!({}));
    assert_eq!(
        spec("tail web --snaplen 96 -- tcp port 443"),
        json!({ "filter": "tcp port 443", "snapLength": 96 })
    );
}

#[test]
fn each_setting_has_a_flag() {
    for setting in &SETTINGS {
        let flag = format!("--{}={}", setting.key, setting.example);
        let words = ["kubectl-mirror", "on", "deploy/web", &*flag];
        let Command::On(args) = read(words.map(OsString::from)).unwrap().command else { panic!("{flag}") };
        let mut settings = Settings::default();
        settings.set(setting.key, setting.example).unwrap();
        assert_eq!(args.settings.0, SettingsSpec::of(&settings).unwrap(), "{flag}");
    }
}

#[test]
fn a_mistake_is_told_before_anything_is_done() {
    for (words, told) in [
        ("tail", "required"),
        ("tail web -l app=web", "cannot be used with"),
        ("tail web -- tcp prot 443", "prot"),
        ("tail -A deploy/web", "has one namespace"),
        ("tail pod a b c d e f", "at most 5 pods"),
        ("tail deploy web db", "name pods"),
        ("tail web --duration soon", "90s"),
        ("tail web --snaplen 3", "from 76"),
        ("tail web/eth0", "type"),
        ("tail cronjob/web", "deploy"),
        ("tail web --no-follow", "--since"),
        ("on deploy/web --rate fast", "kpps"),
        ("on deploy/web --sample 30%", "1/100"),
        ("on deploy/web --packets 0", "100k"),
        ("on deploy/web --bytes much", "64Ki"),
        ("on -l app=web", "--name"),
        ("on pod web", "kubectl annotate pod/web"),
        ("on deploy web api", "name one object"),
        ("on deploy/web -o wide", "yaml"),
        ("off", "required"),
        ("explain", "required"),
        ("explain deploy/web", "not a pod"),
        ("coverage -o wide", "json"),
        ("status --request-timeout soon", "90s"),
    ] {
        let error = parse(words).unwrap_err();
        assert!(error.starts_with("error: ") && error.contains(told), "{words}: {error}");
    }
}
