//! The flags, as typed. A flag is checked here only if the command line alone is enough for the check.

mod apiserver;
mod boolean;
mod capture;
mod controller;
mod settings;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::bail;

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser},
};
use mirror_core::{
    destination::{Destination, device_name, parse_target},
    settings::parse_duration,
    targets::objection,
};

pub use self::{
    apiserver::ApiserverArgs,
    capture::{CaptureArgs, RecorderArgs, SubjectArgs, TailArgs},
    controller::ControllerArgs,
    settings::SettingArgs,
};
use self::{boolean::Boolean as _, capture::pod};
use crate::{
    kernel::dataplane::hooks::{AttachMode, Method},
    model::{Directions, TargetName},
};

/// Copies the packets of selected Kubernetes pods to a mirror interface, where tcpdump, an IDS or a collector
/// reads them.
#[derive(Debug, Parser)]
#[command(name = "mirror-agent", version, long_version = env!("PODMIRROR_VERSION"), propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Format of the log lines on standard error.
    #[arg(long, env = "PODMIRROR_LOG_FORMAT", global = true, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Log level, or filters, for example "info,mirror_agent=debug".
    #[arg(long, env = "PODMIRROR_LOG", global = true, default_value = "info", value_parser = log_filter)]
    pub log: String,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Mirror the selected pods of this node until stopped. Mirrors remain in place after the agent stops
    /// (see `cleanup`).
    Run(Box<RunArgs>),
    /// Mirror interfaces, without any pods, until Ctrl-C.
    Attach(AttachArgs),
    /// Read the packets of pods and interfaces as they come: pcapng to standard output or into a file.
    Tail(TailArgs),
    /// Keep packets of pods and interfaces in memory or in a rotation of files.
    Capture(CaptureArgs),
    /// Keep the newest copies for a target in memory for `tail --since`, also over the end of an agent.
    Recorder(RecorderArgs),
    /// Aggregate the reports of the nodes into the status of each Mirror and ClusterMirror. Run one per
    /// cluster, on any node.
    Controller(ControllerArgs),
    /// Serve packets and reports of pods as an API of the cluster, packets.podmirror.io. Run one or several per
    /// cluster, on any node.
    Apiserver(ApiserverArgs),
    /// Show taps, sessions and counters; works with or without a running agent.
    Status {
        /// Output format.
        #[arg(short, long, env = "PODMIRROR_OUTPUT", value_enum, default_value = "table")]
        output: OutputFormat,
        #[command(flatten)]
        #[expect(missing_docs, reason = "a doc comment here would become the heading of the help")]
        state: StateArgs,
    },
    /// Ask a running agent or controller whether it is ready: exit code 0 if it is, otherwise 1 with the reason.
    Ready {
        /// Address of the agent or controller, as in its own --listen.
        #[arg(long, env = "PODMIRROR_LISTEN", value_name = "ADDR", default_value = DEFAULT_LISTEN)]
        listen: SocketAddr,
    },
    /// Detach and unpin everything of podmirror; delete the mirror interface if podmirror created it.
    Cleanup(StateArgs),
    /// Work with filters.
    #[command(subcommand)]
    Filter(FilterCommand),
    /// Explain whether, how and why a pod of this node is mirrored.
    Explain {
        /// Pod of this node, by namespace and name. The output says whether it is mirrored, what requested the
        /// mirror, how packets are copied and counted, what is missing, and what to do. Works with or without a
        /// running agent.
        #[arg(long, value_name = "NAMESPACE/NAME", value_parser = pod)]
        pod: (String, String),
        #[command(flatten)]
        #[expect(missing_docs, reason = "as above")]
        state: StateArgs,
    },
    /// Print the CRDs of Mirror, ClusterMirror, MirrorTarget and MirrorNode, for `kubectl apply`.
    Crds,
}

/// Default address for HTTP. The port is in neither Prometheus' list of exporters nor the node's own
/// services.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:10706";

/// Where the state lies.
#[derive(Debug, Clone, Args)]
pub struct StateArgs {
    /// Directory in a BPF file system; maps and links are pinned in `podmirror/` below it.
    #[arg(long, env = "PODMIRROR_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
}

