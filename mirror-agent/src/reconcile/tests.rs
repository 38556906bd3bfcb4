//! Tests of the loop with fakes of its three interfaces. [`coverage`] has the tests of the counters that it reads
//! between its rounds.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

mod coverage;
mod deleted;
mod histories;
mod mirrored;
mod routes;
mod targets;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use mirror_common::verdict::TapKind;
use mirror_core::{coverage::Carried, destination::Destination, exit, mirror_iface::MirrorIface};

use super::{carry_out::SLICE, look::MOST_LOOKS, *};
use crate::{
    kernel::{
        dataplane::tests::fake::Fake,
        links::{NicPlace, PodNetns},
    },
    model::{
        ALIAS, Actual, ActualTap, Device, DeviceTarget, Directions, Ended, HookState, IfIndex, Link,
        LinkChange, LinkKind, LinkSnapshot, MirrorId, NetnsId, Op, Origin, Owner, Peer, Pod, PodId, PodLinks,
        Program, Request, Resource, ResourceId, RingId, Selector, Session, Tap, TapHead, Target, TargetName,
        TargetResource,
    },
    report::TICK,
    select::{Capture, MIRROR, Wants, Why},
    settings::{Budget, Rate, SETTINGS, Settings, parse_filter},
};

/// Pods and resources, set by hand.
#[derive(Default)]
struct Pods(Option<Vec<Pod>>, Vec<Resource>, Vec<TargetResource>, Mutex<Vec<Pod>>);

impl PodSource for Pods {
    fn snapshot(&self) -> Option<Arc<[Pod]>> {
        self.0.clone().map(Arc::from)
    }

    fn deleted(&self) -> Vec<Pod> {
        std::mem::take(&mut self.3.lock().unwrap())
    }

    fn resources(&self) -> Arc<[Resource]> {
        self.1.clone().into()
    }

    fn targets(&self) -> Arc<[TargetResource]> {
        self.2.clone().into()
    }

    async fn changed(&mut self) {
        std::future::pending().await
    }
}

/// Devices set by hand; requested changes are carried out on them.
#[derive(Default)]
struct Table {
    links: LinkSnapshot,
    applied: Vec<LinkChange>,
    is_broken: bool,
    refuses_exits: bool,
    /// Another process deletes each mirror interface at once.
    loses_mirrors: bool,
    /// Devices can be neither deleted nor set up.
    refuses_changes: bool,
    /// A NIC that a pod gets while the next change is carried out, with the UID of the pod.
    comes: Option<(String, Link)>,
    /// The pods of each snapshot.
    asked: Vec<Vec<PodNetns>>,
    /// The counters of the NICs, by the index of the node side; `None` if they cannot be read.
    carried: BTreeMap<IfIndex, Option<[Carried; 2]>>,
}

impl LinkTable for Table {
    fn follow(&mut self, _: &BTreeMap<TargetName, Destination>) {}

    async fn snapshot(&mut self, pods: &[PodNetns]) -> anyhow::Result<LinkSnapshot> {
        anyhow::ensure!(!self.is_broken, "injected failure");
        self.asked.push(pods.to_vec());
        Ok(self.links.clone())
    }

    fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>> {
        Ok(uids.into_iter().filter(|uid| self.links.pods.contains_key(uid)).collect())
    }

    async fn counters(&mut self, nics: &[NicPlace]) -> anyhow::Result<Vec<Option<[Carried; 2]>>> {
        anyhow::ensure!(!self.is_broken, "injected failure");
        let idle = Some(<[Carried; 2]>::default());
        Ok(nics.iter().map(|nic| self.carried.get(&nic.end?).copied().unwrap_or(idle)).collect())
    }

    fn shows_redirects(&mut self) -> bool {
        true
    }

