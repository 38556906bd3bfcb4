//! Tests of wire frames: properties over packets from an independent builder (`packet`), and examples.
//!
//! The builder shares no code with the code under test. It builds the super-frame, and also each expected segment, byte
//! for byte.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::{collection::vec, option, prelude::*};

use super::*;
use packet::{Check, Packet, Spec, spec};

mod checksums;
mod packet;
mod segments;
mod tunnels;

/// A frame that is no super-frame, was not cut and has no tag in metadata.
fn plain(bytes: &[u8]) -> Frame<'_> {
    Frame { bytes, len: bytes.len() as u32, gso_size: 0, vlan: None }
}

/// All wire frames of a frame.
fn wire(frame: &Frame<'_>) -> Vec<(Vec<u8>, u32)> {
    let mut wire = Wire { buffer: vec![0xa5; 77] };
    let mut frames = wire.frames(frame);
    let mut all = Vec::new();
    while let Some(frame) = frames.next_frame() {
        assert!(frame.bytes.len() <= frame.len as usize);
        all.push((frame.bytes.to_vec(), frame.len));
    }
    all
}

/// The bytes of the one wire frame of a frame.
fn one(frame: &Frame<'_>) -> Vec<u8> {
    let mut all = wire(frame);
    assert_eq!(all.len(), 1);
    all.remove(0).0
}

fn tag() -> impl Strategy<Value = VlanTag> {
    (prop_oneof![Just(0x8100), Just(0x88a8)], any::<u16>()).prop_map(|(tpid, tci)| VlanTag { tpid, tci })
}

/// Inserts a VLAN tag after the MAC addresses.
fn tagged(bytes: &[u8], tag: Option<VlanTag>) -> Vec<u8> {
    let Some(tag) = tag.filter(|_| bytes.len() >= 12) else { return bytes.to_vec() };
    [&bytes[..12], &tag.tpid.to_be_bytes(), &tag.tci.to_be_bytes(), &bytes[12..]].concat()
}

/// Bytes that begin like a packet and are arbitrary from some offset on.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let changes = vec((0..120_usize, any::<u8>()), 0..6);
    let like_a_packet =
        (spec(300), changes, any::<bool>(), 0..400_usize).prop_map(|(spec, changes, is_unfinished, end)| {
            let check = if is_unfinished { Check::Unfinished } else { Check::Right };
            let mut bytes = spec.build(check).bytes;
            for (place, byte) in changes {
                if let Some(old) = bytes.get_mut(place) {
                    *old = byte;
                }
            }
            bytes.truncate(end);
            bytes
        });
    let of_an_ether_type = (vec(any::<u8>(), 0..200), any::<bool>()).prop_map(|(mut bytes, is_v6)| {
        let kind: [u8; 3] = if is_v6 { [0x86, 0xdd, 0x60] } else { [0x08, 0x00, 0x45] };
        bytes.iter_mut().skip(12).zip(kind).for_each(|(place, byte)| *place = byte);
        bytes
    });
    prop_oneof![3 => like_a_packet, 1 => of_an_ether_type, 1 => vec(any::<u8>(), 0..200)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn hostile_bytes_give_a_bounded_number_of_frames(
        bytes in hostile(),
        len in prop_oneof![Just(None), (0..2000_u32).prop_map(Some), any::<u32>().prop_map(Some)],
        gso_size in prop_oneof![Just(0), 1..20_u16, any::<u16>()],
        vlan in option::of(tag()),
    ) {
        let len = len.unwrap_or(bytes.len() as u32);
        let all = wire(&Frame { bytes: &bytes, len, gso_size, vlan });
        let true_len = (len as usize).max(bytes.len());
        if gso_size == 0 || all.len() == 1 {
            prop_assert_eq!(all.len(), 1);
            let (out, out_len) = &all[0];
            let tag = if vlan.is_some() { 4 } else { 0 };
            prop_assert_eq!(*out_len as usize, (true_len + tag).min(u32::MAX as usize));
            prop_assert_eq!(out.len(), tagged(&bytes, vlan).len());
        } else {
            prop_assert!(all.len() <= true_len.div_ceil(gso_size.into()));
            // A block in a file has 44 bytes in addition to the frame.
            let written: usize = all.iter().map(|(out, _)| out.len() + 44).sum();
            let tags = if vlan.is_some() { 4 * all.len() } else { 0 };
            let most = 5 * bytes.len() + true_len.min(8 << 10);
            prop_assert!(written - tags <= most, "{} bytes become {}", bytes.len(), written);
        }
    }

    /// Wire frames are finished: processed a second time, they do not change.
    #[test]
    fn a_wire_frame_needs_nothing(
        bytes in hostile(), gso_size in prop_oneof![2 => Just(0), 1 => 8..200_u16], vlan in option::of(tag()),
    ) {
        let all = wire(&Frame { gso_size, vlan, ..plain(&bytes) });
        // A super-frame that cannot be segmented is still one.
        let is_wire = gso_size == 0 || all.len() > 1;
        for (out, len) in all.into_iter().filter(|_| is_wire) {
            let again = wire(&Frame { len, ..plain(&out) });
            prop_assert_eq!(again, vec![(out.clone(), len)]);
        }
    }
}

proptest! {
    #[test]
    fn a_tag_goes_behind_the_addresses(bytes in vec(any::<u8>(), 0..40), more in 0..9_u32, tag in tag()) {
        let len = bytes.len() as u32 + more;
        let all = wire(&Frame { bytes: &bytes, len, gso_size: 0, vlan: Some(tag) });
        prop_assert_eq!(all, vec![(tagged(&bytes, Some(tag)), len + 4)]);
    }

    /// Without offload work, only the tag is inserted, whatever the bytes are.
    #[test]
    fn a_tagged_frame_is_as_the_kernel_has_it(
        bytes in hostile(), more in 0..9_u32, gso_size: u16, tag in option::of(tag()),
    ) {
        let len = bytes.len() as u32 + more;
        let mut wire = Wire::default();
        let mut frames = wire.tagged(&Frame { bytes: &bytes, len, gso_size, vlan: tag });
        let expected = tagged(&bytes, tag);
        let len = len + if tag.is_some() { 4 } else { 0 };
        prop_assert_eq!(frames.next_frame(), Some(WireFrame { bytes: &expected, len }));
        prop_assert_eq!(frames.next_frame(), None);
    }

    /// The result is the same slice, not a copy.
    #[test]
    fn a_finished_frame_is_unchanged(spec in spec(200), padding in 0..9_usize) {
        let Packet { mut bytes, unfinished, checksum, .. } = spec.build(Check::Right);
        prop_assume!(unfinished != checksum);
        bytes.resize(bytes.len() + padding, 0x77);
        let mut wire = Wire::default();
        let mut frames = wire.frames(&plain(&bytes));
        let out = frames.next_frame().unwrap();
        prop_assert_eq!((out.bytes, out.len as usize), (&bytes[..], bytes.len()));
        prop_assert_eq!(out.bytes.as_ptr(), bytes.as_ptr());
        prop_assert_eq!(frames.next_frame(), None);
    }
}

#[test]
fn frames_of_other_protocols_are_unchanged() {
    let arp = [&[0xff_u8; 12][..], &[8, 6], &[0; 28]].concat();
    assert_eq!(one(&plain(&arp)), arp);
    assert_eq!(one(&plain(&[])), Vec::<u8>::new());
    assert_eq!(one(&Frame { gso_size: 1448, ..plain(&arp) }), arp);
}
