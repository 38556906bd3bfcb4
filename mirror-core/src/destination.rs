//! [`Destination`]: the administrator's configuration of a target, as in `--define-target NAME=DESTINATION`.
//!
//! Pure: parses and formats. `collector` and `mirror_iface` find the current device of a destination. The command line
//! calls [`parse_target`], and `kernel/dataplane/wire` stores the text of a destination in the maps.

use std::{collections::BTreeMap, fmt, str::FromStr};

use mirror_common::abi::MAX_DESTINATION;

use crate::{
    model::{Pod, TargetName},
    tunnel::Tunnel,
};

/// The destination of a target's copies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Destination {
    /// A device of the node, the mirror interface, by name. It is created if it is missing.
    Device(String),
    /// A pod of the node, the collector.
    Pod(PodNic),
    /// Another node or machine, through a tunnel.
    Tunnel(Tunnel),
    /// A ring buffer, for the one program that reads it: `mirror-agent tail --target`.
    Stream,
}

/// A NIC of a pod, with the pod given by name or label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodNic {
    /// `metadata.namespace`.
    pub namespace: String,
    /// The pod in the namespace.
    pub which: Which,
    /// The NIC's name inside the pod. `None`: the first NIC that leads to the node.
    pub nic: Option<String>,
}

/// Selects a pod of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Which {
    /// The pod with this `metadata.name`.
    Named(String),
    /// A pod with these labels: pods of a DaemonSet have random names.
    Labelled(BTreeMap<String, String>),
}

impl Which {
    /// Whether this selects a pod of the namespace.
    pub fn is(&self, pod: &Pod) -> bool {
        match self {
            Self::Named(name) => pod.id.name == *name,
            Self::Labelled(labels) => labels.iter().all(|(key, value)| pod.labels.get(key) == Some(value)),
        }
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Labelled(labels) => {
                let labels: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
                f.write_str(&labels.join(","))
            }
        }
    }
}

/// The prefix of a pod destination. The name of a device has no colon.
const POD: &str = "pod:";
/// Maximum length of the text of a pod: the maps hold it with its prefix.
const MAX_POD: usize = MAX_DESTINATION - POD.len();
/// The text of a stream. A device of this name cannot be configured as a target.
const STREAM: &str = "stream";

impl Default for Destination {
    fn default() -> Self {
        Self::Device(String::new())
    }
}

impl Destination {
    /// The name of the mirror interface.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::Device(name) => Some(name),
            Self::Pod(_) | Self::Tunnel(_) | Self::Stream => None,
        }
    }

    /// The tunnel.
    pub const fn tunnel(&self) -> Option<&Tunnel> {
        match self {
            Self::Tunnel(tunnel) => Some(tunnel),
            Self::Device(_) | Self::Pod(_) | Self::Stream => None,
        }
    }

    /// Whether this is a tunnel, whose copies the second stage addresses.
    pub const fn is_tunnel(&self) -> bool {
        self.tunnel().is_some()
    }

    /// The pod.
    pub const fn pod(&self) -> Option<&PodNic> {
        match self {
            Self::Pod(pod) => Some(pod),
            Self::Device(_) | Self::Tunnel(_) | Self::Stream => None,
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(name) => f.write_str(name),
            Self::Pod(pod) => write!(f, "{POD}{pod}"),
            Self::Tunnel(tunnel) => tunnel.fmt(f),
            Self::Stream => f.write_str(STREAM),
        }
    }
}

impl fmt::Display for PodNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, which, nic } = self;
        write!(f, "{namespace}/{which}")?;
        nic.iter().try_for_each(|nic| write!(f, "/{nic}"))
    }
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == STREAM => Ok(Self::Stream),
            None => device_name(text).map(Self::Device),
            Some((STREAM, _)) => Err(format!("{text:?}: a stream is named by {STREAM:?} alone")),
            Some(("pod", pod)) => pod_nic(pod).map(Self::Pod),
            Some((kind, tunnel)) if Tunnel::is_kind(kind) => Tunnel::parse(kind, tunnel).map(Self::Tunnel),
            Some((kind, _)) => Err(format!(
                "{kind:?} is not a kind of target: use the name of an interface, pod:NAMESPACE/NAME, a tunnel (vxlan, \
                 geneve, gre or erspan) as in vxlan:ADDRESS/vni=N, or stream"
            )),
        }
    }
}

