//! The cost of a packet by the packet rate: between two packets the CPU sleeps or does other work.

use std::{
    hint, thread,
    time::{Duration, Instant},
};

use mirror_tests::FrameSocket;

use crate::{figures::quartiles, path::send};

/// Frames per second; the last rate is as fast as possible.
pub(crate) const RATES: [Rate; 5] =
    [Rate(Some(100)), Rate(Some(1_000)), Rate(Some(10_000)), Rate(Some(100_000)), Rate(None)];
pub(crate) const CANDIDATES: [&str; 5] = ["no program", "no tap entry", "bare clone", "mirrored", "streamed"];
/// Frames of a sample: a tenth of a second's, but at least this many.
const LEAST: u32 = 20;
const UNPACED: u32 = 20_000;
/// The shortest pause that is slept; the rest is spent spinning.
const SLEEP: Duration = Duration::from_millis(1);

/// Frames per second. `None`: no pause.
#[derive(Clone, Copy)]
pub(crate) struct Rate(Option<u32>);

impl Rate {
    /// Title of the rate's table.
    pub(crate) fn title(self) -> String {
        self.0.map_or("without a pause".to_owned(), |rate| format!("{rate} a second"))
    }

    /// ns per frame: the median of the calls, or their mean if there is no pause.
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
