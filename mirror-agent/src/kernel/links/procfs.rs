//! [`Processes`]: finds the pod of each process of the node in `/proc`.
//!
//! `/proc` must be the node's (`hostPID`). A scan lists it each time, but opens the files of new processes only, so it
//! is cheap enough to run many times a second. `inside` calls this module; `cgroup` interprets a cgroup's path.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io, mem,
    os::unix::fs::DirEntryExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use nix::time::{ClockId, clock_gettime};

use super::{cgroup::pod_uid, is_momentary};
use crate::kernel::netns::netns_id;
use crate::model::NetnsId;

const PROC: &str = "/proc";
/// The unit of times in `/proc/<pid>/stat`: `USER_HZ`, 100 a second on every supported architecture.
const TICK: Duration = Duration::from_millis(10);
/// The age after which a runtime has certainly moved a process into its namespaces. A younger process in a pod's cgroup
/// may still be in the node's namespace.
const SETTLED: Duration = Duration::from_secs(5);
/// The maximum number of namespaces of a pod that are read. A pod can create thousands, and each one is entered in each
/// round.
const MOST: usize = 16;

/// The processes as of the last scan.
#[derive(Default)]
pub(super) struct Processes {
    known: HashMap<u32, Process>,
    /// The start times and pids of each pod's processes, the oldest first, by UID.
    pods: BTreeMap<Arc<str>, BTreeSet<(Duration, u32)>>,
    /// The time of the scan since the boot.
    now: Duration,
}

/// The facts about a process.
struct Process {
    /// The inode of its directory: another process with the same pid has another inode.
    ino: u64,
    /// Its start time since the boot.
    started: Duration,
    /// The UID of its pod.
    pod: Option<Arc<str>>,
    /// The time since the boot at which it is read again.
    until: Duration,
}

/// A network namespace that a pod has processes in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The namespace.
    pub(super) netns: NetnsId,
    /// The oldest process in it.
    pub(super) pid: u32,
}

impl Candidate {
    /// Path of the namespace.
    pub(super) fn path(&self) -> PathBuf {
        file(self.pid, "ns/net")
    }
}

impl Processes {
    /// Finds processes that have started or ended.
    pub(super) fn scan(&mut self) -> io::Result<()> {
        self.now = since_boot()?;
        self.pods.clear();
        let mut known = mem::take(&mut self.known);
        for entry in fs::read_dir(PROC)? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // The directory listing includes the inode, so this costs nothing.
            let ino = entry.ino();
            let same = known.remove(&pid).filter(|process| process.ino == ino && self.now < process.until);
            let process = match same {
                Some(process) => process,
                None => match look(pid, ino, self.now) {
                    Ok(process) => process,
                    Err(error) if is_momentary(&error) => return Err(error),
                    // The process has ended, or its files are unreadable, which must not affect the others.
                    Err(_) => continue,
                },
            };
            if let Some(pod) = &process.pod {
                self.pods.entry(Arc::clone(pod)).or_default().insert((process.started, pid));
            }
            self.known.insert(pid, process);
        }
        Ok(())
    }

    /// Whether the pod had processes at the last scan.
    pub(super) fn is_running(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Returns the network namespaces of a pod's processes that may be the pod's, in the order of [`candidates`].
    pub(super) fn namespaces(&self, uid: &str, host: NetnsId) -> anyhow::Result<Vec<Candidate>> {
        let (mut processes, mut unreadable) = (Vec::new(), None);
        for (started, pid) in self.pods.get(uid).into_iter().flatten() {
            let path = file(*pid, "ns/net");
            let of = || format!("network namespace {}", path.display());
            // A zombie has no namespace any more.
            match unless_gone(netns_id(&path)) {
                Ok(None) => {}
                Ok(Some(netns)) => processes.push((*started, Candidate { netns, pid: *pid })),
                Err(error) if is_momentary(&error) => return Err(error).with_context(of),
                Err(error) => {
                    unreadable.get_or_insert_with(|| anyhow::Error::new(error).context(of()));
                }
            }
        }
        candidates(processes, unreadable, host, self.now)
    }

    /// Whether the pid still belongs to a process of the pod. If so, the data read before belong to that process.
    pub(super) fn is_of(pid: u32, uid: &str) -> io::Result<bool> {
        let cgroup = unless_gone(fs::read_to_string(file(pid, "cgroup")))?;
        Ok(cgroup.and_then(|text| pod_uid(&text)).is_some_and(|found| found == uid))
    }
}

