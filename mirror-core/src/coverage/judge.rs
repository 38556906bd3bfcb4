//! [`Judge`]: evaluates one direction of one NIC, reading by reading.
//!
//! An alarm needs few readings, but its end needs time. So traffic that bypasses the hook now and then does not make
//! the state flap.

use std::{collections::VecDeque, time::Duration};

use super::{AtHook, Carried, Count, Doubt, Kind, Reading, State, Way, gap::Gap};

/// The number of steps between readings whose sum is evaluated by share.
const WINDOW: usize = 4;
/// Minimum number of packets for an evaluation by share.
pub const FEW: u64 = 10;
/// Minimum bytes of a super-frame's segment, if segmentation is to explain a difference in packets. With much smaller
/// segments the headers alone make the bytes differ.
const SEGMENT: u64 = 1000;
/// Bytes that some NICs count per packet in addition to the hook: an Ethernet header with a tag, or the frame checksum.
const HEADER: u64 = 18;
/// How long packets must be seen, with none bypassing the hook, before a direction is no longer `Bypassed`. Also how
/// long a direction stays `Covered` while packets seem to be missing.
pub const CLEAR: Duration = Duration::from_secs(20);
/// How long a direction without packets stays `Covered`, and how long any state is kept without a reading.
pub const QUIET: Duration = Duration::from_secs(60);

/// Evaluates one direction of one NIC.
#[derive(Debug, Clone)]
pub struct Judge {
    /// The NIC's counters include the packets that bypass the tapped device.
    tells: bool,
    kind: Kind,
    hook: AtHook,
    last: Option<Reading>,
    window: VecDeque<Step>,
    /// Packets were also missing in the previous reading's window.
    lacked: bool,
    /// Used for a NIC that counts packets as the hook does.
    gap: Gap,
    /// The state according to the counters.
    counted: State,
    /// Time of the last evidence for this state.
    proven: Duration,
    /// Time of the last reading.
    read: Duration,
    /// Packets that were carried and seen since the last one that bypassed the hook.
    clean: u64,
    since: Duration,
    /// The earliest reading that can be compared with `last`.
    first: Option<Reading>,
    /// The totals up to `first`.
    before: Totals,
}

/// The packets over the whole lifetime of a judge, except those between readings that cannot be compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Packets that a session saw. A packet that passed during a reading counts as seen.
    pub seen: u64,
    /// Packets that the NIC carried.
    pub carried: u64,
}

impl Totals {
    /// Returns the packets between two comparable readings.
    fn between(first: &Reading, last: &Reading) -> Self {
        let (Some(then), Some(now)) = (first.seen, last.seen) else { return Self::default() };
        let carried = last.carried.nic.packets.saturating_sub(first.carried.nic.packets);
        // The session's counter at the moment when the NIC was read is not known exactly, only its minimum and maximum.
        let least = now.before.packets.saturating_sub(then.after.packets);
        let most = now.after.packets.saturating_sub(then.before.packets);
        Self { seen: carried.clamp(least, most.max(least)), carried }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            seen: self.seen.saturating_add(other.seen),
            carried: self.carried.saturating_add(other.carried),
        }
    }
}

/// The difference between two readings.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// The NIC's packets. Zeros if the sessions cannot be compared.
    carried: Count,
    /// Upper bound of the packets that a session saw.
    seen: Count,
    /// Minimum number of packets that bypassed the node side of the veth.
    around: u64,
    /// The sessions of both readings can be compared.
    is_whole: bool,
}

impl Judge {
    /// Starts to evaluate a direction. `tells`: the NIC's counters include the packets that bypass the tapped device.
    pub fn new(tells: bool, at: Duration) -> Self {
        Self {
            tells,
            kind: Kind::Segments,
            hook: AtHook::First,
            last: None,
            window: VecDeque::with_capacity(WINDOW),
            lacked: false,
            gap: Gap::default(),
            counted: State::Unknown(Doubt::Idle),
            proven: at,
            read: at,
            clean: 0,
            since: at,
            first: None,
            before: Totals::default(),
        }
    }

