//! Writes OCI image layouts, from which registries are filled: an image for several architectures, or another artefact
//! of one layer, such as a Helm chart. The same content gives the same bytes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{
    arch::Arch,
    archive::{Entry, gzip, image_config, sha256, write_tar},
};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layout: a directory with blobs, which are named after their digests. What is added is returned as a descriptor.
#[derive(Debug)]
pub struct Layout {
    dir: PathBuf,
}

impl Layout {
    /// Begins a layout in this directory, which is emptied first.
    pub fn create(dir: &Path) -> Result<Self> {
        if dir.exists() {
            fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        fs::create_dir_all(dir.join("blobs/sha256")).with_context(|| dir.display().to_string())?;
        fs::write(dir.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Adds a blob.
    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Result<Value> {
        let digest = sha256(bytes);
        fs::write(self.dir.join("blobs/sha256").join(&digest), bytes).context("a blob")?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() }))
    }

    /// Adds the manifest of an artefact with one layer.
    pub fn manifest(&self, config: &Value, layer: &Value, annotations: &Value) -> Result<Value> {
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": [layer],
            "annotations": annotations,
        });
        self.blob(MANIFEST, manifest.to_string().as_bytes())
    }

    /// Adds the image for nodes of one architecture. `config` is as for [`crate::archive::write_archive`].
    pub fn image(&self, arch: Arch, entries: &[Entry], config: &Value) -> Result<Value> {
        let layer = write_tar(entries)?;
        let config = self.blob(CONFIG, image_config(arch, &sha256(&layer), config).as_bytes())?;
        let packed = self.dir.join("layer.gz");
        let layer = self.blob(LAYER, &gzip(&layer, &packed)?)?;
        fs::remove_file(packed)?;
        let mut image = self.manifest(&config, &layer, &json!({}))?;
        image["platform"] = json!({ "architecture": arch.name(), "os": "linux" });
        Ok(image)
    }

    /// Adds the index of an image for several architectures.
    pub fn index(&self, images: &[Value], annotations: &Value) -> Result<Value> {
        let index = json!({
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": images,
            "annotations": annotations,
        });
        self.blob(INDEX, index.to_string().as_bytes())
    }

    /// Makes this manifest or index the only content of the layout, under this name with a tag. Returns its digest.
    pub fn finish(&self, mut content: Value, reference: &str) -> Result<String> {
        let (_, tag) = reference.rsplit_once(':').context("a name with a tag")?;
        content["annotations"] = json!({
            // For containerd, which takes an archive of the layout.
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": tag,
        });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [content] });
        fs::write(self.dir.join("index.json"), index.to_string())?;
        content["digest"].as_str().map(str::to_owned).context("a descriptor has a digest")
    }

    /// Writes an archive of the layout, as nodes import it.
    pub fn write_archive(&self, to: &Path) -> Result<()> {
        let blobs = fs::read_dir(self.dir.join("blobs/sha256"))?
            .map(|blob| Ok(format!("blobs/sha256/{}", blob?.file_name().to_string_lossy())))
            .collect::<Result<Vec<_>>>()?;
        let mut names = [vec!["index.json".to_owned(), "oci-layout".to_owned()], blobs].concat();
        names.sort();
        let entries = names
            .iter()
            .map(|name| Ok(Entry::file(name, fs::read(self.dir.join(name))?)))
            .collect::<Result<Vec<_>>>()?;
        fs::write(to, write_tar(&entries)?).with_context(|| to.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// The blob of a descriptor, whose digest and size must be right.
    fn blob(dir: &Path, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let bytes = fs::read(dir.join("blobs/sha256").join(digest)).unwrap();
        assert_eq!((sha256(&bytes), json!(bytes.len())), (digest.to_owned(), descriptor["size"].clone()));
        bytes
    }

    fn json_of(dir: &Path, descriptor: &Value) -> Value {
        serde_json::from_slice(&blob(dir, descriptor)).unwrap()
    }

    #[test]
    fn a_layout_names_its_parts_by_their_digests_and_is_the_same_each_time() {
        let dir = std::env::temp_dir().join(format!("podmirror-layout-{}", std::process::id()));
        let archive = dir.with_extension("tar");
        let write = || {
            let layout = Layout::create(&dir)?;
            let entries = [Entry::dir("bin"), Entry::program("bin/hello", *b"hello")];
            let config = json!({ "Entrypoint": ["/bin/hello"] });
            let images = Arch::ALL.map(|arch| layout.image(arch, &entries, &config));
            let images = images.into_iter().collect::<Result<Vec<_>>>()?;
            let index = layout.index(&images, &json!({ "a": "b" }))?;
            let digest = layout.finish(index, "registry.example:5000/hello:1")?;
            layout.write_archive(&archive)?;
            Ok::<_, anyhow::Error>((digest, fs::read(&archive)?))
        };
        let (digest, bytes) = write().unwrap();
        assert_eq!(write().unwrap(), (digest.clone(), bytes));

        let content: Value = serde_json::from_slice(&fs::read(dir.join("index.json")).unwrap()).unwrap();
        let [content] = &content["manifests"].as_array().unwrap()[..] else { unreachable!("{content}") };
        assert_eq!(content["digest"], digest);
        assert_eq!(content["annotations"]["org.opencontainers.image.ref.name"], "1");
        let index = json_of(&dir, content);
        assert_eq!(index["annotations"], json!({ "a": "b" }));
        for (image, arch) in index["manifests"].as_array().unwrap().iter().zip(["amd64", "arm64"]) {
            let manifest = json_of(&dir, image);
            assert_eq!(image["platform"]["architecture"], arch);
            assert_eq!(json_of(&dir, &manifest["config"])["architecture"], arch);
            // gzip's magic number, and neither a name (flag 8) nor a time.
            assert_eq!(blob(&dir, &manifest["layers"][0])[..8], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0]);
        }
        fs::remove_dir_all(dir).unwrap();
        fs::remove_file(archive).unwrap();
    }
}
