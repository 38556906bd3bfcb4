//! The command line, as typed. It is checked here only as far as that needs no other data.

use std::{ffi::OsString, fmt::Display, fs::File, path::PathBuf, time::Duration};

use clap::{
    Arg, ArgAction, ArgMatches, Args, CommandFactory as _, FromArgMatches, Parser, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
    error::ErrorKind,
};
use clap_complete::engine::ArgValueCompleter;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use mirror_api::{Direction, SettingsSpec, labels};
use mirror_core::settings::{SETTINGS, Settings, parse_duration};

use crate::{
    cluster::Connection,
    complete,
    mirror::name_of,
    screen::{Formats, JSONPATH, Output},
    workload::{self, Workload},
};

/// Maximum number of pods with names. Each is a request, and the server has a limit for a user.
const MAX_PODS: usize = 5;

/// Shows the packets of pods in Wireshark, and creates, deletes and inspects mirrors of a cluster with
/// podmirror.
#[derive(Debug, Parser)]
#[command(name = "kubectl-mirror", bin_name = "kubectl mirror", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) connection: Connection,
}

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
    Coverage {
        /// All namespaces.
        #[arg(long, short = 'A')]
        all_namespaces: bool,
        /// Output format [default: a table].
        #[arg(long, short, value_parser = Formats(&["json", "yaml", JSONPATH]))]
        output: Option<Output>,
    },
    /// Show the traffic of the tapped NICs and the copies, in packets and bytes per second.
    Top(TopArgs),
    /// Check whether podmirror can run on this cluster, or whether it works: the server, the nodes, the
    /// network, the CRDs, your permissions, the agents, the targets. Exits with 1 if it does not work.
    Check {
        /// Output format [default: a table].
        #[arg(long, short, value_parser = Formats(&["json", "yaml", JSONPATH]))]
        output: Option<Output>,
    },
    /// Write an archive for a bug report: `check`, versions, nodes, the objects of podmirror, its Events, logs, metrics
    /// and reports about pods. It has no packets, no Secrets and no values of environment variables.
    Sysdump {
        /// The archive, a new file [default: podmirror-sysdump-TIME.tar.gz].
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Write the manual pages, one for each command.
    #[command(hide = true)]
    Man {
        /// Directory, which is created if it does not exist.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Which pods.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Which {
    /// Pods, or what selects them, as TYPE/NAME or TYPE NAME: pod, deploy, sts, ds, rs, rc, job or svc. A NAME
    /// alone is a pod.
    #[arg(value_name = "TYPE/NAME", add = ArgValueCompleter::new(complete::objects))]
    pub(crate) objects: Vec<String>,
    /// The pods with these labels, as in app=web,tier!=test or 'app in (web, api)'; '' for all pods of the namespace.
    #[arg(long, short = 'l', value_name = "LABELS", value_parser = labels::parse)]
    pub(crate) selector: Option<LabelSelector>,
}

#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) which: Which,
    /// All namespaces. Objects are pods then: other types have one namespace.
    #[arg(long, short = 'A')]
    pub(crate) all_namespaces: bool,
    /// The file for the packets, in pcapng; `-` is standard output.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub(crate) write: PathBuf,
    /// That file, if it is open already.
    #[arg(skip)]
    pub(crate) pipe: Option<File>,
    /// Only packets that match this filter, in tcpdump's language (pcap-filter(7)).
    #[arg(last = true, value_name = "EXPR")]
    filter: Vec<String>,
    /// Begin with the packets of this time, as in 5m, that the recorders of the nodes (the chart's recorder.enabled) still have.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) since: Option<Duration>,
    /// End with the packets of --since. Asks all nodes, and pod/NAME need not exist any more.
    #[arg(long, requires = "since")]
    pub(crate) no_follow: bool,
    /// End after this time, as in 90s, 15m or 1h30m.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = parse_duration)]
    pub(crate) duration: Duration,
    /// Bytes of each packet [default: all]. Packets of --since have no more than were recorded.
    #[arg(long, value_name = "N")]
    snaplen: Option<String>,
    /// Keep super-frames and unfinished checksums as the kernel has them. Otherwise frames are as on a wire.
    #[arg(long)]
    pub(crate) super_frames: bool,
}

