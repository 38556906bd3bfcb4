//! The past: the packets that a [recorder](super::recorder) of this node still has, for `tail --since`.
//!
//! The recorder sends a complete pcapng, whose blocks go to the beginning of the file as they are.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, bail};
use mirror_capture::pcapng::{self, NO_PAST};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    net::UnixStream,
    time::timeout,
};

use super::pipe::Pipe;
use crate::{
    capture::{
        control::{self, Wanted},
        recording::{Progress, Recorder},
    },
    kernel::dataplane::pins::Pins,
    model::TargetName,
};

/// Timeout for the answer, and for each block. A recorder serves one client at a time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum length of the line before the packets in bytes.
const MOST_LINE: u64 = 8 << 20;
/// Lengths that a block can have, in bytes.
const LENGTHS: std::ops::RangeInclusive<usize> = 12..=1 << 20;
/// Maximum number of pods in a message.
const MOST_PODS: usize = 40;
/// The reason in a note about packets of the past that are missing.
const NO_RECORD: &str = "NoPast";

/// The answer of a recorder, whose packets are not read yet.
pub(super) struct Past {
    from: BufReader<UnixStream>,
    /// The number of packets by interface.
    packets: BTreeMap<String, u64>,
    /// Age of the oldest packet that the recorder can still have, in ns.
    reach_ns: u64,
    /// The number of bytes that follow.
    bytes: u64,
}

impl Past {
    /// Asks the recorder of a target, or any recorder of the node.
    pub(super) async fn ask(target: Option<&TargetName>, wanted: &Wanted) -> anyhow::Result<Self> {
        let recorder = Pins::connect_recorder(target)?.context(
            "no recorder runs on this node, or it waits for its agent; `recorder.enabled` of the chart, or \
             `mirror-agent recorder`, starts one",
        )?;
        recorder.set_nonblocking(true)?;
        let mut recorder = UnixStream::from_std(recorder)?;
        let answered = async {
            control::write_line(&mut recorder, wanted).await?;
            let mut from = BufReader::new(recorder);
            let mut line = String::new();
            (&mut from).take(MOST_LINE).read_line(&mut line).await?;
            let (packets, reach_ns, bytes) = serde_json::from_str(&line)?;
            anyhow::Ok(Self { from, packets, reach_ns, bytes })
        };
        let answered =
            timeout(PATIENCE, answered).await.context("the recorder does not answer: try again")?;
        answered.context("the recorder has not answered; its log says why")
    }

    /// Whether there are no packets.
    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// The contents, for the user who asked for the packets of this time.
    pub(super) fn words(&self, since: Duration) -> String {
        let mut pods = BTreeMap::<_, u64>::new();
        for (interface, packets) in &self.packets {
            *pods.entry(interface.split(' ').next().unwrap_or_default()).or_default() += packets;
        }
        let of = pods.iter().take(MOST_PODS).map(|(pod, packets)| format!("{pod} {packets}"));
        let more = pods.len().saturating_sub(MOST_PODS);
        let of: Vec<_> = of.chain((more > 0).then(|| format!("and {more} more"))).collect();
        let of = if of.is_empty() { "none".to_owned() } else { of.join(", ") };
        let reach = Duration::from_nanos(self.reach_ns).as_secs();
        let reach = if reach < since.as_secs() {
            format!("; its memory reaches back {reach} s")
        } else {
            String::new()
        };
        format!("recorded packets of the last {} s: {of}{reach}", since.as_secs())
    }

    /// Appends the packets to a recording, and if some do not arrive, a note for the reader of the API.
    pub(super) async fn write(self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let copied = self.copy(recorder).await;
        if let Err(error) = &copied {
            let message = format!("{NO_PAST}{error:#}");
            let note = json!({ "pod": null, "nic": null, "reason": NO_RECORD, "message": message });
            let mut block = Vec::new();
            pcapng::note(&mut block, &note.to_string());
            recorder.append(&block)?;
        }
        copied
    }

    async fn copy(mut self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let pipe = Pipe::new(recorder.pipe()).context("cannot wait for the pipe")?;
        let (mut left, mut block) = (self.bytes, Vec::new());
        while left > 0 {
            let read = timeout(PATIENCE, self.read(&mut block)).await.context("the recorder sends nothing");
            read.flatten().context("the packets of the past are not complete")?;
            left = left.saturating_sub(block.len() as u64);
            if recorder.append(&block)? == Progress::Complete {
                break;
            }
            while recorder.is_stalled() {
                pipe.taken().await.context("cannot wait for the pipe")?;
                recorder.end_batch()?;
            }
        }
        recorder.end_batch()?;
        Ok(())
    }

    /// Reads the next block.
    async fn read(&mut self, block: &mut Vec<u8>) -> anyhow::Result<()> {
        let mut head = [0; 8];
        self.from.read_exact(&mut head).await?;
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if !LENGTHS.contains(&length) {
            bail!("a block has {length} bytes");
        }
        block.clear();
        block.extend_from_slice(&head);
        block.resize(length, 0);
        self.from.read_exact(block.get_mut(head.len()..).unwrap_or_default()).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{
        fs::File,
        io::{self, Read as _},
        os::fd::OwnedFd,
        thread,
    };

    use mirror_capture::{
        blocks::{Block, Blocks},
        pcapng::{Interface, Packet, Section, Writer},
    };
    use serde_json::Value;
    use tokio::io::AsyncWriteExt as _;

    use super::*;
    use crate::capture::recording::{Clock, Kept, Plan, Sink};

    /// The recorder ends while it sends.
    #[tokio::test]
    async fn a_past_that_is_not_complete_ends_with_the_reason() {
        let mut bytes = Vec::new();
        let mut writer = Writer::begin(&mut bytes, &Section::default());
        let interface = Interface { name: "shop/web eth0".to_owned(), ..Interface::default() };
        let interface = writer.interface(&mut bytes, &interface);
        for time_ns in 0..100 {
            let (direction, comment) = (None, None);
            Packet { interface, time_ns, bytes: &[0; 1000], len: 1000, direction, comment }.write(&mut bytes);
        }
        // The last packet is not complete.
        bytes.truncate(bytes.len() - 10);
        let (from, mut to) = UnixStream::pair().unwrap();
        tokio::spawn(async move { to.write_all(&bytes).await });
        let past = Past { from: BufReader::new(from), packets: BTreeMap::new(), reach_ns: 0, bytes: 1 << 20 };

        let (mut reader, pipe) = io::pipe().unwrap();
        let output = Sink::Pipe(File::from(OwnedFd::from(pipe)));
        let plan = Plan { output, kept: Kept::All, super_frames: false, max_packets: None, comment: None };
        let read = thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map(|_| bytes)
        });
        let mut recorder = Recorder::begin(plan, Clock::now().unwrap(), "test").unwrap();
        let why = format!("{:#}", past.write(&mut recorder).await.unwrap_err());
        recorder.finish(Clock::now().unwrap().monotonic_ns).unwrap();
        let mut blocks = Blocks::default();
        blocks.push(&read.join().unwrap().unwrap());
        let (mut packets, mut notes) = (0, Vec::new());
        while let Some(block) = blocks.pop().unwrap() {
            match block {
                Block::Packet(_) => packets += 1,
                Block::Note(note) => notes.push(serde_json::from_str::<Value>(&note).unwrap()),
                _ => {}
            }
        }
        let message = format!("no past: {why}");
        let note = json!({ "pod": null, "nic": null, "reason": "NoPast", "message": message });
        assert_eq!((packets, notes), (99, vec![note]));
        assert!(why.starts_with("the packets of the past are not complete: "), "{why}");
    }
}
