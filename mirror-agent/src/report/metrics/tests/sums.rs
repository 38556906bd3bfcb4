//! The sums over a namespace, scrape by scrape.

use std::sync::Arc;

use super::*;

const SESSIONS: &str = "direction=\"egress\",mirror=\"default\",namespace=\"shop\",nic=\"\",pod=\"\"";
const NICS: &str = "direction=\"ingress\",namespace=\"shop\",nic=\"\",pod=\"\"";

/// The metrics without names of pods and NICs, of the given taps and reports.
struct World {
    taps: Arc<Mutex<Vec<TapReadout>>>,
    reports: watch::Sender<Arc<Report>>,
    metrics: Metrics,
}

impl World {
    fn new() -> Self {
        let taps = Arc::new(Mutex::new(Vec::new()));
        let reports = watch::Sender::new(Arc::new(Report::default()));
        let of_maps = Arc::clone(&taps);
        let read: Read = Box::new(move || {
            let taps = of_maps.lock().unwrap().clone();
            anyhow::Ok((readout(BTreeMap::new(), taps), Vec::new()))
        });
        let metrics = Metrics {
            counted: Registry::new(),
            scrapes: Mutex::new((read, None)),
            reports: reports.subscribe(),
            recorders: watch::Sender::new(BTreeMap::new()).subscribe(),
            has_pods: false,
        };
        Self { taps, reports, metrics }
    }

    /// Scrapes while these taps exist, whose NICs have carried these packets.
    fn scrape<const N: usize>(&self, taps: [TapReadout; N], carried: [u64; N]) -> Series {
        let coverage = taps.iter().zip(carried).map(|(tap, carried)| {
            let judged = Judged { state: State::Covered, since: Instant::now(), seen: carried, carried };
            let nic = NicCoverage {
                pod: tap.owner.pod.clone().unwrap(),
                nic: "eth0".into(),
                device: "veth1".into(),
                inside: None,
                directions: [judged.clone(), judged],
            };
            (tap.device, nic)
        });
        let report = Report { coverage: coverage.collect(), ..Report::default() };
        *self.taps.lock().unwrap() = taps.into();
        self.reports.send_replace(Arc::new(report));
        let text = self.metrics.text().unwrap();
        let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
        Series(lines.map(|(series, value)| (series.to_owned(), value.to_owned())).collect())
    }
}

/// The value of each series of a scrape.
struct Series(BTreeMap<String, String>);

impl Series {
    fn get(&self, name: &str, labels: &str) -> Option<u64> {
        self.0.get(&format!("podmirror_{name}{{{labels}}}")).map(|value| value.parse().unwrap())
    }

    /// The packets of the sessions with this target.
    fn packets(&self, target: &str) -> Option<u64> {
        self.get("packets_total", &format!("{SESSIONS},result=\"copied\",target=\"{target}\""))
    }

    /// The packets that NICs have carried to their pods.
    fn carried(&self) -> Option<u64> {
        self.get("nic_carried_packets_total", NICS)
    }
}

/// A tap of a pod of its own, and the packets of its session.
fn session(serial: u32, packets: u64) -> TapReadout {
    let mut tap = tap(serial, Some(pod(&format!("web-{serial}"), &serial.to_string())), packets);
    tap.sessions[0].serial = serial;
    tap
}

#[test]
fn a_pod_that_ends_does_not_lower_its_namespaces_sum() {
    let world = World::new();
    // An earlier agent can have shown these packets.
    let series = world.scrape([session(1, 5), session(2, 6)], [50, 60]);
    assert_eq!((series.packets("default"), series.carried()), (Some(0), Some(0)));
    assert_eq!(series.get("nic_coverage", &format!("{NICS},state=\"Covered\"")), Some(2));
    let series = world.scrape([session(1, 8), session(2, 6), session(3, 10)], [55, 60, 9]);
    assert_eq!((series.packets("default"), series.carried()), (Some(13), Some(14)));

    let series = world.scrape([session(2, 8), session(3, 10)], [61, 9]);
    assert_eq!((series.packets("default"), series.carried()), (Some(15), Some(15)));
    assert_eq!(
        series.get("bytes_total", &format!("{SESSIONS},result=\"copied\",target=\"default\"")),
        Some(15 * 60)
    );
    assert_eq!(series.get("copied_bytes_total", &format!("{SESSIONS},target=\"default\"")), Some(15 * 50));

    // A session has another target, and the tap of its NIC has changed sides.
    let mut moved = session(2, 9);
    moved.sessions[0].session.target = TargetName("ids".parse().unwrap());
    let series = world.scrape([moved, session(3, 10)], [4, 9]);
    assert_eq!((series.packets("default"), series.packets("ids")), (Some(15), Some(1)));
    assert_eq!(series.carried(), Some(19));

    // A sum without parts ends, and nothing remembers it.
    let series = world.scrape([], []);
    assert_eq!((series.packets("default"), series.carried()), (None, None));
    let series = world.scrape([session(4, 2)], [3]);
    assert_eq!((series.packets("default"), series.carried()), (Some(2), Some(3)));
}

#[test]
fn a_direction_that_a_mirror_copies_later_adds_only_later_packets() {
    let world = World::new();
    let of_egress = || {
        let mut tap = session(1, 5);
        tap.sessions[0].session.directions = Directions::Egress;
        tap
    };
    assert_eq!(world.scrape([of_egress()], [50]).carried(), None);
    assert_eq!(world.scrape([of_egress(), session(2, 5)], [60, 5]).carried(), Some(5));
    assert_eq!(world.scrape([session(1, 5), session(2, 5)], [61, 5]).carried(), Some(6));
}