#[derive(Debug, Args)]
pub(crate) struct OnArgs {
    #[command(flatten)]
    pub(crate) which: Which,
    /// The name of the Mirror [default: made of the type and name of the workload].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The target of the copies [default: the mirror interface of each node].
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(complete::targets))]
    pub(crate) target: Option<String>,
    /// Direction of the packets, as seen from the pod [default: both].
    #[arg(long, value_parser = direction())]
    pub(crate) direction: Option<Direction>,
    #[command(flatten)]
    pub(crate) settings: SettingArgs,
    #[command(flatten)]
    pub(crate) change: Change,
}

/// A flag for each of [`SETTINGS`].
#[derive(Debug)]
pub(crate) struct SettingArgs(pub(crate) SettingsSpec);

#[derive(Debug, Args)]
#[group(id = "off", required = true, multiple = false, args = ["objects", "name"])]
pub(crate) struct OffArgs {
    /// The workload that was given to `on`.
    #[arg(value_name = "TYPE/NAME", add = ArgValueCompleter::new(complete::objects))]
    objects: Vec<String>,
    /// The name of the Mirror, if it was given to `on`.
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(complete::mirrors))]
    pub(crate) name: Option<String>,
    /// Succeed also if there is no such Mirror.
    #[arg(long)]
    pub(crate) ignore_not_found: bool,
    #[command(flatten)]
    pub(crate) change: Change,
}

/// How a change is made and printed.
#[derive(Debug, Args)]
pub(crate) struct Change {
    /// `client` only prints the object, `server` sends the request and changes nothing.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) dry_run: DryRun,
    /// Output format [default: a line for people].
    #[arg(long, short, value_parser = Formats(&["json", "yaml", "name", JSONPATH]))]
    pub(crate) output: Option<Output>,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// All namespaces, and the ClusterMirrors.
    #[arg(long, short = 'A')]
    pub(crate) all_namespaces: bool,
    /// Output format [default: a table].
    #[arg(long, short, value_parser = Formats(&["json", "yaml", "name", "wide", JSONPATH]))]
    pub(crate) output: Option<Output>,
    /// Refresh every 2 s until Ctrl-C: in place on a terminal, otherwise what has changed follows.
    #[arg(long, short)]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The pod: NAME, pod/NAME or pod NAME.
    #[arg(value_name = "POD", required = true, add = ArgValueCompleter::new(complete::objects))]
    objects: Vec<String>,
    /// The pods of this name in all namespaces.
    #[arg(long, short = 'A')]
    pub(crate) all_namespaces: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// All namespaces.
    #[arg(long, short = 'A')]
    pub(crate) all_namespaces: bool,
    /// Output format [default: a table].
    #[arg(long, short, value_parser = Formats(&["json", "yaml", JSONPATH]))]
    pub(crate) output: Option<Output>,
    /// Refresh every 2 s until Ctrl-C.
    #[arg(long, short)]
    pub(crate) watch: bool,
    /// Maximum number of NICs in the table: those with the most traffic.
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) rows: usize,
}

/// How much of a change is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DryRun {
    None,
    Client,
    Server,
}

pub(crate) fn command() -> clap::Command {
    // As in kubectl, the last one of a flag counts.
    let command = Cli::command().args_override_self(true);
    command.mut_args(switch).mut_subcommands(|command| command.mut_args(switch))
}

/// Lets a switch have a value, as kubectl's: `--watch`, `--watch=true`, `--watch=false`.
fn switch(arg: Arg) -> Arg {
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    let arg = arg.action(ArgAction::Set).num_args(0..=1).require_equals(true).value_name("BOOL");
    let arg = arg.default_value("false").default_missing_value("true");
    arg.hide_default_value(true).hide_possible_values(true)
}

/// Reads the words of the command line.
///
/// # Errors
///
/// The usage is wrong, or help is wanted.
pub(crate) fn read(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let cli = Cli::from_arg_matches(&command().try_get_matches_from(words)?)?;
    match &cli.command {
        Command::Tail(args) => args.settings().map(drop).and(args.check())?,
        Command::On(args) => drop(args.named()?),
        Command::Off(args) => drop(args.named()?),
        Command::Explain(args) => drop(args.pod()?),
        _ => {}
    }
    Ok(cli)
}

