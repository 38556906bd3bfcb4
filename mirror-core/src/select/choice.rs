//! The wanted pods and their packets, as requested by Mirrors, ClusterMirrors and annotations. An annotation of the pod
//! wins over one of its namespace, which wins over the policy.
//!
//! Pure, and the only reader of annotations. Devices are unknown here; [`select`](super::select) finds them.
//! [`resources`](super::resources) parses the Mirrors and ClusterMirrors.
//!
//! A pod has any number of mirrors. The keys without a name belong to the mirror `default`; `podmirror.io/mirror.ids`,
//! `podmirror.io/filter.ids` and so on belong to the mirror `ids`. Each mirror is decided on its own, so the settings
//! of one mirror never change another.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::abi::MAX_SESSIONS_PER_TAP;

use super::{
    BadAnnotation, Capture, Filters, Nics, Policy, Problem, Selected, Skipped, Why,
    attachments::Attachments,
    resources::{Author, Draft, InQueue, Read, Resources, rank},
};
pub use crate::annotations::{MIRROR, NICS, OVN_MIRROR, PREFIX};
use crate::{
    annotations::{NETWORK_STATUS, POD_SIDE_TAPS, POD_SIDE_TAPS_WORDS},
    model::{Directions, MirrorId, Name, Origin, Place, Pod, PodId, Resource, Session},
    settings::{FILTER, SETTINGS, Setting, SettingError},
};

/// Annotation of a pod in a file: its network namespace. The pod source reads it.
const NETNS: &str = "netns";

/// A pod to mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The pod's mirrors; at least one, and at most [`MAX_SESSIONS_PER_TAP`].
    pub mirrors: BTreeMap<MirrorId, Session>,
    /// The NICs of each mirror that does not request all NICs.
    pub nics: BTreeMap<MirrorId, Nics>,
    /// Whether an annotation or a Mirror requests one of the mirrors, not only the policy or ClusterMirrors.
    pub is_asked: bool,
}

impl Wanted<'_> {
    /// The mirrors of one NIC. `former`: the NIC's original name, if it was renamed.
    pub(super) fn mirrors_of(&self, nic: &str, former: Option<&str>) -> BTreeMap<MirrorId, Session> {
        let is_for = |mirror| {
            let Some(nics) = self.nics.get(mirror) else { return true };
            nics.has(former.unwrap_or(nic)) || nics.has(nic) && nics.named().any(|name| name == nic)
        };
        let mirrors = self.mirrors.iter().filter(|(mirror, _)| is_for(mirror));
        mirrors.map(|(mirror, session)| (mirror.clone(), session.clone())).collect()
    }

    /// The NICs that mirrors name.
    pub(super) fn named_nics(&self) -> impl Iterator<Item = (&MirrorId, &str)> {
        self.nics.iter().flat_map(|(mirror, nics)| nics.named().map(move |name| (mirror, name)))
    }

    /// The NICs that must exist, each with a mirror that copies it: those that the mirror names, or else those in the
    /// annotation of Multus.
    pub fn expected_nics(&self) -> impl Iterator<Item = (&MirrorId, &str)> {
        let of_networks = self.mirrors.keys().flat_map(move |mirror| {
            let of = self.nics.get(mirror);
            let is_for = move |nic: &&str| of.is_none_or(|of| of.named().next().is_none() && of.has(nic));
            self.pod.networks.iter().map(|(nic, _)| nic).filter(is_for).map(move |nic| (mirror, nic))
        });
        self.named_nics().chain(of_networks)
    }
}

/// The result for all pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice<'a> {
    /// The pods to mirror. Those that only captures want come last, and those of readers of the API after all others.
    pub wanted: Vec<Wanted<'a>>,
    /// The mirrors whose request is refused.
    pub refused: Vec<Skipped>,
    /// Pods without a requested mirror, and why. A capture can still select them.
    pub unasked: BTreeMap<&'a PodId, Why>,
    /// Pods that readers of the API cannot read, and why.
    pub barred: Vec<(&'a Pod, Why)>,
    /// Invalid annotations.
    pub bad: Vec<BadAnnotation>,
    /// The resources that select one of the pods, in the order of their ids.
    pub selected: Vec<Selected>,
}

