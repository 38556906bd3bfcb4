//! Converts taps, sessions and targets between the model and the wire types. Pure; `maps` calls it.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use mirror_common::{
    abi::{
        self, DeviceKey, MAX_DESTINATION, MAX_NAME, SESSION_FILTERED, SESSION_METERED, SESSION_POD_METERED,
        SESSION_SEGMENTS, SessionInfo, TAP_CAPTURES_ONLY, TAP_SEEN_INSIDE, TARGET_CUTS, TARGET_GUARDED,
        TARGET_METERED, TARGET_QUEUELESS, TARGET_STREAM, TARGET_TUNNEL, TARGET_UP, TARGET_WHEN_READ,
        TUNNEL_CHECKSUM, TUNNEL_ERSPAN, TUNNEL_IDENTITY, TUNNEL_IPV6, TUNNEL_UDP, TapOwner,
    },
    limit::Limits,
    tunnel::{self, TunnelId, Tunnels},
    verdict::TapKind,
};
use mirror_core::{
    budget,
    destination::Destination,
    tunnel::{Keys, Kind, Oversize, Tunnel},
};
use zerocopy::transmute;

use super::ledger::{Entry, Placed};
use crate::{
    model::{
        Device, DeviceTarget, Directions, IfIndex, MirrorId, Name, NetnsId, Origin, Owner, PodId, RingId,
        Session, Target, TargetName,
    },
    settings::{Budget, CaptureFilter, Rate, Settings, Share},
};

/// Returns the key of a device. For a namespace other than the node's it has the inode only: all namespaces are on one
/// file system.
pub(super) const fn encode_device(device: Device) -> DeviceKey {
    DeviceKey { netns: device.netns.ino as u32, ifindex: device.ifindex.0 }
}

/// Returns the device of a key. The device number of its namespace is unknown (0).
pub(super) const fn decode_device(key: DeviceKey) -> Device {
    Device { netns: NetnsId { dev: 0, ino: key.netns as u64 }, ifindex: IfIndex(key.ifindex) }
}

/// Returns the entry of a tap, with its sessions in the order in which the programs run them.
pub(super) fn encode_tap(entry: &Entry) -> abi::Tap {
    let in_order = entry.in_order();
    let mut sessions = <[abi::Session; abi::MAX_SESSIONS_PER_TAP]>::default();
    for (number, (_, placed)) in in_order.iter().enumerate() {
        let ahead = in_order[..number].iter().enumerate();
        let is_alike = |other: &Placed| {
            other.target == placed.target && other.session.settings.snaplen == placed.session.settings.snaplen
        };
        let alike = ahead.filter(|(_, (_, other))| is_alike(other)).fold(0, |bits, (at, _)| bits | 1 << at);
        sessions[number] = encode_session(placed, alike, entry.head.is_limited);
    }
    let captures_only = in_order.iter().all(|(mirror, _)| mirror.0.is_capture());
    abi::Tap {
        kind: entry.head.kind.wire(),
        flags: flag(captures_only, TAP_CAPTURES_ONLY)
            | flag(entry.head.pod_side.is_some_and(|side| side.sees), TAP_SEEN_INSIDE),
        pod_meter: entry.pod_meter,
        namespace_meter: entry.namespace_meter.map_or(0, |place| place + 1),
        session_count: in_order.len() as u32,
        exit: entry.head.exit.map_or(0, |exit| exit.0),
        bridge: entry.head.bridge.map_or(0, |bridge| bridge.0),
        other_end: entry.head.pod_side.map_or(0, |side| side.nic.0),
        sessions,
    }
}

/// Returns the tap's entry for its pod side, the NIC inside the pod. `device` is the node side.
pub(super) fn encode_pod_side(device: Device, entry: &Entry) -> abi::Tap {
    let tap = encode_tap(entry);
    let flags = tap.flags & !TAP_SEEN_INSIDE;
    abi::Tap { kind: TapKind::PodNic.wire(), flags, other_end: device.ifindex.0, ..tap }
}

const fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}

