//! `cargo xtask test`: the levels of tests, from the pure parts to other kernels.
//!
//! Without options the command runs unit, prog and netns. `--all` adds the levels that install programs and kernels. If
//! a level cannot run, the command prints that. With `CI=true`, or if the level was named, it fails.

use std::{env, fs, num::NonZero, path::PathBuf, process::Command, thread, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use mirror_test_cluster::{
    Existing,
    built::{self, Cni, cilium, multus},
};

use crate::{
    apt,
    beside::Beside,
    cluster::level,
    fuzz, pins,
    process::{Run as _, command, is_ci, is_root, step},
    programs::{self, CAPTURES, DOWNLOADS, FIREWALL, NETWORK, Program, TRAFFIC},
    readers, tools, vm,
    workspace::{self, AGENT},
};

/// The levels of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    /// The pure parts, on the host; the filter against libpcap.
    Unit,
    /// The eBPF programs, by BPF_PROG_TEST_RUN.
    Prog,
    /// The built agent, in network namespaces.
    Netns,
    /// The built agent in network namespaces, with a Kubernetes API server and no kubelet; the clients beside kubectl.
    Api,
    /// The stories of the level api, with API servers of the oldest and the newest Kubernetes. Runs only if it is named.
    ApiVersions,
    /// The agent's image on a Kubernetes node.
    Cluster,
    /// The level prog, and the stories of netns that depend on the kernel, on other kernels in qemu.
    Vm,
    /// Programs that nobody here wrote (Suricata, softflowd, tshark, Open vSwitch) read copies. Runs only if it is named.
    Readers,
    /// The agent's image on a node with Cilium, in its modes. Runs only if it is named.
    Cilium,
    /// The agent's image on a node with Multus: pods with additional NICs. Runs only if it is named.
    Multus,
    /// A release is made, pushed to a registry, verified and installed on a Kubernetes node. Runs only if it is named.
    Release,
    /// Millions of random filters and frames against libpcap, and cargo-fuzz on the parsers of bytes that strangers choose. Runs
    /// only if it is named. Arguments are names of the targets of `tests/fuzz`: then these alone run.
    Fuzz,
}

/// The command line of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// What to run [default: unit, prog and netns].
    #[arg(long = "level", value_name = "LEVEL")]
    levels: Vec<Level>,
    /// Run every level but api-versions, readers, cilium, multus, release and fuzz: also api, cluster and vm, which
    /// install what they need. On 2 cores, that takes 45 minutes or more, and the first time half an hour more.
    #[arg(long, conflicts_with = "levels")]
    all: bool,
    /// Run the level cluster on a cluster that exists, whose only node is this machine or a container on it.
    #[arg(long, value_name = "FILE", requires = "import")]
    kubeconfig: Option<PathBuf>,
    /// The command that brings an image onto that cluster's node, without the archive's path, as in `kind load
    /// image-archive`.
    #[arg(long, value_name = "COMMAND", requires = "kubeconfig")]
    import: Option<String>,
    /// For the tests themselves: a filter, --nocapture, ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the levels in order.
pub(crate) fn run(args: TestArgs) -> Result<()> {
    let TestArgs { levels, all, kubeconfig, import, arguments } = args;
    let given = kubeconfig.zip(import).map(|(path, by)| Existing::connect(&path, Some(by))).transpose()?;
    let is_right = given.is_none() || levels == [Level::Cluster];
    ensure!(is_right, "--kubeconfig is for the level cluster alone: say `--level cluster`");
    let asked_for = !levels.is_empty();
    let levels = match all {
        _ if asked_for => levels,
        true => Level::ALL.to_vec(),
        false => Level::USUAL.to_vec(),
    };
    let (mut ran, mut not_run) = (Vec::new(), Vec::new());
    let mut guests = None;
    let mut run = |level: Level| {
        if let Err(why) = can_run(level, given.as_ref()) {
            if asked_for || is_ci() {
                return Err(why.context(format!("level {} cannot run here", level.name())));
            }
            not_run.push(format!("level {} was NOT RUN: {why:#}", level.name()));
            return Ok(());
        }
        if level == Level::Api && all && can_run(Level::Vm, None).is_ok() {
            guests = Some(Beside::level("vm")?);
        }
        step(&format!("level {}", level.name()));
        let begun = Instant::now();
        match guests.take_if(|_| level == Level::Vm) {
            Some(guests) => guests.end()?,
            None => level.run(given.as_ref(), &arguments)?,
        }
        ran.push(format!("{} {} s", level.name(), begun.elapsed().as_secs()));
        Ok(())
    };
    let outcome = levels.iter().try_for_each(|level| run(*level));
    outcome.and(guests.map_or(Ok(()), Beside::end))?;
    step(&format!("test: {} of {} levels passed ({})", ran.len(), levels.len(), ran.join(", ")));
    for line in &not_run {
        println!("    !!! {line}");
    }
    Ok(())
}

