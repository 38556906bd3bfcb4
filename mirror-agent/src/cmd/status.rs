//! `mirror-agent status`: taps, sessions and counters, read from the pinned maps; and what the running agent adds.
//!
//! Needs no running agent and changes nothing.

use std::collections::BTreeMap;

use anyhow::bail;
use serde::Serialize;

use super::print;
use crate::{
    cli::{OutputFormat, StateArgs, StatusArgs},
    dataplane::{
        hooks::{Hooks, programs_of},
        pins::Pins,
        readout::{Count, Reader, Readout, SessionReadout, TapReadout},
    },
    links::{LinkTable as _, netlink::Netlink},
    mirror_iface::MirrorIface,
    model::{Device, Ended, Name, Program},
    notes::{self, NotMirrored, Notes},
    settings::{Settings, Share},
};

/// The output of `-o json`.
#[derive(Debug, Serialize)]
struct Status {
    version: &'static str,
    /// An agent holds the lock of the pins.
    agent_running: bool,
    targets: Vec<Target>,
    taps: Vec<Tap>,
    /// The notes of the running agent; `null` where no agent runs.
    notes: Option<Notes>,
}

#[derive(Debug, Serialize)]
struct Target {
    name: String,
    /// The mirror interface.
    device: String,
    /// `null`: there is no such interface now.
    ifindex: Option<u32>,
    /// It takes copies.
    up: bool,
}

#[derive(Debug, Serialize)]
struct Tap {
    ifindex: u32,
    device: String,
    /// `null`: an interface that the user named.
    pod: Option<Pod>,
    nic: String,
    attached: Attached,
    sessions: Vec<Session>,
}

#[derive(Debug, Serialize)]
struct Session {
    mirror: String,
    target: String,
    /// Where the mirror was asked for.
    origin: &'static str,
    direction: &'static str,
    settings: Asked,
    /// The settings in words, in the order in which they are decided.
    #[serde(skip)]
    words: Vec<String>,
    /// The budget that is used up, so that nothing is copied any more.
    ended: Option<&'static str>,
    /// The counters that are not zero.
    counters: Vec<Counter>,
}

/// The settings besides the direction; `null`: not set.
#[derive(Debug, Serialize)]
struct Asked {
    filter: Option<String>,
    /// Share of the flows, up to 1.
    sample: Option<f64>,
    /// Packets a second.
    rate_packets: Option<u64>,
    /// Bits a second.
    rate_bits: Option<u64>,
    /// Bytes of a copy.
    snaplen: Option<u32>,
    /// Seconds.
    duration: Option<f64>,
    packets: Option<u64>,
    bytes: Option<u64>,
}

impl From<Settings> for Asked {
    fn from(settings: Settings) -> Self {
        let Settings { filter, sample, seed: _, rate, snaplen, budget } = settings;
        Self {
            filter: filter.map(|filter| filter.text),
            sample: sample.map(|Share(share)| f64::from(share) / (f64::from(u32::MAX) + 1.0)),
            rate_packets: rate.and_then(|rate| rate.packets),
            rate_bits: rate.and_then(|rate| rate.bits),
            snaplen,
            duration: budget.duration.map(|time| time.as_secs_f64()),
            packets: budget.packets,
            bytes: budget.bytes,
        }
    }
}

#[derive(Debug, Serialize)]
struct Pod {
    uid: String,
    namespace: String,
    name: String,
}

/// How our program runs at each tc hook: `tcx`, `clsact` or `none`.
#[derive(Debug, Serialize)]
struct Attached {
    ingress: &'static str,
    egress: &'static str,
}

impl Default for Attached {
    fn default() -> Self {
        Self { ingress: "none", egress: "none" }
    }
}

#[derive(Debug, Serialize)]
struct Counter {
    direction: &'static str,
    verdict: &'static str,
    packets: u64,
    bytes: u64,
}

impl From<Count> for Counter {
    fn from(Count { direction, verdict, packets, bytes }: Count) -> Self {
        Self { direction: direction.name(), verdict: verdict.name(), packets, bytes }
    }
}

