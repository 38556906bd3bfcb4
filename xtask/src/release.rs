//! `cargo xtask release`: makes all that a version publishes: the image, the chart, its objects for kubectl, archives of
//! the plugin with the manifest for Krew, bills of materials, and SHA256SUMS. With `--push` it publishes the image and the
//! chart, and signs.
//!
//! The same programs give the same files for a registry; on one system with the same tools, so does a commit: the files
//! contain no path, no name of a machine, and no time but that of the commit. Signatures and the provenance differ, and
//! are not in SHA256SUMS.

mod crates;
mod plugin;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};

use self::crates::Crates;
use crate::{
    arch::Arch,
    archive::{Entry, gzip, write_tar},
    generate, image,
    layout::Layout,
    portable,
    process::{Run as _, command, is_ci, step},
    tools,
    workspace::{self, AGENT, PLUGIN},
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");
/// How a link to a page of this version begins.
const PAGES: &str = concat!("](", env!("CARGO_PKG_REPOSITORY"), "/blob/v", env!("CARGO_PKG_VERSION"), "/");

/// The command line of `cargo xtask release`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// Push the image and the chart to this registry, and sign them and SHA256SUMS.
    #[arg(long, value_name = "REGISTRY")]
    push: Option<String>,
    /// Sign with this private key of cosign [default: without a key, for the identity of a forge's job or a person].
    #[arg(long, value_name = "FILE", requires = "push")]
    key: Option<PathBuf>,
    /// The directory to make [default: target/dist, which is emptied].
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The image or the chart.
struct Artefact {
    layout: PathBuf,
    /// Its name in the registry, with the tag.
    reference: String,
    digest: String,
}

impl Artefact {
    /// The name with tag and digest.
    fn pinned(&self) -> String {
        format!("{}@{}", self.reference, self.digest)
    }
}

/// Makes the files, and publishes what belongs into a registry.
pub(crate) fn run(args: ReleaseArgs) -> Result<()> {
    let ReleaseArgs { push, key, output } = args;
    let registry = push.clone().map_or_else(registry, Ok)?;
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])?;
    // Tests sign with a key, for a registry of their own.
    ensure!(push.is_none() || key.is_some() || !commit.ends_with("-dirty"), "commit the changes first");
    let usual = workspace::root().join("target/dist");
    if output.is_none() && usual.exists() {
        fs::remove_dir_all(&usual).with_context(|| usual.display().to_string())?;
    }
    let output = output.unwrap_or(usual);
    // cargo can have another directory.
    fs::create_dir_all(workspace::root().join("target"))?;
    fs::create_dir(&output).with_context(|| output.display().to_string())?;
    let time = git(&["log", "-1", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", "--format=%cd"])?;

    step("the crates in the programs");
    tools::stable()?;
    let crates = Crates::read()?;
    let licences = crates.licences()?;
    crates.write_bills(&output, &time)?;
    tools::bpf()?;
    let mut agents = portable::linux(&[AGENT, PLUGIN], &Arch::ALL, portable::RELEASE)?;
    let plugins = agents.split_off(Arch::ALL.len());
    let image = write_image(&registry, &agents, &licences, &commit, &output)?;
    let package = output.join(format!("podmirror-{VERSION}.tgz"));
    let chart = write_chart(&registry, &image.digest, &commit, &package)?;
    // Helm runs in another directory.
    let manifest = generate::manifest(&package.canonicalize()?)?;
    fs::write(package.with_extension("yaml"), manifest)?;
    plugin::write(&output, plugins, &licences, push.is_some() || is_ci())?;
    let artefacts = [image, chart];
    let pinned = artefacts.each_ref().map(Artefact::pinned).join("\n") + "\n";
    fs::write(output.join("images.txt"), &pinned)?;
    let sums = command("sh").args(["-c", "sha256sum -- *"]).env("LC_ALL", "C").current_dir(&output).read()?;
    fs::write(output.join("SHA256SUMS"), &sums)?;
    step(&format!("the release {VERSION} of {commit}: {}", output.display()));
    print!("{sums}{pinned}");
    if push.is_some() {
        publish(&output, &artefacts, &commit, key.as_deref())?;
        step("published");
        println!("    helm install podmirror oci://{registry}/charts/podmirror --version {VERSION}");
    }
    Ok(())
}

/// The registry of the forge, for the repository's owner.
fn registry() -> Result<String> {
    let owner = REPOSITORY.strip_prefix("https://github.com/").and_then(|path| path.split('/').next());
    Ok(format!("ghcr.io/{}", owner.context("only GitHub's registry is known: name another one by --push")?))
}

/// What git prints, with times in UTC.
fn git(arguments: &[&str]) -> Result<String> {
    let text = command("git").args(arguments).env("TZ", "UTC").current_dir(workspace::root()).read()?;
    Ok(text.trim_end().to_owned())
}

/// Makes the image of the agents of all architectures, and writes an archive of it.
fn write_image(
    registry: &str,
    agents: &[PathBuf],
    licences: &[Entry],
    commit: &str,
    output: &Path,
) -> Result<Artefact> {
    let directory = workspace::root().join("target/oci/image");
    let layout = Layout::create(&directory)?;
    let mut images = Vec::new();
    for (arch, agent) in Arch::ALL.into_iter().zip(agents) {
        let (mut entries, config) = image::content(agent, portable::RELEASE)?;
        entries.extend(licences.iter().cloned());
        for name in ["LICENSE-APACHE", "LICENSE-GPL2", "LICENSE-MIT"] {
            let licence = fs::read(workspace::root().join(name)).context(name)?;
            entries.push(Entry::file(&format!("licenses/{name}"), licence));
        }
        images.push(layout.image(arch, &entries, &config)?);
    }
    let reference = format!("{registry}/mirror-agent:{VERSION}");
    let digest = layout.finish(layout.index(&images, &image::labels(commit))?, &reference)?;
    layout.write_archive(&output.join(format!("mirror-agent-{VERSION}.oci.tar")))?;
    Ok(Artefact { layout: directory, reference, digest })
}

/// Packages the chart, whose pods pull the image by this digest.
fn write_chart(registry: &str, digest: &str, commit: &str, package: &Path) -> Result<Artefact> {
    let read = |path: &str| fs::read_to_string(workspace::root().join(path)).context(path.to_owned());
    // Without what .helmignore names. git 2.39 leaves out other files if an exception does not name the directory.
    let left_out = [":!deploy/chart/*.gotmpl", ":!deploy/chart/ci", ":!deploy/chart/.helmignore"];
    let mut entries = Vec::new();
    for path in git(&[&["ls-files", "deploy/chart"], &left_out[..]].concat())?.lines() {
        let mut text = read(path)?;
        match path {
            "deploy/chart/values.yaml" => text = with_image(text, registry, digest)?,
            // The package has no other pages.
            "deploy/chart/README.md" => text = text.replace("](../../", PAGES),
            _ => {}
        }
        entries.push(Entry::file(&path.replacen("deploy/chart", "podmirror", 1), text));
    }
    let package = gzip(&write_tar(&entries)?, package)?;
    let metadata: Value = serde_saphyr::from_str(&read("deploy/chart/Chart.yaml")?)
        .map_err(|why| anyhow!("Chart.yaml: {why}"))?;
    let directory = workspace::root().join("target/oci/chart");
    let layout = Layout::create(&directory)?;
    let config = layout.blob("application/vnd.cncf.helm.config.v1+json", metadata.to_string().as_bytes())?;
    let content = layout.blob("application/vnd.cncf.helm.chart.content.v1.tar+gzip", &package)?;
    let reference = format!("{registry}/charts/podmirror:{VERSION}");
    let digest = layout.finish(layout.manifest(&config, &content, &image::labels(commit))?, &reference)?;
    Ok(Artefact { layout: directory, reference, digest })
}

/// The chart's values with the published image instead of the defaults for an image that is built from a clone.
fn with_image(mut values: String, registry: &str, digest: &str) -> Result<String> {
    for (key, default, published) in [
        ("repository", "localhost/mirror-agent", format!("{registry}/mirror-agent")),
        ("digest", "\"\"", digest.to_owned()),
        ("architectures", "[amd64]", format!("[{}]", Arch::ALL.map(Arch::name).join(", "))),
    ] {
        let line = format!("  {key}: {default}\n");
        ensure!(values.matches(&line).count() == 1, "the chart's values do not have {line:?} once");
        values = values.replace(&line, &format!("  {key}: {published}\n"));
    }
    Ok(values)
}

/// Pushes the artefacts, and signs them by their digests, and SHA256SUMS. It replaces no other artefact of this version.
/// crane and cosign find the credential where `docker login` has stored it.
fn publish(files: &Path, artefacts: &[Artefact; 2], commit: &str, key: Option<&Path>) -> Result<()> {
    let cosign = |arguments: &[&str]| {
        let mut cosign = tools::cosign()?;
        cosign.args(arguments).arg("--yes");
        if let Some(key) = key {
            // The public log is for signatures of identities: a key can be verified without it.
            cosign.arg("--key").arg(key).arg("--tlog-upload=false");
        }
        cosign.run()
    };
    for Artefact { reference, digest, .. } in artefacts {
        // crane prints none for a new version, or if the registry cannot be reached, where the push fails too.
        let published = tools::crane()?.args(["digest", reference]).output().context("crane")?.stdout;
        let published = String::from_utf8_lossy(&published);
        let published = published.trim_end();
        ensure!(["", digest].contains(&published), "{reference} is published already, as {published}");
    }
    let path = |name: &str| files.join(name).display().to_string();
    fs::write(path("provenance.json"), provenance(artefacts, commit).to_string())?;
    let provenance = ("slsaprovenance1", "provenance.json".to_owned());
    let bill = ("cyclonedx", format!("mirror-agent-{VERSION}.cdx.json"));
    for (artefact, attestations) in artefacts.iter().zip([&[provenance.clone(), bill][..], &[provenance]]) {
        step(&format!("pushing {}", artefact.reference));
        tools::crane()?.arg("push").arg(&artefact.layout).arg(&artefact.reference).run()?;
        cosign(&["sign", "--recursive", &artefact.pinned()])?;
        for (kind, file) in attestations {
            let predicate = path(file);
            cosign(&["attest", "--replace", "--type", kind, "--predicate", &predicate, &artefact.pinned()])?;
        }
    }
    cosign(&["sign-blob", "--bundle", &path("SHA256SUMS.bundle"), &path("SHA256SUMS")])
}

/// The origin of the artefacts, in the words of SLSA.
fn provenance(artefacts: &[Artefact; 2], commit: &str) -> Value {
    // GitHub sets it in its jobs.
    let workflow = env::var("GITHUB_WORKFLOW_REF").map(|path| format!("https://github.com/{path}"));
    json!({
        "buildDefinition": {
            "buildType": format!("{REPOSITORY}/blob/{commit}/xtask/src/release.rs"),
            "externalParameters": { "artefacts": artefacts.each_ref().map(Artefact::pinned) },
            "resolvedDependencies": [
                { "uri": format!("git+{REPOSITORY}"), "digest": { "gitCommit": commit } },
            ],
        },
        "runDetails": { "builder": { "id": workflow.as_deref().unwrap_or(REPOSITORY) } },
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;

    use super::{REPOSITORY, VERSION, git, registry};
    use crate::workspace;

    /// The lines of a text that have `part` and none of the names around it.
    fn others<'t>(text: &'t str, part: &str, names: &[String]) -> Vec<&'t str> {
        let is_name = |at: usize| {
            names.iter().any(|name| {
                let begin = name.find(part).and_then(|before| at.checked_sub(before));
                begin.and_then(|begin| text.get(begin..)).is_some_and(|rest| rest.starts_with(name))
            })
        };
        let others = text.match_indices(part).filter(|(at, _)| !is_name(*at));
        others.map(|(at, _)| text[at..].trim_start().lines().next().unwrap_or_default()).collect()
    }

    #[test]
    fn documents_have_the_version_the_addresses_and_the_signer_of_the_release() {
        let registry = registry().unwrap();
        let charts = format!("{registry}/charts/podmirror");
        let workflow = format!(r"'^{}/\.github/workflows/release\.yaml", REPOSITORY.replace('.', r"\."));
        let page = format!("{REPOSITORY}/releases/download/v{VERSION}/");
        // A part of each name, and all names with this part.
        let names = [
            (
                "ghcr.io/",
                vec![
                    format!("{registry}/mirror-agent:{VERSION}"),
                    format!("{charts}:{VERSION}"),
                    format!("{charts} --version {VERSION} "),
                    // helm-docs and the workflow have the rest.
                    format!("{charts} --version {{{{ template \"chart.version\" . }}}} "),
                    "ghcr.io/${GITHUB_REPOSITORY_OWNER,,}\"".to_owned(),
                ],
            ),
            ("/mirror-agent:", vec![format!("/mirror-agent:{VERSION}")]),
            ("/releases/download/", vec![page.clone()]),
            ("@refs/tags/", vec![format!("{workflow}@refs/tags/v')")]),
            ("apply -f https", vec![format!("apply -f {page}podmirror-{VERSION}.yaml`")]),
            ("\nversion: ", vec![format!("\nversion: {VERSION}\n")]),
            ("\nappVersion: ", vec![format!("\nappVersion: {VERSION}\n")]),
            ("\nhome: ", vec![format!("\nhome: {}\n", env!("CARGO_PKG_HOMEPAGE"))]),
            ("\nsources: ", vec![format!("\nsources: [{REPOSITORY}]\n")]),
        ];
        let paths = git(&["ls-files", "*.md", "*.gotmpl", "*.yaml"]).unwrap();
        assert!(paths.lines().any(|path| path == ".github/workflows/release.yaml"));
        let read = |path| (path, fs::read_to_string(workspace::root().join(path)).unwrap());
        let documents: Vec<_> = paths.lines().map(read).collect();
        for (part, names) in &names {
            for (path, text) in &documents {
                assert_eq!(others(text, part, names), [""; 0], "{path}, and not {names:?}");
            }
            assert!(documents.iter().any(|(_, text)| text.contains(part)), "no document has {part:?}");
            let mistake = names[0].replace(VERSION, "0.0.9").replace("github", "other");
            assert_ne!(others(&mistake, part, names), [""; 0], "{mistake}");
        }
    }

    #[test]
    fn the_published_chart_names_the_image_by_its_digest() {
        let values = include_str!("../../deploy/chart/values.yaml");
        let values = super::with_image(values.to_owned(), "r.example", "sha256:12").unwrap_or_default();
        for line in ["  repository: r.example/mirror-agent", "  digest: sha256:12"] {
            assert!(values.lines().any(|other| other == line), "{line}");
        }
    }
}
