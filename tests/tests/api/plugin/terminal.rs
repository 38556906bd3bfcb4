//! `kubectl mirror` on a terminal: the size of what is redrawn, and colours.

use std::{fs, process::Command};

use mirror_tests::{SOON, Terminal, check, eventually};
use serde_json::json;

use super::{command, plugin};
use crate::{controller::alone, resources::Story};

/// Moves to the upper left corner of a terminal; clears the rest of a line, and all below.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

#[test]
fn a_table_fits_on_the_terminal_also_after_it_is_resized() {
    // Without controllers, the cells of the table do not change.
    let _alone = alone();
    let story = Story::new("plugin-terminal");
    let (api, files) = (&story.node.api, story.node.lab.files());
    for name in ["a", "b", "c", "d"] {
        story.mirror(name, "web", &json!({}));
    }
    // The terminal has no size at first.
    let sized = files.join("sized");
    fs::write(&sized, "stty rows 4 cols 24\ntty >\"$0.tty\"\nexec \"$@\"\n").unwrap();
    let watching = command(api, "status --watch");
    let mut small = Command::new("sh");
    small.arg(&sized).arg(watching.get_program()).args(watching.get_args());
    let terminal = Terminal::start(small.env("KUBECONFIG", api.kubeconfig()), files);
    let wait_shown = |lines: &str| {
        let screen = format!("{HOME}{lines}{REST}");
        eventually(SOON, || {
            let shown = terminal.shown();
            check(shown.ends_with(&screen), || format!("{shown:?}, not {screen:?}"))
        });
    };
    wait_shown(
        "NAME  READY   REASON  T>\r\n\
         a     <none>  <none>  <>\r\n\
         and 3 more lines, shown>\r\n",
    );
    let name = fs::read_to_string(files.join("sized.tty")).unwrap();
    let resized =
        Command::new("stty").args(["-F", name.trim(), "rows", "24", "cols", "200"]).status().unwrap();
    assert!(resized.success(), "{resized}");
    // Into a pipe, the table is always whole.
    let (_, table, _) = plugin(api, "status");
    assert_eq!(table.lines().count(), 5, "{table}");
    wait_shown(&table.lines().map(|line| format!("{line}{REST_OF_LINE}\r\n")).collect::<String>());
    assert_eq!(terminal.interrupt(), Some(0));
}

/// <https://no-color.org>
#[test]
fn messages_have_colours_on_a_terminal_only_and_never_with_no_color() {
    let story = Story::new("plugin-colours");
    let (api, files) = (&story.node.api, story.node.lab.files());
    for (no_color, has_colours) in [("", true), ("1", false)] {
        let files = files.join(format!("no-color-{no_color}"));
        fs::create_dir(&files).unwrap();
        let mut wrong = command(api, "status --nosuch");
        let terminal = Terminal::start(wrong.env("TERM", "xterm").env("NO_COLOR", no_color), &files);
        let message = eventually(SOON, || {
            let shown = terminal.shown();
            check(shown.contains("--help"), || format!("{shown:?}")).map(|()| shown)
        });
        assert_eq!(message.contains('\x1b'), has_colours, "{message:?}");
    }
    let (code, _, why) = plugin(api, "status --nosuch");
    assert!(code == Some(2) && !why.contains('\x1b'), "{why:?}");
}