/// Prints the status.
pub async fn status(args: StatusArgs) -> anyhow::Result<()> {
    let StatusArgs { output, state: StateArgs { bpffs } } = args;
    let pins = Pins::new(&bpffs);
    if !pins.exist() {
        if let Some(version) = pins.other_versions()?.last() {
            bail!(
                "the mirror on this node is that of another version of the agent: its maps are in {}; ask that agent, \
                 or start this one, which takes the mirror over",
                pins.maps_of(*version).display()
            );
        }
        bail!(
            "nothing is mirrored: no maps in {}; start one with `mirror-agent run`, or tell where with --bpffs",
            pins.maps().display()
        );
    }
    let status = read(&pins).await?;
    let text = match output {
        OutputFormat::Json => serde_json::to_string_pretty(&status)? + "\n",
        OutputFormat::Table => table(&status),
    };
    print(&text)
}

async fn read(pins: &Pins) -> anyhow::Result<Status> {
    let mut reader = Reader::open(pins)?;
    let mut attached = attached(pins, reader.devices()?).await?;
    // After the hooks: the agent attaches last, so a hook is never shown beside sessions that are not written yet.
    let Readout { targets, taps: entries } = reader.read()?;
    // The pinned targets are those that the last agent saw; the devices are those of now.
    let devices = Netlink::new()?.snapshot(&[]).await?;
    let targets = targets.into_iter().map(|(name, target)| {
        let target = MirrorIface::new(&target.device, None).target(&devices);
        let ifindex = target.ifindex.map(|ifindex| ifindex.0);
        Target { name: name.to_string(), device: target.device, ifindex, up: target.up }
    });
    let taps = entries.into_iter().map(|TapReadout { device, owner, sessions }| Tap {
        ifindex: device.ifindex.0,
        device: owner.device,
        pod: owner.pod.map(|pod| Pod { uid: pod.uid, namespace: pod.namespace, name: pod.name }),
        nic: owner.nic,
        attached: attached.remove(&device).unwrap_or_default(),
        sessions: sessions.into_iter().map(Session::from).collect(),
    });
    let taps = taps.collect();
    let agent = Pins::connect();
    Ok(Status {
        version: env!("PODMIRROR_VERSION"),
        agent_running: agent.is_some(),
        targets: targets.collect(),
        taps,
        notes: agent.and_then(notes::read),
    })
}

/// How our programs run at the hooks of the devices.
async fn attached(pins: &Pins, devices: Vec<Device>) -> anyhow::Result<BTreeMap<Device, Attached>> {
    let ours = programs_of(pins)?;
    let hooks = Hooks::new(pins.clone())?;
    let mut attached = BTreeMap::<_, Attached>::new();
    for device in devices {
        let Attached { ingress, egress } = attached.entry(device).or_default();
        for (name, program) in [(ingress, Program::TapIngress), (egress, Program::TapEgress)] {
            if let Some(method) = hooks.attached(device.ifindex, program).await?.method(&ours) {
                *name = method.name();
            }
        }
    }
    Ok(attached)
}

impl From<SessionReadout> for Session {
    fn from(SessionReadout { mirror, session, ended, counts }: SessionReadout) -> Self {
        Self {
            mirror: mirror.to_string(),
            target: session.target.to_string(),
            origin: session.origin.name(),
            direction: session.directions.name(),
            words: session.settings.words(),
            settings: session.settings.into(),
            ended: ended.map(Ended::name),
            counters: counts.into_iter().map(Counter::from).collect(),
        }
    }
}

const COLUMNS: [&str; 11] = [
    "POD",
    "NIC",
    "DEVICE",
    "HOOKS",
    "MIRROR",
    "TARGET",
    "MIRRORED",
    "DIRECTION",
    "VERDICT",
    "PACKETS",
    "BYTES",
];
/// How many of [`COLUMNS`] say which session a row is about.
const HEAD: usize = 7;

