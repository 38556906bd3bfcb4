//! Decides which budgets of a session continue after a change, and which start again.
//!
//! Pure: the caller passes the time and the value of the kernel's meter. The dataplane calls this module when it writes
//! a session.

use std::time::Duration;

use mirror_common::limit::{Limits, Meter, is_used_up};

use crate::{
    model::{Ended, Session},
    settings::{Budget, Settings},
};

/// Returns the limits of `session`, for a meter with the value `meter` at `now_ns` (`CLOCK_MONOTONIC`). `before`: the
/// session before the change, and the limits that were written for it.
///
/// * A new session has its full budgets.
/// * An unchanged budget continues after a change of the session. A changed or new budget starts now.
/// * If a session has ended, the next change of its settings starts all its budgets again, and so does a new resource
///   of the same name. Nothing else does: not a new name of the NIC or device, nor a new agent, nor a new filter
///   compiler.
pub fn limits(session: &Session, before: Option<(&Session, Limits)>, meter: &Meter, now_ns: u64) -> Limits {
    let rate = session.settings.rate.map_or_else(Limits::default, |rate| rate.limits());
    let goes_on = before
        .filter(|(before, limits)| ended(limits, meter, now_ns).is_none() || before.asks_the_same(session));
    let (old, kept) = goes_on.map(|(before, limits)| (before.settings.budget, limits)).unwrap_or_default();
    let Budget { duration, packets, bytes } = session.settings.budget;
    let end = |kept: u64, is_same: bool, used: u64, budget: Option<u64>| match budget {
        None => 0,
        Some(_) if is_same => kept,
        // Zero would mean no budget.
        Some(budget) => used.saturating_add(budget).max(1),
    };
    let time_ns = duration.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    Limits {
        packets: end(kept.packets, packets == old.packets, meter.packets, packets),
        bytes: end(kept.bytes, bytes == old.bytes, meter.bytes, bytes),
        ends_ns: end(kept.ends_ns, duration == old.duration, now_ns, time_ns),
        ..rate
    }
}

/// Whether limits can result from these settings: the same rate, and an end for each budget.
pub fn are_of(limits: &Limits, settings: &Settings) -> bool {
    let rate = settings.rate.map_or_else(Limits::default, |rate| rate.limits());
    let Budget { duration, packets, bytes } = settings.budget;
    Limits { packets: 0, bytes: 0, ends_ns: 0, ..*limits } == rate
        && [limits.packets != 0, limits.bytes != 0, limits.ends_ns != 0]
            == [packets.is_some(), bytes.is_some(), duration.is_some()]
}

/// The used-up budget of these limits, if any.
pub fn ended(limits: &Limits, meter: &Meter, now_ns: u64) -> Option<Ended> {
    if is_used_up(meter.packets, limits.packets) {
        Some(Ended::Packets)
    } else if is_used_up(meter.bytes, limits.bytes) {
        Some(Ended::Bytes)
    } else if is_used_up(now_ns, limits.ends_ns) {
        Some(Ended::Duration)
    } else {
        None
    }
}

/// The remainder of each budget. `None`: there is no such budget.
pub fn left(limits: &Limits, meter: &Meter, now_ns: u64) -> Budget {
    let left = |end: u64, used: u64| (end != 0).then(|| end.saturating_sub(used));
    Budget {
        duration: left(limits.ends_ns, now_ns).map(Duration::from_nanos),
        packets: left(limits.packets, meter.packets),
        bytes: left(limits.bytes, meter.bytes),
    }
}

#[cfg(test)]
mod tests {
    use mirror_common::verdict::Verdict;
    use proptest::{option, prelude::*, sample};

    use super::*;
    use crate::model::{Directions, Origin, Place, TargetName};

    fn session() -> impl Strategy<Value = Session> {
        let budget = (option::of(1..4u64), option::of(1..4u64), option::of(1..400u64));
        let origin = sample::select(Origin::ALL.to_vec());
        (budget, any::<bool>(), origin).prop_map(|((ms, packets, bytes), both, origin)| Session {
            directions: if both { Directions::Both } else { Directions::Egress },
            settings: Settings {
                budget: Budget { duration: ms.map(Duration::from_millis), packets, bytes },
                ..Settings::default()
            },
            target: TargetName::default(),
            origin,
            asked: 0,
            key: None,
        })
    }

    /// Number of packets of 100 bytes, at most ten, that a meter passes at this time.
    fn copies(limits: &Limits, meter: &mut Meter, now_ns: u64) -> usize {
        (0..10).take_while(|_| meter.take(limits, now_ns, 100).is_ok()).count()
    }

    /// Offers this many packets.
    fn copy(limits: &Limits, meter: &mut Meter, now_ns: u64, packets: usize) {
        for _ in 0..packets {
            let _ = meter.take(limits, now_ns, 100);
        }
    }

