//! An agent is killed between two of the writes of a settings change. Before and after the next agent starts, packets
//! are copied as `status` says: which ones, to which target, how many, and how much of each.

use std::{array, cell::Cell, env, fs, sync::LazyLock, time::Instant};

use mirror_core::settings::{self, Setting};
use mirror_tests::{
    Agent, Capture, Lab, PodNs, PodSpec, PodsFile, SOON, SessionStatus, check, eventually, random::Random,
};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::KILL_AT;
use crate::{MIRROR, any_mode, pod_side::up};

/// The number of annotations.
const COUNT: usize = 2 + settings::SETTINGS.len();
/// The annotations, and their values as `status` shows them. An empty value means no annotation.
static SETTINGS: LazyLock<[(&str, Vec<&str>); COUNT]> = LazyLock::new(|| {
    let mut keys =
        ["mirror", "target"].into_iter().chain(settings::SETTINGS.iter().map(|setting| setting.key));
    array::from_fn(|_| {
        let key = keys.next().unwrap();
        (key, values(key))
    })
});
const REQUESTS: &str = "icmp[0] = 8";
const ANSWERS: &str = "icmp[0] = 0";

/// The values of an annotation.
fn values(key: &str) -> Vec<&'static str> {
    match key {
        "mirror" => vec!["both", "ingress", "egress"],
        "target" => vec!["default", "ids"],
        "filter" => vec!["icmp", REQUESTS, ANSWERS],
        "sample" => vec!["", "0.0001%"],
        "rate" => vec!["", "1pps", "1Mpps"],
        "snaplen" => vec!["", "100", "200"],
        "packets" => vec!["", "5", "1k"],
        "bytes" => vec!["", "2kB", "1MB"],
        "duration" => vec!["", "1h", "2h"],
        key => vec!["", Setting::named(key).unwrap().example],
    }
}

/// For each setting, the index of its value.
type Wanted = [usize; COUNT];

/// The targets' devices: those of `default` and `ids`, and that of a target which replaces `ids`.
const DEVICES: [&str; 3] = [MIRROR, "ids0", "late0"];
const IDS: [&str; 2] = ["--define-target", "ids=ids0"];
const LATE: [&str; 2] = ["--define-target", "late=late0"];

const PINGS: usize = 10;
const DATA: usize = 200;
/// Headers of Ethernet, IPv4 and ICMP, and the data.
const FRAME: usize = 14 + 20 + 8 + DATA;

struct Scene {
    captures: [Capture; 3],
    /// The number of copies on each device at the last call of [`Scene::copies`].
    seen: Cell<[usize; 3]>,
    pods: PodsFile,
    web: PodNs,
    db: PodNs,
    lab: Lab,
}

impl Scene {
    fn new() -> Self {
        let lab = Lab::new("settings");
        lab.bridge("br0");
        for device in DEVICES {
            up(&lab, device, &format!("{device}-end"));
        }
        let [web, db] = ["web", "db"].map(|name| lab.pod(name, "br0"));
        let captures = DEVICES.map(|device| Capture::start(lab.node(), device));
        Self { captures, seen: Cell::default(), pods: PodsFile::new(&lab, &[]), web, db, lab }
    }

    /// Writes the pod with these settings.
    fn ask(&self, wanted: &Wanted) {
        let values = SETTINGS.iter().zip(wanted).map(|((key, values), value)| (*key, values[*value]));
        let spec = values.filter(|(_, value)| !value.is_empty()).fold(PodSpec::of(&self.web), |spec, of| {
            let (key, value) = if of == ("mirror", "both") { ("mirror", "true") } else { of };
            spec.annotated(&format!("podmirror.io/{key}"), value)
        });
        self.pods.write(&[spec]);
    }

    fn session(&self) -> Result<SessionStatus, String> {
        let status = self.lab.try_status()?;
        let tap = status.taps.iter().find(|tap| tap.is_attached()).ok_or("no tap")?;
        Ok(tap.sessions.first().ok_or("no session")?.clone())
    }

    /// Checks that `status` shows these settings.
    fn shows(&self, wanted: &Wanted) -> Result<(), String> {
        let session = self.session()?;
        let is_as = |((key, values), value): (&(&str, Vec<&str>), &usize)| {
            let value = values[*value];
            match *key {
                "mirror" => session.direction == value,
                "target" => session.target == value,
                key => session.settings[key].as_str().unwrap_or_default() == value,
            }
        };
        check(SETTINGS.iter().zip(wanted).all(is_as), || format!("{wanted:?} is not shown by {session:?}"))
    }

    /// The lengths of the IPv4 packets that the devices have received since the last call.
    fn copies(&self) -> [Vec<usize>; 3] {
        let all = self.captures.each_ref().map(|capture| {
            let packets = capture.in_order().into_iter().filter(|frame| frame.bytes[12..14] == [8, 0]);
            packets.map(|frame| frame.length).collect::<Vec<_>>()
        });
        let seen = self.seen.replace(all.each_ref().map(Vec::len));
        let mut seen = seen.into_iter();
        all.map(|lengths| lengths.into_iter().skip(seen.next().unwrap_or_default()).collect())
    }

