//! Boolean flags: `--flag`, `--flag=true`, `--flag=false`, and `--flag false` in a command without positional arguments.

use clap::{Arg, ArgAction, builder::BoolishValueParser};
use mirror_core::destination::device_name;

/// An attribute of boolean flags for clap's derive, as in `#[arg(long, boolean(false))]`.
pub(super) trait Boolean {
    /// Makes this a boolean flag with a default.
    fn boolean(self, default: bool) -> Self;
}

impl Boolean for Arg {
    fn boolean(self, default: bool) -> Self {
        self.value_name("BOOL")
            .action(ArgAction::Set)
            .value_parser(BoolishValueParser::new())
            .num_args(0..=1)
            .require_equals(true)
            .default_value(if default { "true" } else { "false" })
            .default_missing_value("true")
    }
}

/// Lets the value of a boolean flag follow after a space. For commands without positional arguments.
pub(super) fn spaced(arg: Arg) -> Arg {
    arg.require_equals(false)
}

/// The name of an interface. In `--flag false eth0`, `false` would be one.
pub(super) fn interface(text: &str) -> Result<String, String> {
    match text {
        "true" | "false" => Err(format!("to give a flag this value, write --flag={text}")),
        _ => device_name(text),
    }
}
