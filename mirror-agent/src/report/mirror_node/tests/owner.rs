//! Tests: the owner of the object.

use super::*;

const STATUS: &str = "PATCH mirrornodes/one/status";

#[tokio::test]
async fn an_object_that_is_missing_is_made_with_its_node_as_the_owner() {
    // The node that the server names; `None`: it refuses the request.
    for (name, owners) in [(Some("one"), 1), (Some("other"), 0), (None, 0)] {
        let sent = Sent::default();
        let is_made = Mutex::new(false);
        let client = server(&sent, move |path| {
            let mut is_made = is_made.lock().unwrap();
            if path.contains("selfsubjectreviews") {
                let Some(name) = name else { return Some(Reply::Status(403)) };
                let extra = json!({
                    "authentication.kubernetes.io/node-name": [name],
                    "authentication.kubernetes.io/node-uid": ["7"],
                });
                return Some(Reply::Object(
                    json!({"metadata": {}, "status": {"userInfo": {"extra": extra}}}),
                ));
            }
            let is_missing = path.ends_with("/status") && !*is_made;
            *is_made |= !path.ends_with("/status");
            is_missing.then_some(Reply::Status(404))
        });
        let mut owner = None;
        put(&client, "one", &MirrorNodeStatus::default(), &mut owner).await.unwrap();
        let (review, made) = {
            let sent = sent.lock().unwrap();
            (sent[1].1.clone(), sent[2].2.clone())
        };
        assert_eq!(review, "/apis/authentication.k8s.io/v1/selfsubjectreviews");
        assert_eq!(made["metadata"]["ownerReferences"].as_array().unwrap().len(), owners, "{made}");
        assert_eq!(made.get("status"), None);
        assert_eq!(paths(&sent), [STATUS, "PATCH mirrornodes/one", STATUS]);
        put(&client, "one", &MirrorNodeStatus::default(), &mut owner).await.unwrap();
        assert_eq!(sent.lock().unwrap().len(), 1, "an object that exists keeps its owner");
        assert_eq!(paths(&sent), [STATUS]);
    }
}

/// A Node, its MirrorNode with its owners, and the UID of the Node in the agent's token.
#[derive(Default)]
struct Cluster {
    node: &'static str,
    /// Empty: the server does not name the Node.
    token: &'static str,
    object: Option<Vec<String>>,
}

impl Cluster {
    fn answer(&mut self, request: &http::Request<()>, body: &Value) -> Reply {
        let path = request.uri().path();
        if path.contains("selfsubjectreviews") {
            if self.token.is_empty() {
                return Reply::Status(500);
            }
            let extra = json!({
                "authentication.kubernetes.io/node-name": ["one"],
                "authentication.kubernetes.io/node-uid": [self.token],
            });
            return Reply::Object(json!({"metadata": {}, "status": {"userInfo": {"extra": extra}}}));
        }
        if !path.ends_with("/status") && request.method() == "PATCH" {
            let owners = body["metadata"]["ownerReferences"].as_array().unwrap();
            self.object = Some(owners.iter().map(|of| of["uid"].as_str().unwrap().to_owned()).collect());
        }
        let reply = match self.object {
            Some(_) => Reply::Object(json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": {"name": "one"},
            })),
            None => Reply::Status(404),
        };
        // After the answer, the garbage collector deletes an object whose owner does not exist.
        if path.ends_with("/status") && self.object.iter().flatten().any(|owner| owner != self.node) {
            self.object = None;
        }
        reply
    }
}

fn client(cluster: &Arc<Mutex<Cluster>>) -> Client {
    let cluster = Arc::clone(cluster);
    fake::client_with_bodies(move |request, body| cluster.lock().unwrap().answer(request, body))
}

/// The server does not answer the question at first.
#[tokio::test]
async fn an_object_is_made_when_its_owner_is_known() {
    let cluster = Arc::new(Mutex::new(Cluster { node: "1", ..Cluster::default() }));
    let (client, mut owner) = (client(&cluster), None);
    put(&client, "one", &MirrorNodeStatus::default(), &mut owner).await.unwrap_err();
    assert_eq!(cluster.lock().unwrap().object, None);
    cluster.lock().unwrap().token = "1";
    put(&client, "one", &MirrorNodeStatus::default(), &mut owner).await.unwrap();
    assert_eq!(cluster.lock().unwrap().object, Some(vec!["1".to_owned()]));
}

/// The Node has another UID then, and the token of the agent has the old one for a while.
#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_has_its_report_soon() {
    let cluster = Arc::new(Mutex::new(Cluster { node: "1", token: "1", ..Cluster::default() }));
    let start = || {
        let (reports, reader) = watch::channel(Arc::<Report>::default());
        tokio::spawn(write_with(client(&cluster), "one".into(), reader, || Ok(Counts::default())));
        reports.send_replace(report(vec![mirror("a", 1)]));
        reports
    };
    let after = async |seconds| {
        sleep(Duration::from_secs(seconds)).await;
        cluster.lock().unwrap().object.clone()
    };
    let reports = start();
    assert_eq!(after(1).await, Some(vec!["1".to_owned()]));
    {
        let mut cluster = cluster.lock().unwrap();
        (cluster.node, cluster.object) = ("2", None);
    }
    assert_eq!(after(LOOK.as_secs() + 1).await, Some(vec![]), "without an owner that is not there");
    assert_eq!(after(3600).await, Some(vec![]));
    // An administrator deletes it: the agent still knows which Node is gone.
    cluster.lock().unwrap().object = None;
    assert_eq!(after(LOOK.as_secs() + 1).await, Some(vec![]));
    // The next agent does not know that the Node with the UID of its token is gone.
    drop(reports);
    cluster.lock().unwrap().object = None;
    let reports = start();
    assert_eq!(after(2 * LOOK.as_secs() + 61).await, Some(vec![]));
    // Its token is renewed, and the Node comes back once more.
    {
        let mut cluster = cluster.lock().unwrap();
        (cluster.node, cluster.token, cluster.object) = ("3", "3", None);
    }
    assert_eq!(after(LOOK.as_secs() + 1).await, Some(vec!["3".to_owned()]));
    drop(reports);
}
