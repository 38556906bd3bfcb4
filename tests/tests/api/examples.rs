//! The examples of the documents and of the chart: the API server takes each as it is written there.

use std::{collections::BTreeSet, fs, path::Path};

use mirror_tests::{Api, SOON, eventually};
use serde_json::{Value, json};

use crate::{
    Node,
    resources::{alone_with_crds, file},
};

/// The beginning of an object.
const OBJECT: &str = "apiVersion: ";
/// The label of the namespaces of stories.
const OF_STORY: &str = "podmirror-story";

/// An example: its place in the documents, its text and its objects.
struct Example {
    place: String,
    text: String,
    objects: Vec<Value>,
}

/// The number of objects in a text.
fn count(text: &str) -> usize {
    text.lines().filter(|line| line.starts_with(OBJECT)).count()
}

/// The examples of all documents.
fn examples() -> Vec<Example> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let documents = documents.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut documents: Vec<_> = documents.chain([root.join("README.md")]).collect();
    documents.sort();
    let mut examples = Vec::new();
    for path in documents {
        let document = fs::read_to_string(&path).unwrap();
        let blocks = document.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let objects: Vec<_> = blocks.filter(|text| count(text) > 0).collect();
        let told: usize = objects.iter().map(|text| count(text)).sum();
        let place = path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(count(&document), told, "{place}: an example is not in a block of yaml");
        examples.extend(objects.into_iter().map(|text| Example {
            place: place.clone(),
            text: text.to_owned(),
            objects:
                serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{place}: {error}\n{text}")),
        }));
    }
    examples
}

/// The chart's examples for Artifact Hub.
fn of_chart() -> Vec<Value> {
    let chart: Value = serde_saphyr::from_str(&file("deploy/chart/Chart.yaml")).unwrap();
    serde_saphyr::from_str(chart["annotations"]["artifacthub.io/crdsExamples"].as_str().unwrap()).unwrap()
}

/// The namespaces of the examples. They are deleted on drop, with the objects of the examples.
struct Namespaces<'a> {
    api: &'a Api,
    names: BTreeSet<String>,
    examples: &'a [Example],
}

impl Namespaces<'_> {
    /// Creates them, after deleting what an earlier run has left.
    #[track_caller]
    fn make(&self) {
        self.remove();
        for name in &self.names {
            let labels = json!({ OF_STORY: "" });
            let metadata = json!({ "name": name, "labels": labels });
            let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata }).to_string();
            eventually(SOON, || self.api.try_kubectl_with("create -f -", &object));
        }
    }

    fn remove(&self) {
        for Example { text, .. } in self.examples {
            self.tried(self.api.try_kubectl_with("delete --ignore-not-found -f -", text));
        }
        let ours = self.api.try_kubectl(&format!("get namespaces -l {OF_STORY} -o name")).unwrap_or_default();
        for name in &self.names {
            // A namespace of another owner is not deleted, and the story fails.
            if !ours.lines().any(|line| line == format!("namespace/{name}")) {
                continue;
            }
            self.tried(
                self.api.try_kubectl(&format!("delete --ignore-not-found --wait=false namespace {name}")),
            );
            // Kubernetes' controllers do not run here, so nothing else finalizes the namespace.
            self.tried(self.api.try_kubectl(&format!(
                "delete --wait=false --all serviceaccounts,configmaps --namespace {name}"
            )));
            let ended = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
            let words = format!("replace --raw /api/v1/namespaces/{name}/finalize -f -");
            self.tried(self.api.try_kubectl_with(&words, &ended.to_string()));
        }
    }

    fn tried(&self, answer: Result<String, String>) {
        if let Err(error) = answer
            && !error.contains("not found")
        {
            eprintln!("an object of the examples may stay: {error}");
        }
    }
}

impl Drop for Namespaces<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Whether an object contains every field of an example.
fn has(object: &Value, example: &Value) -> bool {
    match example {
        Value::Object(fields) => fields.iter().all(|(key, value)| has(&object[key], value)),
        Value::Array(items) => {
            let of_object = object.as_array().map_or(&[][..], Vec::as_slice);
            of_object.len() == items.len()
                && of_object.iter().zip(items).all(|(object, item)| has(object, item))
        }
        value => object == value,
    }
}

/// A ClusterMirror and a MirrorTarget concern all agents, so no other story with such objects runs meanwhile.
#[test]
fn the_examples_of_the_documents_are_created_as_they_stand() {
    let Node { api, lab: _lab } = &Node::new("examples");
    let _crds = alone_with_crds(api);
    let examples = &examples()[..];
    let chart = of_chart();
    let places: BTreeSet<_> = examples.iter().map(|example| example.place.as_str()).collect();
    assert!(places.is_superset(&["README.md", "recipes.md", "resources.md"].into()), "{places:?}");
    let objects = || examples.iter().flat_map(|example| &example.objects);
    let kinds: BTreeSet<_> = objects().filter_map(|object| object["kind"].as_str()).collect();
    let some = ["ClusterMirror", "ConfigMap", "DaemonSet", "Mirror", "MirrorTarget"];
    assert!(kinds.is_superset(&some.into()), "{kinds:?}");
    let names = objects().chain(&chart).filter_map(|object| object["metadata"]["namespace"].as_str());
    let namespaces = Namespaces { api, names: names.map(str::to_owned).collect(), examples };
    namespaces.make();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": chart }).to_string();
    let told = api.kubectl_with("create --dry-run=server -f -", &list);
    assert_eq!(told.matches(" created (server dry run)").count(), chart.len(), "{told}");
    for Example { place, text, objects } in examples {
        let told = api.kubectl_with("create -f -", text);
        assert_eq!(told.matches(" created").count(), objects.len(), "{place}: {told}");
        for object in objects {
            let [kind, name] = [&object["kind"], &object["metadata"]["name"]].map(|of| of.as_str().unwrap());
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
            let stands = api.kubectl(&format!("get {kind} {name} --namespace {namespace} -o json"));
            let stands: Value = serde_json::from_str(&stands).unwrap();
            assert!(has(&stands, object), "{place}: {object:#} is stored as {stands:#}");
        }
    }
    drop(namespaces);
    let left = api.kubectl("get mirrors,clustermirrors,mirrortargets,configmaps,daemonsets -A -o name");
    for object in objects() {
        let name = format!("/{}", object["metadata"]["name"].as_str().unwrap());
        assert!(!left.lines().any(|line| line.ends_with(&name)), "{left}");
    }
}

#[test]
fn kubectl_explains_the_fields() {
    let Node { api, lab: _lab } = &Node::new("explain");
    let _crds = alone_with_crds(api);
    let explained = api.kubectl("explain mirror.spec");
    let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["podSelector", "-required-", "Ingress for packets to the", "Filter in tcpdump's syntax"] {
        assert!(explained.contains(part), "{explained}");
    }
}