    async fn apply(&mut self, change: &LinkChange) -> anyhow::Result<()> {
        self.applied.push(change.clone());
        let namespaces = &mut self.links.pods;
        if let Some((uid, nic)) = self.comes.take() {
            namespaces.get_mut(&uid).unwrap().as_mut().unwrap().links.push(nic);
        }
        let mut of = |netns: &NetnsId, change: &dyn Fn(&mut Vec<Link>)| {
            let inside = namespaces.values_mut().flatten().filter(|inside| inside.netns == *netns);
            inside.for_each(|inside| change(&mut inside.links));
        };
        match change {
            LinkChange::CreateMirror { .. } if self.loses_mirrors => {}
            LinkChange::CreateMirror { name, mtu, .. } => {
                let is_free = |ifindex: &u32| !self.links.host.contains_key(&IfIndex(*ifindex));
                let ifindex = (90..).step_by(2).find(is_free).unwrap();
                let (name, mtu, alias) = (name.clone(), *mtu, Some(ALIAS.into()));
                let mirror = Link { name, mtu, alias, ..link(ifindex, LinkKind::Dummy) };
                self.links.host.insert(mirror.ifindex, mirror);
            }
            LinkChange::CreateHub => {
                let (name, mtu, alias) = (exit::HUB.into(), exit::MTU, Some(ALIAS.into()));
                let hub = Link { name, mtu, alias, ..link(91, LinkKind::Dummy) };
                self.links.host.insert(hub.ifindex, hub);
            }
            LinkChange::Delete(ifindex) | LinkChange::SetUp(ifindex) if self.refuses_changes => {
                anyhow::bail!("injected failure of {ifindex:?}")
            }
            LinkChange::Delete(ifindex) => drop(self.links.host.remove(ifindex)),
            LinkChange::SetUp(ifindex) => {
                self.links.host.get_mut(ifindex).into_iter().for_each(|link| link.up = true);
            }
            LinkChange::CreateExit(..) if self.refuses_exits => anyhow::bail!("injected failure"),
            LinkChange::CreateExit(netns, hub) => {
                let peer = Some(Peer { ifindex: hub.0, nsid: Some(0) });
                let kind = LinkKind::Other("macvlan".into());
                let (ifindex, name, mtu) = (exit::IFINDEX, exit::NAME.into(), exit::MTU);
                let exit = Link { ifindex, name, mtu, peer, is_private: true, ..link(1, kind) };
                of(netns, &|links| links.push(exit.clone()));
            }
            LinkChange::DeleteExit(netns) => of(netns, &|links| links.retain(|link| !exit::is_exit(link))),
            _ => {}
        }
        Ok(())
    }

    async fn changed(&mut self) {
        std::future::pending().await
    }
}

fn link(ifindex: u32, kind: LinkKind) -> Link {
    Link { mtu: 1500, ..Link::new(IfIndex(ifindex), &format!("dev{ifindex}"), kind, None) }
}

/// Adds pod `number` with one NIC, whose device on the node has the index `10 + number`.
fn add_pod(world: &mut World, number: u32) {
    let id =
        PodId { uid: format!("uid-{number}"), namespace: "default".into(), name: format!("pod-{number}") };
    let nsid = Some(number as i32);
    let nic = Link { peer: Some(Peer { ifindex: 10 + number, nsid: Some(0) }), ..link(2, LinkKind::Veth) };
    let device = Link { peer: Some(Peer { ifindex: 2, nsid }), ..link(10 + number, LinkKind::Veth) };
    let inside = PodLinks {
        netns: NetnsId { dev: 4, ino: number.into() },
        is_host: false,
        nsid,
        links: vec![nic],
        stale: None,
    };
    world.links.links.pods.insert(id.uid.clone(), Ok(inside));
    world.links.links.host.insert(device.ifindex, device);
    let annotations = [(MIRROR.to_owned(), "true".to_owned())].into();
    world.pods.0.get_or_insert_default().push(Pod {
        id,
        annotations,
        netns: Some("/run/netns/x".into()),
        ..Pod::default()
    });
}

type World = Reconciler<Pods, Table, Fake>;

fn world() -> World {
    world_with(watch::channel(Arc::default()).1)
}

fn world_with(reading: Reading) -> World {
    let policy = Policy { is_strict: true, ..Policy::default() };
    let mirrors = MirrorIfaces::new(MirrorIface::new("", None));
    let metrics = LoopMetrics::new().unwrap();
    Reconciler::new(Pods::default(), Table::default(), Fake::default(), reading, policy, mirrors, metrics)
}

/// Another agent takes over, and has no list yet.
fn restart(node: &mut World) {
    let agent = std::mem::replace(node, world());
    (node.links, node.dataplane) = (agent.links, agent.dataplane);
}

fn live() -> TargetName {
    TargetName("live".parse().unwrap())
}

/// Lets the loop run for a while (of paused time).
async fn run_for(world: &mut World, time: Duration) -> anyhow::Result<()> {
    world.run(tokio::time::sleep(time)).await
}

fn device(ifindex: u32) -> Device {
    Device::on_node(IfIndex(ifindex))
}

