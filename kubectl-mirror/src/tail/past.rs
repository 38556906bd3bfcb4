//! The messages and the exit code for packets of the past (`--since`).

use std::process::ExitCode;

use anyhow::bail;

use crate::{cli::TailArgs, tell};

/// The exit code if packets of the past of a node are missing.
const INCOMPLETE: u8 = 3;

/// The packets of the past, as far as the nodes have told.
#[derive(Clone, Copy, Default)]
pub(super) struct Past {
    /// A node has some.
    pub(super) is_there: bool,
    /// The number of nodes without an answer from a recorder.
    pub(super) missing: usize,
    /// A node has not sent all of them.
    pub(super) is_cut: bool,
}

impl Past {
    /// Prints what is missing, and returns the exit code.
    pub(super) fn judge(&self, args: &TailArgs, nodes: usize) -> anyhow::Result<ExitCode> {
        let Self { is_there, missing, is_cut } = *self;
        if args.since.is_none() {
            return Ok(ExitCode::SUCCESS);
        }
        let none = if missing > 0 && missing == nodes {
            "no recorder has answered"
        } else {
            "nothing is recorded of these pods: a recorder keeps what mirrors copy to its target, as long as it has room"
        };
        if missing > 0 {
            tell(&format!("the recorded packets of {missing} of {nodes} nodes are missing"));
        }
        match is_there {
            false if args.no_follow => bail!(none),
            false => tell(none),
            true => {}
        }
        Ok(if missing > 0 || is_cut { ExitCode::from(INCOMPLETE) } else { ExitCode::SUCCESS })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

    use super::*;
    use crate::cli::{self, Command};

    fn judged(words: &str, past: &Past, nodes: usize) -> Result<ExitCode, String> {
        let words = ["kubectl-mirror", "tail", "web"].into_iter().chain(words.split_whitespace());
        let Command::Tail(args) = cli::read(words.map(Into::into)).unwrap().command else {
            panic!("no tail")
        };
        past.judge(&args, nodes).map_err(|error| error.to_string())
    }

    #[test]
    fn a_past_that_is_missing_has_an_exit_code() {
        let whole = Past { is_there: true, ..Past::default() };
        let (none, one) = (Past::default(), Past { missing: 1, ..Past::default() });
        let since = "--since 5m";
        let alone = "--since 5m --no-follow";
        for words in [since, alone] {
            assert_eq!(judged(words, &whole, 2), Ok(ExitCode::SUCCESS));
            for missing in [Past { missing: 1, ..whole }, Past { is_cut: true, ..whole }] {
                assert_eq!(judged(words, &missing, 2), Ok(ExitCode::from(INCOMPLETE)));
            }
        }
        assert_eq!(judged("", &one, 2), Ok(ExitCode::SUCCESS));
        assert_eq!(judged(since, &none, 2), Ok(ExitCode::SUCCESS));
        assert_eq!(judged(since, &one, 1), Ok(ExitCode::from(INCOMPLETE)));
        assert!(judged(alone, &none, 2).unwrap_err().starts_with("nothing is recorded of these pods"));
        assert_eq!(judged(alone, &one, 1).unwrap_err(), "no recorder has answered");
    }
}
