//! Standard output that shows the same thing again and again: on a terminal in the same place, else one below the other.

use std::io::{self, IsTerminal as _};

use crate::print;

/// Moves to the upper left corner of a terminal, and clears it from there.
const CLEAR: &str = "\x1b[H\x1b[J";

/// What stands ahead of each text.
#[derive(Debug)]
pub(crate) struct Screen {
    is_cleared: bool,
    /// What stands between two texts of which the first one stays.
    between: &'static str,
    is_begun: bool,
}

impl Screen {
    /// Where it is not cleared, `between` stands between two texts.
    pub(crate) fn new(between: &'static str) -> Self {
        // A console of Windows may not obey, and show the characters.
        Self { is_cleared: cfg!(unix) && io::stdout().is_terminal(), between, is_begun: false }
    }

    /// Whether each text takes the place of the one before.
    pub(crate) fn is_cleared(&self) -> bool {
        self.is_cleared
    }

    /// Shows a text.
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
