//! Tests of the bound on the compiler's work.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use super::*;

/// Returns a filter with the maximum number of these parts.
fn longest(first: &str, part: impl Fn(usize) -> String) -> String {
    let mut text = first.to_owned();
    for number in 2..=240 {
        let more = format!(" or {}", part(number));
        if text.len() + more.len() > 1024 {
            break;
        }
        text += &more;
    }
    text
}

/// The bound for a filter is more than twice the cost of the longest list of ports.
#[test]
fn a_filter_that_is_too_much_work_is_refused() {
    let cost = |text: &str| {
        let mut work = Work(10 * MAX_WORK);
        let program = program(text, &parse::parse(text).unwrap(), &mut work).unwrap();
        (program.is_some(), 10 * MAX_WORK - work.0)
    };
    for text in [
        longest("port 1", |number| number.to_string()),
        longest("host 10.0.0.1", |number| format!("10.0.{number}.{number}")),
        longest("host fd00::1", |number| format!("fd00::{number}")),
        longest("tcp port 1", |number| format!("tcp port {number} and not net 10.{number}.0.0/16")),
    ] {
        let (is_there, cost) = cost(&text);
        assert!(is_there && cost < MAX_WORK / 2, "{cost}: {text}");
        assert!(compile(&text).is_ok());
    }
    let chains = longest("vlan 1", |number| format!("ip6 protochain {number}"));
    let (_, work) = cost(&chains);
    assert!(work > MAX_WORK, "{work}");
    let error = compile(&chains).unwrap_err();
    assert!(error.reason.starts_with("the filter is too much work to compile: use fewer parts"), "{error}");
    assert_eq!((error.position, &error.part), (0, &chains));
}