fn encode_session(placed: &Placed, alike: u32, is_limited: bool) -> abi::Session {
    let Placed { session, id, settings: place, serial, target, filter, mark } = placed;
    let Session { directions, settings, origin, .. } = session;
    abi::Session {
        id: *id,
        settings: *place,
        target: *target,
        directions: directions.bits(),
        flags: flag(filter.is_some(), SESSION_FILTERED)
            | flag(
                settings.filter.as_ref().is_some_and(CaptureFilter::differs_on_segments),
                SESSION_SEGMENTS,
            )
            | flag(settings.is_metered(), SESSION_METERED)
            | flag(is_limited && *origin != Origin::Capture, SESSION_POD_METERED),
        filter: filter.unwrap_or(0),
        sample: settings.sample.map_or(0, |Share(share)| share),
        seed: settings.seed,
        serial: *serial,
        snaplen: settings.snaplen.unwrap_or(0),
        mark: *mark,
        alike,
        key: session.key.unwrap_or(0),
    }
}

/// Returns the description of a session, for users and for the next agent: the fields that the entry of the tap does
/// not have.
pub(super) fn encode_info(mirror: &MirrorId, session: &Session) -> SessionInfo {
    let Session { directions: _, settings, target: _, origin, asked, key: _ } = session;
    let Settings { filter, sample: _, seed: _, rate, snaplen: _, budget } = settings;
    let Budget { duration, packets, bytes } = budget;
    let ms = |time: Duration| time.as_millis() as u64;
    SessionInfo {
        mirror: fixed(mirror.0.as_str()),
        origin: Origin::ALL.iter().position(|of| of == origin).unwrap_or_default() as u32,
        asked: *asked,
        rate_packets: rate.and_then(|rate| rate.packets).unwrap_or(0),
        rate_bits: rate.and_then(|rate| rate.bits).unwrap_or(0),
        burst_ms: rate.map_or(0, |rate| ms(rate.burst)),
        budget_ms: duration.map_or(0, ms),
        budget_packets: packets.unwrap_or(0),
        budget_bytes: bytes.unwrap_or(0),
        filter: fixed(filter.as_ref().map_or("", |filter| &filter.text)),
    }
}

/// Returns a session and its mirror, given the table entries that the session refers to: its description, its limits,
/// the hash of its filter's program, and its target. `None` if the description does not match these limits, or has an
/// invalid name: then no agent has written it.
pub(super) fn decode_session(
    wire: &abi::Session,
    info: &SessionInfo,
    limits: &Limits,
    filter_hash: u64,
    target: &TargetName,
) -> Option<(MirrorId, Placed)> {
    let place = (wire.flags & SESSION_FILTERED != 0).then_some(wire.filter);
    let filter = place.map(|_| CaptureFilter { text: text(&info.filter), hash: filter_hash });
    let asked = |value: u64| (value != 0).then_some(value);
    let time = |ms: u64| asked(ms).map(Duration::from_millis);
    let (packets, bits) = (asked(info.rate_packets), asked(info.rate_bits));
    let rate = Rate { packets, bits, burst: Duration::from_millis(info.burst_ms) };
    let settings = Settings {
        filter,
        sample: (wire.sample != 0).then_some(Share(wire.sample)),
        seed: wire.seed,
        rate: (packets.is_some() || bits.is_some()).then_some(rate),
        snaplen: (wire.snaplen != 0).then_some(wire.snaplen),
        budget: Budget {
            duration: time(info.budget_ms),
            packets: asked(info.budget_packets),
            bytes: asked(info.budget_bytes),
        },
    };
    if !budget::are_of(limits, &settings) {
        return None;
    }
    let session = Session {
        directions: Directions::from_bits(wire.directions)?,
        settings,
        target: target.clone(),
        origin: *Origin::ALL.get(info.origin as usize)?,
        asked: info.asked,
        key: (wire.key != 0).then_some(wire.key),
    };
    let abi::Session { id, settings, serial, target, mark, .. } = *wire;
    let placed = Placed { session, id, settings, serial, target, filter: place, mark };
    Some((MirrorId(Name::of_written(&text(&info.mirror))?), placed))
}

