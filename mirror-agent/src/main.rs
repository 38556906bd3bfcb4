//! `mirror-agent`: parses the command line, runs the command, and turns its outcome into an exit code.
//!
//! 0: success, 1: failure, 2: wrong usage (clap's own).

use std::{
    panic,
    process::{self, ExitCode},
};

use clap::Parser as _;
use mirror_agent::cli::{self, args::Cli};

fn main() -> ExitCode {
    // As in the release build, which cannot unwind: an agent must not continue without a task that has failed.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panicked| {
        report(panicked);
        process::abort();
    }));
    match cli::execute(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not through the log, because the error may concern the setup of the log.
            #[expect(clippy::print_stderr, reason = "the one message of a failed command")]
            {
                eprintln!("mirror-agent: {}", mirror_client::in_words(error.as_ref()));
            }
            ExitCode::FAILURE
        }
    }
}
