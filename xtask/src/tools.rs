//! Installs the tools that a task needs: toolchains by rustup, Rust programs by cargo, programs for the chart and releases
//! by Go, the linker for macOS by pip.
//!
//! Each function searches first, and does nothing if the tools exist. Otherwise it prints what it installs. If a tool
//! cannot be installed, one message names it and the command that installs it. The tasks call these functions.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use mirror_test_tools::{
    process::{Run as _, command, find, step},
    programs::{cache_dir, go, install_packages},
};

use crate::{pins, workspace};

/// Installs the pinned stable toolchain with clippy and rustfmt.
pub(crate) fn stable() -> Result<()> {
    toolchain(pins::STABLE, &["clippy", "rustfmt"])
}

/// Installs the pinned nightly with the sources of `core`, and bpf-linker.
pub(crate) fn bpf() -> Result<()> {
    toolchain(pins::NIGHTLY, &["rust-src", "clippy"])?;
    if is_installed("bpf-linker", pins::BPF_LINKER)? {
        return Ok(());
    }
    let llvm = llvm();
    if !fs::exists(format!("{llvm}/include/llvm/Config/llvm-config.h"))?
        || !fs::exists(format!("{llvm}/lib/libPolly.a"))?
    {
        let packages = ["llvm", "libpolly"].map(|name| format!("{name}-{}-dev", pins::LLVM_MAJOR));
        install_packages(&packages.each_ref().map(String::as_str))?;
    }
    let features = format!("llvm-{}", pins::LLVM_MAJOR);
    cargo_install("bpf-linker", pins::BPF_LINKER, &["--no-default-features", "--features", &features])
}

/// The directory of Debian's LLVM.
fn llvm() -> String {
    format!("/usr/lib/llvm-{}", pins::LLVM_MAJOR)
}

/// Installs a C compiler for every architecture, and returns its name. It is the clang of bpf-linker's LLVM.
pub(crate) fn clang() -> Result<String> {
    let name = format!("clang-{}", pins::LLVM_MAJOR);
    if find(&name).is_none() {
        install_packages(&[&name])?;
    }
    Ok(name)
}

/// Installs the pinned stable toolchain's standard library for another target.
pub(crate) fn target(name: &str) -> Result<()> {
    stable()?;
    // Does nothing if it is installed.
    let mut add = command("rustup");
    add.args(["target", "add", name, "--toolchain", pins::STABLE]);
    add.run().with_context(|| format!("Rust for {name} could not be installed; is the network there?"))
}

/// Installs a program from crates.io into the project's cache. `name` is the name of the program.
pub(crate) fn cargo_program(package: &str, name: &str, version: &str) -> Result<Command> {
    if !is_installed(name, version)? {
        cargo_install(package, version, &["--locked"])?;
    }
    Ok(command(cache_dir()?.join("tools/bin").join(name)))
}

/// Helm, which renders and checks the chart.
pub(crate) fn helm() -> Result<Command> {
    go_program("helm.sh/helm/v3/cmd/helm", pins::HELM)
}

/// cosign, which signs a release.
pub(crate) fn cosign() -> Result<Command> {
    go_program("github.com/sigstore/cosign/v2/cmd/cosign", pins::COSIGN)
}

/// crane, which pushes OCI layouts to a registry.
pub(crate) fn crane() -> Result<Command> {
    go_program("github.com/google/go-containerregistry/cmd/crane", pins::CRANE)
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
pub(crate) fn go_program(package: &str, version: &str) -> Result<Command> {
    let (_, name) = package.rsplit_once('/').context("a package has a path")?;
    let dir = cache_dir()?.join("tools").join(format!("{name}-{version}"));
    let path = dir.join(name);
    if path.is_file() {
        return Ok(command(path));
    }
    let mut go = command(go(&format!("{name} {version}"))?);
    step(&format!("building {name} {version} into {} (go install; once, a minute or two)", dir.display()));
    // helm's own build sets its version this way; without it, helm knows only two of the numbers.
    let flags = format!("-s -w -X helm.sh/helm/v3/internal/version.version=v{version}");
    go.args(["install", "-trimpath", "-ldflags", &flags]);
    go.arg(format!("{package}@v{version}")).current_dir("/");
    go.env("GOBIN", &dir).env("GOFLAGS", "").env("GOWORK", "off").env("CGO_ENABLED", "0");
    go.run().with_context(|| {
        format!("{name} {version} cannot be built; is Go new enough, and is its module proxy reachable?")
    })?;
    Ok(command(path))
}

/// Installs a toolchain with components.
fn toolchain(name: &str, components: &[&str]) -> Result<()> {
    // Does nothing if they are installed, and fails without the toolchain.
    let mut add = command("rustup");
    add.args(["component", "add", "--toolchain", name]).args(components).env("RUSTUP_AUTO_INSTALL", "0");
    if add.succeeds() {
        return Ok(());
    }
    step(&format!("installing Rust {name} with {} (rustup)", components.join(", ")));
    let mut install = command("rustup");
    install.args(["toolchain", "install", name, "--profile", "minimal", "--no-self-update"]);
    install.args(["--component", &components.join(",")]).run().with_context(|| {
        format!("Rust {name} could not be installed; are rustup (https://rustup.rs) and the network there?")
    })
}

/// Whether a program from crates.io is in the cache, in this version.
fn is_installed(name: &str, version: &str) -> Result<bool> {
    let output = command(cache_dir()?.join("tools/bin").join(name)).arg("--version").output();
    let is_of_version = |text: &str| text.trim().ends_with(&format!(" {version}"));
    Ok(output.is_ok_and(|output| is_of_version(&String::from_utf8_lossy(&output.stdout))))
}

/// Builds a program from crates.io into the cache.
fn cargo_install(package: &str, version: &str, arguments: &[&str]) -> Result<()> {
    stable()?;
    let root = cache_dir()?.join("tools");
    step(&format!("installing {package} {version} into {} (cargo install)", root.display()));
    let mut cargo = command("rustup");
    cargo.args(["run", pins::STABLE, "cargo", "install", package, "--version", version, "--force", "--root"]);
    // bpf-linker needs it, and no other program.
    cargo.arg(&root).args(arguments).current_dir("/").env("LLVM_PREFIX", llvm());
    cargo.run().with_context(|| format!("{package} {version} could not be built; is crates.io reachable?"))
}
