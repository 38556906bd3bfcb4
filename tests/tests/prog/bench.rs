//! Loads the programs in a network namespace of its own, with devices to tap and devices for the copies.

mod programs;

use std::{
    collections::{BTreeMap, BTreeSet},
    io, mem,
};

use aya::{
    TestRun, TestRunOptions,
    maps::{Array, ArrayOfMaps, HashMap, MapData, PerCpuArray, PerCpuValues, RingBuf},
    programs::{SchedClassifier, TcAttach, TcAttachType, tc::NlOptions},
    util::nr_cpus,
};
use mirror_agent::kernel::dataplane::filter_programs::FilterProgram;
use mirror_common::{
    abi::{
        Delivery, DeviceKey, MAX_FORMS, Session, SessionCounters, TARGET_CUTS, TARGET_QUEUELESS, TARGET_UP,
        Tap, Target,
    },
    limit::{Level, Limits, Meter},
    verdict::{Direction, Hook, Misfit, TapKind, Verdict},
};
use mirror_core::filter::{Program, ebpf::translate};
use mirror_tests::{FrameSocket, Lab, SOON, check, eventually};

use self::programs::{Lent, lend};

/// Return value of the programs: `TC_ACT_UNSPEC`, the next program decides.
const UNSPEC: u32 = -1_i32 as u32;

/// Counted packets and bytes by direction and verdict, without counters that are zero.
pub(crate) type Counted = BTreeMap<(Direction, Verdict), (u64, u64)>;

/// Both directions, as in [`Session::directions`].
pub(crate) const BOTH: u32 = 3;
/// Flags of a target that accepts whole copies and cut copies.
pub(crate) const READY: u32 = TARGET_UP | TARGET_QUEUELESS | TARGET_CUTS;

/// A map value with the kernel's layout.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
struct Value<T>(T);
/// A meter after its lock.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Locked {
    _lock: u64,
    meter: Meter,
}
// SAFETY: the wire types are plain bytes without padding (`mirror-common` has zerocopy prove it).
unsafe impl aya::Pod for Value<DeviceKey> {}
// SAFETY: as above.
unsafe impl aya::Pod for Value<Tap> {}
// SAFETY: as above.
unsafe impl aya::Pod for Value<Target> {}
// SAFETY: as above.
unsafe impl aya::Pod for Value<Delivery> {}
// SAFETY: as above.
unsafe impl aya::Pod for Value<SessionCounters> {}
// SAFETY: as above.
unsafe impl aya::Pod for Value<Limits> {}
// SAFETY: as above; the lock and its padding are plain bytes, too.
unsafe impl aya::Pod for Value<Locked> {}

/// Programs, maps and devices of one test. The devices are veths: the tests send packets through `tap`, `target0` and
/// `target1` are up, and `idle` is down.
pub(crate) struct Bench {
    ebpf: Lent,
    /// Devices with a clsact qdisc.
    hooked: BTreeSet<String>,
    pub(crate) lab: Lab,
    pub(crate) tap: u32,
}

impl Bench {
    pub(crate) fn new(story: &str) -> Self {
        Self::with_filters(story, true)
    }

    /// As [`Bench::new`], but `calls_filters` says whether the kernel allows the programs to call filters.
    pub(crate) fn with_filters(story: &str, calls_filters: bool) -> Self {
        let lab = Lab::new(story);
        for device in ["tap", "target0", "target1", "idle"] {
            // The largest MTU: a veth refuses frames that its peer could not receive.
            lab.node().ip(&format!("link add {device} mtu 65535 type veth peer name {device}p mtu 65535"));
            for end in [device, &format!("{device}p")] {
                lab.node().sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1");
                if device != "idle" {
                    lab.node().ip(&format!("link set {end} up"));
                }
            }
        }
        // A device drops outgoing packets until the kernel has seen its carrier, up to a second later on a busy
        // machine.
        for device in ["tap", "target0", "target1"] {
            eventually(SOON, || {
                let link = lab.node().ip(&format!("-o link show dev {device}"));
                check(link.contains("state UP"), || link)
            });
        }
        let (ebpf, tap) = (lend(&lab, calls_filters), lab.ifindex("tap"));
        Self { ebpf, hooked: BTreeSet::new(), lab, tap }
    }

    /// Writes the entry of the tapped device. Sessions with the same target and snap length have the same form.
    pub(crate) fn put_tap(&mut self, kind: TapKind, sessions: &[Session]) -> Tap {
        let mut sessions = sessions.to_vec();
        for place in 0..sessions.len() {
            let (ahead, rest) = sessions.split_at_mut(place);
            let form = (rest[0].target, rest[0].snaplen);
            let alike = ahead.iter().map(|other| (other.target, other.snaplen) == form);
            rest[0].alike = alike.enumerate().map(|(place, is_alike)| u32::from(is_alike) << place).sum();
        }
        let tap = tap(kind, &sessions);
        self.put_entry(&tap);
        tap
    }

