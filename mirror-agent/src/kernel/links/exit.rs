//! Creates and deletes relay devices (`exit`) inside pods.
//!
//! `mirror_core::exit` decides when. `netlink` calls this module.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use anyhow::Context as _;
use mirror_core::exit::{IFINDEX, MTU, NAME, is_exit};
use rtnetlink::{Handle, LinkMacVlan, LinkUnspec, packet_route::link::MacVlanMode};

use super::{
    create::{finish, silent},
    list::{Named, one},
    socket::{connect, os_error, serve},
};
use crate::{
    kernel::netns::Namespaces,
    model::{IfIndex, NetnsId},
};

/// Creates the relay device of a pod over the relay hub. Deletes it again after a failure.
///
/// The device is created inside the pod, by one request to the node's namespace. It is never a device of the node,
/// where its index or name could be taken.
pub(super) async fn make(
    handle: &Handle,
    namespaces: &Namespaces,
    netns: NetnsId,
    hub: IfIndex,
) -> anyhow::Result<()> {
    let inside = namespaces.open(netns)?;
    let exit = LinkMacVlan::new(NAME, hub.0, MacVlanMode::Private).setns_by_fd(inside.as_fd().as_raw_fd());
    let mut exit = silent(exit, MTU).build();
    exit.header.index = IFINDEX.0;
    handle.link().add(exit).execute().await.map_err(os_error).with_context(|| {
        format!("cannot create {NAME}: the pod may have a device of this name, or the kernel no macvlan")
    })?;
    let finished =
        serve(inside.inside(connect).await?, async |handle| Ok(finish(handle, NAME, IFINDEX, MTU).await?))
            .await;
    if finished.is_err() {
        delete(namespaces, netns).await?;
    }
    finished.map(drop)
}

/// Deletes the relay device of a pod, if it has one. Does not delete another device with that name.
pub(super) async fn delete(namespaces: &Namespaces, netns: NetnsId) -> anyhow::Result<()> {
    let inside = match namespaces.open(netns) {
        // The pod no longer exists, and neither do its devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        inside => inside?,
    };
    let exit = inside.inside(|| one(&Named::Index(IFINDEX))).await?;
    let Some(exit) = exit.filter(is_exit) else { return Ok(()) };
    serve(inside.inside(connect).await?, async |handle| {
        let message = LinkUnspec::new_with_index(exit.ifindex.0).build();
        match handle.link().del_with_message(message).execute().await.map_err(os_error) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            deleted => Ok(deleted?),
        }
    })
    .await
}