/// Returns the mirrors of all pods, with the origin of each. Among annotations the most specific one wins, key by key.
/// Captures come after all other mirrors: those of root, and then those of readers of the API.
///
/// First the mirrors of a pod get their session slots, then the filters of those mirrors are compiled. If very many
/// filters are new, [`Filters::is_behind`] reports that the choice is incomplete, and the caller must call again.
pub fn choose<'a>(
    pods: &'a [Pod],
    resources: &[Resource],
    captures: &[Capture],
    policy: &Policy,
    filters: &mut Filters,
) -> Choice<'a> {
    let mut choice = Choice::default();
    let mut resources = Resources::read(resources, captures, policy);
    filters.begin();
    for pod in pods {
        let selecting = resources.selecting(pod, policy);
        PodChoice { pod, policy, filters, choice: &mut choice }.choose(&selecting);
    }
    choice.selected = resources.into_selected(filters);
    filters.forget_unused();
    for capture in captures {
        choice.refused.extend(capture.choose(pods, policy, &mut choice.wanted));
    }
    // The first pod that claims a device gets it: first those with mirrors, then those of root.
    choice.wanted.sort_by_key(|wanted| {
        let first = wanted.mirrors.values().map(|session| session.origin).min();
        first.filter(|origin| *origin >= Origin::Capture)
    });
    choice
}

/// A request for a mirror by annotations, or by the policy.
#[derive(Debug)]
struct Asked {
    origin: Origin,
    mirror: MirrorId,
    directions: Directions,
    nics: Nics,
}

/// A mirror of a pod that waits for a session slot, or the reason why it cannot have one.
type Queued<'t> = (InQueue, Result<Draft<'t>, Why>);

/// The annotations of one object, by mirror.
type Said<'a> = BTreeMap<MirrorId, BTreeMap<&'a str, &'a str>>;

/// The state of the decision about one pod.
struct PodChoice<'c, 'a> {
    pod: &'a Pod,
    policy: &'c Policy,
    filters: &'c mut Filters,
    choice: &'c mut Choice<'a>,
}

