//! A real API server, and a node of the test that is one of its nodes.
//!
//! There is no kubelet: the story itself makes the namespaces and processes of its pods, and tells of them. `cargo xtask
//! test --level api` brings the server up. Each story has an agent and a node of its own, so that they run in parallel.

use std::ops::Deref;

use serde_json::Value;

use crate::{Agent, Container, Kubectl, Lab, LaggingApi, PodNs, Way, pod_object, relay::Relay};

/// An API server as a node reaches it, and a namespace for one story.
#[derive(Debug)]
pub struct Api {
    relay: Relay,
    kubectl: Kubectl,
    node: String,
}

impl Api {
    /// Connects a node.
    #[track_caller]
    pub fn new(lab: &Lab, story: &str) -> Self {
        let kubectl = Kubectl::new(story);
        kubectl.make_namespace();
        let server = kubectl.kubectl("config view --minify -o jsonpath={.clusters[0].cluster.server}");
        let server = server.strip_prefix("https://").and_then(|address| address.parse().ok());
        let relay = Relay::start(lab.node(), server.expect("the server is an IP address and a port"));
        Self { relay, kubectl, node: lab.node().name().to_owned() }
    }

    /// Starts `mirror-agent run` on the node, with more arguments.
    pub fn agent(&self, lab: &Lab, arguments: &[&str]) -> Agent {
        let kubeconfig = self.kubeconfig();
        self.agent_as(lab, kubeconfig.to_str().unwrap(), arguments)
    }

    /// As [`Api::agent`], with a kubeconfig of one's own.
    pub fn agent_as(&self, lab: &Lab, kubeconfig: &str, arguments: &[&str]) -> Agent {
        let words = [&["run", "--node-name", &self.node], arguments].concat();
        Agent::with_environment(lab, &words, &[("KUBECONFIG", kubeconfig)])
    }

    /// What the API server has of a pod of this node, before it is made.
    pub fn object(&self, name: &str, annotations: &[(&str, &str)]) -> Value {
        let mut object = pod_object(name, "exec sleep 3600");
        object["spec"]["nodeName"] = self.node.as_str().into();
        for (key, value) in annotations {
            object["metadata"]["annotations"][key] = (*value).into();
        }
        object
    }

    /// Makes a pod in the story's namespace, and starts a process of it where `pod` is.
    #[track_caller]
    pub fn run(&self, lab: &Lab, pod: &PodNs, annotations: &[(&str, &str)]) -> Container {
        self.apply(&self.object(pod.name(), annotations));
        self.start(lab, pod)
    }

    /// Starts a process of the pod that has been made by that name.
    #[track_caller]
    pub fn start(&self, lab: &Lab, pod: &PodNs) -> Container {
        let uid = self.kubectl(&format!("get pod {} -o jsonpath={{.metadata.uid}}", pod.name()));
        lab.container(pod.netns(), &format!("kubepods/burstable/pod{uid}/1"))
    }

    /// Changes what becomes of what the node and the API server send each other. The story itself is not concerned.
    pub fn set_way(&self, way: Way) {
        self.relay.set(way);
    }

    /// Starts another API server, which knows what there is now and can be made to lag behind.
    #[track_caller]
    pub fn lagging(&self) -> LaggingApi {
        LaggingApi::start(&self.kubectl)
    }

    /// Closes the node's connections, and leads the next ones to another API server, as a load balancer does.
    pub fn lead_to(&self, server: &LaggingApi) {
        self.relay.lead_to(server.address());
    }
}

impl Deref for Api {
    type Target = Kubectl;

    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}
