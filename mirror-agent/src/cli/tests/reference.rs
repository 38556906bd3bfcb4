//! The reference of flags and annotations: a page in Markdown, made of the code that parses them.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command, CommandFactory as _};

use super::compare;
use crate::{
    annotations::{MIRROR, NICS, OVN_ATTACHMENT, OVN_MIRROR, POD_SIDE_TAPS, PREFIX, TARGET},
    cli::args::Cli,
    settings::SETTINGS,
    sources::parse::NETNS_ANNOTATION,
};

const HEAD: &str = "\
# Reference: flags and annotations

<!-- Generated from the code by `cargo xtask gen`: do not edit. -->

`mirror-agent COMMAND -h` prints the flags too. A flag with `env` can also be set by this environment variable; the command
line takes precedence.

A flag with BOOL is true without a value. Its value follows an equals sign, as in `--when-read=false`, and in commands
without positional arguments also a space, as in `--when-read false`.
";

/// The width of the help of commands, in characters.
const WIDTH: usize = 100;

const ANNOTATIONS: &str = "
## Annotations

Annotations apply to a pod, or to all pods of a namespace. For each key, the pod's annotation overrides that of its
namespace, and both override the flags of `mirror-agent run`. `--exclude-namespaces` and `--allow-namespaces` take
precedence over all annotations.

A pod can have up to 8 mirrors. The keys of the table are those of the mirror `default`. For each further mirror, append
a dot and its name, a DNS label, to each key: `podmirror.io/mirror.ids: \"true\"`, `podmirror.io/filter.ids: tcp`. `mirror`,
`target` and all settings accept a name.

An invalid value of `podmirror.io/mirror` or of Kube-OVN's annotation is ignored, and so is an unknown key. With an
invalid value of `target` or of a setting, the mirror is not created. An Event reports each of these.

| annotation | on | description | example |
| --- | --- | --- | --- |
";

/// The annotations that are not settings of a mirror: the key, the objects, the description, and an example.
const OTHERS: [[&str; 4]; 7] = [
    [
        MIRROR,
        "pod, namespace",
        "Mirror the pod: `true` or `both` for both directions, `ingress` for packets to it, `egress` for packets \
         from it, `false` for none",
        "true",
    ],
    [
        POD_SIDE_TAPS,
        "pod, namespace",
        "`off` keeps the agent's programs and device out of the pod: NICs without a peer on the node are not \
         mirrored. Applies to all mirrors of the pod except enforced ones",
        "off",
    ],
    [
        OVN_MIRROR,
        "pod",
        "The annotation of Kube-OVN: `true` or `false`; used with `--kube-ovn-annotations` if the pod has no \
         annotation `podmirror.io/mirror`",
        "true",
    ],
    [
        "NAME.NAMESPACE.ovn.kubernetes.io/mirror",
        "pod",
        "The annotation of Kube-OVN for the attachment of this NetworkAttachmentDefinition: `true` or `false` for \
         its NICs; used with `--kube-ovn-annotations` if the pod has no annotation `podmirror.io/mirror`",
        "true",
    ],
    [
        TARGET,
        "pod, namespace",
        "Name of the target of the copies, one of `--define-target` or a MirrorTarget; defaults to that of `--target`",
        "ids",
    ],
    [NICS, "pod, namespace", "Names of the pod's NICs to mirror; defaults to all of them", "eth0,net1"],
    [
        NETNS_ANNOTATION,
        "pod",
        "Path of the pod's network namespace on the node; by default, the agent finds it through the pod's processes",
        "/run/netns/web",
    ],
];

/// Returns the whole page.
fn reference() -> String {
    let mut text = String::from(HEAD);
    let command = Cli::command();
    section(&mut text, "Flags of every command", command.clone());
    commands(&mut text, &command, command.get_name());
    text.push_str(ANNOTATIONS);
    for [key, objects, help, example] in OTHERS {
        writeln!(text, "| `{key}` | {objects} | {help} | `{example}` |").unwrap();
    }
    for setting in &SETTINGS {
        let (key, help, example) = (setting.key, setting.help, setting.example);
        writeln!(text, "| `{PREFIX}{key}` | pod, namespace | {help} | `{example}` |").unwrap();
    }
    text
}

/// Appends the subcommands of `command`. `name` is the full name of `command`.
fn commands(text: &mut String, command: &Command, name: &str) {
    for command in command.get_subcommands() {
        let name = format!("{name} {}", command.get_name());
        if !command.has_subcommands() {
            let command = command.clone().bin_name(name.clone()).disable_help_flag(true);
            section(text, &format!("`{name}`"), command);
        }
        commands(text, command, &name);
    }
}

