//! The command line: what was typed, and nothing that needs more than its own words to be checked.

use std::{path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use mirror_api::SettingsSpec;
use mirror_core::settings::{SettingError, Settings, parse_duration};

use crate::{
    selector,
    workload::{Kind, Workload},
};

/// Shows the packets of pods in Wireshark, and creates, deletes and inspects mirrors of a cluster with
/// podmirror.
#[derive(Debug, Parser)]
#[command(name = "kubectl-mirror", bin_name = "kubectl mirror", version, propagate_version = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) connection: Connection,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Read the packets of pods as they come: pcapng to standard output, for `| wireshark -k -i -`, or into a file.
    Tail(TailArgs),
    /// Mirror a workload to a target, until `off` or the end of --duration: creates a Mirror, or updates that
    /// of the last `on`.
    On(OnArgs),
    /// End the mirror that `on` created for a workload: deletes the Mirror.
    Off(OffArgs),
    /// Show the Mirrors and ClusterMirrors, with their status on all nodes.
    Status(StatusArgs),
    /// Explain whether and how a pod is mirrored: what requested the mirror, the NICs and hooks, the filter,
    /// the budget, the target and the counters; and why it is not mirrored.
    Explain(ExplainArgs),
    /// Show how many of the packets of each NIC the taps have seen, by direction, and the reason if packets
    /// are missing.
    Coverage(CoverageArgs),
    /// Show the traffic of the tapped NICs and the copies, in packets and bytes per second, every 2 s until
    /// Ctrl-C.
    Top(TopArgs),
    /// Check whether podmirror can run on this cluster, or whether it works: the server, the nodes, the
    /// network, the CRDs, your permissions, the agents, the targets. Exits with 0 if all is well, 1 if
    /// something needs attention, 2 if it does not work.
    Check(CheckArgs),
    /// Print a completion script for a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one for each command.
    #[command(hide = true)]
    Man {
        /// Directory, which is created if it does not exist.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Which cluster, and where podmirror is in it.
#[derive(Debug, Args)]
pub(crate) struct Connection {
    /// The kubeconfig file [default: KUBECONFIG, or ~/.kube/config].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: the current one].
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// The namespace of the pods and Mirrors [default: that of the context].
    #[arg(long, short, global = true, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// The namespace of podmirror's agents.
    #[arg(
        long,
        global = true,
        env = "PODMIRROR_NAMESPACE",
        value_name = "NAME",
        default_value = "podmirror"
    )]
    pub(crate) agents: String,
}

/// Which pods.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Which {
    /// Pods to select: pod/NAME, or the pods of a workload: deploy/NAME, sts/NAME, ds/NAME, rs/NAME, job/NAME
    /// or svc/NAME. A name without a kind is a pod.
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: Option<Workload>,
    /// The pods with these labels, as in app=web,tier!=test or 'app in (web, api)'; '' for all pods of the namespace.
    #[arg(long, short = 'l', value_name = "LABELS", value_parser = selector::parse)]
    pub(crate) selector: Option<selector::Labels>,
}

/// `kubectl mirror tail`.
#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) which: Which,
    /// The file for the packets, in pcapng; `-` is standard output.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub(crate) write: PathBuf,
    /// Only packets that match this filter, in tcpdump's language (pcap-filter(7)).
    #[arg(long, short, value_name = "EXPR", value_parser = setting("filter"))]
    pub(crate) filter: Option<Setting>,
    /// Begin with the packets of this time, as in 5m, that the recorders of the nodes (the chart's recorder.enabled) still have.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) since: Option<Duration>,
    /// End with the packets of --since. Asks all nodes, and pod/NAME need not exist any more.
    #[arg(
        long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true", requires = "since"
    )]
    pub(crate) no_follow: bool,
    /// End after this time, as in 90s, 15m or 1h30m.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = parse_duration)]
    pub(crate) duration: Duration,
    /// Bytes of each packet [default: all]. Packets of --since have as many as were recorded.
    #[arg(long, value_name = "N", value_parser = setting("snaplen"))]
    pub(crate) snaplen: Option<Setting>,
    /// Keep super-frames and unfinished checksums as the kernel has them. Otherwise frames are as on a wire.
    #[arg(
        long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) super_frames: bool,
    /// The port of the agents' stream endpoint (--stream-listen).
    #[arg(long, value_name = "PORT", default_value_t = 10707)]
    pub(crate) stream_port: u16,
}

