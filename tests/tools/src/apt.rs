//! Unpacks Debian's packages into the cache with a private apt configuration, without changing the system's sources and
//! packages.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    process::{Run as _, command, find},
    programs::cache_dir,
};

/// Returns the reason if Debian's packages cannot be used on this machine.
pub fn can_unpack() -> Result<()> {
    if env::consts::ARCH != "x86_64" {
        bail!("the packages are for x86-64, and this machine is {}", env::consts::ARCH);
    }
    if !Path::new("/etc/debian_version").exists() || find("apt-get").is_none() {
        bail!("it takes programs from Debian's packages, and this is neither Debian nor Ubuntu");
    }
    Ok(())
}

/// apt with some suites as its only sources.
pub struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Fetches the lists of the suites.
    pub fn new(suites: &[&str]) -> Result<Self> {
        const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
        if !Path::new(KEYRING).exists() {
            bail!("{KEYRING} is missing: `apt-get install debian-archive-keyring` brings it");
        }
        let apt = Self { dir: cache_dir()?.join("apt").join(suites.join("+")) };
        for dir in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.dir.join(dir))?;
        }
        let mut sources = String::new();
        for suite in suites {
            let archive = if suite.ends_with("-security") { "debian-security" } else { "debian" };
            sources += &format!("deb [signed-by={KEYRING}] http://deb.debian.org/{archive} {suite} main\n");
        }
        fs::write(apt.dir.join("sources.list"), sources)?;
        apt.command("apt-get").args(["update", "--quiet", "--quiet"]).run().with_context(|| {
            format!("Debian's {} cannot be fetched; is the network there?", suites.join(" and "))
        })?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut apt = command(program);
        for (option, path) in [
            ("Dir::State", ""),
            ("Dir::State::Lists", "lists"),
            ("Dir::Cache", "cache"),
            ("Dir::Etc::sourcelist", "sources.list"),
        ] {
            apt.arg("-o").arg(format!("{option}={}", self.dir.join(path).display()));
        }
        apt.args(["-o", "Dir::Etc::sourceparts=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null"]);
        // Reads which libraries are installed and changes nothing, so no lock is needed.
        apt.args(["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=true"]);
        apt.args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"]);
        apt
    }

    /// The packages of the newest kernel whose version begins with `series`; the first one has the kernel's name.
    pub fn newest_kernel(&self, series: &str) -> Result<Vec<String>> {
        let names = self.command("apt-cache").args(["pkgnames", "linux-image-"]).read()?;
        let newest = names.lines().filter(|name| is_kernel(name, series)).max_by_key(|name| build(name));
        let newest = newest.with_context(|| format!("Debian has no kernel {series} any more"))?;
        // From Linux 6.19 on, the kernel and its modules are in packages on which this one depends.
        let release = newest.trim_start_matches("linux-image-");
        let needs = self.command("apt-cache").args(["depends", "--important", newest]).read()?;
        let needs = needs.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let parts = needs.filter(|name| name.ends_with(release)).map(str::to_owned);
        Ok([newest.to_owned()].into_iter().chain(parts).collect())
    }

    /// Downloads packages and unpacks them into `to`.
    pub fn unpack(&self, packages: &[&str], to: &Path) -> Result<()> {
        let mut download = self.command("apt-get");
        download.arg("download").args(packages);
        self.fetch(download, to)
    }

    /// The same with every dependency that is not installed.
    pub fn unpack_with_libraries(&self, package: &str, to: &Path) -> Result<()> {
        let mut download = self.command("apt-get");
        download.args(["install", "--download-only", "--yes", "--no-install-recommends"]);
        download.args(["--target-release", "bookworm-backports", package]);
        self.fetch(download, to)
    }

    /// The same with all dependencies, as if nothing were installed. A program of another Debian release runs in that
    /// tree by chroot.
    pub fn unpack_tree(&self, packages: &[&str], to: &Path) -> Result<()> {
        let nothing = self.dir.join("nothing-installed");
        fs::write(&nothing, "")?;
        let mut download = self.command("apt-get");
        download.arg("-o").arg(format!("Dir::State::status={}", nothing.display()));
        download.args(["install", "--download-only", "--yes", "--no-install-recommends"]).args(packages);
        self.fetch(download, to)
    }

    /// Runs the download, and unpacks its packages; afterwards `to` is either complete or does not exist.
    fn fetch(&self, mut download: Command, to: &Path) -> Result<()> {
        let debs = self.dir.join("cache/archives");
        let partial = to.with_extension("partial");
        if partial.exists() {
            fs::remove_dir_all(&partial)?;
        }
        fs::create_dir_all(&partial)?;
        download.args(["--quiet", "--quiet"]).current_dir(&debs);
        download.run().context("Debian's packages cannot be downloaded; is the network there?")?;
        for entry in fs::read_dir(&debs)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "deb") {
                command("dpkg-deb").arg("-x").arg(&path).arg(&partial).run()?;
                fs::remove_file(path)?;
            }
        }
        fs::rename(&partial, to).with_context(|| to.display().to_string())
    }
}

/// Whether this is the package of a plain kernel of this series. The metapackages for the newest kernel have a shorter
/// version.
fn is_kernel(package: &str, series: &str) -> bool {
    let version = package.strip_prefix("linux-image-").and_then(|rest| rest.strip_suffix("-amd64"));
    version.is_some_and(|version| {
        let is_of_series =
            version.strip_prefix(series).is_some_and(|rest| series.is_empty() || rest.starts_with('.'));
        let is_special = ["-cloud", "-rt"].iter().any(|end| version.ends_with(end));
        is_of_series && !is_special && version.matches('.').count() >= 2
    })
}

/// The numbers in a package's name, in order: a later build has greater ones.
fn build(package: &str) -> Vec<u32> {
    package.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{build, is_kernel};

    #[test]
    fn a_kernel_is_told_from_what_depends_on_it() {
        for (package, series, expected) in [
            ("linux-image-5.10.0-46-amd64", "5.10", true),
            ("linux-image-6.12.118+deb13-amd64", "6.12", true),
            ("linux-image-6.12.118+deb13-amd64", "6.1", false),
            ("linux-image-7.3.4+deb13-amd64", "", true),
            ("linux-image-7.3-amd64", "", false),
            ("linux-image-amd64", "", false),
            ("linux-image-6.1.0-56-cloud-amd64", "6.1", false),
            ("linux-image-6.1.0-56-rt-amd64", "6.1", false),
            ("linux-image-6.1.0-56-amd64-unsigned", "6.1", false),
        ] {
            assert_eq!(is_kernel(package, series), expected, "{package} {series}");
        }
    }

    #[test]
    fn a_later_build_is_greater() {
        assert!(build("linux-image-5.10.0-46-amd64") > build("linux-image-5.10.0-9-amd64"));
        assert!(build("linux-image-6.12.117+deb13-amd64") > build("linux-image-6.12.99+deb13-amd64"));
    }
}