fn table(status: &Status) -> String {
    let Status { version, agent_running, targets, taps, notes } = status;
    let agent = if *agent_running { "running" } else { "not running" };
    let mut text = format!("agent             {agent} (this is version {version})\n");
    for Target { name, device, ifindex, up } in targets {
        let state = match ifindex {
            None => "missing".to_owned(),
            Some(ifindex) if *up => format!("up, ifindex {ifindex}"),
            Some(ifindex) => format!("down, ifindex {ifindex}"),
        };
        let target = if name == Name::DEFAULT { String::new() } else { format!(", target {name}") };
        text.push_str(&format!("mirror interface  {device} ({state}){target}\n"));
    }
    text.push_str(&format!("taps              {}\n", taps.len()));
    let sessions = || taps.iter().flat_map(|tap| tap.sessions.iter().map(move |session| (tap, session)));
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    for (tap, session) in sessions() {
        let pod = tap.pod.as_ref().map_or("-".to_owned(), |pod| format!("{}/{}", pod.namespace, pod.name));
        let hooks = format!("{}/{}", tap.attached.ingress, tap.attached.egress);
        let mut head = vec![pod, tap.nic.clone(), tap.device.clone(), hooks];
        head.extend([session.mirror.clone(), session.target.clone(), session.direction.to_owned()]);
        for counter in &session.counters {
            let numbers = [counter.packets.to_string(), counter.bytes.to_string()];
            head.extend([counter.direction.to_owned(), counter.verdict.to_owned()]);
            head.extend(numbers);
            rows.push(std::mem::replace(&mut head, vec![String::new(); HEAD]));
        }
        if session.counters.is_empty() {
            head.extend(["-", "-", "0", "0"].map(str::to_owned));
            rows.push(head);
        }
    }
    if !taps.is_empty() {
        text.push('\n');
        text.push_str(&columns(&rows));
    }
    for (tap, session) in sessions() {
        let mut words = session.words.clone();
        words.extend(session.ended.map(|budget| format!("ENDED: {budget} used up")));
        if !words.is_empty() {
            let mirror =
                if session.mirror == Name::DEFAULT { String::new() } else { format!(" {}", session.mirror) };
            let line = format!("{}{mirror}: {}", tap.device, words.join(", "));
            text.push_str(&format!("\n{}\n", printable(&line)));
        }
    }
    if let Some(notes) = notes {
        text.push_str(&told(notes));
    }
    text
}

/// The states that differ from the wishes of a user.
fn told(notes: &Notes) -> String {
    let Notes { not_mirrored, bad_annotations, failures } = notes;
    let row = |what: &str, about: &str, why: &str| [what, about, why].map(str::to_owned).to_vec();
    let mut rows = Vec::new();
    for NotMirrored { pod, nic, mirror, reason, message } in not_mirrored {
        let mirror = mirror.as_ref().map(|mirror| format!("({mirror})"));
        let about = [pod.as_deref(), nic.as_deref(), mirror.as_deref()]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(" ");
        rows.push(row(reason, &about, message));
    }
    rows.extend(bad_annotations.iter().map(|bad| row("BadAnnotation", &bad.pod, &bad.message)));
    rows.extend(failures.iter().map(|failure| row("failed", "-", failure)));
    if rows.is_empty() {
        return String::new();
    }
    rows.insert(0, row("NOT MIRRORED", "POD", "WHY"));
    format!("\n{}", columns(&rows))
}

/// Left-justified columns, two spaces apart.
fn columns(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<_>> = rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let count = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..count)
        .map(|column| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &rows {
        let line: String = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The text with escapes for what does not print: a pod chooses the names of its NICs, and the kernel takes control
/// characters in them, which a terminal would obey.
fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '"' | '\'' | '\\' => printable.push(char),
            _ => printable.extend(char.escape_debug()),
        }
    }
    printable
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_cannot_speak_to_the_terminal() {
        let row = |nic: &str| ["default/web", nic, "it's \"é\" \\"].map(str::to_owned).to_vec();
        assert_eq!(
            columns(&[row("NIC"), row("\x1b[2Jx"), row("a\u{202e}b")]),
            "default/web  NIC         it's \"é\" \\\n\
             default/web  \\u{1b}[2Jx  it's \"é\" \\\n\
             default/web  a\\u{202e}b  it's \"é\" \\\n"
        );
    }

    proptest! {
        #[test]
        fn a_table_has_its_own_lines_and_no_control_characters(cells in prop::collection::vec(any::<String>(), 1..5)) {
            let text = columns(&[cells.clone(), cells]);
            prop_assert_eq!(text.lines().count(), 2);
            prop_assert!(text.chars().all(|char| char == '\n' || !char.is_control()), "{:?}", text);
        }
    }
}