    /// The current state.
    pub fn state(&self) -> State {
        match &self.hook {
            AtHook::First => self.counted.clone(),
            AtHook::Behind(crate::model::Hidden::NoHook) | AtHook::Absent => State::NoHook,
            AtHook::Behind(hidden) => State::Hidden(hidden.clone()),
        }
    }

    /// Time at which the state got its name.
    pub const fn since(&self) -> Duration {
        self.since
    }

    /// The packets so far.
    pub fn totals(&self) -> Totals {
        let now = self.first.zip(self.last).map(|(first, last)| Totals::between(&first, &last));
        self.before.plus(now.unwrap_or_default())
    }

    /// Updates the state of the hook. A change restarts the evaluation of the counters.
    pub fn hook(&mut self, hook: AtHook, at: Duration) {
        if self.hook == hook {
            return;
        }
        self.change(at, |judge| {
            judge.hook = hook;
            judge.before = judge.totals();
            (judge.first, judge.last) = (None, None);
            judge.begin_again();
        });
    }

    /// Updates the kind of the NIC. A change restarts the evaluation of the counters.
    pub fn kind(&mut self, kind: Kind, at: Duration) {
        if self.kind != kind {
            self.kind = kind;
            self.change(at, Self::begin_again);
        }
    }

    /// Takes a reading.
    pub fn read(&mut self, reading: Reading) {
        self.read = reading.at;
        let totals = self.totals();
        let Some(last) = self.last.replace(reading) else {
            self.first = Some(reading);
            return;
        };
        let step = Step::between(&last, &reading);
        if !step.is_some_and(|step| step.is_whole) {
            (self.before, self.first) = (totals, Some(reading));
        }
        match step {
            // A counter restarted: the NIC was replaced.
            None => self.change(reading.at, Self::begin_again),
            Some(step) => self.change(reading.at, |judge| judge.take(step, &reading)),
        }
    }

    /// Notes that the counters could not be read.
    pub fn missed(&mut self, at: Duration) {
        if at.saturating_sub(self.read) >= QUIET {
            self.change(at, |judge| judge.counted = State::Unknown(Doubt::Unread));
        }
    }

    /// Whether a small part of the packets bypasses the hook.
    #[cfg(test)]
    pub(super) const fn gap_grows(&self) -> bool {
        self.gap.is_growing()
    }

    fn change(&mut self, at: Duration, change: impl FnOnce(&mut Self)) {
        let before = self.state().name();
        change(self);
        if self.state().name() != before {
            self.since = at;
        }
    }

    fn begin_again(&mut self) {
        self.window.clear();
        self.lacked = false;
        self.gap = Gap::default();
        self.counted = State::Unknown(Doubt::Idle);
    }

    fn take(&mut self, step: Step, reading: &Reading) {
        let at = reading.at;
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(step);
        let sum = self.window.iter().fold(Step::default(), |sum, step| sum.plus(step));
        let is_enough = sum.carried.packets >= FEW;
        let lacks = is_enough && !sum.has_seen(1, 2);
        let grows = self.kind != Kind::Segments && self.gap.take(reading);
        let way = match step.around {
            // A queue after the hook can hold packets from one step to the next.
            0 => (grows || lacks && self.lacked).then_some(self.past()),
            _ => Some(Way::Peer),
        };
        self.lacked = lacks;
        let is_good = is_enough && sum.is_nearly_all(self.kind);
        let told = if let State::Bypassed(told) = self.counted { Some(told) } else { None };
        self.counted = match (way, told) {
            (Some(way), told) => {
                (self.proven, self.clean) = (at, 0);
                State::Bypassed(told.map_or(way, |told| way.max(told)))
            }
            (None, Some(told)) if !self.is_over(told, &step, &sum, at) => State::Bypassed(told),
            (None, _) if is_good => self.good(at),
            (None, _) if self.is_still_proven(is_enough, at) => self.counted.clone(),
            (None, _) if is_enough => State::Unknown(Doubt::Differs),
            (None, _) => State::Unknown(Doubt::Idle),
        };
    }

