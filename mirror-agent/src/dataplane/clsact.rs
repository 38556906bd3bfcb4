//! The filters at a device's clsact qdisc, read by netlink: aya attaches and detaches them, but cannot list them.
//!
//! Finds our own only. Changes nothing. Called by `hooks`.

use std::collections::BTreeSet;

use anyhow::Context as _;
use futures_util::TryStreamExt as _;
use mirror_common::verdict::Hook;
use netlink_packet_route::tc::{TcAttribute, TcFilterBpfOption, TcMessage, TcOption};
use rtnetlink::Handle;
use tokio::task::JoinHandle;

use super::hooks::HANDLE;
use crate::model::{IfIndex, Program};

/// A filter of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter {
    /// Its priority.
    pub priority: u16,
    /// Id of its program.
    pub program: u32,
}

/// A connection to rtnetlink.
pub struct Filters {
    handle: Handle,
    task: JoinHandle<()>,
}

impl Drop for Filters {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Filters {
    /// Connects. Must be called within the runtime.
    pub fn connect() -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("cannot open a netlink socket")?;
        Ok(Self { handle, task: tokio::spawn(connection) })
    }

    /// The filters of one of our programs: direct-action programs of our name, under our handle.
    pub async fn of(&self, ifindex: IfIndex, program: Program) -> anyhow::Result<Vec<Filter>> {
        let index = i32::try_from(ifindex.0).context("ifindex out of range")?;
        let request = self.handle.traffic_filter(index).get();
        let request = match program.hook() {
            Hook::Ingress => request.ingress(),
            Hook::Egress => request.egress(),
        };
        let messages: Vec<TcMessage> = match request.execute().try_collect().await {
            // No such device, or no qdisc there: no filters.
            Err(rtnetlink::Error::NetlinkError(error))
                if matches!(error.raw_code().abs(), libc::ENODEV | libc::EINVAL | libc::ENOENT) =>
            {
                Vec::new()
            }
            messages => {
                messages.with_context(|| format!("cannot list the tc filters of device {ifindex}"))?
            }
        };
        Ok(messages.iter().filter_map(|message| ours(message, program)).collect())
    }

    /// Whether the device's qdisc for classifiers is clsact, and not ingress.
    pub async fn has_clsact(&self, ifindex: IfIndex) -> anyhow::Result<bool> {
        let index = i32::try_from(ifindex.0).context("ifindex out of range")?;
        let qdiscs: Vec<TcMessage> =
            self.handle.qdisc().get().execute().try_collect().await.context("cannot list the qdiscs")?;
        let clsact = TcAttribute::Kind("clsact".to_owned());
        Ok(qdiscs.iter().any(|qdisc| qdisc.header.index == index && qdisc.attributes.contains(&clsact)))
    }

    /// Every device of the node.
    pub async fn devices(&self) -> anyhow::Result<BTreeSet<IfIndex>> {
        let links = self.handle.link().get().execute().map_ok(|link| IfIndex(link.header.index));
        links.try_collect().await.context("cannot list the network devices")
    }
}

fn ours(message: &TcMessage, program: Program) -> Option<Filter> {
    if u32::from(message.header.handle) != u32::from(HANDLE) {
        return None;
    }
    let options = message.attributes.iter().filter_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    let (mut named, mut id) = (false, None);
    for option in options.flatten() {
        match option {
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => named = name == program.name(),
            TcOption::Bpf(TcFilterBpfOption::ProgId(number)) => id = Some(*number),
            _ => {}
        }
    }
    // tcm_info: priority in the upper half, protocol in the lower (include/uapi/linux/rtnetlink.h).
    let priority = (message.header.info >> 16) as u16;
    id.filter(|_| named).map(|program| Filter { priority, program })
}
