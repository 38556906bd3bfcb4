//! Tests of the metrics that are generated from maps and reports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod sums;

use mirror_common::{
    abi::Counter,
    verdict::{Misfit, Verdict},
};
use mirror_core::{
    coverage::{Doubt, State, Way},
    destination::Destination,
};
use tokio::time::Instant;

use super::*;
use crate::{
    kernel::dataplane::readout::{Count, Readout, RingFill, SessionReadout, TapReadout},
    model::{
        Capacity, Device, DeviceTarget, Directions, Ended, Hidden, IfIndex, MirrorId, Name, NetnsId, Origin,
        Owner, Place, PodId, Program, Session, Target, TargetName,
    },
    report::Judged,
    select::{BadAnnotation, Problem, Skipped, Why},
    settings::{Budget, Settings},
};

/// The series that `fill` registers.
fn lines(fill: impl FnOnce(&Registry)) -> Vec<String> {
    let registry = Registry::new();
    fill(&registry);
    let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

fn of_state(readout: &Readout, drops: &BTreeMap<String, u64>) -> Vec<String> {
    lines(|registry| register_state(registry, readout, drops, &mut Scrape::default()).unwrap())
}

fn of_report(report: &Report, taps: &[TapReadout]) -> Vec<String> {
    lines(|registry| register_report(registry, report, taps, &mut Scrape::default()).unwrap())
}

fn pod(name: &str, uid: &str) -> PodId {
    PodId { uid: uid.into(), namespace: "shop".into(), name: name.into() }
}

fn tap(ifindex: u32, pod: Option<PodId>, packets: u64) -> TapReadout {
    let owner = Owner { pod, nic: "eth0".into(), ..Owner::default() };
    let (direction, verdict) = (Direction::Egress, Verdict::Copied);
    let cut = (direction, Misfit::Cut, Counter { packets: 3, bytes: 4000 });
    let session = |mirror: &str, packets| SessionReadout {
        mirror: MirrorId(mirror.parse().unwrap()),
        session: Session {
            directions: Directions::Both,
            settings: Settings::default(),
            target: TargetName::default(),
            origin: Origin::Policy,
            asked: 0,
            key: None,
        },
        ended: (packets > 100).then_some(Ended::Packets),
        left: Budget::default(),
        serial: 0,
        counts: vec![Count { direction, verdict, packets, bytes: packets * 60 }],
        copied_bytes: [0, packets * 50],
        misfits: if packets > 100 { vec![cut] } else { Vec::new() },
    };
    let mut sessions = vec![session("default", packets)];
    if packets == 7 {
        sessions.push(session("ids", 70));
    }
    TapReadout { device: Device::on_node(IfIndex(ifindex)), pod_side: None, owner, sessions }
}

fn readout(targets: BTreeMap<TargetName, Target>, taps: Vec<TapReadout>) -> Readout {
    let capacity = Capacity { taps: 4096, sessions: 1024, filters: 2048, instructions: 1 << 20 };
    Readout { targets, taps, filters: 2, capacity }
}

#[test]
fn a_pod_and_its_successor_are_one_series_and_an_interface_has_no_pod() {
    let device = |device: &str, ifindex| {
        let destination = device.parse().unwrap();
        let device = device.to_owned();
        Target::Device(DeviceTarget { destination, device, ifindex, up: true, ..DeviceTarget::default() })
    };
    // The stream of a capture would be a new series each time.
    let stream = (TargetName(Name::of_capture(1)), Target::Stream(None));
    let targets = [
        ("default", device("mirror0", Some(IfIndex(9)))),
        ("ids", device("ids0", None)),
        ("live", Target::Stream(None)),
    ];
    let targets = targets.map(|(name, target)| (TargetName(name.parse().unwrap()), target));
    let targets = targets.into_iter().chain([stream]).collect();
    let taps = vec![tap(1, Some(pod("web", "a")), 1000), tap(2, Some(pod("web", "b")), 7), tap(3, None, 5)];
    let drops = [("mirror0".to_owned(), 5), ("eth0".to_owned(), 7)].into();
    let labels = |namespace, pod, mirror| {
        format!(
            "{{direction=\"egress\",mirror=\"{mirror}\",namespace=\"{namespace}\",nic=\"eth0\",pod=\"{pod}\",\
             result=\"copied\",target=\"default\"}}"
        )
    };
    let cut = |namespace, pod, mirror| labels(namespace, pod, mirror).replace("result=\"copied\",", "");
    assert_eq!(
        of_state(&readout(targets, taps), &drops),
        [
            format!("podmirror_bytes_total{} 300", labels("", "", "default")),
            format!("podmirror_bytes_total{} 60420", labels("shop", "web", "default")),
            format!("podmirror_bytes_total{} 4200", labels("shop", "web", "ids")),
            format!("podmirror_copied_bytes_total{} 250", cut("", "", "default")),
            format!("podmirror_copied_bytes_total{} 50350", cut("shop", "web", "default")),
            format!("podmirror_copied_bytes_total{} 3500", cut("shop", "web", "ids")),
            format!("podmirror_cut_bytes_total{} 4000", cut("shop", "web", "default")),
            format!("podmirror_cut_packets_total{} 3", cut("shop", "web", "default")),
            "podmirror_ended_sessions 1".into(),
            "podmirror_filter_instructions 0".into(),
            "podmirror_filter_instructions_max 1048576".into(),
            "podmirror_filters 2".into(),
            "podmirror_filters_max 2048".into(),
            format!("podmirror_packets_total{} 5", labels("", "", "default")),
            format!("podmirror_packets_total{} 1007", labels("shop", "web", "default")),
            format!("podmirror_packets_total{} 70", labels("shop", "web", "ids")),
            "podmirror_pod_side_taps 0".into(),
            "podmirror_sessions 4".into(),
            "podmirror_sessions_max 1024".into(),
            "podmirror_stream_readers{target=\"live\"} 0".into(),
            "podmirror_taps_max 4096".into(),
            "podmirror_target_dropped_frames_total{destination=\"mirror0\",target=\"default\"} 5".into(),
            "podmirror_target_up{destination=\"ids0\",target=\"ids\",type=\"device\"} 0".into(),
            "podmirror_target_up{destination=\"mirror0\",target=\"default\",type=\"device\"} 1".into(),
        ]
    );
}

#[test]
fn the_type_of_a_target_is_its_field_in_a_mirror_target() {
    for (kind, destination) in [
        ("device", "ids0"),
        ("pod", "pod:security/suricata"),
        ("vxlan", "vxlan:10.9.0.5:14789/vni=77"),
        ("geneve", "geneve:10.9.0.5:6081/vni=77"),
        ("gre", "gre:10.9.0.5/key=77"),
        ("erspan", "erspan:10.9.0.5/session=77"),
    ] {
        let destination: Destination = destination.parse().unwrap();
        let expected = format!(
            "podmirror_target_up{{destination=\"{destination}\",target=\"default\",type=\"{kind}\"}} 0"
        );
        let target = Target::Device(DeviceTarget { destination, ..DeviceTarget::default() });
        let readout = readout([(TargetName::default(), target)].into(), Vec::new());
        let lines = of_state(&readout, &BTreeMap::new());
        assert!(lines.contains(&expected), "{expected}: {lines:?}");
    }
}

/// Of these taps, one is on the node side of a veth, one sees packets to its pod at the NIC, and one is at the NIC.
#[test]
fn taps_with_a_hook_inside_the_pod_are_counted() {
    let nic = Device::in_pod(NetnsId { dev: 4, ino: 7 }, IfIndex(2));
    let taps = vec![
        tap(1, Some(pod("web", "a")), 1),
        TapReadout { pod_side: Some(nic), ..tap(2, Some(pod("db", "b")), 1) },
        TapReadout { device: nic, ..tap(3, Some(pod("dpdk", "c")), 1) },
    ];
    let readout = readout(BTreeMap::new(), taps);
    let lines = of_state(&readout, &BTreeMap::new());
    assert!(lines.contains(&"podmirror_pod_side_taps 2".to_owned()), "{lines:?}");
}

/// A pod and its successor can be in different networks for a moment. Two series with the labels of one NIC would break
/// queries that join them.
#[test]
fn a_nic_has_one_series_with_its_network() {
    let with_network = |ifindex, uid, network: Option<&str>| {
        let mut tap = tap(ifindex, Some(pod("web", uid)), 1);
        tap.owner.network = network.map(str::to_owned);
        tap
    };
    let mut captured = tap(4, Some(pod("db", "c")), 1);
    captured.owner.network = Some("shop/fast".into());
    captured.sessions[0].mirror = MirrorId(Name::of_capture(1));
    let taps = vec![
        with_network(1, "a", None),
        with_network(2, "a", Some("shop/slow")),
        with_network(3, "b", Some("shop/fast")),
        captured,
    ];
    let readout = readout(BTreeMap::new(), taps);
    let lines = of_state(&readout, &BTreeMap::new());
    let infos: Vec<_> = lines.iter().filter(|line| line.starts_with("podmirror_nic_info")).collect();
    assert_eq!(
        infos,
        ["podmirror_nic_info{namespace=\"shop\",network=\"shop/fast\",nic=\"eth0\",pod=\"web\"} 1"]
    );
}

/// `web` has a mirror at another NIC, and `db` only a capture.
#[test]
fn a_pod_with_two_skipped_nics_is_one_skipped_pod_and_one_with_a_mirror_is_mirrored_in_part() {
    let mut captured = tap(2, Some(pod("db", "db")), 1);
    captured.sessions[0].mirror = MirrorId(Name::of_capture(1));
    let taps = [tap(1, Some(pod("web", "web")), 1), captured, tap(3, None, 1)];
    let skipped = |name, nic: Option<&str>, why| Skipped {
        pod: Some(pod(name, name)),
        nic: nic.map(str::to_owned),
        mirror: None,
        why,
    };
    let kind = |kind: &str| Why::NoHostInterface(kind.into());
    let report = Report {
        wanted: 4,
        attached: 3,
        skipped: [
            skipped("web", Some("eth0"), kind("macvlan")),
            skipped("web", Some("eth1"), kind("ipvlan")),
            skipped("db", Some("eth0"), kind("macvlan")),
            skipped("host", None, Why::HostNetwork { is_asked: true }),
        ]
        .into(),
        bad: [BadAnnotation {
            pod: pod("web", "web"),
            place: Place::Pod,
            key: "k".into(),
            value: "v".into(),
            problem: Problem::Key,
        }]
        .into(),
        failures: ["one".into(), "two".into()].into(),
        ..Report::default()
    };
    assert_eq!(
        of_report(&report, &taps),
        [
            "podmirror_bad_annotations 1",
            "podmirror_pending_failures 2",
            "podmirror_pods_not_mirrored{extent=\"part\",reason=\"NoHostInterface\"} 1",
            "podmirror_pods_not_mirrored{extent=\"whole\",reason=\"HostNetwork\"} 1",
            "podmirror_pods_not_mirrored{extent=\"whole\",reason=\"NoHostInterface\"} 1",
            "podmirror_taps 3",
            "podmirror_taps_desired 4",
        ]
    );
}

/// The state is a label, so a NIC always has one series for each direction that a mirror copies.
#[test]
fn each_direction_of_a_nic_has_one_series_with_its_coverage() {
    let judged = |state| Judged { state, since: Instant::now(), seen: 1, carried: 2 };
    let nic = |state| NicCoverage {
        pod: pod("web", "a"),
        nic: "eth0".into(),
        device: "veth1".into(),
        inside: None,
        directions: [judged(state), judged(State::Covered)],
    };
    let mut taps = [tap(1, Some(pod("web", "a")), 1)];
    for (state, name) in [
        (State::Bypassed(Way::Peer), "Bypassed"),
        (State::Hidden(Hidden::Program("first".into())), "Hidden"),
        (State::NoHook, "NoHook"),
        (State::Unknown(Doubt::Idle), "Unknown"),
        (State::Covered, "Covered"),
    ] {
        let coverage = [(Device::on_node(IfIndex(1)), nic(state))].into();
        let report = Report { coverage, ..Report::default() };
        let lines = of_report(&report, &taps);
        let series: Vec<_> = lines.iter().filter(|line| line.starts_with("podmirror_nic_coverage")).collect();
        let expected = [("egress", "Covered"), ("ingress", name)].map(|(direction, state)| {
            format!(
                "podmirror_nic_coverage{{direction=\"{direction}\",namespace=\"shop\",nic=\"eth0\",pod=\"web\",\
                 state=\"{state}\"}} 1"
            )
        });
        assert_eq!(series, expected.iter().collect::<Vec<_>>());
        for (name, count) in [("seen", 1), ("carried", 2)] {
            let start = format!("podmirror_nic_{name}_packets_total{{direction=\"egress\"");
            let line = lines.iter().find(|line| line.starts_with(&start)).unwrap();
            assert!(line.ends_with(&format!(" {count}")), "{line}");
        }
    }
    // Only a capture copies ingress now.
    let capture = MirrorId(Name::of_capture(1));
    let captured = SessionReadout { mirror: capture, ..taps[0].sessions[0].clone() };
    taps[0].sessions[0].session.directions = Directions::Egress;
    taps[0].sessions.push(captured);
    let coverage = [(Device::on_node(IfIndex(1)), nic(State::Bypassed(Way::Peer)))].into();
    let report = Report { coverage, ..Report::default() };
    let lines = of_report(&report, &taps);
    let of_nic: Vec<_> = lines.iter().filter(|line| line.starts_with("podmirror_nic_")).collect();
    assert!(of_nic.len() == 3 && of_nic.iter().all(|line| line.contains("\"egress\"")), "{of_nic:?}");
}

#[test]
fn a_ring_is_told_by_the_name_of_its_stream_unless_it_is_of_a_capture() {
    let fill = |name, used| RingFill { target: TargetName(name), used, size: 4 << 20 };
    let rings = [fill("live".parse().unwrap(), 136), fill(Name::of_capture(1), 7)];
    assert_eq!(
        lines(|registry| register_rings(registry, &rings).unwrap()),
        [
            "podmirror_stream_ring_size_bytes{target=\"live\"} 4194304",
            "podmirror_stream_ring_used_bytes{target=\"live\"} 136",
        ]
    );
    let fill = Fill { used: 70, size: 99, oldest_ns: 1_767_225_600_900_000_000 };
    let fills = [("live".parse().map(TargetName).unwrap(), fill)].into();
    assert_eq!(
        lines(|registry| register_recorders(registry, &fills).unwrap()),
        [
            "podmirror_recorder_oldest_timestamp_seconds{target=\"live\"} 1767225600",
            "podmirror_recorder_size_bytes{target=\"live\"} 99",
            "podmirror_recorder_used_bytes{target=\"live\"} 70",
        ]
    );
}

#[test]
fn ops_are_counted_by_kind_and_only_attachments_that_succeed_are_timed() {
    let metrics = LoopMetrics::new().unwrap();
    let attach = Op::Attach(Device::on_node(IfIndex(1)), Program::TapEgress);
    let took = Duration::from_millis(3);
    metrics.op(&attach, took, false);
    metrics.op(&attach, took, true);
    metrics.op(&Op::RemoveTap(Device::on_node(IfIndex(1))), took, true);
    metrics.op(&Op::RemoveTap(Device::on_node(IfIndex(1))), took, false);
    assert_eq!(
        lines(|registry| register(registry, &metrics.op_failures).unwrap()),
        {
            let mut names = Op::NAMES;
            names.sort_unstable();
            names
        }
        .map(|op| {
            let failures = u8::from(matches!(op, "attach" | "remove_tap"));
            format!("podmirror_op_failures_total{{op=\"{op}\"}} {failures}")
        })
    );
    assert_eq!((metrics.attach.get_sample_count(), metrics.attach.get_sample_sum()), (1, 0.003));
}

#[test]
fn a_round_that_fails_is_not_the_last_successful_one() {
    let metrics = LoopMetrics::new().unwrap();
    let took = Duration::from_millis(3);
    let now = || i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
    metrics.round(took, false);
    assert_eq!(metrics.last_success.get(), 0);
    let before = now();
    metrics.round(took, true);
    let at = metrics.last_success.get();
    assert!((before..=now()).contains(&at), "{at}");
    metrics.last_success.set(1);
    metrics.round(took, false);
    assert_eq!((metrics.last_success.get(), metrics.round.get_sample_count()), (1, 3));
}

#[test]
fn requests_that_fail_are_counted_by_code_and_the_first_without_an_answer_begins_at_zero() {
    let metrics = LoopMetrics::new().unwrap();
    let counted = || lines(|registry| register(registry, &metrics.request_errors).unwrap());
    assert_eq!(counted(), Vec::<String>::new(), "an agent without an API server has no series");
    let failed = metrics.request_failed();
    assert_eq!(counted(), ["podmirror_api_request_errors_total{code=\"none\"} 0"]);
    for code in [Some(403), None, Some(409), Some(403)] {
        failed(code);
    }
    assert_eq!(
        counted(),
        [
            "podmirror_api_request_errors_total{code=\"403\"} 2",
            "podmirror_api_request_errors_total{code=\"409\"} 1",
            "podmirror_api_request_errors_total{code=\"none\"} 1",
        ]
    );
}
