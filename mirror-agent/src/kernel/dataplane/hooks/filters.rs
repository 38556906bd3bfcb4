//! The filters at a device's clsact or ingress qdisc, read by netlink: aya attaches and detaches filters, but cannot
//! list them.
//!
//! Finds podmirror's filters, and the filters of other software ahead of them. Changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use futures_util::{Stream, TryStreamExt as _};
use mirror_common::verdict::Hook;
use mirror_core::hidden::Ahead;
use netlink_packet_core::Nla as _;
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionOption, TcAttribute, TcFilterBpfOption, TcFilterFlowerOption,
    TcFilterMatchAllOption, TcFilterU32Option, TcMessage, TcOption,
};
use rtnetlink::Handle;
use tokio::task::JoinHandle;

use super::HANDLE;
use crate::model::{IfIndex, Program};

/// A filter of podmirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) priority: u16,
    /// The id of its program.
    pub(super) program: u32,
}

/// The filters at one hook.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AtHook {
    /// podmirror's filters, in the order in which they run.
    pub(super) ours: Vec<Filter>,
    /// Filters of other software ahead of podmirror's first filter; empty if podmirror has none here.
    pub(super) ahead: Vec<Ahead>,
}

/// The filters of a network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AllFilters {
    /// The hooks with a filter of podmirror.
    pub(super) hooks: BTreeMap<(IfIndex, Program), AtHook>,
    /// Devices with an ingress qdisc, which have no egress hook. `None`: not all qdiscs were read.
    pub(super) ingress_only: Option<BTreeSet<IfIndex>>,
    /// Devices whose filters could not be read, and the error.
    pub(super) unread: BTreeMap<IfIndex, String>,
}

/// The largest number of filters of a hook, and of qdiscs of a namespace, that are read inside a pod: root there can
/// create any number. podmirror's filters are among the first, unless the pod has put this many ahead of them.
const MOST_INSIDE: usize = 1000;

/// The qdiscs that have tc hooks.
const CLSACT: &str = "clsact";
const INGRESS: &str = "ingress";
/// The qdiscs that queue no packets; a device that is down has `noop`.
const NO_QUEUES: [&str; 4] = [CLSACT, INGRESS, "noqueue", "noop"];

/// A connection to rtnetlink that reads filters.
pub(super) struct Filters {
    handle: Handle,
    task: JoinHandle<()>,
    /// The largest number of filters of a hook, and of qdiscs, to read.
    most: usize,
}

/// The part of a list that was read, and whether the list is longer.
type Read = (Vec<TcMessage>, bool);

impl Drop for Filters {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Filters {
    /// Connects. Must be called within the runtime.
    pub(super) fn connect() -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("cannot open a netlink socket")?;
        Ok(Self { handle, task: tokio::spawn(connection), most: usize::MAX })
    }

    /// Uses a connection in a pod's namespace. It ends with this value, so that it does not keep the namespace alive.
    pub(super) fn inside(connection: impl Future<Output = ()> + Send + 'static, handle: Handle) -> Self {
        Self { handle, task: tokio::spawn(connection), most: MOST_INSIDE }
    }

    /// Returns the filters at the hook of one of podmirror's programs.
    pub(super) async fn of(&self, ifindex: IfIndex, program: Program) -> anyhow::Result<AtHook> {
        Ok(at_hook(&self.at(ifindex, program.hook()).await?.0, program))
    }

    /// Returns the filters and queues of other software that packets from a device pass.
    pub(super) async fn of_others(&self, ifindex: IfIndex) -> anyhow::Result<Vec<Ahead>> {
        let (filters, _) = self.at(ifindex, Hook::Egress).await?;
        let (qdiscs, is_cut) = self.all_qdiscs().await?;
        let is_queue = |(at, kind): &(IfIndex, String)| *at == ifindex && !NO_QUEUES.contains(&&**kind);
        let unread = is_cut.then(|| format!("one of more than {}", self.most));
        let queues = qdiscs.into_iter().filter(is_queue).map(|(_, kind)| kind).chain(unread);
        let queues = queues.map(|kind| Ahead::Queue { kind });
        Ok(filters.iter().filter_map(of_others).chain(queues).collect())
    }

