//! The flags of `run` and `attach` that select packets and limit copies: one flag for each setting, made from
//! [`SETTINGS`], and the limits of the node.
//!
//! Written without clap's derive, so that a flag and its setting have one definition.

use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches, error::ErrorKind};
use mirror_common::sample::DEFAULT_SEED;

use crate::settings::{NodeLimits, Rate, SETTINGS, Settings, parse_filter, parse_rate};

/// Which packets are copied, and how many. For `run`, what holds for pods that do not say otherwise.
#[derive(Debug, Clone)]
pub struct SettingArgs {
    /// The settings.
    pub settings: Settings,
    /// What holds whatever annotations say.
    pub limits: NodeLimits,
}

/// The flags that are no annotations.
#[derive(Debug, Clone, Args)]
struct NodeArgs {
    /// Seed of the sample. Use the same seed on all nodes, so that all of them sample the same connections.
    #[arg(long, env = "PODMIRROR_SAMPLE_SEED", value_name = "N", default_value_t = DEFAULT_SEED)]
    sample_seed: u32,
    /// Maximum copies per second of all pods and interfaces together, in the format of --rate.
    #[arg(long, env = "PODMIRROR_MAX_RATE", value_name = "RATE", value_parser = parse_rate)]
    max_rate: Option<Rate>,
    /// Maximum copies per second of each pod, regardless of its annotations, in the format of --rate.
    #[arg(long, env = "PODMIRROR_MAX_POD_RATE", value_name = "RATE", value_parser = parse_rate)]
    max_pod_rate: Option<Rate>,
    /// Maximum copies per second of all pods of each namespace together, in the format of --rate.
    #[arg(long, env = "PODMIRROR_MAX_NAMESPACE_RATE", value_name = "RATE", value_parser = parse_rate)]
    max_namespace_rate: Option<Rate>,
}

impl Args for SettingArgs {
    fn augment_args(command: Command) -> Command {
        let mut command = command.next_help_heading("Packets");
        for setting in &SETTINGS {
            let arg = Arg::new(setting.key).long(setting.key).env(setting.env).help(setting.help);
            command = command.arg(arg.value_name(setting.value_name).value_parser(value_of(setting.key)));
        }
        NodeArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let NodeArgs { sample_seed, max_rate, max_pod_rate, max_namespace_rate } =
            NodeArgs::from_arg_matches(matches)?;
        let mut settings = Settings { seed: sample_seed, ..Settings::default() };
        for setting in &SETTINGS {
            if let Some(value) = matches.get_one::<String>(setting.key) {
                // Checked before; so this does not fail.
                let set = setting.set(&mut settings, value, &mut parse_filter);
                set.map_err(|error| Error::raw(ErrorKind::ValueValidation, format!("--{error}\n")))?;
            }
        }
        Ok(Self { settings, limits: NodeLimits { max_rate, max_pod_rate, max_namespace_rate } })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Checks the value of a setting, and leaves it as it was written.
pub(super) fn value_of(key: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |value| match Settings::default().set(key, value) {
        Ok(()) => Ok(value.to_owned()),
        Err(error) => Err(error.reason),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::args::{Cli, Command as Typed};

    /// What `run` and `attach` understand of these flags.
    fn typed(flags: &[&str]) -> [Result<SettingArgs, String>; 2] {
        let parse = |start: &[&str]| {
            let cli = Cli::try_parse_from([start, flags].concat()).map_err(|error| error.to_string())?;
            match cli.command {
                Typed::Run(args) => Ok(args.settings),
                Typed::Attach(args) => Ok(args.settings),
                other => Err(format!("{other:?}")),
            }
        };
        [parse(&["mirror-agent", "run", "--pods-from", "x"]), parse(&["mirror-agent", "attach", "eth0"])]
    }

    #[test]
    fn each_flag_sets_its_own_setting() {
        for setting in &SETTINGS {
            let mut expected = Settings { seed: DEFAULT_SEED, ..Settings::default() };
            expected.set(setting.key, setting.example).unwrap();
            for args in typed(&[&format!("--{}={}", setting.key, setting.example)]) {
                let SettingArgs { settings, limits } = args.unwrap();
                assert_eq!((settings, limits), (expected.clone(), NodeLimits::default()), "{}", setting.key);
            }
        }
    }

    #[test]
    fn all_flags_together_set_everything() {
        let mut flags = vec!["--sample-seed", "7", "--max-rate", "1Gbit", "--max-pod-rate", "1kpps,burst=1s"];
        flags.extend(["--max-namespace-rate", "9kpps"]);
        let set: Vec<_> = SETTINGS.iter().map(|of| format!("--{}={}", of.key, of.example)).collect();
        let mut expected = Settings { seed: 7, ..Settings::default() };
        for (setting, flag) in SETTINGS.iter().zip(&set) {
            flags.push(flag);
            expected.set(setting.key, setting.example).unwrap();
        }
        let limits = NodeLimits {
            max_rate: parse_rate("1Gbit").ok(),
            max_pod_rate: parse_rate("1kpps,burst=1s").ok(),
            max_namespace_rate: parse_rate("9kpps").ok(),
        };
        for args in typed(&flags) {
            let args = args.unwrap();
            assert_eq!((args.settings, args.limits), (expected.clone(), limits));
        }
    }

    #[test]
    fn a_wrong_value_is_wrong_usage_that_says_why() {
        for (flag, value, why) in [
            ("--snaplen", "20000", "from 76 to 15616"),
            ("--rate", "1pps,burst=105d", "a burst is from 1ms to 10s"),
            ("--max-pod-rate", "many", "use packets and bits"),
            ("--bytes", "1K", "Ki, Mi, Gi or Ti"),
            ("--filter", "tpc", "expected a keyword"),
        ] {
            for args in typed(&[flag, value]) {
                let error = args.unwrap_err();
                assert!(error.contains(flag) && error.contains(why), "{error}");
            }
        }
    }

    #[test]
    fn the_command_line_is_sound_and_its_flags_can_come_from_the_environment() {
        let command = Cli::command();
        command.clone().debug_assert();
        for name in ["run", "attach"] {
            let command = command.find_subcommand(name).unwrap();
            for setting in &SETTINGS {
                let arg = command.get_arguments().find(|arg| arg.get_id() == setting.key).unwrap();
                assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(setting.env));
                assert_eq!(arg.get_help_heading(), Some("Packets"));
            }
        }
    }
}
