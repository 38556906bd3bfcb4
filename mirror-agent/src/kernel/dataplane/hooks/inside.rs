//! [`Inside`]: polls the hooks inside pods.
//!
//! The kernel lists the filters and the TCX chain of a device only in the device's network namespace, so a thread has
//! to enter the pod. It sends no event when a chain changes, and it announces a changed filter only to listeners in the
//! pod. So the agent polls: once a second, or less often if that would take more than 1 % of a CPU, or wait for more
//! than a quarter of the time. One poll reads one pod, so that events do not wait until all pods are read. A round uses
//! the last view of each pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    time::Duration,
};

use anyhow::Context as _;
use mirror_core::{exit, hidden::Ahead};
use tokio::time::{Instant, timeout};

use super::{
    EVERY,
    filters::{AllFilters, Filter, Filters},
    tcx::{self, InChain},
};
use crate::{
    kernel::{
        cpu::Work,
        netns::{Namespaces, Netns},
    },
    model::{Device, IfIndex, NetnsId, Program},
    util::pace::rest,
};

/// The hook of a relay device (`exit`) that the copies pass.
const EXIT: (IfIndex, Program) = (exit::IFINDEX, Program::TapEgress);
/// The time limit for the view of one pod: root there can keep the kernel busy.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time limit of a search for podmirror's filters among all filters of a hook. Only their removal reads the whole
/// list.
const SEARCH: Duration = Duration::from_secs(10);

/// The hooks inside one pod, at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct View {
    /// The filters at the devices of podmirror's hooks.
    pub(super) filters: AllFilters,
    /// The TCX chains of podmirror's hooks.
    pub(super) chains: BTreeMap<(IfIndex, Program), Vec<InChain>>,
    /// Programs, filters and queues that the pod has put where copies leave by its relay device. podmirror has none
    /// there.
    pub(super) at_exit: Vec<Ahead>,
}

/// A view, or the reason why there is none.
pub(super) type Seen = Result<View, String>;

/// The hooks inside pods where podmirror may have a program.
#[derive(Default)]
pub(super) struct Inside {
    pods: BTreeMap<NetnsId, Pod>,
}

struct Pod {
    hooks: BTreeSet<(IfIndex, Program)>,
    /// The last known path of its namespace.
    hint: Option<PathBuf>,
    /// The last view; `None` if podmirror's programs there have changed since.
    seen: Option<Seen>,
    at: Instant,
    cost: Duration,
}

/// The hooks inside pods by namespace, with a path where each namespace may be.
pub(super) type Places = BTreeMap<NetnsId, (BTreeSet<(IfIndex, Program)>, Option<PathBuf>)>;

impl Inside {
    /// Returns a view of these hooks. Uses the last view of a pod if it is recent enough.
    pub(super) async fn see(&mut self, namespaces: &Namespaces, places: Places) -> BTreeMap<NetnsId, Seen> {
        let rest = self.rest();
        self.pods.retain(|netns, _| places.contains_key(netns));
        let mut all = BTreeMap::new();
        for (netns, (hooks, hint)) in places {
            let known =
                self.pods.get(&netns).filter(|pod| pod.hooks.is_superset(&hooks) && pod.at.elapsed() < rest);
            let seen = match known.and_then(|pod| pod.seen.clone()) {
                Some(seen) => seen,
                None => {
                    let pod = Pod::look(namespaces, netns, hooks, hint).await;
                    let seen = pod.seen.clone();
                    self.pods.insert(netns, pod);
                    seen.unwrap_or_else(|| Err(String::new()))
                }
            };
            all.insert(netns, seen);
        }
        all
    }