/// Where copies go, and how the taps are attached.
#[derive(Debug, Clone, Args)]
pub struct MirrorArgs {
    /// Mirror interface. The agent creates a dummy device if no device has this name.
    #[arg(long, env = "PODMIRROR_MIRROR_IFACE", value_name = "NAME", default_value = "mirror0", value_parser = device_name)]
    pub mirror_iface: String,
    /// Additional target, with the destination of its copies: a device, which is created if it does not exist
    /// (ids=ids0), a pod of the node (ids=pod:NAMESPACE/NAME or ids=pod:NAMESPACE/LABEL=VALUE), a tunnel, for
    /// example ids=vxlan:ADDRESS:PORT/vni=N (docs/targets.md lists all kinds and options), or a stream
    /// (live=stream), which `mirror-agent tail --target` reads. Can be repeated.
    #[arg(long = "define-target", env = "PODMIRROR_DEFINE_TARGET", value_name = "NAME=DESTINATION", value_delimiter = ',', value_parser = parse_target)]
    pub targets: Vec<(TargetName, Destination)>,
    /// Target of the annotations and flags that name none: one of --define-target, or `default`, the device of
    /// --mirror-iface.
    #[arg(long, env = "PODMIRROR_TARGET", value_name = "NAME", default_value = "default", value_parser = target_name)]
    pub target: TargetName,
    /// MTU of the mirror interface in bytes [default: 65535 for a device that the agent creates; an existing
    /// device keeps its MTU].
    #[arg(long, env = "PODMIRROR_MIRROR_IFACE_MTU", value_name = "N", value_parser = clap::value_parser!(u32).range(68..=65535))]
    pub mirror_iface_mtu: Option<u32>,
    /// Offloads of the mirror interface. If false, the kernel segments super-frames and fills in checksums, in
    /// the copies only.
    #[arg(long, env = "PODMIRROR_MIRROR_OFFLOADS", boolean(true))]
    pub mirror_offloads: bool,
    /// Copy to a mirror interface only while a program reads it through a packet socket, for example tcpdump
    /// or an IDS. Applies to mirror interfaces that the agent created.
    #[arg(long, env = "PODMIRROR_WHEN_READ", boolean(false))]
    pub when_read: bool,
    /// How the tap programs are attached: tcx as TCX links, which need Linux 6.6; clsact as filters of the clsact
    /// qdisc; auto with TCX where the kernel has it, otherwise with clsact.
    #[arg(long, env = "PODMIRROR_ATTACH", value_parser = attach_mode(), default_value = "auto")]
    pub attach: AttachMode,
}

impl MirrorArgs {
    /// The destination of each target: `--mirror-iface` is that of the target `default`.
    ///
    /// # Errors
    ///
    /// Where a name or a destination is given twice, there are too many, or `--target` is none of them.
    pub fn targets(&self) -> anyhow::Result<BTreeMap<TargetName, Destination>> {
        let default = Destination::Device(self.mirror_iface.clone());
        let mut targets = BTreeMap::from([(TargetName::default(), default)]);
        for (name, to) in &self.targets {
            if name.0.is_default() {
                bail!(
                    "--define-target {name}={to}: the target {name} is the device of --mirror-iface; use another \
                     name, and --target for the mirrors that name no target"
                );
            }
            if let Some(why) = objection(name, to, &targets) {
                bail!("--define-target {name}={to}: {why}");
            }
            targets.insert(name.clone(), to.clone());
        }
        let Self { target, .. } = self;
        if !targets.contains_key(target) {
            bail!(
                "--target {target}: there is no such target; define it with --define-target {target}=DESTINATION"
            );
        }
        Ok(targets)
    }
}

