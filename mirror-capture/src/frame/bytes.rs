//! Numbers in network byte order at checked offsets, independent of any protocol. Used by all of [`frame`](super).

/// Reads 2 bytes at `at`, if all of them exist.
pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads 4 bytes at `at`, if all of them exist.
pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Overwrites the bytes at `at`. Does nothing if there is no room for all of them.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: &[u8; N]) {
    if let Some(place) = bytes.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
        *place = *value;
    }
}
