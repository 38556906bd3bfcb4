#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*, sample};

use super::*;
use crate::{
    model::PodId,
    status::{AttachedStatus, CounterStatus, KnownPod, LeftStatus, NicCoverage, Notes},
};

/// A direction, a result, packets and bytes.
type Counter = (&'static str, &'static str, u64, u64);

fn session(mirror: &str, serial: u32, counters: &[Counter]) -> SessionStatus {
    let counter = |(direction, result, packets, bytes): &Counter| CounterStatus {
        direction: (*direction).into(),
        result: (*result).into(),
        packets: *packets,
        bytes: *bytes,
    };
    SessionStatus {
        mirror: mirror.into(),
        target: "default".into(),
        serial,
        tunnel_key: None,
        origin: "pod".into(),
        direction: "both".into(),
        settings: BTreeMap::new(),
        ended: None,
        left: LeftStatus::default(),
        counters: counters.iter().map(counter).collect(),
        misfits: Vec::new(),
    }
}

fn tap(pod: &str, uid: &str, nic: &str, sessions: &[SessionStatus]) -> TapStatus {
    TapStatus {
        ifindex: 7,
        device: format!("veth-{nic}"),
        inside: false,
        pod: Some(PodId { uid: uid.into(), namespace: "shop".into(), name: pod.into() }),
        nic: nic.into(),
        network: None,
        attached: AttachedStatus::default(),
        pod_side: None,
        sessions: sessions.to_vec(),
    }
}

fn node(taps: &[TapStatus], notes: Option<Notes>) -> NodeStatus {
    let agent_running = notes.is_some();
    NodeStatus { version: "1".into(), agent_running, targets: Vec::new(), taps: taps.to_vec(), notes }
}

fn not_mirrored(pod: &str, reason: &str, message: &str, remedy: &str) -> Finding {
    let [pod, reason, message, remedy] = [pod, reason, message, remedy].map(str::to_owned);
    Finding { pod: Some(pod), reason, message, remedy, ..Finding::default() }
}

#[test]
fn each_pod_of_the_request_has_a_report_with_all_that_is_known() {
    let covered =
        DirectionCoverage { state: "Covered".into(), message: "all".into(), seconds: 5, seen: 9, carried: 9 };
    let bypassed = DirectionCoverage { state: "Bypassed".into(), seen: 1, ..covered.clone() };
    let coverage = NicCoverage {
        pod: "shop/web".into(),
        nic: "eth0".into(),
        device: "veth-eth0".into(),
        why_inside: Some("the node side sees nothing".into()),
        ingress: bypassed.clone(),
        egress: covered.clone(),
    };
    let no_request = not_mirrored("shop/db", "NoRequest", "no request", "Ask.");
    let not_asked = Finding { pod: None, ..no_request.clone() };
    let bad = not_mirrored("shop/db", "BadAnnotation", "no filter", "Correct it.");
    let hidden = Finding {
        nic: Some("eth0".into()),
        mirror: Some("ids".into()),
        ..not_mirrored("shop/web", "Hidden", "another program", "Remove it.")
    };
    let known = |pod: &str, not_asked| KnownPod { pod: pod.into(), not_asked };
    let pods = vec![known("shop/web", None), known("shop/db", Some(not_asked)), known("tools/web", None)];
    let notes = Notes {
        not_mirrored: vec![hidden.clone()],
        bad_annotations: vec![bad.clone()],
        pods: Some(pods),
        coverage: vec![coverage],
        ..Notes::default()
    };
    let ids = session("ids", 2, &[("ingress", "congested", 2, 200), ("egress", "lost", 1, 100)]);
    let counters =
        [("ingress", "copied", 3, 300), ("egress", "copied", 4, 400), ("egress", "filtered", 5, 500)];
    let all = session("default", 1, &counters);
    let net1 = TapStatus { network: Some("shop/fast".into()), ..tap("web", "1", "net1", &[]) };
    let mut interface = tap("", "", "eno1", &[session("eno1", 3, &[])]);
    interface.pod = None;
    let status = node(&[net1, interface, tap("web", "1", "eth0", &[all, ids])], Some(notes));

    let mirror =
        |name: &str, copied, lost| MirrorReport { name: name.into(), target: "default".into(), copied, lost };
    let eth0 = NicReport {
        name: "eth0".into(),
        device: "veth-eth0".into(),
        network: None,
        why_inside: Some("the node side sees nothing".into()),
        ingress: Some(bypassed),
        egress: Some(covered),
        mirrors: vec![mirror("default", 7, 0), mirror("ids", 0, 3)],
        rates: None,
    };
    let net1 = NicReport {
        name: "net1".into(),
        device: "veth-net1".into(),
        network: Some("shop/fast".into()),
        ..NicReport::default()
    };
    let of = |namespace: &str, name: &str, nics, not_mirrored| PodReport {
        metadata: PodMetadata { namespace: namespace.into(), name: name.into() },
        node: String::new(),
        explanation: None,
        nics,
        not_mirrored,
    };
    let web = of("shop", "web", vec![eth0, net1], vec![hidden]);
    let db = of("shop", "db", Vec::new(), vec![no_request, bad]);
    let tools = of("tools", "web", Vec::new(), Vec::new());
    assert_eq!(status.reports([None, None], None), [db.clone(), web.clone(), tools]);
    assert_eq!(status.reports([Some("shop"), None], None), [db, web.clone()]);
    assert!(status.reports([Some("none"), None], None).is_empty());
    let explained = PodReport { explanation: Some(status.explain("shop/web").unwrap()), ..web };
    assert_eq!(status.reports([Some("shop"), Some("web")], None), [explained]);
    let names = status.reports([None, Some("web")], None).into_iter().map(|of| of.metadata.namespace);
    assert_eq!(names.collect::<Vec<_>>(), ["shop", "tools"]);
    // The agent does not know it: the reason is in the explanation.
    let unknown = PodReport {
        explanation: Some(status.explain("shop/api").unwrap_err()),
        ..of("shop", "api", Vec::new(), Vec::new())
    };
    assert_eq!(status.reports([Some("shop"), Some("api")], None), [unknown]);
}

