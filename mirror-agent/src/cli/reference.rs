//! `mirror-agent reference`: all flags and annotations in Markdown, generated from the code that parses them.
//!
//! Pure. `cargo xtask gen` writes `docs/reference.md` with it, and `cargo xtask lint` compares the two.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use crate::{
    annotations::{MIRROR, NICS, OVN_MIRROR, POD_SIDE_TAPS, PREFIX, TARGET},
    cli::args::Cli,
    settings::SETTINGS,
    sources::parse::NETNS_ANNOTATION,
};

const HEAD: &str = "\
# Reference: flags and annotations

<!-- Generated from the code by `cargo xtask gen`: do not edit. -->

`mirror-agent COMMAND --help` prints the flags too. Each flag can also be set by the environment variable in the same
row; the command line takes precedence.

A flag with BOOL is true without a value. Its value follows an equals sign, as in `--when-read=false`, and in commands
without positional arguments also a space, as in `--when-read false`.
";

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

/// Returns the whole document.
pub(super) fn reference() -> String {
    let mut text = String::from(HEAD);
    let command = Cli::command();
    section(&mut text, &command, "Flags of every command", "");
    commands(&mut text, &command, command.get_name());
    text.push_str(ANNOTATIONS);
    for [key, objects, help, example] in OTHERS {
        row(&mut text, &[&format!("`{key}`"), objects, help, &format!("`{example}`")]);
    }
    for setting in &SETTINGS {
        let key = format!("`{PREFIX}{}`", setting.key);
        row(&mut text, &[&key, "pod, namespace", setting.help, &format!("`{}`", setting.example)]);
    }
    text
}

/// Appends the subcommands of `command`. `name` is the full name of `command`.
fn commands(text: &mut String, command: &Command, name: &str) {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("{name} {}", command.get_name());
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        if !command.has_subcommands() {
            section(text, command, &format!("`{name}`"), &about);
        }
        commands(text, command, &name);
    }
}

/// Appends the flags of one command.
fn section(text: &mut String, command: &Command, title: &str, about: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "\n## {title}\n");
    if !about.is_empty() {
        let _ = writeln!(text, "{about}.\n");
    }
    row(text, &["flag", "environment", "default", "description"]);
    row(text, &["---"; 4]);
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let env = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
        let (help, default) = help(arg);
        row(text, &[&format!("`{}`", usage(arg)), &env, &default, &help]);
    }
}

/// `--flag VALUE`, `--flag[=VALUE]` or `--flag [VALUE]` if the value is optional, or the bare value of a positional
/// argument.
fn usage(arg: &Arg) -> String {
    let mut words = Vec::new();
    words.extend(arg.get_short().map(|short| format!("-{short},")));
    let is_optional = arg.get_num_args().is_some_and(|number| number.min_values() == 0);
    if let (Some(flag), Some([name]), true) = (arg.get_long(), arg.get_value_names(), is_optional) {
        let start = if arg.is_require_equals_set() { "[=" } else { " [" };
        words.push(format!("--{flag}{start}{name}]"));
        return words.join(" ");
    }
    words.extend(arg.get_long().map(|long| format!("--{long}")));
    if arg.get_action().takes_values() {
        match arg.get_value_names() {
            Some(names) => words.extend(names.iter().map(ToString::to_string)),
            None => words.push(arg.get_id().as_str().to_uppercase()),
        }
    }
    words.join(" ")
}

/// The help text of the flag, with its possible values if they are a closed set, and its default.
fn help(arg: &Arg) -> (String, String) {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    // A default that is not a value of the flag is part of the help text.
    let told = help.strip_suffix(']').and_then(|help| help.split_once(" [default: "));
    let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let (mut help, default) = match told {
        Some((help, default)) => (help.to_owned(), default.to_owned()),
        None if values.is_empty() => (help, String::new()),
        None => (help, format!("`{}`", values.join(","))),
    };
    let words = arg.get_possible_values().into_iter().filter(|word| !word.is_hide_set());
    let words: Vec<_> = words.map(|word| format!("`{}`", word.get_name())).collect();
    if !words.is_empty() {
        let _ = write!(help, " ({})", words.join(", "));
    }
    (help, default)
}

fn row(text: &mut String, cells: &[&str]) {
    let cells: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use clap::ArgAction;

    use super::*;
    use crate::annotations::OVN_ATTACHMENT;

    /// All visible arguments of all commands.
    fn arguments(command: &Command) -> Vec<Arg> {
        let below = command.get_subcommands().filter(|command| !command.is_hide_set()).flat_map(arguments);
        command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned().chain(below).collect()
    }

    #[test]
    fn every_flag_and_every_annotation_stands_in_it() {
        let text = reference();
        let arguments = arguments(&Cli::command());
        assert!(arguments.len() > 30);
        for arg in arguments {
            let env = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
            let (help, default) = help(&arg);
            assert!(!help.is_empty() && !help.contains("[default"), "{help}");
            let cells =
                [&format!("`{}`", usage(&arg)), &env, &default, &help].map(|cell| cell.replace('|', "\\|"));
            let line = format!("| {} |", cells.join(" | "));
            assert!(text.lines().any(|it| it == line), "{line}");
        }
        for setting in &SETTINGS {
            assert!(text.contains(&format!("| `podmirror.io/{}` |", setting.key)), "{}", setting.key);
        }
        assert!(text.contains(&format!("| `NAME.NAMESPACE{OVN_ATTACHMENT}` | pod |")));
        for line in [
            "| `--max-pod-rate RATE` | `PODMIRROR_MAX_POD_RATE` |",
            "| `podmirror.io/netns` | pod |",
            "| `PODMIRROR_ALLOW_NAMESPACES` | all |",
        ] {
            assert!(text.contains(line), "no {line} in\n{text}");
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
        let switches = SETTINGS.iter().filter(|setting| setting.is_switch()).map(|setting| setting.key);
        let switches = switches.flat_map(|key| {
            ["run --node-name n", "attach eth0"].map(|command| (format!("--{key}"), command))
        });
        let flags = flags.into_iter().map(|(flag, command)| (flag.to_owned(), command));
        for (flag, command) in flags.chain(switches) {
            let name = command.split(' ').next().unwrap();
            let section =
                text.split("\n## ").find(|section| section.starts_with(&format!("`mirror-agent {name}`")));
            let cli = Cli::command();
            let of = cli.find_subcommand(name).unwrap();
            let has_positionals = of.get_positionals().next().is_some();
            let arg = of.get_arguments().find(|arg| arg.get_long() == flag.strip_prefix("--")).unwrap();
            let form = if has_positionals { "[=BOOL]" } else { " [BOOL]" };
            let row = format!("| `{flag}{form}` |");
            assert!(section.is_some_and(|section| section.contains(&row)), "{name} without {row}");
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
        let forms = [" [BOOL]`", "[=BOOL]`"].map(|form| text.matches(form).count());
        assert_eq!(forms, numbers, "a flag that this test does not know");
        assert!(!text.contains(" BOOL`"));
        let is_plain = |arg: &Arg| matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse);
        assert!(!arguments(&Cli::command()).iter().any(is_plain), "--flag=false must work too");
    }

    #[test]
    fn it_is_the_same_each_time_and_has_whole_tables() {
        let text = reference();
        assert_eq!(text, reference());
        for line in text.lines().filter(|line| line.starts_with('|')) {
            assert_eq!(line.replace("\\|", "").matches('|').count(), 5, "{line}");
        }
        assert!(!text.contains("reference`"), "hidden commands are not in it");
    }
}