/// Returns the namespaces that may be a pod's, each once, at most [`MOST`]. `processes` are its processes, the oldest
/// first, with their start times since the boot. `unreadable` is the error for one of their namespaces that could not
/// be read.
///
/// Containers may have created some of these namespaces (docker in a pod), and while a sandbox is recreated the old one
/// may still exist. The node's namespace is the result only if there is no other, and only if the oldest process is
/// older than [`SETTLED`]: a runtime moves a process into the pod's cgroup first, and then into its namespaces. The
/// agent may be denied access to a process (by AppArmor) but not to other processes of the pod. So `unreadable` is an
/// error only if the others yield no namespace.
fn candidates<E>(
    processes: impl IntoIterator<Item = (Duration, Candidate)>,
    unreadable: Option<E>,
    host: NetnsId,
    now: Duration,
) -> Result<Vec<Candidate>, E> {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut in_host = None;
    for (started, candidate) in processes {
        if candidate.netns == host {
            in_host.get_or_insert((started, candidate));
        } else if candidates.len() < MOST && candidates.iter().all(|other| other.netns != candidate.netns) {
            candidates.push(candidate);
        }
    }
    if candidates.is_empty() {
        if let Some(error) = unreadable {
            return Err(error);
        }
        let settled = in_host.filter(|(started, _)| now.saturating_sub(*started) > SETTLED);
        candidates.extend(settled.map(|(_, candidate)| candidate));
    }
    Ok(candidates)
}

/// Reads the facts about a process.
fn look(pid: u32, ino: u64, now: Duration) -> io::Result<Process> {
    let started = started(&fs::read_to_string(file(pid, "stat"))?).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("cannot read {PROC}/{pid}/stat"))
    })?;
    let pod = match fs::read_to_string(file(pid, "cgroup")) {
        Ok(cgroup) => pod_uid(&cgroup).map(Arc::from),
        // A kernel without cgroups, or a process that is ending; then the next scan will not find it.
        Err(error) if is_gone(&error) => None,
        Err(error) => return Err(error),
    };
    let until = if pod.is_some() { Duration::MAX } else { look_again(started, now) };
    Ok(Process { ino, started, pod, until })
}

/// Returns when to read a process again that is in no pod's cgroup.
///
/// A runtime starts a process in its own cgroup, and moves it into the pod's cgroup soon after, without a guaranteed
/// delay. So the result "no pod" is valid for a quarter of the process's age: hardly at all for a new process, for
/// hours for an old one. A move is noticed, and a process is read only some dozens of times in its whole life.
fn look_again(started: Duration, now: Duration) -> Duration {
    now + now.saturating_sub(started) / 4
}

/// Parses the start time since the boot in `/proc/<pid>/stat`.
fn started(stat: &str) -> Option<Duration> {
    // The second field is the name in parentheses, which may contain anything.
    let (_, behind_name) = stat.rsplit_once(')')?;
    let ticks: u64 = behind_name.split_whitespace().nth(19)?.parse().ok()?;
    Some(Duration::from_millis(ticks.saturating_mul(TICK.as_millis() as u64)))
}

pub(super) fn since_boot() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}

fn file(pid: u32, name: &str) -> PathBuf {
    Path::new(PROC).join(pid.to_string()).join(name)
}

