//! Runs Open vSwitch, for stories and benches. Its datapath is a kernel module, which the guests have.

use std::process::Command;

use nix::sys::signal::Signal;

use crate::{Lab, Netns, Reader};

/// The control socket of the daemon.
const CONTROL: &str = "/run/story/ovs-vswitchd.ctl";

/// Open vSwitch on a machine: its database and its daemon, with all files in the directory of the test. Only one
/// instance at a time per test.
#[derive(Debug)]
pub struct Switch<'a> {
    lab: &'a Lab,
    netns: &'a Netns,
    daemon: Reader,
    database: Reader,
}

impl<'a> Switch<'a> {
    /// Starts database and daemon in a namespace, without a bridge.
    #[track_caller]
    pub fn start(lab: &'a Lab, netns: &'a Netns) -> Self {
        let run = |line: &str| Reader::start(lab, "ovs", command(lab, netns, line)).wait();
        run("ovsdb-tool create /run/story/conf.db /usr/share/openvswitch/vswitch.ovsschema");
        let start = |name: &str, line: &str| Reader::start(lab, name, command(lab, netns, line));
        let database = "ovsdb-server /run/story/conf.db --remote=punix:/run/story/db.sock";
        let mut database = start("ovsdb-server", database);
        database.wait_for("ovsdb-server (Open vSwitch)");
        let daemon = format!("ovs-vswitchd unix:/run/story/db.sock --unixctl={CONTROL}");
        let daemon = start("ovs-vswitchd", &daemon);
        Self { lab, netns, daemon, database }
    }

    /// Runs a command, and returns its output.
    #[track_caller]
    pub fn asked(&self, line: &str) -> String {
        Reader::start(self.lab, "ovs", command(self.lab, self.netns, line)).wait()
    }

    /// Runs a command that must print nothing: it prints only what it cannot do.
    #[track_caller]
    pub fn run(&self, line: &str) {
        assert_eq!(self.asked(line), "", "{line}");
    }

    /// Deletes the flows that the daemon has installed in the kernel, so that the next packet of each is decided again.
    #[track_caller]
    pub fn forget_flows(&self) {
        self.run(&format!("ovs-appctl -t {CONTROL} revalidator/purge"));
    }

    /// Deletes a bridge, and ends database and daemon.
    #[track_caller]
    pub fn end(self, bridge: &str) {
        self.run(&format!("ovs-vsctl del-br {bridge}"));
        self.daemon.stop(Signal::SIGTERM);
        self.database.stop(Signal::SIGTERM);
    }
}

impl Netns {
    /// Whether the kernel has the datapath of Open vSwitch. Loads the module if it exists.
    pub fn has_datapath(&self) -> bool {
        self.try_run("genl ctrl get name ovs_datapath").status.success()
    }
}

fn command(lab: &Lab, netns: &Netns, line: &str) -> Command {
    let mut command = lab.reader(netns, &line.split_whitespace().collect::<Vec<_>>());
    command.env("OVS_RUNDIR", "/run/story").env("OVS_SYSLOG_METHOD", "null");
    command
}