    /// Checks that packets are copied as `status` says.
    #[track_caller]
    fn copies_as_told(&self, when: &str) {
        let session = self.session().unwrap();
        let device = self.lab.status().target(&session.target).device;
        let begun = Instant::now();
        self.web.ping(self.db.v4(), PINGS, DATA);
        let seconds = begun.elapsed().as_secs() as usize + 1;
        let told = &session.settings;
        let matching =
            [("egress", REQUESTS), ("ingress", ANSWERS)].into_iter().filter(|(direction, filter)| {
                ["both", direction].contains(&&*session.direction)
                    && ["icmp", filter].contains(&told["filter"].as_str().unwrap())
            });
        let matching = if told["sample"].is_null() { PINGS * matching.count() } else { 0 };
        let left = |budget: &Value| budget.as_u64().map_or(usize::MAX, |left| left as usize);
        let most =
            matching.min(left(&session.left["packets"])).min(left(&session.left["bytes"]).div_ceil(FRAME));
        let expected = if told["rate"] == "1pps" { 0..=most.min(1 + seconds) } else { most..=most };
        let length = told["snaplen"].as_str().map_or(FRAME, |bytes| FRAME.min(bytes.parse().unwrap()));
        for (at, new) in DEVICES.into_iter().zip(self.copies()) {
            let expected = if at == device { expected.clone() } else { 0..=0 };
            assert!(
                expected.contains(&new.len()) && new.iter().all(|copy| *copy == length),
                "{when}: {at} has got {new:?} and not {expected:?} of {length} bytes: {session:?}"
            );
        }
    }

    /// Kills the agent at a map change, while it changes the settings. Returns whether it was killed: it may have
    /// finished before.
    fn is_killed(&self, from: &Wanted, to: &Wanted, step: usize) -> bool {
        let when = |what: &str| format!("{from:?} to {to:?}, killed at change {step}, {what}");
        let file = self.lab.files().join("steps");
        let wait = self.lab.files().join("steps.wait");
        fs::write(&wait, "").unwrap();
        self.ask(from);
        let runner = [KILL_AT, &format!("map:{step}"), file.to_str().unwrap()];
        let mut agent = Agent::run_by(&runner, &self.lab, any_mode(), &self.pods, &IDS);
        eventually(3 * SOON, || self.shows(from));
        fs::remove_file(&wait).unwrap();
        self.ask(to);
        eventually(3 * SOON, || if agent.has_ended() { Ok(()) } else { self.shows(to) });
        let is_killed = agent.end().code() == Some(128 + Signal::SIGKILL as i32);
        self.copies_as_told(&when("before the next agent"));
        // The next agent may have another target instead of the old one.
        let late = SETTINGS[1].1[to[1]] == "default";
        let agent = Agent::run(&self.lab, any_mode(), &self.pods, if late { &LATE } else { &IDS });
        self.lab.wait_status(|status| check(status.agent_running, || "no agent".into()));
        eventually(SOON, || self.shows(to));
        self.copies_as_told(&when("with the next agent"));
        agent.stop();
        is_killed
    }
}

fn place(key: &str, value: &str) -> (usize, usize) {
    let setting = SETTINGS.iter().position(|(of, _)| *of == key).unwrap();
    (setting, SETTINGS[setting].1.iter().position(|of| *of == value).unwrap())
}

/// Settings with these values, and the first value in the list for all others.
fn wanted(values: &[(&str, &str)]) -> Wanted {
    let mut wanted = Wanted::default();
    for (key, value) in values {
        let (setting, value) = place(key, value);
        wanted[setting] = value;
    }
    wanted
}

/// Changes these two settings to other values.
fn changed(from: &Wanted, settings: [usize; 2], random: &mut Random) -> Wanted {
    let mut to = *from;
    for setting in settings {
        let values = SETTINGS[setting].1.len();
        to[setting] = (from[setting] + 1 + random.below(values - 1)) % values;
    }
    to
}

/// Number of random pairs of settings.
const PAIRS: usize = 3;

/// Kills at each map change of a change of target and rate, and at a random one of each change of two random settings.
/// With `MIRROR_CRASHES=all`: at each map change, for each setting and each pair.
#[test]
fn a_change_of_settings_is_whole_wherever_the_agent_is_killed() {
    let scene = Scene::new();
    let from = wanted(&[("target", "ids"), ("packets", "1k")]);
    let to = wanted(&[("rate", "1pps"), ("packets", "1k")]);
    let killed = (1..).take_while(|step| scene.is_killed(&from, &to, *step)).count();
    assert!(killed > 2, "{killed} changes of maps");
    let mut random = Random::from_clock("settings");
    let all = env::var("MIRROR_CRASHES").is_ok_and(|points| points == "all");
    let pairs = (0..SETTINGS.len()).flat_map(|a| (a..SETTINGS.len()).map(move |b| [a, b]));
    let mut pairs: Vec<_> = pairs.collect();
    if !all {
        random.shuffle(&mut pairs);
        pairs.truncate(PAIRS);
    }
    for pair in pairs {
        let from = SETTINGS.each_ref().map(|(_, values)| random.below(values.len()));
        let to = changed(&from, pair, &mut random);
        if all {
            (1..).find(|step| !scene.is_killed(&from, &to, *step));
        } else {
            scene.is_killed(&from, &to, 1 + random.below(killed));
        }
    }
    scene.lab.cleanup();
}
