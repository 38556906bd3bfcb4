//! `mirror-agent cleanup`: removes everything that podmirror installed on the node, and nothing else.

use tracing::info;

use crate::{
    cli::args::StateArgs,
    kernel::{
        dataplane::{
            hooks::{Hooks, end_other_versions},
            maps::Maps,
            pins::Pins,
        },
        links::{LinkTable, netlink::Netlink},
        netns::Namespaces,
    },
    mirror_iface::ours,
    model::LinkChange,
};

/// Removes everything, unless an agent is running.
pub async fn cleanup(args: StateArgs) -> anyhow::Result<()> {
    let pins = Pins::new(&args.bpffs);
    let _lock = pins.lock()?;
    remove_everything(&pins, &mut Netlink::new()?).await
}

/// Detaches every program of podmirror, deletes the mirror interface if podmirror created it, and removes the pins.
/// Continues after a failure and returns the first error; the pins stay then, so that a retry is possible. The caller
/// holds the lock.
pub async fn remove_everything(pins: &Pins, links: &mut impl LinkTable) -> anyhow::Result<()> {
    let mut errors = Vec::new();
    // Copying ends here, even if a later step fails. Unreadable maps are no reason to skip the other steps.
    if let Ok(mut maps) = Maps::open(pins) {
        for device in maps.devices().collect::<Vec<_>>() {
            errors.extend(maps.remove_tap(device).err());
        }
    }
    errors.extend(end_other_versions(pins, &Namespaces::default()).await.err());
    let (detached, failed) = Hooks::new(pins.clone(), Namespaces::default())?.detach_all().await?;
    errors.extend(failed);
    // Deleting the relay hub, which is one of these devices, also deletes the relay devices (`exit`) inside pods.
    let found = links.snapshot(&[]).await?;
    for link in ours(&found) {
        // Deleting one end of a veth pair deletes the other, too.
        match links.apply(&LinkChange::Delete(link.ifindex)).await {
            Ok(()) => info!(device = link.name, "deleted a device of podmirror"),
            Err(error) => errors.push(error),
        }
    }
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
    pins.remove()?;
    info!(hooks = detached, dir = %pins.root().display(), "detached everything and removed the pins");
    Ok(())
}
