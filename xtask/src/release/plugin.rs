//! Archives of the kubectl plugin with its manual pages, and the manifest with which Krew installs them. For completion,
//! users link the program under another name.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::VERSION;
use crate::{
    arch::Arch,
    archive::{Entry, gzip, sha256, write_tar},
    portable::{self, PLATFORMS},
    process::{Run as _, command},
    workspace::{self, PLUGIN},
};

/// The address of the release's page, with its files.
const PAGE: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/releases/download/v", env!("CARGO_PKG_VERSION"));

/// The name of the program in its archive.
fn program_name(platform: &str) -> &'static str {
    if platform.starts_with("windows") { "kubectl-mirror.exe" } else { "kubectl-mirror" }
}

/// Builds the programs other than those for Linux, and writes the archives and the manifest. `licences` are those of the
/// crates in them. A release that is not `whole` can be without macOS.
pub(super) fn write(output: &Path, linux: Vec<PathBuf>, licences: &[Entry], whole: bool) -> Result<()> {
    let mut programs = [linux, portable::windows(PLUGIN)?].concat();
    match portable::macos(PLUGIN) {
        Err(why) if !whole => println!("    NOT BUILT for macOS: {why:#}"),
        built => programs.extend(built?),
    }
    let built: Vec<_> = PLATFORMS.into_iter().map(|(platform, _)| platform).zip(programs).collect();
    let here = format!("linux-{}", Arch::host()?.name());
    let runs_here = built.iter().find(|(platform, _)| *platform == here);
    let (_, program) = runs_here.context("no program runs on this machine, to write the manual pages")?;
    let pages = manual_pages(program, &workspace::root().join("target/man"))?;
    let mut archives = Vec::new();
    for (platform, program) in built {
        let archive = output.join(archive_name(platform));
        let bytes = write_archive(platform, &program, &pages, licences, &archive)?;
        archives.push((platform, sha256(&bytes)));
    }
    fs::write(output.join("mirror.yaml"), manifest(&archives)?).context("the manifest for Krew")
}

fn archive_name(platform: &str) -> String {
    format!("kubectl-mirror-{VERSION}-{platform}.tar.gz")
}

/// Makes the program write its manual pages into this directory, which is emptied first. Returns their names and
/// contents.
fn manual_pages(program: &Path, directory: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    command(program).arg("man").arg(directory).run()?;
    let mut pages = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        pages.push((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?));
    }
    pages.sort();
    Ok(pages)
}

/// Writes an archive of the program, the licences and the manual pages, and returns its bytes. The same program gives
/// the same bytes.
fn write_archive(
    platform: &str,
    program: &Path,
    pages: &[(String, Vec<u8>)],
    licences: &[Entry],
    to: &Path,
) -> Result<Vec<u8>> {
    let mut entries = vec![Entry::program(
        program_name(platform),
        fs::read(program).with_context(|| program.display().to_string())?,
    )];
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        entries.push(Entry::file(licence, fs::read(workspace::root().join(licence))?));
    }
    entries.extend(licences.iter().cloned());
    // Windows has no `man`.
    if !platform.starts_with("windows") {
        entries.push(Entry::dir("man"));
        entries.extend(pages.iter().map(|(name, page)| Entry::file(&format!("man/{name}"), page.clone())));
    }
    gzip(&write_tar(&entries)?, to)
}

/// The manifest of these archives, with their SHA-256.
fn manifest(archives: &[(&str, String)]) -> Result<String> {
    let mut text = include_str!("../../plugin.yaml").replace("VERSION", VERSION);
    text = text.replace("HOMEPAGE", env!("CARGO_PKG_HOMEPAGE"));
    for (platform, sha256) in archives {
        let (os, arch) = platform.split_once('-').unwrap_or_default();
        let (archive, program) = (archive_name(platform), program_name(platform));
        write!(text, "  - selector:\n      matchLabels:\n        os: {os}\n        arch: {arch}\n")?;
        write!(text, "    uri: {PAGE}/{archive}\n    sha256: {sha256}\n    bin: {program}\n")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn the_manifest_has_each_archive_with_its_digest() {
        let archives = PLATFORMS.map(|(platform, _)| (platform, platform.replace('-', "")));
        let text = manifest(&archives).unwrap();
        let read: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
        let expected = archives.map(|(platform, digest)| {
            let (os, arch) = platform.split_once('-').unwrap();
            serde_json::json!({
                "selector": { "matchLabels": { "os": os, "arch": arch } },
                "uri": format!("{PAGE}/{}", archive_name(platform)),
                "sha256": digest,
                "bin": program_name(platform),
            })
        });
        assert_eq!(read["spec"]["platforms"], serde_json::json!(expected), "{text}");
        assert_eq!(read["spec"]["homepage"], env!("CARGO_PKG_HOMEPAGE"));
    }
}
