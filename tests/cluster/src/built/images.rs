//! The images for pods on this node. The node pulls images only in the level release.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use mirror_test_tools::{
    arch::Arch,
    archive::{Content, Entry, write_archive},
    process::{Run as _, command},
};
use serde_json::json;

use super::{binaries::Binaries, node::ctr, state};

/// The image of every pod's sandbox.
pub(super) const PAUSE: &str = "localhost/pause:cluster";
/// An image with a shell and its tools, for tests.
pub const BUSYBOX: &str = "localhost/busybox:cluster";

/// Makes and imports the images that containerd does not have.
pub(super) fn import_own(binaries: &Binaries) -> Result<()> {
    let present = ctr(binaries).args(["images", "list", "--quiet"]).read()?;
    for image in [PAUSE, BUSYBOX] {
        if present.lines().any(|line| line == image) {
            continue;
        }
        let archive = state::path("image.tar");
        write(binaries, image, &archive)?;
        import(binaries, &archive)?;
        fs::remove_file(archive)?;
    }
    Ok(())
}

/// Writes one of the cluster's own images as an archive.
pub(super) fn write(binaries: &Binaries, image: &str, archive: &Path) -> Result<()> {
    let (entrypoint, entries) =
        if image == PAUSE { ("/pause", pause(binaries)?) } else { ("/bin/sh", busybox(binaries)?) };
    let config = json!({ "Entrypoint": [entrypoint], "Env": ["PATH=/bin"], "WorkingDir": "/" });
    write_archive(archive, image, Arch::host()?, &entries, &config)
}

/// Imports an image from an archive in Docker's or OCI's format.
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
