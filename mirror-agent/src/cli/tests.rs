//! Targets on the command line.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use clap::Parser as _;

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
    Ok((words.join(" "), mirror.mirror_target.to_string()))
}

#[test]
fn targets_and_streams_stand_beside_the_mirror_interface() {
    let named = |targets: &str, target: &str| Ok((targets.to_owned(), target.to_owned()));
    assert_eq!(targets(&[]), named("default=mirror0", "default"));
    // Each stream is one of its own.
    let flags = ["--target", "live=stream", "--target", "debug=stream,ids=ids0", "--mirror-target", "live"];
    assert_eq!(targets(&flags), named("debug=stream default=mirror0 ids=ids0 live=stream", "live"));
}

#[test]
fn a_wrong_target_is_refused_with_what_to_do() {
    for (flags, told) in [
        (&["--target", "default=stream"][..], "--mirror-target for the mirrors that name no target"),
        (&["--target", "default=mirror0"], "is the device of --mirror-iface"),
        (&["--target", "a=ids0", "--target", "b=ids0"], "ids0 is already the destination of target a"),
        (&["--target", "a=stream", "--target", "a=ids0"], "the destination of target a is already stream"),
        (&["--mirror-target", "live"], "define it with --target live=DESTINATION"),
        (&["--mirror-target", "Live"], "Live"),
    ] {
        let error = targets(flags).unwrap_err();
        assert!(error.contains(told), "{flags:?}: {error}");
    }
}