    /// The time of the next poll; `None` if podmirror has no programs inside pods.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pods.values().map(|pod| pod.at).min().map(|at| at + self.rest())
    }

    /// Polls the pod whose view is the oldest. Returns whether something has changed.
    pub(super) async fn look(&mut self, namespaces: &Namespaces) -> bool {
        let Some((netns, pod)) = self.pods.iter_mut().min_by_key(|(_, pod)| pod.at) else { return false };
        let now = Pod::look(namespaces, *netns, pod.hooks.clone(), pod.hint.clone()).await;
        let has_changed = pod.seen != now.seen;
        *pod = now;
        has_changed
    }

    /// Discards the view of this namespace: another pod's namespace may have its inode now.
    pub(super) fn doubt(&mut self, netns: NetnsId) {
        self.pods.entry(netns).and_modify(|pod| pod.seen = None);
    }

    /// Records that podmirror has no program at a hook any more.
    pub(super) fn left(&mut self, device: Device, which: Program) {
        let Some(pod) = self.pods.get_mut(&device.netns) else { return };
        pod.hooks.remove(&(device.ifindex, which));
        pod.seen = None;
        if pod.hooks.is_empty() {
            self.pods.remove(&device.netns);
        }
    }

    /// Records that the agent has attached a program at a hook, or tried to.
    pub(super) fn touched(&mut self, device: Device, which: Program) {
        let unseen =
            Pod { hooks: BTreeSet::new(), hint: None, seen: None, at: Instant::now(), cost: Duration::ZERO };
        let pod = self.pods.entry(device.netns).or_insert(unseen);
        pod.hooks.insert((device.ifindex, which));
        pod.seen = None;
    }

    fn rest(&self) -> Duration {
        rest(self.pods.values().map(|pod| pod.cost).sum(), EVERY)
    }
}

impl Pod {
    async fn look(
        namespaces: &Namespaces,
        netns: NetnsId,
        hooks: BTreeSet<(IfIndex, Program)>,
        hint: Option<PathBuf>,
    ) -> Self {
        let (at, work) = (Instant::now(), Work::begin());
        let seen = async {
            let netns = namespaces.find(netns, hint.as_deref())?;
            view(&netns, &hooks).await
        };
        let seen = seen.await.map_err(|error: anyhow::Error| format!("{error:#}"));
        Self { hooks, hint, seen: Some(seen), at, cost: work.cost() }
    }
}

/// Reads these hooks of a namespace, within [`PATIENCE`].
pub(super) async fn view(netns: &Netns, hooks: &BTreeSet<(IfIndex, Program)>) -> anyhow::Result<View> {
    let wanted = hooks.clone();
    let open = move || {
        let chain = |hook: (IfIndex, Program)| Ok((hook, tcx::chain(hook.0, hook.1)?));
        let chains = wanted.into_iter().chain([EXIT]).map(chain).collect::<anyhow::Result<_>>();
        Ok((chains.map_err(io::Error::other)?, rtnetlink::new_connection()?))
    };
    let look = async {
        let (mut chains, (connection, handle, _)): (BTreeMap<_, _>, _) = netns.inside(open).await?;
        let devices = hooks.iter().map(|(ifindex, _)| *ifindex).collect();
        let read = Filters::inside(connection, handle);
        let filters = read.of_devices(&devices).await?;
        let mut at_exit: Vec<_> = chains.remove(&EXIT).into_iter().flatten().map(Ahead::from).collect();
        at_exit.extend(read.of_others(EXIT.0).await?);
        Ok(View { filters, chains, at_exit })
    };
    timeout(PATIENCE, look).await.context("reading the filters inside the pod takes too long")?
}

/// Returns podmirror's filters at a hook of a namespace, within [`SEARCH`], however many filters there are.
pub(super) async fn ours(netns: &Netns, ifindex: IfIndex, which: Program) -> anyhow::Result<Vec<Filter>> {
    let search = async {
        let (connection, handle, _) = netns.inside(rtnetlink::new_connection).await?;
        Filters::inside(connection, handle).ours(ifindex, which).await
    };
    timeout(SEARCH, search).await.context("the pod has too many filters to find podmirror's among them")?
}