    /// Writes the entry of the tapped device.
    pub(crate) fn put_entry(&mut self, tap: &Tap) {
        self.put_entry_of(self.tap, tap);
    }

    /// Writes the entry of any device.
    pub(crate) fn put_entry_of(&mut self, ifindex: u32, tap: &Tap) {
        let mut taps: HashMap<_, Value<DeviceKey>, Value<Tap>> =
            self.ebpf.map_mut("TAPS").unwrap().try_into().unwrap();
        taps.insert(&Value(DeviceKey { netns: 0, ifindex }), &Value(*tap), 0).unwrap();
    }

    pub(crate) fn put_target(&mut self, index: u32, ifindex: u32, flags: u32) -> Target {
        self.put(index, Target { ifindex, flags, ..Target::default() })
    }

    /// Writes a target with all of its fields.
    pub(crate) fn put(&mut self, index: u32, target: Target) -> Target {
        let mut targets: Array<_, Value<Target>> = self.ebpf.map_mut("TARGETS").unwrap().try_into().unwrap();
        targets.set(index, &Value(target), 0).unwrap();
        target
    }

    /// Writes a target that is a device of the bench.
    pub(crate) fn put_device(&mut self, index: u32, device: &str, flags: u32) -> Target {
        self.put_target(index, self.lab.ifindex(device), flags)
    }

    /// Announces a copy on every CPU, as a tap does on its own CPU.
    pub(crate) fn announce(&mut self, delivery: Delivery) {
        let all = vec![Value(delivery); nr_cpus().unwrap().get() as usize];
        self.deliveries().set(0, PerCpuValues::try_from(all).unwrap(), 0).unwrap();
    }

    /// The second stage's notes on the announced copies: [`Delivery::uncut`], per CPU.
    pub(crate) fn noted(&mut self) -> Vec<u32> {
        self.deliveries().get(&0, 0).unwrap().iter().map(|Value(delivery)| delivery.uncut).collect()
    }

    fn deliveries(&mut self) -> PerCpuArray<&mut MapData, Value<Delivery>> {
        self.ebpf.map_mut("DELIVERY").unwrap().try_into().unwrap()
    }

    /// Gives a target a ring.
    pub(crate) fn put_ring(&mut self, index: u32, ring: &RingBuf<MapData>) {
        let mut streams: ArrayOfMaps<_, RingBuf<MapData>> =
            self.ebpf.map_mut("STREAMS").unwrap().try_into().unwrap();
        streams.set(index, ring, 0).unwrap();
    }

    /// Writes the time until which a target has no reader: ns of the monotonic clock.
    pub(crate) fn put_unread(&mut self, index: u32, until: u64) {
        let mut unread: Array<_, u64> = self.ebpf.map_mut("UNREAD").unwrap().try_into().unwrap();
        unread.set(index, &until, 0).unwrap();
    }

    /// Bytes that a session has taken of its ring.
    pub(crate) fn taken(&self, session: u32) -> u64 {
        let taken: Array<_, u64> = self.ebpf.map("TAKEN").unwrap().try_into().unwrap();
        taken.get(&session, 0).unwrap()
    }

    /// Writes the number of these bytes that the reader has returned.
    pub(crate) fn put_returned(&mut self, session: u32, bytes: u64) {
        let mut returned: Array<_, u64> = self.ebpf.map_mut("RETURNED").unwrap().try_into().unwrap();
        returned.set(session, &bytes, 0).unwrap();
    }

    pub(crate) fn put_filter(&mut self, place: u32, filter: &Program) {
        let program = FilterProgram::load(&translate(filter).unwrap()).unwrap();
        self.ebpf.filters().set(place, &program).unwrap();
    }

    pub(crate) fn clear_filter(&mut self, place: u32) {
        self.ebpf.filters().clear(place).unwrap();
    }

    /// Writes limits of a level.
    pub(crate) fn put_limits(&mut self, level: Level, place: u32, limits: Limits) {
        let mut all: Array<_, Value<Limits>> = self.ebpf.map_mut("LIMITS").unwrap().try_into().unwrap();
        all.set(level.limits(place), &Value(limits), 0).unwrap();
    }

    /// The number of packets in a meter of a level.
    pub(crate) fn used(&self, level: Level, place: u32) -> u64 {
        let meters: Array<_, Value<Locked>> = self.ebpf.map("METERS").unwrap().try_into().unwrap();
        meters.get(&level.meter(place), 0).unwrap().0.meter.packets
    }