    /// Takes a step that proves no bypass. Returns whether the reported bypass has ended.
    ///
    /// Packets that bypass the node side of a veth are counted exactly, as the difference between its two ends. Any
    /// other bypass was found by a share of less than a half, or by a growing gap. It ends only when nearly all packets
    /// are seen; otherwise a share of about a half would flap. It does not end before the gap was checked again.
    fn is_over(&mut self, told: Way, step: &Step, sum: &Step, at: Duration) -> bool {
        let is_clean = if told == Way::Peer { sum.has_seen(1, 2) } else { sum.has_seen(7, 8) };
        self.clean = self.clean.saturating_add(if is_clean { step.carried.packets } else { 0 });
        !self.gap.is_growing() && self.clean >= FEW && at.saturating_sub(self.proven) >= CLEAR
    }

    /// Whether the proven state still holds without new evidence. The time is shorter if packets pass and seem to be
    /// missing.
    fn is_still_proven(&self, is_enough: bool, at: Duration) -> bool {
        let limit = if is_enough { CLEAR } else { QUIET };
        matches!(self.counted, State::Covered | State::Unknown(Doubt::Kernel | Doubt::L3s))
            && at.saturating_sub(self.proven) < limit
    }

    /// The best state that can be determined.
    fn good(&mut self, at: Duration) -> State {
        self.proven = at;
        match self.kind {
            _ if !self.tells => State::Unknown(Doubt::Kernel),
            Kind::L3s => State::Unknown(Doubt::L3s),
            Kind::Plain | Kind::Segments => State::Covered,
        }
    }

    /// How packets bypass the hook, if not past the node side of a veth.
    const fn past(&self) -> Way {
        match self.kind {
            Kind::L3s => Way::L3s,
            Kind::Plain | Kind::Segments => Way::Unseen,
        }
    }
}

impl Step {
    /// Returns `None` if a counter decreased.
    fn between(then: &Reading, now: &Reading) -> Option<Self> {
        let carried = now.carried.nic.minus(then.carried.nic)?;
        let mut step = Self { around: Carried::around(&then.carried, &now.carried)?, ..Self::default() };
        if let (Some(old), Some(seen)) = (then.seen, now.seen)
            && old.serial == seen.serial
        {
            seen.before.minus(old.after)?;
            step.carried = carried;
            step.seen = seen.after.minus(old.before)?;
            step.is_whole = true;
        }
        Some(step)
    }

    fn plus(&self, other: &Self) -> Self {
        let (carried, seen) = (self.carried.plus(other.carried), self.seen.plus(other.seen));
        Self { carried, seen, ..Self::default() }
    }

    /// Whether the session saw at least `parts`/`of` of the NIC's packets, or of its bytes.
    fn has_seen(&self, parts: u32, of: u32) -> bool {
        let Self { carried, seen, .. } = self;
        is_part(seen.packets, carried.packets, parts, of) || is_part(seen.bytes, carried.bytes, parts, of)
    }

    /// Whether the session saw nearly all of the NIC's packets and of its bytes.
    fn is_nearly_all(&self, kind: Kind) -> bool {
        let Self { carried, seen, .. } = self;
        let packets = match kind {
            Kind::Segments => seen.packets.saturating_add(seen.bytes / SEGMENT),
            Kind::Plain | Kind::L3s => seen.packets,
        };
        let bytes = seen.bytes.saturating_add(seen.packets.saturating_mul(HEADER));
        is_part(packets, carried.packets, 7, 8) && is_part(bytes, carried.bytes, 7, 8)
    }
}

/// Whether `seen` is at least `parts`/`of` of `carried`.
fn is_part(seen: u64, carried: u64, parts: u32, of: u32) -> bool {
    u128::from(seen) * u128::from(of) >= u128::from(carried) * u128::from(parts)
}
