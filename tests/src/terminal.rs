//! A program on a terminal of its own, which `script` of util-linux creates, and its output there.

use std::{
    fs,
    io::{self, PipeWriter, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::process::Process;

/// A program on a terminal. It receives SIGHUP on drop.
#[derive(Debug)]
pub struct Terminal {
    process: Process,
    keys: PipeWriter,
    shown: PathBuf,
}

impl Terminal {
    /// Starts this command, whose words must have no special characters. `files` is a directory for the output.
    #[track_caller]
    pub fn start(command: &Command, files: &Path) -> Self {
        let shown = files.join("terminal.txt");
        let words: Vec<_> = [command.get_program()].into_iter().chain(command.get_args()).collect();
        let words: Vec<_> = words.into_iter().map(|word| word.to_str().unwrap()).collect();
        let is_plain = |word: &&str| word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=".contains(c));
        assert!(words.iter().all(is_plain), "{words:?}");
        let (screen, keys) = io::pipe().unwrap();
        // `script` runs a shell. Without `exec`, some shells remain as the program's parent, receive the Ctrl-C too,
        // and are killed by it, so that the exit code would be the shell's.
        let program = format!("exec {}", words.join(" "));
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--flush", "--command", &program]).arg(&shown);
        script.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let process = Process::fed_by(script.stdout(Stdio::null()), screen);
        Self { process, keys, shown }
    }

    /// The program's output so far.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.shown).unwrap_or_default()).into_owned()
    }

    /// Presses Ctrl-C, and waits until the program ends. Returns its exit code.
    #[track_caller]
    pub fn interrupt(mut self) -> Option<i32> {
        self.keys.write_all(b"\x03").unwrap();
        self.process.wait().code()
    }
}
