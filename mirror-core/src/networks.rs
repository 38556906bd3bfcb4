//! [`Networks`]: the network of each NIC of a pod, from an annotation of the pod.
//!
//! Pure. A pod source parses the JSON of the annotation and passes its entries; this module validates them, and
//! keeps a bounded number. `select` uses the networks for display, and to find the NICs of the attachments in
//! Kube-OVN's annotations. No other decision uses them, because the author of a pod can write the annotation.

use std::collections::BTreeMap;

use mirror_common::abi::MAX_NETWORK;

use crate::destination::device_name;

/// Maximum number of NICs whose network is kept.
const MOST: usize = 32;
/// Maximum bytes of the namespace in the name of a network.
const NAMESPACE_MAX: usize = 63;
/// Maximum bytes of the rest of the name, as for a Kubernetes object.
const NAME_MAX: usize = 253;
/// Maximum number of characters of an invalid name that a message repeats.
const REPEATED: usize = 64;

const _: () = assert!(NAMESPACE_MAX + 1 + NAME_MAX <= MAX_NETWORK);

/// An entry of the annotation: one NIC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name of the network.
    pub network: Option<&'a str>,
    /// The name of the NIC inside the pod.
    pub nic: Option<&'a str>,
}

/// The network of each NIC of a pod, by the name of the NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    of_nics: BTreeMap<String, String>,
    /// The first problem of the annotation.
    problem: Option<String>,
    is_told: bool,
}

impl Networks {
    /// Reads the entries of an annotation. If two entries name the same NIC, the first is used.
    pub fn of<'a>(entries: impl IntoIterator<Item = Entry<'a>>) -> Self {
        let mut networks = Self { is_told: true, ..Self::default() };
        for entry in entries {
            if let Err(problem) = networks.add(entry) {
                networks.problem.get_or_insert(problem);
            }
        }
        networks
    }

    /// No networks, because the annotation as a whole is invalid.
    pub fn unreadable(problem: String) -> Self {
        Self { problem: Some(problem), is_told: true, ..Self::default() }
    }

    /// The network of a NIC.
    pub fn of_nic(&self, nic: &str) -> Option<&str> {
        self.of_nics.get(nic).map(String::as_str)
    }

    /// The NICs, each with its network.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.of_nics.iter().map(|(nic, network)| (nic.as_str(), network.as_str()))
    }

    /// Whether the pod has the annotation. Multus writes it after the pod was created.
    pub const fn is_told(&self) -> bool {
        self.is_told
    }

    /// Why the first invalid entry was left out; or why there are no entries.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn add(&mut self, Entry { network, nic }: Entry<'_>) -> Result<(), String> {
        // Some CNI plugins do not report the NIC of the pod's first network.
        let Some(nic) = nic.filter(|nic| !nic.is_empty()) else { return Ok(()) };
        let nic = device_name(nic).map_err(|why| format!("an entry names the NIC {}: {why}", short(nic)))?;
        let network = network.ok_or_else(|| format!("the entry of the NIC {nic:?} names no network"))?;
        if !is_network(network) {
            return Err(format!(
                "the entry of the NIC {nic:?} names the network {}, which is no NAME and no NAMESPACE/NAME",
                short(network)
            ));
        }
        match self.of_nics.get(&nic) {
            Some(first) if first == network => Ok(()),
            Some(first) => {
                Err(format!("a second entry of the NIC {nic:?} names the network {network}, and not {first}"))
            }
            None if self.of_nics.len() == MOST => {
                Err(format!("the NIC {nic:?} exceeds the limit of {MOST} NICs"))
            }
            None => {
                self.of_nics.insert(nic, network.to_owned());
                Ok(())
            }
        }
    }
}

/// Shortens an invalid name for a message.
fn short(name: &str) -> String {
    let shown: String = name.chars().take(REPEATED).collect();
    if shown.len() < name.len() { format!("{shown:?}…") } else { format!("{shown:?}") }
}

