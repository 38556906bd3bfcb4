//! Checks that the packets that `capture` keeps in memory fit into its container's memory limit.
//!
//! If a container exceeds its limit, the kernel kills one of its processes, which can be the agent itself. So a bound
//! that does not fit is refused before the recording begins. [`tail`](super) calls this once. Outside a container no
//! limit is known here.

use std::{fs, path::Path};

use anyhow::bail;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use tracing::warn;

use crate::capture::recording::{Bound, Kept, MAX_TIME_BYTES};

/// The mount point of the container's own cgroup.
const CGROUP: &str = "/sys/fs/cgroup";
/// Reserve for the processes of the container, in bytes: their need varies.
const RESERVE: u64 = 16 << 20;
/// The names of the files with the limit and with the usage, of cgroup versions 2 and 1, and the key of the page cache
/// that the kernel can reclaim.
const FILES: [[&str; 4]; 2] = [
    ["memory.max", "memory.current", "memory.stat", "inactive_file"],
    [
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ],
];

/// Checks that the packets in memory fit next to the kernel's ring of `ring` bytes. `twice` explains why the packets
/// are in memory a second time at the end; `instead` is an alternative for the user.
///
/// # Errors
///
/// They do not fit. The message names the largest value that fits.
pub(crate) fn check(kept: Kept, ring: u32, twice: Option<&str>, instead: &str) -> anyhow::Result<()> {
    let memory = Memory::of_cgroup(Path::new(CGROUP));
    match memory.and_then(|memory| memory.refuses(kept, ring, twice, instead)) {
        // The volume of packets in that time is unknown.
        Some(why) if matches!(kept, Kept::Last(Bound::Time(_))) => warn!("{why}"),
        Some(why) => bail!(why),
        None => {}
    }
    Ok(())
}

/// The memory of a container, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    limit: u64,
    used: u64,
}

impl Memory {
    /// The memory of the cgroup with these files. `None`: it has no limit.
    fn of_cgroup(root: &Path) -> Option<Self> {
        FILES.into_iter().find_map(|[limit, used, stat, inactive]| {
            let read = |name| fs::read_to_string(root.join(name)).ok();
            // Version 2 has `max` instead of a limit.
            let limit = read(limit)?.trim().parse().ok()?;
            let used: u64 = read(used)?.trim().parse().ok()?;
            let stat = read(stat)?;
            let inactive = stat.lines().find_map(|line| line.strip_prefix(inactive)?.trim().parse().ok());
            Some(Self { limit, used: used.saturating_sub(inactive.unwrap_or(0)) })
        })
    }

    /// The reason why packets that are kept in this way do not fit; the arguments are those of [`check`].
    fn refuses(self, kept: Kept, ring: u32, twice: Option<&str>, instead: &str) -> Option<String> {
        let (flag, bytes) = match kept {
            Kept::First { bytes } => ("--first", bytes),
            Kept::Last(Bound::Bytes(bytes)) => ("--ring", bytes),
            // Few packets need little memory.
            Kept::Last(Bound::Time(_)) => ("--ring", MAX_TIME_BYTES),
            Kept::All | Kept::Files { .. } => return None,
        };
        let copies = if twice.is_some() { 2 } else { 1 };
        let free = self.limit.saturating_sub(self.used);
        let most = free.saturating_sub(RESERVE + u64::from(ring)) / copies;
        let mib = |bytes: u64| bytes >> 20;
        (bytes > most).then(|| {
            let twice = twice.map_or_else(String::new, |why| format!(" (twice, because {why})"));
            format!(
                "{flag} can take {} MiB{twice}, and {} of the {} MiB of this container's memory are free; use at most \
                 {flag} {}MiB{instead}, or a higher limit of the container",
                mib(bytes),
                mib(free),
                mib(self.limit),
                mib(most),
            )
        })
    }
}

/// Whether a file with this path would be in memory (tmpfs).
pub(crate) fn is_in_memory(file: &Path) -> bool {
    let directory = file.parent().filter(|directory| !directory.as_os_str().is_empty());
    statfs(directory.unwrap_or(Path::new("."))).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const TWICE: Option<&str> = Some("the file is in memory, too");
    const INSTEAD: &str = ", or --rotate, which keeps nothing in memory";

    fn cgroup(files: &[(&str, &str)]) -> Option<Memory> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("memory")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(root.path().join(name), text).unwrap());
        Memory::of_cgroup(root.path())
    }

    #[test]
    fn the_limit_of_a_container_is_read() {
        let stat = "anon 5\ninactive_file 30\nactive_file 7\n";
        let used = ("memory.current", "100\n");
        let read = |limit| cgroup(&[("memory.max", limit), used, ("memory.stat", stat)]);
        assert_eq!(read("268435456\n"), Some(Memory { limit: 256 * MIB, used: 70 }));
        assert_eq!(read("max\n"), None);
        let version_1 = [
            ("memory/memory.limit_in_bytes", "268435456\n"),
            ("memory/memory.usage_in_bytes", "100\n"),
            ("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 30\n"),
        ];
        assert_eq!(cgroup(&version_1), Some(Memory { limit: 256 * MIB, used: 70 }));
        assert_eq!(cgroup(&[]), None, "not in a container");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_most_that_fits() {
        let memory = Memory { limit: 256 * MIB, used: 60 * MIB };
        let ring = 4 << 20;
        let last = |mib| Kept::Last(Bound::Bytes(mib * MIB));
        assert_eq!(memory.refuses(last(176), ring, None, INSTEAD), None);
        assert_eq!(
            memory.refuses(last(300), ring, None, INSTEAD).unwrap(),
            "--ring can take 300 MiB, and 196 of the 256 MiB of this container's memory are free; use at most --ring \
             176MiB, or --rotate, which keeps nothing in memory, or a higher limit of the container"
        );
        assert!(memory.refuses(last(100), ring, TWICE, INSTEAD).unwrap().contains("at most --ring 88MiB"));
        assert!(
            memory
                .refuses(Kept::First { bytes: u64::MAX }, ring, None, INSTEAD)
                .unwrap()
                .starts_with("--first can")
        );
        let half_a_minute = Kept::Last(Bound::Time(Duration::from_secs(30)));
        assert_eq!(memory.refuses(half_a_minute, ring, TWICE, INSTEAD), None);
        for kept in [Kept::All, Kept::Files { bytes: u64::MAX, files: 10 }] {
            assert_eq!(Memory { limit: 0, used: 0 }.refuses(kept, ring, TWICE, INSTEAD), None);
        }
    }

    proptest! {
        #[test]
        fn what_is_not_refused_fits(limit: u64, used: u64, bytes: u64, ring: u32, twice: bool) {
            let needs = u128::from(bytes) * if twice { 2 } else { 1 } + u128::from(ring) + u128::from(used);
            if (Memory { limit, used }).refuses(Kept::First { bytes }, ring, TWICE.filter(|_| twice), INSTEAD).is_none() && bytes > 0 {
                prop_assert!(needs <= u128::from(limit));
            }
        }
    }
}