/// `kubectl mirror on`.
#[derive(Debug, Args)]
pub(crate) struct OnArgs {
    #[command(flatten)]
    pub(crate) which: Which,
    /// The name of the Mirror [default: made of the kind and name of the workload].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The target of the copies [default: the mirror interface of each node].
    #[arg(long, value_name = "NAME")]
    pub(crate) target: Option<String>,
    /// Filter of the packets to copy, in tcpdump's syntax (pcap-filter(7)).
    #[arg(long, short, value_name = "EXPR", value_parser = setting("filter"))]
    pub(crate) filter: Option<Setting>,
    /// Direction of the packets, as seen from the pod [default: both].
    #[arg(long, value_enum)]
    pub(crate) direction: Option<Direction>,
    /// Share of the flows to copy: one flow in N, for example 1/100 or 10%.
    #[arg(long, value_name = "SHARE", value_parser = setting("sample"))]
    pub(crate) sample: Option<Setting>,
    /// Maximum copies per second of each NIC, for example 10kpps or 50Mbit.
    #[arg(long, value_name = "RATE", value_parser = setting("rate"))]
    pub(crate) rate: Option<Setting>,
    /// Bytes to copy of each packet.
    #[arg(long, value_name = "N", value_parser = setting("snaplen"))]
    pub(crate) snaplen: Option<Setting>,
    /// Duration after which the mirror ends, for example 15m [default: never].
    #[arg(long, value_name = "TIME", value_parser = setting("duration"))]
    pub(crate) duration: Option<Setting>,
}

/// `kubectl mirror off`.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct OffArgs {
    /// The workload that was given to `on`.
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: Option<Workload>,
    /// The name of the Mirror, if it was given to `on`.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

/// `kubectl mirror status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// All namespaces, and the ClusterMirrors.
    #[arg(
        long, short = 'A', value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) all_namespaces: bool,
    /// Output format.
    #[arg(long, short, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Refresh every 2 s until Ctrl-C: in place on a terminal, otherwise one table after the other.
    #[arg(
        long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) watch: bool,
}

/// `kubectl mirror explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The pod: pod/NAME, or its name alone.
    #[arg(value_name = "POD", value_parser = pod)]
    pub(crate) pod: String,
}

/// `kubectl mirror coverage`.
#[derive(Debug, Args)]
pub(crate) struct CoverageArgs {
    /// All namespaces.
    #[arg(
        long, short = 'A', value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) all_namespaces: bool,
    /// Output format.
    #[arg(long, short, value_enum, default_value = "table")]
    pub(crate) output: Form,
}

/// `kubectl mirror top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// All namespaces.
    #[arg(
        long, short = 'A', value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) all_namespaces: bool,
    /// Show the table once, after 2 s, and exit.
    #[arg(
        long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true,
        default_value_t = false, default_missing_value = "true"
    )]
    pub(crate) once: bool,
    /// Maximum number of NICs to show: those with the most traffic.
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) rows: usize,
}

/// `kubectl mirror check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Output format.
    #[arg(long, short, value_enum, default_value = "table")]
    pub(crate) output: Form,
}

/// Form of `coverage` and `check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// A table.
    Table,
    /// JSON.
    Json,
}

/// Form of `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// A table.
    Table,
    /// A table with the nodes, and every pod that is not covered.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The direction, seen from the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// Packets to and from the pod.
    Both,
    /// Packets to the pod.
    Ingress,
    /// Packets from the pod.
    Egress,
}

/// A setting of a mirror, as it was typed.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    key: &'static str,
    value: String,
}