    /// Returns podmirror's filters at the hook of one of its programs. Reads the whole list, however long it is.
    pub(super) async fn ours(&self, ifindex: IfIndex, program: Program) -> anyhow::Result<Vec<Filter>> {
        let mut found = Vec::new();
        let listed = self.list(ifindex, program.hook())?.try_for_each(|message| {
            found.extend(ours(&message, program));
            std::future::ready(Ok(()))
        });
        is_there(listed.await, ifindex)?;
        Ok(found)
    }

    /// Returns the filters at all hooks of the namespace. A device that cannot be read does not fail the others.
    pub(super) async fn all(&self) -> anyhow::Result<AllFilters> {
        self.read(self.qdiscs().await?.0).await
    }

    /// Returns the filters at the hooks of these devices.
    pub(super) async fn of_devices(&self, devices: &BTreeSet<IfIndex>) -> anyhow::Result<AllFilters> {
        let (mut qdiscs, is_cut) = self.qdiscs().await?;
        if is_cut {
            let why = format!("there are more than {} qdiscs", self.most);
            let unread = devices.iter().map(|device| (*device, why.clone())).collect();
            return Ok(AllFilters { unread, ..AllFilters::default() });
        }
        qdiscs.retain(|ifindex, _| devices.contains(ifindex));
        self.read(qdiscs).await
    }

    async fn read(&self, qdiscs: BTreeMap<IfIndex, bool>) -> anyhow::Result<AllFilters> {
        let ingress_only = qdiscs.iter().filter(|(_, is_clsact)| !**is_clsact).map(|(at, _)| *at).collect();
        let mut all = AllFilters { ingress_only: Some(ingress_only), ..AllFilters::default() };
        for (ifindex, is_clsact) in qdiscs {
            for hook in Hook::ALL {
                // An ingress qdisc lists the filters of its ingress hook for every parent.
                if hook == Hook::Egress && !is_clsact {
                    continue;
                }
                let (messages, is_cut) = match self.at(ifindex, hook).await {
                    Ok(read) => read,
                    Err(error) => {
                        all.unread.insert(ifindex, format!("{error:#}"));
                        continue;
                    }
                };
                let mut is_found = false;
                for program in Program::ALL.into_iter().filter(|program| program.hook() == hook) {
                    let at_hook = at_hook(&messages, program);
                    if !at_hook.ours.is_empty() {
                        is_found = true;
                        all.hooks.insert((ifindex, program), at_hook);
                    }
                }
                if is_cut && !is_found {
                    let why = format!("there are more than {} tc filters at device {ifindex}", self.most);
                    all.unread.insert(ifindex, why);
                }
            }
        }
        Ok(all)
    }

