//! Puts Cilium's programs into the cache. Go builds the agent, the operator, the CNI plugin and the command
//! `cilium-dbg` from source. The sources of the eBPF programs are added, and from Debian's packages the commands that
//! the agent calls, and clang, with which the agent compiles these sources at run time.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use mirror_test_tools::{
    apt::{self, Apt},
    process::{Run as _, command, step},
    programs,
};

use super::super::binaries::{go_build, once, version_in};

/// The Go module whose `tool` lines list the programs; it pins every version.
const GO_MOD: &str = include_str!("../../../go/cilium/go.mod");
const GO_SUM: &str = include_str!("../../../go/cilium/go.sum");
/// Source of a module that replaces one of Cilium's dependencies.
const CONTROLLERS: &str = include_str!("../../../go/cilium/mcs-api-controllers/controllers.go");
const CONTROLLERS_MOD: &str = include_str!("../../../go/cilium/mcs-api-controllers/go.mod");
const MODULE: &str = "github.com/cilium/cilium";
/// Go names a program after the last part of its import path.
const NAMES: [(&str, &str); 2] = [("daemon", "cilium-agent"), ("operator", "cilium-operator")];
/// The Debian suite of these packages. Its programs also run on newer systems.
const SUITE: &str = "bookworm";
/// Cilium's agent needs clang 18.1 or newer, iptables and ipset; with their libraries.
const PACKAGES: [&str; 22] = [
    "clang-19",
    "ipset",
    "iptables",
    "libbsd0",
    "libclang-common-19-dev",
    "libclang-cpp19",
    "libedit2",
    "libicu72",
    "libip4tc2",
    "libip6tc2",
    "libipset13",
    "libllvm19",
    "libmd0",
    "libmnl0",
    "libnetfilter-conntrack3",
    "libnfnetlink0",
    "libnftnl11",
    "libtinfo6",
    "libxml2",
    "libxtables12",
    "libz3-4",
    "libzstd1",
];

/// The directories of the programs.
#[derive(Debug)]
pub(in super::super) struct Programs {
    built: PathBuf,
    debian: PathBuf,
}

impl Programs {
    /// Returns the directories of the programs without installing anything.
    pub(in super::super) fn locate() -> Result<Self> {
        let cache = programs::cache_dir()?.join("cluster");
        let built = cache.join(format!("cilium-{}", version_in(GO_MOD, MODULE)?));
        Ok(Self { built, debian: cache.join(format!("cilium-{SUITE}")) })
    }

    /// Installs missing programs.
    pub(in super::super) fn bring() -> Result<Self> {
        let programs = Self::locate()?;
        programs.build()?;
        apt::can_unpack()?;
        once(&programs.debian, &PACKAGES.join(" "), || {
            step(&format!("bringing {SUITE}'s {} into {}", PACKAGES.join(", "), programs.debian.display()));
            Apt::new(&[SUITE])?.unpack(&PACKAGES, &programs.debian.join("root"))
        })?;
        Ok(programs)
    }

    /// Returns an error if programs are missing and cannot be installed on this machine.
    pub(in super::super) fn can_be_brought(&self) -> Result<()> {
        if self.built("cilium-agent").exists() { Ok(()) } else { go().map(drop) }
    }

    /// Path of a program that Go has built.
    pub(super) fn built(&self, name: &str) -> PathBuf {
        self.built.join("bin").join(name)
    }

    /// The directory that contains `bpf`, the sources of the eBPF programs.
    pub(super) fn library(&self) -> &Path {
        &self.built
    }

    /// Root of the unpacked Debian packages.
    pub(super) fn debian(&self) -> PathBuf {
        self.debian.join("root")
    }

    fn build(&self) -> Result<()> {
        once(&self.built, &[GO_MOD, GO_SUM, CONTROLLERS, CONTROLLERS_MOD].concat(), || {
            let go = go()?;
            let module = self.built.join("module");
            fs::create_dir_all(module.join("mcs-api-controllers"))?;
            for (file, text) in [
                ("go.mod", GO_MOD),
                ("go.sum", GO_SUM),
                ("mcs-api-controllers/controllers.go", CONTROLLERS),
                ("mcs-api-controllers/go.mod", CONTROLLERS_MOD),
            ] {
                fs::write(module.join(file), text)?;
            }
            let version = version_in(GO_MOD, MODULE)?;
            step(&format!(
                "building Cilium {version} into {} (go build; once, some 15 minutes, and 4 GB of Go's caches)",
                self.built.display()
            ));
            let ldflags = format!("-s -w -X {MODULE}/pkg/version.ciliumVersion={version}");
            let mut build = go_build(go.clone(), &module, &ldflags);
            // As in Cilium's own build of the operator for any cloud.
            build.args(["-tags", "osusergo,ipam_provider_operator", "tool"]);
            build
                .run()
                .context("Cilium cannot be built; is Go new enough, and is its module proxy reachable?")?;
            for (program, name) in NAMES {
                fs::rename(self.built(program), self.built(name))?;
            }
            // Go's module cache can be emptied at any time.
            let mut list = command(go);
            list.current_dir(&module).env("GOWORK", "off").env("GOFLAGS", "");
            let source = list.args(["list", "-mod=readonly", "-m", "-f", "{{.Dir}}", MODULE]).read()?;
            let mut copy = command("cp");
            copy.args(["--recursive", "--no-preserve=mode"]).arg(Path::new(source.trim()).join("bpf"));
            copy.arg(self.built.join("bpf")).run()
        })
    }
}

fn go() -> Result<PathBuf> {
    programs::go(&format!(
        "Cilium, in version {} or newer",
        GO_MOD.lines().find_map(|line| line.strip_prefix("go ")).unwrap_or("1.26")
    ))
}
