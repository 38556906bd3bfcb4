//! Answers of the kernel about devices: any bytes are survived, and whatever names root in a pod has given to a device,
//! the device is read.

#![no_main]

use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use mirror_agent::kernel::links::{device, messages};

/// Types of messages, and of attributes of a device (include/uapi/linux).
const DONE: u16 = 3;
const NEW_LINK: u16 = 16;
const NAME: u16 = 3;
const ALIAS: u16 = 20;
const OTHER_NAMES: u16 = 52 | 0x8000;
const OTHER_NAME: u16 = 53;

/// A device with names in any bytes that the kernel accepts.
#[derive(Arbitrary, Debug)]
struct Device<'a> {
    index: u32,
    flags: u32,
    name: &'a [u8],
    alias: &'a [u8],
    other_names: Vec<&'a [u8]>,
    /// Another message comes before it.
    follows: bool,
}

impl Device<'_> {
    fn name(&self) -> Vec<u8> {
        text(self.name, 15)
    }

    fn message(&self) -> Vec<u8> {
        let other_names: Vec<_> =
            self.other_names.iter().flat_map(|name| attribute(OTHER_NAME, &text(name, 127))).collect();
        let attributes = [
            attribute(NAME, &self.name()),
            attribute(OTHER_NAMES, &other_names),
            attribute(ALIAS, &text(self.alias, 255)),
        ];
        let header = [[0; 4], self.index.to_ne_bytes(), self.flags.to_ne_bytes(), [0; 4]];
        let before = if self.follows { message(DONE, &[0; 4]) } else { Vec::new() };
        [before, message(NEW_LINK, &[header.concat(), attributes.concat()].concat())].concat()
    }
}

/// The first bytes of a text, as the kernel keeps them.
fn text(bytes: &[u8], most: usize) -> Vec<u8> {
    let bytes = bytes.iter().copied().take_while(|byte| *byte != 0).take(most);
    std::iter::once(b'n').chain(bytes).take(most).chain([0]).collect()
}

fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = (16 + payload.len()) as u32;
    let header = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10]].concat();
    padded([&header, payload].concat())
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    padded([&length.to_ne_bytes(), &kind.to_ne_bytes(), value].concat())
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fuzz_target!(|input: (Vec<Device<'_>>, &[u8])| {
    let (mut devices, answer) = input;
    let mut answer = answer.to_vec();
    let before = answer.clone();
    messages(&mut answer).for_each(|message| drop(device(message)));
    let is_mended = |(new, old): (&u8, &u8)| new == old || *new == b'?' && !old.is_ascii();
    assert!(answer.iter().zip(&before).all(is_mended));
    devices.truncate(64);
    let mut answer = devices.iter().flat_map(Device::message).collect::<Vec<_>>();
    let links: Vec<_> = messages(&mut answer).filter_map(device).collect();
    assert_eq!(links.len(), devices.len());
    for (link, device) in links.iter().zip(&devices) {
        let name = device.name();
        let mended = || name.iter().map(|byte| if byte.is_ascii() { char::from(*byte) } else { '?' }).collect();
        let name = String::from_utf8(name.clone()).unwrap_or_else(|_| mended());
        assert_eq!((link.ifindex.0, link.name.as_str()), (device.index, name.trim_end_matches('\0')));
    }
});
