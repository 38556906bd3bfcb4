//! Readiness of the agent, and liveness of its loop.
//!
//! Pure, except for [`until_hung`], which sleeps: the inputs are the newest report, the state of the source and the
//! time.

use std::{thread, time::Duration};

use tokio::time::Instant;

use crate::{
    report::{Report, Reports, TICK},
    sources::SourceState,
};

/// How long the source may be unreachable before the agent is unready.
const AWAY: Duration = Duration::from_secs(60);
/// Maximum duration of a round.
const ROUND: Duration = Duration::from_secs(180);

/// Ready once everything that a complete list of pods requests has been tried, and while the source has not been
/// unreachable for longer than a minute. Otherwise returns the reason.
///
/// Failures of single pods do not make the agent unready, nor do later failures: these are retried and visible in the
/// metrics. Installed mirrors do not need the source, and the annotations of one pod's author must not stop a rolling
/// update.
pub fn ready(report: &Report, source: SourceState, now: Instant) -> Result<(), String> {
    if let SourceState::Away { since } = source
        && let away = now.saturating_duration_since(since)
        && away > AWAY
    {
        return Err(format!("the source of pods has been away for {} s", away.as_secs()));
    }
    if report.is_reconciled {
        return Ok(());
    }
    if !report.is_listed || source == SourceState::Starting {
        return Err("there is no complete list of pods yet".into());
    }
    let failure = report.failures.first().map_or("", String::as_str);
    Err(format!("the first round has not succeeded yet: {}", failure.replace('\n', " ")))
}

/// Alive as long as rounds end: the loop runs at least one round each [`TICK`]. Depends on no other process.
pub fn alive(report: &Report, now: Instant) -> Result<(), String> {
    let silence = report.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
    if silence > TICK + ROUND {
        return Err(format!("no round of the loop has ended for {} s", silence.as_secs()));
    }
    Ok(())
}

/// Checks the newest report at intervals. Returns when the loop hangs, with the reason.
pub fn until_hung(reports: &Reports, interval: Duration) -> String {
    loop {
        if let Err(reason) = alive(&reports.borrow(), Instant::now()) {
            return reason;
        }
        thread::sleep(interval);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;

    use tokio::sync::watch;

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn ready_after_the_first_complete_list_and_round() {
        let (now, current) = (Instant::now(), SourceState::Current);
        let mut report = Report::default();
        let reason = |report: &Report, source| ready(report, source, now).err().unwrap_or_default();
        assert!(reason(&report, SourceState::Starting).contains("no complete list"));
        assert!(reason(&report, current).contains("no complete list"));
        report.is_listed = true;
        report.failures.insert("tap_egress at device 7:\nno room".into());
        assert_eq!(
            reason(&report, current),
            "the first round has not succeeded yet: tap_egress at device 7: no room"
        );
        report.is_reconciled = true;
        assert_eq!(ready(&report, current, now), Ok(()), "later failures are tried again");
    }

    #[test]
    fn not_ready_while_the_source_is_away_for_more_than_a_minute() {
        let since = Instant::now();
        let away = SourceState::Away { since };
        let report = Report { is_listed: true, is_reconciled: true, ..Report::default() };
        assert_eq!(ready(&report, away, since), Ok(()));
        assert_eq!(ready(&report, away, since + seconds(60)), Ok(()));
        let reason = ready(&report, away, since + seconds(61));
        assert_eq!(reason, Err("the source of pods has been away for 61 s".into()));
        assert_eq!(ready(&report, SourceState::Current, since + seconds(61)), Ok(()));
        assert!(ready(&Report::default(), away, since).is_err(), "being away is no list of pods");
    }

    #[test]
    fn alive_as_long_as_rounds_end_whatever_they_find() {
        let at = Instant::now();
        let report = Report { at: Some(at), failures: ["no devices".into()].into(), ..Report::default() };
        assert_eq!(alive(&report, at), Ok(()));
        assert_eq!(alive(&report, at + TICK + ROUND), Ok(()));
        let reason = alive(&report, at + seconds(241));
        assert_eq!(reason, Err("no round of the loop has ended for 241 s".into()));
    }

    #[test]
    fn a_loop_that_hangs_is_noticed_and_one_that_goes_on_is_not() {
        let report = |at| Arc::new(Report { at: Some(at), ..Report::default() });
        let old = report(Instant::now().checked_sub(seconds(241)).unwrap());
        let reports = watch::Sender::new(report(Instant::now()));
        let watched = reports.subscribe();
        let watching = thread::spawn(move || until_hung(&watched, Duration::from_millis(1)));
        for _ in 0..100 {
            reports.send_replace(report(Instant::now()));
            thread::yield_now();
        }
        assert!(!watching.is_finished());
        reports.send_replace(old);
        assert_eq!(watching.join().unwrap(), "no round of the loop has ended for 241 s");
    }
}