/// Appends the help of a command. A subcommand that is built alone lacks the flags of every command.
fn section(text: &mut String, title: &str, command: Command) {
    // The environment of this test has no place in the page.
    let mut command = command.term_width(WIDTH).mut_args(|arg| arg.hide_env_values(true));
    writeln!(text, "\n## {title}\n\n```text\n{}```", command.render_help()).unwrap();
}

/// All visible arguments of all commands.
fn arguments(command: &Command) -> Vec<Arg> {
    let below = command.get_subcommands().flat_map(arguments);
    command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned().chain(below).collect()
}

#[test]
fn the_page_is_up_to_date() {
    compare("docs/reference.md", &reference());
}

#[test]
fn every_flag_is_explained_and_every_row_is_whole() {
    let text = reference();
    let arguments = arguments(&Cli::command());
    assert!(arguments.len() > 30);
    for arg in arguments {
        assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "{arg}");
    }
    assert!(text.contains(&format!("| `NAME.NAMESPACE{OVN_ATTACHMENT}` | pod |")));
    for line in text.lines().filter(|line| line.starts_with('|')) {
        assert_eq!(line.matches('|').count(), 5, "{line}");
    }
}

#[test]
fn every_boolean_is_read_in_the_forms_that_stand_in_it() {
    let text = reference();
    let mut numbers = [0, 0];
    let flags = [
        ("--when-read", "run --node-name n"),
        ("--annotations", "run --node-name n"),
        ("--kube-ovn-annotations", "run --node-name n"),
        ("--enable-mirror", "run --node-name n"),
        ("--metrics-per-pod", "run --node-name n"),
        ("--pod-events", "apiserver --namespace n"),
        ("--mirror-offloads", "run --node-name n"),
        ("--mirror-offloads", "attach eth0"),
        ("--when-read", "attach eth0"),
        ("--super-frames", "tail eth0"),
        ("--no-follow", "tail eth0 --since 5m"),
        ("--super-frames", "capture eth0 --ring 64MiB -w x.pcapng"),
        ("--super-frames", "recorder --target t --ring 64MiB"),
    ];
    for (flag, command) in flags {
        let name = command.split(' ').next().unwrap();
        let section =
            text.split("\n## ").find(|section| section.starts_with(&format!("`mirror-agent {name}`")));
        let cli = Cli::command();
        let of = cli.find_subcommand(name).unwrap();
        let has_positionals = of.get_positionals().next().is_some();
        let arg = of.get_arguments().find(|arg| arg.get_long() == flag.strip_prefix("--")).unwrap();
        let form = if has_positionals { "[=<BOOL>]" } else { " [<BOOL>]" };
        let usage = format!(" {flag}{form}");
        assert!(section.is_some_and(|section| section.contains(&usage)), "{name} without {usage}");
        numbers[usize::from(has_positionals)] += 1;
        let read = |form: &str| {
            let words = format!("mirror-agent {command} {flag}{form}");
            let matches = Cli::command().try_get_matches_from(words.split(' '));
            let matches = matches.map_err(|error| error.to_string())?;
            let (_, matches) = matches.subcommand().unwrap();
            // The flag of a setting has the text.
            let mut texts = matches.get_raw(arg.get_id().as_str()).unwrap();
            Ok::<_, String>(texts.next().unwrap() == "true")
        };
        for (form, expected) in [("", true), ("=true", true), ("=false", false)] {
            assert_eq!(read(form), Ok(expected), "{command} {flag}{form}");
        }
        for (form, expected) in [(" true", true), (" false", false)] {
            match read(form) {
                Err(error) if has_positionals => {
                    let told = format!("write --flag={expected}");
                    assert!(error.contains(&told), "{command} {flag}{form}: {error}");
                }
                told => assert_eq!((told, has_positionals), (Ok(expected), false), "{command} {flag}"),
            }
        }
    }
    let forms = [" [<BOOL>]", "[=<BOOL>]"].map(|form| text.matches(form).count());
    assert_eq!(forms, numbers, "a flag that this test does not know");
    assert!(!text.contains(" <BOOL>"));
    let is_plain = |arg: &Arg| matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse);
    assert!(!arguments(&Cli::command()).iter().any(is_plain), "--flag=false must work too");
}
