//! Connects a real API server and a node of the test, which is one of the server's nodes.
//!
//! There is no kubelet. The story itself creates the namespaces and processes of its pods, and the pods at the API
//! server. `cargo xtask test --level api` starts the server. Each story has an agent and a node of its own, so stories
//! run in parallel.

use std::ops::Deref;

use serde_json::Value;

use crate::{Agent, Container, Kubectl, Lab, LaggingApi, PodNs, Relay, Way, pod_object};

/// An API server as a node reaches it, and a Kubernetes namespace for one story.
#[derive(Debug)]
pub struct Api {
    relay: Relay,
    kubectl: Kubectl,
    node: String,
}

impl Api {
    /// Connects a node to the API server.
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

    /// As [`Api::agent`], with this kubeconfig.
    pub fn agent_as(&self, lab: &Lab, kubeconfig: &str, arguments: &[&str]) -> Agent {
        let words = [&["run", "--node-name", &self.node], arguments].concat();
        Agent::with_environment(lab, &words, &[("KUBECONFIG", kubeconfig)])
    }

    /// The object for a pod of this node.
    pub fn object(&self, name: &str, annotations: &[(&str, &str)]) -> Value {
        let mut object = pod_object(name, "exec sleep 3600");
        object["spec"]["nodeName"] = self.node.as_str().into();
        for (key, value) in annotations {
            object["metadata"]["annotations"][key] = (*value).into();
        }
        object
    }

    /// Creates a pod in the story's namespace, and starts a process of the pod in the network namespace of `pod`.
    #[track_caller]
    pub fn run(&self, lab: &Lab, pod: &PodNs, annotations: &[(&str, &str)]) -> Container {
        self.apply(&self.object(pod.name(), annotations));
        self.start(lab, pod)
    }

    /// Starts a process of the pod named as `pod`, which must exist at the API server.
    #[track_caller]
    pub fn start(&self, lab: &Lab, pod: &PodNs) -> Container {
        let uid = self.kubectl(&format!("get pod {} -o jsonpath={{.metadata.uid}}", pod.name()));
        lab.container(pod.netns(), &format!("kubepods/burstable/pod{uid}/1"))
    }

    /// Sets how the relay treats the traffic between the node and the API server. The story's own `kubectl` does not
    /// use the relay.
    pub fn set_way(&self, way: Way) {
        self.relay.set(way);
    }

    /// The port at which the node reaches the API server.
    pub fn port(&self) -> u16 {
        self.relay.address().port()
    }

    /// Connects one more node to the API server, until the result is dropped.
    #[track_caller]
    pub fn connect(&self, lab: &Lab) -> Relay {
        Relay::start(lab.node(), self.relay.address())
    }

    /// Starts another API server with more arguments, which has the present objects and can be made to lag behind.
    #[track_caller]
    pub fn another(&self, arguments: &[&str]) -> LaggingApi {
        LaggingApi::start(&self.kubectl, arguments)
    }

    /// Closes the node's connections, and directs new ones to another API server, as a load balancer does.
    pub fn lead_to(&self, server: &LaggingApi) {
        self.relay.lead_to(server.address());
    }

    /// The same, to the first API server again.
    pub fn lead_back(&self) {
        self.relay.lead_to(self.relay.address());
    }
}

impl Deref for Api {
    type Target = Kubectl;

    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}