/// Whether the process has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Returns `None` if the process has ended in the meantime.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_start_of_a_process_is_read_whatever_its_name() {
        let stat =
            |name: &str| format!("42 ({name}) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3\n");
        for name in ["pause", "a b", "x) S 1 (", ")", "é"] {
            assert_eq!(started(&stat(name)), Some(Duration::from_millis(123_450)));
        }
        for bad in ["", "42", "42 (pause) S 1", "42 (pause) S 1 1 1 0 -1 1 1 2 3 4 5 6 7 8 20 0 1 0 x 1"] {
            assert_eq!(started(bad), None, "{bad}");
        }
    }

    proptest! {
        /// At any scan interval, the move of a process is noticed before its age has grown by a quarter.
        #[test]
        fn none_is_not_believed_for_ever(started in 0..1_000_000u64, age in 0..1_000_000u64) {
            let (started, now) = (Duration::from_millis(started), Duration::from_millis(started + age));
            let again = look_again(started, now);
            prop_assert!(again >= now);
            prop_assert!(again - started <= (now - started) * 5 / 4);
            prop_assert!(age < 4 || again > now, "an old process is not looked at each time");
        }
    }

    #[test]
    fn the_nodes_namespace_is_a_pods_only_if_all_its_processes_stay_there() {
        let netns = |ino| NetnsId { dev: 4, ino };
        let (host, now) = (netns(1), Duration::from_secs(100));
        let of = |processes: &[(u64, u64)]| {
            let numbered = processes.iter().zip(1..).map(|((started, ino), pid)| {
                (Duration::from_secs(*started), Candidate { netns: netns(*ino), pid })
            });
            let found = candidates(numbered, None::<()>, host, now).unwrap();
            found.into_iter().map(|candidate| (candidate.netns.ino, candidate.pid)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[(10, 7), (20, 8), (30, 7)]), [(7, 1), (8, 2)], "each once, by its oldest process");
        assert_eq!(of(&[(10, 1), (20, 7)]), [(7, 2)], "another than the node's goes first");
        assert_eq!(of(&[(99, 1)]), [], "a runtime is about to move it");
        assert_eq!(of(&[(10, 1), (20, 1)]), [(1, 1)]);
        assert_eq!(of(&[(10, 1), (99, 1)]), [(1, 1)], "a new process does not make it doubtful");
        let many: Vec<_> = (0..1000).map(|number| (10, number + 7)).collect();
        assert_eq!(of(&many), (0..16).map(|number| (number + 7, number as u32 + 1)).collect::<Vec<_>>());
    }

    #[test]
    fn a_process_that_is_kept_from_us_is_an_error_only_where_the_others_lead_nowhere() {
        let netns = |ino| NetnsId { dev: 4, ino };
        let of = |processes: &[u64]| {
            let at = |ino: &u64| (Duration::from_secs(10), Candidate { netns: netns(*ino), pid: 1 });
            let found = candidates(processes.iter().map(at), Some("no"), netns(1), Duration::from_secs(100));
            found.map(|found| found.into_iter().map(|candidate| candidate.netns.ino).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]), Err("no"));
        assert_eq!(of(&[7, 8]), Ok(vec![7, 8]));
        assert_eq!(of(&[1, 7]), Ok(vec![7]));
        assert_eq!(of(&[1]), Err("no"), "the one that we cannot see may be elsewhere");
    }

    #[test]
    fn a_new_process_is_known_until_it_ends() {
        let mut processes = Processes::default();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        processes.scan().unwrap();
        let of = |processes: &Processes, pid| {
            processes.known.get(&pid).map(|process| (process.ino, process.started, process.pod.clone()))
        };
        let (pid, own) = (child.id(), std::process::id());
        let (first, us) = (of(&processes, pid), of(&processes, own));
        let age = processes.now - first.as_ref().unwrap().1;
        assert!(age < Duration::from_secs(30), "{age:?}");
        assert!(us.as_ref().unwrap().1 <= first.as_ref().unwrap().1, "a parent is older");

        processes.scan().unwrap();
        assert_eq!((of(&processes, pid), of(&processes, own)), (first, us.clone()));
        child.kill().unwrap();
        child.wait().unwrap();
        processes.scan().unwrap();
        assert_eq!((of(&processes, pid), of(&processes, own)), (None, us));
        assert!(!Processes::is_of(pid, "any").unwrap(), "it has ended, and that is no error");
    }
}
