//! Packet sockets, which send and receive whole frames of one device (packet(7)).

use std::{
    io,
    net::UdpSocket,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

/// Larger than any frame.
const LONGEST: usize = 1 << 17;

/// A packet socket of one device.
#[derive(Debug)]
pub struct FrameSocket(UdpSocket);

impl FrameSocket {
    /// Opens a socket in the caller's network namespace. With the protocol 0 it receives nothing.
    pub(crate) fn open(device: &str, protocol: u16) -> io::Result<Self> {
        let ifindex = nix::net::if_::if_nametoindex(device)?;
        // SAFETY: the descriptor is checked, and only this `OwnedFd` owns it.
        let socket = unsafe {
            let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            assert!(fd >= 0, "packet socket: {}", io::Error::last_os_error());
            OwnedFd::from_raw_fd(fd)
        };
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol.to_be(),
            sll_ifindex: ifindex.cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of_val(&address) as u32;
        // SAFETY: the address is a `sockaddr_ll` of that length.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
        if bound != 0 {
            return Err(io::Error::last_os_error());
        }
        // Used only for send(2) and recv(2), which have no address argument.
        Ok(Self(socket.into()))
    }

    /// A socket whose messages begin with a `struct virtio_net_hdr`, as [`super_frame`] makes them.
    pub fn with_super_frames(self) -> Self {
        self.with(libc::PACKET_VNET_HDR)
    }

    /// A socket whose packets go directly to the device and bypass its egress tc hook and captures there.
    pub fn around_the_hook(self) -> Self {
        self.with(libc::PACKET_QDISC_BYPASS)
    }

    fn with(self, option: libc::c_int) -> Self {
        let on: libc::c_int = 1;
        let length = size_of_val(&on) as u32;
        // SAFETY: pointer and length describe one number.
        let set = unsafe {
            let on = (&raw const on).cast();
            libc::setsockopt(self.0.as_raw_fd(), libc::SOL_PACKET, option, on, length)
        };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
        self
    }

    /// Sends a frame.
    pub fn send(&self, frame: &[u8]) -> io::Result<usize> {
        self.0.send(frame)
    }

    /// Waits for a frame until the timeout, and returns its number of bytes in the buffer.
    pub fn receive(&self, frame: &mut [u8], timeout: Duration) -> io::Result<usize> {
        self.0.set_read_timeout(Some(timeout))?;
        self.0.recv(frame)
    }

    /// The frames that have arrived since the last call.
    pub fn arrived(&self) -> Vec<Vec<u8>> {
        self.0.set_nonblocking(true).unwrap();
        let mut frame = vec![0; LONGEST];
        let mut frames = Vec::new();
        loop {
            match self.0.recv(&mut frame) {
                Ok(length) => frames.push(frame[..length].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        self.0.set_nonblocking(false).unwrap();
        frames
    }
}

/// A TCP super-frame with a partial checksum, as a pod's own stack sends it, after its `struct virtio_net_hdr`.
///
/// `frame` has an Ethernet header without a tag, and IP and TCP headers without options, except for IPv6 destination
/// options. `segment` is the payload of a segment in bytes.
pub fn super_frame(frame: &[u8], segment: u16) -> Vec<u8> {
    const NEEDS_CHECKSUM: u8 = 1;
    const TCP_OVER_IPV4: u8 = 1;
    const TCP_OVER_IPV6: u8 = 4;
    const DESTINATION_OPTIONS: u8 = 60;
    let (kind, tcp) = match (&frame[12..14], frame[20]) {
        ([0x86, 0xdd], DESTINATION_OPTIONS) => (TCP_OVER_IPV6, 62 + 8 * u16::from(frame[55])),
        ([0x86, 0xdd], _) => (TCP_OVER_IPV6, 54),
        _ => (TCP_OVER_IPV4, 34),
    };
    // Lengths of the headers and of a segment, start of the checksummed data, and offset of the checksum field.
    let lengths = [tcp + 20, segment, tcp, 16].map(u16::to_ne_bytes).concat();
    [&[NEEDS_CHECKSUM, kind][..], &lengths, frame].concat()
}