/// The only target.
fn target(world: &World) -> &DeviceTarget {
    world.dataplane.actual.targets[&TargetName::default()].device().unwrap()
}

fn tapped(world: &World) -> Vec<u32> {
    let complete = |tap: &&ActualTap| {
        tap.tap.is_some() && Program::TAP.iter().all(|program| tap.state(*program) == HookState::Current)
    };
    world
        .dataplane
        .actual
        .taps
        .iter()
        .filter(|(_, tap)| complete(tap))
        .map(|(device, _)| device.ifindex.0)
        .collect()
}

/// A round neither waits for such a device nor spins, and the device is there soon after the other process stops.
#[tokio::test(start_paused = true)]
async fn a_device_that_another_process_deletes_at_once_does_not_hold_the_loop() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.links.loses_mirrors = true;
    let looks = |world: &World| world.links.asked.len();
    world.round().await.unwrap();
    assert_eq!((looks(&world), world.links.applied.len()), (MOST_LOOKS, MOST_LOOKS));
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    let few = MOST_LOOKS * 4..MOST_LOOKS * 12;
    assert!(few.contains(&looks(&world)), "{} looks in a second, without an event", looks(&world));
    assert_eq!((tapped(&world), target(&world).ifindex), (vec![11], None), "the rest goes on");
    world.links.loses_mirrors = false;
    run_for(&mut world, Duration::from_millis(200)).await.unwrap();
    assert_eq!(target(&world).ifindex, Some(IfIndex(90)));
}

