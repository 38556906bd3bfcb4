//! The programs and filters ahead of podmirror's program at a tc hook, and the packets that they hide from it.
//!
//! A packet passes the programs and filters of a hook in order. Each of them can end the processing, and then the later
//! ones do not see the packet. Two kinds can be ahead of podmirror's program: TCX programs (all of them run before any
//! filter of the device), and filters with a lower priority number. The agent attaches its program first where it can,
//! but does not compete with other software for the first place. It reports the programs and filters that are ahead.
//!
//! Pure: the dataplane reads the [`Picture`] of a hook from the kernel, [`blindness`] evaluates it, and the loop
//! reports the result. Only the kernel knows how many packets were hidden.

use mirror_common::verdict::Direction;

use crate::{
    model::{Actual, Desired, Hidden, MirrorId},
    select::{Skipped, Why},
};

/// The facts about one hook of a device that decide whether podmirror's program there sees every packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Picture {
    /// The device lacks the hook that the attach method needs: it has an `ingress` qdisc, and so no hook for egress.
    pub lacks_hook: bool,
    /// Other software's programs and filters ahead of podmirror's, in the order in which packets pass them.
    pub ahead: Vec<Ahead>,
}

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
        /// Which packets it matches.
        matches: Matches,
        /// Matched packets continue with the next filter: the filter's action is `continue`.
        goes_on: bool,
    },
    /// A qdisc that podmirror did not add. Packets pass it after all hooks, so it hides none from a hook.
    Queue {
        /// Its kind, as `tc` writes it: netem, fq and so on.
        kind: String,
    },
}

/// Which packets a filter matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matches {
    /// Every packet.
    All,
    /// The packets that meet its condition.
    Some,
}

/// The most severe reason why packets are hidden from podmirror's program at a hook. `None`: no packets are hidden.
pub fn blindness(picture: &Picture) -> Option<Hidden> {
    if picture.lacks_hook {
        return Some(Hidden::NoHook);
    }
    // The variants are declared in order of severity, the worst first.
    picture.ahead.iter().filter_map(Ahead::hides).min()
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
            Self::Filter { kind, priority, matches: Matches::All, .. } => {
                Some(Hidden::All(kind.clone(), *priority))
            }
            Self::Filter { kind, priority, matches: Matches::Some, .. } => {
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
            let mut sessions = tap.sessions.values();
            if !sessions.any(|session| session.directions.bits() & direction.bit() != 0) {
                continue;
            }
            skipped.extend(of_hook.map(|(_, hidden)| Skipped {
                pod: tap.head.owner.pod.clone(),
                nic: Some(tap.head.owner.nic.clone()),
                mirror: None,
                why: Why::Hidden(direction, hidden.clone()),
            }));
        }
        let cut = tap.sessions.iter().filter(|(_, session)| desired.needs_second_stage(session));
        for (mirror, session) in cut {
            let ifindex = desired.targets.get(&session.target).and_then(|target| target.ifindex());
            let Some(hidden) = ifindex.and_then(|ifindex| actual.passed_by.get(&ifindex)) else { continue };
            let (pod, nic) = (tap.head.owner.pod.clone(), Some(tap.head.owner.nic.clone()));
            let mirror = Some(mirror.clone()).filter(|mirror| *mirror != MirrorId::default());
            let why = Why::Uncut(session.target.clone(), hidden.clone());
            skipped.push(Skipped { pod, nic, mirror, why });
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
        let matches = prop_oneof![Just(Matches::All), Just(Matches::Some)];
        prop_oneof![
            ("[a-z]{0,3}", 1..4u32).prop_map(|(name, id)| Ahead::Program { name, id }),
            (kind, 1..4u16, matches, any::<bool>()).prop_map(|(kind, priority, matches, goes_on)| {
                Ahead::Filter { kind, priority, matches, goes_on }
            }),
            Just(Ahead::Queue { kind: "netem".into() }),
        ]
    }

    fn filter(matches: Matches, goes_on: bool) -> Ahead {
        Ahead::Filter { kind: "u32".into(), priority: 1, matches, goes_on }
    }

    fn judge(ahead: Vec<Ahead>) -> Option<Hidden> {
        blindness(&Picture { lacks_hook: false, ahead })
    }

    #[test]
    fn the_bandwidth_plugin_hides_everything() {
        assert_eq!(judge(vec![filter(Matches::All, false)]), Some(Hidden::All("u32".into(), 1)));
        let picture = Picture { lacks_hook: true, ahead: Vec::new() };
        assert_eq!(blindness(&picture), Some(Hidden::NoHook));
    }

    #[test]
    fn at_an_exit_also_what_lets_the_copies_go_on_is_told() {
        assert_eq!(at_exit(&[]), None);
        let told = at_exit(&[filter(Matches::Some, true), filter(Matches::All, false)]);
        assert_eq!(told, Some(Hidden::AtExit("a filter (u32 at priority 1)".into())));
        let told = at_exit(&[Ahead::Program { name: "x\n".into(), id: 7 }]);
        assert_eq!(told, Some(Hidden::AtExit("a program (\"x\\n\")".into())));
        assert!(told.is_some_and(|told| !told.is_everything()));
    }

    #[test]
    fn a_filter_that_goes_on_hides_nothing() {
        assert_eq!(judge(vec![filter(Matches::All, true), filter(Matches::Some, true)]), None);
    }

    #[test]
    fn a_program_may_hide_what_it_ends() {
        let program = Ahead::Program { name: "cil_from_container".into(), id: 7 };
        let hidden = judge(vec![program]);
        assert_eq!(hidden, Some(Hidden::Program("cil_from_container".into())));
        assert!(hidden.is_some_and(|hidden| !hidden.is_everything()));
    }

    proptest! {
        /// Each program or filter that is ahead and can end the processing of a packet gives a reason.
        #[test]
        fn there_is_a_reason_where_something_ahead_can_end_the_way(
            ahead in prop::collection::vec(ahead(), 0..4), lacks_hook: bool,
        ) {
            let goes_on =
                |ahead: &Ahead| matches!(ahead, Ahead::Filter { goes_on: true, .. } | Ahead::Queue { .. });
            let can_end = !ahead.iter().all(goes_on);
            let picture = Picture { lacks_hook, ahead };
            prop_assert_eq!(blindness(&picture).is_some(), can_end || lacks_hook);
        }

        /// The most severe reason is reported: everything is hidden if one program or filter hides everything.
        #[test]
        fn everything_is_hidden_if_one_of_them_takes_everything(
            ahead in prop::collection::vec(ahead(), 0..4),
        ) {
            let takes_all =
                |ahead: &Ahead| matches!(ahead, Ahead::Filter { matches: Matches::All, goes_on: false, .. });
            let expected = ahead.iter().any(takes_all);
            let hidden = judge(ahead);
            prop_assert_eq!(hidden.is_some_and(|hidden| hidden.is_everything()), expected);
        }

        #[test]
        fn the_order_of_what_is_ahead_does_not_matter(mut ahead in prop::collection::vec(ahead(), 0..4)) {
            let forwards = judge(ahead.clone());
            ahead.reverse();
            prop_assert_eq!(judge(ahead), forwards);
        }
    }
}
