//! The packet sockets of the node that read the copies on a mirror interface.
//!
//! A mirror interface sends copies. When a device sends a packet, only packet sockets (packet(7)) for all protocols
//! get it (`dev_queue_xmit_nit()` in net/core/dev.c). tcpdump and every IDS open such sockets. When a device
//! receives a packet, sockets for its protocol get it, too. A socket for a protocol that copies do not have, as in
//! a daemon for LLDP or EAPOL, gets nothing, and neither does a socket whose device is down. `/proc/net/packet`
//! lists the packet sockets of a network namespace, of all processes. `when_read` reads it.

use std::{collections::BTreeSet, fs};

use anyhow::Context as _;

use crate::model::{IfIndex, Readable};

/// The packet sockets of the calling thread's network namespace.
const PATH: &str = "/proc/thread-self/net/packet";
/// The position of a socket's protocol in its line. The next field is its device.
const PROTOCOL: usize = 3;
/// `ETH_P_ALL`, as the kernel writes it.
const ALL: &str = "0003";
/// The protocols of nearly all packets that pods send and receive: IPv4, ARP and IPv6.
const USUAL: [&str; 3] = ["0800", "0806", "86dd"];
/// The flag of a socket that receives, because its device is up.
const RUNS: &str = "1";
/// The index that means all devices.
const ANY: IfIndex = IfIndex(0);

/// The devices that packet sockets read.
#[derive(Debug, Default)]
pub struct PacketSockets {
    /// The devices read by sockets for all protocols.
    all: BTreeSet<IfIndex>,
    /// These, and the devices read by sockets for one of the protocols that copies have.
    some: BTreeSet<IfIndex>,
}

impl PacketSockets {
    /// Reads the sockets that are open at the moment.
    pub fn open_now() -> anyhow::Result<Self> {
        fs::read_to_string(PATH).map(|text| Self::parse(&text)).context(PATH)
    }

    /// Whether a socket reads copies on this mirror interface.
    pub fn read(&self, mirror: &Readable) -> bool {
        let has = |devices: &BTreeSet<IfIndex>, device| devices.contains(&device) || devices.contains(&ANY);
        has(&self.all, mirror.device) || mirror.other_end.is_some_and(|other_end| has(&self.some, other_end))
    }

    fn parse(text: &str) -> Self {
        let mut sockets = Self::default();
        // The heading has a word in the field of the device.
        for line in text.lines() {
            let mut fields = line.split_whitespace().skip(PROTOCOL);
            let (Some(protocol), Some(Ok(device)), Some(RUNS)) =
                (fields.next(), fields.next().map(str::parse), fields.next())
            else {
                continue;
            };
            if protocol == ALL {
                sockets.all.insert(IfIndex(device));
            }
            if protocol == ALL || USUAL.contains(&protocol) {
                sockets.some.insert(IfIndex(device));
            }
        }
        sockets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The heading as the kernel writes it (`packet_seq_show()` in net/packet/af_packet.c).
    const HEAD: &str = "sk               RefCnt Type Proto  Iface R Rmem   User   Inode\n";

    #[test]
    fn sockets_that_get_copies_are_readers() {
        let line = |(protocol, device): &(&str, u32)| {
            format!("0000000000000000 3      3    {protocol}   {device:<5} 1 0      0      1234  \n")
        };
        let read = |sockets: &[(&str, u32)]| {
            let lines: String = sockets.iter().map(line).collect();
            let sockets = PacketSockets::parse(&format!("{HEAD}{lines}"));
            let dummy = Readable { device: IfIndex(7), other_end: None };
            let veth = Readable { device: IfIndex(8), other_end: Some(IfIndex(9)) };
            [dummy, veth].map(|mirror| sockets.read(&mirror))
        };
        assert_eq!(read(&[]), [false, false]);
        assert_eq!(read(&[("0003", 7)]), [true, false]);
        assert_eq!(read(&[("0003", 8)]), [false, true]);
        assert_eq!(read(&[("0003", 9)]), [false, true]);
        assert_eq!(read(&[("0003", 0)]), [true, true], "tcpdump -i any");
        assert_eq!(read(&[("0800", 7), ("0800", 8)]), [false, false], "what is sent is not for one protocol");
        assert_eq!(read(&[("0800", 9)]), [false, true], "what is received is");
        for nothing in ["0000", "88cc", "888e"] {
            assert_eq!(read(&[(nothing, 7), (nothing, 9), (nothing, 0)]), [false, false], "{nothing}");
        }
        assert_eq!(read(&[("88cc", 5), ("0003", 12345), ("0003", 7)]), [true, false]);
        let down = format!("{HEAD}{}", line(&("0003", 9)).replace(" 1 0 ", " 0 0 "));
        assert!(PacketSockets::parse(&down).some.is_empty(), "its device is down");
    }
}
