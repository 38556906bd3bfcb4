//! Random taps, targets and packets: the result of the programs in the kernel equals that of the pure decision.

use std::{cell::RefCell, collections::BTreeMap};

use aya::maps::RingBuf;
use mirror_common::{
    abi::{
        Session, TARGET_CUTS, TARGET_GUARDED, TARGET_QUEUELESS, TARGET_STREAM, TARGET_UP, TARGET_WHEN_READ,
        Tap, Target,
    },
    decide::{self, Cloned, Kernel, Packet, Question, Reach},
    facts::Facts,
    limit::charge::Paid,
    verdict::{Direction, Hook, Verdict},
};
use mirror_tests::Frame;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use crate::bench::{Bench, Counted, at, session, tap};

const CASES: u32 = 300;
const NO_DEVICE: u32 = 0x7fff_fff0;
/// Each byte of the packet's two MAC addresses.
const DESTINATION: u8 = 2;
const SOURCE: u8 = 4;

/// The device and the flags of a target.
#[derive(Debug, Clone, Copy)]
struct Aim {
    device: &'static str,
    flags: u32,
    /// Each byte of the collector's address, for a target that is a pod.
    collector: Option<u8>,
    /// The bridge of the collector.
    bridge: u32,
    /// For a target that gets copies only while it is read: the time until which it has no reader, in ns of the
    /// monotonic clock.
    unread: Option<u64>,
}

/// Times in the past, and one that never comes.
const UNTIL: [u64; 3] = [0, 1, u64::MAX];
/// No bridge, and two of them.
const BRIDGES: [u32; 3] = [0, 7, 8];

/// The device where the node has received the packet last.
#[derive(Debug, Clone, Copy)]
enum From {
    Nowhere,
    Here,
    /// A device with a tap.
    Tap,
    /// A device without a tap, for example a bridge.
    Other,
}

#[derive(Debug)]
struct Case {
    peer: bool,
    /// The bridge of the tapped device.
    bridge: u32,
    sessions: Vec<Session>,
    aims: Vec<Aim>,
    hook: Hook,
    from: From,
    size: usize,
    repeat: u32,
}

fn case() -> impl Strategy<Value = Case> {
    let devices =
        prop::sample::select(vec!["target0", "target1", "idle", "tap", "none", "missing", "stream"]);
    let flags =
        (any::<bool>(), prop::bool::weighted(0.8), any::<bool>()).prop_map(|(queueless, up, cuts)| {
            let flag = |is_set, flag| if is_set { flag } else { 0 };
            flag(queueless, TARGET_QUEUELESS) | flag(up, TARGET_UP) | flag(cuts, TARGET_CUTS)
        });
    let bridge = || prop::sample::select(BRIDGES.to_vec());
    // The packet's own addresses, and another one.
    let collector = prop::option::weighted(0.3, prop::sample::select(vec![DESTINATION, SOURCE, 6]));
    let unread = prop::option::weighted(0.3, prop::sample::select(UNTIL.to_vec()));
    let aim = (devices, flags, collector, bridge(), unread).prop_map(
        |(device, flags, collector, bridge, unread)| Aim { device, flags, collector, bridge, unread },
    );
    let aims = prop::collection::vec(aim, 4);
    // Any mark and any neighbours, including values that no agent writes. The second stage is not attached.
    let parts = (0..4_u32, 0..4_u32, 0..16_u32, prop_oneof![Just(0), any::<u8>()]);
    let sessions = prop::collection::vec((parts, prop::bool::weighted(0.1)), 0..=8).prop_map(|sessions| {
        let with_id = |(id, ((target, directions, forms, alike), is_cut))| Session {
            snaplen: if is_cut { 100_000 } else { 0 },
            mark: forms << 8,
            alike: u32::from(alike) & ((1_u32 << id) - 1),
            ..session(id, target, directions)
        };
        (0..).zip(sessions).map(with_id).collect()
    });
    let hook = prop::sample::select(Hook::ALL.to_vec());
    let from = prop::sample::select(vec![From::Nowhere, From::Here, From::Tap, From::Other]);
    (any::<bool>(), bridge(), sessions, aims, hook, from, 15..2000_usize, 1..4_u32).prop_map(
        |(peer, bridge, sessions, aims, hook, from, size, repeat)| Case {
            peer,
            bridge,
            sessions,
            aims,
            hook,
            from,
            size,
            repeat,
        },
    )
}

/// A model of the kernel for the pure decision, with the maps and devices of the bench.
struct Model<'a> {
    targets: &'a [Target],
    aims: &'a [Aim],
    /// The device at which the node has received the packet.
    from: u32,
    size: u64,
    tc_index: u16,
    counted: BTreeMap<u32, Counted>,
}

