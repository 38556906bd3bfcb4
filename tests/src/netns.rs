//! Creates, enters and removes network namespaces, and enters existing ones.
//!
//! Commands and closures enter a namespace by setns(2). `ip netns exec` would mount a new /sys over the old one, which
//! hides the BPF file system.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::{self, Command, Output},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    unistd::Uid,
};

use crate::{FrameSocket, super_frame};

pub(crate) const DIRECTORY: &str = "/run/netns";

/// A network namespace. A namespace that was created here is bound to a file in `/run/netns`, as `ip netns` does, and
/// is removed on drop.
#[derive(Debug)]
pub struct Netns {
    name: String,
    path: PathBuf,
    file: File,
    is_ours: bool,
}

impl Netns {
    /// Uses an existing namespace, given by any file that refers to it. It is not removed on drop.
    #[track_caller]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { name: path.display().to_string(), path, file, is_ours: false }
    }

    /// Creates a namespace with the loopback device up.
    pub fn new(name: &str) -> Self {
        assert!(Uid::effective().is_root(), "this test makes network namespaces: run it as root");
        fs::create_dir_all(DIRECTORY).unwrap();
        let path = Path::new(DIRECTORY).join(name);
        File::create_new(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        thread::scope(|scope| {
            let bind = || {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                mount(Some("/proc/thread-self/ns/net"), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                    .unwrap();
            };
            scope.spawn(bind).join().unwrap();
        });
        let file = File::open(&path).unwrap();
        let netns = Self { name: name.to_owned(), path, file, is_ours: true };
        netns.ip("link set lo up");
        netns
    }

    /// The name in `/run/netns`, or the path of the file that refers to the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `f` on a thread in the namespace. A socket that `f` returns stays in the namespace.
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&self.file, CloneFlags::CLONE_NEWNET).unwrap();
            f()
        };
        match thread::scope(|scope| scope.spawn(inside).join()) {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// A command that will run in the namespace, by nsenter(1). With a `pre_exec` that enters the namespace, each start
    /// would copy the page tables of this process.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/fd/{}", process::id(), self.file.as_raw_fd())).arg(program);
        command
    }

    /// Runs a command line (split at spaces), and returns its output and exit status.
    pub fn try_run(&self, line: &str) -> Output {
        let mut words = line.split_whitespace();
        let program = words.next().expect("a command");
        let run = self.enter(|| Command::new(program).args(words).output());
        run.unwrap_or_else(|error| panic!("cannot run {program}: {error}"))
    }

    /// Runs a command line (split at spaces) that must succeed, and returns its output.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        let output = self.try_run(line);
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Names of the devices, sorted.
    #[track_caller]
    pub fn devices(&self) -> Vec<String> {
        let lines = self.ip("-o link show");
        let name = |line: &str| line.split([':', '@']).nth(1).unwrap().trim().to_owned();
        let mut names: Vec<String> = lines.lines().map(name).collect();
        names.sort();
        names
    }

    /// Whether the kernel supports devices of this kind.
    pub fn has_link_kind(&self, kind: &str) -> bool {
        let made = self.try_run(&format!("ip link add has-kind type {kind} external")).status.success();
        if made {
            self.ip("link delete has-kind");
        }
        made
    }

    /// Runs `ip` with these arguments.
    #[track_caller]
    pub fn ip(&self, words: &str) -> String {
        self.run(&format!("ip {words}"))
    }

    /// Runs `tc` with these arguments.
    #[track_caller]
    pub fn tc(&self, words: &str) -> String {
        self.run(&format!("tc {words}"))
    }

    /// Sets a sysctl of the namespace, by its path below `/proc/sys/net`.
    #[track_caller]
    pub fn sysctl(&self, key: &str, value: &str) {
        let path = format!("/proc/sys/net/{key}");
        self.enter(|| fs::write(&path, value)).unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// Sends a frame from `device` unchanged.
    #[track_caller]
    pub fn send_frame(&self, device: &str, frame: &[u8]) {
        let sent = self.sender(device).send(frame);
        assert_eq!(sent.unwrap_or_else(|error| panic!("{} bytes: {error}", frame.len())), frame.len());
    }

    /// Sends a super-frame from `device`, see [`super_frame`].
    #[track_caller]
    pub fn send_super_frame(&self, device: &str, frame: &[u8], segment: u16) {
        let message = super_frame(frame, segment);
        assert_eq!(self.sender(device).with_super_frames().send(&message).unwrap(), message.len());
    }

    /// A socket that sends frames from `device` unchanged.
    #[track_caller]
    pub fn sender(&self, device: &str) -> FrameSocket {
        self.try_sender(device).unwrap_or_else(|error| panic!("{device}: {error}"))
    }

    /// As [`Netns::sender`], but fails if there is no such device.
    pub fn try_sender(&self, device: &str) -> io::Result<FrameSocket> {
        self.enter(|| FrameSocket::open(device, 0))
    }

    /// A socket that receives every frame that `device` sends or receives from now on.
    #[track_caller]
    pub fn listener(&self, device: &str) -> FrameSocket {
        let opened = self.enter(|| FrameSocket::open(device, libc::ETH_P_ALL as u16));
        opened.unwrap_or_else(|error| panic!("{device}: {error}"))
    }

    /// Stops new devices of the namespace from sending packets by themselves: no duplicate address detection, no router
    /// solicitation, no late multicast report.
    pub fn keep_quiet(&self) {
        for scope in ["all", "default"] {
            for (key, value) in [
                ("accept_dad", "0"),
                ("accept_ra", "0"),
                ("dad_transmits", "0"),
                ("router_solicitations", "0"),
                ("addr_gen_mode", "1"),
                ("mldv1_unsolicited_report_interval", "1"),
                ("mldv2_unsolicited_report_interval", "1"),
            ] {
                self.sysctl(&format!("ipv6/conf/{scope}/{key}"), value);
            }
        }
    }

    /// Makes a device keep its neighbour entries, so that it sends no probe during the test.
    pub fn keep_neighbours(&self, device: &str) {
        for family in ["ipv4", "ipv6"] {
            self.sysctl(&format!("{family}/neigh/{device}/base_reachable_time_ms"), "3600000");
            self.sysctl(&format!("{family}/neigh/{device}/delay_first_probe_time"), "3600");
        }
    }
}

/// Runs `f` as the user nobody, without capabilities, on a thread of its own in the caller's namespaces.
pub fn as_nobody<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    const NOBODY: libc::uid_t = 65534;
    let unprivileged = || {
        // SAFETY: these calls take numbers, and an empty list of groups. As raw system calls they change only this
        // thread.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY), 0);
        }
        f()
    };
    match thread::scope(|scope| scope.spawn(unprivileged).join()) {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Removes a namespace's file. The namespace ends with its last process and socket.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    umount2(path, MntFlags::MNT_DETACH)?;
    fs::remove_file(path)
}

impl Drop for Netns {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = remove(&self.path)
        {
            eprintln!("cannot remove the network namespace {}: {error}", self.name);
        }
    }
}
