//! [`Mended`]: a netlink socket whose messages can be decoded, whatever names devices have.
//!
//! The kernel accepts any bytes for a name, an alternative name or an alias of a device, also from root inside a pod.
//! The decoder accepts UTF-8 only, and skips the whole message of such a device: a pod could hide its NICs. So invalid
//! bytes are replaced by question marks before decoding. All connections of `socket` are of this kind.

use std::{
    io, str,
    task::{Context, Poll, ready},
};

use bytes::BufMut;
use rtnetlink::sys::{AsyncSocket, Socket, SocketAddr, TokioSocket};

/// The size in bytes of the header of a message (`struct nlmsghdr`), and with the device header after it (`struct
/// ifinfomsg`).
const HEADER: usize = 16;
const HEADERS: usize = HEADER + 16;
/// The size in bytes of the header of an attribute (`struct nlattr`).
const ATTRIBUTE: usize = 4;
/// The bits of an attribute's type that are the type (`NLA_TYPE_MASK`).
const TYPE: u16 = 0x3fff;

/// A netlink socket that replaces invalid bytes.
pub(super) struct Mended(TokioSocket);

/// Replaces invalid bytes in messages about devices.
pub(super) fn mend(mut received: &mut [u8]) {
    while let Some((length, kind)) = number(received).zip(u16_at(received, 4)) {
        let length = length.max(HEADER);
        let Some((message, rest)) = received.split_at_mut_checked(length) else { return };
        if matches!(kind, libc::RTM_NEWLINK | libc::RTM_DELLINK) {
            mend_attributes(message.get_mut(HEADERS..).unwrap_or_default());
        }
        received = rest.get_mut(aligned(length) - length..).unwrap_or_default();
    }
}

fn mend_attributes(mut attributes: &mut [u8]) {
    while let Some((length, kind)) = u16_at(attributes, 0).zip(u16_at(attributes, 2)) {
        let length = usize::from(length).max(ATTRIBUTE);
        let Some((attribute, rest)) = attributes.split_at_mut_checked(length) else { return };
        let value = &mut attribute[ATTRIBUTE..];
        match kind & TYPE {
            libc::IFLA_IFNAME | libc::IFLA_IFALIAS | libc::IFLA_ALT_IFNAME => mend_text(value),
            libc::IFLA_PROP_LIST => mend_attributes(value),
            _ => {}
        }
        attributes = rest.get_mut(aligned(length) - length..).unwrap_or_default();
    }
}

fn mend_text(text: &mut [u8]) {
    if str::from_utf8(text).is_err() {
        text.iter_mut().filter(|byte| !byte.is_ascii()).for_each(|byte| *byte = b'?');
    }
}

/// Splits off the first received message.
pub(super) fn split_first(received: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = number(received)?;
    let message = received.get(..length).filter(|message| !message.is_empty())?;
    Some((message, received.get(aligned(length)..).unwrap_or_default()))
}

const fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Returns the length of the message that begins here.
fn number(bytes: &[u8]) -> Option<usize> {
    usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl AsyncSocket for Mended {
    fn socket_ref(&self) -> &Socket {
        self.0.socket_ref()
    }

    fn socket_mut(&mut self) -> &mut Socket {
        self.0.socket_mut()
    }

    fn new(protocol: isize) -> io::Result<Self> {
        TokioSocket::new(protocol).map(Self)
    }

    fn poll_send(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_send(context, bytes)
    }

    fn poll_send_to(
        &self,
        context: &mut Context<'_>,
        bytes: &[u8],
        to: &SocketAddr,
    ) -> Poll<io::Result<usize>> {
        self.0.poll_send_to(context, bytes, to)
    }

    fn poll_recv<B: BufMut>(&self, context: &mut Context<'_>, buffer: &mut B) -> Poll<io::Result<()>> {
        self.poll_recv_from(context, buffer).map_ok(drop)
    }

    fn poll_recv_from<B: BufMut>(
        &self,
        context: &mut Context<'_>,
        buffer: &mut B,
    ) -> Poll<io::Result<SocketAddr>> {
        // `buffer` has room for the longest message.
        let mut received = Vec::with_capacity(buffer.chunk_mut().len());
        let from = ready!(self.0.poll_recv_from(context, &mut received))?;
        mend(&mut received);
        buffer.put_slice(&received);
        Poll::Ready(Ok(from))
    }

    fn poll_recv_from_full(&self, context: &mut Context<'_>) -> Poll<io::Result<(Vec<u8>, SocketAddr)>> {
        let (mut received, from) = ready!(self.0.poll_recv_from_full(context))?;
        mend(&mut received);
        Poll::Ready(Ok((received, from)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = (ATTRIBUTE + value.len()) as u16;
        let mut bytes = [&length.to_ne_bytes(), &kind.to_ne_bytes(), value].concat();
        bytes.resize(aligned(bytes.len()), 0xee);
        bytes
    }

    fn message(kind: u16, attributes: &[u8]) -> Vec<u8> {
        let length = (HEADERS + attributes.len()) as u32;
        let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes()].concat();
        bytes.resize(HEADERS, 0xff);
        [&bytes, attributes].concat()
    }

    #[test]
    fn names_and_aliases_are_mended_and_nothing_else() {
        const MTU: u16 = libc::IFLA_MTU;
        let names = |name: &[u8]| {
            let nested = attribute(libc::IFLA_PROP_LIST | 0x8000, &attribute(libc::IFLA_ALT_IFNAME, name));
            let of = [libc::IFLA_IFNAME, libc::IFLA_IFALIAS].map(|kind| attribute(kind, name));
            [&of[0], &attribute(MTU, &[0xff; 5]), &nested, &of[1]].map(Vec::as_slice).concat()
        };
        let both = |name: &[u8]| {
            let names = names(name);
            [libc::RTM_NEWLINK, libc::RTM_DELLINK].map(|kind| message(kind, &names)).concat()
        };
        for (before, after) in [
            (&b"a\xff\xfeb\0"[..], &b"a??b\0"[..]),
            (b"eth0\0", b"eth0\0"),
            ("größe".as_bytes(), "größe".as_bytes()),
        ] {
            let mut mended = both(before);
            mend(&mut mended);
            assert_eq!(mended, both(after), "{before:?}");
        }
        let other = message(libc::RTM_NEWQDISC, &names(b"\xff"));
        let mut same = other.clone();
        mend(&mut same);
        assert_eq!(same, other);
    }

    /// The end of a list has no device header.
    #[test]
    fn names_after_a_short_message_are_mended() {
        let short = [&20_u32.to_ne_bytes()[..], &[0; 16]].concat();
        let both = |name: &[u8]| {
            [&short[..], &message(libc::RTM_NEWLINK, &attribute(libc::IFLA_IFNAME, name))].concat()
        };
        let mut mended = both(b"a\xff\0");
        mend(&mut mended);
        assert_eq!(mended, both(b"a?\0"));
    }

    proptest! {
        /// For any input, the function ends, and changes bytes to question marks only.
        #[test]
        fn any_bytes_are_taken(mut bytes in vec(prop_oneof![Just(0u8), 0..40u8, any::<u8>()], 0..200)) {
            let before = bytes.clone();
            mend(&mut bytes);
            mend_attributes(&mut bytes);
            let is_mended = |(new, old): (&u8, &u8)| new == old || *new == b'?' && !old.is_ascii();
            prop_assert!(bytes.iter().zip(&before).all(is_mended) && bytes.len() == before.len());
        }
    }
}
