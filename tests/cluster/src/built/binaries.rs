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
use serde_json::Value;

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
        if let Mode::ApiOnly(Some(version)) = mode {
            binaries.build_api_server(version)?;
        }
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

    /// Path of the API server of a cluster of this kind.
    pub(super) fn api_server(&self, mode: Mode) -> PathBuf {
        match mode {
            Mode::ApiOnly(Some(version)) => self.of_version(version).join("bin/kube-apiserver"),
            Mode::ApiOnly(None) | Mode::Node(_) => self.built("kube-apiserver"),
        }
    }

    /// The directory of the API server of another version.
    fn of_version(&self, version: &str) -> PathBuf {
        self.built.with_file_name(format!("kube-apiserver-{version}"))
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

    /// Builds the API server of another version in Kubernetes' own module, which pins the dependencies of that version.
    fn build_api_server(&self, version: &str) -> Result<()> {
        let built = self.of_version(version);
        once(&built, version, || {
            let go = programs::go(&format!("Kubernetes {version}"))?;
            step(&format!(
                "building the API server of Kubernetes {version} into {} (go build; once, some minutes)",
                built.display()
            ));
            let mut download = command(&go);
            download.args(["mod", "download", "-json"]).arg(format!("k8s.io/kubernetes@v{version}"));
            download.current_dir("/").env("GOWORK", "off").env("GOFLAGS", "");
            let module: Value = serde_json::from_str(&download.read()?).context("go mod download")?;
            let module = Path::new(module["Dir"].as_str().context("go mod download names no directory")?);
            // Go's module cache is read-only, so the files that change are outside.
            let go_mod = built.join("go.mod");
            fs::write(&go_mod, with_published(&fs::read_to_string(module.join("go.mod"))?, version))?;
            fs::write(built.join("go.sum"), fs::read(module.join("go.sum"))?)?;
            let mut build = go_build(go, module, &ldflags(version)?);
            // These options replace those of `go_build`. Go adds the checksums of the published modules.
            build.arg("-mod=mod").arg("-modfile").arg(go_mod).arg("-o").arg(built.join("bin/"));
            build.arg("./cmd/kube-apiserver").run().with_context(|| {
                format!(
                    "kube-apiserver {version} cannot be built; is Go new enough, and is its module proxy reachable?"
                )
            })
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

/// Kubernetes' `go.mod` with the published modules of the same release. The directory `staging`, to which it refers, is
/// not in the module.
fn with_published(go_mod: &str, version: &str) -> String {
    let published = format!(" v{}\n", version.replacen('1', "0", 1));
    let lines = go_mod.lines().filter(|line| !line.contains(" => ./staging/"));
    let lines = lines.map(|line| match line.strip_suffix(" v0.0.0") {
        Some(module) => format!("{module}{published}"),
        None => format!("{line}\n"),
    });
    lines.collect()
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
    fn another_version_is_built_from_the_published_modules() {
        let go_mod = "\
            require (\n\tk8s.io/api v0.0.0\n\tk8s.io/klog/v2 v2.130.1\n\tk8s.io/utils v0.0.0-2025\n)\n\
            replace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n";
        let expected = "\
            require (\n\tk8s.io/api v0.30.14\n\tk8s.io/klog/v2 v2.130.1\n\tk8s.io/utils v0.0.0-2025\n)\n\
            replace (\n)\n";
        assert_eq!(with_published(go_mod, "1.30.14"), expected);
    }

    #[test]
    fn the_programs_are_told_their_version() {
        let flags = ldflags("1.35.4").unwrap();
        assert!(flags.contains("-X k8s.io/component-base/version.gitVersion=v1.35.4 "), "{flags}");
        assert!(flags.contains("-X k8s.io/client-go/pkg/version.gitMinor=35"), "{flags}");
    }
}