/// An agent was killed while it created the relay hub, and the next one needs none.
#[tokio::test(start_paused = true)]
async fn a_half_made_hub_without_need_is_deleted_once() {
    let mut world = world();
    add_pod(&mut world, 1);
    let ifindex = mirror_core::model::FIRST_IFINDEX;
    let hub = Link { name: exit::HUB.into(), ifindex, up: false, ..link(1, LinkKind::Dummy) };
    world.links.links.host.insert(ifindex, hub);
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    let deleted = world.links.applied.iter().filter(|change| **change == LinkChange::Delete(ifindex));
    assert_eq!((deleted.count(), world.links.applied.len()), (1, 2), "and the mirror interface is created");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_removed_before_the_first_complete_list() {
    let mut world = world();
    let owner = Owner {
        pod: Some(PodId::default()),
        netns: NetnsId::default(),
        nic: "eth0".into(),
        network: None,
        device: "dev11".into(),
    };
    let session = Session {
        directions: Directions::Both,
        settings: Settings::default(),
        target: TargetName::default(),
        origin: Origin::Policy,
        asked: 0,
        key: None,
    };
    let sessions = [(MirrorId::default(), session)].into();
    let head = TapHead::new(owner, TapKind::HostVeth);
    let (ingress, egress) = (HookState::Stale, HookState::Stale);
    let old = ActualTap { tap: Some(Tap { head, sessions }), ingress, egress, ..ActualTap::default() };
    world.dataplane.actual.taps.insert(device(11), old.clone());
    run_for(&mut world, Duration::from_secs(200)).await.unwrap();
    assert_eq!(world.dataplane.actual.taps[&device(11)], old);
    assert_eq!(target(&world).ifindex, Some(IfIndex(90)), "the target is kept right meanwhile");

    world.pods.0 = Some(Vec::new());
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert!(world.dataplane.actual.taps.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_tap_whose_namespace_the_next_agent_cannot_read_stays() {
    let mut world = world();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let before = world.dataplane.actual.taps.clone();
    assert_eq!(tapped(&world), [11]);
    let list = world.pods.0.clone();
    restart(&mut world);
    world.pods.0 = list;
    let inside = world.links.links.pods.get_mut("uid-1").unwrap().as_mut().unwrap();
    *inside = PodLinks { nsid: None, links: vec![], stale: Some("denied".into()), ..inside.clone() };
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(world.dataplane.actual.taps, before);
    let report = world.report.borrow().clone();
    let why = report.skipped.iter().map(|skipped| skipped.why.to_string()).collect::<Vec<_>>();
    assert!(matches!(&why[..], [why] if why.contains("denied; existing mirrors continue")), "{why:?}");
}

/// With CRI-O, a container that is started again and again has no process for minutes.
#[tokio::test(start_paused = true)]
async fn a_tap_of_a_pod_without_a_process_stays_with_the_next_agent() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.pods.0.as_mut().unwrap()[0].netns = None;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let installed = world.dataplane.actual.taps.get_mut(&device(11)).unwrap();
    installed.ended = [(MirrorId::default(), Ended::Packets)].into();
    let before = world.dataplane.actual.taps.clone();
    let list = world.pods.0.clone();
    restart(&mut world);
    world.pods.0 = list;
    let inside = world.links.links.pods.remove("uid-1").unwrap();
    let state = |world: &World| {
        let skipped: Vec<_> =
            world.report.borrow().skipped.iter().map(|skipped| skipped.why.name()).collect();
        (world.dataplane.actual.taps.clone(), skipped)
    };
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(state(&world), (before.clone(), vec!["NoNetns"]));
    world.links.links.pods.insert("uid-1".into(), inside);
    run_for(&mut world, Duration::from_secs(2)).await.unwrap();
    assert_eq!(state(&world), (before, vec![]), "its process is looked for");
}

#[tokio::test(start_paused = true)]
async fn a_failed_op_stops_no_other_and_is_tried_again_later_and_later() {
    let mut world = world();
    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    let broken = Op::Attach(device(11), Program::TapIngress);
    world.dataplane.failures = vec![broken.clone(); 3].into();
    run_for(&mut world, Duration::from_millis(50)).await.unwrap();
    assert_eq!(tapped(&world), [12], "the other pod does not wait");

    // However many rounds there are, the op is retried only after 0.1 s, 0.2 s, 0.4 s.
    let tries = |world: &World| world.dataplane.tried.iter().filter(|op| **op == broken).count();
    let mut at = Vec::new();
    for centiseconds in 5..90 {
        if tries(&world) > at.len() {
            at.push(centiseconds);
        }
        run_for(&mut world, Duration::from_millis(10)).await.unwrap();
    }
    let waits: Vec<_> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(matches!(waits[..], [5..=7, 19..=22, 39..=43]), "{waits:?}");
    assert_eq!((tries(&world), tapped(&world)), (4, vec![11, 12]));
}

/// Adds an annotation to the newest pod.
fn annotate(world: &mut World, key: &str, value: &str) {
    let pod = world.pods.0.as_mut().unwrap().last_mut().unwrap();
    pod.annotations.insert(format!("podmirror.io/{key}"), value.to_owned());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_fit_is_reported_and_the_others_stay() {
    let mut world = world();
    world.dataplane.actual.capacity.taps = 1;
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    add_pod(&mut world, 2);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11]);
    let report = Report::clone(&world.reports().borrow());
    let skipped: Vec<_> = report.skipped.iter().map(|skipped| (&skipped.pod, &skipped.why)).collect();
    assert!(matches!(skipped[..], [(Some(pod), Why::NoRoom(_))] if pod.name == "pod-2"), "{skipped:?}");
    assert!(report.is_reconciled);
}

/// At a start with very many filters, other tasks run while these are compiled, and then all mirrors are installed.
#[tokio::test(start_paused = true)]
async fn very_many_filters_do_not_hold_up_other_tasks() {
    let mut world = world();
    for number in 1..=3 {
        add_pod(&mut world, number);
        for mirror in 1..8 {
            annotate(&mut world, &format!("mirror.m{mirror}"), "true");
            annotate(&mut world, &format!("filter.m{mirror}"), &format!("port {number}{mirror}"));
        }
    }
    let turns = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&turns);
    let other = tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    assert!(world.round().await.is_ok());
    other.abort();
    let taps = world.dataplane.actual.taps.values().filter_map(|installed| installed.tap.as_ref());
    assert_eq!(taps.map(|tap| tap.sessions.len()).collect::<Vec<_>>(), [8, 8, 8]);
    assert!(turns.load(Ordering::Relaxed) >= 5, "{turns:?}");
}

/// A Mirror of all pods, with this target.
fn mirror_all(target: Option<&str>) -> Resource {
    Resource {
        id: ResourceId { namespace: Some("default".into()), name: "all".parse().unwrap() },
        uid: "1".into(),
        generation: 1,
        created: 0,
        is_enforced: false,
        namespaces: Selector::default(),
        pods: Selector::default(),
        pod_name: None,
        request: Ok(Request { target: target.map(str::to_owned), ..Request::default() }),
    }
}

