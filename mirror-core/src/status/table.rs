//! The status as a table for people.

use mirror_common::verdict::Misfit;

use super::{Finding, NicCoverage, NodeStatus, Notes, TargetStatus};
use crate::model::Name;

const COLUMNS: [&str; 11] = [
    "POD",
    "NIC",
    "DEVICE",
    "HOOKS",
    "MIRROR",
    "TARGET",
    "MIRRORED",
    "DIRECTION",
    "RESULT",
    "PACKETS",
    "BYTES",
];
/// The number of leading [`COLUMNS`] that identify a session.
const HEAD: usize = 7;
/// The column that follows the NIC column, if the network of a NIC is known.
const NETWORK: (usize, &str) = (2, "NETWORK");

pub(super) fn table(status: &NodeStatus) -> String {
    let NodeStatus { version, agent_running, targets, taps, notes } = status;
    let agent = if *agent_running { "running" } else { "not running" };
    let mut text = format!("agent             {agent} (this is version {version})\n");
    for TargetStatus { name, destination, device, ifindex, up, stream, dropped, when_read } in targets {
        if *stream {
            let state = if *up { "a program reads it" } else { "no program reads it, so nothing is copied" };
            text.push_str(&format!("stream            {name} ({state})\n"));
            continue;
        }
        let mut state = match ifindex {
            None => "missing".to_owned(),
            Some(ifindex) if *up => format!("up, ifindex {ifindex}"),
            Some(ifindex) => format!("down, ifindex {ifindex}"),
        };
        if *when_read {
            state.push_str(", copies only while a program reads it");
        }
        if let Some(dropped @ 1..) = dropped {
            state.push_str(&format!(", frames dropped by the device: {dropped}"));
        }
        let target = if name == Name::DEFAULT { String::new() } else { format!(", target {name}") };
        let line = match destination.split_once(':') {
            Some((kind, rest)) if device.is_empty() => format!("{kind:<16}  {rest} ({state}){target}"),
            Some((kind, rest)) => format!("{kind:<16}  {rest} at {device} ({state}){target}"),
            None => format!("mirror interface  {device} ({state}){target}"),
        };
        text.push_str(&printable(&line));
        text.push('\n');
    }
    text.push_str(&format!("taps              {}\n", taps.len()));
    let sessions = || taps.iter().flat_map(|tap| tap.sessions.iter().map(move |session| (tap, session)));
    let has_networks = taps.iter().any(|tap| tap.network.is_some());
    let with_network = |mut cells: Vec<String>, network: Option<&str>| {
        if has_networks {
            cells.insert(NETWORK.0, network.unwrap_or("-").to_owned());
        }
        cells
    };
    let mut rows = vec![with_network(COLUMNS.map(str::to_owned).to_vec(), Some(NETWORK.1))];
    for (tap, session) in sessions() {
        let pod = tap.pod.as_ref().map_or("-".to_owned(), ToString::to_string);
        let inside = tap.pod_side.as_ref().map(|side| format!("{} in pod", side.attached));
        let hooks = format!("{}/{}", tap.attached.ingress, inside.as_ref().unwrap_or(&tap.attached.egress));
        let device = if tap.inside { "(in pod)".to_owned() } else { tap.device.clone() };
        let mut head = vec![pod, tap.nic.clone(), device, hooks];
        head.extend([session.mirror.clone(), session.target.clone(), session.direction.clone()]);
        head = with_network(head, tap.network.as_deref());
        for counter in &session.counters {
            let numbers = [counter.packets.to_string(), counter.bytes.to_string()];
            head.extend([counter.direction.clone(), counter.result.clone()]);
            head.extend(numbers);
            let empty = vec![String::new(); HEAD + usize::from(has_networks)];
            rows.push(std::mem::replace(&mut head, empty));
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
        let mut words: Vec<_> = session.settings().map(|(setting, value)| setting.word(value)).collect();
        words.extend(session.ended.as_ref().map(|budget| format!("ENDED: {budget} used up")));
        words.extend(Misfit::ALL.into_iter().filter_map(|kind| misfit(kind, session.misfit(kind))));
        if !words.is_empty() {
            let mirror =
                if session.mirror == Name::DEFAULT { String::new() } else { format!(" {}", session.mirror) };
            // The names of devices inside a pod are not names of the node.
            let pod = tap.pod.as_ref().filter(|_| tap.inside);
            let pod = pod.map(|pod| format!("{pod} ")).unwrap_or_default();
            let line = format!("{pod}{}{mirror}: {}", tap.device, words.join(", "));
            text.push_str(&format!("\n{}\n", printable(&line)));
        }
    }
    if let Some(notes) = notes {
        text.push_str(&coverage(&notes.coverage));
        text.push_str(&told(notes));
    }
    text
}

/// Formats the copies that differ from the request, if there are any.
fn misfit(kind: Misfit, (packets, bytes): (u64, u64)) -> Option<String> {
    let by = match kind {
        Misfit::Cut => "lack",
        Misfit::Long => "exceed the snap length by",
    };
    (packets > 0).then(|| format!("{}: {packets} copies {by} {bytes} bytes", kind.name().to_uppercase()))
}

/// Lists the coverage of each NIC and direction.
fn coverage(nics: &[NicCoverage]) -> String {
    if nics.is_empty() {
        return String::new();
    }
    let head = ["COVERAGE", "NIC", "INGRESS", "SEEN/NIC", "EGRESS", "SEEN/NIC"].map(str::to_owned);
    let mut rows = vec![head.to_vec()];
    for NicCoverage { pod, nic, device: _, why_inside: _, ingress, egress } in nics {
        let mut row = vec![pod.clone(), nic.clone()];
        for of in [ingress, egress] {
            row.extend([of.state.clone(), format!("{}/{}", of.seen, of.carried)]);
        }
        rows.push(row);
    }
    format!("\n{}", columns(&rows))
}

/// Lists what differs from the requests: problems, failures and ignored annotations.
fn told(notes: &Notes) -> String {
    let Notes { not_mirrored, bad_annotations, failures, unreached_targets, pods: _, coverage: _ } = notes;
    let row = |what: &str, about: &str, why: &str| [what, about, why].map(str::to_owned).to_vec();
    let mut rows = Vec::new();
    for of in not_mirrored.iter().chain(bad_annotations).chain(unreached_targets) {
        let Finding { pod, nic, mirror, target, reason, message, remedy: _ } = of;
        let mirror = mirror.as_ref().map(|mirror| format!("({mirror})"));
        let target = target.as_ref().map(|target| format!("target {target}"));
        let about = [pod, nic, &mirror, &target].into_iter().flatten().map(String::as_str);
        rows.push(row(reason, &about.collect::<Vec<_>>().join(" "), message));
    }
    rows.extend(failures.iter().map(|failure| row("failed", "-", failure)));
    if rows.is_empty() {
        return String::new();
    }
    rows.insert(0, row("NOT AS REQUESTED", "POD", "WHY"));
    format!("\n{}", columns(&rows))
}

/// Returns left-justified columns, two spaces apart, without characters that a terminal interprets.
pub fn columns(rows: &[Vec<String>]) -> String {
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

/// Escapes the characters that are not printable. A pod chooses the names of its NICs, and the kernel accepts control
/// characters in them, which a terminal would interpret.
pub fn printable(text: &str) -> String {
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
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        model::PodId,
        status::{
            AttachedStatus, DirectionCoverage, LeftStatus, MisfitStatus, PodSideStatus, SessionStatus,
            TapStatus,
        },
    };

    /// A tap with one session that has seen nothing.
    fn tap(nic: &str, network: Option<&str>) -> TapStatus {
        let session = SessionStatus {
            mirror: "default".into(),
            target: "default".into(),
            serial: 1,
            tunnel_key: None,
            origin: "annotation".into(),
            direction: "both".into(),
            settings: BTreeMap::new(),
            ended: None,
            left: LeftStatus::default(),
            counters: Vec::new(),
            misfits: Vec::new(),
        };
        TapStatus {
            ifindex: 7,
            device: format!("veth-{nic}"),
            inside: false,
            pod: Some(PodId { uid: "1".into(), namespace: "shop".into(), name: "web".into() }),
            nic: nic.into(),
            network: network.map(str::to_owned),
            attached: AttachedStatus::default(),
            pod_side: None,
            sessions: vec![session],
        }
    }

    #[test]
    fn copies_that_are_not_as_asked_for_have_a_line() {
        let misfit = |direction: &str, kind: Misfit, packets| MisfitStatus {
            direction: direction.into(),
            kind: kind.name().into(),
            packets,
            bytes: packets * 1000,
        };
        let mut tap = tap("eth0", None);
        tap.sessions[0].misfits = vec![
            misfit("ingress", Misfit::Cut, 2),
            misfit("egress", Misfit::Cut, 3),
            misfit("egress", Misfit::Long, 1),
        ];
        let status = NodeStatus {
            version: "1".into(),
            agent_running: true,
            targets: Vec::new(),
            taps: vec![tap],
            notes: None,
        };
        let expected =
            "veth-eth0: CUT: 5 copies lack 5000 bytes, LONG: 1 copies exceed the snap length by 1000 bytes";
        assert_eq!(table(&status).lines().last(), Some(expected));
    }

    #[test]
    fn networks_have_a_column_where_one_is_known() {
        let lines = |taps: Vec<TapStatus>| {
            let status = NodeStatus {
                version: "1".into(),
                agent_running: true,
                targets: Vec::new(),
                taps,
                notes: None,
            };
            table(&status).lines().skip(3).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(
            lines(vec![tap("eth0", None), tap("net1", Some("shop/fast"))]),
            [
                "POD       NIC   NETWORK    DEVICE     HOOKS      MIRROR   TARGET   MIRRORED  DIRECTION  RESULT  PACKETS  BYTES",
                "shop/web  eth0  -          veth-eth0  none/none  default  default  both      -          -       0        0",
                "shop/web  net1  shop/fast  veth-net1  none/none  default  default  both      -          -       0        0",
            ]
        );
        let mut two_sides = tap("eth0", None);
        two_sides.attached.ingress = "tcx".into();
        two_sides.pod_side = Some(PodSideStatus { ifindex: 2, attached: "tcx".into() });
        assert!(lines(vec![two_sides])[1].starts_with("shop/web  eth0  veth-eth0  tcx/tcx in pod  default"));
        assert_eq!(
            lines(vec![tap("eth0", None)])[0],
            "POD       NIC   DEVICE     HOOKS      MIRROR   TARGET   MIRRORED  DIRECTION  RESULT  PACKETS  BYTES"
        );
    }

    #[test]
    fn each_nic_has_a_row_with_its_coverage() {
        let of = |state: &str, seen, carried| DirectionCoverage {
            state: state.into(),
            message: "the reason".into(),
            seconds: 5,
            seen,
            carried,
        };
        let nic = |nic: &str, ingress, egress| NicCoverage {
            pod: "shop/web".into(),
            nic: nic.into(),
            device: "veth1".into(),
            why_inside: None,
            ingress,
            egress,
        };
        let nics = [
            nic("eth0", of("Bypassed", 12, 40_312), of("Covered", 39_001, 39_001)),
            nic("net1", of("Unknown", 0, 3), of("NoHook", 0, 77)),
        ];
        assert_eq!(
            coverage(&nics),
            "\n\
             COVERAGE  NIC   INGRESS   SEEN/NIC  EGRESS   SEEN/NIC\n\
             shop/web  eth0  Bypassed  12/40312  Covered  39001/39001\n\
             shop/web  net1  Unknown   0/3       NoHook   0/77\n"
        );
        assert_eq!(coverage(&[]), "");
    }

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
