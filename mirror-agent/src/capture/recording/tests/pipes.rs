//! Tests with pipes: a slow reader, one that reads nothing, and one that closed the pipe. A write that waited for such
//! a reader would not return, because the reader is this thread.

use std::{
    fs::File,
    io::{ErrorKind, Read as _},
    iter,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _, unix::net::UnixStream},
    thread,
};

use mirror_capture::{
    blocks::{Block, Blocks},
    pcapng,
};
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::stat::Mode,
    unistd::mkfifo,
};
use proptest::prelude::*;

use super::*;

/// The capacity of a pipe, in bytes: a page or a little more.
const ROOM: i32 = 4096;

/// A FIFO with little capacity, and its reader.
fn pipe(directory: &tempfile::TempDir) -> (PathBuf, File) {
    let path = directory.path().join("pipe");
    mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let reader = open(&path);
    fcntl(&reader, FcntlArg::F_SETPIPE_SZ(ROOM)).unwrap();
    (path, reader)
}

/// Opens a reader without waiting for a writer.
fn open(path: &Path) -> File {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap()
}

/// Reads at most `most` of the available bytes.
fn take(reader: &mut File, most: usize, taken: &mut Vec<u8>) {
    match reader.take(most as u64).read_to_end(taken) {
        Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
        _ => {}
    }
}

/// Ends a recording while another thread reads the rest. Returns all bytes read.
fn finish(recorder: Recorder, reader: File, mut taken: Vec<u8>) -> (Summary, Vec<u8>) {
    let rest = thread::spawn(move || {
        let mut reader = reader;
        fcntl(&reader, FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        reader.read_to_end(&mut taken).unwrap();
        taken
    });
    let summary = recorder.finish(9000).unwrap();
    (summary, rest.join().unwrap())
}

#[test]
fn a_reader_that_takes_nothing_makes_nobody_wait() {
    let directory = tempfile::tempdir().unwrap();
    let (path, mut reader) = pipe(&directory);
    let mut recorder = begin_with_two(all(&path));
    let mut sent = 0_u8;
    while !recorder.is_stalled() {
        assert_eq!(record(&mut recorder, &frame(sent, 999)), Progress::GoesOn);
        assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
        sent += 1;
    }
    assert!((60..80).contains(&sent), "64 KiB wait, and no more: {sent} packets");
    // The reader continues.
    let mut taken = Vec::new();
    while recorder.is_pending() {
        take(&mut reader, 3000, &mut taken);
        assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    }
    assert_eq!(record(&mut recorder, &frame(sent, 999)), Progress::GoesOn);
    let (summary, taken) = finish(recorder, reader, taken);
    let (contents, rest) = read_blocks(&taken);
    let expected = (0..=sent).map(|number| frame(number, 999));
    assert!(contents.packets.iter().map(|packet| packet.bytes.clone()).eq(expected));
    assert_eq!((contents.statistics.len(), rest, summary.packets), (2, 0, u64::from(sent) + 1));
}

#[test]
fn packets_in_memory_go_through_a_pipe_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let (path, reader) = pipe(&directory);
    let mut recorder = begin_with_two(Plan { kept: Kept::First { bytes: 1 << 20 }, ..all(&path) });
    for number in 0..200 {
        assert_eq!(record(&mut recorder, &frame(number, 999)), Progress::GoesOn);
        assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    }
    assert!(!recorder.is_pending());
    let (summary, taken) = finish(recorder, reader, Vec::new());
    let (contents, rest) = read_blocks(&taken);
    assert_eq!((contents.packets.len(), contents.statistics.len(), rest), (200, 2, 0));
    assert_eq!(summary.kept, 200);
}

#[test]
fn a_pipe_that_cannot_be_written_is_not_standard_output() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let recorder = begin(Plan { output: Sink::Pipe(full), ..all(Path::new("")) });
    let error = recorder.finish(9000).unwrap_err().to_string();
    assert!(error.starts_with("cannot write to the pipe of a reader: No space left"), "{error}");
}

#[test]
fn a_reader_that_closes_the_pipe_ends_the_recording() {
    let directory = tempfile::tempdir().unwrap();
    let (path, mut reader) = pipe(&directory);
    let mut recorder = begin_with_two(all(&path));
    assert_eq!(record(&mut recorder, &frame(1, 60)), Progress::GoesOn);
    assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    let mut taken = Vec::new();
    take(&mut reader, usize::MAX, &mut taken);
    let (contents, rest) = read_blocks(&taken);
    assert_eq!((contents.packets.len(), rest), (1, 0), "the batch is with the reader");

    drop(reader);
    assert_eq!(record(&mut recorder, &frame(2, 60)), Progress::GoesOn);
    assert_eq!(recorder.end_batch().unwrap(), Progress::Complete);
    assert_eq!(record(&mut recorder, &frame(3, 60)), Progress::Complete);
    // Even if there is another reader by now: it would see the end of a file without its beginning.
    let mut other = open(&path);
    recorder.finish(9000).unwrap();
    assert_eq!(other.read(&mut [0; 100]).unwrap(), 0);
}

