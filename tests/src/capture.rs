//! Runs tcpdump on a device, and reads the frames that it has written.

use std::{collections::BTreeMap, fmt, fs, process::Command};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::{Frame, Netns, SOON, check, eventually, process::Process, wire};

/// Snap length larger than any frame of these tests: a super-frame has at most 65 549 bytes. With tcpdump's default,
/// the slots of its ring would be four times larger.
const SUPER_FRAME_BYTES: &str = "65600";
/// Snap length larger than any frame of these tests on a wire.
const WIRE_FRAME_BYTES: &str = "2000";

/// Snap length for all headers of the frames of these tests, and some data.
const HEADER_BYTES: &str = "128";

/// A running capture. It has begun when [`Capture::start`] returns.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Process,
    directory: TempDir,
    /// The kernel has completed the checksums of the frames.
    is_wire: bool,
}

impl Capture {
    /// Starts to capture what `device` in `netns` receives and sends.
    #[track_caller]
    pub fn start(netns: &Netns, device: &str) -> Self {
        Self::with_snap_length(netns, device, SUPER_FRAME_BYTES)
    }

    /// As [`Capture::start`], for a device that must show no super-frames. The shorter snap length gives tcpdump's ring
    /// more slots; with the snap length of [`Capture::start`] they are too few for the segments of a burst of
    /// super-frames. A TCP checksum of 0xffff is stored as 0, see [`wire::with_one_zero`].
    #[track_caller]
    pub fn of_wire(netns: &Netns, device: &str) -> Self {
        Self { is_wire: true, ..Self::with_snap_length(netns, device, WIRE_FRAME_BYTES) }
    }

    /// As [`Capture::start`], but keeps only the first bytes of each frame, for many frames in a short time.
    #[track_caller]
    pub fn of_headers(netns: &Netns, device: &str) -> Self {
        Self::with_snap_length(netns, device, HEADER_BYTES)
    }

    #[track_caller]
    fn with_snap_length(netns: &Netns, device: &str, bytes: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = netns.command("tcpdump");
        command.args(["-i", device, "-n", "-s", bytes, "-B", "32768"]);
        // tcpdump writes every frame to the file at once, so that a comparison can wait for it.
        command.args(["-U", "--immediate-mode", "-Z", "root", "-w"]).arg(directory.path().join("pcap"));
        let mut tcpdump = Process::start(&mut command);
        tcpdump.wait_for_line("listening on");
        Self { tcpdump, directory, is_wire: false }
    }

    /// The frames of the device so far. Panics if tcpdump has lost a frame.
    #[track_caller]
    pub fn frames(&self) -> Frames {
        let mut frames = Frames::default();
        for Captured { bytes, length } in self.in_order() {
            assert_eq!(bytes.len(), length, "a frame is longer than the capture's snap length");
            frames.add(if self.is_wire { wire::with_one_zero(bytes) } else { bytes }, 1);
        }
        frames
    }

    /// The frames that tcpdump has written so far, and the number of those that it has lost, for a device with more
    /// frames than tcpdump can write.
    #[track_caller]
    pub fn frames_of_storm(&self) -> (Frames, usize) {
        let lost = self.drain_with_losses();
        let mut frames = Frames::default();
        let written = parse(&fs::read(self.directory.path().join("pcap")).unwrap());
        written.into_iter().for_each(|Captured { bytes, .. }| frames.add(bytes, 1));
        (frames, lost)
    }

    /// The frames of the device so far, in order.
    #[track_caller]
    pub fn in_order(&self) -> Vec<Captured> {
        self.drain();
        parse(&fs::read(self.directory.path().join("pcap")).unwrap())
    }