/// Whether a text can be the name of a network: of a NetworkAttachmentDefinition with its namespace, or of a CNI
/// configuration (CNI specification, section 1).
fn is_network(text: &str) -> bool {
    let (namespace, name) = match text.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, text),
    };
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let is_word = |word: &str, most: usize| {
        word.len() <= most
            && word.bytes().all(is_inner)
            && word.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
    };
    namespace.is_none_or(|namespace| is_word(namespace, NAMESPACE_MAX)) && is_word(name, NAME_MAX)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    fn entry<'a>(network: &'a str, nic: &'a str) -> Entry<'a> {
        Entry { network: Some(network), nic: Some(nic) }
    }

    #[test]
    fn the_network_of_each_nic_is_known() {
        // Multus writes this with Calico, which does not name its NIC.
        let networks = Networks::of([
            Entry { network: Some("k8s-pod-network"), nic: None },
            entry("shop/fast", "net1"),
            entry("shop/fast", "net2"),
        ]);
        assert_eq!(networks.iter().collect::<Vec<_>>(), [("net1", "shop/fast"), ("net2", "shop/fast")]);
        assert_eq!((networks.of_nic("net1"), networks.of_nic("eth0")), (Some("shop/fast"), None));
        assert_eq!((networks.is_told(), networks.problem()), (true, None));
        assert!(!Networks::default().is_told());
    }

    #[test]
    fn an_entry_that_cannot_be_is_left_out_alone_with_a_reason() {
        let long = "n".repeat(MAX_NETWORK);
        let table = [
            (entry("shop/fast", "a b"), "the NIC \"a b\": an interface name has 1 to 15 bytes"),
            (entry("shop/fast", "\u{1b}[2J"), ""),
            (entry("shop/fast", &long), "nnn\"…: an interface name"),
            (Entry { network: None, nic: Some("net9") }, "the entry of the NIC \"net9\" names no network"),
            (entry("", "net9"), "names the network \"\", which is no NAME and no NAMESPACE/NAME"),
            (entry("shop/", "net9"), "the network \"shop/\""),
            (entry("a/b/c", "net9"), "the network \"a/b/c\""),
            (entry("-a", "net9"), "the network \"-a\""),
            (entry("a\nb", "net9"), "the network \"a\\nb\""),
            (entry(&long, "net9"), "nnn\"…, which is no NAME"),
            (
                entry("shop/slow", "net1"),
                "a second entry of the NIC \"net1\" names the network shop/slow, and not shop/fast",
            ),
        ];
        for (odd, problem) in table {
            let networks = Networks::of([entry("shop/fast", "net1"), odd, entry("shop/other", "net2")]);
            let kept = [networks.of_nic("net1"), networks.of_nic("net2")];
            assert_eq!(kept, [Some("shop/fast"), Some("shop/other")], "{odd:?}");
            if problem.is_empty() {
                // The kernel accepts this name.
                assert_eq!((networks.iter().count(), networks.problem()), (3, None));
                continue;
            }
            let told = networks.problem().unwrap_or_default();
            assert!(told.contains(problem) && told.len() < 300, "{told}");
            assert_eq!(networks.iter().count(), 2, "{odd:?}");
        }
    }

    #[test]
    fn of_two_networks_of_a_nic_the_first_counts_and_the_same_one_twice_is_no_problem() {
        let networks = Networks::of([entry("a", "net1"), entry("a", "net1"), entry("b", "net1")]);
        assert_eq!(networks.iter().collect::<Vec<_>>(), [("net1", "a")]);
        assert!(networks.problem().is_some());
        assert_eq!(Networks::of([entry("a", "net1"), entry("a", "net1")]).problem(), None);
    }

    proptest! {
        /// For any entries, the result is bounded, can be written into the maps, and comes from an entry. Entries that
        /// are left out are reported.
        #[test]
        fn what_is_kept_is_bounded_and_was_said(
            entries in vec(
                (option::of(prop_oneof!["[a-z.]{1,4}(/[a-z]{1,3})?", any::<String>()]),
                 option::of(prop_oneof!["net[0-9]{1,2}", any::<String>()])),
                0..100,
            ),
        ) {
            let said = |(network, nic): &(Option<String>, Option<String>)| {
                Some((nic.clone()?, network.clone()?))
            };
            let given = entries.iter().map(|(network, nic)| Entry { network: network.as_deref(), nic: nic.as_deref() });
            let networks = Networks::of(given);
            prop_assert!(networks.iter().count() <= MOST);
            for (nic, network) in networks.iter() {
                let first = entries.iter().filter_map(said).find(|(of, network)| of == nic && is_network(network));
                prop_assert_eq!(first, Some((nic.to_owned(), network.to_owned())));
                prop_assert!(nic.len() <= 15 && network.len() <= MAX_NETWORK);
                prop_assert!(!network.contains(|char: char| char.is_control() || char.is_whitespace()));
            }
            let is_whole = entries.iter().all(|(network, nic)| match nic.as_deref() {
                None | Some("") => true,
                Some(nic) => networks.of_nic(nic).is_some() && networks.of_nic(nic) == network.as_deref(),
            });
            prop_assert_eq!(networks.problem().is_none(), is_whole);
            prop_assert!(networks.problem().is_none_or(|problem| problem.len() < 2000));
        }
    }
}
