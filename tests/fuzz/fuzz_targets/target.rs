//! Names and destinations of targets, as flags and MirrorTargets have them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_core::destination::{device_name, parse_target};

fuzz_target!(|text: &str| {
    let _ = device_name(text);
    if let Ok((name, destination)) = parse_target(text) {
        assert!(!name.to_string().is_empty());
        destination.device();
        assert_eq!(destination.to_string().parse(), Ok(destination), "{text:?}");
    }
});
