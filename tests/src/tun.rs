//! TUN devices, whose packets have no Ethernet header, and TAP devices, whose packets are frames.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::fd::AsRawFd as _,
};

use crate::Netns;

/// A TUN or TAP device, and the program at its other end. The device is removed on drop.
#[derive(Debug)]
pub struct Tun(File);

impl Tun {
    /// Creates a TUN device that is up.
    pub fn new(netns: &Netns, name: &str) -> Self {
        Self::create(netns, name, libc::IFF_TUN)
    }

    /// Creates a TAP device that is up, as for the NIC of a VM.
    pub fn tap(netns: &Netns, name: &str) -> Self {
        Self::create(netns, name, libc::IFF_TAP)
    }

    fn create(netns: &Netns, name: &str, kind: libc::c_int) -> Self {
        let file = netns.enter(|| {
            let mut request = libc::ifreq {
                ifr_name: [0; libc::IFNAMSIZ],
                ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: (kind | libc::IFF_NO_PI) as i16 },
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

    /// Makes the device receive a packet, which begins with its IP header, or a frame.
    pub fn receives(&mut self, packet: &[u8]) {
        self.0.write_all(packet).unwrap();
    }
}