impl Kernel for Model<'_> {
    fn filter(&mut self, _: &Session) -> u32 {
        unreachable!("no session has a filter")
    }

    fn answer(&mut self, question: Question, packet: Packet, tap: &Tap, session: &Session) -> bool {
        let Aim { collector, bridge, unread, .. } = self.aims[session.target as usize];
        match question {
            Question::Refused => {
                let comes_from = self.from != 0 && self.from == self.targets[session.target as usize].ifindex;
                let is_on_bridge = bridge != 0 && bridge == tap.bridge;
                let leaves_pod = tap.kind().leaves_pod(packet.hook);
                let goes_to = |byte| byte == DESTINATION && (!leaves_pod || is_on_bridge);
                collector.is_some_and(|byte| goes_to(byte) || comes_from)
            }
            Question::Unread => unread == Some(u64::MAX),
            other => unreachable!("no session asks {other:?}"),
        }
    }

    fn facts(&mut self, _: &Session) -> Facts {
        unreachable!("no session has a sample")
    }

    fn target(&mut self, _: &Tap, index: u32) -> Option<Reach> {
        self.targets.get(index as usize).map(|&Target { ifindex, flags, .. }| Reach { ifindex, flags })
    }

    fn charge(&mut self, _: &Tap, _: &Session, _: Reach) -> (Paid, Result<(), Verdict>) {
        unreachable!("no session has limits")
    }

    fn give_back(&mut self, _: &Tap, _: &Session, _: Paid) {
        unreachable!("no session has limits")
    }

    fn clone_to(&mut self, _: &Session, _: Direction, target: Reach, _: u16) -> Cloned {
        let aim = self.targets.iter().position(|of| of.ifindex == target.ifindex).unwrap();
        let code = match self.aims[aim].device {
            "idle" => 2,
            "missing" => -i64::from(libc::EINVAL),
            _ => 0,
        };
        Cloned { code, is_uncut: false, removed: 0 }
    }

    fn record(&mut self, _: &Session, _: Direction) -> Result<u32, Verdict> {
        Ok(0)
    }

    fn set_tc_index(&mut self, tc_index: u16) {
        self.tc_index = tc_index;
    }

    /// All copies are made at one hook.
    fn is_still_copied(&mut self, _: Packet) -> bool {
        false
    }

    fn note_copy(&mut self, _: Packet) {}

    fn count(&mut self, session: &Session, direction: Direction, verdict: Verdict, _: u32) {
        let counted = self.counted.entry(session.id).or_default();
        let sum = counted.entry((direction, verdict)).or_default();
        *sum = (sum.0 + 1, sum.1 + self.size);
    }
}

#[test]
fn the_kernel_does_what_the_decision_says() {
    let bench = RefCell::new(Bench::new("random"));
    // Whether the kernel does not let a test set the receiving device of a packet.
    let is_always_here = {
        let bench = bench.borrow();
        bench.try_run_from(bench.tap, Hook::Ingress, &[0; 60], 1).is_err()
    };
    let ring = RingBuf::create(1 << 20, 0).unwrap();
    (0..4).for_each(|index| bench.borrow_mut().put_ring(index, &ring));
    let ring = RefCell::new(ring);
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&case(), |case| {
        let bench = &mut *bench.borrow_mut();
        let targets: Vec<Target> = (0..)
            .zip(&case.aims)
            .map(|(index, aim)| {
                let mut target = match aim.device {
                    "none" => bench.put_target(index, 0, aim.flags),
                    "missing" => bench.put_target(index, NO_DEVICE, aim.flags),
                    "stream" => bench.put_target(index, 0, aim.flags | TARGET_STREAM),
                    device => bench.put_device(index, device, aim.flags),
                };
                if let Some(byte) = aim.collector {
                    target.flags |= TARGET_GUARDED;
                    target.collector = [byte; 6];
                    target.bridge = aim.bridge;
                }
                if let Some(until) = aim.unread {
                    target.flags |= TARGET_WHEN_READ;
                    bench.put_unread(index, until);
                }
                bench.put(index, target)
            })
            .collect();
        let tap = Tap { bridge: case.bridge, ..tap(at(case.peer), &case.sessions) };
        let other = bench.lab.ifindex("idlep");
        bench.put_entry(&tap);
        bench.put_entry_of(other, &tap);
        for id in 0..8 {
            bench.reset(id);
            bench.put_returned(id, bench.taken(id));
        }
        while ring.borrow_mut().next().is_some() {}
        let ingress_ifindex = match case.from {
            From::Nowhere => 0,
            _ if is_always_here => 0,
            From::Here => bench.tap,
            From::Tap => other,
            From::Other => NO_DEVICE,
        };
        let packet = Frame::new([DESTINATION; 6], [SOURCE; 6]).filled(case.size, 0).bytes();
        bench.run_from(ingress_ifindex, case.hook, &packet, case.repeat);

        let mut model = Model {
            targets: &targets,
            aims: &case.aims,
            from: ingress_ifindex,
            size: case.size as u64,
            tc_index: 0,
            counted: BTreeMap::new(),
        };
        for _ in 0..case.repeat {
            let tc_index = model.tc_index;
            let packet = Packet { hook: case.hook, ifindex: bench.tap, tc_index };
            decide::mirror(&mut model, packet, &tap);
        }
        for id in 0..8 {
            prop_assert_eq!(
                bench.counted(id),
                model.counted.remove(&id).unwrap_or_default(),
                "session {}",
                id
            );
        }
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
}