/// `mirror-agent run`.
#[derive(Debug, Args)]
#[command(mut_args = boolean::spaced)]
pub struct RunArgs {
    /// File with Kubernetes Pod objects (YAML or JSON, or a List), as `kubectl get pod -o yaml` prints them;
    /// watched for changes [default: the pods of this node in the Kubernetes API].
    #[arg(long, env = "PODMIRROR_PODS_FROM", value_name = "FILE")]
    pub pods_from: Option<PathBuf>,
    /// Name of the node in Kubernetes, whose pods the agent follows. The API is located through KUBECONFIG,
    /// ~/.kube/config, or the service account of the agent's own pod.
    #[arg(long, env = "NODE_NAME", value_name = "NAME", required_unless_present = "pods_from", value_parser = NonEmptyStringValueParser::new())]
    pub node_name: Option<String>,
    /// DaemonSet of the agent's pod. When it is deleted, the agent removes everything from its node.
    #[arg(long, env = "PODMIRROR_DAEMONSET", value_name = "NAME", requires_all = ["node_name", "namespace"])]
    pub daemonset: Option<String>,
    /// Namespace of that DaemonSet.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Namespaces whose pods are never mirrored, regardless of annotations, Mirrors and ClusterMirrors.
    #[arg(long, env = "PODMIRROR_EXCLUDE_NAMESPACES", value_name = "NAME", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub exclude_namespaces: Vec<String>,
    /// Whether annotations of pods and namespaces are used. If false, only Mirrors, ClusterMirrors and
    /// --enable-mirror request mirrors.
    #[arg(long, env = "PODMIRROR_ANNOTATIONS", boolean(true))]
    pub annotations: bool,
    /// Use the annotations of Kube-OVN too: ovn.kubernetes.io/mirror, and those of single attachments. Has no effect
    /// with --annotations=false.
    #[arg(long, env = "PODMIRROR_KUBE_OVN_ANNOTATIONS", boolean(false))]
    pub kube_ovn_annotations: bool,
    /// The only namespaces in which annotations and Mirrors can request or change mirrors [default: all].
    #[arg(long, env = "PODMIRROR_ALLOW_NAMESPACES", value_name = "NAME", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub allow_namespaces: Option<Vec<String>>,
    /// Mirror every pod that does not opt out.
    #[arg(long, env = "PODMIRROR_ENABLE_MIRROR", boolean(false))]
    pub enable_mirror: bool,
    /// Taps inside pods, for NICs without a peer on the node (macvlan, ipvlan, a VF), and for packets that
    /// other software delivers to a pod past the node side of its veth. These taps need programs, and a
    /// device through which copies leave, inside the pod. off: these packets are not mirrored.
    #[arg(long, env = "PODMIRROR_POD_SIDE_TAPS", value_enum, default_value = "auto")]
    pub pod_side_taps: PodSideTaps,
    /// Whether the metrics have the labels pod and nic. If false, each series is the sum over a namespace.
    #[arg(long, env = "PODMIRROR_METRICS_PER_POD", boolean(true))]
    pub metrics_per_pod: bool,
    /// Address for /healthz, /readyz and /metrics, for example 127.0.0.1:10706 or [::]:10706. An empty value
    /// disables it.
    #[arg(
        long, env = "PODMIRROR_LISTEN", value_name = "ADDR", default_value = DEFAULT_LISTEN, value_parser = listen
    )]
    pub listen: Listen,
    /// Service of `mirror-agent apiserver`, for example podmirror/podmirror-apiserver. Its users read packets and
    /// reports of this node, by connections that the agent opens to the servers [default: none].
    #[arg(long, env = "PODMIRROR_APISERVER", value_name = "NAMESPACE/NAME", requires = "node_name", value_parser = pod)]
    pub apiserver: Option<(String, String)>,
    /// File with the agent's token for these servers: of its own ServiceAccount and pod, with the audience
    /// packets.podmirror.io.
    #[arg(
        long,
        env = "PODMIRROR_APISERVER_TOKEN",
        value_name = "FILE",
        default_value = "/var/run/secrets/podmirror/apiserver/token"
    )]
    pub apiserver_token: PathBuf,
    /// Time after which the agent ends the reading of such a user.
    #[arg(
        long, env = "PODMIRROR_MAX_READER_DURATION", value_name = "TIME", default_value = "1h", value_parser = parse_duration
    )]
    pub max_reader_duration: Duration,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub mirror: MirrorArgs,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub state: StateArgs,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub settings: SettingArgs,
}

/// Whether NICs are tapped inside pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PodSideTaps {
    /// Where a NIC has no peer on the node, or packets bypass that peer on their way to the pod.
    Auto,
    /// Never.
    Off,
}

/// Where the agent listens for HTTP; `None`: nowhere.
pub type Listen = Option<SocketAddr>;

fn listen(text: &str) -> Result<Listen, String> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        format!("use an IP address and a port as in {DEFAULT_LISTEN}, or an empty value to disable it")
    })
}

/// `mirror-agent attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The interfaces to mirror.
    #[arg(required = true, value_name = "IFACE", value_parser = boolean::interface)]
    pub interfaces: Vec<String>,
    /// Direction of the packets, as seen from the interface: ingress for received packets, egress for sent
    /// packets.
    #[arg(long, env = "PODMIRROR_DIRECTION", value_parser = directions(), default_value = "both")]
    pub direction: Directions,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub mirror: MirrorArgs,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub state: StateArgs,
    #[command(flatten)]
    #[expect(missing_docs, reason = "as above")]
    pub settings: SettingArgs,
}

/// What can be done with a filter.
#[derive(Debug, Subcommand)]
pub enum FilterCommand {
    /// Compile a filter, and show what it does or where it is wrong.
    Check {
        /// Filter in tcpdump's syntax (pcap-filter(7)).
        #[arg(value_name = "EXPR")]
        expression: String,
        /// Count the packets that match in a pcap or pcapng file of Ethernet frames.
        #[arg(long, value_name = "FILE")]
        pcap: Option<PathBuf>,
    },
}

/// Form of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Form of `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// A table.
    Table,
    /// JSON.
    Json,
}

/// The ways to attach the tap programs by their names.
fn attach_mode() -> impl TypedValueParser<Value = AttachMode> {
    let methods = [Method::Tcx, Method::Clsact];
    PossibleValuesParser::new(["auto"].into_iter().chain(methods.map(Method::name)))
        .map(move |name| methods.into_iter().find(|method| method.name() == name))
}

/// The name of a target.
fn target_name(text: &str) -> Result<TargetName, String> {
    text.parse().map(TargetName)
}

/// The directions by their names.
fn directions() -> impl TypedValueParser<Value = Directions> {
    PossibleValuesParser::new(Directions::ALL.map(Directions::name))
        .try_map(|name| Directions::from_name(&name).ok_or("no such direction"))
}

/// Checks what `--log` was given.
fn log_filter(filter: &str) -> Result<String, String> {
    match tracing_subscriber::EnvFilter::try_new(filter) {
        Ok(_) => Ok(filter.to_owned()),
        Err(error) => Err(format!("neither a level nor a list of filters: {error}")),
    }
}