#[test]
fn a_reader_that_is_gone_while_much_waits_ends_the_recording() {
    let directory = tempfile::tempdir().unwrap();
    let (path, reader) = pipe(&directory);
    let mut recorder = begin_with_two(all(&path));
    while !recorder.is_stalled() {
        assert_eq!(record(&mut recorder, &frame(1, 999)), Progress::GoesOn);
    }
    drop(reader);
    assert_eq!(recorder.end_batch().unwrap(), Progress::Complete);
    assert!(!recorder.is_pending() && !recorder.is_stalled());
    recorder.finish(9000).unwrap();
}

/// A reader of the API gets notes and counters while its recording goes on.
#[test]
fn notes_and_counters_are_written_on_the_way() {
    let (mut reader, writer) = io::pipe().unwrap();
    let output = Sink::Pipe(File::from(OwnedFd::from(writer)));
    let mut recorder = begin_with_two(Plan { output, ..all(Path::new("")) });
    let lose = |recorder: &mut Recorder, lost| {
        recorder.note_counters(1, Counters { matched: lost + 1, lost, limited: 0 });
        assert_eq!(record(recorder, &frame(1, 60)), Progress::GoesOn);
    };
    lose(&mut recorder, 2);
    assert_eq!(recorder.count(6000).unwrap(), Progress::GoesOn);
    let mut note = Vec::new();
    pcapng::note(&mut note, "{}");
    assert_eq!(recorder.append(&note).unwrap(), Progress::GoesOn);
    lose(&mut recorder, 5);
    assert_eq!(recorder.finish(9000).unwrap().files, Vec::<PathBuf>::new());
    let (mut taken, mut blocks) = (Vec::new(), Blocks::default());
    reader.read_to_end(&mut taken).unwrap();
    blocks.push(&taken);
    let of_first = |block| match block {
        Block::Packet(_) => Some("packet".to_owned()),
        Block::Statistics(of) => (of.interface.number() == 0).then(|| format!("{:?} lost", of.dropped)),
        Block::Note(json) => Some(json),
        _ => None,
    };
    let came: Vec<_> = iter::from_fn(|| blocks.pop().unwrap()).filter_map(of_first).collect();
    assert_eq!(came, ["packet", "Some(2) lost", "{}", "packet", "Some(5) lost"]);
}

/// Service managers and remote shells use a socket as standard output.
#[test]
fn a_socket_is_a_pipe_too() {
    let (mut reader, writer) = UnixStream::pair().unwrap();
    let mut writer = File::from(OwnedFd::from(writer));
    assert!(pipe::is_pipe(&writer).unwrap());
    let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| (at / 7) as u8).collect();
    let (count, error) = pipe::write(&mut writer, &bytes, Some(Duration::from_millis(10))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    assert!(count > 0 && count < bytes.len());
    let mut taken = vec![0; count];
    reader.read_exact(&mut taken).unwrap();
    assert!(taken == bytes[..count]);
    drop(reader);
    let (count, error) = pipe::write(&mut writer, &[], Some(Duration::ZERO)).unwrap_err();
    assert_eq!((count, error.kind()), (0, ErrorKind::BrokenPipe));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]

    /// However little the reader reads at a time, it gets the bytes of a file.
    #[test]
    fn a_pipe_has_the_bytes_of_a_file(
        steps in prop::collection::vec((0_usize..3000, 0_usize..6000), 1..60)
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (path, mut reader) = pipe(&directory);
        let file = directory.path().join("file");
        let mut recorders = [begin_with_two(all(&path)), begin_with_two(all(&file))];
        let mut taken = Vec::new();
        for (number, (length, most)) in (0..=255).cycle().zip(steps) {
            for recorder in &mut recorders {
                prop_assert_eq!(record(recorder, &frame(number, length)), Progress::GoesOn);
                prop_assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
            }
            take(&mut reader, most, &mut taken);
        }
        let [through_pipe, into_file] = recorders;
        let (_, taken) = finish(through_pipe, reader, taken);
        into_file.finish(9000).unwrap();
        prop_assert!(taken == fs::read(&file).unwrap());
    }
}