    /// The numbers of packets in the meters of a pod's ceiling, of its share, and of the node.
    pub(crate) fn used_by_pod(&self, pod: u32) -> [u64; 3] {
        [self.used(Level::Pod, pod), self.used(Level::Share, pod), self.used(Level::Node, 0)]
    }

    /// Attaches a program to a hook of a device, as a filter of the clsact qdisc, which every kernel supports.
    pub(crate) fn attach(&mut self, name: &str, device: &str, hook: Hook) {
        let program: &mut SchedClassifier = self.ebpf.program_mut(name).unwrap().try_into().unwrap();
        if program.fd().is_err() {
            program.load().unwrap_or_else(|error| panic!("the verifier refuses {name}: {error:#}"));
        }
        let attach_type = match hook {
            Hook::Ingress => TcAttachType::Ingress,
            Hook::Egress => TcAttachType::Egress,
        };
        let options = NlOptions { priority: 1, ..NlOptions::default() };
        let how = TcAttach::Netlink { parent: attach_type.into(), options };
        if self.hooked.insert(device.to_owned()) {
            self.lab.node().tc(&format!("qdisc add dev {device} clsact"));
        }
        let ifindex = self.lab.ifindex(device);
        let link = self.lab.node().enter(|| program.attach(ifindex, how)).unwrap();
        // The qdisc is deleted with its filters. The link would delete the filter in the namespace of its thread.
        mem::forget(program.take_link(link).unwrap());
    }

    /// The number of instructions that the verifier has processed, if the kernel reports it.
    pub(crate) fn verified(&mut self, name: &str) -> Option<u32> {
        let program: &mut SchedClassifier = self.ebpf.program_mut(name).unwrap().try_into().unwrap();
        program.info().unwrap().verified_instruction_count()
    }

    /// Sets a session's counters to zero.
    pub(crate) fn reset(&mut self, session: u32) {
        let zeros = vec![Value(SessionCounters::default()); nr_cpus().unwrap().get() as usize];
        let mut counters: PerCpuArray<_, Value<SessionCounters>> =
            self.ebpf.map_mut("COUNTERS").unwrap().try_into().unwrap();
        counters.set(session, PerCpuValues::try_from(zeros).unwrap(), 0).unwrap();
    }

    /// The copies of a session that differ from its settings: packets and bytes, over both directions.
    pub(crate) fn misfit(&self, session: u32, misfit: Misfit) -> (u64, u64) {
        let counters: PerCpuArray<_, Value<SessionCounters>> =
            self.ebpf.map("COUNTERS").unwrap().try_into().unwrap();
        let counters = counters.get(&session, 0).unwrap();
        let of = |cpu: &SessionCounters| Direction::ALL.map(|direction| cpu.misfits(direction, misfit));
        let each = counters.iter().flat_map(|Value(cpu)| of(cpu));
        each.fold((0, 0), |sum, counter| (sum.0 + counter.packets, sum.1 + counter.bytes))
    }

    /// The bytes of a session's copies, over both directions.
    pub(crate) fn copied_bytes(&self, session: u32) -> u64 {
        let counters: PerCpuArray<_, Value<SessionCounters>> =
            self.ebpf.map("COUNTERS").unwrap().try_into().unwrap();
        let counters = counters.get(&session, 0).unwrap();
        let of = |cpu: &SessionCounters| Direction::ALL.map(|direction| cpu.copied_bytes(direction));
        counters.iter().flat_map(|Value(cpu)| of(cpu)).sum()
    }

    /// The counters of a session, summed over all CPUs. A counter without a verdict must be zero.
    pub(crate) fn counted(&self, session: u32) -> Counted {
        let counters: PerCpuArray<_, Value<SessionCounters>> =
            self.ebpf.map("COUNTERS").unwrap().try_into().unwrap();
        let mut counted = Counted::new();
        for Value(cpu) in counters.get(&session, 0).unwrap().iter() {
            for direction in Direction::ALL {
                for verdict in Verdict::ALL {
                    let counter = cpu.packets(direction, verdict);
                    let sum = counted.entry((direction, verdict)).or_default();
                    *sum = (sum.0 + counter.packets, sum.1 + counter.bytes);
                }
            }
        }
        counted.retain(|_, sum| *sum != (0, 0));
        counted
    }

    /// Runs the program of `hook` on `packet` on the tapped device, `times` times. It is the same packet each time, so
    /// it carries its mark in the next run. After each run checks the program's return value, and that the packet is
    /// unchanged.
    #[track_caller]
    pub(crate) fn run(&self, hook: Hook, packet: &[u8], times: u32) {
        self.try_run(hook, packet, times).unwrap_or_else(|error| panic!("{} bytes: {error}", packet.len()));
    }

