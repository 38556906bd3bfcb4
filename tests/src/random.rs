//! Random numbers that a seed reproduces.

use std::time::{SystemTime, UNIX_EPOCH};

/// A generator of random numbers (splitmix64). The same seed gives the same numbers.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with a fixed seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator with a seed from the clock or from `MIRROR_FUZZ_SEED`. Prints the seed, with which the run can be
    /// repeated.
    pub fn from_clock(test: &str) -> Self {
        let seed = from_environment("MIRROR_FUZZ_SEED", || {
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
        });
        eprintln!("{test}: MIRROR_FUZZ_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// True once in `count` times.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Puts these into a random order (Fisher-Yates).
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for end in (1..values.len()).rev() {
            values.swap(end, self.below(end + 1));
        }
    }

    /// Random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// A number from an environment variable.
pub fn from_environment(name: &str, default: impl FnOnce() -> u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")),
        Err(_) => default(),
    }
}
