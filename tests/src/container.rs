//! Starts a process of a pod in a cgroup, as a kubelet and a runtime do.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{Lab, Netns, SOON, eventually, process::Process};

/// An idle process in its own cgroup, in a network namespace. On drop, the process is killed and the cgroup is removed.
#[derive(Debug)]
pub struct Container {
    process: Process,
    /// The cgroups from the container's up to that of this test process.
    cgroups: Vec<PathBuf>,
}

impl Lab {
    /// Starts a process in `netns`. A moment later, as a runtime does, moves it to `cgroup`, a path like
    /// `kubepods/burstable/pod<uid>/<container>`.
    ///
    /// The cgroup is below a cgroup of this test process.
    #[track_caller]
    pub fn container(&self, netns: &Netns, cgroup: &str) -> Container {
        static CONTAINERS: AtomicU32 = AtomicU32::new(0);
        let number = CONTAINERS.fetch_add(1, Ordering::Relaxed);
        let root = root().join(format!("pm-{}-{number}", process::id()));
        let path = root.join(cgroup);
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let cgroups =
            path.ancestors().take_while(|path| path.starts_with(&root)).map(Path::to_owned).collect();
        // The process ends when this test process ends, however that happens.
        let mut command = netns.command("tail");
        command.args(["--follow", "/dev/null", "--pid", &process::id().to_string()]);
        let container = Container { process: Process::start(&mut command), cgroups };
        fs::write(path.join("cgroup.procs"), container.process.pid().to_string()).unwrap();
        container
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.process.kill();
        // A cgroup becomes empty some moments after its last process was reaped.
        for cgroup in &self.cgroups {
            eventually(SOON, || {
                fs::remove_dir(cgroup).map_err(|error| format!("{}: {error}", cgroup.display()))
            });
        }
    }
}

/// Mount point of the cgroups of version 2. Every kernel of the tests has them, with or without version 1.
pub(crate) fn root() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let cgroup2 = mounts.find(|fields| fields[2] == "cgroup2");
    cgroup2.expect("a cgroup2 file system is mounted")[1].into()
}

/// Removes a cgroup and the cgroups below it.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)?.flatten().filter(|entry| entry.path().is_dir()) {
        remove(&entry.path())?;
    }
    fs::remove_dir(path)
}
