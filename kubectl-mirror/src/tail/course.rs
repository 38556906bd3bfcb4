//! The course of a request for packets: when it is sent again, and the times without packets. Pure.
//!
//! ```text
//! connecting ── answer ──► reading ── end, error ──► connecting, with a gap
//!     └── refusal: after a delay, or never
//! ```

use std::{fmt, time::Duration};

use k8s_openapi::jiff::Timestamp;
use mirror_capture::blocks::Block;

/// The first delay, which doubles with each failure, and the longest one. A stream that is shorter is a failure too.
const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(10);
/// The time after the end of a stream in which 403 is not final: a kube-apiserver that has just started refuses
/// everything until it has listed the roles.
const UNSETTLED: Duration = Duration::from_secs(60);

/// A time without packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gap {
    from: Timestamp,
    to: Timestamp,
    why: String,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no packets were read between {:.3} and {:.3}: {}", self.from, self.to, self.why)
    }
}

#[derive(Debug, Default)]
pub(super) struct Course {
    /// When the open stream began.
    began: Option<Timestamp>,
    /// The time of the newest packet that was read, or at least the beginning of the newest stream.
    read: Option<Timestamp>,
    /// Why nothing is read since then.
    why: Option<String>,
    /// When the newest stream has ended.
    lost: Option<Timestamp>,
    failures: u32,
}

impl Course {
    /// Whether there was a stream.
    pub(super) const fn has_begun(&self) -> bool {
        self.read.is_some()
    }

    /// A stream begins. Returns the time without one, if there was one before.
    pub(super) fn begin(&mut self, now: Timestamp) -> Option<Gap> {
        let gap = self.end(now);
        self.began = Some(now);
        self.read = Some(now);
        gap
    }

    /// A part of the stream was read. Packets can have waited for long on their way, so the time is that of the newest
    /// one. The clock of its node can be ahead.
    pub(super) fn read(&mut self, blocks: &[Block], now: Timestamp) {
        let time_ns =
            |block: &Block| if let Block::Packet(packet) = block { Some(packet.time_ns) } else { None };
        let newest = blocks.iter().filter_map(time_ns).max();
        let newest = newest.and_then(|time_ns| Timestamp::from_nanosecond(time_ns.into()).ok());
        self.read = self.read.max(newest.map(|newest| newest.min(now)));
    }

    /// The stream has ended, or there was none: with the code of the refusal, or without an answer. Returns the delay
    /// until the next request; `None`: it would have no other answer.
    pub(super) fn fail(&mut self, why: &str, code: Option<u16>, now: Timestamp) -> Option<Duration> {
        if let Some(began) = self.began.take() {
            self.why = Some(why.to_owned());
            self.lost = Some(now);
            if now.duration_since(began).unsigned_abs() >= LONGEST {
                self.failures = 0;
            }
        }
        let delay = FIRST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        // A server that has never answered is more likely the wrong one. Later, an upgrade can remove the API for some
        // moments (404), or a token can expire before the next one is there (401).
        let is_final = match code {
            None | Some(401 | 404) => !self.has_begun(),
            Some(403) => self.lost.is_none_or(|lost| now.duration_since(lost).unsigned_abs() > UNSETTLED),
            Some(code) => (400..=409).contains(&code),
        };
        (!is_final).then_some(delay)
    }

    /// Ends a time without packets.
    pub(super) fn end(&mut self, now: Timestamp) -> Option<Gap> {
        let (from, why) = (self.read?, self.why.take()?);
        Some(Gap { from, to: now, why })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_capture::blocks::Packet;
    use proptest::prelude::*;

    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(millis).unwrap()
    }

    fn packet(millis: i64) -> Block {
        let time_ns = u64::try_from(millis).unwrap() * 1_000_000;
        Block::Packet(Packet { interface: 0, time_ns, block: Vec::new() })
    }