    /// As [`Bench::run`], for a packet that the node has received last at the device `from`, or has created itself if
    /// `from` is 0.
    #[track_caller]
    pub(crate) fn run_from(&self, from: u32, hook: Hook, packet: &[u8], times: u32) {
        self.try_run_from(from, hook, packet, times)
            .unwrap_or_else(|error| panic!("{} bytes from {from}: {error}", packet.len()));
    }

    /// As [`Bench::run`], for packets that the kernel may refuse to create.
    #[track_caller]
    pub(crate) fn try_run(&self, hook: Hook, packet: &[u8], times: u32) -> io::Result<()> {
        self.try_run_from(0, hook, packet, times)
    }

    /// As [`Bench::run_from`], for packets that the kernel may refuse to create.
    #[track_caller]
    pub(crate) fn try_run_from(&self, from: u32, hook: Hook, packet: &[u8], times: u32) -> io::Result<()> {
        let name = match hook {
            Hook::Ingress => "tap_ingress",
            Hook::Egress => "tap_egress",
        };
        let program: &SchedClassifier = self.ebpf.program(name).unwrap().try_into().unwrap();
        // `__sk_buff` up to and including `ifindex`; the kernel assumes zeros for the rest.
        let mut context = [0_u8; 44];
        context[36..40].copy_from_slice(&from.to_ne_bytes());
        context[40..].copy_from_slice(&self.tap.to_ne_bytes());
        let mut after = vec![0; packet.len() + 64];
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut after),
            ctx_in: Some(&context),
            repeat: times,
            ..TestRunOptions::default()
        };
        // The kernel looks up the device in the caller's namespace.
        let result = self.lab.node().enter(|| program.test_run(options));
        let result = match result {
            Ok(result) => result,
            Err(aya::programs::ProgramError::SyscallError(error)) => return Err(error.io_error),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(result.return_value, UNSPEC, "the packet goes on to the next program");
        assert_eq!(&after[..result.data_size_out as usize], packet, "the packet is as it was");
        Ok(())
    }

    /// Makes `tap` and `idle` ports of a bridge, with the tap programs at the hooks that a packet from `tapp` passes.
    /// Returns the index of `idle`.
    #[track_caller]
    pub(crate) fn bridged(&mut self) -> u32 {
        self.attach("tap_ingress", "tap", Hook::Ingress);
        self.attach("tap_egress", "idle", Hook::Egress);
        self.lab.bridge("br0");
        let node = self.lab.node();
        for port in ["tap", "idle"] {
            node.ip(&format!("link set {port} up master br0"));
        }
        node.ip("link set idlep up");
        // A bridge that calls iptables drops packets with invalid headers.
        for family in ["ip", "ip6"] {
            node.try_run(&format!("sysctl -q net.bridge.bridge-nf-call-{family}tables=0"));
        }
        self.lab.ifindex("idle")
    }

    /// Listens on a device for the copies that arrive there. When a test run returns, all its copies have arrived: a
    /// veth sends in the sender's context, and a packet socket gets the packet at once.
    pub(crate) fn listen(&self, device: &str) -> FrameSocket {
        self.lab.node().listener(device)
    }
}

/// Takes the programs off the devices, so that no late packet reaches them in another test.
impl Drop for Bench {
    fn drop(&mut self) {
        for device in &self.hooked {
            self.lab.node().try_run(&format!("tc qdisc delete dev {device} clsact"));
        }
    }
}

/// The expected counters for packets of this length.
pub(crate) fn counted(bytes: usize, expected: &[(Direction, Verdict, u64)]) -> Counted {
    let count = |&(direction, verdict, packets)| ((direction, verdict), (packets, packets * bytes as u64));
    expected.iter().map(count).collect()
}

/// A session of `directions` with the counters `id`, which copies whole packets to target `target`. The first targets
/// have a mark.
pub(crate) const fn session(id: u32, target: u32, directions: u32) -> Session {
    Session {
        id,
        settings: id,
        target,
        directions,
        flags: 0,
        filter: 0,
        sample: 0,
        seed: 0,
        serial: 0,
        snaplen: 0,
        mark: if target < MAX_FORMS as u32 { 0x100 << target } else { 0 },
        alike: 0,
        key: 0,
    }
}

pub(crate) fn tap(kind: TapKind, sessions: &[Session]) -> Tap {
    let mut tap = Tap { kind: kind.wire(), session_count: sessions.len() as u32, ..Tap::default() };
    tap.sessions[..sessions.len()].copy_from_slice(sessions);
    tap
}

/// The kind of a tap: on the node side of a pod's veth, or on an interface.
pub(crate) const fn at(peer: bool) -> TapKind {
    if peer { TapKind::HostVeth } else { TapKind::Interface }
}
