//! Output for people. [`Screen`] repeats it: on a terminal, each text replaces the one before; otherwise the texts
//! follow one another.

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

/// Formats a duration as kubectl formats ages, for example `90s`, `9m30s` or `3d12h`.
pub(crate) fn age(seconds: u64) -> String {
    let ((unit, name), part) = match seconds {
        0..120 => ((1, "s"), None),
        120..600 => ((60, "m"), Some((1, "s"))),
        600..10_800 => ((60, "m"), None),
        10_800..28_800 => ((3600, "h"), Some((60, "m"))),
        28_800..172_800 => ((3600, "h"), None),
        172_800..691_200 => ((86_400, "d"), Some((3600, "h"))),
        691_200.. => ((86_400, "d"), None),
    };
    let part = part.map(|(part, name)| (seconds % unit / part, name)).filter(|(count, _)| *count > 0);
    let part = part.map_or_else(String::new, |(count, name)| format!("{count}{name}"));
    format!("{}{name}{part}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_short() {
        for (seconds, shown) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (10_799, "179m"),
            (10_800, "3h"),
            (28_799, "7h59m"),
            (172_799, "47h"),
            (172_800, "2d"),
            (691_199, "7d23h"),
            (u64::MAX, "213503982334601d"),
        ] {
            assert_eq!(age(seconds), shown);
        }
    }
}
