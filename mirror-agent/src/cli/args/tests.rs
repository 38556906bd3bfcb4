//! The command line: targets, and the environment.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use clap::{CommandFactory as _, Parser as _};

use super::*;

/// The targets that `attach` makes of these flags, and the one of the mirrors that name none.
fn targets(flags: &[&str]) -> Result<(String, String), String> {
    let words = [&["mirror-agent", "attach", "eth0"], flags].concat();
    let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
    let Command::Attach(AttachArgs { mirror, .. }) = cli.command else {
        return Err("another command".into());
    };
    let targets = mirror.targets().map_err(|error| error.to_string())?;
    let words: Vec<_> = targets.iter().map(|(name, to)| format!("{name}={to}")).collect();
    Ok((words.join(" "), mirror.target.to_string()))
}

#[test]
fn targets_and_streams_stand_beside_the_mirror_interface() {
    let named = |targets: &str, target: &str| Ok((targets.to_owned(), target.to_owned()));
    assert_eq!(targets(&[]), named("default=mirror0", "default"));
    // Each stream is one of its own.
    let flags =
        ["--define-target", "live=stream", "--define-target", "debug=stream,ids=ids0", "--target", "live"];
    assert_eq!(targets(&flags), named("debug=stream default=mirror0 ids=ids0 live=stream", "live"));
}

#[test]
fn a_wrong_target_is_refused_with_what_to_do() {
    for (flags, told) in [
        (&["--define-target", "default=stream"][..], "--target for the mirrors that name no target"),
        (&["--define-target", "default=mirror0"], "is the device of --mirror-iface"),
        (&["--define-target", "a=ids0,b=ids0"], "ids0 is already the destination of target a"),
        (&["--define-target", "a=stream,a=ids0"], "the destination of target a is already stream"),
        (&["--target", "live"], "define it with --define-target live=DESTINATION"),
        (&["--target", "Live"], "Live"),
    ] {
        let error = targets(flags).unwrap_err();
        assert!(error.contains(told), "{flags:?}: {error}");
    }
}

/// Only what Kubernetes says about the agent's own pod has other names.
#[test]
fn a_variable_is_named_like_its_flag() {
    let command = Cli::command();
    let commands = command.get_subcommands().chain([&command]);
    let variables = commands.flat_map(clap::Command::get_arguments).filter_map(|arg| {
        let expected = format!("PODMIRROR_{}", arg.get_long()?.to_uppercase().replace('-', "_"));
        Some((arg.get_env()?.to_str()?.to_owned(), expected))
    });
    let (ours, others): (Vec<_>, Vec<_>) = variables.partition(|(name, expected)| name == expected);
    assert!(ours.len() > 40, "{ours:?}");
    let others: std::collections::BTreeSet<_> = others.into_iter().map(|(name, _)| name).collect();
    assert_eq!(others.into_iter().collect::<Vec<_>>(), ["NODE_NAME", "POD_NAME", "POD_NAMESPACE"]);
}