/// Returns a tap's entry in the map of owners.
pub(super) fn encode_owner(owner: &Owner) -> TapOwner {
    let Owner { pod, netns, nic, network, device } = owner;
    let (uid, namespace, name) =
        pod.as_ref().map_or(("", "", ""), |PodId { uid, namespace, name }| (uid, namespace, name));
    TapOwner {
        netns_dev: netns.dev,
        netns_ino: netns.ino,
        pod_uid: fixed(uid),
        pod_namespace: fixed(namespace),
        pod_name: fixed(name),
        nic: fixed(nic),
        device: fixed(device),
        network: fixed(network.as_deref().unwrap_or_default()),
    }
}

/// Returns the owner in an entry.
pub(super) fn decode_owner(wire: &TapOwner) -> Owner {
    let TapOwner { netns_dev, netns_ino, pod_uid, pod_namespace, pod_name, nic, device, network } = wire;
    let pod = PodId { uid: text(pod_uid), namespace: text(pod_namespace), name: text(pod_name) };
    Owner {
        pod: (!pod.uid.is_empty()).then_some(pod),
        netns: NetnsId { dev: *netns_dev, ino: *netns_ino },
        nic: text(nic),
        network: Some(text(network)).filter(|network| !network.is_empty()),
        device: text(device),
    }
}

/// Returns the entry of a target.
pub(super) fn encode_target(name: &TargetName, target: &Target) -> abi::Target {
    let name = fixed::<MAX_NAME>(name.0.as_str());
    match target {
        Target::Device(DeviceTarget {
            destination,
            device,
            ifindex,
            up,
            queueless,
            cuts,
            guarded,
            collector,
            bridge,
            room,
            ceiling,
            when_read,
            other_end,
        }) => abi::Target {
            ifindex: ifindex.map_or(0, |IfIndex(index)| index),
            flags: flag(*up, TARGET_UP)
                | flag(*queueless, TARGET_QUEUELESS)
                | flag(*cuts, TARGET_CUTS)
                | flag(*guarded, TARGET_GUARDED)
                | flag(destination.is_tunnel(), TARGET_TUNNEL)
                | flag(ceiling.has_rate(), TARGET_METERED)
                | flag(*when_read, TARGET_WHEN_READ),
            name,
            device: fixed(device),
            collector: collector.unwrap_or_default(),
            bridge: bridge.map_or(0, |IfIndex(index)| index),
            other_end: other_end.map_or(0, |IfIndex(index)| index),
            tunnel: destination.tunnel().map(|tunnel| encode_tunnel(tunnel, *room)).unwrap_or_default(),
            destination: fixed::<MAX_DESTINATION>(&destination.to_string()),
            ..abi::Target::default()
        },
        Target::Stream(ring) => abi::Target {
            flags: TARGET_STREAM | flag(ring.is_some(), TARGET_UP),
            ring: ring.map_or(0, |RingId(id)| id),
            name,
            ..abi::Target::default()
        },
    }
}

fn encode_tunnel(tunnel: &Tunnel, room: Option<u32>) -> abi::Tunnel {
    let bytes = match tunnel.remote {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(v6) => v6.octets(),
    };
    let (is_v6, is_udp) = (tunnel.remote.is_ipv6(), tunnel.kind.usual_port().is_some());
    // The inner frame has its own checksums, so the outer packet has one only where UDP over IPv6 requires it.
    let flags = flag(is_v6, TUNNEL_IPV6)
        | flag(is_v6 && is_udp, TUNNEL_CHECKSUM)
        | flag(tunnel.identity, TUNNEL_IDENTITY)
        | flag(is_udp, TUNNEL_UDP)
        | flag(tunnel.kind == Kind::Erspan, TUNNEL_ERSPAN);
    let oversize = Oversize::ALL.iter().position(|of| *of == tunnel.oversize).unwrap_or_default();
    abi::Tunnel {
        remote: transmute!(bytes),
        room: room.unwrap_or(0),
        headers: tunnel.headers(),
        oversize: oversize as u32,
        flags,
    }
}

