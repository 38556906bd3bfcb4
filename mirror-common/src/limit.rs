//! Rate limits and budgets: whether a session may make one more copy.
//!
//! Pure: the caller provides the clock, and keeps two CPUs from using the same [`Meter`] at once. This module does not
//! look at the packet, which has passed filter and sample already.
//!
//! [`charge`] charges a copy to the meter of each [`Level`].

use core::{
    sync::atomic::{Ordering, compiler_fence},
    time::Duration,
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::level::{LIMITS_LEN, Level, METERS_LEN};
use crate::verdict::Verdict;

pub mod charge;
mod level;

/// Times in a meter are in units of 2^-10 ns, so that a byte at 100 Gbit/s (0.08 ns) still has a price.
pub const TICKS_PER_NS: u64 = 1 << 10;

const TICKS_PER_SECOND: u64 = 1_000_000_000 * TICKS_PER_NS;

/// The longest burst of a rate. A rate may be exceeded by its burst, so a longer one would make the rate meaningless.
/// The bound also keeps a credit (in ticks, 63 bits) from overflowing.
pub const MAX_BURST: Duration = Duration::from_secs(10);

/// The highest price, about 52 days, so that adding it to a credit does not overflow.
const MAX_PRICE: u64 = 1 << 62;
/// The longest length that is priced: twice the kernel's maximum (`GSO_MAX_SIZE`, 512 KiB).
const MAX_LEN: u32 = 1 << 20;
/// The highest price of a byte; at 1 bit/s a byte costs 0.93 of it.
const MAX_TICKS_PER_BYTE: u64 = (1 << 43) - 1;

/// Rates, and budgets as the highest value of the meter. Zeros mean no limit. Only the agent writes limits, and only
/// the kernel writes a [`Meter`], so that neither overwrites the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Limits {
    /// Price of a packet in ticks: 1 s in ticks divided by the rate. 0: unlimited.
    pub ticks_per_packet: u64,
    /// Price of a byte in ticks. 0: unlimited.
    pub ticks_per_byte: u64,
    /// Maximum credit of both rates (the burst), in ticks. 0: there is no rate.
    pub burst_ticks: u64,
    /// The session ends when its meter reaches this number of packets.
    pub packets: u64,
    /// The session ends when its meter reaches this number of bytes; exact to one packet.
    pub bytes: u64,
    /// End of the session, in ns of `CLOCK_MONOTONIC`.
    pub ends_ns: u64,
}

impl Limits {
    /// Limits with a rate and no budget. A rate of 0 is no limit; `burst` is capped at [`MAX_BURST`].
    ///
    /// Prices are whole ticks, rounded up, so that a rate is never exceeded: at 100 Gbit/s the effective rate is 0.1 %
    /// below the setting, at 1 Tbit/s 9 % below, and never more than 8 Tbit/s.
    pub const fn of_rate(packets_per_second: u64, bits_per_second: u64, burst: Duration) -> Self {
        let has_rate = packets_per_second != 0 || bits_per_second != 0;
        let burst_ns =
            if burst.as_nanos() < MAX_BURST.as_nanos() { burst } else { MAX_BURST }.as_nanos() as u64;
        Self {
            ticks_per_packet: price(TICKS_PER_SECOND, packets_per_second),
            ticks_per_byte: price(8 * TICKS_PER_SECOND, bits_per_second),
            burst_ticks: match burst_ns * TICKS_PER_NS {
                _ if !has_rate => 0,
                0 => 1,
                ticks => ticks,
            },
            packets: 0,
            bytes: 0,
            ends_ns: 0,
        }
    }

