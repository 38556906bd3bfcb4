//! Starts and stops the cluster's processes. Each has a pid file.
//!
//! A pid file (`pid/<name>`) holds the pid and the process's start time. Only a process that matches both is the
//! component. So a process that has got the pid since is never killed.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};

use super::state;
use mirror_test_tools::process::command;

/// Timeout for a component to answer or to end, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a port can stay in use after its process has ended.
const RELEASE: Duration = Duration::from_secs(3);
/// Timeout for a component to end after SIGTERM.
const ORDERLY: Duration = Duration::from_secs(5);

/// A process. The start time distinguishes it from earlier or later processes with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    /// Start time, in clock ticks since the machine's start.
    started: u64,
}

impl Process {
    /// The process that has this pid now. `None` for a zombie, which only waits for its parent.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let started = alive_since(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        Some(Self { pid, started })
    }

    pub(super) fn runs(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends a signal. A process that has already ended is no error.
    pub(super) fn signal(self, signal: Signal) {
        if self.runs() {
            let _ = signal::kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// Kills the process, and waits until it has ended.
    pub(super) fn kill(self) -> Result<()> {
        self.signal(Signal::SIGKILL);
        eventually(PATIENCE, || Ok((!self.runs()).then_some(())))?
            .with_context(|| format!("process {} does not end", self.pid))
    }
}

/// The start time in `/proc/<pid>/stat`, unless the process has ended with all of its threads.
fn alive_since(stat: &str) -> Option<u64> {
    // The second field is the program's name in parentheses, and can contain both spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let (state, threads) = (fields.next()?, fields.nth(16)?);
    if state == "X" || (state == "Z" && threads == "1") {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

/// One of the cluster's programs, and how to start it.
pub(super) struct Component {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
    /// Directories in which the program looks for other programs before the system's directories.
    path: Vec<PathBuf>,
    /// Ports that the program will listen on.
    ports: &'static [u16],
}

impl Component {
    pub(super) fn new(name: &'static str, program: PathBuf, ports: &'static [u16]) -> Self {
        Self { name, program, arguments: Vec::new(), environment: Vec::new(), path: Vec::new(), ports }
    }

    /// Adds space-separated arguments.
    pub(super) fn arguments(mut self, words: &str) -> Self {
        self.arguments.extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds a variable to its environment.
    pub(super) fn with(mut self, variable: &'static str, value: &'static str) -> Self {
        self.environment.push((variable, value));
        self
    }

    pub(super) fn finds_in(mut self, dir: impl Into<PathBuf>) -> Self {
        self.path.push(dir.into());
        self
    }

    /// Starts the component unless it runs, and waits until `is_ready`.
    pub(super) fn up(&self, mut is_ready: impl FnMut() -> bool) -> Result<()> {
        let begun = Instant::now();
        let running = process(self.name);
        let mut process = running.map_or_else(|| self.start(), Ok)?;
        let ready = eventually(PATIENCE, || {
            if !process.runs() {
                if Some(process) != running {
                    bail!("{} has ended{}", self.name, self.last_words());
                }
                // The process was about to end.
                process = self.start()?;
            }
            Ok(is_ready().then_some(()))
        })?;
        if ready.is_none() {
            bail!("{} is not ready after {} s{}", self.name, PATIENCE.as_secs(), self.last_words());
        }
        if Some(process) == running {
            println!("    {}: runs", self.name);
        } else {
            println!("    {}: ready after {:.1} s", self.name, begun.elapsed().as_secs_f32());
        }
        Ok(())
    }

    fn start(&self) -> Result<Process> {
        for port in self.ports {
            let free = || Ok(TcpListener::bind(("0.0.0.0", *port)).ok());
            // A process that has just been killed releases its port after a moment.
            if eventually(RELEASE, free)?.is_none() {
                bail!(
                    "TCP port {port}, which {} needs, is in use by another program (`ss -ltnp 'sport = :{port}'` tells which): stop it first",
                    self.name
                );
            }
        }
        fs::create_dir_all(state::path("log"))?;
        fs::create_dir_all(state::path("pid"))?;
        let log = File::options().create(true).append(true).open(self.log())?;
        let path =
            self.path.iter().cloned().chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        let mut child = command(&self.program);
        child.args(&self.arguments).env_clear().env("PATH", std::env::join_paths(path)?).current_dir("/");
        child.envs(self.environment.iter().copied());
        child.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C on the terminal must not reach the component.
        child.process_group(0);
        let child = child.spawn().with_context(|| self.program.display().to_string())?;
        let process = Process::of(child.id().cast_signed())
            .with_context(|| format!("{} has ended at once{}", self.name, self.last_words()))?;
        fs::write(pid_file(self.name), format!("{} {}\n", process.pid, process.started))?;
        Ok(process)
    }

    fn log(&self) -> PathBuf {
        state::path("log").join(format!("{}.log", self.name))
    }

    /// The end of the component's log, for an error message.
    fn last_words(&self) -> String {
        let text = fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        let lines: String = lines.iter().rev().map(|line| format!("\n    | {line}")).collect();
        format!("; the end of {}:{lines}", self.log().display())
    }
}

/// The running process of a component.
pub(super) fn process(name: &str) -> Option<Process> {
    let text = fs::read_to_string(pid_file(name)).ok()?;
    let (pid, started) = text.trim().split_once(' ')?;
    let process = Process { pid: pid.parse().ok()?, started: started.parse().ok()? };
    process.runs().then_some(process)
}

/// Stops a component if it runs: by SIGTERM, and if it does not end, by SIGKILL.
pub(super) fn stop(name: &str) -> Result<()> {
    if let Some(process) = process(name) {
        let begun = Instant::now();
        process.signal(Signal::SIGTERM);
        if eventually(ORDERLY, || Ok((!process.runs()).then_some(())))?.is_none() {
            println!("    {name}: does not end, and is killed");
            process.kill()?;
        }
        println!("    {name}: ended after {:.1} s", begun.elapsed().as_secs_f32());
    }
    let file = pid_file(name);
    if file.exists() {
        fs::remove_file(file)?;
    }
    Ok(())
}

fn pid_file(name: &str) -> PathBuf {
    Path::new(state::DIR).join("pid").join(name)
}

/// Calls `ask` until it returns an answer or the timeout has passed.
pub(super) fn eventually<T>(
    limit: Duration,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let deadline = Instant::now() + limit;
    loop {
        let answer = ask()?;
        if answer.is_some() || Instant::now() > deadline {
            return Ok(answer);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn the_start_time_is_read_behind_any_name_and_a_zombie_has_none() {
        let rest = |threads| format!("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 {threads} 18 4711 20");
        assert_eq!(alive_since(&format!("7 (a) b (c)) S {}", rest(1))), Some(4711));
        assert_eq!(alive_since(&format!("7 (a) Z {}", rest(2))), Some(4711), "a thread still runs");
        assert_eq!(alive_since(&format!("7 (a) Z {}", rest(1))), None);
        assert_eq!(alive_since("7 (a"), None);
    }

    #[test]
    fn a_process_with_a_pid_used_before_is_another_one() {
        let own = Process::of(std::process::id().cast_signed()).unwrap();
        assert!(own.runs());
        assert!(!Process { started: own.started + 1, ..own }.runs());
    }
}