/// Returns the ids by which the programs recognise packets of the targets' tunnels.
pub(super) fn encode_tunnels<'a>(targets: impl Iterator<Item = &'a Target>) -> Tunnels {
    let ours = targets.filter_map(|target| target.device()?.destination.tunnel());
    let ours: BTreeSet<_> = ours.map(|tunnel| (way(tunnel), tunnel.keys)).collect();
    let mut tunnels = Tunnels::default();
    for (known, (way, Keys { first, last })) in tunnels.known.iter_mut().zip(ours) {
        *known = TunnelId { way, first, last };
        tunnels.count += 1;
    }
    tunnels
}

fn way(tunnel: &Tunnel) -> u32 {
    match tunnel.kind {
        Kind::Vxlan | Kind::Geneve => u32::from(tunnel.port),
        Kind::Gre => tunnel::GRE,
        Kind::Erspan => tunnel::ERSPAN,
    }
}

/// Returns the target of an entry, with the ceiling from the map of ceilings; `None` if the place is free.
pub(super) fn decode_target(wire: &abi::Target, ceiling: Limits) -> Option<(TargetName, Target)> {
    let name = Name::of_written(&text(&wire.name))?;
    if wire.flags & TARGET_STREAM != 0 {
        return Some((TargetName(name), Target::Stream((wire.ring != 0).then_some(RingId(wire.ring)))));
    }
    let device = text(&wire.device);
    let target = DeviceTarget {
        destination: match text(&wire.destination).parse() {
            // A later agent may know more kinds, and a mirror interface can have the name `stream`.
            Err(_) | Ok(Destination::Stream) => Destination::Device(device.clone()),
            Ok(destination) => destination,
        },
        device,
        ifindex: (wire.ifindex != 0).then_some(IfIndex(wire.ifindex)),
        up: wire.flags & TARGET_UP != 0,
        queueless: wire.flags & TARGET_QUEUELESS != 0,
        cuts: wire.flags & TARGET_CUTS != 0,
        guarded: wire.flags & TARGET_GUARDED != 0,
        collector: (wire.collector != [0; 6]).then_some(wire.collector),
        bridge: (wire.bridge != 0).then_some(IfIndex(wire.bridge)),
        room: (wire.tunnel.room != 0).then_some(wire.tunnel.room),
        ceiling: if wire.flags & TARGET_METERED != 0 { ceiling } else { Limits::default() },
        when_read: wire.flags & TARGET_WHEN_READ != 0,
        other_end: (wire.other_end != 0).then_some(IfIndex(wire.other_end)),
    };
    Some((TargetName(name), Target::Device(target)))
}

/// Returns a text padded with zeros. Texts are limited to these sizes at their sources; a longer text would be
/// truncated.
fn fixed<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = text.floor_char_boundary(N);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