    #[test]
    fn a_refusal_for_good_ends_the_request() {
        let delay = |course: &mut Course, code| course.fail("", code, at(0));
        for code in [400, 401, 403, 404, 409] {
            assert_eq!(delay(&mut Course::default(), Some(code)), None, "{code}");
        }
        assert_eq!(delay(&mut Course::default(), None), None, "a wrong address");
        let mut course = Course::default();
        for (code, millis) in [(429, 200), (503, 400), (502, 800), (504, 1600)] {
            assert_eq!(delay(&mut course, Some(code)), Some(Duration::from_millis(millis)), "{code}");
        }
        assert_eq!(course.begin(at(0)), None, "nothing was read before");
        assert_eq!(delay(&mut course, None), Some(Duration::from_millis(3200)));
        for (code, millis) in [(404, 6400), (401, 10_000)] {
            assert_eq!(delay(&mut course, Some(code)), Some(Duration::from_millis(millis)), "{code} for now");
        }
        for code in [400, 409] {
            assert_eq!(delay(&mut course, Some(code)), None, "{code}");
        }
        let forbidden = |course: &mut Course, millis| course.fail("", Some(403), at(millis));
        for (millis, expected) in [(0, Some(LONGEST)), (60_000, Some(LONGEST)), (60_001, None)] {
            assert_eq!(forbidden(&mut course, millis), expected, "{millis}");
        }
        let gap = course.end(at(1500)).unwrap();
        assert_eq!(
            gap.to_string(),
            "no packets were read between 1970-01-01T00:00:00.000Z and 1970-01-01T00:00:01.500Z: "
        );
        assert_eq!(course.end(at(1500)), None);
        // Another stream ends, and then the role is missing again.
        assert_eq!(course.begin(at(100_000)), None);
        assert_eq!(course.fail("", None, at(110_000)), Some(FIRST));
        assert_eq!(forbidden(&mut course, 170_000), Some(2 * FIRST));
        assert_eq!(forbidden(&mut course, 170_001), None);
    }

    proptest! {
        /// Drawn are milliseconds since the event before, and the kind of the event, among those that can happen then.
        /// Packets are older than the event before, or their clock is ahead.
        #[test]
        fn each_time_without_packets_is_reported_once(drawn in prop::collection::vec((0..15_000_i64, 0..4_u8), 0..60)) {
            let (mut course, mut found, mut expected) = (Course::default(), Vec::new(), Vec::new());
            let (mut now, mut is_open, mut last, mut gap, mut before) = (100_000, false, None, None, Duration::ZERO);
            let mut begun = 0;
            for (number, (step, event)) in drawn.into_iter().enumerate() {
                now += step;
                let (time, why) = (at(now), number.to_string());
                if event < 2 {
                    if is_open {
                        let newest = if event == 0 { now - 2 * step } else { now + step };
                        course.read(&[packet(newest), packet(newest - 1), Block::Note(String::new())], time);
                        last = last.max(Some(at(newest.min(now))));
                    } else {
                        found.extend(course.begin(time));
                        expected.extend(last.zip(gap.take()).map(|(from, why)| Gap { from, to: time, why }));
                        (is_open, begun, last) = (true, now, Some(time));
                    }
                    continue;
                }
                // A stream ends without a code. A request is refused for now, or not answered.
                let code = (!is_open && (event == 2 || last.is_none())).then_some(503);
                let delay = course.fail(&why, code, time).unwrap();
                let is_long = is_open && now - begun >= 10_000;
                let is_slower = delay >= before && (delay >= before * 2 || delay == LONGEST);
                prop_assert!(if is_long { delay == FIRST } else { is_slower }, "{delay:?} after {before:?}");
                prop_assert!((FIRST..=LONGEST).contains(&delay));
                if is_open {
                    gap = Some(why);
                }
                (is_open, before) = (false, delay);
                now += i64::try_from(delay.as_millis()).unwrap();
            }
            found.extend(course.end(at(now)));
            expected.extend(last.zip(gap).map(|(from, why)| Gap { from, to: at(now), why }));
            prop_assert_eq!(&found, &expected);
            prop_assert!(found.is_sorted_by(|one, next| one.from <= one.to && one.to <= next.from));
        }
    }
}
