//! Who a tap is for and what was asked for, as they stand in the maps.
//!
//! Pure: from the model to the wire types and back. `maps` calls it.

use std::time::Duration;

use mirror_common::{
    abi::{Session, TapOwner},
    filter::FilterProgram,
};

use crate::{
    model::{NetnsId, Owner, PodId},
    settings::{Budget, CaptureFilter, Rate, Settings, Share},
};

/// The settings of a session, whose filter is `program`.
pub(super) fn decode_settings(
    session: &Session,
    info: &TapOwner,
    program: Option<FilterProgram>,
) -> Settings {
    let filter = program.map(|program| CaptureFilter { text: text(&info.filter), program: program.into() });
    let asked = |value: u64| (value != 0).then_some(value);
    let time = |ms: u64| asked(ms).map(Duration::from_millis);
    let (packets, bits) = (asked(info.rate_packets), asked(info.rate_bits));
    let rate = Rate { packets, bits, burst: Duration::from_millis(info.burst_ms) };
    Settings {
        filter,
        sample: (session.sample != 0).then_some(Share(session.sample)),
        seed: session.seed,
        rate: (packets.is_some() || bits.is_some()).then_some(rate),
        snaplen: (session.snaplen != 0).then_some(session.snaplen),
        budget: Budget {
            duration: time(info.budget_ms),
            packets: asked(info.budget_packets),
            bytes: asked(info.budget_bytes),
        },
    }
}

/// What the map of owners holds for a tap.
pub(super) fn encode_info(owner: &Owner, settings: &Settings) -> TapOwner {
    let Owner { pod, netns, nic, device } = owner;
    let (uid, namespace, name) =
        pod.as_ref().map_or(("", "", ""), |PodId { uid, namespace, name }| (uid, namespace, name));
    let Settings { filter, sample: _, seed: _, rate, snaplen: _, budget } = settings;
    let Budget { duration, packets, bytes } = budget;
    let ms = |time: Duration| time.as_millis() as u64;
    TapOwner {
        netns_dev: netns.dev,
        netns_ino: netns.ino,
        pod_uid: fixed(uid),
        pod_namespace: fixed(namespace),
        pod_name: fixed(name),
        nic: fixed(nic),
        device: fixed(device),
        rate_packets: rate.and_then(|rate| rate.packets).unwrap_or(0),
        rate_bits: rate.and_then(|rate| rate.bits).unwrap_or(0),
        burst_ms: rate.map_or(0, |rate| ms(rate.burst)),
        budget_ms: duration.map_or(0, ms),
        budget_packets: packets.unwrap_or(0),
        budget_bytes: bytes.unwrap_or(0),
        filter: fixed(filter.as_ref().map_or("", |filter| &filter.text)),
    }
}

/// The owner in it.
pub(super) fn decode_owner(wire: &TapOwner) -> Owner {
    let TapOwner { netns_dev, netns_ino, pod_uid, pod_namespace, pod_name, nic, device, .. } = wire;
    let pod = PodId { uid: text(pod_uid), namespace: text(pod_namespace), name: text(pod_name) };
    Owner {
        pod: (!pod.uid.is_empty()).then_some(pod),
        netns: NetnsId { dev: *netns_dev, ino: *netns_ino },
        nic: text(nic),
        device: text(device),
    }
}

/// A text filled up with zeros. Sources of texts keep within these sizes; a longer one would be cut.
pub(super) fn fixed<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = text.floor_char_boundary(N);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

/// The text in front of the zeros.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::transmute;

    use super::*;

    proptest! {
        /// What is written of an owner is what is read back.
        #[test]
        fn owners_survive_the_map(
            uid in "[a-f0-9-]{1,64}", namespace in "[a-z]{1,63}", name in "[a-z.]{1,253}",
            nic in "\\PC{0,5}", device in "\\PC{0,3}", dev: u64, ino: u64, has_pod: bool,
        ) {
            let pod = has_pod.then_some(PodId { uid, namespace, name });
            let owner = Owner { pod, netns: NetnsId { dev, ino }, nic, device };
            prop_assume!(owner.nic.len() <= 16 && owner.device.len() <= 16);
            prop_assume!(!owner.nic.contains('\0') && !owner.device.contains('\0'));
            let bytes: [u8; size_of::<TapOwner>()] = transmute!(encode_info(&owner, &Settings::default()));
            prop_assert_eq!(decode_owner(&transmute!(bytes)), owner);
        }
    }
}
