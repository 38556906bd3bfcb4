//! The NICs of a pod: which devices inside it are NICs, and which of them a mirror copies ([`Nics`]).
//!
//! Pure. `choose` parses them from annotations, `select` finds them inside the pod.

use std::collections::BTreeSet;

use crate::{
    destination::device_name,
    exit::is_exit,
    model::{Link, LinkKind},
};

/// Maximum number of names in an annotation. Each can become an Event.
const MOST: usize = 32;

/// A set of NICs inside a pod, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nics {
    /// The NICs in the set. `None`: all of the pod's.
    only: Option<BTreeSet<String>>,
    /// The NICs that are excluded.
    but: BTreeSet<String>,
}

impl Nics {
    /// The NICs with these names.
    pub(super) fn only(names: BTreeSet<String>) -> Self {
        Self { only: Some(names), but: BTreeSet::new() }
    }

    /// All NICs except these.
    pub(super) fn all_but(names: BTreeSet<String>) -> Self {
        Self { only: None, but: names }
    }

    /// Uses the names of `less_specific` if this set names no NICs.
    pub(super) fn or(self, less_specific: Self) -> Self {
        Self { only: self.only.or(less_specific.only), but: self.but }
    }

    /// Parses a list such as `eth0,net1`.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let names: Result<BTreeSet<_>, _> = text.split(',').map(|name| device_name(name.trim())).collect();
        match names {
            Ok(names) if names.len() > MOST => Err(format!("it has more than {MOST} names")),
            Ok(names) => Ok(Self::only(names)),
            Err(why) => Err(format!("{why}; use names as in eth0,net1")),
        }
    }

    /// Whether the mirror copies the NIC of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|names| names.contains(name)) && !self.but.contains(name)
    }

    /// The names of the NICs that the mirror requests. Empty if it requests all.
    pub(super) fn named(&self) -> impl Iterator<Item = &str> {
        self.only.iter().flatten().map(String::as_str)
    }
}

/// Whether a device inside a pod is a NIC. A veth is a NIC in any state, and so is a device that an annotation names.
/// Any other device is a NIC if it is up, because every namespace has unused fallback tunnel devices (`tunl0`, `sit0`
/// and so on).
pub(super) fn is_nic(link: &Link, is_named: bool) -> bool {
    match link.kind {
        _ if is_exit(link) => false,
        LinkKind::Loopback => false,
        LinkKind::Veth => true,
        LinkKind::Dummy | LinkKind::Ifb | LinkKind::IpvlanL3s | LinkKind::Other(_) => link.up || is_named,
    }
}

