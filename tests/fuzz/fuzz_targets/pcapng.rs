//! The streams of two agents, as `kubectl mirror tail` reads and merges them: the division of the bytes does not matter,
//! what was read can be written and read again, and the file has the packets and the names of both streams.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use mirror_capture::{
    blocks::{Block, Blocks},
    combined::Combined,
    merge::{Bounds, Merge},
    pcapng::{self, MAX_NAME, MAX_NAMES, MAX_TEXT, Section, Writer},
};

const BOUNDS: Bounds = Bounds { hold: Duration::from_secs(1), bytes: 1000 };

/// Reads a stream whose bytes arrive in these parts.
fn read(parts: &[&[u8]]) -> (Vec<Block>, Result<bool, &'static str>) {
    let (mut blocks, mut found) = (Blocks::default(), Vec::new());
    for part in parts {
        blocks.push(part);
        loop {
            match blocks.pop() {
                Ok(Some(block)) => found.push(block),
                Ok(None) => break,
                Err(why) => return (found, Err(why)),
            }
        }
    }
    (found, Ok(blocks.is_within_a_block()))
}

/// Writes a block as an agent does.
fn write(block: &Block) -> Vec<u8> {
    let mut out = Vec::new();
    match block {
        Block::Section(comment) => {
            Writer::begin(&mut out, &Section { comment: Some(comment), ..Section::default() });
        }
        Block::Interface(of) => {
            let mut writer = Writer::begin(&mut out, &Section::default());
            out.clear();
            writer.interface(&mut out, of);
        }
        Block::Packet(packet) => out = packet.clone().with_interface(packet.interface),
        Block::Statistics(of) => of.write(&mut out),
        Block::Names(names) => names.write(&mut out),
        Block::Note(json) => pcapng::note(&mut out, json),
    }
    out
}

/// Whether a block is written as one block and no text of it is cut: a character that was invalid becomes longer.
fn fits(block: &Block) -> bool {
    let texts = match block {
        Block::Section(text) | Block::Note(text) => vec![Some(text)],
        Block::Interface(of) => {
            let texts = [&of.description, &of.filter, &of.hardware, &of.comment];
            texts.into_iter().map(Option::as_ref).chain([Some(&of.name)]).collect()
        }
        Block::Packet(_) => Vec::new(),
        Block::Statistics(of) => vec![of.comment.as_ref()],
        Block::Names(of) => {
            let is_long = of.addresses.iter().any(|(_, name)| name.len() > MAX_NAME);
            if is_long || of.addresses.len() > MAX_NAMES {
                return false;
            }
            vec![of.comment.as_ref()]
        }
    };
    texts.into_iter().flatten().all(|text| text.len() <= MAX_TEXT)
}

/// Merges two streams into a file, as `tail` does. Returns the file, and how many interfaces, packets and names it has.
fn combine(streams: [Vec<Block>; 2]) -> (Vec<u8>, [usize; 3]) {
    let (mut combined, mut out) =
        Combined::begin(&Section { application: Some("fuzz"), ..Section::default() });
    let mut merge = Merge::new(BOUNDS);
    let (mut interfaces, mut packets, mut names, mut pushed) = (0, 0, 0, 0);
    for (stream, blocks) in (0..).zip(streams) {
        merge.open(stream);
        for block in blocks {
            match block {
                Block::Section(_) | Block::Note(_) => {}
                Block::Names(of) => {
                    of.write(&mut out);
                    names += of.addresses.len();
                }
                Block::Interface(of) => {
                    combined.interface(stream, of, &mut out);
                    interfaces += 1;
                }
                Block::Packet(packet) => {
                    let (time_ns, bytes) = (packet.time_ns, packet.block.len());
                    let packet = combined.packet(stream, packet);
                    merge.push(stream, time_ns, bytes, (stream, pushed, packet), Duration::ZERO);
                    pushed += 1;
                }
                Block::Statistics(of) => combined.statistics(stream, of),
            }
        }
    }
    [0, 1].into_iter().for_each(|stream| merge.close(stream));
    let mut popped = [Vec::new(), Vec::new()];
    while let Some((stream, number, packet)) = merge.pop(Duration::ZERO) {
        popped[stream as usize].push(number);
        packets += usize::from(packet.is_some());
        out.extend(packet.unwrap_or_default());
    }
    assert!((0..pushed).eq(popped.into_iter().flatten()), "each packet once, in the order of its stream");
    let (lines, _) = combined.end(7, packets as u64, 2, &mut out);
    assert!(!lines.is_empty());
    (out, [interfaces, packets, names])
}

fuzz_target!(|input: (u16, &[u8])| {
    let (split, bytes) = input;
    let (first, second) = bytes.split_at_checked(split.into()).unwrap_or((bytes, &[]));
    let whole = read(&[bytes]);
    assert_eq!(whole, read(&[first, second]));
    for block in whole.0.iter().filter(|block| fits(block)) {
        assert_eq!(read(&[&write(block)]), (vec![block.clone()], Ok(false)));
    }
    let (file, written) = combine([first, second].map(|stream| read(&[stream]).0));
    let (blocks, end) = read(&[&file]);
    assert_eq!(end, Ok(false));
    let mut found = [0; 3];
    for block in blocks {
        match block {
            Block::Interface(_) => found[0] += 1,
            Block::Packet(packet) => {
                assert!((packet.interface as usize) < written[0]);
                found[1] += 1;
            }
            Block::Names(of) => found[2] += of.addresses.len(),
            Block::Section(_) | Block::Statistics(_) | Block::Note(_) => {}
        }
    }
    assert_eq!(found, written);
});
