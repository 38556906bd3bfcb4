//! Capture files of others, as `mirror-agent filter` reads them: any bytes are read to their end, and each packet has at
//! most the bytes of the file.

#![no_main]

#[path = "../../../mirror-agent/src/cli/filter/capture.rs"]
mod capture;

use libfuzzer_sys::fuzz_target;

/// A large buffer would take most of the time.
const BUFFER: usize = capture::BUFFER >> 8;

fuzz_target!(|file: &[u8]| {
    let mut packets = 0;
    let read = capture::each(BUFFER, file, |packet| {
        packets += 1;
        let _ = (packet.length, packet.link_type);
        assert!(packet.bytes.len() <= file.len());
        Ok(())
    });
    // The shortest block of a packet has 16 bytes.
    assert!(16 * packets <= file.len(), "{packets} packets of {} bytes", file.len());
    drop(read);
});
