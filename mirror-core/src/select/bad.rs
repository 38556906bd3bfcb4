//! [`BadAnnotation`]: an annotation that is ignored, and why.
//!
//! Data and texts. `choose` finds it; the log, `status` and the Events show it.

use std::fmt;

use super::{MIRROR, OVN_MIRROR};
use crate::{
    annotations::{OVN_ATTACHMENT, POD_SIDE_TAPS},
    model::{Place, PodId},
    settings::SETTINGS,
};

/// An annotation that is ignored.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BadAnnotation {
    /// The pod.
    pub pod: PodId,
    /// The object with the annotation.
    pub place: Place,
    /// The key of the annotation.
    pub key: String,
    /// The value of the annotation.
    pub value: String,
    /// The problem.
    pub problem: Problem,
}

impl BadAnnotation {
    /// The reason in one word.
    pub const REASON: &str = "BadAnnotation";
    /// How to resolve it.
    pub const REMEDY: &str = "Correct the annotation, or remove it.";
}

/// The problem of an annotation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// The value is invalid.
    Value,
    /// The key is unknown.
    Key,
    /// The suffix after the dot is not a valid name of a mirror, for this reason.
    Name(String),
    /// The annotation configures a mirror that neither the pod nor its namespace requests.
    NoMirror,
    /// The annotation has an entry about a NIC that is impossible or cannot be read, for this reason.
    Networks(String),
}

impl fmt::Display for BadAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, key, value, problem, .. } = self;
        write!(f, "{place} {key}: ")?;
        match problem {
            Problem::Value if key == OVN_MIRROR || key.ends_with(OVN_ATTACHMENT) => {
                write!(f, "{value:?} is not true or false")?;
            }
            Problem::Value if key == POD_SIDE_TAPS => write!(f, "{value:?} is not auto or off")?,
            Problem::Value => write!(f, "{value:?} is not true, false, both, ingress or egress")?,
            Problem::Key => write!(
                f,
                "there is no such annotation; those of a mirror are mirror, target, nics, {}",
                SETTINGS.each_ref().map(|setting| setting.key).join(", ")
            )?,
            Problem::Name(error) | Problem::Networks(error) => f.write_str(error)?,
            Problem::NoMirror => {
                let name = key.split_once('.').and_then(|(_, rest)| rest.split_once('.'));
                let name = name.map_or("", |(_, name)| name);
                write!(f, "{MIRROR}.{name} is missing, so there is no mirror {name}")?;
            }
        }
        write!(f, "; it is ignored")
    }
}