impl<'a> PodChoice<'_, 'a> {
    fn choose(mut self, selecting: &[&Read<'_>]) {
        // `narrowed`: why resources that are not enforced exclude the pod.
        let (annotated, narrowed) = match &self.pod.unread {
            Some(problem) if self.policy.annotations => {
                let why = Why::AnnotationsUnread(problem.clone());
                self.refuse(None, why.clone());
                (Vec::new(), Some(why))
            }
            _ => {
                // A capture is not a mirror of the pod.
                let is_capture = |resource: &&Read<'_>| resource.place().0 == rank(Origin::Capture);
                self.annotated(selecting.iter().all(is_capture))
            }
        };
        let barred = self.policy.bars(&self.pod.id.namespace).or_else(|| narrowed.clone());
        self.choice.barred.extend(barred.map(|why| (self.pod, why)));
        let mut queue = Vec::new();
        for resource in selecting {
            queue.push((resource.place(), resource.draft(self.pod, self.policy, narrowed.as_ref())));
        }
        queue.extend(annotated);
        queue.sort_by(|(a, _), (b, _)| a.cmp(b));
        let (mut mirrors, mut nics) = (BTreeMap::new(), BTreeMap::new());
        let (mut is_asked, mut places) = (false, 0);
        for ((_, _, mirror), draft) in queue {
            // A mirror with an invalid filter keeps its slot. So a pod never compiles more filters than it has slots.
            let placed = draft.and_then(|draft| match places {
                MAX_SESSIONS_PER_TAP => Err(Why::TooManyMirrors),
                _ => {
                    places += 1;
                    Ok(draft)
                }
            });
            match placed.and_then(|draft| draft.compiled(self.filters)) {
                Ok((session, of)) => {
                    is_asked |= matches!(session.origin, Origin::Annotation(_) | Origin::Mirror);
                    nics.extend((of != Nics::default()).then(|| (mirror.clone(), of)));
                    mirrors.insert(mirror, session);
                }
                Err(why) => self.refuse(Some(mirror), why),
            }
        }
        if !mirrors.is_empty() {
            if let Some(problem) = self.pod.networks.problem() {
                let problem = Problem::Networks(problem.to_owned());
                self.bad(Place::Pod, NETWORK_STATUS.to_owned(), "", problem);
            }
            self.choice.wanted.push(Wanted { pod: self.pod, mirrors, nics, is_asked });
        }
    }

    /// Returns the mirrors that annotations and the policy request. Also returns the reason if annotations exclude
    /// the pod from all mirrors that annotations can narrow. `is_unasked`: no resource selects the pod.
    fn annotated(&mut self, is_unasked: bool) -> (Vec<Queued<'a>>, Option<Why>) {
        let (mut own, mut inherited) = (Said::new(), Said::new());
        if self.policy.annotations {
            (own, inherited) = (self.read(Place::Pod), self.read(Place::Namespace));
            self.tell_strays(&own, &inherited);
        }
        let (mut unasked, mut opted_out) = (is_unasked.then_some(Why::NoRequest), None);
        let mut queue = Vec::new();
        for mirror in mirrors(&own, &inherited) {
            match self.asked(mirror.clone(), &own, &inherited) {
                Ok(asked) => {
                    unasked = None;
                    let place = (rank(asked.origin), 0, mirror);
                    queue.push((place, self.draft(asked, &own, &inherited)));
                }
                Err(Some(why)) => {
                    if mirror.0.is_default() && matches!(why, Why::OptedOut(_)) {
                        opted_out = Some(why.clone());
                    }
                    unasked = unasked.map(|other| other.max(why));
                }
                Err(None) => unasked = None,
            }
        }
        if let Some(why) = unasked {
            self.choice.unasked.insert(&self.pod.id, why);
        }
        (queue, opted_out)
    }

    /// Returns the request for a mirror, or why there is none. `None`: it is refused, and the refusal is recorded.
    fn asked(
        &mut self,
        mirror: MirrorId,
        own: &Said<'a>,
        inherited: &Said<'a>,
    ) -> Result<Asked, Option<Why>> {
        let mut word = |place, said: &Said<'a>| {
            let value = said.get(&mirror)?.get("mirror")?;
            let directions = parse(value);
            if directions.is_none() {
                self.bad(place, key_of("mirror", &mirror), value, Problem::Value);
            }
            directions
        };
        let (ours, theirs) = (word(Place::Pod, own), word(Place::Namespace, inherited));
        let is_default = mirror.0.is_default();
        let has_ovn = is_default && self.policy.annotations && self.policy.kube_ovn_annotations;
        let (ovn, attachments) = if has_ovn { self.ovn() } else { Default::default() };
        let attachments = if ours.is_none() { attachments } else { Attachments::default() };
        let at = |place| move |directions| (directions, place);
        let mut asked = ours.or(ovn).map(at(Place::Pod)).or(theirs.map(at(Place::Namespace)));
        let default = (is_default && self.policy.enable_mirror).then_some((Directions::Both, Origin::Policy));
        let is_allowed = self.is_allowed();

        let is_for_all = matches!(asked, Some((Some(_), _))) || asked.is_none() && default.is_some();
        let mut nics = Nics::all_but(attachments.left_out);
        // Where annotations are not accepted, those of attachments cannot cancel the exclusion of the pod.
        if !is_for_all && !attachments.wanted.is_empty() && (is_allowed || asked.is_none()) {
            asked = Some((Some(Directions::Both), Place::Pod));
            nics = Nics::only(attachments.wanted);
        }
        if self.policy.exclude_namespaces.contains(&self.pod.id.namespace) {
            return Err(match asked {
                Some((Some(_), _)) => {
                    self.refuse(Some(mirror), Why::NamespaceExcluded);
                    None
                }
                _ => Some(Why::NamespaceExcluded),
            });
        }
        // If the whole pod is mirrored, a NIC of that network is mirrored too.
        let is_missing = is_allowed && !is_for_all && !attachments.missing.is_empty();
        for key in attachments.missing.into_iter().filter(|_| is_missing) {
            let (key, is_told) = (key.to_owned(), self.pod.networks.is_told());
            self.refuse(None, Why::NoSuchNetwork { key, is_told });
        }
        let (directions, origin) = match (asked, default) {
            (Some((None, place)), _) => return Err(Some(Why::OptedOut(place))),
            (Some((Some(directions), place)), _) if is_allowed => (directions, Origin::Annotation(place)),
            // Annotations of the pod are not accepted here, except to exclude the pod.
            (_, Some(default)) => default,
            (Some(_), None) => {
                self.refuse(Some(mirror), Why::NamespaceNotAllowed);
                return Err(None);
            }
            (None, None) if is_missing => return Err(None),
            (None, None) if is_allowed => return Err(Some(Why::NoRequest)),
            (None, None) => return Err(Some(Why::NamespaceNotAllowed)),
        };
        Ok(Asked { origin, mirror, directions, nics })
    }

    /// Whether the annotations of the pod and of its namespace are accepted.
    fn is_allowed(&self) -> bool {
        let allowed = self.policy.allow_namespaces.as_ref();
        allowed.is_none_or(|allowed| allowed.contains(&self.pod.id.namespace))
    }

    /// Builds a wanted mirror.
    fn draft(&self, asked: Asked, own: &Said<'a>, inherited: &Said<'a>) -> Result<Draft<'a>, Why> {
        let Asked { origin, mirror, directions, mut nics } = asked;
        let mut settings = self.policy.settings.clone();
        let is_allowed = self.is_allowed();
        let said = |key| {
            let places =
                [(Place::Pod, own), (Place::Namespace, inherited)].into_iter().filter(|_| is_allowed);
            places.filter_map(|(place, said)| Some((place, *said.get(&mirror)?.get(key)?))).next()
        };
        let keys = SETTINGS.iter().map(|setting| setting.key);
        for key in keys.clone().filter(|key| *key != FILTER) {
            if let Some((place, value)) = said(key) {
                settings.set(key, value).map_err(|error| Why::BadSetting(place, error))?;
            }
        }
        let target = self.policy.target_named(said("target").map(|(_, name)| name))?;
        self.policy.may_use(&target, self.pod)?;
        if let Some((place, value)) = said("nics") {
            let bad = |reason| SettingError { key: "nics", value: value.to_owned(), reason };
            let named = Nics::parse(value).map_err(|reason| Why::BadSetting(place, bad(reason)))?;
            nics = match place {
                Place::Pod => named,
                Place::Namespace => nics.or(named),
            };
        }
        let filter = said(FILTER).map(|(place, text)| (text, Author::Annotation(place)));
        let asked = match origin {
            // Its author's settings are the node's flags.
            Origin::Policy => 0,
            _ => {
                let written = keys.chain(["target"]);
                Session::asked(directions, written.filter_map(|key| Some((key, said(key)?.1))))
            }
        };
        let session = Session { directions, settings, target, origin, asked, key: None };
        Ok(Draft { session, nics, filter })
    }

    /// Reads podmirror's annotations of one object. Invalid ones are recorded as bad.
    fn read(&mut self, place: Place) -> Said<'a> {
        let mut said = Said::new();
        for (key, value) in ours(self.pod, place) {
            let Some(rest) = key.strip_prefix(PREFIX) else { continue };
            let (word, name) = match rest.split_once('.') {
                Some((word, name)) => (word, Some(name)),
                None => (rest, None),
            };
            if word == NETNS && name.is_none() {
                continue;
            }
            if key == POD_SIDE_TAPS {
                if !POD_SIDE_TAPS_WORDS.contains(&value) {
                    self.bad(place, key.to_owned(), value, Problem::Value);
                }
                continue;
            }
            if !["mirror", "target", "nics"].contains(&word) && Setting::named(word).is_none() {
                self.bad(place, key.to_owned(), value, Problem::Key);
                continue;
            }
            let mirror = match name.map(str::parse::<Name>) {
                None => MirrorId::default(),
                Some(Ok(name)) if !name.is_default() => MirrorId(name),
                Some(Ok(name)) => {
                    let problem = format!("the mirror {name} has keys without a name, as in {PREFIX}{word}");
                    self.bad(place, key.to_owned(), value, Problem::Name(problem));
                    continue;
                }
                Some(Err(error)) => {
                    self.bad(place, key.to_owned(), value, Problem::Name(error));
                    continue;
                }
            };
            said.entry(mirror).or_default().insert(word, value);
        }
        said
    }

    /// Reports settings of named mirrors that are not requested, because the name could be mistyped.
    fn tell_strays(&mut self, own: &Said<'a>, inherited: &Said<'a>) {
        for (mirror, words) in own.iter().filter(|(mirror, _)| !mirror.0.is_default()) {
            let is_there =
                |said: &Said<'a>| said.get(mirror).is_some_and(|words| words.contains_key("mirror"));
            if !is_there(own) && !is_there(inherited) {
                for (word, value) in words {
                    self.bad(Place::Pod, key_of(word, mirror), value, Problem::NoMirror);
                }
            }
        }
    }

    /// Reads the annotations of Kube-OVN: for the whole pod, and for single attachments.
    fn ovn(&mut self) -> (Option<Option<Directions>>, Attachments<'a>) {
        let pod = self.pod;
        let mut attachments = Attachments::of(pod);
        for (key, value, problem) in attachments.bad.drain(..) {
            self.bad(Place::Pod, key.to_owned(), value, problem);
        }
        let whole = pod.annotations.get(OVN_MIRROR).and_then(|value| match value.as_str() {
            "true" => Some(Some(Directions::Both)),
            "false" => Some(None),
            _ => {
                self.bad(Place::Pod, OVN_MIRROR.to_owned(), value, Problem::Value);
                None
            }
        });
        (whole, attachments)
    }

    fn bad(&mut self, place: Place, key: String, value: &str, problem: Problem) {
        let pod = self.pod.id.clone();
        self.choice.bad.push(BadAnnotation { pod, place, key, value: value.to_owned(), problem });
    }

    fn refuse(&mut self, mirror: Option<MirrorId>, why: Why) {
        let pod = Some(self.pod.id.clone());
        // A message does not name the mirror `default`.
        let mirror = mirror.filter(|mirror| !mirror.0.is_default());
        self.choice.refused.push(Skipped { pod, nic: None, mirror, why });
    }
}

