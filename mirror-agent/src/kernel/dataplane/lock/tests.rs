//! Tests of the lock, its directory and the sockets in it.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::os::unix::fs::{chown, symlink};

use super::*;

const NOBODY: u32 = 65534;

/// A directory like `/run`, writable by root only.
fn run() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_directory_is_made_and_closed_to_others() {
    let run = run();
    let directory = run.path().join("podmirror");
    for before in [None, Some(0o755), Some(0o700)] {
        if let Some(mode) = before {
            fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
        }
        Places::make(&directory).unwrap();
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o7777, 0o700);
    }
}

#[test]
fn what_others_can_change_is_refused() {
    let run = run();
    let directory = run.path().join("podmirror");
    let refused = |directory: &Path| {
        let error = Places::make(directory).unwrap_err().to_string();
        assert!(error.contains("only root can write to"), "{error}");
        assert!(check_root_owns(directory).is_err());
    };
    fs::create_dir(&directory).unwrap();
    chown(&directory, Some(NOBODY), None).unwrap();
    refused(&directory);
    chown(&directory, Some(0), None).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o1777)).unwrap();
    refused(&directory);
    symlink(run.path().join("elsewhere"), run.path().join("link")).unwrap();
    fs::create_dir(run.path().join("elsewhere")).unwrap();
    refused(&run.path().join("link"));
    fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(run.path(), Permissions::from_mode(0o777)).unwrap();
    refused(&directory);
}

#[test]
fn one_holds_the_lock_however_often_it_is_made_and_removed() {
    let run = run();
    let path = run.path().join("1.lock");
    let held = lock_file(&path).unwrap().unwrap();
    assert!(lock_file(&path).unwrap().is_none());
    // The holder removes the file when it ends: a process that waits for the removed file must not take it for the
    // lock.
    fs::remove_file(&path).unwrap();
    let next = lock_file(&path).unwrap().unwrap();
    drop(held);
    assert!(lock_file(&path).unwrap().is_none());
    drop(next);
    assert!(lock_file(&path).unwrap().is_some());
}

#[test]
fn the_socket_of_an_agent_that_has_ended_is_replaced() {
    let run = run();
    let path = run.path().join("1.sock");
    assert!(call(&path).is_err());
    drop(listen(&path).unwrap());
    assert!(call(&path).is_err(), "the file is there, but no process listens");
    let _agent = listen(&path).unwrap();
    call(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn what_somebody_else_has_put_into_the_place_of_the_pins_goes() {
    let bpffs = run();
    let pins = Pins::new(bpffs.path());
    let make = || {
        pins.make_root().unwrap();
        let root = fs::symlink_metadata(pins.root()).unwrap();
        assert!(pins.is_roots() && root.mode() & 0o777 == 0o700);
    };
    make();
    fs::create_dir(pins.root().join("kept")).unwrap();
    make();
    assert!(pins.root().join("kept").exists(), "what is root's stays");
    chown(pins.root(), Some(NOBODY), None).unwrap();
    assert!(!pins.is_roots());
    make();
    assert!(!pins.root().join("kept").exists());
    fs::remove_dir(pins.root()).unwrap();
    symlink("/", pins.root()).unwrap();
    assert!(!pins.is_roots());
    make();
}

#[test]
fn a_recorder_takes_its_socket_along_and_no_other() {
    let run = run();
    let place = run.path().join("1.live.recorder");
    drop(RecorderSocket::at(place.clone()).unwrap());
    assert!(!place.exists());
    let first = RecorderSocket::at(place.clone()).unwrap();
    let second = RecorderSocket::at(place.clone()).unwrap();
    drop(first);
    call(&place).unwrap();
    drop(second);
    assert!(!place.exists());
}
