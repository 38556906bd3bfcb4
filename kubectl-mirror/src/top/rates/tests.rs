#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use serde_json::{Value, from_value, json};

use super::*;

/// A direction, a result, packets and bytes.
type Counter = (&'static str, &'static str, u64, u64);

fn session(mirror: &str, serial: u32, counters: &[Counter]) -> Value {
    let counter = |(direction, result, packets, bytes): &Counter| json!({ "direction": direction, "result": result, "packets": packets, "bytes": bytes });
    let counters: Vec<_> = counters.iter().map(counter).collect();
    json!({
        "mirror": mirror, "target": "default", "serial": serial, "origin": "pod", "direction": "both", "settings": {},
        "counters": counters,
    })
}

fn tap(pod: &str, uid: &str, sessions: &[Value]) -> Value {
    json!({
        "ifindex": 7, "device": "veth1", "nic": "eth0", "attached": { "ingress": "tcx", "egress": "tcx" },
        "pod": { "uid": uid, "namespace": "shop", "name": pod }, "sessions": sessions,
    })
}

fn look(seconds: u64, taps: &[Value]) -> BTreeMap<String, Look> {
    let status = json!({ "version": "1", "agent_running": true, "targets": [], "taps": taps });
    let look = Look::new(Duration::from_secs(seconds), from_value(status).unwrap(), None);
    [("a".to_owned(), look)].into()
}

/// The rates of each row in the table.
fn shown(then: &BTreeMap<String, Look>, now: &BTreeMap<String, Look>) -> Vec<Vec<String>> {
    let text = table(&rows(then, now), 100);
    let cells = |line: &str| line.split_whitespace().skip(4).map(str::to_owned).collect();
    text.lines().skip(1).map(cells).collect()
}

#[test]
fn the_busiest_nic_comes_first_and_all_mirrors_count() {
    let idle = tap("idle", "2", &[session("default", 3, &[])]);
    let then = look(
        10,
        &[
            idle.clone(),
            tap(
                "web",
                "1",
                &[
                    session("default", 1, &[("ingress", "copied", 10, 1000), ("egress", "filtered", 5, 500)]),
                    session("ids", 2, &[("ingress", "copied", 4, 400)]),
                ],
            ),
        ],
    );
    let now = look(
        12,
        &[
            idle,
            tap("new", "3", &[session("default", 4, &[("egress", "copied", 9, 900)])]),
            tap(
                "web",
                "1",
                &[
                    session(
                        "default",
                        1,
                        &[("ingress", "copied", 2010, 2_001_000), ("egress", "filtered", 25, 2500)],
                    ),
                    session(
                        "ids",
                        2,
                        &[
                            ("ingress", "copied", 1004, 1_000_400),
                            ("ingress", "congested", 1000, 1_000_000),
                            // It was read a moment earlier than the other session.
                            ("egress", "limited", 18, 1800),
                        ],
                    ),
                ],
            ),
        ],
    );
    let rows = rows(&then, &now);
    assert_eq!(
        table(&rows, 3),
        "NAMESPACE  POD   NIC   NODE  INGRESS/S  BYTES/S    EGRESS/S   BYTES/S    COPIED/S   BYTES/S    LOST/S\n\
         shop       web   eth0  a     1.0k       1.0M       10         1.0k       1.5k       1.5M       500\n\
         shop       idle  eth0  a     0          0          0          0          0          0          0\n\
         shop       new   eth0  a     <unknown>  <unknown>  <unknown>  <unknown>  <unknown>  <unknown>  <unknown>\n"
    );
    let one = table(&rows, 1);
    assert!(
        one.lines().count() == 3 && one.ends_with("1 of 3 NICs are shown, those with the most traffic\n"),
        "{one}"
    );
    assert_eq!(table(&[], 3), "");
}

#[test]
fn a_namespace_has_its_own_pods_alone() {
    let status = json!({
        "version": "1", "agent_running": true, "targets": [],
        "taps": [tap("web", "1", &[session("default", 1, &[])])],
    });
    let seen = |scope| Look::new(Duration::ZERO, from_value(status.clone()).unwrap(), scope).nics.len();
    assert_eq!([seen(None), seen(Some("shop")), seen(Some("tools"))], [1, 1, 0]);
}