/// Every mirror with an annotation, and the mirror `default`, which the policy can request.
fn mirrors(own: &Said<'_>, inherited: &Said<'_>) -> BTreeSet<MirrorId> {
    let said = own.keys().chain(inherited.keys()).cloned();
    said.chain([MirrorId::default()]).collect()
}

/// Podmirror's annotations at `place`.
fn ours(pod: &Pod, place: Place) -> impl Iterator<Item = (&str, &str)> {
    let annotations = match place {
        Place::Pod => &pod.annotations,
        Place::Namespace => &*pod.inherited,
    };
    let ours = annotations.range(PREFIX.to_owned()..).take_while(|(key, _)| key.starts_with(PREFIX));
    ours.map(|(key, value)| (key.as_str(), value.as_str()))
}

/// The key of the annotation `word` of a mirror.
fn key_of(word: &str, mirror: &MirrorId) -> String {
    if mirror.0.is_default() { format!("{PREFIX}{word}") } else { format!("{PREFIX}{word}.{mirror}") }
}

/// Parses the value of [`MIRROR`]. `Some(None)`: the pod must not be mirrored. `None`: the value is invalid.
fn parse(value: &str) -> Option<Option<Directions>> {
    match value {
        "true" => Some(Some(Directions::Both)),
        "false" => Some(None),
        _ => Directions::from_name(value).map(Some),
    }
}

#[cfg(test)]
mod tests;
