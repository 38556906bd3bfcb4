//! The metrics of the maps: packets, targets, and the use of tables and rings.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::{
    abi::Counter,
    verdict::{Direction, Misfit},
};
use mirror_core::destination::Destination;
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use super::{
    gauge, register,
    sums::{Part, Scrape},
};
use crate::{
    kernel::dataplane::readout::{Readout, RingFill, SessionReadout, TapReadout},
    model::{Capacity, Device, TargetName},
    report::Fill,
    settings::CaptureFilter,
};

/// Labels of the packet counters.
const PACKET_LABELS: [&str; 7] = ["namespace", "pod", "nic", "mirror", "target", "direction", "result"];

/// Labels of the counters of copies: they have no result.
fn copy_labels() -> &'static [&'static str] {
    PACKET_LABELS.split_last().map_or(&[], |(_, labels)| labels)
}

/// The counters of copies whose length is not as requested: packets, and the bytes by which they differ.
fn misfit_counters(misfit: Misfit) -> prometheus::Result<[IntCounterVec; 2]> {
    let (copies, bytes) = match misfit {
        Misfit::Cut => (
            "Truncated copies: they contain less of the packet than requested.",
            "Bytes that are missing in truncated copies.",
        ),
        Misfit::Long => {
            ("Copies that are longer than the snap length.", "Bytes of copies beyond the snap length.")
        }
    };
    let counters = |unit, help| {
        let name = format!("podmirror_{}_{unit}_total", misfit.name());
        IntCounterVec::new(Opts::new(name, help), copy_labels())
    };
    Ok([counters("packets", copies)?, counters("bytes", bytes)?])
}

/// The UIDs of the pods that have a session, captures left out.
pub(super) fn mirrored(taps: &[TapReadout]) -> BTreeSet<&str> {
    let has_mirror = |tap: &&TapReadout| tap.sessions.iter().any(|session| !session.mirror.0.is_capture());
    taps.iter().filter(has_mirror).filter_map(|tap| Some(tap.owner.pod.as_ref()?.uid.as_str())).collect()
}

/// The directions that mirrors copy at each tap, as bits. Captures are left out.
pub(super) fn copied_directions(taps: &[TapReadout]) -> BTreeMap<Device, u32> {
    let directions = taps.iter().map(|tap| {
        let mirrors = tap.sessions.iter().filter(|session| !session.mirror.0.is_capture());
        (tap.device, mirrors.fold(0, |bits, mirror| bits | mirror.session.directions.bits()))
    });
    directions.collect()
}

/// The type of a target: the name of its field in a MirrorTarget.
const fn type_of(destination: &Destination) -> &'static str {
    match destination {
        Destination::Device(_) => "device",
        Destination::Pod(_) => "pod",
        Destination::Tunnel(tunnel) => tunnel.kind.name(),
        Destination::Stream => "stream",
    }
}

