//! The programs and filters ahead of podmirror's program at a tc hook, and the packets that they hide from it.
//!
//! A packet passes the programs and filters of a hook in order. Each of them can end the processing, and then the later
//! ones do not see the packet. Two kinds can be ahead of podmirror's program: TCX programs (all of them run before any
//! filter of the device), and filters with a lower priority number. The agent attaches its program first where it can,
//! but does not compete with other software for the first place. It reports the programs and filters that are ahead.
//!
//! Pure: the dataplane reads from the kernel what is [`Ahead`] at a hook, [`blindness`] evaluates it, and the loop
//! reports the result. Only the kernel knows how many packets were hidden.

use mirror_common::verdict::Direction;

use crate::{
    model::{Actual, Desired, Hidden},
    select::{Skipped, Why},
};

/// A program, filter or queue of other software that packets pass before podmirror's program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ahead {
    /// A program, which can end the processing of any packet.
    Program {
        /// Its name in the kernel; may be empty.
        name: String,
        /// Its id in the kernel.
        id: u32,
    },
    /// A filter that is no program.
    Filter {
        /// Its kind, as `tc` writes it: u32, flower, matchall and so on.
        kind: String,
        /// Its priority.
        priority: u16,
        /// It matches every packet. Otherwise it matches those that meet its condition.
        is_for_all: bool,
        /// Matched packets continue with the next filter: the filter's action is `continue`.
        goes_on: bool,
    },
    /// A qdisc that podmirror did not add. Packets pass it after all hooks, so it hides none from a hook.
    Queue {
        /// Its kind, as `tc` writes it: netem, fq and so on.
        kind: String,
    },
}

/// The most severe reason why packets are hidden from podmirror's program at a hook, given what is ahead of it. `None`:
/// no packets are hidden.
pub fn blindness(ahead: &[Ahead]) -> Option<Hidden> {
    // The variants are declared in order of severity, the worst first.
    ahead.iter().filter_map(Ahead::hides).min()
}

/// The first program, filter or queue at a pod's relay device. Root in the pod can add them. Each of them can change or
/// take copies, even a filter that lets them continue.
pub fn at_exit(there: &[Ahead]) -> Option<Hidden> {
    there.first().map(|first| {
        Hidden::AtExit(match first {
            Ahead::Program { name, .. } => format!("a program ({name:?})"),
            Ahead::Filter { kind, priority, .. } => format!("a filter ({kind} at priority {priority})"),
            Ahead::Queue { kind } => format!("a queue ({kind})"),
        })
    })
}

impl Ahead {
    fn hides(&self) -> Option<Hidden> {
        match self {
            Self::Program { name, .. } => Some(Hidden::Program(name.clone())),
            Self::Filter { goes_on: true, .. } | Self::Queue { .. } => None,
            Self::Filter { kind, priority, is_for_all: true, .. } => {
                Some(Hidden::All(kind.clone(), *priority))
            }
            Self::Filter { kind, priority, is_for_all: false, .. } => {
                Some(Hidden::Matching(kind.clone(), *priority))
            }
        }
    }
}

