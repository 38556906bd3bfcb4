//! [`PodFile`]: a file of pods, watched for changes.
//!
//! The list of pods is always the complete contents of the file at some moment. An invalid file is reported once and
//! changes nothing. A file that is written in place is read when its writer closes it. A symbolic link is read again
//! when the link, or another link in its directory, is swapped, as in a ConfigMap volume. It is not read again when a
//! program writes through it into another directory.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use futures_util::StreamExt;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};
use tokio::time::Instant;
use tracing::{error, info};

use super::{
    PodSource,
    parse::parse,
    static_pods::{StaticPods, claimed_uid},
};
use crate::{model::Pod, util::told::is_news};

/// The interval between attempts to watch a deleted directory again.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A source of pods that reads them from a file.
pub struct PodFile {
    path: PathBuf,
    name: OsString,
    directory: PathBuf,
    events: Events,
    pods: Option<Vec<Pod>>,
    static_pods: Mutex<StaticPods>,
    /// The reason why the file is invalid at the moment, as logged.
    problem: Option<String>,
}

/// The source of events.
enum Events {
    /// The directory's inotify events.
    Watch(EventStream<Vec<u8>>),
    /// The directory does not exist, or its watch has failed; the time of the next attempt.
    Gone(Instant),
}

impl PodFile {
    /// Reads the file at `path` and starts to watch it. Must be called in a tokio runtime.
    ///
    /// An invalid file is no error here, but a directory that cannot be watched is one.
    pub fn watch(path: &Path) -> anyhow::Result<Self> {
        let of = || format!("cannot watch the pods file {}", path.display());
        let path = std::path::absolute(path).with_context(of)?;
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            anyhow::bail!("{}: that is a directory", of());
        };
        let (directory, name) = (directory.to_owned(), name.to_owned());
        let events = Events::Watch(watch(&directory).with_context(of)?);
        let mut file =
            Self { path, name, directory, events, pods: None, static_pods: Mutex::default(), problem: None };
        file.load();
        Ok(file)
    }

    /// Reads the file. Returns whether the list of pods has changed.
    fn load(&mut self) -> bool {
        match read(&self.path) {
            Ok(pods) => {
                let recovered = self.problem.take().is_some();
                let changed = self.pods.as_ref() != Some(&pods);
                if changed || recovered {
                    info!(file = %self.path.display(), pods = pods.len(), "read the pods file");
                }
                if changed {
                    self.pods = Some(pods);
                }
                changed
            }
            Err(problem) => {
                let problem = format!("{problem:#}");
                if is_news(&mut self.problem, &problem) {
                    let effect = match self.pods {
                        Some(_) => "the last good list of pods stays in force",
                        None => "there is no list of pods yet",
                    };
                    error!(file = %self.path.display(), error = problem, "the pods file is bad; {effect}");
                }
                false
            }
        }
    }

    /// Whether the file may have changed, and is not being written.
    fn concerns(&self, event: &EventOwned) -> bool {
        let is_link = fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.is_symlink());
        match &event.name {
            Some(name) if *name == self.name => is_link || !event.mask.contains(EventMask::CREATE),
            Some(_) => is_link,
            None => true,
        }
    }

    /// Waits for one event, and returns whether the file must be read because of it.
    async fn news(&mut self) -> bool {
        match &mut self.events {
            Events::Watch(events) => match events.next().await {
                Some(Ok(event)) => {
                    let gone = EventMask::IGNORED | EventMask::MOVE_SELF | EventMask::UNMOUNT;
                    if event.mask.intersects(gone) {
                        self.events = Events::Gone(Instant::now());
                    }
                    self.concerns(&event)
                }
                Some(Err(error)) => {
                    error!(directory = %self.directory.display(), %error, "cannot read inotify events; opening a new watch");
                    self.events = Events::Gone(Instant::now() + LOOK_AGAIN_AFTER);
                    true
                }
                None => {
                    self.events = Events::Gone(Instant::now() + LOOK_AGAIN_AFTER);
                    true
                }
            },
            Events::Gone(look_again) => {
                tokio::time::sleep_until(*look_again).await;
                self.events = match watch(&self.directory) {
                    Ok(events) => Events::Watch(events),
                    Err(_) => Events::Gone(Instant::now() + LOOK_AGAIN_AFTER),
                };
                true
            }
        }
    }
}

impl PodSource for PodFile {
    fn snapshot(&self) -> Option<Arc<[Pod]>> {
        let claims = self.pods.as_ref()?.iter().map(|pod| (pod.clone(), claimed_uid(pod))).collect();
        Some(self.static_pods.lock().unwrap_or_else(PoisonError::into_inner).settle(claims).into())
    }

    async fn changed(&mut self) {
        while !(self.news().await && self.load()) {}
    }
}

/// Watches a directory for complete files. Does not watch for `MODIFY`, which is sent while a file is being written.
fn watch(directory: &Path) -> io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    let events = WatchMask::CLOSE_WRITE
        | WatchMask::MOVE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::ATTRIB
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    inotify.watches().add(directory, events)?;
    inotify.into_event_stream(vec![0; 4096])
}

fn read(path: &Path) -> anyhow::Result<Vec<Pod>> {
    // A FIFO or a terminal would block the agent.
    anyhow::ensure!(fs::metadata(path)?.is_file(), "not a regular file");
    Ok(parse(&fs::read_to_string(path)?)?)
}

#[cfg(test)]
mod tests;