    /// Returns the names of the programs of all filters of a device.
    pub(super) async fn names(&self, ifindex: IfIndex) -> anyhow::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for hook in Hook::ALL {
            let (messages, _) = self.at(ifindex, hook).await?;
            names.extend(messages.iter().flat_map(options).filter_map(|option| match option {
                TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
                _ => None,
            }));
        }
        Ok(names)
    }

    /// Returns the filters at one hook, in the order in which they run.
    async fn at(&self, ifindex: IfIndex, hook: Hook) -> anyhow::Result<Read> {
        is_there(self.first(self.list(ifindex, hook)?).await, ifindex)
    }

    fn list(
        &self,
        ifindex: IfIndex,
        hook: Hook,
    ) -> anyhow::Result<impl Stream<Item = Result<TcMessage, rtnetlink::Error>> + use<>> {
        let index = i32::try_from(ifindex.0).context("ifindex out of range")?;
        let request = self.handle.traffic_filter(index).get();
        let request = match hook {
            Hook::Ingress => request.ingress(),
            Hook::Egress => request.egress(),
        };
        Ok(request.execute())
    }

    /// Returns the first `most` messages of a list.
    async fn first(
        &self,
        list: impl Stream<Item = Result<TcMessage, rtnetlink::Error>>,
    ) -> Result<Read, rtnetlink::Error> {
        let mut list = std::pin::pin!(list);
        let mut messages = Vec::new();
        while let Some(message) = list.try_next().await? {
            if messages.len() == self.most {
                return Ok((messages, true));
            }
            messages.push(message);
        }
        Ok((messages, false))
    }

    /// Whether the device has an ingress qdisc, and so no egress hook.
    pub(super) async fn is_ingress_only(&self, ifindex: IfIndex) -> anyhow::Result<bool> {
        Ok(self.qdiscs().await?.0.get(&ifindex) == Some(&false))
    }

    /// Returns the devices with a clsact (`true`) or ingress (`false`) qdisc, and whether the list is cut.
    async fn qdiscs(&self) -> anyhow::Result<(BTreeMap<IfIndex, bool>, bool)> {
        let of_filters = |(ifindex, kind): (IfIndex, String)| match &*kind {
            CLSACT => Some((ifindex, true)),
            INGRESS => Some((ifindex, false)),
            _ => None,
        };
        let (qdiscs, is_cut) = self.all_qdiscs().await?;
        Ok((qdiscs.into_iter().filter_map(of_filters).collect(), is_cut))
    }

    /// Returns the kinds of all qdiscs, with their devices, and whether the list is cut.
    async fn all_qdiscs(&self) -> anyhow::Result<(Vec<(IfIndex, String)>, bool)> {
        let qdiscs = self.first(self.handle.qdisc().get().execute()).await;
        let (messages, is_cut) = qdiscs.context("cannot list the qdiscs")?;
        let found = messages.iter().filter_map(|qdisc| {
            Some((IfIndex(qdisc.header.index.try_into().ok()?), kind(qdisc)?.to_owned()))
        });
        Ok((found.collect(), is_cut))
    }
}

/// Treats a missing device or qdisc as an empty list.
fn is_there<T: Default>(listed: Result<T, rtnetlink::Error>, ifindex: IfIndex) -> anyhow::Result<T> {
    match listed {
        Err(rtnetlink::Error::NetlinkError(error))
            if matches!(error.raw_code().abs(), libc::ENODEV | libc::EINVAL | libc::ENOENT) =>
        {
            Ok(T::default())
        }
        listed => listed.with_context(|| format!("cannot list the tc filters of device {ifindex}")),
    }
}

/// Returns the filters in this list that matter to the program at their hook. The kernel lists filters in the order in
/// which they run.
pub(super) fn at_hook(messages: &[TcMessage], program: Program) -> AtHook {
    let mut at_hook = AtHook::default();
    let mut ahead = Vec::new();
    for message in messages {
        match ours(message, program) {
            Some(filter) => {
                if at_hook.ours.is_empty() {
                    at_hook.ahead = std::mem::take(&mut ahead);
                }
                at_hook.ours.push(filter);
            }
            None => ahead.extend(of_others(message)),
        }
    }
    at_hook
}

/// Returns the filter if it is podmirror's: a direct-action program of this name with podmirror's handle.
fn ours(message: &TcMessage, program: Program) -> Option<Filter> {
    if u32::from(message.header.handle) != u32::from(HANDLE) {
        return None;
    }
    let (mut named, mut id) = (false, None);
    for option in options(message) {
        match option {
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => named = name == program.name(),
            TcOption::Bpf(TcFilterBpfOption::ProgId(number)) => id = Some(*number),
            _ => {}
        }
    }
    id.filter(|_| named).map(|program| Filter { priority: priority(message), program })
}

