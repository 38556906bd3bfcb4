//! The manual pages: one for the plugin, and one for each of its commands.

use std::{fs, path::Path};

use crate::cli::command;
use anyhow::Context as _;

/// Writes all pages into a directory, which is created if it is missing.
pub(crate) fn write(directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(command(), directory))
        .with_context(|| format!("cannot write the manual pages into {}", directory.display()))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_command_that_is_shown_has_a_page() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("man");
        write(&directory).unwrap();
        let command = command();
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        let mut expected: BTreeSet<_> =
            shown.map(|command| format!("kubectl-mirror-{}.1", command.get_name())).collect();
        assert!(expected.len() >= 8, "{expected:?}");
        expected.insert("kubectl-mirror.1".to_owned());
        let pages = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(pages.map(|name| name.into_string().unwrap()).collect::<BTreeSet<_>>(), expected);
        let tail = fs::read_to_string(directory.join("kubectl-mirror-tail.1")).unwrap();
        for text in [".TH kubectl-mirror-tail 1", "super\\-frames", "\\-\\-context", "TYPE/NAME"] {
            assert!(tail.contains(text), "{text}: {tail}");
        }
    }
}
