//! `--when-read`: no copies to a mirror interface without a reader.
//!
//! A thread looks for readers 50 times a second. While there are none, it makes the programs copy nothing for the next
//! [`LEASE`]. The lease expires by itself, so a late, stopped or killed agent never withholds copies from a reader: a
//! reader gets copies at most [`LEASE`] after its socket was opened. `cli::run` and `cli::attach` start the thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, thread,
    time::{Duration, Instant},
};

use tracing::{info, warn};

use crate::{
    kernel::{
        dataplane::{now_ns, unread::Unread},
        links::packet_sockets::PacketSockets,
    },
    model::Readable,
};

/// The interval between two looks.
const PERIOD: Duration = Duration::from_millis(20);
/// The minimum pause after a look, as a multiple of its duration. A process of the node can open any number of packet
/// sockets, which makes looks slow. Copies are made meanwhile.
const PAUSE: u32 = 3;
/// How long after a look without a reader nothing is copied.
const LEASE: Duration = Duration::from_millis(40);
/// How long copies are made after the last reader was seen. The kernel lists sockets by their position in a list, so
/// one look can miss a socket while others close. It cannot miss the same one in all looks of a second.
const LINGER: Duration = Duration::from_secs(1);

/// Looks for readers of these mirror interfaces until the process ends.
pub fn watch(unread: Unread) -> io::Result<()> {
    thread::Builder::new().name("when-read".to_owned()).spawn(move || {
        let (mut last_read, mut is_told) = (BTreeMap::new(), false);
        loop {
            let begun = Instant::now();
            let looked = look(&unread, &mut last_read);
            match &looked {
                Ok(()) if is_told => info!("readers of the mirror interfaces can be detected again"),
                Err(error) if !is_told => {
                    warn!("readers of the mirror interfaces cannot be detected, so all packets are copied: {error:#}");
                }
                _ => {}
            }
            is_told = looked.is_err();
            thread::sleep(PERIOD.max(begun.elapsed() * PAUSE));
        }
    })?;
    Ok(())
}

fn look(unread: &Unread, last_read: &mut BTreeMap<Readable, Instant>) -> anyhow::Result<()> {
    let mirrors = unread.mirrors();
    if mirrors.is_empty() {
        return Ok(());
    }
    // The time is read before the look: a socket opened later is found by the end of the lease.
    let seen_ns = now_ns()?;
    let sockets = PacketSockets::open_now()?;
    let without = without(last_read, &mirrors, |mirror| sockets.read(mirror), Instant::now());
    unread.withhold(&without, seen_ns, LEASE)
}

/// The mirror interfaces without a reader for [`LINGER`]. `last_read` has when each of them last had one; a new one
/// counts as just read.
fn without(
    last_read: &mut BTreeMap<Readable, Instant>,
    mirrors: &BTreeSet<Readable>,
    is_read: impl Fn(&Readable) -> bool,
    now: Instant,
) -> BTreeSet<Readable> {
    last_read.retain(|mirror, _| mirrors.contains(mirror));
    let mut without = BTreeSet::new();
    for mirror in mirrors {
        let last = last_read.entry(*mirror).or_insert(now);
        if is_read(mirror) {
            *last = now;
        }
        if now.duration_since(*last) >= LINGER {
            without.insert(*mirror);
        }
    }
    without
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::IfIndex;

    const MIRRORS: [Readable; 2] = [
        Readable { device: IfIndex(7), other_end: None },
        Readable { device: IfIndex(8), other_end: Some(IfIndex(9)) },
    ];

    /// The existing interfaces, the read ones, and ms since the look before.
    type Look = ([bool; 2], [bool; 2], u64);

    fn looks() -> impl Strategy<Value = Vec<Look>> {
        let likely = |share| prop::array::uniform2(prop::bool::weighted(share));
        prop::collection::vec((likely(0.9), likely(0.1), 0..900_u64), 1..40)
    }

    proptest! {
        /// Over any history of looks: copies are withheld exactly from a mirror interface that was known for a second
        /// in which no look found a reader of it.
        #[test]
        fn a_reader_is_waited_for(looks in looks()) {
            let (mut last_read, mut now, mut last) = (BTreeMap::new(), Instant::now(), [None; 2]);
            for (is_there, is_read, wait) in looks {
                now += Duration::from_millis(wait);
                let there = (0..2).filter(|place| is_there[*place]).map(|place| MIRRORS[place]).collect();
                let without = without(&mut last_read, &there, |mirror| is_read[usize::from(*mirror == MIRRORS[1])], now);
                for place in 0..2 {
                    last[place] = match last[place] {
                        _ if !is_there[place] => None,
                        Some(before) if !is_read[place] => Some(before),
                        _ => Some(now),
                    };
                    let expected = last[place].is_some_and(|last| now.duration_since(last) >= LINGER);
                    prop_assert_eq!(without.contains(&MIRRORS[place]), expected);
                }
            }
        }
    }
}
