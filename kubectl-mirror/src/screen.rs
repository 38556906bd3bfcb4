//! Repeated output: on a terminal, each text replaces the one before; otherwise the texts follow one another.

use std::io::{self, IsTerminal as _};

use crate::print;

/// The escape sequence that moves to the upper left corner of a terminal and clears it from there.
const CLEAR: &str = "\x1b[H\x1b[J";

/// The state of the output.
#[derive(Debug)]
pub(crate) struct Screen {
    is_cleared: bool,
    /// The separator between two texts, if the screen is not cleared.
    between: &'static str,
    is_begun: bool,
}

impl Screen {
    /// `between` separates two texts if the screen is not cleared.
    pub(crate) fn new(between: &'static str) -> Self {
        // A Windows console may print the escape sequence as text.
        Self { is_cleared: cfg!(unix) && io::stdout().is_terminal(), between, is_begun: false }
    }

    /// Whether each text replaces the one before.
    pub(crate) fn is_cleared(&self) -> bool {
        self.is_cleared
    }

    /// Prints a text.
    pub(crate) fn show(&mut self, text: &str) -> anyhow::Result<()> {
        let ahead = match (self.is_cleared, self.is_begun) {
            (true, _) => CLEAR,
            (false, true) => self.between,
            (false, false) => "",
        };
        self.is_begun = true;
        print(&format!("{ahead}{text}"))
    }
}
