//! Tests that do not need libpcap: the sizes of programs, and that no filter keeps the compiler busy. The target
//! `filter` of the package `mirror-tests` compares the answers with libpcap's.
#![expect(clippy::expect_used, reason = "tests")]

use mirror_common::filter::{ACCEPT, MAX_FILTER_STEPS};

use super::{compile, explain};

fn many(qualifiers: &str, count: usize) -> String {
    let ids: Vec<String> = (1..=count).map(|id| id.to_string()).collect();
    format!("{qualifiers} {}", ids.join(" or "))
}

#[test]
fn programs_are_short() {
    let sizes = [
        ("icmp", 2),
        ("arp", 1),
        ("udp port 53", 9),
        ("port 53", 13),
        ("host 10.0.0.1", 7),
        ("tcp[tcpflags] & tcp-syn != 0", 4),
        ("tcp port 443 and not net 10.0.0.0/8", 11),
        ("1 < 2", 1),
    ];
    for (text, steps) in sizes {
        let program = compile(text).expect("a filter");
        assert_eq!(program.len, steps, "{text}\n{}", explain(&program));
    }
    for qualifiers in ["port", "tcp port", "not udp port", "dst port"] {
        let steps = compile(&many(qualifiers, 16)).expect("sixteen ports fit").len;
        assert!(steps <= 73, "{qualifiers}: {steps}");
    }
}

#[test]
fn every_jump_leads_forward_or_ends() {
    let program = compile(&many("port", 16)).expect("a filter");
    for (index, step) in program.steps.iter().take(program.len as usize).enumerate() {
        for jump in [step.jump_true, step.jump_false] {
            assert!(
                jump >= ACCEPT || (usize::from(jump) > index && u32::from(jump) < program.len),
                "{index}: {jump}"
            );
        }
    }
}

#[test]
fn what_is_tested_twice_is_tested_once() {
    let once = compile("tcp port 443").expect("a filter");
    for text in ["tcp port 443 and tcp", "ip or ip6 and tcp port 443", "not not tcp port 443 or tcp port 443"]
    {
        assert_eq!(compile(text).map(|program| program.len), Ok(once.len), "{text}");
    }
}

#[test]
fn a_filter_that_is_too_large_says_from_where_on() {
    let text = many("port", 60);
    let error = compile(&text).expect_err("too large");
    let fits =
        text.get(..error.position).and_then(|text| text.strip_suffix(" or ")).expect("a part of the list");
    assert!(compile(fits).is_ok(), "what stands before it fits");
    assert_eq!(
        error.to_string(),
        format!(
            "the filter is too large: with this part it needs more than {MAX_FILTER_STEPS} steps: \"30\" at byte {} of \
             the filter",
            error.position
        )
    );
}

/// Any author of a pod's annotations can write a filter: each of these would keep a compiler without bounds busy for
/// ever.
#[test]
fn no_filter_keeps_the_compiler_busy() {
    let texts = [
        many("port", 200),
        many("port", 100_000),
        "(".repeat(100_000),
        "not ".repeat(400) + "ip",
        "not ".repeat(100_000) + "ip",
        "(port 1 or host 10.0.0.1) and not vlan and ".repeat(25) + "ip",
        "-".repeat(400) + "1 < 2",
        format!("{}len{} > 1", "(".repeat(200), ")".repeat(200)),
    ];
    for text in texts {
        let error = compile(&text).expect_err("it is too large");
        assert!(error.to_string().len() < 200_000);
    }
}
