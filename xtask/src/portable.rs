//! Builds for other machines than this one: statically linked for Linux, and for Windows and macOS. The programs contain
//! no directory names of this machine. `image`, `release` and `vm` call this module.

use std::{path::PathBuf, process::Command};

use anyhow::Result;

use crate::{
    arch::Arch,
    ebpf,
    process::step,
    programs::{self, Program},
    tools, workspace,
};

/// The target of the builds for Windows.
const WINDOWS: &str = "x86_64-pc-windows-gnu";
/// The targets of the builds for macOS.
const MACS: [&str; 2] = ["x86_64-apple-darwin", "aarch64-apple-darwin"];
/// Stubs for the linker with the names in Apple's frameworks, which are only on Macs.
const FRAMEWORKS: &str = "xtask/macos";

/// The platforms of programs for users in the words of Krew, in the order of its manifest, and Rust's targets.
pub(crate) const PLATFORMS: [(&str, &str); 5] = [
    ("linux-amd64", Arch::Amd64.target()),
    ("linux-arm64", Arch::Arm64.target()),
    ("windows-amd64", WINDOWS),
    ("darwin-amd64", MACS[0]),
    ("darwin-arm64", MACS[1]),
];

/// The profile of programs for users.
pub(crate) const RELEASE: &str = "users";
/// The profile of the image that tests install. The build takes a fraction of the time, and the program is larger and
/// slower.
pub(crate) const TEST: &str = "test-image";

/// Builds packages' programs for Linux, linked statically, in this profile: the first package's for each architecture,
/// and so on. One cargo links them side by side, each on a CPU of its own.
pub(crate) fn linux(packages: &[&str], archs: &[Arch], profile: &str) -> Result<Vec<PathBuf>> {
    let mut cargo = workspace::cargo("build");
    for arch in archs {
        let variable = |name: &str| format!("{name}_{}", arch.target().replace('-', "_"));
        // The TLS library contains C and assembler that use nothing of the C library, so the host's compiler is
        // sufficient. Unless fortification is off, some distributions' compilers insert calls of functions that only
        // glibc has.
        let (compiler, c_flags) = if *arch == Arch::host()? {
            ("cc".to_owned(), "-U_FORTIFY_SOURCE")
        } else {
            // The C library's headers here are this machine's and must not be used: `-nostdlibinc` hides them, and the
            // definition makes the library do without them. Rust provides the other architecture's libraries and a
            // linker.
            cargo.env(variable("CARGO_TARGET").to_uppercase() + "_LINKER", "rust-lld");
            (tools::clang()?, "-ffreestanding -nostdlibinc -DRING_CORE_NOSTDLIBINC=1")
        };
        cargo.env(variable("CC"), compiler).env(variable("CFLAGS"), c_flags);
    }
    let targets: Vec<_> = archs.iter().map(|arch| arch.target()).collect();
    build(cargo, packages, &targets, profile, &["-Cstrip=symbols"])
}

/// Builds a package's program for users of Windows on x86-64.
pub(crate) fn windows(package: &str) -> Result<Vec<PathBuf>> {
    programs::bring(&[Program::of("gcc-mingw-w64-x86-64", "x86_64-w64-mingw32-gcc")])?;
    // The linker would write the time into the program.
    let flags = ["-Cstrip=symbols", "-Clink-arg=-Wl,--no-insert-timestamp"];
    build(workspace::cargo("build"), &[package], &[WINDOWS], RELEASE, &flags)
}

/// Builds a package's programs for users of macOS. zig links them, and signs them for processors that run no program
/// without a signature. So zig has to strip them too: a change afterwards would make the signature invalid.
pub(crate) fn macos(package: &str) -> Result<Vec<PathBuf>> {
    let frameworks = format!("-Clink-arg=-F{}", workspace::root().join(FRAMEWORKS).display());
    let flags = ["-Cstrip=none", "-Clink-arg=-s", &frameworks];
    build(tools::zigbuild()?, &[package], &MACS, RELEASE, &flags)
}

/// Builds by cargo, or by a program that calls it.
fn build(
    mut cargo: Command,
    packages: &[&str],
    targets: &[&str],
    profile: &str,
    flags: &[&str],
) -> Result<Vec<PathBuf>> {
    step(&format!("building {} for {}", packages.join(" and "), targets.join(" and ")));
    cargo.args(["--profile", profile]);
    for package in packages {
        cargo.args(["--package", package, "--bin", package]);
    }
    for target in targets {
        tools::target(target)?;
        cargo.args(["--target", target]);
    }
    let mut all = ebpf::remapped_paths(&workspace::root());
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    // Set here instead of in the profile, which would also strip the eBPF programs of the data from which their BTF is
    // made.
    cargo.env("CARGO_ENCODED_RUSTFLAGS", all.join("\x1f"));
    let programs = packages.iter().flat_map(|package| targets.iter().map(move |target| (*package, *target)));
    workspace::executables(cargo, &programs.collect::<Vec<_>>())
}
