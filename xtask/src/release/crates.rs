//! The crates that are linked into the programs for users: bills of materials in the format CycloneDX, and the crates'
//! licences.
//!
//! cargo says which crates these are, for each program alone. Built together, crates have more features; what a program
//! does not use of them, the linker leaves out. Procedural macros and build scripts run at the build alone, and are not
//! among them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::VERSION;
use crate::{
    arch::Arch,
    archive::Entry,
    pins,
    portable::PLATFORMS,
    process::{Run as _, command},
    workspace,
};

/// Crates as in `anyhow@1.0.104`, each with those that it uses.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// The names of files that have a crate's licence, in capital letters: how they begin.
const LICENCES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// The crates of all programs.
pub(super) struct Crates {
    /// cargo's metadata of each.
    packages: BTreeMap<String, Value>,
    /// Those of each program: its package, the end of its file's name for one platform, and its crates.
    programs: Vec<(&'static str, String, Graph)>,
}

impl Crates {
    /// Asks cargo.
    pub(super) fn read() -> Result<Self> {
        let metadata = workspace::cargo("metadata").arg("--format-version=1").read()?;
        let metadata: Value = serde_json::from_str(&metadata).context("cargo's metadata")?;
        let packages = metadata["packages"].as_array().into_iter().flatten().filter_map(|package| {
            let id = format!("{}@{}", package["name"].as_str()?, package["version"].as_str()?);
            Some((id, package.clone()))
        });
        let packages = packages.collect();
        let mut agent = linked("mirror-agent", &Arch::ALL.map(Arch::target))?;
        // The agent contains these programs as an object.
        for (id, uses) in linked("mirror-ebpf", &["bpfel-unknown-none"])? {
            agent.entry(id).or_default().extend(uses);
        }
        let mut programs = vec![("mirror-agent", String::new(), agent)];
        for (platform, target) in PLATFORMS {
            programs.push(("kubectl-mirror", format!("-{platform}"), linked("kubectl-mirror", &[target])?));
        }
        Ok(Self { packages, programs })
    }

    fn package(&self, id: &str) -> Result<&Value> {
        self.packages.get(id).with_context(|| format!("cargo's metadata does not have {id}"))
    }

    /// Writes a bill of materials for each program. `time` is the one in them.
    pub(super) fn write_bills(&self, to: &Path, time: &str) -> Result<()> {
        let rust = json!({
            "type": "library", "bom-ref": "rust-std", "name": "rust-std", "version": pins::STABLE,
            "licenses": [{ "expression": "Apache-2.0 OR MIT" }],
        });
        for (package, platform, graph) in &self.programs {
            let root = format!("{package}@{VERSION}");
            let ids = graph.keys().filter(|id| **id != root);
            let mut components = ids.map(|id| self.component("library", id)).collect::<Result<Vec<_>>>()?;
            components.push(rust.clone());
            let uses: Vec<_> =
                graph.iter().map(|(id, uses)| json!({ "ref": id, "dependsOn": uses })).collect();
            let bill = json!({
                "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
                "metadata": { "timestamp": time, "component": self.component("application", &root)? },
                "components": components, "dependencies": uses,
            });
            fs::write(to.join(format!("{package}-{VERSION}{platform}.cdx.json")), format!("{bill:#}\n"))?;
        }
        Ok(())
    }

    fn component(&self, kind: &str, id: &str) -> Result<Value> {
        let package = self.package(id)?;
        let mut component = json!({
            "type": kind, "bom-ref": id, "name": package["name"], "version": package["version"],
            "licenses": [{ "expression": expression(package) }],
        });
        // Only these are at crates.io.
        if !package["source"].is_null() {
            component["purl"] = json!(format!("pkg:cargo/{id}"));
        }
        Ok(component)
    }

    /// The licences of all that is linked into the programs and is not the project's: a directory for archives.
    pub(super) fn licences(&self) -> Result<Vec<Entry>> {
        let ids: BTreeSet<_> = self.programs.iter().flat_map(|(_, _, graph)| graph.keys()).collect();
        let mut licences: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for id in ids {
            let package = self.package(id)?;
            if !package["source"].is_null() {
                let title = format!("{id} ({})", expression(package));
                licences.entry(texts(package)?).or_default().push(title);
            }
        }
        let mut text = "Crates of others in podmirror's programs, and their licences.\n".to_owned();
        for (licence, crates) in licences {
            text += &format!("\n{}\n{}\n\n{licence}\n", "=".repeat(80), crates.join("\n"));
        }
        let sysroot = command("rustup").args(["run", pins::STABLE, "rustc", "--print=sysroot"]).read()?;
        let library = Path::new(sysroot.trim()).join("share/doc/rust/COPYRIGHT-library.html");
        let library = fs::read(&library).with_context(|| library.display().to_string())?;
        Ok(vec![
            Entry::dir("licenses"),
            Entry::file("licenses/crates.txt", text),
            Entry::file("licenses/rust-std.html", library),
        ])
    }
}

/// The licence of a package as an SPDX expression. Old packages have a slash for "or".
fn expression(package: &Value) -> String {
    package["license"].as_str().unwrap_or("NOASSERTION").replace('/', " OR ")
}

/// The texts of a package's files with a licence, in the order of their names. Without one, a line.
fn texts(package: &Value) -> Result<String> {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(manifest.parent().context("a manifest is in a directory")?)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && LICENCES.iter().any(|begin| name.starts_with(begin)) {
            texts.insert(name, String::from_utf8_lossy(&fs::read(&path)?).into_owned());
        }
    }
    if texts.is_empty() {
        let licence = expression(package);
        let licence = if licence.contains("Apache-2.0") { "see LICENSE-APACHE" } else { &licence };
        return Ok(format!("The crate has no file with its licence: {licence}."));
    }
    Ok(texts.into_values().collect::<Vec<_>>().join("\n"))
}

/// The crates that are linked into a package for these targets.
fn linked(package: &str, targets: &[&str]) -> Result<Graph> {
    let mut tree = workspace::cargo("tree");
    tree.args(["--package", package, "--edges=normal,no-proc-macro", "--prefix=depth", "--format= {p}"]);
    tree.args(targets.iter().flat_map(|target| ["--target", *target]));
    parse(&tree.read()?)
}

/// Parses lines as in `1 anyhow v1.0.104`: the depth below the package, and a crate.
fn parse(tree: &str) -> Result<Graph> {
    let mut graph = Graph::new();
    let mut above: Vec<String> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let mut word = || words.next().with_context(|| format!("a line of `cargo tree`: {line}"));
        let (depth, name, version) = (word()?.parse::<usize>()?, word()?, word()?);
        let id = format!("{name}@{}", version.trim_start_matches('v'));
        above.truncate(depth);
        if let Some(parent) = above.last() {
            graph.entry(parent.clone()).or_default().insert(id.clone());
        }
        graph.entry(id.clone()).or_default();
        above.push(id);
    }
    Ok(graph)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_tree_of_crates_is_read_with_what_each_uses() {
        let tree = "0 a v1.0.0 (/a)\n1 b v2.0.0\n2 c v3.0.0-rc.1\n1 c v3.0.0-rc.1 (*)\n1 d v4.0.0\n";
        let graph = serde_json::json!(super::parse(tree).ok());
        let (b, c, d) = ("b@2.0.0", "c@3.0.0-rc.1", "d@4.0.0");
        assert_eq!(graph, serde_json::json!({ "a@1.0.0": [b, c, d], b: [c], c: [], d: [] }));
        assert!(super::parse("0 a\n").is_err());
    }
}