/// Returns the text before the zeros.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeMap;

    use mirror_common::limit::Meter;
    use proptest::{option, prelude::*, sample};

    use super::*;
    use crate::{
        model::{PodSide, TapHead},
        settings::parse_filter,
    };

    fn settings() -> impl Strategy<Value = Settings> {
        let some = || option::of(1..u64::MAX >> 16);
        let filter = option::of(sample::select(vec!["tcp", "udp port 53"]));
        let rate = option::of((some(), 1..u64::MAX >> 17, 1..60_000u64));
        (
            filter,
            option::of(1..u32::MAX),
            any::<u32>(),
            rate,
            option::of(64..16_000u32),
            (some(), some(), some()),
        )
            .prop_map(|(filter, sample, seed, rate, snaplen, (ms, packets, bytes))| Settings {
                filter: filter.map(|text| parse_filter(text).unwrap()),
                sample: sample.map(Share),
                seed,
                rate: rate.map(|(packets, bits, ms)| Rate {
                    packets,
                    bits: Some(bits),
                    burst: Duration::from_millis(ms),
                }),
                snaplen,
                budget: Budget { duration: ms.map(Duration::from_millis), packets, bytes },
            })
    }

    fn session() -> impl Strategy<Value = Session> {
        let directions = sample::select(Directions::ALL.to_vec());
        let (target, origin) = ("[a-z]{1,63}", sample::select(Origin::ALL.to_vec()));
        let all = (directions, settings(), target, origin, any::<u32>());
        all.prop_map(|(directions, settings, target, origin, asked)| Session {
            directions,
            settings,
            target: TargetName(target.parse().unwrap()),
            origin,
            asked,
            key: None,
        })
    }

    /// Decodes a session with the description that an agent writes for it, and with the limits of another one.
    fn decoded(
        wire: &abi::Session,
        (mirror, session): (&MirrorId, &Session),
        limits: &Session,
        filter_hash: u64,
        target: &TargetName,
    ) -> Option<(MirrorId, Placed)> {
        let limits = budget::limits(limits, None, &Meter::default(), 7);
        decode_session(wire, &encode_info(mirror, session), &limits, filter_hash, target)
    }

    proptest! {
        /// Decoding uses the entries that the programs use: another target at the session's place, another program as
        /// its filter, other limits. A session whose limits do not match its description is not decoded.
        #[test]
        fn what_the_programs_use_is_read_back(first in session(), second in session(), hash: u64) {
            let mirror = MirrorId::default();
            let filter = first.settings.filter.as_ref().map(|_| 3);
            let placed = Placed { session: first.clone(), id: 5, settings: 5, serial: 1, target: 2, filter, mark: 0 };
            let wire = encode_session(&placed, 0, false);
            let read = |limits, hash, target| {
                decoded(&wire, (&mirror, &first), limits, hash, target).map(|(_, placed)| placed.session)
            };
            let own = first.settings.filter.as_ref().map_or(0, |filter| filter.hash);
            prop_assert_eq!(read(&first, own, &first.target), Some(first.clone()));
            let elsewhere = read(&first, own, &second.target);
            prop_assert_eq!(elsewhere, Some(Session { target: second.target.clone(), ..first.clone() }));
            let filtered = read(&first, hash, &first.target).unwrap().settings.filter;
            prop_assert_eq!(filtered.map(|filter| filter.hash), first.settings.filter.as_ref().map(|_| hash));
            let kinds = |of: &Session| {
                let Budget { duration, packets, bytes } = of.settings.budget;
                let rate = of.settings.rate.map(|rate| rate.limits());
                (rate.unwrap_or_default(), duration.is_some(), packets.is_some(), bytes.is_some())
            };
            let limited = read(&second, own, &first.target);
            prop_assert_eq!(limited.is_some(), kinds(&first) == kinds(&second));
        }

        /// Decoding an encoded owner gives the same owner.
        #[test]
        fn owners_survive_the_map(
            uid in "[a-f0-9-]{1,64}", namespace in "[a-z]{1,63}", name in "[a-z.]{1,253}",
            nic in "\\PC{0,5}", network in option::of("[a-z]{1,63}/[a-z.]{1,253}"), device in "\\PC{0,3}",
            dev: u64, ino: u64, has_pod: bool,
        ) {
            let pod = has_pod.then_some(PodId { uid, namespace, name });
            let owner = Owner { pod, netns: NetnsId { dev, ino }, nic, network, device };
            prop_assume!(owner.nic.len() <= 16 && owner.device.len() <= 16);
            prop_assume!(!owner.nic.contains('\0') && !owner.device.contains('\0'));
            let bytes: [u8; size_of::<TapOwner>()] = transmute!(encode_owner(&owner));
            prop_assert_eq!(decode_owner(&transmute!(bytes)), owner);
        }

        #[test]
        fn targets_survive_the_map(
            name in "[a-z]([a-z-]{0,61}[a-z])?", device in "[a-z0-9]{1,15}", ifindex in option::of(1..u32::MAX),
            flags: [bool; 5], is_stream: bool, collector: Option<[u8; 6]>, rate: u16,
            bridge in option::of(1..u32::MAX), other_end in option::of(1..u32::MAX),
        ) {
            let collector = collector.filter(|address| *address != [0; 6]);
            let [up, queueless, cuts, guarded, when_read] = flags;
            let stream = Target::Stream(ifindex.map(RingId));
            let destination: Destination = match collector {
                Some([0..128, ..]) => "vxlan:[fd00::5]:8472/vni=77/device=cni0/oversize=segment".parse().unwrap(),
                Some(_) => "pod:security/suricata-0/net1".parse().unwrap(),
                None => Destination::Device(device.clone()),
            };
            let ifindex = ifindex.map(IfIndex);
            let room = destination.is_tunnel().then_some(1464);
            let ceiling = Limits::of_rate(rate.into(), 0, Duration::from_millis(50));
            let target = DeviceTarget {
                destination, device, ifindex, up, queueless, cuts, guarded, collector, room, ceiling, when_read,
                bridge: bridge.map(IfIndex),
                other_end: other_end.map(IfIndex),
            };
            let target = if is_stream { stream } else { Target::Device(target) };
            let name = TargetName(name.parse().unwrap());
            let bytes: [u8; size_of::<abi::Target>()] = transmute!(encode_target(&name, &target));
            prop_assert_eq!(decode_target(&transmute!(bytes), ceiling), Some((name, target)));
        }

        /// Decoding an encoded session gives its settings and places, and the sessions ahead of it with the same form
        /// are known.
        #[test]
        fn sessions_survive_the_map(
            sessions in prop::collection::btree_map("[a-z]{1,8}", (session(), 0..4096u32, 0..2u32, 0..3u32), 1..9),
            is_limited: bool, bridge in option::of(1..u32::MAX), namespace_meter in option::of(0..4096u32),
        ) {
            let place = |(mirror, (session, id, target, snaplen)): (String, (Session, u32, u32, u32))| {
                let snaplen = [None, Some(64), Some(96)][snaplen as usize];
                let settings = Settings { snaplen, ..session.settings };
                let filter = settings.filter.as_ref().map(|_| id / 4);
                let session = Session { settings, ..session };
                let settings = id + 4096 * (id % 2);
                let placed = Placed { session, id, settings, serial: id * 3, target, filter, mark: 0x100 };
                (MirrorId(mirror.parse().unwrap()), placed)
            };
            let (owner, kind) = (Owner::default(), TapKind::HostVeth);
            let pod_side = Some(PodSide { nic: IfIndex(9), sees: true });
            let head = TapHead { owner, kind, is_limited, exit: None, bridge: bridge.map(IfIndex), pod_side };
            let sessions: BTreeMap<_, _> = sessions.into_iter().map(place).collect();
            let entry = Entry { head, pod_meter: 7, namespace_meter, sessions };
            let wire = encode_tap(&entry);
            prop_assert_eq!(wire.session_count as usize, entry.sessions.len());
            prop_assert_eq!(wire.namespace_meter.checked_sub(1), namespace_meter);
            // The entries of the two sides differ only in the kind, the flag `TAP_SEEN_INSIDE` and the index of the
            // other side.
            let inside = encode_pod_side(Device::on_node(IfIndex(5)), &entry);
            prop_assert_eq!((wire.kind(), wire.other_end), (TapKind::HostVeth, 9));
            prop_assert_eq!(wire.bridge, bridge.unwrap_or(0));
            prop_assert_eq!([wire, inside].map(|tap| tap.flags & TAP_SEEN_INSIDE), [TAP_SEEN_INSIDE, 0]);
            prop_assert_eq!((inside.kind(), inside.other_end), (TapKind::PodNic, 5));
            prop_assert_eq!(abi::Tap { kind: wire.kind, flags: wire.flags, other_end: 9, ..inside }, wire);
            let mut seen = Vec::<(u32, Option<u32>)>::new();
            for (number, (mirror, placed)) in entry.in_order().into_iter().enumerate() {
                let session = &wire.sessions[number];
                let hash = placed.session.settings.filter.as_ref().map_or(0, |filter| filter.hash);
                let of = &placed.session;
                let read = decoded(session, (mirror, of), of, hash, &of.target);
                prop_assert_eq!(read, Some((mirror.clone(), placed.clone())));
                let is_pod_metered = is_limited && placed.session.origin != Origin::Capture;
                prop_assert_eq!(session.flags & SESSION_POD_METERED != 0, is_pod_metered, "captures are free");
                let form = (placed.target, placed.session.settings.snaplen);
                for (ahead, other) in seen.iter().enumerate() {
                    prop_assert_eq!(session.alike & 1 << ahead != 0, *other == form);
                }
                prop_assert_eq!(session.alike >> number, 0);
                seen.push(form);
            }
        }
    }
}
