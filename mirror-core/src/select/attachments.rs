//! Kube-OVN's annotations for single attachments of a pod, `<name>.<namespace>.ovn.kubernetes.io/mirror`.
//!
//! Pure, called by `choice`. Kube-OVN gives each attachment of a pod a port of its own, and this annotation mirrors
//! only that port. An attachment has the name of its NetworkAttachmentDefinition, as has the network in the annotation
//! of Multus ([`Networks`](crate::networks::Networks)), which contains the NIC.

use std::{collections::BTreeSet, fmt};

use crate::{
    annotations::{NETWORK_STATUS, OVN_ATTACHMENT},
    model::Pod,
};

/// A network that an annotation of Kube-OVN names, but that no NIC of the pod is in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// The key of the annotation.
    pub key: String,
    /// Whether the pod has Multus' annotation with the networks of its NICs.
    pub is_told: bool,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, is_told } = self;
        if *is_told {
            write!(
                f,
                "{key} requests the NICs of a network that {NETWORK_STATUS} lists for no NIC of the pod"
            )
        } else {
            write!(
                f,
                "{key} requests the NICs of a network, but the pod has no annotation {NETWORK_STATUS} yet, which \
                 says the network of each NIC"
            )
        }
    }
}

/// The result of the attachments' annotations for the NICs of a pod.
#[derive(Debug, Default)]
pub(super) struct Attachments<'a> {
    /// The NICs to mirror.
    pub(super) wanted: BTreeSet<String>,
    /// The NICs that must not be mirrored.
    pub(super) left_out: BTreeSet<String>,
    /// The annotations that request a network without a NIC.
    pub(super) missing: Vec<Attachment>,
    /// The invalid keys and values.
    pub(super) bad: Vec<(&'a str, &'a str, Bad)>,
}

/// The problem of an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bad {
    /// The value is neither `true` nor `false`.
    Value,
    /// The key does not name an attachment.
    Key,
}

impl<'a> Attachments<'a> {
    /// Reads the annotations of a pod.
    pub(super) fn of(pod: &'a Pod) -> Self {
        let mut found = Self::default();
        for (key, value) in &pod.annotations {
            let Some(attachment) = key.strip_suffix(OVN_ATTACHMENT) else { continue };
            // A name can contain dots, a namespace cannot.
            let Some((name, namespace)) = attachment.rsplit_once('.') else {
                found.bad.push((key, value, Bad::Key));
                continue;
            };
            let is_in = |network: &str| match network.split_once('/') {
                Some(of) => of == (namespace, name),
                // As in the annotation that requests networks from Multus, a name without a namespace is in the pod's
                // namespace.
                None => network == name && namespace == pod.id.namespace,
            };
            let nics = pod.networks.iter().filter(|(_, network)| is_in(network));
            let nics: Vec<_> = nics.map(|(nic, _)| nic.to_owned()).collect();
            match value.as_str() {
                "true" if nics.is_empty() => {
                    found.missing.push(Attachment { key: key.clone(), is_told: pod.networks.is_told() });
                }
                "true" => found.wanted.extend(nics),
                "false" => found.left_out.extend(nics),
                _ => found.bad.push((key, value, Bad::Value)),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests;