/// Registers the values from the maps. `drops`: the packets dropped by the targets' devices, by device name.
pub(super) fn register_state(
    registry: &Registry,
    readout: &Readout,
    drops: &BTreeMap<String, u64>,
    scrape: &mut Scrape,
) -> prometheus::Result<()> {
    let Readout { targets, taps, filters, capacity } = readout;
    let packets = IntCounterVec::new(
        Opts::new("podmirror_packets_total", "Packets that a session has seen, by result."),
        &PACKET_LABELS,
    )?;
    let bytes = IntCounterVec::new(
        Opts::new(
            "podmirror_bytes_total",
            "Bytes of the packets that a session has seen, with link-layer headers and before copies are cut, by result.",
        ),
        &PACKET_LABELS,
    )?;
    let copied = IntCounterVec::new(
        Opts::new(
            "podmirror_copied_bytes_total",
            "Bytes of the copies that the target has accepted, after they were cut, without the headers of a tunnel.",
        ),
        copy_labels(),
    )?;
    let [cut, long] = Misfit::ALL.map(misfit_counters);
    let misfits = BTreeMap::from([(Misfit::Cut, cut?), (Misfit::Long, long?)]);
    let mut ended = 0;
    let mut networks = BTreeMap::new();
    for TapReadout { owner, sessions, .. } in taps {
        let (namespace, pod) = owner.pod.as_ref().map_or(("", ""), |pod| (&pod.namespace, &pod.name));
        // A capture would be a new series each time. The program that reads it shows its counters.
        let mut mirrors = sessions.iter().filter(|session| !session.mirror.0.is_capture()).peekable();
        if let (Some(network), Some(_)) = (&owner.network, mirrors.peek()) {
            networks.insert([namespace, pod, &owner.nic], network);
        }
        for SessionReadout {
            mirror,
            session,
            serial,
            ended: budget,
            counts,
            copied_bytes,
            misfits: of,
            ..
        } in mirrors
        {
            ended += usize::from(budget.is_some());
            let (mirror, target) = (mirror.0.as_str(), session.target.0.as_str());
            for count in counts {
                // A pod and its successor of the same name may both exist for a moment: they share one series, whose
                // value is their sum.
                let (direction, verdict) = (count.direction.name(), count.verdict.name());
                let labels = [namespace, pod, &owner.nic, mirror, target, direction, verdict];
                let part = Part::Session(*serial, count.direction, Some(count.verdict));
                scrape.add(&packets, Some(&labels), part, count.packets);
                scrape.add(&bytes, Some(&labels), part, count.bytes);
            }
            for (direction, bytes) in Direction::ALL.into_iter().zip(copied_bytes) {
                if *bytes > 0 {
                    let labels = [namespace, pod, &owner.nic, mirror, target, direction.name()];
                    scrape.add(&copied, Some(&labels), Part::Session(*serial, direction, None), *bytes);
                }
            }
            for (direction, misfit, Counter { packets, bytes }) in of {
                let labels = [namespace, pod, &owner.nic, mirror, target, direction.name()];
                for (counters, by) in misfits.get(misfit).into_iter().flatten().zip([packets, bytes]) {
                    scrape.add(counters, Some(&labels), Part::Session(*serial, *direction, None), *by);
                }
            }
        }
    }
    register(registry, &packets)?;
    register(registry, &bytes)?;
    register(registry, &copied)?;
    misfits.values().flatten().try_for_each(|counters| register(registry, counters))?;
    // Most NICs have no network annotation, so it is not a label of the counters.
    let info = IntGaugeVec::new(
        Opts::new(
            "podmirror_nic_info",
            "Always 1; the label is the network of a NIC, as the pod's annotation says.",
        ),
        &["namespace", "pod", "nic", "network"],
    )?;
    for ([namespace, pod, nic], network) in networks {
        info.with_label_values(&[namespace, pod, nic, network]).set(1);
    }
    register(registry, &info)?;
    let up = IntGaugeVec::new(
        Opts::new("podmirror_target_up", "1 if a device, pod or tunnel accepts copies, else 0."),
        &["target", "destination", "type"],
    )?;
    let readers = IntGaugeVec::new(
        Opts::new("podmirror_stream_readers", "Programs that read a stream: 0 or 1."),
        &["target"],
    )?;
    let dropped = IntCounterVec::new(
        Opts::new(
            "podmirror_target_dropped_frames_total",
            "Frames that the device of a target has accepted and dropped, copies and others.",
        ),
        &["target", "destination"],
    )?;
    for (name, target) in targets.iter().filter(|(name, _)| !name.0.is_capture()) {
        let (name, destination) = (name.0.as_str(), target.destination().to_string());
        let Some(device) = target.device() else {
            readers.with_label_values(&[name]).set(target.is_up().into());
            continue;
        };
        let labels = [name, &destination, type_of(target.destination())];
        up.with_label_values(&labels).set(target.is_up().into());
        if let Some(count) = drops.get(&device.device) {
            dropped.with_label_values(&labels[..2]).inc_by(*count);
        }
    }
    register(registry, &up)?;
    register(registry, &readers)?;
    register(registry, &dropped)?;
    let sessions = taps.iter().map(|tap| tap.sessions.len()).sum();
    let inside = taps.iter().filter(|tap| tap.pod_side.is_some() || !tap.device.is_on_node()).count();
    let in_use = taps.iter().flat_map(|tap| &tap.sessions);
    let in_use: BTreeSet<_> = in_use.filter_map(|of| of.session.settings.filter.as_ref()).collect();
    let instructions = in_use.into_iter().map(CaptureFilter::length).sum();
    let Capacity { taps, sessions: most_sessions, filters: most_filters, instructions: most_instructions } =
        *capacity;
    for (name, help, value) in [
        ("podmirror_taps_max", "Taps that this node can have.", taps),
        ("podmirror_pod_side_taps", "Taps with a hook inside the pod, captures included.", inside),
        ("podmirror_sessions", "Sessions of all taps, captures included.", sessions),
        ("podmirror_sessions_max", "Sessions that this node can have.", most_sessions),
        ("podmirror_filters", "Different filters of all sessions.", *filters),
        ("podmirror_filters_max", "Different filters that this node can have.", most_filters),
        ("podmirror_filter_instructions", "Instructions of these filters together.", instructions),
        (
            "podmirror_filter_instructions_max",
            "Instructions that the filters of this node can have together.",
            most_instructions,
        ),
    ] {
        gauge(registry, name, help, value)?;
    }
    gauge(
        registry,
        "podmirror_ended_sessions",
        "Sessions whose budget of time, packets or bytes is used up.",
        ended,
    )
}

/// Registers the bytes in use and the size of the rings of streams. Those of captures would be new series each time.
pub(super) fn register_rings(registry: &Registry, rings: &[RingFill]) -> prometheus::Result<()> {
    let used = by_target(
        "podmirror_stream_ring_used_bytes",
        "Bytes of copies in a stream's ring buffer that its reader has not read.",
    )?;
    let sizes = by_target("podmirror_stream_ring_size_bytes", "Size of a stream's ring buffer.")?;
    for RingFill { target, used: in_use, size } in rings.iter().filter(|ring| !ring.target.0.is_capture()) {
        let labels = [target.0.as_str()];
        used.with_label_values(&labels).set(i64::try_from(*in_use).unwrap_or(i64::MAX));
        sizes.with_label_values(&labels).set((*size).into());
    }
    register(registry, &used)?;
    register(registry, &sizes)
}

/// Registers the use of the recorders' memory.
pub(super) fn register_recorders(
    registry: &Registry,
    fills: &BTreeMap<TargetName, Fill>,
) -> prometheus::Result<()> {
    let used =
        by_target("podmirror_recorder_used_bytes", "Bytes of the packets in the memory of a recorder.")?;
    let sizes = by_target("podmirror_recorder_size_bytes", "Maximum of podmirror_recorder_used_bytes.")?;
    let oldest = by_target(
        "podmirror_recorder_oldest_timestamp_seconds",
        "Unix time of the oldest packet that the memory of a recorder can still have.",
    )?;
    for (target, Fill { used: bytes, size, oldest_ns }) in fills {
        for (gauge, value) in [(&used, *bytes), (&sizes, *size), (&oldest, oldest_ns / 1_000_000_000)] {
            gauge.with_label_values(&[target.0.as_str()]).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }
    [used, sizes, oldest].iter().try_for_each(|gauge| register(registry, gauge))
}

/// Creates a gauge for each target.
fn by_target(name: &str, help: &str) -> prometheus::Result<IntGaugeVec> {
    IntGaugeVec::new(Opts::new(name, help), &["target"])
}