/// The rates of `web`, which has the sessions `then` and, after some seconds, `now`.
fn measured(then: &[SessionStatus], now: &[SessionStatus], seconds: u64) -> Option<Rates> {
    let then = node(&[tap("web", "1", "eth0", then)], None);
    let now = node(&[tap("web", "1", "eth0", now)], None);
    let reports = now.reports([None, None], Some((&then, Duration::from_secs(seconds))));
    reports[0].nics[0].rates
}

#[test]
fn the_copies_and_losses_of_all_mirrors_are_added_and_traffic_is_not() {
    let then = [
        session("default", 1, &[("ingress", "copied", 10, 1000), ("egress", "filtered", 5, 500)]),
        session("ids", 2, &[("ingress", "copied", 4, 400)]),
    ];
    let now = [
        session("default", 1, &[("ingress", "copied", 2010, 2_001_000), ("egress", "filtered", 25, 2500)]),
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
    ];
    let rate = |packets, bytes| Traffic { packets, bytes };
    let expected = Rates {
        ingress: rate(1000.0, 1_000_000.0),
        egress: rate(10.0, 1000.0),
        copied: rate(1500.0, 1_500_000.0),
        lost: rate(500.0, 500_000.0),
    };
    assert_eq!(measured(&then, &now, 2), Some(expected));
}

#[test]
fn what_begins_again_has_no_rate() {
    let before = [("ingress", "copied", 100, 10_000), ("egress", "copied", 1, 100)];
    let more = [("ingress", "copied", 200, 20_000), ("egress", "copied", 2, 200)];
    let then = [session("default", 1, &before)];
    let now = [session("default", 1, &more), session("new", 2, &before)];
    assert_eq!(measured(&then, &now, 2).unwrap().ingress.packets, 50.0);
    // A mirror that began again, counters that restarted, and no time.
    let again = session("default", 2, &more);
    let restarted = session("default", 1, &[("ingress", "copied", 200, 20_000)]);
    assert_eq!(measured(&then, &[again], 2), None);
    assert_eq!(measured(&then, &[restarted], 2), None);
    assert_eq!(measured(&then, &now, 0), None);
    // Another pod of the same name, a new sandbox, and another NIC.
    let earlier = node(&[tap("web", "1", "eth0", &then)], None);
    let tap = |uid: &str, nic: &str| tap("web", uid, nic, &now);
    for tap in [tap("2", "eth0"), TapStatus { ifindex: 8, ..tap("1", "eth0") }, tap("1", "net1")] {
        let reports = node(&[tap], None).reports([None, None], Some((&earlier, Duration::from_secs(2))));
        assert_eq!(reports[0].nics[0].rates, None);
    }
}

/// Any counters of a session.
fn counters() -> impl Strategy<Value = Vec<Counter>> {
    let direction = sample::select(vec!["ingress", "egress"]);
    let result = sample::select(vec!["copied", "filtered", "lost", "congested"]);
    let number = || prop_oneof![0..1000_u64, any::<u64>()];
    vec((direction, result, number(), number()), 0..5)
}

proptest! {
    #[test]
    fn a_rate_is_never_negative_and_never_more_than_was_counted(
        before in [counters(), counters()], after in [counters(), counters()], serials in [1..3_u32, 1..3_u32],
    ) {
        let of = |counters: &[Vec<Counter>; 2], serial| {
            [session("default", serial, &counters[0]), session("ids", 9, &counters[1])]
        };
        let rates = measured(&of(&before, serials[0]), &of(&after, serials[1]), 1);
        let counted = after.iter().flatten().map(|(_, _, packets, _)| *packets as f64).sum::<f64>();
        if let Some(Rates { ingress, egress, copied, lost }) = rates {
            for Traffic { packets, bytes } in [ingress, egress, copied, lost] {
                prop_assert!(packets >= 0.0 && bytes >= 0.0);
                prop_assert!(packets <= counted * 1.001, "{packets} of {after:?}");
            }
        }
    }

    #[test]
    fn counters_that_go_on_have_the_rate_of_what_was_added(
        before in 0..u64::from(u32::MAX), added in 0..1_000_000_u64, seconds in 1..100_u64,
    ) {
        let at = |packets| [session("default", 1, &[("egress", "copied", packets, packets)])];
        let rates = measured(&at(before), &at(before + added), seconds).unwrap();
        prop_assert!((rates.egress.packets * seconds as f64 - added as f64).abs() < 0.01);
        prop_assert_eq!((rates.egress, rates.ingress.packets), (rates.copied, 0.0));
    }
}
