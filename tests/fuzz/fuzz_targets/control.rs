//! Requests on the control socket, and to the stream endpoint, which anyone can reach: what was read can be written and
//! read again, and nobody gets a stream without its key.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_agent::{
    control::{Answer, Request, Subject, parse},
    report::{Keyed, Report},
    streams,
};
use mirror_core::{
    model::{Directions, ResourceId},
    settings::SETTINGS,
};
use serde_json::{Value, from_str, to_string};

/// SHA-256 of "secret".
const KEY_SHA256: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

/// A report with the stream of the Mirror `shop/web`.
fn report() -> Report {
    let byte = |at: usize| u8::from_str_radix(&KEY_SHA256[2 * at..2 * at + 2], 16).unwrap();
    let id = ResourceId { namespace: Some("shop".to_owned()), name: "web".parse().unwrap() };
    let key_sha256 = std::array::from_fn(byte);
    let keyed = Keyed { uid: "1".to_owned(), key_sha256, named: Default::default(), filter: None };
    Report { streams: [(id, keyed)].into(), ..Report::default() }
}

fuzz_target!(|line: &str| {
    if let Ok(request) = from_str::<Request>(line) {
        assert_eq!(from_str::<Request>(&to_string(&request).unwrap()).ok(), Some(request.clone()));
        if let Subject::Capture { direction, settings: asked, .. }
        | Subject::Reader { direction, settings: asked, .. } = request.of
        {
            Directions::from_name(&direction);
            if let Ok(settings) = parse(&asked) {
                let shown = SETTINGS.iter().filter_map(|of| Some((of.key.to_owned(), of.show(&settings)?)));
                let again = parse(&shown.collect()).expect("what is shown can be read");
                assert!(again.asks_the_same(&settings), "{asked:?}");
            }
        }
    }
    if let Ok(answer) = from_str::<Answer>(line) {
        assert_eq!(from_str::<Answer>(&to_string(&answer).unwrap()).ok(), Some(answer));
    }
    if let Ok(request) = from_str::<streams::Request>(line) {
        let asked: Value = from_str(line).unwrap();
        let has_key = asked["mirror"] == "shop/web" && asked["key"] == "secret";
        assert_eq!(request.admitted(&report()).is_some(), has_key, "{line}");
    }
});
