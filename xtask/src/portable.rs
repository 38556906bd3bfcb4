//! Builds for other machines than this one: static for Linux, and for Windows. They have no name of this machine's
//! directories in them. `image` and `plugin` call this module.

use std::process::Command;

use anyhow::Result;

use crate::{
    arch::Arch,
    ebpf,
    process::{find, step},
    programs, tools,
    workspace::{self, Built},
};

/// The target of the builds for Windows.
const WINDOWS: &str = "x86_64-pc-windows-gnu";
/// The linker and C compiler for it.
const MINGW: &str = "x86_64-w64-mingw32-gcc";

/// The profile for users.
pub(crate) const RELEASE: &str = "release";
/// The profile for the image that tests install. It takes a fraction of the time, for a larger and slower program.
pub(crate) const TEST: &str = "test-image";

/// Builds a package's program for Linux, linked statically, in this profile.
pub(crate) fn linux(package: &str, arch: Arch, profile: &str) -> Result<Built> {
    let mut flags = flags();
    // The TLS library has parts in C and assembler that use nothing of the C library. The host's compiler does for
    // them; some distributions' calls functions that only glibc has, unless it is told not to.
    let (compiler, c_flags) = if arch == Arch::host()? {
        ("cc".to_owned(), "-U_FORTIFY_SOURCE")
    } else {
        // The C library's headers here are this machine's: they must not be found, and by the definition the library
        // does not ask for them. The other architecture's libraries come with Rust, and so does a linker.
        flags.push("-Clinker=rust-lld".to_owned());
        (tools::clang()?, "-ffreestanding -nostdlibinc -DRING_CORE_NOSTDLIBINC=1")
    };
    let mut cargo = cargo(package, arch.target(), profile, &flags)?;
    let variable = |name: &str| format!("{name}_{}", arch.target().replace('-', "_"));
    cargo.env(variable("CC"), compiler).env(variable("CFLAGS"), c_flags);
    workspace::built_by(cargo)
}

/// Builds a package's program for Windows on x86-64.
pub(crate) fn windows(package: &str) -> Result<Built> {
    if find(MINGW).is_none() {
        programs::install_packages(&["gcc-mingw-w64-x86-64"])?;
    }
    workspace::built_by(cargo(package, WINDOWS, RELEASE, &flags())?)
}

fn flags() -> Vec<String> {
    let mut flags = ebpf::remapped_paths(&workspace::root());
    flags.push("-Cstrip=symbols".to_owned());
    flags
}

fn cargo(package: &str, target: &str, profile: &str, flags: &[String]) -> Result<Command> {
    tools::target(target)?;
    step(&format!("building {package} for {target}"));
    let mut cargo = workspace::cargo("build");
    cargo.args(["--profile", profile, "--package", package, "--bin", package, "--target", target]);
    // Not by the profile: that would also strip the eBPF programs of what their BTF is made from.
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    Ok(cargo)
}
