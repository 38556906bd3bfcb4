//! Which pods are wanted, and what of their packets: annotations of the pod, then of its namespace, then the policy.
//!
//! Pure, and the only reader of annotations. It knows no device; [`select`](super::select) finds those.

use std::{collections::BTreeMap, fmt};

use super::{Filters, Policy, Skipped, Why};
pub use crate::annotations::{MIRROR, OVN_MIRROR, PREFIX};
use crate::{
    model::{Directions, Pod, PodId},
    settings::{KEYS, Settings},
};

/// A pod that is to be mirrored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Which of its packets.
    pub directions: Directions,
    /// What is done with them.
    pub settings: Settings,
    /// An annotation asks for it, and not the policy alone.
    pub is_asked: bool,
}

/// What the annotations and the policy say of all pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice<'a> {
    /// The pods that are to be mirrored.
    pub wanted: Vec<Wanted<'a>>,
    /// Those that ask for it in vain.
    pub refused: Vec<Skipped>,
    /// Annotations that made no sense.
    pub bad: Vec<BadAnnotation>,
}

/// Where an annotation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// On the pod itself.
    Pod,
    /// On its namespace.
    Namespace,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pod => "annotation",
            Self::Namespace => "annotation of its namespace",
        })
    }
}

/// An annotation whose value is none that we know. The pod is treated as if it did not stand there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BadAnnotation {
    /// The pod.
    pub pod: PodId,
    /// Where it stands.
    pub place: Place,
    /// The annotation.
    pub key: &'static str,
    /// Its value.
    pub value: String,
}

impl fmt::Display for BadAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, key, value, .. } = self;
        let known = if *key == MIRROR { "true, false, both, ingress or egress" } else { "true or false" };
        write!(f, "{place} {key}: {value:?} is not {known}, and is ignored")
    }
}

/// What is asked for by whom. The most specific annotation decides, key by key.
pub fn choose<'a>(pods: &'a [Pod], policy: &Policy, filters: &mut Filters) -> Choice<'a> {
    let mut choice = Choice::default();
    for pod in pods {
        match choose_pod(pod, policy, filters, &mut choice.bad) {
            Ok(None) => {}
            Ok(Some(wanted)) => choice.wanted.push(wanted),
            Err(why) => choice.refused.push(Skipped { pod: Some(pod.id.clone()), nic: None, why }),
        }
    }
    filters.forget_unused();
    choice
}

fn choose_pod<'a>(
    pod: &'a Pod,
    policy: &Policy,
    filters: &mut Filters,
    bad: &mut Vec<BadAnnotation>,
) -> Result<Option<Wanted<'a>>, Why> {
    let mut read = |place, key| match parse(of(pod, place).get(key)?, key) {
        Some(asked) => Some(asked),
        None => {
            let value = of(pod, place)[key].clone();
            bad.push(BadAnnotation { pod: pod.id.clone(), place, key, value });
            None
        }
    };
    let (ours, ovn) = (read(Place::Pod, MIRROR), read(Place::Pod, OVN_MIRROR));
    let inherited = read(Place::Namespace, MIRROR);
    let asked = ours.or(ovn).or(inherited);
    let default = policy.enable_mirror.then_some(Directions::Both);
    let is_asked = matches!(asked, Some(Some(_)));
    if policy.exclude_namespaces.contains(&pod.id.namespace) {
        return if is_asked { Err(Why::NamespaceExcluded) } else { Ok(None) };
    }
    if policy.allow_namespaces.as_ref().is_some_and(|allowed| !allowed.contains(&pod.id.namespace)) {
        // Nothing that a pod's author writes counts here, but that a pod is left out.
        return match (default, asked) {
            (_, Some(None)) | (None, None) => Ok(None),
            (None, Some(Some(_))) => Err(Why::NamespaceNotAllowed),
            (Some(directions), _) => {
                Ok(Some(Wanted { pod, directions, settings: policy.settings.clone(), is_asked }))
            }
        };
    }
    let Some(directions) = asked.unwrap_or(default) else { return Ok(None) };
    let settings = settings(pod, &policy.settings, filters)?;
    Ok(Some(Wanted { pod, directions, settings, is_asked }))
}

fn of(pod: &Pod, place: Place) -> &BTreeMap<String, String> {
    match place {
        Place::Pod => &pod.annotations,
        Place::Namespace => &pod.inherited,
    }
}

/// What a value asks for: `Some(None)` not to be mirrored, `None` nothing that we know.
fn parse(value: &str, key: &str) -> Option<Option<Directions>> {
    match (value, key) {
        ("true", _) | ("both", MIRROR) => Some(Some(Directions::Both)),
        ("false", _) => Some(None),
        ("ingress", MIRROR) => Some(Some(Directions::Ingress)),
        ("egress", MIRROR) => Some(Some(Directions::Egress)),
        _ => None,
    }
}

/// The node's settings with those of the pod's namespace, and over them those of the pod itself.
fn settings(pod: &Pod, defaults: &Settings, filters: &mut Filters) -> Result<Settings, Why> {
    let mut settings = defaults.clone();
    for key in KEYS {
        let annotation = format!("{PREFIX}{key}");
        let set = [Place::Pod, Place::Namespace]
            .into_iter()
            .find_map(|place| Some((place, of(pod, place).get(&annotation)?)));
        if let Some((place, value)) = set {
            let set = settings.set_with(key, value, |text| filters.get(text));
            set.map_err(|error| Why::BadSetting(place, error))?;
        }
    }
    Ok(settings)
}

#[cfg(test)]
mod tests;
