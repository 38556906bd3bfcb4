//! Builds for other machines than this one: statically linked for Linux, and for Windows. The programs contain no
//! directory names of this machine. `image` and `plugin` call this module.

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
/// The linker and C compiler for Windows.
const MINGW: &str = "x86_64-w64-mingw32-gcc";

/// The profile of programs for users.
pub(crate) const RELEASE: &str = "release";
/// The profile of the image that tests install. The build takes a fraction of the time, and the program is larger and
/// slower.
pub(crate) const TEST: &str = "test-image";

/// Builds a package's program for Linux, linked statically, in this profile.
pub(crate) fn linux(package: &str, arch: Arch, profile: &str) -> Result<Built> {
    let mut flags = flags();
    // The TLS library contains C and assembler that use nothing of the C library, so the host's compiler is sufficient.
    // Unless fortification is off, some distributions' compilers insert calls of functions that only glibc has.
    let (compiler, c_flags) = if arch == Arch::host()? {
        ("cc".to_owned(), "-U_FORTIFY_SOURCE")
    } else {
        // The C library's headers here are this machine's and must not be used: `-nostdlibinc` hides them, and the
        // definition makes the library do without them. Rust provides the other architecture's libraries and a linker.
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
    // Set here instead of in the profile, which would also strip the eBPF programs of the data from which their BTF is
    // made.
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    Ok(cargo)
}
