//! Writes the file for `--pods-from`.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{Lab, PodNs};

/// The agent's annotation.
const MIRROR: &str = "podmirror.io/mirror";
const NETNS: &str = "podmirror.io/netns";

/// A pod in the file.
#[derive(Debug, Clone)]
pub struct PodSpec {
    name: String,
    uid: String,
    host_network: bool,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

impl PodSpec {
    /// A pod in the namespace `default`, with the UID `<name>-1` and no network namespace.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            uid: format!("{name}-1"),
            host_network: false,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
        }
    }

    /// The pod with this network namespace.
    pub fn of(pod: &PodNs) -> Self {
        Self::named(pod.name()).annotated(NETNS, pod.netns().path().to_str().unwrap())
    }

    /// Sets a label.
    #[must_use]
    pub fn labelled(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Sets an annotation.
    #[must_use]
    pub fn annotated(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Sets the annotation `podmirror.io/mirror`.
    #[must_use]
    pub fn mirror(self, value: &str) -> Self {
        self.annotated(MIRROR, value)
    }

    /// Sets `metadata.uid`.
    #[must_use]
    pub fn uid(mut self, uid: &str) -> Self {
        uid.clone_into(&mut self.uid);
        self
    }

    /// Sets `spec.hostNetwork`.
    #[must_use]
    pub fn host_network(mut self) -> Self {
        self.host_network = true;
        self
    }

    fn yaml(&self) -> String {
        let Self { name, uid, host_network, labels, annotations } = self;
        let mut yaml =
            format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: default\n");
        for (field, values) in [("labels", labels), ("annotations", annotations)] {
            if !values.is_empty() {
                writeln!(yaml, "  {field}:").unwrap();
                values.iter().for_each(|(key, value)| writeln!(yaml, "    {key}: {value:?}").unwrap());
            }
        }
        yaml += &format!("  uid: {uid}\nspec:\n  containers:\n  - name: main\n    image: example\n");
        if *host_network { yaml + "  hostNetwork: true\n" } else { yaml }
    }
}

/// The file.
#[derive(Debug)]
pub struct PodsFile {
    path: PathBuf,
}

impl PodsFile {
    /// Creates the file with these pods.
    pub fn new(lab: &Lab, pods: &[PodSpec]) -> Self {
        let file = Self { path: lab.files().join("pods.yaml") };
        file.write(pods);
        file
    }

    /// Its path.
    pub fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The YAML of these pods.
    pub fn yaml(pods: &[PodSpec]) -> String {
        let documents: Vec<String> = pods.iter().map(PodSpec::yaml).collect();
        documents.join("---\n")
    }

    /// Replaces the file by a file with these pods.
    pub fn write(&self, pods: &[PodSpec]) {
        let new = self.path.with_extension("new");
        fs::write(&new, Self::yaml(pods)).unwrap();
        fs::rename(new, &self.path).unwrap();
    }

    /// Writes these pods, and an unmirrored pod that is different each time. So the list is new, and a new list wakes
    /// the agent.
    pub fn write_to_wake(&self, pods: &[PodSpec]) {
        static WAKES: AtomicUsize = AtomicUsize::new(0);
        let wake = PodSpec::named("wake").uid(&format!("wake-{}", WAKES.fetch_add(1, Ordering::Relaxed)));
        self.write(&[pods, &[wake.mirror("false")]].concat());
    }

    /// Writes text into the existing file.
    pub fn write_in_place(&self, text: &str) {
        fs::write(&self.path, text).unwrap();
    }

    /// Removes the file.
    pub fn remove(&self) {
        fs::remove_file(&self.path).unwrap();
    }
}
