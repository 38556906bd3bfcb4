//! `cargo xtask plugin`: archives of the kubectl plugin with its manual pages, and the manifest with which Krew
//! installs them.
//!
//! It builds for Linux and Windows. macOS' libraries exist only on Macs: `--program` adds a program that was built
//! there. It publishes nothing.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    arch::Arch,
    archive::{Entry, sha256, write_tar},
    portable,
    process::{Run as _, command, step},
    workspace,
};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The command line of `cargo xtask plugin`.
#[derive(Debug, clap::Args)]
pub(crate) struct PluginArgs {
    /// Where the archives will be published: the address of their directory.
    #[arg(long, value_name = "URL")]
    url: String,
    /// A program that was built elsewhere, as in darwin-arm64=FILE. Can be repeated.
    #[arg(long = "program", value_name = "OS-ARCH=FILE", value_parser = program)]
    programs: Vec<(&'static str, PathBuf)>,
    /// The directory to write into [default: target/plugin].
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The platforms of programs in the words of Krew, in the order of the manifest.
const PLATFORMS: [&str; 5] = ["linux-amd64", "linux-arm64", "windows-amd64", "darwin-amd64", "darwin-arm64"];

/// The name of the program in its archive.
fn program_name(platform: &str) -> &'static str {
    if platform.starts_with("windows") { "kubectl-mirror.exe" } else { "kubectl-mirror" }
}

/// Builds the program here. Returns `None` if this machine cannot build it.
fn build(platform: &str) -> Result<Option<PathBuf>> {
    const PACKAGE: &str = "kubectl-mirror";
    let built = match platform.split_once('-') {
        Some(("linux", arch)) => portable::linux(PACKAGE, arch.parse()?, portable::RELEASE)?,
        Some(("windows", _)) => portable::windows(PACKAGE)?,
        _ => return Ok(None),
    };
    built.executable().map(Some)
}

fn program(words: &str) -> Result<(&'static str, PathBuf)> {
    let (name, path) = words.split_once('=').context("write it as OS-ARCH=FILE")?;
    let platform = PLATFORMS.into_iter().find(|platform| *platform == name);
    Ok((platform.with_context(|| format!("{name:?} is none of {}", PLATFORMS.join(", ")))?, path.into()))
}

/// Builds the programs, and writes the archives and the manifest.
pub(crate) fn run(args: PluginArgs) -> Result<()> {
    let PluginArgs { url, programs, output } = args;
    let output = output.unwrap_or_else(|| workspace::root().join("target/plugin"));
    fs::create_dir_all(&output).with_context(|| output.display().to_string())?;
    let (mut built, mut missing) = (Vec::new(), Vec::new());
    for platform in PLATFORMS {
        let given = programs.iter().find(|(of, _)| *of == platform).map(|(_, path)| path.clone());
        match given.map_or_else(|| build(platform), |path| Ok(Some(path)))? {
            Some(program) => built.push((platform, program)),
            None => missing.push(platform),
        }
    }
    let here = format!("linux-{}", Arch::host()?.name());
    let runs_here = built.iter().find(|(platform, _)| *platform == here);
    let (_, program) = runs_here.context("no program runs on this machine, to write the manual pages")?;
    let pages = manual_pages(program, &output.join("man"))?;
    let mut entries = Vec::new();
    for (platform, program) in built {
        let archive = output.join(archive_name(platform));
        write_archive(platform, &program, &pages, &archive)?;
        let bytes = fs::read(&archive)?;
        println!("    {} ({:.1} MB)", archive.display(), bytes.len() as f64 / 1e6);
        entries.push((platform, sha256(&bytes)));
    }
    let manifest = output.join("mirror.yaml");
    fs::write(&manifest, self::manifest(&url, &entries)?)?;
    step(&format!("the manifest for Krew: {}", manifest.display()));
    println!("    here: kubectl krew install --manifest={} --archive=FILE", manifest.display());
    if !missing.is_empty() {
        println!(
            "    !!! without {}: build kubectl-mirror on a Mac, and name it by --program",
            missing.join(", ")
        );
    }
    Ok(())
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

/// Writes an archive of the program, its licences and its manual pages. The same program gives the same bytes.
fn write_archive(platform: &str, program: &Path, pages: &[(String, Vec<u8>)], to: &Path) -> Result<()> {
    let mut entries = vec![Entry::program(
        program_name(platform),
        fs::read(program).with_context(|| program.display().to_string())?,
    )];
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        entries.push(Entry::file(licence, fs::read(workspace::root().join(licence))?));
    }
    // Windows has no `man`.
    if !platform.starts_with("windows") {
        entries.push(Entry::dir("man"));
        entries.extend(pages.iter().map(|(name, page)| Entry::file(&format!("man/{name}"), page.clone())));
    }
    let tar = to.with_extension("");
    fs::write(&tar, write_tar(&entries)?).with_context(|| tar.display().to_string())?;
    command("gzip").args(["--force", "--no-name", "--best"]).arg(&tar).run()
}

/// The manifest of these archives, with their SHA-256.
fn manifest(url: &str, archives: &[(&str, String)]) -> Result<String> {
    ensure!(url.starts_with("https://"), "{url:?} is no address that Krew takes: it begins with https://");
    let url = url.trim_end_matches('/');
    let mut text = include_str!("../plugin.yaml").replace("VERSION", VERSION);
    text = text.replace("HOMEPAGE", env!("CARGO_PKG_HOMEPAGE"));
    for (platform, sha256) in archives {
        let (os, arch) = platform.split_once('-').unwrap_or_default();
        let (archive, program) = (archive_name(platform), program_name(platform));
        write!(text, "  - selector:\n      matchLabels:\n        os: {os}\n        arch: {arch}\n")?;
        write!(text, "    uri: {url}/{archive}\n    sha256: {sha256}\n    bin: {program}\n")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn the_manifest_has_each_archive_with_its_digest() {
        let archives = PLATFORMS.map(|platform| (platform, platform.replace('-', "")));
        let text = manifest("https://example.org/v1/", &archives).unwrap();
        let read: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
        let expected = archives.map(|(platform, digest)| {
            let (os, arch) = platform.split_once('-').unwrap();
            serde_json::json!({
                "selector": { "matchLabels": { "os": os, "arch": arch } },
                "uri": format!("https://example.org/v1/{}", archive_name(platform)),
                "sha256": digest,
                "bin": program_name(platform),
            })
        });
        assert_eq!(read["spec"]["platforms"], serde_json::json!(expected), "{text}");
        assert_eq!(read["spec"]["homepage"], env!("CARGO_PKG_HOMEPAGE"));
        assert!(manifest("http://example.org", &[]).is_err());
    }

    #[test]
    fn a_program_is_named_with_its_platform() {
        assert_eq!(program("darwin-arm64=/tmp/x=y").unwrap(), ("darwin-arm64", PathBuf::from("/tmp/x=y")));
        for wrong in ["darwin-arm64", "darwin=/tmp/x", "solaris-amd64=/tmp/x"] {
            assert!(program(wrong).is_err(), "{wrong}");
        }
    }
}
