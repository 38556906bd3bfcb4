//! Tests with directories and disks: rotations, modes of files, failures, and what is readable after them.

use std::{fs::Permissions, os::unix::fs::PermissionsExt as _, thread};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

use super::*;

fn rotation(path: &Path, bytes: u64, files: u32) -> Plan {
    Plan { kept: Kept::Files { bytes, files }, ..all(path) }
}

/// The files in a directory, by name.
fn files_in(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn the_newest_files_stay_and_each_is_complete() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin(rotation(&path, 2500, 2));
    add(&mut recorder, 1);
    for number in 1..=7_u8 {
        if number == 6 {
            // Added in the middle of the third file.
            add(&mut recorder, 2);
        }
        recorder.note_counters(1, Counters { matched: number.into(), ..Counters::default() });
        let head = head(1, u64::from(number) * 1_000_000_000, 1000);
        assert_eq!(recorder.record(&head, &frame(number, 1000)), Progress::GoesOn);
        assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    }
    let summary = recorder.finish(8_000_000_000).unwrap();
    let names = ["web_00003_19700101T000005.pcapng", "web_00004_19700101T000007.pcapng"];
    assert_eq!(summary.files, names.map(|name| directory.path().join(name)));
    assert_eq!(summary.files, files_in(directory.path()));
    assert_eq!((summary.packets, summary.kept), (7, 3));

    let contents: Vec<Contents> = summary.files.iter().map(|path| read(path)).collect();
    let numbers: Vec<Vec<u8>> =
        contents.iter().map(|file| file.packets.iter().map(|packet| packet.bytes[0]).collect()).collect();
    assert_eq!(numbers, [vec![5, 6], vec![7]]);
    for (file, (received, end_ns)) in contents.iter().zip([(7, 7_999_999_000), (7, 8_999_999_000)]) {
        assert_eq!(file.names, ["shop/web-1 eth0", "shop/web-2 eth0"]);
        let times = Counted { start_ns: Some(1_000_000_000), end_ns: Some(end_ns), ..Counted::default() };
        let first = Counted { received: Some(received), dropped: Some(0), limited: Some(0), ..times.clone() };
        assert_eq!(file.statistics, [first, times]);
    }
}

#[test]
fn the_files_of_another_run_stay_as_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let other = directory.path().join("web_00001_19700101T000001.pcapng");
    fs::write(&other, "mine").unwrap();
    let mut recorder = begin_with_two(rotation(&path, 2500, 1));
    for number in 1..=4 {
        assert_eq!(record(&mut recorder, &frame(number, 1000)), Progress::GoesOn);
    }
    let summary = recorder.finish(9000).unwrap();
    assert_eq!(summary.files, [directory.path().join("web_00003_19700101T000001.pcapng")]);
    assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn a_file_that_was_moved_away_is_not_missed() {
    let directory = tempfile::tempdir().unwrap();
    let mut recorder = begin_with_two(rotation(&directory.path().join("web"), 1000, 1));
    assert_eq!(record(&mut recorder, &frame(1, 1000)), Progress::GoesOn);
    fs::remove_file(directory.path().join("web_00001_19700101T000001")).unwrap();
    assert_eq!(record(&mut recorder, &frame(2, 1000)), Progress::GoesOn);
    assert_eq!(read(&recorder.finish(9000).unwrap().files[0]).packets.len(), 1);
}

#[test]
fn files_are_for_their_owner_and_replace_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let path = directory.path().join("web.pcapng");
    fs::write(&path, vec![0; 1 << 16]).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    begin_with_two(all(&path)).finish(9000).unwrap();
    assert_eq!((mode(&path), read(&path).names.len()), (0o600, 2));

    let new = directory.path().join("new");
    begin_with_two(all(&new)).finish(9000).unwrap();
    let files = begin_with_two(rotation(&new, 1000, 1)).finish(9000).unwrap().files;
    assert_eq!((mode(&new), mode(&files[0])), (0o600, 0o600));
}

#[test]
fn a_wrong_path_is_an_error_at_the_beginning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none/web.pcapng");
    for kept in [Kept::All, Kept::First { bytes: 1000 }, Kept::Files { bytes: 1000, files: 1 }] {
        let error = Recorder::begin(Plan { kept, ..all(&path) }, STARTED, "test").unwrap_err().to_string();
        let start = format!("cannot create {}", directory.path().join("none/web").display());
        assert!(error.starts_with(&start) && error.contains("No such file"), "{error}");
    }
    for output in [Sink::Stdout, Sink::Path("/".into())] {
        let plan = Plan { output, ..rotation(&path, 1000, 1) };
        let error = Recorder::begin(plan, STARTED, "test").unwrap_err().to_string();
        assert!(error.starts_with("several files need the path of a file"), "{error}");
    }
}