/// A pod is covered only after its tap and its hooks are installed.
#[tokio::test(start_paused = true)]
async fn what_came_of_a_resource_is_reported() {
    let mut world = world();
    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    world.pods.1.push(mirror_all(None));
    world.dataplane.failures = vec![Op::Attach(device(12), Program::TAP[0]); 1000].into();
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    let told = |world: &World| {
        let report = Report::clone(&world.reports().borrow());
        let [of] = &report.resources[..] else { panic!("{report:?}") };
        let covered: Vec<_> = of.covered.iter().map(|pod| pod.name.clone()).collect();
        let others: Vec<_> = of.not_covered.iter().map(|of| (of.pod.name.clone(), of.reason)).collect();
        (covered, others)
    };
    assert_eq!(told(&world), (vec!["pod-1".into()], vec![("pod-2".into(), "NotYet")]));
    world.dataplane.failures.clear();
    run_for(&mut world, Duration::from_secs(31)).await.unwrap();
    assert_eq!(told(&world), (vec!["pod-1".into(), "pod-2".into()], vec![]));
    let sessions = &world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap().sessions;
    assert_eq!(sessions.len(), 2, "the annotation's and the resource's");
}

/// The kernel refuses the new filter of a mirror: the mirror ends, and does not continue with the old filter.
#[tokio::test(start_paused = true)]
async fn a_filter_that_the_kernel_refuses_ends_its_mirror_alone() {
    let mut world = world();
    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    annotate(&mut world, "filter", "ip");
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11, 12]);
    let why = "the kernel refuses the filter: too complex".to_owned();
    world.dataplane.actual.refused.insert(parse_filter("tcp").unwrap(), why.clone());
    annotate(&mut world, "filter", "tcp");
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11]);
    let report = Report::clone(&world.reports().borrow());
    let skipped: Vec<_> = report.skipped.iter().map(|skipped| (&skipped.pod, &skipped.why)).collect();
    let expected = Why::FilterRefused(why);
    assert!(
        matches!(skipped[..], [(Some(pod), told)] if pod.name == "pod-2" && *told == expected),
        "{skipped:?}"
    );
    annotate(&mut world, "filter", "udp");
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11, 12]);
}

