//! The benchmark with traffic works: a quick run writes files that are well formed. No figure is judged. Run by `cargo
//! xtask test --level netns`.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Output},
};

use mirror_test_traffic::{
    plan::{Contestant, Kind, Way},
    results::{FORMAT, Results},
};

const ROUNDS: usize = 2;

fn traffic(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_traffic")).args(arguments).output().unwrap()
}

/// The namespaces of Labs whose process no longer exists.
fn left_over() -> Vec<String> {
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let of_the_dead = |name: &String| {
        let pid = name.strip_prefix("pm-").and_then(|rest| rest.split('-').next());
        name.contains("-traffic-") && pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists())
    };
    names.filter(of_the_dead).collect()
}

#[test]
fn a_quick_run_writes_a_report() {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().to_str().unwrap();
    let output = traffic(&["--quick", "--seed", "7", "--out", path]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("--seed 7"), "the run can be repeated: {}", text(&output.stdout));
    assert_eq!(left_over(), Vec::<String>::new(), "the run has removed what it made");

    let json = fs::read_to_string(out.path().join("results.json")).unwrap();
    let results: Results = serde_json::from_str(&json).unwrap();
    assert_eq!((results.format, results.rounds, results.quick, results.seed), (FORMAT, ROUNDS, true, 7));
    let scenarios = results.scenarios();
    let ways: BTreeSet<Way> = scenarios.iter().map(|scenario| scenario.way).collect();
    assert_eq!(ways, BTreeSet::from(Way::ALL));
    let present = |contestants: &[Contestant]| {
        contestants.iter().filter(|one| results.contestants.contains(one)).copied().collect::<Vec<_>>()
    };
    assert!(
        results.contestants.contains(&Contestant::Clsact),
        "each kernel has it: {:?}",
        results.contestants
    );
    for scenario in &scenarios {
        for contestant in present(scenario.contestants()) {
            let values = results.values(*scenario, contestant, scenario.kind.metric());
            assert_eq!(values.len(), ROUNDS, "{scenario} {contestant:?}");
            assert!(values.values().all(|value| value.is_finite() && *value > 0.0), "{scenario} {values:?}");
        }
    }
    // The readers have reported their losses.
    let lost = results.samples.iter().filter(|sample| sample.contestant == Contestant::Tcpdump);
    assert!(lost.clone().count() > 0);
    for sample in lost {
        assert!(
            sample.figures.contains_key(&mirror_test_traffic::plan::Metric::ReaderLossPercent),
            "{sample:?}"
        );
    }

    let report = fs::read_to_string(out.path().join("report.md")).unwrap();
    assert!(report.contains("**This is no result**"), "{report}");
    let shown: Vec<&str> = report.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(shown.contains(&"same-node-udp-bandwidth.svg"), "{shown:?}");
    for name in shown {
        let svg = fs::read_to_string(out.path().join(name)).unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{name}: {svg}");
        assert!(svg.matches("<circle").count() > 4, "{name} has dots");
    }
    let kinds: BTreeSet<Kind> = scenarios.iter().map(|scenario| scenario.kind).collect();
    assert!(kinds.len() >= 4, "{kinds:?}");
}

#[test]
fn a_scenario_that_is_not_there_is_named() {
    let output = traffic(&["--only", "upd-bandwidth", "--out", "/nowhere"]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("--only upd-bandwidth") && text.contains("same-node/udp-bandwidth/64"), "{text}");
}
