//! Installs the tools that a task needs: toolchains by rustup, Rust programs by cargo, programs for the chart and releases
//! by Go, the linker for macOS by pip.
//!
//! Each function searches first, and does nothing if the tools exist. Otherwise it prints what it installs. If a tool
//! cannot be installed, one message names it and the command that installs it. The tasks call these functions.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::{
    process::{Run as _, command, find, step},
    programs::{cache_dir, go, install_packages},
};

use crate::{ebpf, pins, workspace};

/// Installs the pinned stable toolchain with clippy and rustfmt.
pub(crate) fn stable() -> Result<()> {
    toolchain(pins::STABLE, &["clippy", "rustfmt"])
}

/// Installs the pinned nightly with the sources of `core`, and bpf-linker.
pub(crate) fn bpf() -> Result<()> {
    if !ebpf::has_nightly() {
        toolchain(pins::NIGHTLY, &["rust-src"])?;
    }
    if ebpf::has_bpf_linker() {
        return Ok(());
    }
    stable()?;
    let llvm = format!("/usr/lib/llvm-{}", pins::LLVM_MAJOR);
    if !fs::exists(format!("{llvm}/include/llvm/Config/llvm-config.h"))?
        || !fs::exists(format!("{llvm}/lib/libPolly.a"))?
    {
        let packages = ["llvm", "libpolly"].map(|name| format!("{name}-{}-dev", pins::LLVM_MAJOR));
        install_packages(&packages.each_ref().map(String::as_str))?;
    }
    let features = format!("llvm-{}", pins::LLVM_MAJOR);
    cargo_install("bpf-linker", pins::BPF_LINKER, &["--no-default-features", "--features", &features], &llvm)
}

/// Installs a C compiler for every architecture, and returns its name. It is the clang of bpf-linker's LLVM.
pub(crate) fn clang() -> Result<String> {
    let name = format!("clang-{}", pins::LLVM_MAJOR);
    if find(&name).is_none() {
        install_packages(&[&name])?;
    }
    Ok(name)
}

/// Installs clippy for the pinned nightly.
pub(crate) fn nightly_clippy() -> Result<()> {
    toolchain(pins::NIGHTLY, &["rust-src", "clippy"])
}

/// Installs the pinned stable toolchain's standard library for another target.
pub(crate) fn target(name: &str) -> Result<()> {
    stable()?;
    let mut rustup = command("rustup");
    let installed = rustup.args(["target", "list", "--installed", "--toolchain", pins::STABLE]).read()?;
    if installed.lines().any(|line| line == name) {
        return Ok(());
    }
    step(&format!("installing Rust {} for {name} (rustup)", pins::STABLE));
    let mut add = command("rustup");
    add.args(["target", "add", name, "--toolchain", pins::STABLE]);
    add.run().with_context(|| format!("Rust for {name} could not be installed; is the network there?"))
}

/// Installs a program from crates.io into the project's cache. `name` is the name of the program.
pub(crate) fn cargo_program(package: &str, name: &str, version: &str) -> Result<Command> {
    let path = cache_dir()?.join("tools/bin").join(name);
    let has = command(&path).arg("--version").output();
    let has =
        has.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).trim().ends_with(&format!(" {version}")));
    if !has {
        stable()?;
        cargo_install(package, version, &["--locked"], "")?;
    }
    Ok(command(path))
}

/// Helm, which renders and checks the chart.
pub(crate) fn helm() -> Result<Command> {
    // helm's own build sets the whole version this way; without it, helm knows only two of the numbers.
    let version = format!("-s -w -X helm.sh/helm/v3/internal/version.version=v{}", pins::HELM);
    go_program("helm.sh/helm/v3/cmd/helm", pins::HELM, &version)
}

/// helm-docs, which makes the chart's README.
pub(crate) fn helm_docs() -> Result<Command> {
    go_program("github.com/norwoodj/helm-docs/cmd/helm-docs", pins::HELM_DOCS, "-s -w")
}

/// kubeconform, which checks objects with the schemas of Kubernetes.
pub(crate) fn kubeconform() -> Result<Command> {
    go_program("github.com/yannh/kubeconform/cmd/kubeconform", pins::KUBECONFORM, "-s -w")
}

/// actionlint, which checks the workflows of the forge.
pub(crate) fn actionlint() -> Result<Command> {
    go_program("github.com/rhysd/actionlint/cmd/actionlint", pins::ACTIONLINT, "-s -w")
}

/// cosign, which signs a release.
pub(crate) fn cosign() -> Result<Command> {
    go_program("github.com/sigstore/cosign/v2/cmd/cosign", pins::COSIGN, "-s -w")
}