#[test]
fn more_than_the_memory_is_an_error_that_leaves_the_file_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    for kept in [Kept::First { bytes: u64::MAX }, Kept::Last(Bound::Bytes(u64::MAX))] {
        let error = Recorder::begin(Plan { kept, ..all(&path) }, STARTED, "test").unwrap_err().to_string();
        assert!(error.starts_with("cannot get 18446744073709551615 bytes of memory"), "{error}");
        assert!(!path.exists());
    }
}

#[test]
fn the_beginning_of_a_file_is_readable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin_with_two(all(&path));
    for number in 1..=3 {
        assert_eq!(record(&mut recorder, &frame(number, 60)), Progress::GoesOn);
    }
    recorder.finish(9000).unwrap();
    let (file, whole) = (fs::read(&path).unwrap(), read(&path));
    let mut most = 0;
    for end in 0..file.len() {
        let packets = read_blocks(&file[..end]).0.packets;
        assert!(packets.len() >= most);
        most = packets.len();
        assert_eq!(packets, whole.packets[..most]);
    }
    assert_eq!(most, 3);
}

/// Runs a test with a disk of 64 KiB, in a mount namespace that ends with the thread.
fn on_a_small_disk(test: impl FnOnce(&Path) + Send + 'static) {
    let run = thread::spawn(move || {
        let directory = tempfile::tempdir().unwrap();
        let none: Option<&str> = None;
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("tmpfs"), directory.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
        test(directory.path());
        // Lazily: for a moment, a program that another test starts also has the files of this one open.
        umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
    });
    if let Err(panic) = run.join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn a_full_disk_is_one_error_and_what_was_written_is_readable() {
    on_a_small_disk(|directory| {
        let path = directory.join("web.pcapng");
        let mut recorder = begin_with_two(all(&path));
        let mut numbers = 0..=255_u8;
        while record(&mut recorder, &frame(numbers.next().unwrap(), 999)) == Progress::GoesOn {}
        let error = recorder.end_batch().unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write to {}: No space", path.display())), "{error}");
        assert_eq!(recorder.end_batch().unwrap(), Progress::Complete, "it is reported once");

        let packets = read(&path).packets;
        assert!(packets.len() > 50, "{}", packets.len());
        assert!(packets.iter().zip(0..).all(|(packet, number)| packet.bytes == frame(number, 999)));
        // The end of the recording changes nothing more, and counts what is in the file.
        let summary = recorder.finish(9000).unwrap();
        assert_eq!(read(&path).packets, packets);
        let count = packets.len() as u64;
        assert_eq!((summary.packets, summary.kept), (count, count));
    });
}

#[test]
fn a_full_disk_at_the_end_leaves_what_fits() {
    on_a_small_disk(|directory| {
        let path = directory.join("web.pcapng");
        let mut recorder = begin_with_two(Plan { kept: Kept::Last(Bound::Bytes(1 << 20)), ..all(&path) });
        for number in 0..=255 {
            assert_eq!(record(&mut recorder, &frame(number, 999)), Progress::GoesOn);
        }
        let error = recorder.finish(9000).unwrap_err().to_string();
        assert!(error.contains("No space"), "{error}");
        assert!(read(&path).packets.len() > 50);
    });
}

/// The disk can become full at each step: within a packet, at the end of a file, and at the beginning of the next one.
#[test]
fn a_rotation_on_a_full_disk_counts_what_its_files_hold() {
    for length in (500..1500).step_by(47) {
        on_a_small_disk(move |directory| {
            let mut recorder = begin_with_two(rotation(&directory.join("web"), 20_000, 10));
            let mut goes_on = true;
            while goes_on {
                goes_on = record(&mut recorder, &frame(1, length)) == Progress::GoesOn;
                goes_on &= recorder.end_batch().is_ok();
            }
            let summary = recorder.finish(9000).unwrap();
            let counts: Vec<_> = summary.files.iter().map(|file| read(file).packets.len() as u64).collect();
            assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
            let sum = counts.iter().sum();
            assert_eq!((summary.packets, summary.kept), (sum, sum));
            assert_eq!(files_in(directory), summary.files);
        });
    }
}
