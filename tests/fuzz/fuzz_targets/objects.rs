//! Objects of the API server, as agents and the controller read them: any JSON is read or refused, a request has the
//! settings that its fields have, and a node that lies only adds to the sums.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_agent::sources::kube::{Bounded, Kind};
use mirror_api::{
    ClusterMirror, Mirror, MirrorNode, MirrorStatus, MirrorTarget, MirrorTargetStatus, SettingsSpec, sum,
};
use mirror_core::{
    model::{Pod, PodId, Resource},
    select::{Filters, Policy, choose},
};
use serde_json::{Value, from_str, from_value, to_value};

/// Most bytes of a text of a status that comes from a node, in a sentence of the controller.
const MOST_TEXT: usize = 4096;

/// Checks a Mirror or ClusterMirror, and chooses it for a pod.
fn mirror(resource: Resource) {
    if let Ok(request) = &resource.request {
        let spec = SettingsSpec::of(&request.settings).expect("a resource can have these settings");
        assert_eq!(spec.read().as_ref(), Ok(&request.settings));
    }
    let namespace = resource.id.namespace.clone().unwrap_or_else(|| "shop".to_owned());
    let pod = Pod {
        id: PodId { uid: "1".to_owned(), namespace, name: "web".to_owned() },
        labels: [("app".to_owned(), "web".to_owned())].into(),
        host_network: false,
        netns: None,
        networks: Default::default(),
        annotations: Default::default(),
        inherited: Default::default(),
        namespace_labels: Default::default(),
        unread: None,
    };
    let (pods, resources) = ([pod], [resource]);
    let choice = choose(&pods, &resources, &[], &Policy::default(), &mut Filters::default());
    let is_selected = resources[0].selects(&pods[0]);
    let mirrors: usize = choice.wanted.iter().map(|wanted| wanted.mirrors.len()).sum();
    assert!(mirrors <= usize::from(is_selected && resources[0].request.is_ok()));
    assert_eq!(choice.selected.len(), usize::from(is_selected));
}

/// Checks that a status can be read again, that no number is below zero, and that no text is long.
fn status(value: &Value) {
    match value {
        Value::Object(fields) => fields.values().for_each(status),
        Value::Array(values) => values.iter().for_each(status),
        Value::Number(number) => assert!(number.as_i64().is_some_and(|number| number >= 0), "{number}"),
        Value::String(text) => assert!(text.len() <= MOST_TEXT, "{text}"),
        Value::Bool(_) | Value::Null => {}
    }
}

/// Sums up the report of a node.
fn node(node: MirrorNode) {
    let Some(report) = node.status else { return };
    let again = from_value(to_value(&report).unwrap());
    assert_eq!(again.ok().as_ref(), Some(&report));
    let now = from_str("\"2026-11-26T00:00:00Z\"").unwrap();
    let each = |twice: usize| ["a", "b"].into_iter().take(twice);
    for mirror in &report.mirrors {
        let asked = sum::Asked::default();
        let of = sum::sum(&asked, each(2).map(|node| (node, mirror)), None, &now);
        status(&to_value(&of).unwrap());
        let before: MirrorStatus = from_value(to_value(&of).unwrap()).unwrap();
        assert_eq!(of, before);
        let of = sum::sum(&asked, each(2).map(|node| (node, mirror)), Some(&before), &now);
        assert_eq!(of, before, "nothing has changed");
    }
    for target in &report.targets {
        let asked = sum::Asked::default();
        let of = sum::target::sum(&asked, each(2).map(|node| (node, target)), None, &now);
        status(&to_value(&of).unwrap());
        let before: MirrorTargetStatus = from_value(to_value(&of).unwrap()).unwrap();
        assert_eq!(of, before);
    }
}

fuzz_target!(|text: &str| {
    let Ok(object) = from_str::<Bounded>(text) else {
        return assert!(from_str::<Value>(text).is_err(), "any JSON is decoded");
    };
    for read in [Mirror::read(&object), ClusterMirror::read(&object)] {
        read.into_iter().for_each(mirror);
    }
    if let Ok(target) = MirrorTarget::read(&object)
        && let Ok(destination) = target.destination
    {
        assert_eq!(destination.to_string().parse(), Ok(destination));
    }
    from_str(text).into_iter().for_each(node);
});
