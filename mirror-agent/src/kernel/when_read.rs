//! `--when-read`: no copies to a mirror interface without a reader.
//!
//! A thread looks for readers 50 times a second. While there are none, it makes the programs copy nothing for the next
//! [`LEASE`]. The lease expires by itself, so a late, stopped or killed agent never withholds copies from a reader: a
//! reader gets copies at most [`LEASE`] after its socket was opened. `cli::run` and `cli::attach` start the thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, thread,
    time::Duration,
};

use tracing::{info, warn};

use crate::{
    kernel::{
        cpu,
        dataplane::{now_ns, unread::Unread},
        links::packet_sockets::PacketSockets,
    },
    model::Readable,
};

/// The interval between two looks.
const PERIOD: Duration = Duration::from_millis(20);
/// The minimum pause after a look, as a multiple of its CPU time. A process of the node can open any number of packet
/// sockets, which makes looks slow. Copies are made meanwhile.
const PAUSE: u32 = 3;
/// How long after a look without a reader nothing is copied.
const LEASE: Duration = Duration::from_millis(40);
/// The number of looks without a reader until copies are withheld: about a second, or more on a busy node. The kernel
/// lists sockets by their position in a list, so one look can miss a socket while others close. That many looks in a row
/// do not all miss the same one.
const LOOKS: u32 = 50;

/// Looks for readers of these mirror interfaces until the process ends.
pub fn watch(unread: Unread) -> io::Result<()> {
    thread::Builder::new().name("when-read".to_owned()).spawn(move || {
        let (mut unread_for, mut is_told) = (BTreeMap::new(), false);
        loop {
            let cpu = cpu::time();
            let looked = look(&unread, &mut unread_for);
            match &looked {
                Ok(()) if is_told => info!("readers of the mirror interfaces can be detected again"),
                Err(error) if !is_told => {
                    warn!("readers of the mirror interfaces cannot be detected, so all packets are copied: {error:#}");
                }
                _ => {}
            }
            is_told = looked.is_err();
            thread::sleep(PERIOD.max(cpu::time().saturating_sub(cpu) * PAUSE));
        }
    })?;
    Ok(())
}

fn look(unread: &Unread, unread_for: &mut BTreeMap<Readable, u32>) -> anyhow::Result<()> {
    let mirrors = unread.mirrors();
    if mirrors.is_empty() {
        unread_for.clear();
        return Ok(());
    }
    // The time is read before the look: a socket opened later is found by the end of the lease.
    let seen_ns = now_ns()?;
    let sockets = PacketSockets::open_now()?;
    let without = without(unread_for, &mirrors, |mirror| sockets.read(mirror));
    unread.withhold(&without, seen_ns, LEASE)
}

/// The mirror interfaces without a reader in the last [`LOOKS`]. `unread_for` has the number of looks since the last
/// reader of each.
fn without(
    unread_for: &mut BTreeMap<Readable, u32>,
    mirrors: &BTreeSet<Readable>,
    is_read: impl Fn(&Readable) -> bool,
) -> BTreeSet<Readable> {
    unread_for.retain(|mirror, _| mirrors.contains(mirror));
    let mut without = BTreeSet::new();
    for mirror in mirrors {
        let looks = unread_for.entry(*mirror).or_default();
        *looks = if is_read(mirror) { 0 } else { LOOKS.min(*looks + 1) };
        if *looks == LOOKS {
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

    /// The existing interfaces, the read ones, and the number of such looks.
    type Looks = ([bool; 2], [bool; 2], u32);

    fn looks() -> impl Strategy<Value = Vec<Looks>> {
        let likely = |share| prop::array::uniform2(prop::bool::weighted(share));
        prop::collection::vec((likely(0.9), likely(0.1), 1..LOOKS), 1..10)
    }

    proptest! {
        /// Over any history of looks: copies are withheld exactly from a mirror interface that the last looks have found
        /// without a reader.
        #[test]
        fn a_reader_is_waited_for(looks in looks()) {
            let (mut unread_for, mut history) = (BTreeMap::new(), Vec::new());
            let each = looks.into_iter().flat_map(|(is_there, is_read, times)| vec![(is_there, is_read); times as usize]);
            for (is_there, is_read) in each {
                let there = (0..2).filter(|place| is_there[*place]).map(|place| MIRRORS[place]).collect();
                let without = without(&mut unread_for, &there, |mirror| is_read[usize::from(*mirror == MIRRORS[1])]);
                history.push([0, 1].map(|place| is_there[place] && !is_read[place]));
                for place in 0..2 {
                    let mut last = history.iter().rev().take(LOOKS as usize);
                    let expected = history.len() >= LOOKS as usize && last.all(|is_unread| is_unread[place]);
                    prop_assert_eq!(without.contains(&MIRRORS[place]), expected);
                }
            }
        }
    }
}
