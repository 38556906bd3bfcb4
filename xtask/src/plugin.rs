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

use anyhow::{Context as _, Result, bail};

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
    programs: Vec<(Platform, PathBuf)>,
    /// The directory to write into [default: target/plugin].
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The platform of a program, in the words of Krew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Platform {
    os: &'static str,
    arch: &'static str,
}

/// All platforms, in the order of the manifest.
const PLATFORMS: [Platform; 5] = [
    Platform { os: "linux", arch: "amd64" },
    Platform { os: "linux", arch: "arm64" },
    Platform { os: "windows", arch: "amd64" },
    Platform { os: "darwin", arch: "amd64" },
    Platform { os: "darwin", arch: "arm64" },
];

impl Platform {
    fn name(self) -> String {
        format!("{}-{}", self.os, self.arch)
    }

    /// The name of the program in its archive.
    const fn program(self) -> &'static str {
        match self.os.as_bytes() {
            b"windows" => "kubectl-mirror.exe",
            _ => "kubectl-mirror",
        }
    }

    /// Whether the platform has `man`.
    const fn has_manual(self) -> bool {
        !matches!(self.os.as_bytes(), b"windows")
    }

    /// Builds the program here. Returns `None` if this machine cannot build it.
    fn build(self) -> Result<Option<PathBuf>> {
        const PACKAGE: &str = "kubectl-mirror";
        match self.os {
            "linux" => portable::linux(PACKAGE, self.arch.parse::<Arch>()?, portable::RELEASE)?
                .executable()
                .map(Some),
            "windows" => portable::windows(PACKAGE)?.executable().map(Some),
            _ => Ok(None),
        }
    }
}

fn program(words: &str) -> Result<(Platform, PathBuf)> {
    let (name, path) = words.split_once('=').context("write it as OS-ARCH=FILE")?;
    let names = || PLATFORMS.map(Platform::name).join(", ");
    let platform = PLATFORMS.into_iter().find(|platform| platform.name() == name);
    Ok((platform.with_context(|| format!("{name:?} is none of {}", names()))?, path.into()))
}

/// Builds the programs, and writes the archives and the manifest.
pub(crate) fn run(args: PluginArgs) -> Result<()> {
    let PluginArgs { url, programs, output } = args;
    let output = output.unwrap_or_else(|| workspace::root().join("target/plugin"));
    fs::create_dir_all(&output).with_context(|| output.display().to_string())?;
    let (mut built, mut missing) = (Vec::new(), Vec::new());
    for platform in PLATFORMS {
        let given = programs.iter().find(|(of, _)| *of == platform).map(|(_, path)| path.clone());
        match given.map_or_else(|| platform.build(), |path| Ok(Some(path)))? {
            Some(program) => built.push((platform, program)),
            None => missing.push(platform.name()),
        }
    }
    let here = Platform { os: "linux", arch: Arch::host()?.name() };
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

fn archive_name(platform: Platform) -> String {
    format!("kubectl-mirror-{VERSION}-{}.tar.gz", platform.name())
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
fn write_archive(platform: Platform, program: &Path, pages: &[(String, Vec<u8>)], to: &Path) -> Result<()> {
    let mut entries = vec![Entry::program(
        platform.program(),
        fs::read(program).with_context(|| program.display().to_string())?,
    )];
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        entries.push(Entry::file(licence, fs::read(workspace::root().join(licence))?));
    }
    if platform.has_manual() {
        entries.push(Entry::dir("man"));
        entries.extend(pages.iter().map(|(name, page)| Entry::file(&format!("man/{name}"), page.clone())));
    }
    let tar = to.with_extension("");
    fs::write(&tar, write_tar(&entries)?).with_context(|| tar.display().to_string())?;
    command("gzip").args(["--force", "--no-name", "--best"]).arg(&tar).run()
}

/// The manifest of these archives, with their SHA-256.
fn manifest(url: &str, archives: &[(Platform, String)]) -> Result<String> {
    if !url.starts_with("https://") {
        bail!("{url:?} is no address that Krew takes: it begins with https://");
    }
    let url = url.trim_end_matches('/');
    let mut text = format!(
        "\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: mirror
spec:
  version: v{VERSION}
  homepage: {url}
  shortDescription: Show packets of pods in Wireshark
  description: |
    Shows the packets of pods of all nodes in Wireshark, makes and deletes mirrors
    of pods, and asks the nodes what they mirror and what they do not.

      kubectl mirror tail -n shop deploy/checkout | wireshark -k -i -
  caveats: |
    It needs podmirror's agents in the cluster: `kubectl mirror check` looks for them.
    Shell completion needs a link beside that of Krew:
      ln -s kubectl-mirror ~/.krew/bin/kubectl_complete-mirror
  platforms:
"
    );
    for (platform, sha256) in archives {
        let Platform { os, arch } = platform;
        let (archive, program) = (archive_name(*platform), platform.program());
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
        let archives = PLATFORMS.map(|platform| (platform, platform.name().replace('-', "")));
        let text = manifest("https://example.org/v1/", &archives).unwrap();
        let read: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
        let expected = archives.map(|(platform, digest)| {
            serde_json::json!({
                "selector": { "matchLabels": { "os": platform.os, "arch": platform.arch } },
                "uri": format!("https://example.org/v1/{}", archive_name(platform)),
                "sha256": digest,
                "bin": platform.program(),
            })
        });
        assert_eq!(read["spec"]["platforms"], serde_json::json!(expected), "{text}");
        assert!(manifest("http://example.org", &[]).is_err());
    }

    #[test]
    fn a_program_is_named_with_its_platform() {
        let (platform, path) = program("darwin-arm64=/tmp/x=y").unwrap();
        assert_eq!((platform, path), (PLATFORMS[4], PathBuf::from("/tmp/x=y")));
        for wrong in ["darwin-arm64", "darwin=/tmp/x", "solaris-amd64=/tmp/x"] {
            assert!(program(wrong).is_err(), "{wrong}");
        }
    }
}
