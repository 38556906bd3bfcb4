//! Puts the cluster's programs into the cache. Go builds Kubernetes and etcd from source; the other programs are from
//! Debian's packages. This needs only Go's module proxy and Debian's archive, no image registry and no download site.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use mirror_test_tools::{
    apt::{self, Apt},
    process::{Run as _, command, step},
    programs::{self, Program},
};

use super::{Cni, Mode, cilium, multus};

/// The Go module whose `tool` lines list the programs; it pins every version.
const GO_MOD: &str = include_str!("../../go/go.mod");
const GO_SUM: &str = include_str!("../../go/go.sum");
/// Source of the program that is the process of a pod's sandbox.
const PAUSE: &str = include_str!("../../go/pause/main.go");
/// The oldest Debian suite whose containerd works with this kubelet. Its programs also run on newer systems.
const SUITE: &str = "bookworm";
/// The packages of containerd, runc, the CNI plugins, nft and iptables with their libraries, and busybox for images.
const PACKAGES: [&str; 15] = [
    "busybox-static",
    "containerd",
    "containernetworking-plugins",
    "iptables",
    "libbsd0",
    "libedit2",
    "libgmp10",
    "libjansson4",
    "libmd0",
    "libmnl0",
    "libnftables1",
    "libnftnl11",
    "libxtables12",
    "nftables",
    "runc",
];

/// The directories of the programs.
#[derive(Debug)]
pub(super) struct Binaries {
    built: PathBuf,
    debian: PathBuf,
}

impl Binaries {
    /// Returns the directories of the programs without installing anything.
    pub(super) fn locate() -> Result<Self> {
        let cache = programs::cache_dir()?.join("cluster");
        let built = cache.join(format!("kubernetes-{}", version("k8s.io/kubernetes")?));
        Ok(Self { built, debian: cache.join(format!("debian-{SUITE}")) })
    }

    /// Installs missing programs.
    pub(super) fn bring(mode: Mode) -> Result<Self> {
        let binaries = Self::locate()?;
        binaries.build()?;
        if let Mode::Node(cni) = mode {
            binaries.unpack()?;
            match cni {
                Cni::Bridge | Cni::Ptp => (),
                Cni::Cilium => drop(cilium::Programs::bring()?),
                Cni::Multus => multus::bring()?,
            }
        }
        Ok(binaries)
    }

    /// Unpacks Debian's packages unless they are already unpacked.
    pub(super) fn unpack(&self) -> Result<()> {
        apt::can_unpack()?;
        programs::bring(&[Program::of("dpkg", "dpkg-deb")])?;
        once(&self.debian, &PACKAGES.join(" "), || {
            step(&format!("bringing {SUITE}'s {} into {}", PACKAGES.join(", "), self.debian.display()));
            Apt::new(&[SUITE])?.unpack(&PACKAGES, &self.debian.join("root"))
        })
    }

    /// Returns an error if programs are missing and cannot be installed on this machine.
    pub(super) fn can_be_brought(&self) -> Result<()> {
        if self.built("kubelet").exists() { Ok(()) } else { go().map(drop) }
    }

    /// Path of a program that Go has built: a component of Kubernetes, kubectl, etcd, pause.
    pub(super) fn built(&self, name: &str) -> PathBuf {
        self.built.join("bin").join(name)
    }

    /// Path of a file of Debian's packages.
    pub(super) fn debian(&self, path: &str) -> PathBuf {
        self.debian.join("root").join(path)
    }

    fn build(&self) -> Result<()> {
        once(&self.built, &[GO_MOD, GO_SUM, PAUSE].concat(), || {
            let go = go()?;
            let module = self.built.join("module");
            fs::create_dir_all(module.join("pause"))?;
            for (file, text) in [("go.mod", GO_MOD), ("go.sum", GO_SUM), ("pause/main.go", PAUSE)] {
                fs::write(module.join(file), text)?;
            }
            let version = version("k8s.io/kubernetes")?;
            step(&format!(
                "building Kubernetes {version} and etcd {} into {} (go build; once, some minutes, and 4 GB of Go's caches)",
                self::version("go.etcd.io/etcd/server/v3")?,
                self.built.display()
            ));
            let mut build = go_build(go, &module, &ldflags(version)?);
            build.args(["./pause", "tool"]).run().with_context(|| {
                format!(
                    "Kubernetes cannot be built; is Go {} or newer, and is its module proxy reachable?",
                    go_version()
                )
            })?;
            // Go names a program after the last part of its import path.
            fs::rename(self.built("server"), self.built("etcd"))?;
            Ok(())
        })
    }
}

/// `go build` of a module of this repository into `bin` beside it.
pub(super) fn go_build(go: PathBuf, module: &Path, ldflags: &str) -> Command {
    let mut build = command(go);
    build.current_dir(module).env("CGO_ENABLED", "0").env("GOWORK", "off").env("GOFLAGS", "");
    build.args(["build", "-mod=readonly", "-trimpath", "-ldflags", ldflags, "-o", "../bin/"]);
    build
}

/// Fills a directory by `make`, unless it was already filled from the same sources (`of`).
pub(super) fn once(dir: &Path, of: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
    let stamp = dir.join("made-of");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == of) {
        return Ok(());
    }
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    make()?;
    fs::write(stamp, of)?;
    Ok(())
}

fn go() -> Result<PathBuf> {
    programs::go(&format!("Kubernetes, in version {} or newer", go_version()))
}

/// The oldest version of Go that can build Kubernetes.
fn go_version() -> &'static str {
    GO_MOD.lines().find_map(|line| line.strip_prefix("go ")).unwrap_or("1.25")
}

/// The version of a module, as `go.mod` pins it, without the `v`.
fn version(module: &str) -> Result<&'static str> {
    version_in(GO_MOD, module)
}

/// The version of a module, as this `go.mod` pins it, without the `v`.
pub(super) fn version_in(go_mod: &'static str, module: &str) -> Result<&'static str> {
    let line = |line: &'static str| line.trim().strip_prefix(module)?.strip_prefix(" v");
    let rest = go_mod.lines().find_map(line).with_context(|| format!("go.mod does not require {module}"))?;
    Ok(rest.split(' ').next().unwrap_or(rest))
}

/// The linker flags of Kubernetes' own build, which set the version. Without them the programs report version 0.
fn ldflags(version: &str) -> Result<String> {
    let mut numbers = version.split('.');
    let (major, minor) =
        numbers.next().zip(numbers.next()).context("a version of Kubernetes has two numbers")?;
    let mut flags = String::from("-s -w");
    for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
        for (name, value) in
            [("gitVersion", format!("v{version}").as_str()), ("gitMajor", major), ("gitMinor", minor)]
        {
            flags += &format!(" -X {package}.{name}={value}");
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn every_staging_module_is_of_the_release_that_is_built() {
        let release = version("k8s.io/kubernetes").unwrap();
        let staging = release.replacen('1', "0", 1);
        let replaced: Vec<_> = GO_MOD.lines().filter(|line| line.contains("=>")).collect();
        assert_eq!(replaced.len(), 31);
        assert!(replaced.iter().all(|line| line.ends_with(&format!(" v{staging}"))), "{replaced:?}");
    }

    #[test]
    fn the_programs_are_told_their_version() {
        let flags = ldflags("1.35.4").unwrap();
        assert!(flags.contains("-X k8s.io/component-base/version.gitVersion=v1.35.4 "), "{flags}");
        assert!(flags.contains("-X k8s.io/client-go/pkg/version.gitMinor=35"), "{flags}");
    }
}
