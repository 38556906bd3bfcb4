//! [`Inside`]: what is at the hooks inside pods.
//!
//! The kernel lists the filters and the TCX chain of a device in the network namespace of the device only, so a look
//! takes a thread that enters the pod. And it announces no change of a chain, and a change of a filter only to those
//! that may listen in the pod. So the agent looks again and again: each second, or less often where the looks take more
//! than a hundredth of the time. A look is at one pod, so that events do not wait for the looks at all of them. A round
//! uses what was seen last.

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
    filters::{AllFilters, Filter, Filters},
    rest,
    tcx::{self, InChain},
};
use crate::{
    model::{Device, IfIndex, NetnsId, Program},
    netns::{Namespaces, Netns},
};

/// The hook of an exit that the copies pass.
const EXIT: (IfIndex, Program) = (exit::IFINDEX, Program::TapEgress);
/// The longest look at one pod: root there can keep the kernel busy.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest search for our filters among all filters of a hook. Only to remove them, it goes through the whole list.
const SEARCH: Duration = Duration::from_secs(10);

/// The hooks inside one pod, at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct View {
    /// The filters at the devices of our hooks.
    pub(super) filters: AllFilters,
    /// The TCX chains of our hooks.
    pub(super) chains: BTreeMap<(IfIndex, Program), Vec<InChain>>,
    /// What the pod has put where copies leave by its exit. Nothing of ours is there.
    pub(super) at_exit: Vec<Ahead>,
}

/// A view, or why there is none.
pub(super) type Seen = Result<View, String>;

/// The hooks inside pods where something of ours may be.
#[derive(Default)]
pub(super) struct Inside {
    pods: BTreeMap<NetnsId, Pod>,
}

/// One pod.
struct Pod {
    hooks: BTreeSet<(IfIndex, Program)>,
    /// Where its namespace was.
    hint: Option<PathBuf>,
    /// The last look; `None`: nothing was seen since our own programs have changed there.
    seen: Option<Seen>,
    at: Instant,
    took: Duration,
}

/// The hooks inside pods by namespace, and where each namespace may be.
pub(super) type Places = BTreeMap<NetnsId, (BTreeSet<(IfIndex, Program)>, Option<PathBuf>)>;

impl Inside {
    /// What is at these hooks. A view that is not too old is not taken again.
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

    /// When the next pod is to be looked at; `None`: nothing of ours is inside pods.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pods.values().map(|pod| pod.at).min().map(|at| at + self.rest())
    }

    /// Looks at the pod again that was looked at first. Returns whether something has changed.
    pub(super) async fn look(&mut self, namespaces: &Namespaces) -> bool {
        let Some((netns, pod)) = self.pods.iter_mut().min_by_key(|(_, pod)| pod.at) else { return false };
        let now = Pod::look(namespaces, *netns, pod.hooks.clone(), pod.hint.clone()).await;
        let has_changed = pod.seen != now.seen;
        *pod = now;
        has_changed
    }

    /// What was seen in this namespace does not count any more: another pod may have its number now.
    pub(super) fn doubt(&mut self, netns: NetnsId) {
        self.pods.entry(netns).and_modify(|pod| pod.seen = None);
    }

    /// Notes that nothing of ours is to be at a hook any more.
    pub(super) fn left(&mut self, device: Device, which: Program) {
        let Some(pod) = self.pods.get_mut(&device.netns) else { return };
        pod.hooks.remove(&(device.ifindex, which));
        pod.seen = None;
        if pod.hooks.is_empty() {
            self.pods.remove(&device.netns);
        }
    }

    /// Notes that the agent has attached, or tried to attach, a program at a hook.
    pub(super) fn touched(&mut self, device: Device, which: Program) {
        let unseen =
            Pod { hooks: BTreeSet::new(), hint: None, seen: None, at: Instant::now(), took: Duration::ZERO };
        let pod = self.pods.entry(device.netns).or_insert(unseen);
        pod.hooks.insert((device.ifindex, which));
        pod.seen = None;
    }

    fn rest(&self) -> Duration {
        rest(self.pods.values().map(|pod| pod.took).sum())
    }
}

impl Pod {
    async fn look(
        namespaces: &Namespaces,
        netns: NetnsId,
        hooks: BTreeSet<(IfIndex, Program)>,
        hint: Option<PathBuf>,
    ) -> Self {
        let at = Instant::now();
        let seen = async {
            let netns = namespaces.find(netns, hint.as_deref())?;
            view(&netns, &hooks).await
        };
        let seen = seen.await.map_err(|error: anyhow::Error| format!("{error:#}"));
        Self { hooks, hint, seen: Some(seen), at, took: at.elapsed() }
    }
}

/// What is at these hooks of a namespace.
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
    timeout(PATIENCE, look).await.context("it takes too long to read the filters inside the pod")?
}

/// Our filters at a hook of a namespace, among however many others.
pub(super) async fn ours(netns: &Netns, ifindex: IfIndex, which: Program) -> anyhow::Result<Vec<Filter>> {
    let search = async {
        let (connection, handle, _) = netns.inside(rtnetlink::new_connection).await?;
        Filters::inside(connection, handle).ours(ifindex, which).await
    };
    timeout(SEARCH, search).await.context("the pod has too many filters to find ours among them")?
}