    /// tcpdump's text for the frames so far that match a filter, one line per frame.
    #[track_caller]
    pub fn text(&self, filter: &str) -> String {
        self.drain();
        let mut tcpdump = Command::new("tcpdump");
        tcpdump.args(["-nq", "-Z", "root", "-r"]).arg(self.directory.path().join("pcap")).arg(filter);
        let output = tcpdump.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// These fields, as tshark dissects the frames so far that match a display filter, one line per frame. tshark
    /// checks all checksums. The values of a field that occurs several times, as in a tunnel, are separated by commas.
    #[track_caller]
    pub fn dissected(&self, filter: &str, fields: &[&str]) -> Vec<String> {
        self.drain();
        let mut tshark = Command::new("tshark");
        for protocol in ["ip", "tcp", "udp"] {
            tshark.args(["-o", &format!("{protocol}.check_checksum:TRUE")]);
        }
        tshark.args(["-n", "-T", "fields", "-Y", filter, "-r"]).arg(self.directory.path().join("pcap"));
        tshark.args(fields.iter().flat_map(|field| ["-e", field]));
        let output = tshark.output().unwrap();
        assert!(output.status.success(), "{filter}: {output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// Ends the capture and returns all of its frames.
    #[track_caller]
    pub fn stop(mut self) -> Frames {
        let frames = self.frames();
        self.tcpdump.end(Signal::SIGINT);
        frames
    }

    /// Waits until tcpdump has written all frames of the device. Panics if it has lost a frame.
    #[track_caller]
    fn drain(&self) {
        assert_eq!(self.drain_with_losses(), 0, "tcpdump has lost frames: {:?}", self.tcpdump.lines().last());
    }

    /// Waits until tcpdump has written all frames that the kernel has for it, and returns the number of those that the
    /// kernel had no room for. On a busy machine tcpdump is late, and when it is stopped, it does not read the rest.
    #[track_caller]
    fn drain_with_losses(&self) -> usize {
        eventually(SOON, || {
            let told = self.tcpdump.lines().len();
            self.tcpdump.signal(Signal::SIGUSR1);
            // "tcpdump: 2 packets captured, 2 packets received by filter, 0 packets dropped by kernel"
            let line = eventually(SOON, || {
                self.tcpdump
                    .lines()
                    .get(told)
                    .cloned()
                    .ok_or_else(|| "tcpdump tells no statistics".to_owned())
            });
            let count = |what: &str| -> usize {
                let part = line.trim_start_matches("tcpdump: ").split(", ").find(|part| part.ends_with(what));
                let count = part.and_then(|part| part.split_whitespace().next()?.parse().ok());
                count.unwrap_or_else(|| panic!("no '{what}' in {line}"))
            };
            let lost = count("dropped by kernel");
            // The number of received frames contains the lost ones.
            check(count("captured") + lost == count("received by filter"), || {
                format!("tcpdump lags behind: {line}")
            })?;
            Ok(lost)
        })
    }
}

/// A captured frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The bytes up to the snap length.
    pub bytes: Vec<u8>,
    /// Bytes of the whole frame.
    pub length: usize,
}

/// A multiset of frames.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frames(BTreeMap<Vec<u8>, usize>);

/// Parses the frames of a pcap file. If tcpdump still writes the file, it can end in the middle of a frame.
fn parse(pcap: &[u8]) -> Vec<Captured> {
    let u32_at = |offset: usize| {
        let bytes = pcap.get(offset..offset + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?) as usize)
    };
    let (global_header, record_header) = (24, 16);
    let mut frames = Vec::new();
    let mut at = global_header;
    while let (Some(captured), Some(length)) = (u32_at(at + 8), u32_at(at + 12)) {
        let Some(bytes) = pcap.get(at + record_header..at + record_header + captured) else { break };
        frames.push(Captured { bytes: bytes.to_vec(), length });
        at += record_header + captured;
    }
    frames
}

impl Frames {
    fn add(&mut self, frame: Vec<u8>, times: usize) {
        *self.0.entry(frame).or_default() += times;
    }

    /// The number of frames. Equal frames count separately.
    pub fn len(&self) -> usize {
        self.0.values().sum()
    }

    /// Whether there are no frames.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of bytes of all frames.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(frame, times)| frame.len() * times).sum()
    }

    /// How often this frame occurs.
    pub fn count(&self, frame: &[u8]) -> usize {
        self.0.get(frame).copied().unwrap_or(0)
    }

    /// Each frame, and how often it occurs.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], usize)> {
        self.0.iter().map(|(frame, times)| (frame.as_slice(), *times))
    }

    /// The frames for which `wanted` holds.
    pub fn only(&self, wanted: impl Fn(&[u8]) -> bool) -> Self {
        Self(self.0.iter().filter(|(frame, _)| wanted(frame)).map(|(f, n)| (f.clone(), *n)).collect())
    }

    /// The IPv4 frames.
    pub fn ipv4(&self) -> Self {
        self.only(|frame| frame[12..14] == [0x08, 0x00])
    }

    /// The union of two captures: a frame counts as often as in the capture that has it more often.
    pub fn or(&self, other: &Self) -> Self {
        let mut union = self.clone();
        for (frame, times) in &other.0 {
            let count = union.0.entry(frame.clone()).or_default();
            *count = (*count).max(*times);
        }
        union
    }

    /// The sum of two captures: a frame counts as often as in both together.
    pub fn and(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        other.0.iter().for_each(|(frame, times)| sum.add(frame.clone(), *times));
        sum
    }

    /// Adds this frame `times` times.
    #[must_use]
    pub fn with(mut self, frame: &[u8], times: usize) -> Self {
        self.add(frame.to_vec(), times);
        self
    }

    /// The frames that `other` lacks, or has less often.
    pub fn less(&self, other: &Self) -> Self {
        let rest = |(frame, times): (&Vec<u8>, &usize)| {
            let times = times.saturating_sub(other.count(frame));
            (times > 0).then(|| (frame.clone(), times))
        };
        Self(self.0.iter().filter_map(rest).collect())
    }

    /// Returns `Ok` if both have the same frames equally often. Otherwise the error lists the missing frames and the
    /// extra frames.
    pub fn same_as(&self, expected: &Self) -> Result<(), String> {
        if self == expected {
            return Ok(());
        }
        let (missing, extra) = (expected.less(self), self.less(expected));
        Err(format!(
            "of {} frames\n{} are missing:\n{missing}{} are too much:\n{extra}",
            expected.len(),
            missing.len(),
            extra.len()
        ))
    }
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = 12;
        for (frame, times) in self.0.iter().take(shown) {
            writeln!(f, "  {times} x {}", Frame::describe(frame))?;
        }
        if self.0.len() > shown { writeln!(f, "  ... {} more", self.0.len() - shown) } else { Ok(()) }
    }
}
