//! The containers in the manifests of docs/recipes.md, which stories run unchanged.
//!
//! A recipe is the container of a DaemonSet: its command, the files of its volumes, and its capabilities. Only the
//! fields that these recipes use are supported; this is no kubelet.

use std::{fs, path::PathBuf, process::Command};

use serde_json::Value;

use crate::{Lab, Netns, reader::contained};

const DOCUMENT: &str = include_str!("../../docs/recipes.md");

/// All objects in the document.
fn objects() -> Vec<Value> {
    let blocks = DOCUMENT.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let objects =
        blocks.map(|block| serde_saphyr::from_str::<Value>(block).unwrap_or_else(|e| panic!("{e}: {block}")));
    objects.collect()
}

#[track_caller]
fn object(kind: &str, name: &str) -> Value {
    let found =
        objects().into_iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("docs/recipes.md has no {kind} {name}"))
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap()).collect()
}

/// The container of a DaemonSet.
#[derive(Debug)]
pub struct Recipe {
    pod: Value,
    /// Directories of the test, and their paths in the container.
    mounts: Vec<(PathBuf, String)>,
}

impl Recipe {
    /// The DaemonSet of this name. The files of its volumes are written among the test's files.
    #[track_caller]
    pub fn of(lab: &Lab, daemon_set: &str) -> Self {
        let mut pod = object("DaemonSet", daemon_set)["spec"]["template"].take();
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].take();
        let volumes = pod["spec"]["volumes"].take();
        let mounted = |mount: &Value| {
            let volume = volumes.as_array().unwrap().iter().find(|volume| volume["name"] == mount["name"]);
            let directory = lab.files().join(mount["name"].as_str().unwrap());
            fs::create_dir(&directory).unwrap();
            if let Some(name) = volume.unwrap()["configMap"]["name"].as_str() {
                for (file, text) in object("ConfigMap", name)["data"].as_object().unwrap() {
                    fs::write(directory.join(file), text.as_str().unwrap()).unwrap();
                }
            }
            (directory, mount["mountPath"].as_str().unwrap().to_owned())
        };
        let mounts = mounts.as_array().unwrap().iter().map(mounted).collect();
        Self { pod, mounts }
    }

    /// The value of a label of the pods.
    #[track_caller]
    pub fn label(&self, key: &str) -> &str {
        self.pod["metadata"]["labels"][key].as_str().unwrap_or_else(|| panic!("no label {key}"))
    }

    /// Whether the pods use the node's network.
    pub fn is_on_the_nodes_network(&self) -> bool {
        self.pod["spec"]["hostNetwork"] == true
    }

    /// The command of the container.
    pub fn words(&self) -> Vec<&str> {
        texts(&self.pod["spec"]["containers"][0]["command"])
    }

    /// The command that runs the container in a network namespace.
    #[track_caller]
    pub fn command(&self, netns: &Netns) -> Command {
        let context = &self.pod["spec"]["containers"][0]["securityContext"];
        // Settings that every container here must have.
        assert_eq!((&context["runAsUser"], &context["readOnlyRootFilesystem"]), (&0.into(), &true.into()));
        assert_eq!(context["allowPrivilegeEscalation"], false);
        assert_eq!(texts(&context["capabilities"]["drop"]), ["ALL"]);
        self.limited(netns, &texts(&context["capabilities"]["add"]), &self.words())
    }

    /// A command that runs with the same files, and without capabilities.
    #[track_caller]
    pub fn command_of(&self, netns: &Netns, words: &[&str]) -> Command {
        self.limited(netns, &[], words)
    }

    fn limited(&self, netns: &Netns, capabilities: &[&str], words: &[&str]) -> Command {
        let kept: String = capabilities.iter().map(|name| format!(",+{}", name.to_lowercase())).collect();
        let kept = format!("--bounding-set=-all{kept}");
        let setpriv = ["setpriv", "--no-new-privs", "--inh-caps=-all", &kept];
        contained(netns, &self.mounts, &[&setpriv[..], words].concat())
    }

    /// The path of a container's file on this machine.
    #[track_caller]
    pub fn file(&self, path: &str) -> PathBuf {
        let within = |(directory, mount): &(PathBuf, String)| {
            path.strip_prefix(mount.as_str()).map(|rest| directory.join(rest.trim_start_matches('/')))
        };
        self.mounts.iter().find_map(within).unwrap_or_else(|| panic!("{path} is on no volume"))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::ConfigMap};
    use serde::{Serialize, de::DeserializeOwned};

    use super::*;

    /// Whether the API knows every field of an object. Unknown fields are lost in the round trip.
    fn is_whole<T: Serialize + DeserializeOwned>(object: &Value) {
        let parsed: T = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(&serde_json::to_value(parsed).unwrap(), object);
    }

    #[test]
    fn every_manifest_is_well_formed() {
        let objects = objects();
        for object in &objects {
            match object["kind"].as_str() {
                Some("DaemonSet") => is_whole::<DaemonSet>(object),
                Some("ConfigMap") => is_whole::<ConfigMap>(object),
                None => assert!(object["targets"].is_object(), "neither an object nor values: {object}"),
                Some(kind) => panic!("nothing checks a {kind}"),
            }
        }
        let daemon_sets: Vec<_> = objects.iter().filter(|object| object["kind"] == "DaemonSet").collect();
        assert_eq!(daemon_sets.len(), 2);
        for object in daemon_sets {
            let spec = &object["spec"];
            assert_eq!(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]);
        }
    }
}