    /// The share of each of `pods` pods of this rate: the same burst at `pods` times the price. No limits, and so no
    /// share, if the price is more than a meter can count.
    pub const fn share(&self, pods: u32) -> Self {
        let pods = if pods == 0 { 1 } else { pods as u64 };
        let packet = self.ticks_per_packet.saturating_mul(pods);
        let byte = self.ticks_per_byte.saturating_mul(pods);
        if packet > MAX_PRICE || byte > MAX_TICKS_PER_BYTE {
            return Self { burst_ticks: 0, ..Self::of_rate(0, 0, MAX_BURST) };
        }
        Self { ticks_per_packet: packet, ticks_per_byte: byte, ..*self }
    }

    /// Whether there is a rate, not only budgets.
    #[inline(always)]
    pub const fn has_rate(&self) -> bool {
        self.burst_ticks != 0
    }

    /// Whether there is a rate or a budget.
    #[inline(always)]
    const fn are_set(&self) -> bool {
        self.burst_ticks | self.packets | self.bytes | self.ends_ns != 0
    }

    /// Prices of a packet in ticks: the packet itself, and its `len` bytes.
    #[inline(always)]
    const fn prices(&self, len: u32) -> (i64, i64) {
        let len = if len < MAX_LEN { len } else { MAX_LEN };
        (
            least(self.ticks_per_packet, MAX_PRICE) as i64,
            (least(self.ticks_per_byte, MAX_TICKS_PER_BYTE) * len as u64) as i64,
        )
    }
}

/// The price of a unit (a packet or a byte) at a rate of `rate` units a second, rounded up.
const fn price(ticks_per_second: u64, rate: u64) -> u64 {
    if rate == 0 { 0 } else { ticks_per_second.div_ceil(rate) }
}

/// The use so far. A meter of zeros is unused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Meter {
    /// Credit for packets, in ticks. Negative: a debt, because the last packet cost more than the credit.
    pub packet_credit: i64,
    /// Credit for bytes, in ticks.
    pub byte_credit: i64,
    /// Time of the last update of the credits, in ns of `CLOCK_MONOTONIC`.
    pub counted_ns: u64,
    /// Number of copied packets.
    pub packets: u64,
    /// Bytes of the copied packets.
    pub bytes: u64,
    /// [`Limits::ticks_per_packet`] at the last update of the credits.
    pub ticks_per_packet: u64,
    /// [`Limits::ticks_per_byte`] at the last update of the credits.
    pub ticks_per_byte: u64,
}

/// Whether a budget of [`Limits`] is used up.
#[inline(always)]
pub const fn is_used_up(used: u64, budget: u64) -> bool {
    budget != 0 && used >= budget
}

impl Meter {
    /// Charges one packet of `len` bytes at `now_ns`, or returns the reason for the refusal: `Ended` or `Limited`. A
    /// refused packet costs nothing. A clock that runs backwards grants no credit.
    #[inline(always)]
    pub fn take(&mut self, limits: &Limits, now_ns: u64, len: u32) -> Result<(), Verdict> {
        if is_used_up(self.packets, limits.packets)
            || is_used_up(self.bytes, limits.bytes)
            || is_used_up(now_ns, limits.ends_ns)
        {
            return Err(Verdict::Ended);
        }
        if limits.has_rate() {
            self.count(limits, now_ns);
            // The fence makes the program read the credits from the meter again, so the verifier does not know them.
            // Otherwise, it would go through the rest of the program once for each way to compute them.
            compiler_fence(Ordering::SeqCst);
            // Any positive credit admits a packet, which may leave a debt. Otherwise a rate below one super-frame a
            // burst would admit no packet at all. The debt keeps the average exact.
            let packets_due = limits.ticks_per_packet != 0 && self.packet_credit <= 0;
            let bytes_due = limits.ticks_per_byte != 0 && self.byte_credit <= 0;
            if packets_due || bytes_due {
                return Err(Verdict::Limited);
            }
        }
        self.draw(limits, len);
        Ok(())
    }

