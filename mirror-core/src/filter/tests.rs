#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;
use mirror_capture::frame::{Frame, Wire};

const SAME: [&str; 16] = [
    "tcp port 443",
    "host 10.0.0.1 and not udp",
    "ip6 or vlan",
    "tcp[tcpflags] & (tcp-syn|tcp-rst) != 0",
    "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
    "tcp[tcpflags] & tcp-push != 0",
    "tcp[13] & 0x12 = 0x10",
    "not (tcp[13] & 4 != 0)",
    "ip[8] > 3 or ip6[7] > 3",
    "tcp[0:2] = 80",
    "tcp[8:4] = 7",
    "tcp[12] & 0xf0 = 0x50",
    "ether[12:2] = 0x86dd",
    "icmp[0] = 8",
    "ether broadcast",
    "ip6 protochain 6 and less 100",
];
const OTHER: [&str; 10] = [
    "greater 1515",
    "less 1514 or port 7",
    "ip[2:2] > 1500",
    "ip6[4:2] > 1500",
    "ip[4:2] = 7",
    "tcp[4:4] = 7",
    "tcp[tcpflags] & tcp-push = 0",
    "not (tcp[tcpflags] & tcp-fin != 0)",
    "tcp[(tcp[12] >> 4) * 4] = 0x47",
    "ip[20] = 7",
];

#[test]
fn what_not_all_segments_have_makes_a_difference() {
    for text in SAME {
        assert!(!differs_on_segments(text), "{text}");
    }
    for text in OTHER {
        assert!(compile(text).is_ok() && differs_on_segments(text), "{text}");
    }
    assert!(!differs_on_segments("no filter at all"));
}

/// A TCP super-frame with these flags.
fn super_frame(is_v6: bool, flags: u8, payload: u16) -> Vec<u8> {
    let (payload_len, len) = ((20 + payload).to_be_bytes(), (40 + payload).to_be_bytes());
    let network = match is_v6 {
        true => [&[0x86, 0xdd, 0x60, 0, 0, 0][..], &payload_len, &[6, 64], &[9; 32]].concat(),
        false => {
            [&[8, 0, 0x45, 0][..], &len, &[0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]].concat()
        }
    };
    let tcp =
        [&[0, 80, 1, 0xbb][..], &[0; 4], &[0, 0, 0, 7], &[0x50, flags, 0xff, 0xff, 0, 0, 0, 0]].concat();
    [vec![2; 12], network, tcp, vec![0x47; payload.into()]].concat()
}

proptest! {
    /// If the kernel's filter rejects a super-frame, none of its segments would have matched.
    #[test]
    fn no_segment_matches_where_the_super_frame_does_not(
        is_v6: bool, flags: u8, payload in 101..3000_u16, text in prop::sample::select(SAME.to_vec()),
    ) {
        prop_assume!(!text.contains("protochain"));
        let program = compile(text).unwrap();
        let bytes = super_frame(is_v6, flags, payload);
        let len = bytes.len() as u32;
        let mut wire = Wire::default();
        let mut frames = wire.frames(&Frame { bytes: &bytes, len, gso_size: 100, vlan: None });
        let mut count = 0;
        while let Some(segment) = frames.next_frame() {
            count += 1;
            let matches = program.matches(segment.bytes, segment.len);
            prop_assert!(!matches || program.matches(&bytes, len), "{text}");
        }
        prop_assert!(count > 1);
    }
}
