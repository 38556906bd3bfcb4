//! Runs a child process, keeps its lines on standard error, and ends it by a signal with a deadline.
//!
//! The agent and tcpdump run this way. A process that still runs on drop is killed by its pid.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{SOON, eventually};

#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    status: Option<ExitStatus>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::fed_by(command, Stdio::null())
    }

    /// The same, with this standard input.
    pub(crate) fn fed_by(command: &mut Command, stdin: impl Into<Stdio>) -> Self {
        let started = command.stdin(stdin).stderr(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let sink = Arc::clone(&lines);
        let reader = thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line))
        });
        Self { child, status: None, lines, reader: Some(reader) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The lines on standard error so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    /// The exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().unwrap();
            if self.status.is_some() {
                // Nothing is lost: the reader thread ends when it has read everything.
                self.reader.take().into_iter().for_each(|reader| reader.join().unwrap());
            }
        }
        self.status
    }

    /// Waits for a line that contains `text`.
    #[track_caller]
    pub(crate) fn wait_for_line(&mut self, text: &str) -> String {
        eventually(SOON, || {
            let ended = self.ended();
            let found = self.lines().into_iter().find(|line| line.contains(text));
            assert!(
                found.is_some() || ended.is_none(),
                "ended ({ended:?}) without '{text}': {:#?}",
                self.lines()
            );
            found.ok_or_else(|| format!("no line with '{text}': {:#?}", self.lines()))
        })
    }

    /// Sends a signal and waits for the end.
    #[track_caller]
    pub(crate) fn end(&mut self, signal: Signal) -> ExitStatus {
        if self.ended().is_none() {
            self.signal(signal);
        }
        self.wait()
    }

    /// Stops the process (SIGSTOP) until [`Process::go_on`].
    #[track_caller]
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Continues the process.
    #[track_caller]
    pub(crate) fn go_on(&self) {
        self.signal(Signal::SIGCONT);
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) {
        // The kernel does not reuse the pid before the process is reaped.
        assert!(self.status.is_none(), "has ended: {:#?}", self.lines());
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        eventually(Duration::from_secs(20), || {
            self.ended().ok_or_else(|| format!("pid {} has not ended: {:#?}", self.pid(), self.lines()))
        })
    }

    pub(crate) fn kill(&mut self) {
        if self.ended().is_none() {
            // Both fail only if the process has just ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
