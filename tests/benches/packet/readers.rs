//! Other software that copies: tcpdump and the reader of the ring, on another CPU during a measurement, and tc.

use std::{
    hint::black_box,
    io::{BufRead as _, BufReader},
    os::fd::AsRawFd as _,
    process::{Child, Stdio},
};

use aya::maps::{Array, MapData, RingBuf};
use mirror_tests::Lab;

use crate::{
    STREAMED, TARGETS,
    path::{CUT_TO, pin_to_cpu},
};

/// Longest interval between two reads of the ring.
const LOOK_MS: i32 = 10;

/// tcpdump on another CPU, as an engineer would start it inside the pod.
pub(crate) struct Tcpdump(Child);

impl Tcpdump {
    pub(crate) fn start(lab: &Lab, device: &str) -> Self {
        let mut command = lab.node().command("taskset");
        command.args(["-c", "1", "tcpdump", "-n", "-s", &CUT_TO.to_string(), "-B", "65536", "-Z", "root"]);
        command.args(["-i", device, "-w", "/dev/null"]).stderr(Stdio::piped());
        let mut tcpdump = command.spawn().unwrap();
        // tcpdump prints "listening on ..." when it captures.
        BufReader::new(tcpdump.stderr.as_mut().unwrap()).lines().next().unwrap().unwrap();
        Self(tcpdump)
    }
}

impl Drop for Tcpdump {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Copies what the pod sends, by tc's action mirred.
pub(crate) struct Mirred<'a>(&'a Lab);

impl<'a> Mirred<'a> {
    pub(crate) fn start(lab: &'a Lab) -> Self {
        lab.node().tc("qdisc add dev tapped clsact");
        lab.node().tc(&format!(
            "filter add dev tapped ingress protocol all u32 match u32 0 0 action mirred egress mirror dev {}",
            TARGETS[0]
        ));
        Self(lab)
    }
}

impl Drop for Mirred<'_> {
    fn drop(&mut self) {
        self.0.node().tc("qdisc delete dev tapped clsact");
    }
}

/// Reads the ring on another CPU until the bench ends, as `tail` does.
pub(crate) fn read(
    mut ring: RingBuf<MapData>,
    taken: &Array<MapData, u64>,
    mut returned: Array<MapData, u64>,
) {
    pin_to_cpu(1);
    loop {
        let mut wait = libc::pollfd { fd: ring.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to one `pollfd`.
        unsafe { libc::poll(&raw mut wait, 1, LOOK_MS) };
        let mut bytes = 0;
        while let Some(record) = ring.next() {
            bytes += record.len();
        }
        black_box(bytes);
        let now = taken.get(&STREAMED, 0).unwrap();
        returned.set(STREAMED, &now, 0).unwrap();
    }
}
