//! The filters at a device's clsact qdisc, read by netlink: aya attaches and detaches them, but cannot list them.
//!
//! Finds our own only. Changes nothing. Called by `hooks`.

use std::collections::{BTreeMap, BTreeSet};

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

/// Filters of ours, by the hook that they are at; none of them is empty.
pub type AllFilters = BTreeMap<(IfIndex, Program), Vec<Filter>>;

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
        let messages = self.at(ifindex, program.hook()).await?;
        Ok(messages.iter().filter_map(|message| ours(message, program)).collect())
    }

    /// Those of all our programs, on every device of the node.
    pub async fn all(&self) -> anyhow::Result<AllFilters> {
        let mut all = AllFilters::new();
        for ifindex in self.devices().await? {
            for hook in [Hook::Ingress, Hook::Egress] {
                let messages = self.at(ifindex, hook).await?;
                for program in Program::ALL.into_iter().filter(|program| program.hook() == hook) {
                    for filter in messages.iter().filter_map(|message| ours(message, program)) {
                        all.entry((ifindex, program)).or_default().push(filter);
                    }
                }
            }
        }
        Ok(all)
    }

    /// Every filter at one hook.
    async fn at(&self, ifindex: IfIndex, hook: Hook) -> anyhow::Result<Vec<TcMessage>> {
        let index = i32::try_from(ifindex.0).context("ifindex out of range")?;
        let request = self.handle.traffic_filter(index).get();
        let request = match hook {
            Hook::Ingress => request.ingress(),
            Hook::Egress => request.egress(),
        };
        match request.execute().try_collect().await {
            // No such device, or no qdisc there: no filters.
            Err(rtnetlink::Error::NetlinkError(error))
                if matches!(error.raw_code().abs(), libc::ENODEV | libc::EINVAL | libc::ENOENT) =>
            {
                Ok(Vec::new())
            }
            messages => messages.with_context(|| format!("cannot list the tc filters of device {ifindex}")),
        }
    }

    /// Whether the device's qdisc for classifiers is clsact, and not ingress.
    pub async fn has_clsact(&self, ifindex: IfIndex) -> anyhow::Result<bool> {
        Ok(self.devices_with(&["clsact"]).await?.contains(&ifindex))
    }

    /// The devices that can have filters at our hooks.
    async fn devices(&self) -> anyhow::Result<BTreeSet<IfIndex>> {
        self.devices_with(&["clsact", "ingress"]).await
    }

    /// The devices with a qdisc of one of these kinds.
    async fn devices_with(&self, kinds: &[&str]) -> anyhow::Result<BTreeSet<IfIndex>> {
        let qdiscs: Vec<TcMessage> =
            self.handle.qdisc().get().execute().try_collect().await.context("cannot list the qdiscs")?;
        let is_one = |attribute: &TcAttribute| matches!(attribute, TcAttribute::Kind(kind) if kinds.contains(&kind.as_str()));
        let found = qdiscs.iter().filter(|qdisc| qdisc.attributes.iter().any(is_one));
        Ok(found.filter_map(|qdisc| Some(IfIndex(qdisc.header.index.try_into().ok()?))).collect())
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
