//! Pods as JSON or YAML, as a file of pods and the API server have them, with the annotations that their authors write.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_agent::pods::parse::parse;

fuzz_target!(|text: &str| {
    if let Ok(pods) = parse(text) {
        for pod in &pods {
            assert!(!pod.id.name.is_empty());
        }
    }
});
