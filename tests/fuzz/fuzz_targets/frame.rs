//! Frames of a stream, whose bytes and segment size the sender chooses: their wire frames have bounded sizes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_capture::frame::{Frame, VlanTag, Wire};

/// Most bytes of the wire frames of one frame, beside four times the captured bytes.
const MORE: usize = 8 << 10;

fuzz_target!(|input: (&[u8], u32, u16, Option<(u16, u16)>)| {
    let (bytes, len, gso_size, vlan) = input;
    let vlan = vlan.map(|(tpid, tci)| VlanTag { tpid, tci });
    let frame = Frame { bytes, len, gso_size, vlan };
    let mut wire = Wire::default();
    let mut frames = wire.frames(&frame);
    let mut total = 0;
    while let Some(made) = frames.next_frame() {
        assert!(made.len as usize >= made.bytes.len());
        total += made.bytes.len();
    }
    assert!(total <= 4 * bytes.len() + MORE, "{total} of {}", bytes.len());
    let mut tagged = wire.tagged(&frame);
    assert!(tagged.next_frame().is_some() && tagged.next_frame().is_none());
});