/// Stories of the level netns that keep the CPUs busy, or fill the queue that each CPU has for all veths (1000
/// packets). At most one per CPU runs at a time.
const BUSY: [&str; 4] = ["limits::", "offloads::", "order::", "rampage::"];
/// The environment variable for the number of concurrent tests, unless the command line sets it.
const THREADS: &str = "RUST_TEST_THREADS";
/// The number of other stories per CPU.
const WAITING: usize = 2;
/// The number of stories of the level api that hardly use a CPU: those of `absence` wait for minutes.
const ABSENT: usize = 2;

/// The environment variable for a factor by which the deadlines of stories are longer.
const SLOW: &str = "MIRROR_TEST_SLOW";
/// The factor for levels that can run beside the guests of the level vm, which share the caches of the CPUs.
const BESIDE_GUESTS: &str = "2";

/// The registry of the level release.
const REGISTRY: &str = "github.com/distribution/distribution/v3/cmd/registry";

/// The number of pairs of a filter and a frame in the level fuzz.
const FUZZ_PAIRS: &str = "5000000";

impl Level {
    /// The levels that run without options. They need only this machine's kernel.
    const USUAL: [Self; 3] = [Self::Unit, Self::Prog, Self::Netns];
    /// The levels of `--all`.
    const ALL: [Self; 6] = [Self::Unit, Self::Prog, Self::Netns, Self::Api, Self::Cluster, Self::Vm];

    /// The name of the level on the command line, and of its test binary.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// The programs of this machine that the stories use.
    fn programs(self) -> Vec<Program> {
        let lists: &[&[Program]] = match self {
            Self::Prog | Self::Vm => &[],
            Self::Unit | Self::Readers | Self::Cluster => &[&NETWORK, &CAPTURES],
            Self::Netns => &[&NETWORK, &CAPTURES, &FIREWALL, &TRAFFIC],
            Self::Api | Self::ApiVersions => &[&NETWORK, &FIREWALL],
            Self::Fuzz | Self::Cilium | Self::Multus => &[&NETWORK],
            Self::Release => &[&NETWORK, &CAPTURES, &DOWNLOADS],
        };
        lists.concat()
    }

