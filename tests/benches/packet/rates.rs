//! What a packet costs by the rate of the packets: between two of them the CPU sleeps, or does something else.

use std::{
    hint, thread,
    time::{Duration, Instant},
};

use mirror_tests::FrameSocket;

use crate::{figures::quartiles, path::send};

/// Frames a second; of the last one, as many as there can be.
pub(crate) const RATES: [Rate; 5] =
    [Rate(Some(100)), Rate(Some(1_000)), Rate(Some(10_000)), Rate(Some(100_000)), Rate(None)];
/// Who takes part.
pub(crate) const CANDIDATES: [&str; 5] = ["no program", "no tap entry", "bare clone", "mirrored", "streamed"];
/// The frames of a sample: a tenth of a second, and this many at least.
const LEAST: u32 = 20;
const UNPACED: u32 = 20_000;
/// A shorter pause is too short for a sleep.
const SLEEP: Duration = Duration::from_millis(1);

/// Frames a second. `None`: without a pause.
#[derive(Clone, Copy)]
pub(crate) struct Rate(Option<u32>);

impl Rate {
    /// What the table is of.
    pub(crate) fn title(self) -> String {
        self.0.map_or("without a pause".to_owned(), |rate| format!("{rate} a second"))
    }

    /// ns per frame: the median of the calls, or without a pause their mean.
    pub(crate) fn send(self, socket: &FrameSocket, frame: &[u8]) -> f64 {
        let Some(rate) = self.0 else { return send(socket, frame, UNPACED) };
        let pause = Duration::from_secs(1) / rate;
        let mut next = Instant::now();
        let times = (0..(rate / 10).max(LEAST)).map(|_| {
            next += pause;
            if pause >= SLEEP {
                thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            while Instant::now() < next {
                hint::spin_loop();
            }
            send(socket, frame, 1)
        });
        quartiles(times)[1]
    }
}
