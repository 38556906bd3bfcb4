//! [`Route`]: decides on which side of a veth its tap sees ingress.
//!
//! Every packet that a pod receives passes the NIC inside the pod. A tap on the node side of the veth misses packets
//! that `bpf_redirect_peer` delivers. But it needs nothing inside the pod and costs less, so the node side is the
//! default. The tap moves to the NIC at once if programs of a known CNI are on the node side. It also moves there if it
//! missed packets on the node side, and moves back when no packet has bypassed the node side for some time.
//!
//! Pure: the loop passes the counters, reading by reading.

use std::{fmt, time::Duration};

use super::{CLEAR, Carried, FEW};

/// Maximum time without a packet past the node side before the tap returns there.
pub const LONGEST: Duration = Duration::from_secs(3600);

/// The CNIs whose programs, in some modes, deliver packets to pods past the node sides of their veths, by the prefixes of
/// the programs' names: Cilium with eBPF host routing, and Calico with its eBPF dataplane. The kernel keeps 15 bytes of a
/// name.
const CNIS: [(&str, &str); 3] = [("cil_", "Cilium"), ("cali_", "Calico"), ("calico_", "Calico")];

/// The name of the CNI that has a program of this name on the node side of a veth.
pub fn cni_of(program: &str) -> Option<&'static str> {
    CNIS.into_iter().find(|(prefix, _)| program.starts_with(prefix)).map(|(_, cni)| cni)
}

/// Why ingress is seen at the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Programs of this CNI are on the node side.
    Cni(&'static str),
    /// Packets have bypassed the node side.
    Around,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cni(cni) => write!(
                f,
                "programs of {cni} are at the node side of the veth, and can deliver packets to the pod past it"
            ),
            Self::Around => {
                write!(f, "packets have got to the pod around the node's end of the veth (bpf_redirect_peer)")
            }
        }
    }
}

/// The state of one veth.
#[derive(Debug, Clone)]
pub struct Route {
    cni: Option<&'static str>,
    /// The NIC's counters include the packets that bypass the node side.
    tells: bool,
    /// The node side has a hook for packets to the pod. Without it, a tap that returns would see none of them.
    has_hook: bool,
    is_around: bool,
    /// The first reading after the last packet that bypassed the node side.
    since: Option<(Duration, Carried)>,
    returns: u32,
}

impl Route {
    /// The state of a veth. `cni`: the CNI whose programs are already on the node side. `tells`: the NIC's counters
    /// include the packets that bypass the node side. `is_inside`: the installed tap sees ingress at the NIC, because
    /// an earlier agent had a reason for it.
    pub fn new(cni: Option<&'static str>, tells: bool, is_inside: bool) -> Self {
        Self { cni, tells, has_hook: true, is_around: is_inside, since: None, returns: 0 }
    }

    /// Why ingress is seen at the NIC. `None`: it is seen on the node side.
    pub fn inside(&self) -> Option<Reason> {
        self.cni.map(Reason::Cni).or_else(|| self.is_around.then_some(Reason::Around))
    }

    /// Whether the CNI is known.
    pub const fn knows_cni(&self) -> bool {
        self.cni.is_some()
    }

    /// Notes that programs of this CNI are on the node side.
    pub const fn learn(&mut self, cni: &'static str) {
        self.cni = Some(cni);
    }

    /// Notes whether the node side has a hook for packets to the pod.
    pub const fn note_hook(&mut self, has_hook: bool) {
        self.has_hook = has_hook;
    }

    /// Notes that the tap on the node side missed packets.
    pub fn bypassed(&mut self) {
        if !self.is_around {
            (self.is_around, self.since) = (true, None);
        }
    }

    /// Takes the ingress counters of the NIC.
    pub fn read(&mut self, carried: Carried, at: Duration) {
        let Some((since, then)) = self.since else {
            self.since = Some((at, carried));
            return;
        };
        match Carried::around(&then, &carried) {
            Some(0) => {
                let crossed = carried.nic.packets.saturating_sub(then.nic.packets);
                let is_over = crossed >= FEW && at.saturating_sub(since) >= self.quiet();
                if self.is_around && self.tells && self.has_hook && is_over {
                    self.is_around = false;
                    self.returns += 1;
                }
            }
            // A packet bypassed the node side, or the counters restarted.
            Some(_) | None => self.since = Some((at, carried)),
        }
    }

    /// The time without a packet past the node side after which the tap returns there. It doubles after each return, so
    /// that a pod with few such packets does not make the tap change sides again and again.
    fn quiet(&self) -> Duration {
        CLEAR.saturating_mul(2_u32.saturating_pow(self.returns)).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*, sample};

    use super::{super::Count, *};