fn usage(why: impl Display) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, format!("{why}\n"))
}

fn direction() -> impl TypedValueParser<Value = Direction> {
    PossibleValuesParser::new(["both", "ingress", "egress"]).map(|word| match word.as_str() {
        "ingress" => Direction::Ingress,
        "egress" => Direction::Egress,
        _ => Direction::Both,
    })
}

/// The settings with these flags. They are checked as by the API server and the agents.
fn settings<'a>(
    flags: impl IntoIterator<Item = (&'static str, Option<&'a str>)>,
) -> Result<SettingsSpec, clap::Error> {
    let mut settings = Settings::default();
    for (key, value) in flags {
        let Some(value) = value else { continue };
        let why = |reason| usage(format!("invalid value '{value}' for '--{key}': {reason}"));
        settings.set(key, value).map_err(|error| why(error.reason))?;
        SettingsSpec::of(&settings).map_err(why)?;
    }
    SettingsSpec::of(&settings).map_err(usage)
}

/// The only object of these words.
fn one(objects: &[String]) -> Result<Workload, clap::Error> {
    let mut workloads = workload::parse(objects).map_err(usage)?;
    match (workloads.pop(), workloads.is_empty()) {
        (Some(workload), true) => Ok(workload),
        _ => Err(usage("name one object, as TYPE/NAME or TYPE NAME")),
    }
}

impl Which {
    pub(crate) fn workloads(&self) -> Result<Vec<Workload>, clap::Error> {
        workload::parse(&self.objects).map_err(usage)
    }
}

impl TailArgs {
    pub(crate) fn settings(&self) -> Result<SettingsSpec, clap::Error> {
        let filter = (!self.filter.is_empty()).then(|| self.filter.join(" "));
        settings([("filter", filter.as_deref()), ("snaplen", self.snaplen.as_deref())])
    }

    fn check(&self) -> Result<(), clap::Error> {
        let workloads = self.which.workloads()?;
        let other = workloads.iter().find(|workload| !workload.is_pod());
        match other {
            Some(other) if self.all_namespaces => {
                Err(usage(format!("{other} has one namespace: use -n, or labels (-l) with -A")))
            }
            Some(_) if workloads.len() > 1 => Err(usage("name pods, or one object that selects pods")),
            _ if workloads.len() > MAX_PODS => {
                Err(usage(format!("name at most {MAX_PODS} pods, or select them by labels (-l)")))
            }
            _ => Ok(()),
        }
    }
}

impl Args for SettingArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(
            SETTINGS.iter().map(|of| Arg::new(of.key).long(of.key).value_name(of.value_name).help(of.help)),
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |key| matches.get_one::<String>(key).map(String::as_str);
        settings(SETTINGS.iter().map(|of| (of.key, value(of.key)))).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl OnArgs {
    /// The name of the Mirror, and the workload unless labels are given.
    pub(crate) fn named(&self) -> Result<(String, Option<Workload>), clap::Error> {
        if self.which.selector.is_some() {
            let name = self.name.clone().ok_or_else(|| usage("--name is required with labels (-l)"))?;
            return Ok((name, None));
        }
        let workload = one(&self.which.objects)?;
        if workload.is_pod() {
            return Err(usage(format!(
                "a Mirror selects pods by labels, not by name: use `kubectl annotate {workload} \
                 podmirror.io/mirror=true`, or -l with labels of that pod, and --name"
            )));
        }
        Ok((self.name.clone().unwrap_or_else(|| name_of(&workload)), Some(workload)))
    }
}

impl OffArgs {
    /// The name of the Mirror.
    pub(crate) fn named(&self) -> Result<String, clap::Error> {
        self.name.clone().map_or_else(|| Ok(name_of(&one(&self.objects)?)), Ok)
    }
}

impl ExplainArgs {
    pub(crate) fn pod(&self) -> Result<Workload, clap::Error> {
        match one(&self.objects)? {
            workload if workload.is_pod() => Ok(workload),
            workload => Err(usage(format!("{workload} is not a pod: name one pod, as in pod/web"))),
        }
    }
}

#[cfg(test)]
mod tests;