/// Parses a target and its destination, as in `ids=ids0`, `ids=pod:security/suricata`, `ids=vxlan:10.9.0.5/vni=77` or
/// `live=stream`.
///
/// No destination contains a comma, so lists of targets can be separated by commas.
///
/// # Errors
///
/// A message for the user, with the part that is invalid.
pub fn parse_target(text: &str) -> Result<(TargetName, Destination), String> {
    let (name, destination) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} has no '=': use a name and a destination, as in ids=ids0"))?;
    Ok((TargetName(name.parse()?), destination.parse()?))
}

/// Checks the name of a device by the kernel's rules (`dev_valid_name()`).
///
/// # Errors
///
/// A message for the user.
pub fn device_name(name: &str) -> Result<String, String> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
    if name.is_empty() || name.len() > 15 || name == "." || name == ".." || name.contains(bad) {
        return Err("an interface name has 1 to 15 bytes, without spaces, '/' and ':'".into());
    }
    Ok(name.to_owned())
}

/// Parses `NAMESPACE/NAME` or `NAMESPACE/KEY=VALUE,KEY=VALUE`, with an optional `/NIC` at the end.
fn pod_nic(text: &str) -> Result<PodNic, String> {
    let (namespace, rest) = text.split_once('/').ok_or_else(|| {
        format!("{text:?} is not a pod: use NAMESPACE/NAME or NAMESPACE/LABEL=VALUE, and /NIC behind it")
    })?;
    if !is_label(namespace) {
        return Err(format!("{namespace:?} is not a valid namespace name"));
    }
    if text.len() > MAX_POD {
        return Err(format!("{text:?} has more than {MAX_POD} bytes"));
    }
    // The key of a label can contain a slash.
    let (which, nic) = match rest.rsplit_once('/') {
        Some((which, nic)) if !nic.contains('=') => (which, Some(device_name(nic)?)),
        _ => (rest, None),
    };
    let which = if which.contains('=') {
        Which::Labelled(which.split(',').map(label).collect::<Result<_, _>>()?)
    } else if is_subdomain(which) {
        Which::Named(which.to_owned())
    } else {
        return Err(format!("{which:?} is not a name of a pod"));
    };
    Ok(PodNic { namespace: namespace.to_owned(), which, nic })
}

/// Parses `KEY=VALUE`.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if is_key(key) && is_qualified(value) => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not a valid Kubernetes label")),
    }
}

/// Whether a text is the key of a label: a name, with an optional prefix of a DNS name and a slash.
pub fn is_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    prefix.is_none_or(is_subdomain) && is_qualified(name)
}

/// Whether a text is the name or the value of a label. Kubernetes allows empty values; in a target they would be a
/// mistake.
pub fn is_qualified(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    text.len() <= 63 && text.bytes().all(is_inner) && ends_with(text, |end| end.is_ascii_alphanumeric())
}

/// Whether a text is a DNS subdomain, as the names of pods and nodes are.
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Whether a text is a DNS label. A part of a pod's name can be longer than 63 bytes.
fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| is_inner(byte) || byte == b'-') && ends_with(text, is_inner)
}

