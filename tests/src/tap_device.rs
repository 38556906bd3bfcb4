//! TAP devices, as for the NICs of VMs (`Documentation/networking/tuntap.rst`).

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::fd::AsRawFd as _,
};

use crate::Netns;

/// A TAP device, and the program at its other end. The device is removed on drop.
#[derive(Debug)]
pub struct TapDevice(File);

impl TapDevice {
    /// Creates a device that is up.
    pub fn new(netns: &Netns, name: &str) -> Self {
        let file = netns.enter(|| {
            let mut request = libc::ifreq {
                ifr_name: [0; libc::IFNAMSIZ],
                ifr_ifru: libc::__c_anonymous_ifr_ifru {
                    ifru_flags: (libc::IFF_TAP | libc::IFF_NO_PI) as i16,
                },
            };
            for (to, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *to = byte.cast_signed();
            }
            let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
            // SAFETY: the request is an `ifreq` that outlives the call.
            let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw const request) };
            assert_eq!(made, 0, "{name}: {}", io::Error::last_os_error());
            file
        });
        netns.sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1");
        netns.ip(&format!("link set {name} up"));
        Self(file)
    }

    /// Makes the device receive a frame.
    pub fn receives(&mut self, frame: &[u8]) {
        self.0.write_all(frame).unwrap();
    }
}
