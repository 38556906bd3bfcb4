//! Events: what the API server stores for the authors of pods.

use mirror_tests::{SOON, check, eventually};
use serde_json::Value;

use crate::Node;

#[test]
fn the_next_agent_goes_on_with_the_event_of_the_one_before() {
    let Node { api, lab } = &Node::new("series");
    api.apply(&api.object("web", &[("podmirror.io/mirror", "sideways")]));
    let mut name = None;
    for agents in 1..=3 {
        let agent = api.agent(lab, &[]);
        let event = eventually(SOON, || {
            let events: Value =
                serde_json::from_str(&api.kubectl("get events.v1.events.k8s.io -o json")).unwrap();
            let [event] = events["items"].as_array().unwrap().as_slice() else {
                return Err(format!("{events:#}"));
            };
            let count = event["series"]["count"].as_u64().unwrap_or(1);
            check(count == agents, || format!("{event:#}")).map(|()| event.clone())
        });
        assert_eq!(event["reason"], "BadAnnotation");
        assert!(event["note"].as_str().unwrap().contains("sideways"), "{event:#}");
        assert_eq!(event["series"].is_null(), agents == 1, "{event:#}");
        assert_eq!(name.get_or_insert_with(|| event["metadata"]["name"].clone()), &event["metadata"]["name"]);
        agent.stop();
    }
}
