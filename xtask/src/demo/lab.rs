//! The demo's node and pods: network namespaces, veths, a bridge; made, and removed without a trace.

use std::{
    fs,
    net::Ipv4Addr,
    path::PathBuf,
    process::{Child, Command},
    thread,
};

use anyhow::{Context as _, Result, anyhow};
use nix::sched::{CloneFlags, setns};

use crate::process::{Run as _, command};

/// A pod of the demo.
pub(super) struct Pod {
    pub(super) name: &'static str,
    pub(super) address: Ipv4Addr,
    pub(super) about: &'static str,
    annotations: &'static str,
}

/// The one that is mirrored.
pub(super) const WEB: Pod = Pod {
    name: "web",
    address: Ipv4Addr::new(192, 0, 2, 2),
    about: "annotated podmirror.io/mirror: \"true\"",
    annotations: "\n    podmirror.io/mirror: \"true\"",
};
/// One that is not.
pub(super) const DB: Pod =
    Pod { name: "db", address: Ipv4Addr::new(192, 0, 2, 3), about: "not annotated", annotations: "" };
/// Another one that is not, for db to talk to.
pub(super) const CLIENT: Pod =
    Pod { name: "client", address: Ipv4Addr::new(192, 0, 2, 4), about: "not annotated", annotations: "" };
/// All of them.
pub(super) const PODS: [Pod; 3] = [WEB, DB, CLIENT];

/// A network namespace by the name that `ip netns` gives it.
pub(super) struct Netns(String);

impl Netns {
    /// The file that stands for it.
    fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.0)
    }

    /// Runs `work` inside, in a thread of its own, because a namespace is a thread's. `ip netns exec` would do more
    /// than is wanted: it hides the BPF file system.
    pub(super) fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let file = fs::File::open(self.path()).with_context(|| self.0.clone())?;
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                setns(file, CloneFlags::CLONE_NEWNET)?;
                work()
            });
            worker.join().map_err(|_| anyhow!("a thread in {} failed", self.0))?
        })
    }

    /// Starts a program inside.
    pub(super) fn spawn(&self, program: &mut Command) -> Result<Child> {
        self.enter(|| program.spawn().with_context(|| program.get_program().to_string_lossy().into_owned()))
    }
}

/// The node and what belongs to it.
pub(super) struct Lab {
    /// The node's namespace: where the agent runs.
    pub(super) node: Netns,
    /// Files of the demo.
    pub(super) dir: PathBuf,
    /// The agent's directory in the BPF file system.
    bpffs: PathBuf,
    prefix: String,
}

impl Lab {
    /// Chooses names that no other demo has; makes nothing yet.
    pub(super) fn new() -> Self {
        let prefix = format!("podmirror-demo-{}", std::process::id());
        Self {
            node: Netns(format!("{prefix}-node")),
            dir: std::env::temp_dir().join(&prefix),
            bpffs: PathBuf::from("/sys/fs/bpf").join(&prefix),
            prefix,
        }
    }

    /// A pod's namespace.
    pub(super) fn netns(&self, pod: &Pod) -> Netns {
        Netns(format!("{}-{}", self.prefix, pod.name))
    }

    /// Makes the node, the pods, and what joins them.
    pub(super) fn build(&self) -> Result<()> {
        fs::create_dir(&self.dir)?;
        fs::create_dir(&self.bpffs)?;
        let node = &self.node;
        make(node)?;
        ip(&format!("-n {} link add br0 type bridge", node.0))?;
        ip(&format!("-n {} link set br0 up", node.0))?;
        for pod in &PODS {
            let netns = self.netns(pod);
            make(&netns)?;
            let veth = format!("veth-{}", pod.name);
            ip(&format!("-n {} link add {veth} type veth peer name eth0 netns {}", node.0, netns.0))?;
            ip(&format!("-n {} link set {veth} master br0 up", node.0))?;
            ip(&format!("-n {} address add {}/24 dev eth0", netns.0, pod.address))?;
            ip(&format!("-n {} link set eth0 up", netns.0))?;
        }
        Ok(())
    }

    /// The pods as Kubernetes would tell of them.
    pub(super) fn pods(&self) -> String {
        let pod = |pod: &Pod| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {0}\n  namespace: demo\n  uid: demo-{0}\n  annotations:\n    \
                 podmirror.io/netns: {1}{2}\n",
                pod.name,
                self.netns(pod).path().display(),
                pod.annotations
            )
        };
        PODS.each_ref().map(pod).join("---\n")
    }

    /// Writes the file that the agent reads.
    pub(super) fn write_pods(&self) -> Result<()> {
        Ok(fs::write(self.dir.join("pods.yaml"), self.pods())?)
    }

    /// The agent, told where its state lies and nothing from our environment.
    pub(super) fn agent(&self, agent: &std::path::Path) -> Command {
        let mut agent = command(agent);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MIRROR_") {
                agent.env_remove(name);
            }
        }
        agent.env("MIRROR_BPFFS", &self.bpffs);
        agent
    }

    /// Removes all that may have been made; goes on after an error, and returns the first.
    pub(super) fn remove(&self, agent: &std::path::Path) -> Result<()> {
        let mut outcomes = Vec::new();
        if self.node.path().exists() {
            if self.bpffs.exists() {
                let mut cleanup = self.agent(agent);
                cleanup.arg("cleanup").stdin(std::process::Stdio::null());
                outcomes.push(self.node.enter(move || cleanup.read().map(drop)));
            }
            outcomes.push(ip(&format!("netns delete {}", self.node.0)));
        }
        for pod in &PODS {
            let netns = self.netns(pod);
            if netns.path().exists() {
                outcomes.push(ip(&format!("netns delete {}", netns.0)));
            }
        }
        if self.bpffs.exists() {
            // Not recursive: `cleanup` has to leave nothing.
            outcomes.push(fs::remove_dir(&self.bpffs).with_context(|| self.bpffs.display().to_string()));
        }
        if self.dir.exists() {
            outcomes.push(fs::remove_dir_all(&self.dir).with_context(|| self.dir.display().to_string()));
        }
        outcomes.into_iter().collect::<Result<()>>().context("not all could be removed")
    }
}

/// Makes a namespace, without IPv6: its own chatter would only be in the way of the story.
fn make(netns: &Netns) -> Result<()> {
    ip(&format!("netns add {}", netns.0))?;
    ip(&format!("-n {} link set lo up", netns.0))?;
    netns.enter(|| {
        for which in ["all", "default"] {
            let knob = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
            if fs::exists(&knob)? {
                fs::write(knob, "1")?;
            }
        }
        Ok(())
    })
}

fn ip(arguments: &str) -> Result<()> {
    command("ip").args(arguments.split(' ')).run()
}