    /// The counters after `crossed` packets over the node side and `around` packets past it.
    fn carried(crossed: u64, around: u64) -> Carried {
        let packets = crossed + around;
        Carried { nic: Count { packets, bytes: packets * 100 }, end: Some([crossed; 2]) }
    }

    /// The steps of a history: packets over the node side, packets past it, seconds.
    fn steps() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
        let around = prop_oneof![4 => Just(0u64), 1 => 1..30u64];
        vec((0..30u64, around, 1..40u64), 1..60)
    }

    proptest! {
        /// In any history, packets past the node side move the tap to the NIC at once. Only a long time without such
        /// packets leads back, and each time it is longer.
        #[test]
        fn it_goes_at_once_and_comes_back_late(steps in steps(), tells: bool, was_inside: bool) {
            let mut route = Route::new(None, tells, was_inside);
            let (mut at, mut crossed, mut around) = (0, 0, 0);
            route.read(carried(0, 0), Duration::ZERO);
            // Counted since the last packet past the node side.
            let (mut quiet, mut clean, mut returns) = (0, 0, 0);
            for (more, bypass, seconds) in steps {
                (at, crossed, around) = (at + seconds, crossed + more, around + bypass);
                let before = route.inside();
                route.read(carried(crossed, around), Duration::from_secs(at));
                (quiet, clean) = if bypass > 0 { (0, 0) } else { (quiet + seconds, clean + more) };
                if bypass > 0 {
                    // The judge reports the bypass, if the counters include it.
                    if tells {
                        route.bypassed();
                        prop_assert_eq!(route.inside(), Some(Reason::Around));
                    }
                    prop_assert!(before.is_none() || route.inside().is_some(), "not now");
                } else if before.is_some() && route.inside().is_none() {
                    prop_assert!(tells && clean >= FEW && quiet >= (20 << returns), "{} s, {}", quiet, clean);
                    returns += 1;
                } else {
                    prop_assert_eq!(before, route.inside());
                }
            }
        }

        /// With a known CNI the side is fixed from its first program on, whatever the history.
        #[test]
        fn a_known_cni_has_one_side(
            steps in steps(), tells: bool, was_inside: bool, comes in 0..20_usize, name in sample::select(vec![
                "cil_from_contai", "cil_to_container", "cil_from_container-lxc1234", "cali_tc_preambl",
                "cali_tc_preambl:[17]", "calico_to_workl",
            ]),
        ) {
            let cni = cni_of(name);
            let mut route = Route::new(cni.filter(|_| comes == 0), tells, was_inside);
            let (mut at, mut crossed, mut around) = (0, 0, 0);
            for (index, (more, bypass, seconds)) in steps.into_iter().enumerate() {
                prop_assert_eq!(route.knows_cni(), index > comes || comes == 0);
                if let Some(cni) = cni.filter(|_| index == comes) {
                    route.learn(cni);
                }
                prop_assert!(index < comes || cni.is_some() && route.inside() == cni.map(Reason::Cni));
                (at, crossed, around) = (at + seconds, crossed + more, around + bypass);
                route.read(carried(crossed, around), Duration::from_secs(at));
            }
        }

        /// A counter that restarted proves nothing.
        #[test]
        fn other_counters_are_compared_with_none_before(first in option::of(0..99u64), then in 0..9u64) {
            let mut route = Route::new(None, true, true);
            first.into_iter().for_each(|first| route.read(carried(first + 99, first), Duration::ZERO));
            route.read(carried(then, 0), Duration::from_secs(30));
            prop_assert_eq!(route.inside(), Some(Reason::Around));
        }
    }

    #[test]
    fn a_tap_does_not_return_to_a_node_side_without_a_hook() {
        let mut route = Route::new(None, true, true);
        route.read(carried(0, 0), Duration::ZERO);
        for (has_hook, inside) in [(false, Some(Reason::Around)), (true, None)] {
            route.note_hook(has_hook);
            route.read(carried(FEW, 0), LONGEST);
            assert_eq!(route.inside(), inside);
        }
    }

    #[test]
    fn other_programs_are_no_known_cni() {
        for name in ["", "tap_ingress", "neighbour", "behind", "cilium", "xcil_from"] {
            assert_eq!(cni_of(name), None, "{name}");
        }
    }

    #[test]
    fn the_time_of_a_return_doubles_up_to_an_hour() {
        let mut route = Route::new(None, true, false);
        let mut quiet = Vec::new();
        for returns in [0, 1, 2, 7, 8, 40] {
            route.returns = returns;
            quiet.push(route.quiet().as_secs());
        }
        assert_eq!(quiet, [20, 40, 80, 2560, 3600, 3600]);
    }
}