    fn run(self, given: Option<&Existing>, arguments: &[String]) -> Result<()> {
        tools::stable()?;
        tools::bpf()?;
        programs::bring(&self.programs())?;
        if !matches!(self, Self::Unit | Self::Fuzz | Self::Vm) {
            bpffs()?;
        }
        let name = self.name();
        match self {
            Self::Unit => {
                // The tests in the sources: the test targets of `mirror-tests` have `test = false`.
                workspace::members("test").arg("--").args(arguments).run()?;
                test_target("filter").arg("--").args(arguments).run()
            }
            Self::Fuzz => {
                if arguments.is_empty() {
                    let mut filters = test_target("filter");
                    filters.env("MIRROR_FUZZ_PAIRS", FUZZ_PAIRS);
                    filters.args(["--", "random", "--nocapture"]).run()?;
                }
                fuzz::run(arguments)
            }
            Self::Prog => test_target(&name).arg("--").args(arguments).run(),
            Self::Readers => {
                let mut test = stories(&name, arguments)?;
                test.env("MIRROR_PLUGIN", workspace::program("kubectl-mirror")?);
                test.env(readers::VARIABLE, readers::bring()?).run()
            }
            // Only the stories that the arguments select.
            Self::Netns if !arguments.is_empty() => {
                ["netns", "traffic"].into_iter().try_for_each(|target| stories(target, arguments)?.run())
            }
            Self::Netns => {
                let waiting = BUSY.iter().flat_map(|story| ["--skip", story]);
                stories(&name, &[])?.args(waiting).env(THREADS, threads(0)).run()?;
                stories(&name, &[])?.args(BUSY).run()?;
                stories("traffic", &[])?.run()?;
                step("the demo");
                stories("demo", &[])?.run()
            }
            Self::Api => {
                level::with_api(&mut api_stories(arguments)?, None)?;
                // kubectl was built with the API server.
                let mut clients = test_target("kubeconfigs");
                clients.env("MIRROR_KUBECTL", built::kubectl_program().context("no kubectl was built")?);
                clients.args(["--", "--ignored"]).args(arguments).run()
            }
            Self::ApiVersions => pins::KUBERNETES.into_iter().try_for_each(|version| {
                step(&format!("stories with the API server of Kubernetes {version}"));
                level::with_api(&mut api_stories(arguments)?, Some(version))
            }),
            Self::Cluster => {
                let test = || {
                    let mut test = test_target(&name);
                    test.env(SLOW, BESIDE_GUESTS);
                    test
                };
                level::run(&Cni::PLUGINS, test, given, arguments)
            }
            Self::Cilium => level::run(&[Cni::Cilium], || test_target(&name), None, arguments),
            Self::Multus => level::run(&[Cni::Multus], || test_target(&name), None, arguments),
            Self::Release => {
                let tools = [
                    ("MIRROR_XTASK", Command::new(env::current_exe()?)),
                    ("MIRROR_COSIGN", tools::cosign()?),
                    ("MIRROR_KREW", tools::go_program("sigs.k8s.io/krew/cmd/krew", pins::KREW)?),
                    ("MIRROR_REGISTRY", tools::go_program(REGISTRY, pins::REGISTRY)?),
                ];
                let test = || {
                    let mut test = test_target(&name);
                    test.envs(tools.iter().map(|(variable, tool)| (variable, tool.get_program())));
                    test
                };
                level::run(&[Cni::Bridge], test, None, arguments)
            }
            Self::Vm => vm::run_level(arguments),
        }
    }
}

/// Returns an error if this machine cannot run a level.
fn can_run(level: Level, given: Option<&Existing>) -> Result<()> {
    match level {
        Level::Unit | Level::Fuzz => Ok(()),
        Level::Prog | Level::Netns | Level::Readers if !is_root() => {
            bail!("it needs root, to load programs and to make network namespaces")
        }
        Level::Prog | Level::Netns => Ok(()),
        Level::Readers | Level::Vm => apt::can_unpack(),
        Level::Api | Level::ApiVersions => level::can_run_api(),
        Level::Cluster => level::can_run(given),
        Level::Cilium => level::can_run(None).and_then(|()| cilium::can_be_brought()),
        Level::Multus => level::can_run(None).and_then(|()| multus::can_be_brought()),
        Level::Release => level::can_run(None).and_then(|()| programs::go("cosign").map(drop)),
    }
}

fn test_target(name: &str) -> Command {
    let mut test = workspace::members("test");
    test.args(["--test", name]);
    test
}

/// A test target that runs the built agent.
fn stories(name: &str, arguments: &[String]) -> Result<Command> {
    let mut test = test_target(name);
    test.env("MIRROR_AGENT", workspace::tested(name, AGENT)?).arg("--").args(arguments);
    Ok(test)
}

/// The stories of the level api.
fn api_stories(arguments: &[String]) -> Result<Command> {
    let mut test = stories("api", arguments)?;
    test.env("MIRROR_PLUGIN", workspace::program("kubectl-mirror")?)
        .env(programs::PROMTOOL, programs::promtool()?)
        .env("MIRROR_HELM", tools::helm()?.get_program())
        .env(SLOW, BESIDE_GUESTS)
        .env(THREADS, threads(ABSENT));
    Ok(test)
}

/// The number of concurrent stories at levels where they mostly wait, with some more.
fn threads(more: usize) -> String {
    (WAITING * thread::available_parallelism().map_or(1, NonZero::get) + more).to_string()
}

/// Mounts the BPF file system if it is not mounted.
pub(crate) fn bpffs() -> Result<()> {
    const DIR: &str = "/sys/fs/bpf";
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    if mounts.lines().any(|line| line.split(' ').nth(1) == Some(DIR)) {
        return Ok(());
    }
    step(&format!("mounting the BPF file system at {DIR}"));
    command("mount").args(["-t", "bpf", "bpf", DIR]).run().context("the kernel has no BPF file system")
}