/// The original name of a renamed NIC, by which annotations and Multus know it. KubeVirt's bridge binding renames the
/// NIC of a VM's pod, `eth0` to `eth0-nic` and `pod37a8eec1ce1` to `37a8eec1ce1-nic`. It leaves a dummy device with the
/// original name, which carries no packets (`GenerateNewBridgedVmiInterfaceName` in KubeVirt's
/// `pkg/network/link/names.go`, and `bridgeBindingSpec` in `pkg/network/setup/netpod/netpod.go`).
pub(super) fn former_name<'a>(nic: &Link, links: &'a [Link]) -> Option<&'a str> {
    let stem = nic.name.strip_suffix("-nic").filter(|_| nic.kind != LinkKind::Dummy)?;
    let is_left = |link: &&Link| {
        let name = link.name.as_str();
        link.kind == LinkKind::Dummy && (name == stem || name.strip_prefix("pod") == Some(stem))
    };
    links.iter().find(is_left).map(|link| link.name.as_str())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeMap;

    use proptest::{collection::btree_set, option, prelude::*};

    use super::*;
    use crate::{
        model::{IfIndex, MirrorId, Name},
        select::{
            Filters, MIRROR, NICS, Policy, Why, choose, select,
            tests::{mk_node, mk_pod},
        },
    };

    #[test]
    fn names_are_read_as_people_write_them() {
        let nics = Nics::parse("eth0, net1").unwrap_or_default();
        assert_eq!(nics.named().collect::<Vec<_>>(), ["eth0", "net1"]);
        assert!(nics.has("net1") && !nics.has("net2") && !nics.has("net"));
        assert!(Nics::default().has("net2"));
        assert_eq!(Nics::default().named().count(), 0);
        for bad in ["", ",", "eth0,", "eth0 net1", "a/b", "a-name-that-is-too-long"] {
            assert!(Nics::parse(bad).is_err_and(|why| why.contains("as in eth0,net1")), "{bad}");
        }
        let many =
            |count: usize| (0..count).map(|number| format!("net{number}")).collect::<Vec<_>>().join(",");
        assert!(Nics::parse(&many(MOST)).is_ok());
        assert_eq!(Nics::parse(&many(MOST + 1)), Err("it has more than 32 names".to_owned()));
    }

    #[test]
    fn a_value_that_cannot_be_used_does_not_become_all() {
        let pods = [mk_pod("web", &[(MIRROR, "true"), (NICS, "eth0 eth1")])];
        let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
        assert_eq!((choice.wanted, choice.bad), (vec![], vec![]));
        let why = choice.refused[0].why.to_string();
        assert!(why.starts_with("annotation podmirror.io/nics \"eth0 eth1\":"), "{why}");
    }

    /// A pod of KubeVirt: the dummy with the former name of the veth is neither tapped nor reported.
    #[test]
    fn the_former_name_of_a_veth_means_the_veth() {
        let mut pod = mk_pod("web", &[(MIRROR, "true"), (NICS, "eth0")]);
        let mut links = mk_node(&[(&pod, 2, 100)]);
        let inside = links.pods.get_mut(&pod.id.uid).unwrap().as_mut().unwrap();
        let nic = inside.links.iter_mut().find(|link| link.name == "eth0").unwrap();
        let dummy = Link { ifindex: IfIndex(3), kind: LinkKind::Dummy, up: false, peer: None, ..nic.clone() };
        "eth0-nic".clone_into(&mut nic.name);
        inside.links.push(dummy);
        for name in ["eth0", "eth0-nic"] {
            pod.annotations.insert(NICS.to_owned(), name.to_owned());
            let pods = [pod.clone()];
            let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
            let selection = select(&choice.wanted, &[], &links, &Policy::default());
            let taps: Vec<_> = selection
                .taps
                .iter()
                .map(|(device, tap)| (device.is_on_node(), device.ifindex.0, tap.head.owner.nic.as_str()))
                .collect();
            assert_eq!((taps, selection.skipped), (vec![(true, 100, "eth0-nic")], vec![]), "{name}");
        }
    }

    /// The value of a mirror's annotation for these NICs.
    fn names(nics: &BTreeSet<u32>) -> String {
        nics.iter().map(|nic| format!("eth{nic}")).collect::<Vec<_>>().join(",")
    }

    proptest! {
        /// Each NIC has the mirrors that name it and those that name none. Each name without a NIC is reported.
        #[test]
        fn each_nic_has_the_mirrors_that_are_for_it(
            count in 1..5_u32,
            of_default in option::of(btree_set(0..6_u32, 1..4)),
            of_debug in option::of(btree_set(0..6_u32, 1..4)),
        ) {
            let debug = MirrorId("debug".parse::<Name>().unwrap());
            let mirrors = BTreeMap::from([(MirrorId::default(), &of_default), (debug, &of_debug)]);
            let mut pod = mk_pod("web", &[(MIRROR, "true"), ("podmirror.io/mirror.debug", "true")]);
            for (mirror, nics) in &mirrors {
                let key = if mirror.0.is_default() { NICS.to_owned() } else { format!("{NICS}.{mirror}") };
                pod.annotations.extend(nics.as_ref().map(|nics| (key, names(nics))));
            }
            let ends: Vec<_> = (0..count).map(|nic| (&pod, nic + 2, nic + 100)).collect();
            let links = mk_node(&ends);
            let pods = [pod.clone()];
            let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
            let selection = select(&choice.wanted, &[], &links, &Policy::default());
            for nic in 0..count {
                let expected: Vec<_> = mirrors
                    .iter()
                    .filter(|(_, nics)| nics.as_ref().is_none_or(|nics| nics.contains(&nic)))
                    .map(|(mirror, _)| mirror)
                    .collect();
                let tap = selection.taps.iter().find(|(device, _)| device.ifindex.0 == nic + 100);
                let found: Vec<_> = tap.iter().flat_map(|(_, tap)| tap.sessions.keys()).collect();
                prop_assert_eq!(found, expected);
            }
            let missing: usize = mirrors
                .values()
                .map(|nics| nics.iter().flatten().filter(|nic| **nic >= count).count())
                .sum();
            prop_assert_eq!(selection.skipped.len(), missing);
            prop_assert!(selection.skipped.iter().all(|skipped| skipped.why == Why::NoSuchNic));
        }
    }
}
