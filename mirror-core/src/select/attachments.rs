//! Kube-OVN's annotations for single attachments of a pod, `<name>.<namespace>.ovn.kubernetes.io/mirror`.
//!
//! Pure, called by `choice`. Kube-OVN gives each attachment of a pod a port of its own, and this annotation mirrors
//! only that port. An attachment has the name of its NetworkAttachmentDefinition. The annotation of Multus has the
//! NIC of the network with this name ([`Networks`](crate::networks::Networks)).

use std::collections::BTreeSet;

use super::Problem;
use crate::{annotations::OVN_ATTACHMENT, model::Pod};

/// The result of the attachments' annotations for the NICs of a pod.
#[derive(Debug, Default)]
pub(super) struct Attachments<'a> {
    /// The NICs to mirror.
    pub(super) wanted: BTreeSet<String>,
    /// The NICs that must not be mirrored.
    pub(super) left_out: BTreeSet<String>,
    /// The keys of the annotations that request a network without a NIC.
    pub(super) missing: Vec<&'a str>,
    /// The keys and values of invalid annotations.
    pub(super) bad: Vec<(&'a str, &'a str, Problem)>,
}

impl<'a> Attachments<'a> {
    /// Reads the annotations of a pod.
    pub(super) fn of(pod: &'a Pod) -> Self {
        let mut found = Self::default();
        for (key, value) in &pod.annotations {
            let Some(attachment) = key.strip_suffix(OVN_ATTACHMENT) else { continue };
            // A name can contain dots, a namespace cannot.
            let Some((name, namespace)) = attachment.rsplit_once('.') else {
                let name = format!(
                    "use NAME.NAMESPACE{OVN_ATTACHMENT}, with the name and the namespace of a \
                     NetworkAttachmentDefinition"
                );
                found.bad.push((key, value, Problem::Name(name)));
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
                "true" if nics.is_empty() => found.missing.push(key),
                "true" => found.wanted.extend(nics),
                "false" => found.left_out.extend(nics),
                _ => found.bad.push((key, value, Problem::Value)),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests;
