//! Checks the rendered chart with the schemas of Kubernetes, by kubeconform.
//!
//! The schemas are made from the description of Kubernetes' own API (`swagger.json`) in its Go module. They refuse
//! unknown fields, as the API server does for `kubectl apply`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use crate::{
    pins,
    process::{Run as _, command, step},
    programs::{cache_dir, go},
    tools, workspace,
};

/// Kinds that are not of Kubernetes.
const OTHERS: &str = "Certificate,Issuer,PodMonitor,PrometheusRule,SecurityContextConstraints,ServiceMonitor";

/// Checks the chart with each file of values, for each of the versions, and returns the manifests by their files.
pub(super) fn check(files: &[PathBuf]) -> Result<Vec<(String, String)>> {
    let mut manifests = Vec::new();
    for version in pins::KUBERNETES {
        let schemas = schemas(version)?;
        let rendered = workspace::root().join("target/chart").join(version);
        fs::create_dir_all(&rendered).with_context(|| rendered.display().to_string())?;
        let mut kubeconform = tools::kubeconform()?;
        kubeconform.args(["-strict", "-summary", "-skip", OTHERS, "-schema-location"]);
        kubeconform.arg(schemas.join("{{.ResourceKind}}{{.KindSuffix}}.json"));
        for file in files {
            let to = rendered.join(file.file_name().context("a file has a name")?);
            let manifest = super::with_file(file, version)?;
            fs::write(&to, &manifest)?;
            kubeconform.arg(&to);
            manifests.push((to.display().to_string(), manifest));
        }
        kubeconform.run().with_context(|| format!("Kubernetes {version} would refuse the chart"))?;
    }
    Ok(manifests)
}

/// The directory with the schemas of a version. Made once, in the cache.
fn schemas(version: &str) -> Result<PathBuf> {
    let directory = cache_dir()?.join("schemas").join(version);
    if directory.is_dir() {
        return Ok(directory);
    }
    let swagger: Value = serde_json::from_slice(&swagger(version)?).context("swagger.json")?;
    // Not in its place before it is complete.
    let new = directory.with_extension("new");
    fs::create_dir_all(&new).with_context(|| new.display().to_string())?;
    for (name, schema) in schemas_of(swagger)? {
        fs::write(new.join(name), schema.to_string())?;
    }
    fs::rename(&new, &directory)?;
    Ok(directory)
}

/// The description of the API in Kubernetes' Go module, which is not kept.
fn swagger(version: &str) -> Result<Vec<u8>> {
    step(&format!("the API of Kubernetes {version} (go mod download; once)"));
    let modules = cache_dir()?.join("schemas/modules");
    let mut download = command(go("the schemas of Kubernetes")?);
    download.args(["mod", "download", "-json"]).arg(format!("k8s.io/kubernetes@v{version}"));
    download.current_dir("/").env("GOMODCACHE", &modules).env("GOFLAGS", "-modcacherw").env("GOWORK", "off");
    let module: Value = serde_json::from_str(&download.read()?).context("go mod download")?;
    let module = module["Dir"].as_str().context("go mod download names no directory")?;
    let swagger = fs::read(Path::new(module).join("api/openapi-spec/swagger.json"))?;
    fs::remove_dir_all(&modules)?;
    Ok(swagger)
}

/// Files by their names: all definitions, and for each kind one that refers to its definition, under the name that
/// kubeconform looks for.
fn schemas_of(mut swagger: Value) -> Result<Vec<(String, Value)>> {
    const DEFINITIONS: &str = "definitions.json";
    let mut definitions = swagger["definitions"].take();
    make_strict(&mut definitions);
    // Written as a number or as text.
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"]["type"] = json!(["string", "number"]);
    let all = definitions.as_object().context("swagger.json has no definitions")?;
    let mut files: Vec<_> = all
        .iter()
        .filter_map(|(name, definition)| {
            // Options of requests belong to many groups.
            let [kind] = definition["x-kubernetes-group-version-kind"].as_array()?.as_slice() else {
                return None;
            };
            let [group, version, kind] = ["group", "version", "kind"].map(|key| kind[key].as_str());
            let group = group?.split('.').next().filter(|group| !group.is_empty());
            let words = [Some(&*kind?.to_lowercase()), group, version];
            let file = words.into_iter().flatten().collect::<Vec<_>>().join("-") + ".json";
            Some((file, json!({ "$ref": format!("{DEFINITIONS}#/definitions/{name}") })))
        })
        .collect();
    files.push((DEFINITIONS.to_owned(), json!({ "definitions": definitions })));
    Ok(files)
}

/// Forbids unknown fields, and allows both types of `int-or-string`.
fn make_strict(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(make_strict),
        Value::Object(fields) => {
            fields.values_mut().for_each(make_strict);
            if fields.get("properties").is_some_and(Value::is_object) {
                fields.entry("additionalProperties").or_insert(Value::Bool(false));
            }
            if fields.get("format").is_some_and(|format| format == "int-or-string") {
                *fields = Map::from_iter([("type".to_owned(), json!(["integer", "string"]))]);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_schema_refuses_what_the_api_server_would() {
        let kind = json!([{ "group": "apps.k8s.io", "version": "v1", "kind": "DaemonSet" }]);
        let port = json!({ "type": "string", "format": "int-or-string" });
        let swagger = json!({ "definitions": {
            "io.k8s.DaemonSet": { "properties": { "port": port }, "x-kubernetes-group-version-kind": kind },
            "io.k8s.DeleteOptions": { "x-kubernetes-group-version-kind": [kind[0], kind[0]] },
            "io.k8s.apimachinery.pkg.api.resource.Quantity": { "type": "string" },
        } });
        let files = schemas_of(swagger).unwrap();
        let [(name, reference), (all, definitions)] = files.as_slice() else { panic!("{files:?}") };
        assert_eq!((name.as_str(), all.as_str()), ("daemonset-apps-v1.json", "definitions.json"));
        assert_eq!(reference, &json!({ "$ref": "definitions.json#/definitions/io.k8s.DaemonSet" }));
        let daemon_set = &definitions["definitions"]["io.k8s.DaemonSet"];
        assert_eq!(daemon_set["additionalProperties"], json!(false));
        assert_eq!(daemon_set["properties"]["port"], json!({ "type": ["integer", "string"] }));
    }
}
