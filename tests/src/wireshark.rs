//! Checks a pcapng file with Wireshark's own programs: capinfos counts its packets, and tshark verifies and prints
//! them.

use std::{path::Path, process::Command};

/// The protocols whose checksums tshark verifies.
const CHECKED: [&str; 5] = ["ip", "tcp", "udp", "icmp", "icmpv6"];
/// tshark's reports for a flow with an additional, missing or reordered packet.
const FLOW: [&str; 5] =
    ["out_of_order", "retransmission", "duplicate_ack", "lost_segment", "ack_lost_segment"];

/// Checks that capinfos counts `packets` packets in the file, and that tshark finds good checksums of each of the
/// `protocols` and no bad one, no malformed packet, and no flow with an additional, missing or reordered packet.
///
/// Segments of one connection that two CPUs send reach the tap out of order, and tshark reports that: traffic for this
/// check must come from one CPU ([`OneCpu`](crate::OneCpu)).
#[track_caller]
pub fn wireshark_finds_nothing_wrong(file: &Path, packets: usize, protocols: &[&str]) {
    let mut capinfos = Command::new("capinfos");
    let counted = output(capinfos.args(["-T", "-r", "-M", "-c"]).arg(file));
    assert_eq!(counted.split_whitespace().last(), Some(packets.to_string().as_str()), "{counted}");

    for protocol in protocols {
        let good = dissected(file, &format!("{protocol}.checksum.status == Good"), &["frame.number"]);
        assert!(!good.is_empty(), "no checksum of {protocol} was checked");
    }
    let bad = CHECKED.map(|protocol| format!("{protocol}.checksum.status == Bad")).join(" || ");
    let flow = FLOW.map(|mistake| format!("tcp.analysis.{mistake}")).join(" || ");
    let wrong = format!("{bad} || {flow} || _ws.malformed");
    assert_eq!(dissected(file, &wrong, &["frame.number", "_ws.col.Info"]), Vec::<Vec<String>>::new());
}

/// These fields of the packets that match a display filter, as tshark prints them.
#[track_caller]
pub fn dissected(file: &Path, filter: &str, fields: &[&str]) -> Vec<Vec<String>> {
    let mut tshark = Command::new("tshark");
    for protocol in ["ip", "tcp", "udp"] {
        tshark.args(["-o", &format!("{protocol}.check_checksum:TRUE")]);
    }
    // Linux gives clients these ports. Some are those of protocols, such as 47000 (HCrt), whose dissectors find the
    // packets malformed.
    for transport in ["tcp", "udp"] {
        tshark.args(["-d", &format!("{transport}.port==32768-60999,data")]);
    }
    tshark.args(["-n", "-Y", filter, "-T", "fields", "-E", "occurrence=f"]);
    tshark.args(fields.iter().flat_map(|field| ["-e", field])).arg("-r").arg(file);
    let rows = output(&mut tshark);
    rows.lines().map(|row| row.split('\t').map(str::to_owned).collect()).collect()
}

/// A program's output. It must exit with 0.
#[track_caller]
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}