/// Whether the first and the last byte of a text satisfy `is_end`.
fn ends_with(text: &str, is_end: impl Fn(u8) -> bool) -> bool {
    text.bytes().next().is_some_and(&is_end) && text.bytes().last().is_some_and(is_end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pod(namespace: &str, name: &str, nic: Option<&str>) -> Destination {
        let nic = nic.map(str::to_owned);
        let which = match name.split_once('=') {
            Some(_) => Which::Labelled(
                name.split(',')
                    .filter_map(|label| label.split_once('='))
                    .map(|(key, value)| (key.into(), value.into()))
                    .collect(),
            ),
            None => Which::Named(name.into()),
        };
        Destination::Pod(PodNic { namespace: namespace.into(), which, nic })
    }

    #[test]
    fn a_destination_is_a_device_a_pod_or_a_stream() {
        let parsed = |text: &str| text.parse::<Destination>();
        assert_eq!(parsed("ids0"), Ok(Destination::Device("ids0".into())));
        assert_eq!(parsed("pod"), Ok(Destination::Device("pod".into())));
        assert_eq!(parsed("stream"), Ok(Destination::Stream));
        assert_eq!(parsed("stream0"), Ok(Destination::Device("stream0".into())));
        assert_eq!(Destination::Stream.to_string(), "stream");
        assert_eq!(parsed("pod:security/suricata"), Ok(pod("security", "suricata", None)));
        assert_eq!(parsed("pod:security/ids-0.a/net1"), Ok(pod("security", "ids-0.a", Some("net1"))));
        assert_eq!(parsed("pod:security/app=ids"), Ok(pod("security", "app=ids", None)));
        let long = "app.kubernetes.io/name=Ids_0,tier=ids";
        assert_eq!(parsed(&format!("pod:security/{long}/net1")), Ok(pod("security", long, Some("net1"))));
    }

    #[test]
    fn an_error_has_the_part_that_is_wrong() {
        for (text, part) in [
            ("ids", "has no '='"),
            ("Ids=ids0", "\"Ids\""),
            ("ids=", "1 to 15 bytes"),
            ("ids=a-name-that-is-too-long", "1 to 15 bytes"),
            ("ids=pot:a/b", "\"pot\""),
            ("live=stream:4MiB", "\"stream:4MiB\""),
            ("ids=pod:suricata", "\"suricata\""),
            ("ids=pod:a/b/c/d", "\"b/c\" is not a name of a pod"),
            ("ids=pod:a/app=", "\"app=\" is not a valid Kubernetes label"),
            ("ids=pod:a/=b", "\"=b\" is not a valid Kubernetes label"),
            ("ids=pod:a/A.b/c=d", "is not a valid Kubernetes label"),
            ("ids=pod:a/app=b c", "is not a valid Kubernetes label"),
            ("ids=pod:a/app=b/c/d", "\"app=b/c\" is not a valid"),
            ("ids=pod:A/b", "\"A\""),
            ("ids=pod:/b", "\"\""),
            ("ids=pod:a/b_c", "\"b_c\""),
            ("ids=pod:a/b..c", "\"b..c\""),
            ("ids=pod:a/b=c,d", "\"d\" is not a valid Kubernetes label"),
            (&format!("ids=pod:a/{}", "b".repeat(500)), "more than 468 bytes"),
            ("ids=pod:a/b/", "1 to 15 bytes"),
            ("ids=pod:a/b/a b", "1 to 15 bytes"),
        ] {
            let error = parse_target(text).map_err(|error| error.contains(part));
            assert_eq!(error, Err(true), "{text}: {:?}", parse_target(text));
        }
    }

    proptest! {
        /// The text of a destination can be parsed again, so it can be stored in a map.
        #[test]
        fn the_text_can_be_read_back(
            device in "[a-z0-9._-]{3,15}", namespace in "[a-z0-9]{1,63}", name in "[a-z0-9]{1,80}([.-][a-z0-9]{1,80}){0,2}",
            label in "([a-z0-9]{1,60}([.][a-z0-9]{1,60}){0,2}/)?[a-zA-Z0-9]{1,31}([._-][a-zA-Z0-9]{1,31})?=[a-zA-Z0-9]{1,63}",
            nic in prop::option::of("[a-z0-9]{1,15}"),
        ) {
            prop_assume!(device != STREAM);
            let device = Destination::Device(device);
            prop_assert_eq!(device.to_string().parse(), Ok(device));
            let labels = format!("{label},tier=ids");
            for which in [name, label, labels] {
                let pod = pod(&namespace, &which, nic.as_deref());
                prop_assert_eq!(pod.to_string().parse(), Ok(pod));
            }
        }

        #[test]
        fn any_text_has_an_answer(text in "\\PC{0,40}") {
            let _ = parse_target(&text);
        }
    }
}