/// Checks the value of a setting as the API server and the agents do, so that a mistake is reported at once.
fn setting(key: &'static str) -> impl Fn(&str) -> Result<Setting, String> + Clone + Send + Sync + 'static {
    move |value| {
        let setting = Setting { key, value: value.to_owned() };
        let settings = settings([&Some(setting.clone())]).map_err(|error| error.reason)?;
        SettingsSpec::of(&settings)?;
        Ok(setting)
    }
}

impl TailArgs {
    /// The settings of the Mirror.
    pub(crate) fn settings(&self) -> Result<Settings, SettingError> {
        let mut settings = settings([&self.filter, &self.snaplen])?;
        settings.budget.duration = Some(self.duration);
        Ok(settings)
    }
}

impl OnArgs {
    /// The settings of the Mirror.
    pub(crate) fn settings(&self) -> Result<Settings, SettingError> {
        settings([&self.filter, &self.sample, &self.rate, &self.snaplen, &self.duration])
    }
}

/// The settings of a mirror with these flags.
fn settings<'f>(flags: impl IntoIterator<Item = &'f Option<Setting>>) -> Result<Settings, SettingError> {
    let mut settings = Settings::default();
    for setting in flags.into_iter().flatten() {
        settings.set(setting.key, &setting.value)?;
    }
    Ok(settings)
}

/// The name of a pod.
fn pod(text: &str) -> Result<String, String> {
    match text.parse()? {
        Workload { kind: Kind::Pod, name } => Ok(name),
        workload => Err(format!("{workload} is not a pod: name one pod, as in pod/web")),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

    use clap::CommandFactory as _;
    use serde_json::json;

    use super::*;

    fn parse(words: &str) -> Result<Cli, String> {
        let words = ["kubectl-mirror"].into_iter().chain(words.split_whitespace());
        Cli::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_the_documents_say_can_be_typed() {
        for words in [
            "tail -n shop pod/web",
            "tail -n shop deploy/checkout -f tcp --duration 2m --snaplen 96 --super-frames -w web.pcapng",
            "tail -l app=web --agents tools --context west",
            "tail -n shop pod/web --since 5m --no-follow -w last.pcapng",
            "tail -n shop -l= --since 5m",
            "on -n shop deploy/checkout --target ids-west --filter udp --rate 10kpps --direction ingress",
            "off -n shop deploy/checkout",
            "off --name mine",
            "status -A -o wide --watch",
            "explain -n shop pod/web",
            "explain web --agents tools",
            "coverage -n shop",
            "coverage -A -o json",
            "top -n shop",
            "top -A --once --rows 10",
            "top -A=false --once=true",
            "status -Ao json --watch=false",
            "check",
            "check -n shop --agents tools -o json",
            "completion bash",
            "man target/man",
        ] {
            parse(words).unwrap_or_else(|error| panic!("{words}: {error}"));
        }
    }

    #[test]
    fn the_flags_are_the_settings_of_the_mirror() {
        let spec = |words: &str| {
            let settings = match parse(words).unwrap().command {
                Command::On(args) => args.settings(),
                Command::Tail(args) => args.settings(),
                other => panic!("{other:?}"),
            };
            serde_json::to_value(SettingsSpec::of(&settings.unwrap()).unwrap()).unwrap()
        };
        assert_eq!(
            spec("on deploy/web -f udp --sample 10% --rate 10kpps,burst=1s --snaplen 96 --duration 1d"),
            json!({
                "filter": "udp", "sampling": { "oneIn": 10 }, "snapLength": 96, "limits": { "duration": "24h" },
                "rateLimit": { "packetsPerSecond": 10_000, "burst": "1s" },
            })
        );
        assert_eq!(spec("on deploy/web"), json!({}));
        assert_eq!(
            spec("tail web -f tcp --snaplen 96"),
            json!({ "filter": "tcp", "snapLength": 96, "limits": { "duration": "15m" } })
        );
    }

    #[test]
    fn a_mistake_is_told_before_anything_is_done() {
        for (words, told) in [
            ("tail", "required"),
            ("tail web -l app=web", "cannot be used with"),
            ("tail web -f tcpp", "tcpp"),
            ("tail web --duration soon", "90s"),
            ("tail web --snaplen 3", "from 76"),
            ("tail web/eth0", "kind"),
            ("tail cronjob/web", "deploy"),
            ("tail web --no-follow", "--since"),
            ("on deploy/web --rate fast", "kpps"),
            ("on deploy/web --sample 30%", "1/100"),
            ("explain", "required"),
            ("explain deploy/web", "not a pod"),
            ("coverage -o yaml", "json"),
            ("check -o yaml", "json"),
        ] {
            let error = parse(words).unwrap_err();
            assert!(error.contains(told), "{words}: {error}");
        }
    }
}
