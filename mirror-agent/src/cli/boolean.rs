//! Boolean flags, as in kubectl: `--flag`, `--flag=true`, `--flag=false`.

use clap::{Arg, ArgAction, builder::BoolishValueParser};

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
