//! The hash FNV-1a with 64 bits: small, and the same in every version. It is no protection against bytes that somebody
//! has chosen to collide.

/// The hash of some bytes.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
