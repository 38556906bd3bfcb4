//! Programs of Debian 13 that read copies: Suricata, softflowd, nfdump, Open vSwitch.
//!
//! They are unpacked into the cache with all dependencies, and nothing is installed. They run in that tree by chroot,
//! because the libraries of this machine can be older.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::{apt::Apt, process::step, programs::cache_dir};

/// The environment variable with the path of the tree.
pub const VARIABLE: &str = "MIRROR_READERS";

/// util-linux contains setpriv, which drops capabilities.
const PACKAGES: [&str; 5] = ["suricata", "softflowd", "nfdump", "openvswitch-switch", "util-linux"];
/// The file in the tree with the names of these packages.
const LIST: &str = "packages";

/// Returns the tree with the programs. Unpacks it once, and again if the list of packages has changed.
pub fn bring() -> Result<PathBuf> {
    let tree = cache_dir()?.join("readers");
    if fs::read_to_string(tree.join(LIST)).is_ok_and(|list| list == PACKAGES.join("\n")) {
        return Ok(tree);
    }
    step(&format!("bringing {} of Debian 13 into {}", PACKAGES.join(", "), tree.display()));
    let unpacked = tree.with_extension("unpacked");
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked)?;
    }
    Apt::new(&["trixie"])?.unpack_tree(&PACKAGES, &unpacked)?;
    complete(&unpacked).with_context(|| unpacked.display().to_string())?;
    if tree.exists() {
        fs::remove_dir_all(&tree).with_context(|| tree.display().to_string())?;
    }
    fs::rename(&unpacked, &tree).with_context(|| tree.display().to_string())?;
    Ok(tree)
}

/// Adds what a system has and no package: the links to the directories in `/usr`, mount points, and the link that Open
/// vSwitch's package creates when it is installed (`update-alternatives`).
fn complete(tree: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        if !tree.join(name).exists() {
            symlink(Path::new("usr").join(name), tree.join(name))?;
        }
    }
    for name in ["dev", "proc", "sys", "run", "tmp"] {
        fs::create_dir_all(tree.join(name))?;
    }
    symlink("../lib/openvswitch-switch/ovs-vswitchd", tree.join("usr/sbin/ovs-vswitchd"))?;
    fs::write(tree.join(LIST), PACKAGES.join("\n"))?;
    Ok(())
}
