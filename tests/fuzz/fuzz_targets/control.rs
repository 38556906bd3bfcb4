//! Requests on the control socket: what was read can be written and read again, and so can the settings of captures.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_agent::capture::control::{Answer, Request, Subject, parse};
use mirror_core::settings::SETTINGS;
use serde_json::{from_str, to_string};

fuzz_target!(|line: &str| {
    if let Ok(request) = from_str::<Request>(line) {
        assert_eq!(from_str::<Request>(&to_string(&request).unwrap()).ok(), Some(request.clone()));
        if let Subject::Capture { settings: asked, .. } = request.of
            && let Ok(settings) = parse(&asked)
        {
            let shown = SETTINGS.iter().filter_map(|of| Some((of.key.to_owned(), of.show(&settings)?)));
            let again = parse(&shown.collect()).expect("what is shown can be read");
            assert!(again.asks_the_same(&settings), "{asked:?}");
        }
    }
    if let Ok(answer) = from_str::<Answer>(line) {
        assert_eq!(from_str::<Answer>(&to_string(&answer).unwrap()).ok(), Some(answer));
    }
});