/// `ETH_P_ALL`: a filter for every protocol.
const ALL_PROTOCOLS: u16 = 3;
/// `TCA_CLS_FLAGS_SKIP_SW`: a filter that runs in the device's hardware only.
const SKIP_SW: u32 = 2;

/// Returns the filter of other software that packets pass.
fn of_others(message: &TcMessage) -> Option<Ahead> {
    let handle = u32::from(message.header.handle);
    let chain = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Chain(chain) => Some(*chain),
        _ => None,
    });
    // Skips the head of a list of filters, and filters of other chains: packets reach these only from a filter of this
    // chain.
    if handle == 0 || chain.is_some_and(|chain| chain != 0) {
        return None;
    }
    let kind = kind(message)?;
    let mut all = kind == "matchall";
    let mut goes_on = false;
    let mut program = None;
    let mut name = String::new();
    for option in options(message) {
        match option {
            // A table of u32 filters. The filters in it are listed separately.
            TcOption::U32(TcFilterU32Option::Divisor(_)) => return None,
            TcOption::U32(TcFilterU32Option::Selector(selector)) => {
                all = selector.keys.iter().all(|key| key.mask == 0);
            }
            TcOption::U32(TcFilterU32Option::Action(actions))
            | TcOption::MatchAll(TcFilterMatchAllOption::Action(actions))
            | TcOption::Flower(TcFilterFlowerOption::Actions(actions)) => goes_on = continues(actions),
            TcOption::U32(TcFilterU32Option::Flags(flags)) if flags.bits() & SKIP_SW != 0 => return None,
            TcOption::MatchAll(TcFilterMatchAllOption::Flags(flags))
            | TcOption::Flower(TcFilterFlowerOption::Flags(flags))
                if flags & SKIP_SW != 0 =>
            {
                return None;
            }
            TcOption::Bpf(TcFilterBpfOption::ProgName(text)) => name.clone_from(text),
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => program = Some(*id),
            _ => {}
        }
    }
    let protocol = u16::from_be(message.header.info as u16);
    let is_for_all = all && protocol == ALL_PROTOCOLS;
    Some(match program {
        Some(id) => Ahead::Program { name, id },
        None => Ahead::Filter { kind: kind.to_owned(), priority: priority(message), is_for_all, goes_on },
    })
}

/// Whether the last action of a filter is `continue` (`TC_ACT_UNSPEC` of a gact action): then the next filter runs.
fn continues(actions: &[TcAction]) -> bool {
    const PARAMETERS: u16 = 2;
    const UNSPEC: i32 = -1;
    let Some(last) = actions.last() else { return false };
    let is_gact =
        |attribute: &TcActionAttribute| matches!(attribute, TcActionAttribute::Kind(kind) if kind == "gact");
    if !last.attributes.iter().any(is_gact) {
        return false;
    }
    last.attributes.iter().any(|attribute| {
        let TcActionAttribute::Options(options) = attribute else { return false };
        options.iter().any(|option| {
            let TcActionOption::Other(parameters) = option else { return false };
            let mut bytes = vec![0; parameters.value_len()];
            parameters.emit_value(&mut bytes);
            // struct tc_gact: index, capab, action (include/uapi/linux/pkt_cls.h, tc_gen).
            let action = bytes.get(8..12).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
            parameters.kind() == PARAMETERS && action == Some(UNSPEC)
        })
    })
}

fn kind(message: &TcMessage) -> Option<&str> {
    message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Kind(kind) => Some(kind.as_str()),
        _ => None,
    })
}

fn options(message: &TcMessage) -> impl Iterator<Item = &TcOption> {
    let options = message.attributes.iter().filter_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    });
    options.flatten()
}

/// The upper half of `tcm_info`; the protocol is in the lower (include/uapi/linux/rtnetlink.h).
fn priority(message: &TcMessage) -> u16 {
    (message.header.info >> 16) as u16
}