#[test]
fn what_begins_again_has_no_rate() {
    let before = [("ingress", "copied", 100, 10_000), ("egress", "copied", 1, 100)];
    let then = look(0, &[tap("web", "1", &[session("default", 1, &before)])]);
    let unknown = vec![vec![UNKNOWN.to_owned(); 7]];
    let more = [("ingress", "copied", 200, 20_000), ("egress", "copied", 2, 200)];
    // Another pod of the same name, a mirror that began again, and counters that restarted.
    for now in [
        look(2, &[tap("web", "2", &[session("default", 1, &more)])]),
        look(2, &[tap("web", "1", &[session("default", 2, &more)])]),
        look(2, &[tap("web", "1", &[session("default", 1, &[("ingress", "copied", 200, 20_000)])])]),
        look(0, &[tap("web", "1", &[session("default", 1, &more)])]),
    ] {
        assert_eq!(shown(&then, &now), unknown, "{now:?}");
    }
    let goes_on = look(2, &[tap("web", "1", &[session("default", 1, &more), session("new", 2, &before)])]);
    assert_eq!(shown(&then, &goes_on)[0][0], "50");
}

#[test]
fn a_rate_is_short() {
    for (rate, text) in [
        (0.0, "0"),
        (0.01, "<0.1"),
        (0.5, "0.5"),
        (9.94, "9.9"),
        (9.96, "10"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (12_345.0, "12.3k"),
        (123_456.0, "123k"),
        (999_600.0, "1.0M"),
        (1.25e9, "1.2G"),
    ] {
        assert_eq!(short(rate), text, "{rate}");
    }
}

/// Any counters of two sessions.
fn counters() -> impl Strategy<Value = Vec<Counter>> {
    let direction = prop::sample::select(vec!["ingress", "egress"]);
    let result = prop::sample::select(vec!["copied", "filtered", "lost", "congested"]);
    let number = || prop_oneof![0..1000_u64, any::<u64>()];
    prop::collection::vec((direction, result, number(), number()), 0..5)
}

proptest! {
    #[test]
    fn a_rate_is_never_negative_and_never_more_than_was_counted(
        before in [counters(), counters()], after in [counters(), counters()], serials in [1..3_u32, 1..3_u32],
    ) {
        let of = |counters: &[Vec<Counter>; 2], serial| {
            tap("web", "1", &[session("default", serial, &counters[0]), session("ids", 9, &counters[1])])
        };
        let then = look(0, &[of(&before, serials[0])]);
        let now = look(1, &[of(&after, serials[1])]);
        for row in rows(&then, &now) {
            let Some(rates) = row.rates else { continue };
            let counted = after.iter().flatten().map(|(_, _, packets, _)| *packets as f64).sum::<f64>();
            for [packets, bytes] in rates {
                prop_assert!(packets >= 0.0 && bytes >= 0.0);
                prop_assert!(packets <= counted * 1.001, "{rates:?} of {after:?}");
            }
        }
    }

    #[test]
    fn counters_that_go_on_have_the_rate_of_what_was_added(
        before in 0..u64::from(u32::MAX), added in 0..1_000_000_u64, seconds in 1..100_u64,
    ) {
        let at = |seconds, packets| {
            look(seconds, &[tap("web", "1", &[session("default", 1, &[("egress", "copied", packets, packets)])])])
        };
        let rows = rows(&at(5, before), &at(5 + seconds, before + added));
        let [ingress, egress, copied, _] = rows[0].rates.unwrap();
        prop_assert!((egress[0] * seconds as f64 - added as f64).abs() < 0.01);
        prop_assert_eq!((egress, ingress[0]), (copied, 0.0));
    }

    #[test]
    fn a_short_rate_is_near_the_rate(rate in LEAST..1e18) {
        let text = short(rate);
        let digits = text.trim_end_matches(char::is_alphabetic);
        let unit = text.strip_prefix(digits).unwrap();
        let power = ["", "k", "M", "G", "T", "P", "E"].iter().position(|of| *of == unit).unwrap();
        let read = digits.parse::<f64>().unwrap() * 1000_f64.powi(i32::try_from(power).unwrap());
        prop_assert!(text.len() <= 5 && (read - rate).abs() <= (0.05 * rate).max(0.5) * 1.01, "{rate} {text}");
    }
}
