//! The facts about a packet's header by which sessions select packets: whether its flow is in the sample.
//!
//! Pure. The tap programs read the header only for a session that needs facts, in a function that the verifier checks
//! once. Such a function returns a number, so the facts are bits. Filters are separate programs.

use crate::{abi::Session, packet::Header, sample::in_sample, verdict::Verdict};

/// Whether the session needs facts.
#[inline(always)]
pub const fn are_needed(session: &Session) -> bool {
    session.sample != 0
}

/// The facts about one packet for one session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Facts {
    /// A bit for each fact.
    bits: u32,
}

impl Facts {
    /// The facts about a header that cannot be read.
    pub const UNREAD: Self = Self { bits: 0 };
    /// The header was read.
    const READ: u32 = 1;
    /// The flow is in the sample.
    const IN_SAMPLE: u32 = 2;

    /// Returns the facts about a packet with this header, for a session with this sample and seed.
    #[inline(always)]
    pub fn of(header: &Header, sample: u32, seed: u32) -> Self {
        let in_sample = if in_sample(header, seed, sample) { Self::IN_SAMPLE } else { 0 };
        Self { bits: Self::READ | in_sample }
    }

    /// Returns the bits.
    #[inline(always)]
    pub const fn to_bits(self) -> u32 {
        self.bits
    }

    /// The inverse of [`Self::to_bits`].
    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Self {
        Self { bits }
    }

    /// Checks whether the session selects the packet.
    #[inline(always)]
    pub const fn check(self, session: &Session) -> Result<(), Verdict> {
        if !self.has(Self::READ) {
            return Err(Verdict::Failed);
        }
        if session.sample != 0 && !self.has(Self::IN_SAMPLE) {
            return Err(Verdict::SampledOut);
        }
        Ok(())
    }

    #[inline(always)]
    const fn has(self, bit: u32) -> bool {
        self.bits & bit != 0
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use proptest::{array::uniform32, prelude::*};

    use super::*;
    use crate::packet::header;

    proptest! {
        #[test]
        fn a_session_selects_what_is_in_its_sample(bytes in uniform32(any::<u8>()), sample: u32, seed: u32) {
            let header = header(&bytes, 32);
            let facts = Facts::of(&header, sample, seed);
            prop_assert_eq!(Facts::from_bits(facts.to_bits()), facts);
            let sampled = Session { sample, seed, ..Session::default() };
            let expected = if in_sample(&header, seed, sample) { Ok(()) } else { Err(Verdict::SampledOut) };
            prop_assert_eq!(facts.check(&sampled), expected);
            prop_assert_eq!(facts.check(&Session::default()), Ok(()));
            prop_assert_eq!(Facts::UNREAD.check(&sampled), Err(Verdict::Failed));
        }
    }
}