    /// Converts a debt at the prices of an earlier rate into the price of the same packets and bytes at the present
    /// rate. Without this, a debt of a very low rate would take weeks to pay.
    #[inline(always)]
    const fn reprice(&mut self, limits: &Limits) {
        if self.ticks_per_packet != limits.ticks_per_packet {
            let debt = repriced(self.packet_credit, self.ticks_per_packet, limits.ticks_per_packet);
            (self.packet_credit, self.ticks_per_packet) = (debt, limits.ticks_per_packet);
        }
        if self.ticks_per_byte != limits.ticks_per_byte {
            let debt = repriced(self.byte_credit, self.ticks_per_byte, limits.ticks_per_byte);
            (self.byte_credit, self.ticks_per_byte) = (debt, limits.ticks_per_byte);
        }
    }

    /// Refunds the price that [`Self::take`] charged for a packet of `len` bytes that was not copied after all.
    #[inline(always)]
    pub const fn give_back(&mut self, limits: &Limits, len: u32) {
        if limits.has_rate() {
            let (packet, byte) = limits.prices(len);
            self.packet_credit = add(self.packet_credit, packet);
            self.byte_credit = add(self.byte_credit, byte);
        }
        // Saturating: the meter may have been cleared for another session since the charge.
        self.packets = self.packets.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(len as u64);
    }

    /// Charges one packet, whatever the credit: after a refusal by [`Self::take`], which has updated the credit. The
    /// debt is paid before other pods get any rate.
    #[inline(always)]
    const fn draw(&mut self, limits: &Limits, len: u32) {
        if limits.has_rate() {
            let (packet, byte) = limits.prices(len);
            self.packet_credit = subtract(self.packet_credit, packet);
            self.byte_credit = subtract(self.byte_credit, byte);
        }
        self.packets = self.packets.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(len as u64);
    }

    /// Adds the credit for the time since the last update, up to a burst.
    #[inline(always)]
    const fn count(&mut self, limits: &Limits, now_ns: u64) {
        self.reprice(limits);
        let elapsed_ns = now_ns.saturating_sub(self.counted_ns);
        if elapsed_ns == 0 {
            return;
        }
        self.counted_ns = now_ns;
        // The whole pause counts, because a debt can be longer than a burst.
        let ticks = (least(elapsed_ns, i64::MAX as u64 / TICKS_PER_NS) * TICKS_PER_NS) as i64;
        let burst = least(limits.burst_ticks, MAX_PRICE);
        self.packet_credit = least_credit(add(self.packet_credit, ticks), burst as i64);
        self.byte_credit = least_credit(add(self.byte_credit, ticks), burst as i64);
    }
}

#[inline(always)]
const fn least(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

#[inline(always)]
const fn least_credit(a: i64, b: i64) -> i64 {
    if a < b { a } else { b }
}

/// A credit plus `ticks`, which are not negative. A `saturating_add` with fewer branches: the verifier goes through the
/// rest of the program once for each combination of them.
#[inline(always)]
const fn add(credit: i64, ticks: i64) -> i64 {
    let sum = credit.wrapping_add(ticks);
    let overflows = (!credit & sum) >> 63;
    sum & !overflows | i64::MAX & overflows
}

/// A credit minus `ticks`, which are not negative: a `saturating_sub`, as in [`add`].
#[inline(always)]
const fn subtract(credit: i64, ticks: i64) -> i64 {
    let rest = credit.wrapping_sub(ticks);
    let overflows = (credit & !rest) >> 63;
    rest & !overflows | i64::MIN & overflows
}

/// A credit at another price. Only a debt changes: a positive credit is a time. Units without a price leave no debt.
#[inline(always)]
const fn repriced(credit: i64, old: u64, new: u64) -> i64 {
    if credit >= 0 {
        return credit;
    }
    let units = if old == 0 { 0 } else { credit.unsigned_abs().div_ceil(old) };
    // BPF has no 128-bit multiplication.
    let debt = if new != 0 && units > MAX_PRICE / new { MAX_PRICE } else { units * new };
    -(debt as i64)
}

#[cfg(test)]
mod tests;
