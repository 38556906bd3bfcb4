//! The text about a pod, for any status.

use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
    sample,
};

use super::*;
use crate::coverage::State;
use crate::settings::{SETTINGS, Setting};
use crate::status::{DirectionCoverage, NicCoverage};

/// Text as a pod could choose it.
fn word() -> impl Strategy<Value = String> {
    "[a-z\\x1b\n\"é. ]{0,6}"
}

fn name_or_word(names: Vec<&'static str>) -> impl Strategy<Value = String> {
    prop_oneof![4 => sample::select(names).prop_map(str::to_owned), 1 => word()]
}

fn any_session() -> impl Strategy<Value = SessionStatus> {
    let result = name_or_word(Verdict::ALL.map(Verdict::name).to_vec());
    let direction = name_or_word(Direction::ALL.map(Direction::name).to_vec());
    let counter = (direction, result, 1..=u64::MAX, any::<u64>())
        .prop_map(|(direction, result, packets, bytes)| CounterStatus { direction, result, packets, bytes });
    let origin = name_or_word(Origin::ALL.map(Origin::name).to_vec());
    let numbers = (option::of(any::<u64>()), option::of(0.0..2.0), option::of(1..9_u32));
    let names = (word(), name_or_word(vec!["default", "ids", "live"]), origin);
    let direction = name_or_word(vec!["both", "ingress", "egress"]);
    let settings = btree_map((0..SETTINGS.len()).prop_map(|at| SETTINGS[at].key.to_owned()), word(), 0..4);
    (names, direction, settings, numbers, option::of(word()), vec(counter, 0..5)).prop_map(
        |((mirror, target, origin), direction, settings, (packets, duration, key), ended, counters)| {
            let left = LeftStatus { duration, packets, bytes: packets };
            let of = session(&mirror, &target, &[]);
            SessionStatus { origin, direction, settings, left, tunnel_key: key, ended, counters, ..of }
        },
    )
}

fn any_coverage() -> impl Strategy<Value = NicCoverage> {
    let direction = || {
        (name_or_word(State::NAMES.to_vec()), word(), any::<(u64, u64, u64)>()).prop_map(
            |(state, message, (seconds, seen, carried))| DirectionCoverage {
                state,
                message,
                seconds,
                seen,
                carried,
            },
        )
    };
    let names = (name_or_word(vec!["shop/web"]), word(), name_or_word(vec!["veth-web"]));
    (names, option::of(word()), direction(), direction()).prop_map(
        |((pod, nic, device), why_inside, ingress, egress)| NicCoverage {
            why_inside,
            pod,
            nic,
            device,
            ingress,
            egress,
        },
    )
}

fn any_node() -> impl Strategy<Value = NodeStatus> {
    let way = || name_or_word(vec!["tcx", "clsact", "none"]);
    let side =
        option::of((1..9_u32, way()).prop_map(|(ifindex, attached)| PodSideStatus { ifindex, attached }));
    let any_tap =
        (option::of(name_or_word(vec!["web"])), way(), way(), side, word(), vec(any_session(), 0..3))
            .prop_map(|(name, ingress, egress, side, nic, sessions)| {
                let mut of = tap(&name.clone().unwrap_or_default(), &sessions);
                (of.attached, of.pod_side) = (AttachedStatus { ingress, egress }, side);
                TapStatus { pod: of.pod.filter(|_| name.is_some()), nic, ..of }
            });
    let pod = || name_or_word(vec!["shop/web"]);
    let any_skipped = (
        option::of(pod()),
        option::of(word()),
        option::of(word()),
        name_or_word(vec!["Hidden"]),
        word(),
        word(),
    )
        .prop_map(|(pod, nic, mirror, reason, message, remedy)| Finding {
            pod,
            nic,
            mirror,
            target: None,
            reason,
            message,
            remedy,
        });
    let any_bad =
        (pod(), word()).prop_map(|(pod, message)| Finding { pod: Some(pod), message, ..Finding::default() });
    let not_asked = (word(), word(), word()).prop_map(|(reason, message, remedy)| Finding {
        reason,
        message,
        remedy,
        ..Finding::default()
    });
    let any_known = (pod(), option::of(not_asked)).prop_map(|(pod, not_asked)| KnownPod { pod, not_asked });
    let any_unreached = (name_or_word(vec!["default", "ids"]), word())
        .prop_map(|(target, message)| Finding { target: Some(target), message, ..Finding::default() });
    let notes = (
        vec(any_skipped, 0..3),
        vec(any_bad, 0..2),
        option::of(vec(any_known, 0..3)),
        vec(any_unreached, 0..2),
        vec(word(), 0..2),
        vec(any_coverage(), 0..3),
    )
        .prop_map(|(not_mirrored, bad_annotations, pods, unreached_targets, failures, coverage)| Notes {
            not_mirrored,
            bad_annotations,
            pods,
            unreached_targets,
            failures,
            coverage,
        });
    let kind = sample::select(vec!["mirror0", "pod:shop/ids", "stream"]);
    let any_target =
        (name_or_word(vec!["default", "ids", "live"]), kind, option::of(1..9_u32), any::<bool>())
            .prop_map(|(name, kind, ifindex, up)| target(&name, kind, ifindex, up));
    (vec(any_tap, 0..3), option::of(notes), vec(any_target, 0..3), any::<bool>()).prop_map(
        |(taps, notes, targets, agent_running)| NodeStatus {
            version: "1".into(),
            agent_running,
            targets,
            taps,
            notes,
        },
    )
}