#[tokio::test(start_paused = true)]
async fn a_second_stage_that_fails_keeps_only_its_own_mirrors_waiting() {
    let mut world = world();
    add_pod(&mut world, 1);
    annotate(&mut world, "snaplen", "96");
    let broken = Op::Attach(device(90), Program::Deliver);
    world.dataplane.failures = vec![broken.clone(); 1000].into();
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    add_pod(&mut world, 2);
    run_for(&mut world, Duration::from_secs(100)).await.unwrap();
    let sessions = |device: &Device| world.dataplane.actual.taps[device].tap.as_ref().unwrap().sessions.len();
    assert_eq!([device(11), device(12)].each_ref().map(sessions), [0, 1], "a copy would be whole");
    assert_eq!((tapped(&world), target(&world).cuts), (vec![11, 12], false));
    let failures = world.reports().borrow().failures.clone();
    assert!(failures.iter().any(|failure| failure.contains("Deliver")), "{failures:?}");
    // After 0.1, 0.2, 0.4 s and so on up to 30 s, and not in between.
    let tries = world.dataplane.tried.iter().filter(|op| **op == broken).count();
    assert!((9..=14).contains(&tries), "{tries} attempts in 100 s");
    assert!(world.links.asked.len() < 60, "{} rounds in 100 s", world.links.asked.len());

    world.dataplane.failures.clear();
    run_for(&mut world, Duration::from_secs(31)).await.unwrap();
    assert!(target(&world).cuts);
    assert_eq!(world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap().sessions.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_device_that_waits_for_another_one_does_not_keep_the_loop_busy() {
    let mut world = world();
    add_pod(&mut world, 1);
    annotate(&mut world, "snaplen", "96");
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let put = world.dataplane.tried.iter().find(|op| matches!(op, Op::PutTap(..))).unwrap().clone();
    world.dataplane.actual = Actual::empty(world.dataplane.actual.capacity);
    // The tap fails once, and then its session waits for the second stage.
    world.dataplane.failures = vec![Op::Attach(device(90), Program::Deliver); 1000].into();
    world.dataplane.failures.push_back(put);
    let before = world.links.asked.len();
    run_for(&mut world, Duration::from_secs(100)).await.unwrap();
    let rounds = world.links.asked.len() - before;
    assert!(rounds < 60, "{rounds} rounds in 100 s");
}

#[tokio::test(start_paused = true)]
async fn a_removal_does_not_wait_for_all_taps_of_a_start() {
    let mut world = world();
    (1..=3).for_each(|number| add_pod(&mut world, number));
    world.dataplane.takes = SLICE / 2;
    let reports = world.reports();
    let told = || Report::clone(&reports.borrow());
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11], "one slice");
    assert_eq!((told().wanted, told().attached, told().is_reconciled), (3, 1, false));

    let annotations = &mut world.pods.0.as_mut().unwrap()[0].annotations;
    annotations.insert(MIRROR.into(), "false".into());
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let installed = &world.dataplane.actual.taps;
    assert_eq!(
        installed[&device(11)].tap,
        None,
        "its programs, which copy nothing any more, wait: {installed:?}"
    );

    // Failed ops take time too, and do not delay other devices.
    let broken = Op::Attach(device(13), Program::TapIngress);
    world.dataplane.failures = vec![broken; 2].into();
    run_for(&mut world, SLICE * 3).await.unwrap();
    assert_eq!((tapped(&world), told().is_reconciled), (vec![12], true));
    assert!(!world.dataplane.actual.taps.contains_key(&device(11)));
    run_for(&mut world, SLICE * 9).await.unwrap();
    assert_eq!((tapped(&world), told().is_reconciled), (vec![12, 13], true));
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_from_the_start_ends_the_agent_before_it_makes_anything() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.links.links.host.get_mut(&IfIndex(11)).unwrap().name = "mirror0".into();
    let error = run_for(&mut world, Duration::from_secs(1)).await.unwrap_err();
    assert!(error.to_string().contains("mirror0 is the mirror interface itself"), "{error}");
    assert_eq!((world.links.applied.len(), world.dataplane.tried.len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_report_tells_what_stands_and_that_everything_was_done_once() {
    let mut world = world();
    let reports = world.reports();
    let told = || Report::clone(&reports.borrow());
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!((told().is_listed, told().is_reconciled), (false, false), "there is no list yet");

    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    world.pods.0.as_mut().unwrap()[0].annotations.insert("podmirror.io/rate".into(), "much".into());
    let broken = Op::Attach(device(12), Program::TapIngress);
    world.dataplane.failures = vec![broken.clone()].into();
    world.links.is_broken = true;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!((told().is_listed, told().is_reconciled, told().failures.len()), (true, false, 1));

    // A problem of a single device is reported, and delays nothing else.
    world.links.is_broken = false;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let report = told();
    assert_eq!((report.is_listed, report.is_reconciled), (true, true));
    assert_eq!((report.wanted, report.attached, report.failures.len()), (1, 0, 1));
    assert_eq!(report.skipped.iter().map(|skipped| skipped.why.name()).collect::<Vec<_>>(), ["BadSetting"]);

    run_for(&mut world, Duration::from_millis(200)).await.unwrap();
    let report = told();
    assert_eq!(
        (report.is_reconciled, report.wanted, report.attached, report.failures.len()),
        (true, 1, 1, 0)
    );

    // The loop stays reconciled once it was; a round that cannot read the devices leaves the report unchanged.
    add_pod(&mut world, 3);
    world.dataplane.failures = vec![Op::Attach(device(13), Program::TapIngress); 2].into();
    world.links.is_broken = true;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(
        (told().is_reconciled, told().failures.len(), told().skipped),
        (true, 1, report.skipped.clone())
    );
    world.links.is_broken = false;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!((told().is_reconciled, told().wanted, told().attached), (true, 2, 1));
}

/// A pod can end between a look and an op. That is no failure.
#[tokio::test(start_paused = true)]
async fn a_device_that_goes_meanwhile_is_told_only_if_it_is_there_still() {
    let attach = Op::Attach(device(11), Program::TapIngress);
    for (times, is_told) in [(1, false), (2, true)] {
        let mut world = world();
        add_pod(&mut world, 1);
        world.dataplane.failures = vec![attach.clone(); times].into();
        world.dataplane.says_gone = true;
        // The second attempt is after 100 ms, the third 200 ms later.
        run_for(&mut world, Duration::from_millis(150)).await.unwrap();
        let report = world.report.borrow().clone();
        assert_eq!(report.failures.len(), usize::from(is_told), "{:?}", report.failures);
        assert_eq!(report.attached, usize::from(!is_told));
        run_for(&mut world, Duration::from_secs(1)).await.unwrap();
        let report = world.report.borrow().clone();
        assert_eq!((report.failures.len(), report.attached), (0, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_process_is_not_there_yet_is_looked_for() {
    let mut world = world();
    for number in 1..=3 {
        add_pod(&mut world, number);
    }
    let pods = world.pods.0.as_mut().unwrap();
    pods[0].netns = None;
    pods[2].host_network = true;
    let inside = world.links.links.pods.remove("uid-1").unwrap();
    run_for(&mut world, Duration::from_secs(2)).await.unwrap();
    assert_eq!(tapped(&world), [12]);
    let asked = |uid: &str, path: Option<&str>| PodNetns {
        uid: uid.into(),
        path: path.map(Into::into),
        nics: BTreeSet::new(),
    };
    assert_eq!(
        world.links.asked.last().unwrap().as_slice(),
        [asked("uid-1", None), asked("uid-2", Some("/run/netns/x"))],
        "with or without a path, but not in the node's network"
    );
    let looks = world.links.asked.len();
    assert!((60..90).contains(&looks), "often, and then less and less: {looks}");

    world.links.links.pods.insert("uid-1".into(), inside);
    run_for(&mut world, Duration::from_millis(100)).await.unwrap();
    assert_eq!(tapped(&world), [11, 12]);
    let looks = world.links.asked.len();
    run_for(&mut world, TICK - Duration::from_secs(1)).await.unwrap();
    assert_eq!(world.links.asked.len(), looks + 1, "nothing more is expected");
}

fn capture(interfaces: &[&str]) -> Capture {
    Capture {
        ring: RingId(4),
        origin: Origin::Capture,
        wants: Wants::Named {
            pods: [("default".to_owned(), "pod-1".to_owned())].into(),
            interfaces: interfaces.iter().map(|name| (*name).to_owned()).collect(),
        },
        directions: Directions::Both,
        settings: Settings::default(),
    }
}

fn captured(capture: Capture) -> Arc<Readers> {
    Arc::new(Readers { captures: vec![capture], ..Readers::default() })
}

/// A program that requests an impossible capture does not end the agent, even at its start.
#[tokio::test(start_paused = true)]
async fn a_capture_that_cannot_be_is_no_reason_to_end() {
    let captures = watch::Sender::new(captured(capture(&["nosuch0", "mirror0"])));
    let mut world = world_with(captures.subscribe());
    add_pod(&mut world, 1);
    run_for(&mut world, TICK).await.unwrap();
    run_for(&mut world, TICK).await.unwrap();
    let report = world.report.borrow().clone();
    let reasons: Vec<_> = report.skipped.iter().map(|skipped| skipped.why.name()).collect();
    assert_eq!(reasons, ["MirrorInterface", "NoSuchInterface"]);
    assert!(report.is_reconciled && report.rings == [RingId(4)].into());
}

/// The program that reads gets the reason why it receives nothing.
#[tokio::test(start_paused = true)]
async fn a_ring_that_cannot_be_written_is_told_with_its_reason() {
    let streams = [(live(), RingId(4))].into();
    let reading = watch::Sender::new(Arc::new(Readers { streams, ..Readers::default() }));
    let mut world = world_with(reading.subscribe());
    world.memory.own_targets.insert(live(), Destination::Stream);
    let write = Op::SetTarget(live(), Target::Stream(Some(RingId(4))));
    world.dataplane.failures = vec![write; 1000].into();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_millis(500)).await.unwrap();
    let report = world.report.borrow().clone();
    assert_eq!(report.rings, [RingId(4)].into());
    let why = report.unwritten.get(&live()).cloned().unwrap_or_default();
    assert!(why.contains("injected failure") && report.failures.contains(&why), "{report:?}");
    world.dataplane.failures.clear();
    run_for(&mut world, TICK).await.unwrap();
    let report = world.report.borrow().clone();
    assert!(report.unwritten.is_empty() && report.failures.is_empty(), "{report:?}");
}

/// The ring of a killed agent is removed before there is a list of pods.
#[tokio::test(start_paused = true)]
async fn a_ring_of_an_earlier_agent_gets_no_more_copies() {
    let mut world = world();
    world.memory.own_targets.insert(live(), Destination::Stream);
    world.dataplane.actual.targets.insert(live(), Target::Stream(Some(RingId(3))));
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    assert_eq!(world.dataplane.actual.targets[&live()], Target::Stream(None));
}

/// A new agent has other defaults. A change of settings that the author has not written does not restart a mirror; a
/// change of the author's own settings does.
#[tokio::test(start_paused = true)]
async fn other_defaults_of_the_node_begin_no_ended_mirror_again() {
    let second = Duration::from_secs(1);
    let budget = |packets| Budget { duration: Some(3600 * second), packets, ..Budget::default() };
    let rate = Rate { packets: Some(100), bits: None, burst: second };
    for (what, own) in [("of the author", "40"), ("of the node", "")] {
        let mut world = world();
        world.memory.policy.settings.budget = budget(Some(50));
        add_pod(&mut world, 1);
        if !own.is_empty() {
            annotate(&mut world, "packets", own);
        }
        run_for(&mut world, second).await.unwrap();
        let ended = [(MirrorId::default(), Ended::Packets)].into();
        world.dataplane.actual.taps.get_mut(&device(11)).unwrap().ended = ended;

        let change: [fn(&mut Policy, Rate, Budget); 3] = [
            |policy, rate, _| policy.settings.rate = Some(rate),
            |policy, _, budget| policy.settings.budget = budget,
            |policy, _, _| policy.settings.budget = Budget::default(),
        ];
        for change in change {
            change(&mut world.memory.policy, rate, budget(Some(80)));
            run_for(&mut world, second).await.unwrap();
            let installed = &world.dataplane.actual.taps[&device(11)];
            assert_eq!(installed.ended.len(), 1, "{what}");
            let session = &installed.tap.as_ref().unwrap().sessions[&MirrorId::default()];
            assert_eq!(session.settings.rate, Some(rate), "{what}: the rest is as the node has it");
        }
        annotate(&mut world, "packets", "41");
        run_for(&mut world, second).await.unwrap();
        assert_eq!(world.dataplane.actual.taps[&device(11)].ended, BTreeMap::new(), "{what}");
    }
}

/// The write of a changed limit fails. Then the kernel has the old one, and the next round notices.
#[tokio::test(start_paused = true)]
async fn a_limit_that_was_not_written_is_written_by_the_next_round() {
    let mut world = world();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let installed = |world: &World| {
        let tap = world.dataplane.actual.taps[&device(11)].tap.clone().unwrap();
        tap.sessions[&MirrorId::default()].clone()
    };
    for (key, value) in [("rate", "100pps"), ("packets", "40"), ("bytes", "1000"), ("duration", "1h")] {
        let before = installed(&world);
        annotate(&mut world, key, value);
        let mut wanted = before.clone();
        wanted.settings.set(key, value).unwrap();
        let asked = world.pods.0.as_ref().unwrap()[0].annotations.clone();
        let keys = SETTINGS.iter().map(|setting| setting.key);
        let written = keys.filter_map(|key| Some((key, asked.get(&format!("podmirror.io/{key}"))?.as_str())));
        wanted.asked = Session::asked(Directions::Both, written);
        let op = Op::ChangeSession(device(11), MirrorId::default(), Box::new(wanted.clone()));
        world.dataplane.failures = [op.clone()].into();
        let from = world.dataplane.tried.len();
        run_for(&mut world, Duration::from_millis(50)).await.unwrap();
        assert_eq!(installed(&world), before, "{key}: the kernel's state is the former one");
        assert_eq!(world.report.borrow().failures.len(), 1, "{key}");
        run_for(&mut world, Duration::from_millis(200)).await.unwrap();
        assert_eq!((installed(&world), &world.dataplane.tried[from..]), (wanted, &[op.clone(), op][..]));
        assert_eq!(world.report.borrow().failures, BTreeSet::new(), "{key}");
    }
}

/// The same for the limits that all sessions share.
#[tokio::test(start_paused = true)]
async fn a_limit_of_the_node_that_was_not_written_is_written_by_the_next_round() {
    let mut world = world();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    let before = world.dataplane.actual.ceilings;
    let rate = Rate { packets: Some(100), bits: None, burst: Duration::from_secs(1) };
    world.memory.policy.limits.max_rate = Some(rate);
    let wanted = world.memory.policy.limits.ceilings(1);
    world.dataplane.failures = [Op::SetCeilings(Box::new(wanted))].into();
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(world.dataplane.actual.ceilings, before);
    assert_eq!(world.report.borrow().failures.len(), 1);
    run_for(&mut world, Duration::from_millis(200)).await.unwrap();
    assert_eq!(world.dataplane.actual.ceilings, wanted);
    assert_eq!(world.report.borrow().failures, BTreeSet::new());
}
