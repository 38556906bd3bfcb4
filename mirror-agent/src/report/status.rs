//! The status of this node: taps, sessions and counters, read from the pinned maps, and the notes of the running agent.
//!
//! Needs no running agent and changes nothing.

use std::{collections::BTreeMap, path::Path};

use anyhow::bail;
use mirror_common::abi::Counter;
use mirror_core::status::{
    AttachedStatus, CounterStatus, MisfitStatus, NodeStatus, PodSideStatus, SessionStatus, TapStatus,
    TargetStatus,
};
use tokio::time::Instant;

use crate::{
    kernel::{
        dataplane::{
            hooks::{Hooks, programs_of},
            pins::Pins,
            readout::{Count, MisfitCount, Reader, Readout, SessionReadout, TapReadout, drops},
        },
        links::{LinkTable as _, netlink::Netlink},
        netns::Namespaces,
    },
    mirror_iface::MirrorIface,
    model::{Device, Program},
    report::notes,
};

/// The status of this node, and the moment of its counters.
pub(crate) async fn of_node(bpffs: &Path) -> anyhow::Result<(NodeStatus, Instant)> {
    let pins = Pins::new(bpffs);
    if !pins.exist() {
        if let Some(other) = pins.other_versions()?.last() {
            bail!(
                "another version of the agent mirrors on this node: its maps are in {}; use the `status` of that version, \
                 or start this version, which replaces the mirror",
                other.maps().display()
            );
        }
        bail!(
            "no podmirror state in {}: start the agent with `mirror-agent run`, or set --bpffs",
            pins.maps().display()
        );
    }
    read(&pins).await
}

async fn read(pins: &Pins) -> anyhow::Result<(NodeStatus, Instant)> {
    let mut reader = Reader::open(pins)?;
    let attached = attached(pins, reader.devices()).await?;
    // After the hooks: the agent attaches last, so a hook is never shown next to sessions that are not written yet.
    let Readout { targets, taps: entries, .. } = reader.read()?;
    let at = Instant::now();
    // The pinned targets are those that the last agent wrote; the devices are read now.
    let devices = Netlink::new()?.snapshot(&[]).await?;
    let drops = drops()?;
    let targets = targets.into_iter().map(|(name, target)| {
        // The stream of a capture was not configured by the administrator.
        let is_capture = name.0.is_capture();
        let destination = if is_capture { String::new() } else { target.destination().to_string() };
        let name = name.to_string();
        let Some(device) = target.device() else {
            let (device, up) = (String::new(), target.is_up());
            return TargetStatus {
                name,
                destination,
                device,
                ifindex: None,
                up,
                stream: true,
                dropped: None,
                when_read: false,
            };
        };
        // Another device may have the name of a pod's device after that device was deleted.
        let known = device.ifindex;
        let mut now = MirrorIface::new(&device.device, None).target(&devices);
        now.ifindex =
            now.ifindex.filter(|ifindex| device.destination.pod().is_none() || Some(*ifindex) == known);
        // Only the agent knows the state of the path beyond the device of a pod or a tunnel.
        let goes_on = device.up || device.destination.device().is_some();
        let up = now.up && now.ifindex.is_some() && goes_on;
        let ifindex = now.ifindex.map(|ifindex| ifindex.0);
        let dropped = ifindex.and_then(|_| drops.get(&now.device)).copied();
        let when_read = device.when_read;
        TargetStatus { name, destination, device: now.device, ifindex, up, stream: false, dropped, when_read }
    });
    let side = |nic: Device, attached: &BTreeMap<Device, AttachedStatus>| PodSideStatus {
        ifindex: nic.ifindex.0,
        attached: attached.get(&nic).cloned().unwrap_or_default().ingress,
    };
    let taps = entries.into_iter().map(|TapReadout { device, pod_side, owner, sessions }| TapStatus {
        pod_side: pod_side.map(|nic| side(nic, &attached)),
        ifindex: device.ifindex.0,
        device: owner.device,
        inside: !device.is_on_node(),
        pod: owner.pod,
        nic: owner.nic,
        network: owner.network,
        attached: attached.get(&device).cloned().unwrap_or_default(),
        sessions: sessions.into_iter().map(session).collect(),
    });
    let taps = taps.collect();
    let agent = Pins::connect();
    let status = NodeStatus {
        version: env!("PODMIRROR_VERSION").to_owned(),
        agent_running: agent.is_some(),
        targets: targets.collect(),
        taps,
        notes: agent.and_then(notes::read),
    };
    Ok((status, at))
}

/// How podmirror's programs are attached to the hooks of the devices.
async fn attached(pins: &Pins, devices: Vec<Device>) -> anyhow::Result<BTreeMap<Device, AttachedStatus>> {
    let ours = programs_of(pins)?;
    let hooks = Hooks::new(pins.clone(), Namespaces::default())?;
    let mut attached = BTreeMap::<_, AttachedStatus>::new();
    for device in devices {
        let AttachedStatus { ingress, egress } = attached.entry(device).or_default();
        for (name, program) in [(ingress, Program::TapIngress), (egress, Program::TapEgress)] {
            // A pod can make its own hooks unreadable. The other taps are still shown.
            match hooks.attached(device, program).await.map(|attached| attached.method(&ours)) {
                Ok(Some(method)) => *name = Hooks::word(method, device, program).to_owned(),
                Ok(None) => {}
                Err(_) => *name = AttachedStatus::UNKNOWN.to_owned(),
            }
        }
    }
    Ok(attached)
}

fn session(readout: SessionReadout) -> SessionStatus {
    let SessionReadout { mirror, session, serial, ended, left, counts, copied_bytes: _, misfits } = readout;
    SessionStatus {
        mirror: mirror.to_string(),
        target: session.target.to_string(),
        serial,
        tunnel_key: session.key,
        origin: session.origin.name().to_owned(),
        direction: session.directions.name().to_owned(),
        settings: session.settings.texts(),
        ended: ended.map(|budget| budget.name().to_owned()),
        left: left.into(),
        counters: counts.into_iter().map(counter).collect(),
        misfits: misfits.into_iter().map(misfit).collect(),
    }
}

fn misfit((direction, misfit, Counter { packets, bytes }): MisfitCount) -> MisfitStatus {
    MisfitStatus { direction: direction.name().to_owned(), kind: misfit.name().to_owned(), packets, bytes }
}

fn counter(Count { direction, verdict, packets, bytes }: Count) -> CounterStatus {
    CounterStatus {
        direction: direction.name().to_owned(),
        result: verdict.name().to_owned(),
        packets,
        bytes,
    }
}
