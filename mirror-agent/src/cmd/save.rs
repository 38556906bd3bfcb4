//! `mirror-agent save`: requests the newest packets of a target's recorder, and writes them as pcapng.
//!
//! The recorder and the messages are in [`tail`](super::tail).

use std::{
    fs::OpenOptions,
    io::{self, BufRead as _, BufReader, IsTerminal as _, Read as _, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use anyhow::{Context as _, bail};
use tracing::info;

use super::tail::{Given, Wanted};
use crate::{cli::SaveArgs, dataplane::pins::Pins};

/// Maximum length of the line before the packets.
const MOST_LINE: u64 = 1024;

/// Writes the newest packets of a recorder.
pub(super) fn save(args: SaveArgs) -> anyhow::Result<()> {
    let SaveArgs { target, pods, write } = args;
    let is_stdout = write == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | tcpdump -nr -`");
    }
    let recorder = Pins::connect_recorder(&target)?.with_context(|| {
        format!("no recorder of target {target} runs on this node; `mirror-agent recorder --target {target}` is one")
    })?;
    let mut output: Box<dyn Write> = match is_stdout {
        true => Box::new(io::stdout().lock()),
        false => {
            // Packets are confidential: only the owner may read the file.
            let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&write);
            Box::new(file.with_context(|| format!("cannot create {}", write.display()))?)
        }
    };
    let pods = pods.into_iter().map(|(namespace, name)| format!("{namespace}/{name}")).collect();
    let asked = [serde_json::to_vec(&Wanted { pods })?, b"\n".to_vec()].concat();
    (&recorder).write_all(&asked).context("cannot ask the recorder")?;
    let mut from = BufReader::new(recorder);
    let mut line = String::new();
    from.by_ref().take(MOST_LINE).read_line(&mut line).context("cannot read from the recorder")?;
    let given: Given =
        serde_json::from_str(&line).context("the recorder has not answered; its log says why")?;
    let copied = io::copy(&mut from, &mut output).context("cannot write the packets")?;
    output.flush().context("cannot write the packets")?;
    if copied != given.bytes {
        bail!("the recorder has sent {copied} of {} bytes; its log says why", given.bytes);
    }
    info!(packets = given.packets, "saved");
    Ok(())
}
