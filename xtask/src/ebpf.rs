//! Builds the eBPF objects with the pinned nightly and bpf-linker.
//!
//! This file needs only std and `pins`, because it is shared: `cargo xtask build-ebpf` calls it, and the build scripts
//! of `mirror-agent` and `mirror-tests` include it. So there is one way to build the objects. It does not install tools
//! (`tools` does); the error names the command that installs them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::pins::NIGHTLY;

/// The target: little-endian BPF. Every supported machine is little-endian.
const TARGET: &str = "bpfel-unknown-none";

#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// Build the objects.
    Build,
    /// Lint the sources.
    Clippy,
}

#[derive(Debug)]
pub(crate) struct Objects {
    /// The tap programs: part of the agent.
    pub(crate) mirror: PathBuf,
    /// Programs that tests and benchmarks compare with the tap programs.
    pub(crate) probes: PathBuf,
}

/// The directory for installed tools. All clones share it, so it is outside the work tree.
pub(crate) fn cache_dir() -> Result<PathBuf, String> {
    if let Some(dir) = env::var_os("PODMIRROR_CACHE") {
        return Ok(dir.into());
    }
    let base = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .ok_or("no cache directory: set HOME, XDG_CACHE_HOME or PODMIRROR_CACHE")?;
    Ok(base.join("podmirror"))
}

/// Path of bpf-linker, whether or not it is installed.
pub(crate) fn bpf_linker() -> Result<PathBuf, String> {
    Ok(cache_dir()?.join("tools/bin/bpf-linker"))
}

/// Builds (or lints) the programs of the workspace at `root`, and copies the objects to `to`.
pub(crate) fn run(root: &Path, action: Action, to: &Path) -> Result<Objects, String> {
    // A separate target directory, because the caller may be a build script while cargo holds the lock of the usual
    // one.
    let target_dir = root.join("target/bpf");
    let in_dir = |error| format!("{}: {error}", target_dir.display());
    fs::create_dir_all(&target_dir).map_err(in_dir)?;
    // Held until the objects are copied, so that a parallel build does not replace them before.
    let lock = fs::File::create(target_dir.join("podmirror.lock")).map_err(in_dir)?;
    lock.lock().map_err(in_dir)?;

    let linker = bpf_linker()?;
    let mut cargo = Command::new("rustup");
    without_outer_cargo(&mut cargo).args(["run", NIGHTLY, "cargo"]);
    cargo.arg(match action {
        Action::Build => "build",
        Action::Clippy => "clippy",
    });
    cargo.args(["--locked", "--release", "--package", "mirror-ebpf", "--target", TARGET, "-Zbuild-std=core"]);
    cargo.arg("--target-dir").arg(&target_dir).current_dir(root);
    let mut flags = remapped_paths(root);
    flags.extend(["-Cdebuginfo=2", "-Clink-arg=--btf"].map(str::to_owned));
    flags.push(format!("-Clinker={}", linker.display()));
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    if let Action::Clippy = action {
        cargo.args(["--", "-Dwarnings"]);
    }
    let status = cargo.status().map_err(|error| format!("rustup: {error}"))?;
    if !status.success() {
        return Err(format!(
            "the eBPF programs do not build: see cargo's messages. `cargo xtask build-ebpf` installs {NIGHTLY} and bpf-linker"
        ));
    }

    let built = target_dir.join(TARGET).join("release");
    let objects = Objects { mirror: to.join("mirror.o"), probes: to.join("probes.o") };
    if let Action::Build = action {
        for (from, to) in [("mirror", &objects.mirror), ("probes", &objects.probes)] {
            fs::copy(built.join(from), to).map_err(|error| format!("{}: {error}", to.display()))?;
        }
    }
    Ok(objects)
}

/// Flags of rustc that keep this machine's directories out of BTF and messages.
pub(crate) fn remapped_paths(root: &Path) -> Vec<String> {
    let home = |variable: &str, name: &str| {
        let dir = env::var_os(variable).map(PathBuf::from);
        dir.or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(name)))
    };
    [
        (Some(root.to_owned()), "/podmirror"),
        (home("CARGO_HOME", ".cargo"), "/cargo"),
        (home("RUSTUP_HOME", ".rustup"), "/rustup"),
    ]
    .into_iter()
    .filter_map(|(dir, name)| Some(format!("--remap-path-prefix={}={name}", dir?.display())))
    .collect()
}

/// Tells cargo to run the calling build script again when a source of the objects changes.
pub(crate) fn rerun_if_changed(root: &Path) {
    for path in
        ["mirror-ebpf", "mirror-common", "xtask/src/ebpf.rs", "xtask/src/pins.rs", "Cargo.toml", "Cargo.lock"]
    {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    for name in ["PODMIRROR_CACHE", "XDG_CACHE_HOME", "HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// Removes the environment variables that an outer cargo or rustup sets, because an inner one would use them.
pub(crate) fn without_outer_cargo(command: &mut Command) -> &mut Command {
    for name in [
        "CARGO",
        "CARGO_BUILD_TARGET",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_MANIFEST_DIR",
        "CARGO_MANIFEST_LINKS",
        "CARGO_MANIFEST_PATH",
        "LD_LIBRARY_PATH",
        "OUT_DIR",
        "RUSTC",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTDOC",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
    ] {
        command.env_remove(name);
    }
    // The variables that cargo sets for a package's program or build script. ring's build script depends on them and on
    // OUT_DIR, so with another value it runs again, and its dependents kube and the agent are rebuilt.
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") {
            command.env_remove(name);
        }
    }
    command
}