/// crane, which pushes OCI layouts to a registry.
pub(crate) fn crane() -> Result<Command> {
    go_program("github.com/google/go-containerregistry/cmd/crane", pins::CRANE, "-s -w")
}

/// Krew, which installs the plugin in the level release.
pub(crate) fn krew() -> Result<Command> {
    go_program("sigs.k8s.io/krew/cmd/krew", pins::KREW, "-s -w")
}

/// The registry of the level release.
pub(crate) fn registry() -> Result<Command> {
    go_program("github.com/distribution/distribution/v3/cmd/registry", pins::REGISTRY, "-s -w")
}

/// cargo's command to build with zig as the linker, for a program that calls the pinned cargo in the work tree.
pub(crate) fn zigbuild() -> Result<Command> {
    let dir = cache_dir()?.join("tools").join(format!("zig-{}-{}", pins::ZIG, pins::ZIGBUILD));
    let program = dir.join("bin/cargo-zigbuild");
    if !program.is_file() {
        if !command("python3").args(["-m", "pip", "--version"]).succeeds() {
            install_packages(&["python3-pip"])?;
        }
        step(&format!("installing zig {} into {} (pip)", pins::ZIG, dir.display()));
        let packages = [format!("ziglang=={}", pins::ZIG), format!("cargo-zigbuild=={}", pins::ZIGBUILD)];
        let mut pip = command("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&dir).args(packages);
        pip.run().context("zig could not be installed; is PyPI reachable?")?;
    }
    let mut cargo = command("rustup");
    cargo.args(["run", pins::STABLE]).arg(program).args(["zigbuild", "--locked"]);
    // cargo-zigbuild looks for zig as a module of Python.
    cargo.current_dir(workspace::root()).env("PYTHONPATH", dir);
    Ok(cargo)
}

/// Builds a program from source with Go, in the project's cache, in a directory of its version.
fn go_program(package: &str, version: &str, ldflags: &str) -> Result<Command> {
    let (_, name) = package.rsplit_once('/').context("a package has a path")?;
    let dir = cache_dir()?.join("tools").join(format!("{name}-{version}"));
    let path = dir.join(name);
    if path.is_file() {
        return Ok(command(path));
    }
    let mut go = command(go(&format!("{name} {version}"))?);
    step(&format!("building {name} {version} into {} (go install; once, a minute or two)", dir.display()));
    go.args(["install", "-trimpath", "-ldflags", ldflags]);
    go.arg(format!("{package}@v{version}")).current_dir("/");
    go.env("GOBIN", &dir).env("GOFLAGS", "").env("GOWORK", "off").env("CGO_ENABLED", "0");
    go.run().with_context(|| {
        format!("{name} {version} cannot be built; is Go new enough, and is its module proxy reachable?")
    })?;
    Ok(command(path))
}

/// Installs a toolchain with components.
fn toolchain(name: &str, components: &[&str]) -> Result<()> {
    if find("rustup").is_none() {
        bail!("rustup is needed to bring Rust {name}, and is not here: see https://rustup.rs");
    }
    let installed =
        command("rustup").args(["component", "list", "--installed", "--toolchain", name]).output()?;
    let installed = String::from_utf8_lossy(&installed.stdout).into_owned();
    // A component's name can be followed by the host's: "clippy-x86_64-unknown-linux-gnu".
    let has = |component: &&str| installed.lines().any(|line| line.starts_with(*component));
    if has(&"rustc") && components.iter().all(has) {
        return Ok(());
    }
    step(&format!("installing Rust {name} with {} (rustup)", components.join(", ")));
    let mut rustup = command("rustup");
    rustup.args(["toolchain", "install", name, "--profile", "minimal", "--no-self-update"]);
    for component in components {
        rustup.args(["--component", component]);
    }
    rustup.run().with_context(|| format!("Rust {name} could not be installed; is the network there?"))
}

/// Builds a program from crates.io into the cache.
fn cargo_install(package: &str, version: &str, arguments: &[&str], llvm: &str) -> Result<()> {
    let root = cache_dir()?.join("tools");
    step(&format!("installing {package} {version} into {} (cargo install)", root.display()));
    let mut cargo = command("rustup");
    cargo.args(["run", pins::STABLE, "cargo", "install", package, "--version", version, "--force", "--root"]);
    cargo.arg(&root).args(arguments).current_dir("/");
    if !llvm.is_empty() {
        cargo.env("LLVM_PREFIX", llvm);
    }
    cargo.run().with_context(|| format!("{package} {version} could not be built; is crates.io reachable?"))
}