/// For each installed tap: why it misses packets of a direction that its sessions copy, and why a session's copies
/// cannot be cut or addressed.
pub fn of_taps(desired: &Desired, actual: &Actual) -> Vec<Skipped> {
    let mut skipped = Vec::new();
    for (device, tap) in &desired.taps {
        if !actual.taps.contains_key(device) {
            continue;
        }
        for direction in Direction::ALL {
            let (at, program) = tap.head.hook(*device, direction);
            let installed = actual.taps.get(&at).into_iter().flat_map(|installed| &installed.hidden);
            let of_hook = installed.filter(|(hook, _)| *hook == program.hook());
            let of_hook = of_hook.filter(|_| tap.copies(direction));
            let why = of_hook.map(|(_, hidden)| Why::Hidden(direction, hidden.clone()));
            skipped.extend(why.map(|why| Skipped::of_nic(&tap.head.owner, None, why)));
        }
        let cut = tap.sessions.iter().filter(|(_, session)| desired.needs_second_stage(session));
        for (mirror, session) in cut {
            let ifindex = desired.targets.get(&session.target).and_then(|target| target.ifindex());
            let Some(hidden) = ifindex.and_then(|ifindex| actual.passed_by.get(&ifindex)) else { continue };
            let why = Why::Uncut(session.target.clone(), hidden.clone());
            skipped.push(Skipped::of_nic(&tap.head.owner, Some(mirror), why));
        }
    }
    skipped
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ahead() -> impl Strategy<Value = Ahead> {
        let kind = prop_oneof![Just("u32".to_owned()), Just("flower".to_owned())];
        prop_oneof![
            ("[a-z]{0,3}", 1..4u32).prop_map(|(name, id)| Ahead::Program { name, id }),
            (kind, 1..4u16, any::<bool>(), any::<bool>()).prop_map(
                |(kind, priority, is_for_all, goes_on)| {
                    Ahead::Filter { kind, priority, is_for_all, goes_on }
                }
            ),
            Just(Ahead::Queue { kind: "netem".into() }),
        ]
    }

    fn filter(is_for_all: bool, goes_on: bool) -> Ahead {
        Ahead::Filter { kind: "u32".into(), priority: 1, is_for_all, goes_on }
    }

    /// Whether no packet is seen, so that the direction is not mirrored.
    fn is_everything(hidden: &Hidden) -> bool {
        matches!(hidden, Hidden::NoHook | Hidden::All(..))
    }

    #[test]
    fn the_bandwidth_plugin_hides_everything() {
        assert_eq!(blindness(&[filter(true, false)]), Some(Hidden::All("u32".into(), 1)));
    }

    #[test]
    fn at_an_exit_also_what_lets_the_copies_go_on_is_told() {
        assert_eq!(at_exit(&[]), None);
        let told = at_exit(&[filter(false, true), filter(true, false)]);
        assert_eq!(told, Some(Hidden::AtExit("a filter (u32 at priority 1)".into())));
        let told = at_exit(&[Ahead::Program { name: "x\n".into(), id: 7 }]);
        assert_eq!(told, Some(Hidden::AtExit("a program (\"x\\n\")".into())));
        assert!(told.is_some_and(|told| !is_everything(&told)));
    }

    #[test]
    fn a_filter_that_goes_on_hides_nothing() {
        assert_eq!(blindness(&[filter(true, true), filter(false, true)]), None);
    }

    #[test]
    fn a_program_may_hide_what_it_ends() {
        let program = Ahead::Program { name: "cil_from_container".into(), id: 7 };
        let hidden = blindness(&[program]);
        assert_eq!(hidden, Some(Hidden::Program("cil_from_container".into())));
        assert!(hidden.is_some_and(|hidden| !is_everything(&hidden)));
    }

    proptest! {
        /// Each program or filter that is ahead and can end the processing of a packet gives a reason.
        #[test]
        fn there_is_a_reason_where_something_ahead_can_end_the_way(
            ahead in prop::collection::vec(ahead(), 0..4),
        ) {
            let goes_on =
                |ahead: &Ahead| matches!(ahead, Ahead::Filter { goes_on: true, .. } | Ahead::Queue { .. });
            let can_end = !ahead.iter().all(goes_on);
            prop_assert_eq!(blindness(&ahead).is_some(), can_end);
        }

        /// The most severe reason is reported: everything is hidden if one program or filter hides everything.
        #[test]
        fn everything_is_hidden_if_one_of_them_takes_everything(
            ahead in prop::collection::vec(ahead(), 0..4),
        ) {
            let takes_all =
                |ahead: &Ahead| matches!(ahead, Ahead::Filter { is_for_all: true, goes_on: false, .. });
            let expected = ahead.iter().any(takes_all);
            prop_assert_eq!(blindness(&ahead).is_some_and(|hidden| is_everything(&hidden)), expected);
        }

        #[test]
        fn the_order_of_what_is_ahead_does_not_matter(mut ahead in prop::collection::vec(ahead(), 0..4)) {
            let forwards = blindness(&ahead);
            ahead.reverse();
            prop_assert_eq!(blindness(&ahead), forwards);
        }
    }
}
