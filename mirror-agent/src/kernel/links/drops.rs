//! The frames that devices of the node have accepted for sending, and dropped.
//!
//! If a device accepts a copy and drops it later, the eBPF program does not notice, and the copy counts as `copied`.
//! Only the device's own counter shows it. `/proc/net/dev` (proc_net(5)) has these counters of all devices in one short
//! file. `report::status` and `metrics` read it through `kernel::dataplane::readout`.

use std::{collections::BTreeMap, fs};

use anyhow::Context as _;

/// The devices of the calling thread's network namespace.
const PATH: &str = "/proc/thread-self/net/dev";
/// The position of "drop" among the numbers of a device. The first eight numbers count received packets.
const DROPPED: usize = 8 + 3;

/// Returns, by device name, how many frames each device has dropped instead of sending them since it was created.
pub fn drops() -> anyhow::Result<BTreeMap<String, u64>> {
    fs::read_to_string(PATH).map(|text| parse(&text)).context(PATH)
}

fn parse(text: &str) -> BTreeMap<String, u64> {
    // No name has a colon or white space (`dev_valid_name`). The lines of the heading have no colon.
    let device = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        Some((name.trim().to_owned(), numbers.split_whitespace().nth(DROPPED)?.parse().ok()?))
    };
    text.lines().filter_map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frames_that_were_to_be_sent_are_read() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  100       2    0    7    0     0          0         0      100       2    0    0    0     0       0          0
mirror0:123456789    2    0    0    0     0          0         0      100       2    0    5    0     0       0          0
";
        assert_eq!(parse(text), [("lo".to_owned(), 0), ("mirror0".to_owned(), 5)].into());
    }

    #[test]
    fn this_node_has_a_loopback_device() {
        assert!(drops().is_ok_and(|drops| drops.contains_key("lo")));
    }
}
