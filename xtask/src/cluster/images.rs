//! The images that pods on this node can have: none is ever pulled.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{binaries::Binaries, node::ctr, state};
use crate::{
    arch::Arch,
    archive::{Content, Entry, write_archive},
    process::{Run as _, command},
};

/// The process of every pod's sandbox.
pub(super) const PAUSE: &str = "localhost/pause:cluster";
/// A shell and its tools, for tests.
pub(super) const BUSYBOX: &str = "localhost/busybox:cluster";

/// Makes and imports the images that containerd does not have.
pub(super) fn import_own(binaries: &Binaries) -> Result<()> {
    let present = ctr(binaries).args(["images", "list", "--quiet"]).read()?;
    for (image, entries) in [(PAUSE, pause as fn(&Binaries) -> Result<Vec<Entry>>), (BUSYBOX, busybox)] {
        if present.lines().any(|line| line == image) {
            continue;
        }
        let entrypoint = if image == PAUSE { "/pause" } else { "/bin/sh" };
        let config = json!({ "Entrypoint": [entrypoint], "Env": ["PATH=/bin"], "WorkingDir": "/" });
        let archive = state::path("image.tar");
        write_archive(&archive, image, Arch::host()?, &entries(binaries)?, &config)?;
        import(binaries, &archive)?;
        fs::remove_file(archive)?;
    }
    Ok(())
}

/// Imports an image from an archive of Docker's or OCI's format.
pub(super) fn import(binaries: &Binaries, archive: &Path) -> Result<()> {
    let mut import = ctr(binaries);
    let told = import.args(["images", "import"]).arg(archive).read();
    let told = told.with_context(|| format!("{} cannot be imported", archive.display()))?;
    told.lines().for_each(|line| println!("    {line}"));
    Ok(())
}

fn pause(binaries: &Binaries) -> Result<Vec<Entry>> {
    Ok(vec![Entry::program("pause", read(&binaries.built("pause"))?)])
}

fn busybox(binaries: &Binaries) -> Result<Vec<Entry>> {
    let program = binaries.debian("bin/busybox");
    let mut entries: Vec<_> =
        ["bin", "dev", "etc", "proc", "root", "sys", "var"].into_iter().map(Entry::dir).collect();
    entries.push(Entry { path: "tmp".to_owned(), mode: 0o1777, content: Content::Dir });
    entries.push(Entry::file("etc/passwd", *b"root:x:0:0:root:/root:/bin/sh\n"));
    entries.push(Entry::file("etc/group", *b"root:x:0:\n"));
    entries.push(Entry::program("bin/busybox", read(&program)?));
    let applets = command(&program).arg("--list").read()?;
    let applets = applets.lines().filter(|name| *name != "busybox");
    entries.extend(applets.map(|name| Entry::link(&format!("bin/{name}"), "busybox")));
    Ok(entries)
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| file.display().to_string())
}
