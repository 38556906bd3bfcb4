//! Writes container images without a container engine, as a docker-archive, which containerd, Docker and Podman import.
//! Also writes the tar archives in such an image, and packs them.
//!
//! The image has one layer with its entries in the given order, owner root and time zero: the same files give the same
//! bytes.

use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::{
    arch::Arch,
    process::{Run as _, command},
};

/// The content of a path in the image.
#[derive(Debug, Clone)]
pub enum Content {
    /// A directory.
    Dir,
    /// A file with these bytes.
    File(Vec<u8>),
    /// A symbolic link to this path.
    Link(String),
}

/// A file, directory or link of the image.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its path, without the leading slash.
    pub path: String,
    /// Its permissions; a link has none of its own.
    pub mode: u32,
    /// The content.
    pub content: Content,
}

impl Entry {
    /// A directory that everybody can read.
    pub fn dir(path: &str) -> Self {
        Self { path: path.to_owned(), mode: 0o755, content: Content::Dir }
    }

    /// A file that everybody can read.
    pub fn file(path: &str, bytes: impl Into<Vec<u8>>) -> Self {
        Self { path: path.to_owned(), mode: 0o644, content: Content::File(bytes.into()) }
    }

    /// A program.
    pub fn program(path: &str, bytes: impl Into<Vec<u8>>) -> Self {
        Self { mode: 0o755, ..Self::file(path, bytes) }
    }

    /// A symbolic link.
    pub fn link(path: &str, target: &str) -> Self {
        Self { path: path.to_owned(), mode: 0o777, content: Content::Link(target.to_owned()) }
    }
}

/// Writes an image for nodes of one architecture. `reference` is its name with a tag, as in a pod's spec; `config` is
/// the runtime's part of the image's configuration: `Entrypoint`, `Env`, `User`, `Labels`, ...
pub fn write_archive(
    to: &Path,
    reference: &str,
    arch: Arch,
    entries: &[Entry],
    config: &Value,
) -> Result<()> {
    let layer = write_tar(entries)?;
    let layer_digest = sha256(&layer);
    let config = image_config(arch, &layer_digest, config);
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let layer_name = format!("{layer_digest}/layer.tar");
    let manifest =
        json!([{ "Config": config_name, "RepoTags": [reference], "Layers": [layer_name] }]).to_string();

    let file = File::create(to).with_context(|| to.display().to_string())?;
    let mut archive = Builder::new(file);
    for (name, bytes) in [
        (config_name.as_str(), config.as_bytes()),
        (&layer_name, &layer),
        ("manifest.json", manifest.as_bytes()),
    ] {
        append(&mut archive, &Entry::file(name, bytes))?;
    }
    archive.into_inner()?.flush().with_context(|| to.display().to_string())
}

/// The configuration of an image with one layer, which has this digest before it is packed.
pub(crate) fn image_config(arch: Arch, layer_digest: &str, config: &Value) -> String {
    let created = "1970-01-01T00:00:00Z";
    json!({
        "architecture": arch.name(),
        "os": "linux",
        "created": created,
        "config": config,
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        "history": [{ "created": created }],
    })
    .to_string()
}

/// The bytes of a tar archive of these entries.
pub fn write_tar(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for entry in entries {
        append(&mut tar, entry).with_context(|| entry.path.clone())?;
    }
    Ok(tar.into_inner()?)
}

fn append(archive: &mut Builder<impl std::io::Write>, entry: &Entry) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_mode(entry.mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    match &entry.content {
        Content::Dir => {
            header.set_entry_type(EntryType::Directory);
            archive.append_data(&mut header, format!("{}/", entry.path), std::io::empty())?;
        }
        Content::File(bytes) => {
            header.set_entry_type(EntryType::Regular);
            header.set_size(bytes.len().try_into()?);
            archive.append_data(&mut header, &entry.path, bytes.as_slice())?;
        }
        Content::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            archive.append_link(&mut header, &entry.path, target)?;
        }
    }
    Ok(())
}

/// Packs bytes into a file that contains no name and no time, and returns what the file has.
pub fn gzip(bytes: &[u8], to: &Path) -> Result<Vec<u8>> {
    let unpacked = to.with_extension("unpacked");
    fs::write(&unpacked, bytes).with_context(|| unpacked.display().to_string())?;
    let mut gzip = command("gzip");
    gzip.args(["--no-name", "--best", "--stdout"]).arg(&unpacked).stdout(File::create(to)?);
    gzip.run()?;
    fs::remove_file(unpacked)?;
    fs::read(to).with_context(|| to.display().to_string())
}

/// The SHA-256 of bytes, in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{collections::BTreeMap, io::Read as _};

    use super::*;

    fn read(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_string_lossy().into_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.insert(path, bytes);
        }
        files
    }

    #[test]
    fn an_archive_names_its_parts_by_their_digests_and_is_the_same_each_time() {
        let path = std::env::temp_dir().join(format!("podmirror-archive-{}.tar", std::process::id()));
        let entries =
            [Entry::dir("bin"), Entry::program("bin/hello", *b"hello"), Entry::link("bin/hi", "hello")];
        let config = json!({ "Entrypoint": ["/bin/hello"] });
        let write = || {
            write_archive(&path, "localhost/hello:1", Arch::Arm64, &entries, &config)?;
            Ok::<_, anyhow::Error>(fs::read(&path)?)
        };
        let (first, second) = (write(), write());
        fs::remove_file(&path).unwrap();
        let first = first.unwrap();
        assert_eq!(first, second.unwrap());

        let files = read(&first);
        let manifest: Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["RepoTags"], json!(["localhost/hello:1"]));
        let config = manifest[0]["Config"].as_str().unwrap();
        assert_eq!(config, format!("{}.json", sha256(&files[config])));
        let layer = &files[manifest[0]["Layers"][0].as_str().unwrap()];
        let config: Value = serde_json::from_slice(&files[config]).unwrap();
        assert_eq!((&config["architecture"], &config["os"]), (&json!("arm64"), &json!("linux")));
        assert_eq!(config["config"]["Entrypoint"], json!(["/bin/hello"]));
        assert_eq!(config["rootfs"]["diff_ids"], json!([format!("sha256:{}", sha256(layer))]));
        assert_eq!(read(layer)["bin/hello"], b"hello");
        assert_eq!(read(layer).len(), 3);
    }
}
