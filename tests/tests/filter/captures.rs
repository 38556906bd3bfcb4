//! Compares `filter check --pcap` with tcpdump on capture files that tcpdump and editcap have written.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use mirror_agent::cli::filter::matches;
use mirror_core::filter::compile;
use mirror_tests::{
    filters::{expression, frame},
    random::Random,
};
use tempfile::TempDir;

/// Packets per file.
const PACKETS: usize = 200;
/// Typical filters on lengths, alone and combined with others.
const FILTERS: [&str; 9] = [
    "len > 100",
    "less 100",
    "greater 100",
    "ip and greater 80",
    "not less 90",
    "udp and len < 1000",
    "tcp or greater 200",
    "not (icmp or greater 150)",
    "vlan and greater 70",
];

#[track_caller]
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Writes the frames to a pcap file. Packet n has the timestamp n seconds.
fn write_pcap(path: &Path, frames: &[(usize, Vec<u8>)]) {
    let mut file: Vec<u8> = [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 262_144, 1].map(u32::to_le_bytes).concat();
    for (number, frame) in frames {
        let length = frame.len() as u32;
        file.extend([*number as u32, 0, length, length].map(u32::to_le_bytes).concat());
        file.extend(frame);
    }
    fs::write(path, file).unwrap();
}

/// Writes the same packets, whole and cut, to files of all common formats.
fn files(dir: &TempDir, random: &mut Random) -> Vec<PathBuf> {
    let at = |name: &str| dir.path().join(name);
    let mut frames: Vec<(usize, Vec<u8>)> = Vec::new();
    while frames.len() < PACKETS {
        let frame = frame(random);
        if !frame.is_empty() {
            frames.push((frames.len() + 1, frame));
        }
    }
    write_pcap(&at("whole.pcap"), &frames);
    let (one, other): (Vec<_>, Vec<_>) = frames.into_iter().partition(|(number, _)| number % 3 == 0);
    write_pcap(&at("one.pcap"), &one);
    write_pcap(&at("other.pcap"), &other);
    let mut files = vec![at("whole.pcap")];
    let mut made = |name: &str, command: &mut Command| {
        run(command);
        files.push(at(name));
    };
    made(
        "by-tcpdump.pcap",
        Command::new("tcpdump").arg("-r").arg(at("whole.pcap")).arg("-w").arg(at("by-tcpdump.pcap")),
    );
    for (name, arguments) in [
        ("cut.pcap", &["-F", "pcap", "-s", "60"][..]),
        ("cut-to-odd.pcap", &["-F", "pcap", "-s", "37"]),
        ("nanoseconds.pcap", &["-F", "nsecpcap", "-s", "96"]),
        ("whole.pcapng", &["-F", "pcapng"]),
        ("cut.pcapng", &["-F", "pcapng", "-s", "45"]),
    ] {
        made(name, Command::new("editcap").args(arguments).arg(at("whole.pcap")).arg(at(name)));
    }
    let name = "two-interfaces.pcapng";
    let mut merge = Command::new("mergecap");
    made(
        name,
        merge.args(["-F", "pcapng", "-s", "50", "-w"]).args([at(name), at("one.pcap"), at("other.pcap")]),
    );
    files
}

/// The numbers of the packets that match the filter, according to tcpdump.
fn tcpdump(file: &Path, filter: &str, optimise: &[&str]) -> BTreeSet<u64> {
    let mut command = Command::new("tcpdump");
    command
        .args(optimise)
        .args(["-r", "-", "-w", "-", "--", filter])
        .stdin(Stdio::from(File::open(file).unwrap()));
    let taken = run(&mut command).stdout;
    let number = |at: usize| u32::from_le_bytes(taken[at..at + 4].try_into().unwrap());
    let (mut at, mut numbers) = (24, BTreeSet::new());
    while at < taken.len() {
        numbers.insert(number(at).into());
        at += 16 + number(at + 8) as usize;
    }
    numbers
}

/// The numbers of the packets that match the filter, according to podmirror.
fn matching(file: &Path, filter: &str) -> BTreeSet<u64> {
    let mut numbers = BTreeSet::new();
    let visit = |number| assert!(numbers.insert(number));
    let packets = matches(File::open(file).unwrap(), &compile(filter).unwrap(), visit).unwrap();
    assert_eq!(packets, PACKETS as u64, "{}", file.display());
    numbers
}

#[test]
fn a_filter_matches_in_whole_and_cut_captures_what_tcpdump_says() {
    let mut random = Random::from_clock("captures");
    let dir = TempDir::new().unwrap();
    let files = files(&dir, &mut random);
    // Filters that match some but not all packets of at least one file; in files of cut packets some filters match
    // none.
    let mut telling = BTreeSet::new();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        for filter in FILTERS {
            let expected = tcpdump(file, filter, &[]);
            if (1..PACKETS).contains(&expected.len()) {
                telling.insert(filter);
            }
            assert_eq!(matching(file, filter), expected, "{filter} of {name}");
        }
        // tcpdump's optimiser changes the result of some expressions on cut packets.
        for _ in 0..25 {
            let filter = expression(&mut random);
            if compile(&filter).is_ok() {
                assert_eq!(matching(file, &filter), tcpdump(file, &filter, &["-O"]), "{filter} of {name}");
            }
        }
    }
    assert_eq!(
        telling,
        FILTERS.into_iter().collect(),
        "each filter takes some packets of a file, and not all"
    );
}
