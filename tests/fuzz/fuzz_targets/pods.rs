//! Pods as JSON or YAML, as a file of pods and the API server have them, with the annotations that their authors write: a
//! pod has a name of its own, and at most the mirrors of one tap.

#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use mirror_agent::sources::parse::parse;
use mirror_common::abi::MAX_SESSIONS_PER_TAP;
use mirror_core::select::{Filters, Policy, choose};

fuzz_target!(|text: &str| {
    let Ok(pods) = parse(text) else { return };
    let names: BTreeSet<_> = pods.iter().map(|pod| (&pod.id.namespace, &pod.id.name)).collect();
    assert_eq!(names.len(), pods.len());
    assert!(pods.iter().all(|pod| !pod.id.name.is_empty()));
    let policy = Policy { kube_ovn_annotations: true, ..Policy::default() };
    let choice = choose(&pods, &[], &[], &policy, &mut Filters::default());
    for wanted in &choice.wanted {
        assert!(wanted.mirrors.len() <= MAX_SESSIONS_PER_TAP);
    }
});