    proptest! {
        #[test]
        fn a_new_session_has_all_its_budgets(session in session(), used in 0..1000u64, now_ns in 1..u64::MAX / 2) {
            let mut meter = Meter { packets: used, bytes: used * 100, ..Meter::default() };
            let limits = limits(&session, None, &meter, now_ns);
            let Budget { packets, bytes, .. } = session.settings.budget;
            let most = packets.unwrap_or(10).min(bytes.map_or(10, |bytes| bytes.div_ceil(100)));
            prop_assert_eq!(copies(&limits, &mut meter, now_ns) as u64, most.min(10));
        }

        #[test]
        fn a_session_that_asks_for_the_same_goes_on_also_when_it_has_ended(
            session in session(), origin in sample::select(Origin::ALL.to_vec()), used in 0..4usize, later_ns in 0..4_000_000u64,
        ) {
            let mut meter = Meter::default();
            let first = limits(&session, None, &meter, 5);
            copy(&first, &mut meter, 5, used);
            let renamed = Session { origin, ..session.clone() };
            prop_assert_eq!(limits(&renamed, Some((&session, first)), &meter, 5 + later_ns), first);
        }

        #[test]
        fn only_what_was_changed_begins_again_while_the_session_runs(
            old in session(), new in session(), used in 0..4usize,
        ) {
            let mut meter = Meter::default();
            let first = limits(&old, None, &meter, 5);
            copy(&first, &mut meter, 5, used);
            let had_ended = ended(&first, &meter, 6).is_some();
            let second = limits(&new, Some((&old, first)), &meter, 6);
            let (was, is) = (old.settings.budget, new.settings.budget);
            if !had_ended {
                if is.packets == was.packets { prop_assert_eq!(second.packets, first.packets); }
                if is.bytes == was.bytes { prop_assert_eq!(second.bytes, first.bytes); }
                if is.duration == was.duration { prop_assert_eq!(second.ends_ns, first.ends_ns); }
            }
            let begins_again = had_ended && !old.asks_the_same(&new);
            if begins_again {
                prop_assert_eq!(second, limits(&new, None, &meter, 6));
                prop_assert_eq!(ended(&second, &meter, 6), None);
            }
        }

        #[test]
        fn the_kernel_and_the_agent_agree_on_the_end(session in session(), used in 0..6usize, now_ns in 1..5_000_000u64) {
            let mut meter = Meter::default();
            let limits = limits(&session, None, &meter, 1);
            copy(&limits, &mut meter, now_ns, used);
            let has_ended = ended(&limits, &meter, now_ns).is_some();
            prop_assert_eq!(meter.take(&limits, now_ns, 100) == Err(Verdict::Ended), has_ended);
        }

        #[test]
        fn a_session_has_ended_when_nothing_is_left_of_a_budget(
            session in session(), used in 0..6usize, now_ns in 1..5_000_000u64,
        ) {
            let mut meter = Meter::default();
            let limits = limits(&session, None, &meter, 1);
            copy(&limits, &mut meter, now_ns, used);
            let Budget { duration, packets, bytes } = left(&limits, &meter, now_ns);
            let of = session.settings.budget;
            prop_assert_eq!(
                (duration.is_some(), packets.is_some(), bytes.is_some()),
                (of.duration.is_some(), of.packets.is_some(), of.bytes.is_some())
            );
            prop_assert!(duration <= of.duration && packets <= of.packets && bytes <= of.bytes);
            let nothing = duration == Some(Duration::ZERO) || packets == Some(0) || bytes == Some(0);
            prop_assert_eq!(nothing, ended(&limits, &meter, now_ns).is_some());
        }
    }

    #[test]
    fn a_time_that_has_passed_is_begun_again_by_a_change_alone() {
        let with = |ms, directions| Session {
            directions,
            settings: Settings {
                budget: Budget { duration: Some(Duration::from_millis(ms)), ..Budget::default() },
                ..Settings::default()
            },
            target: TargetName::default(),
            origin: Origin::Annotation(Place::Pod),
            asked: 0,
            key: None,
        };
        let (meter, old) = (Meter::default(), with(1, Directions::Both));
        let first = limits(&old, None, &meter, 1);
        assert_eq!(ended(&first, &meter, 1_000_001), Some(Ended::Duration));
        let before = Some((&old, first));
        assert_eq!(limits(&old, before, &meter, 2_000_000).ends_ns, 1_000_001);
        let changed = limits(&with(1, Directions::Egress), before, &meter, 2_000_000);
        assert_eq!(changed.ends_ns, 3_000_000);
        assert_eq!(ended(&changed, &meter, 2_000_000), None);
    }
}