proptest! {
    /// For any status, the text contains everything about the pod: each NIC and mirror, each counter, each reason.
    #[test]
    fn nothing_of_the_pod_is_left_out(status in any_node()) {
        let subject = Subject::of(&status, "shop/web");
        let text = match status.explain("shop/web") {
            Ok(text) => text,
            Err(message) => {
                let is_known = !subject.taps.is_empty() || subject.known.is_some();
                prop_assert!(!is_known && subject.skipped.is_empty() && subject.bad.is_empty());
                prop_assert!(message.contains("shop/web"), "{}", message);
                return Ok(());
            }
        };
        prop_assert!(text.chars().all(|char| char == '\n' || !char.is_control()), "{:?}", text);
        prop_assert_eq!(text.lines().filter(|line| line.starts_with("NIC ")).count(), subject.taps.len());
        let mut expected = Vec::new();
        for tap in &subject.taps {
            expected.push(format!("NIC {}", printable(&tap.nic)));
            let of_ingress = tap.pod_side.as_ref().map_or(&tap.attached.egress, |side| &side.attached);
            let ifindex = tap.pod_side.as_ref().map(|side| side.ifindex);
            expected.extend(ifindex.map(|ifindex| format!("inside the pod, where the NIC has ifindex {ifindex}.")));
            expected.extend([&tap.attached.ingress, of_ingress].map(|way| match way.as_str() {
                "none" => "No podmirror program runs at its hook".to_owned(),
                way => printable(&format!("({way})")),
            }));
        }
        for tap in subject.taps.iter().filter(|tap| tap.pod_side.is_some()) {
            let why = coverage::of(&status, tap).and_then(|nic| nic.why_inside.as_ref());
            expected.extend(why.map(|why| printable(&sentence(why))));
        }
        for nic in subject.taps.iter().filter_map(|tap| coverage::of(&status, tap)) {
            for of in [&nic.ingress, &nic.egress] {
                expected.extend([&of.state, &sentence(&of.message)].map(|text| printable(text)));
                expected.push(format!("carried {} of these packets, and the tap has seen {}.", of.carried, of.seen));
            }
        }
        for (_, session) in subject.sessions() {
            expected.push(format!("  Mirror {}\n", printable(&session.mirror)));
            for (key, value) in &session.settings {
                let sentence = Setting::named(key).unwrap().sentence(value);
                let left = session.left.packets.filter(|_| ["packets", "bytes"].contains(&key.as_str()));
                let left = left.map(|left| format!("; {left} are left")).unwrap_or_default();
                expected.push(printable(&format!("{sentence}{left}")));
            }
            expected.extend(session.ended.iter().map(|budget| printable(&format!("its budget of {budget} is used up"))));
            for CounterStatus { direction, result, packets, bytes } in &session.counters {
                expected.push(printable(&format!("{direction} {packets} packets ({bytes} bytes)")));
                expected.push(format!("      {}: ", printable(result)));
            }
            let target = status.targets.iter().find(|target| target.name == session.target);
            let unreached = status.notes.iter().flat_map(|notes| &notes.unreached_targets);
            let unreached = unreached.filter(|of| of.target.as_ref() == Some(&session.target));
            let unreached = unreached.filter(|_| target.is_some_and(|of| !of.stream));
            expected.extend(unreached.map(|of| printable(&sentence(&of.message))));
        }
        for Finding { reason, message, remedy, .. } in &subject.skipped {
            expected.extend([reason, message, remedy].map(|text| printable(text)));
        }
        expected.extend(subject.bad.iter().map(|bad| printable(&bad.message)));
        if let Some(Finding { reason, message, remedy, .. }) = subject.known.and_then(|known| known.not_asked.as_ref()) {
            expected.extend([reason, &sentence(message), remedy].map(|text| printable(text)));
        }
        for part in expected {
            prop_assert!(text.contains(&part), "no {:?} in\n{}", part, text);
        }
    }
}
